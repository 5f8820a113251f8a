//! Parses request bodies: limits are checked before parsing, and errors quote few characters.

use paceline_text::replace_lone_surrogates;
use serde_json::{Map, Value};

use crate::limits::ApiLimits;
use crate::rejection::Rejection;

/// Parses `body` as an object.
///
/// Depth and values are counted on the bytes first: parsed values take up to a hundred times the
/// memory of a short text. Escapes of lone surrogates are read as U+FFFD.
pub(crate) fn parse(body: &[u8], limits: &ApiLimits) -> Result<Map<String, Value>, Rejection> {
    check_size(body, limits)?;
    let body = replace_lone_surrogates(body);
    let value: Value = serde_json::from_slice(&body).map_err(|error| Rejection::NotJson {
        reason: error.to_string(),
    })?;
    match value {
        Value::Object(object) => Ok(object),
        other => Err(Rejection::NotObject { got: show(&other) }),
    }
}

fn check_size(body: &[u8], limits: &ApiLimits) -> Result<(), Rejection> {
    let (mut depth, mut values, mut in_string, mut is_escaped) = (0usize, 1usize, false, false);
    for byte in body {
        if in_string {
            in_string = is_escaped || *byte != b'"';
            is_escaped = !is_escaped && *byte == b'\\';
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                values += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' | b':' => values += 1,
            _ => {}
        }
        if depth > limits.json_depth {
            let limit = limits.json_depth;
            return Err(Rejection::TooDeep { limit });
        }
    }
    if values > limits.json_values {
        let limit = limits.json_values;
        return Err(Rejection::TooManyValues { limit });
    }
    Ok(())
}

/// A value for an error message: short ones verbatim, others by type.
pub(crate) fn show(value: &Value) -> String {
    const SHORT: usize = 60;
    let named = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => return value.to_string(),
        Value::String(text) => {
            // Checked before escaping: a body may be one long string.
            if text.len() <= SHORT {
                return format!("{text:?}");
            }
            "a text"
        }
        Value::Array(items) if items.is_empty() => return "[]".to_owned(),
        Value::Object(map) if map.is_empty() => return "{}".to_owned(),
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    named.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_bounded_before_they_are_parsed() {
        let limits = ApiLimits {
            json_depth: 3,
            json_values: 10,
            ..ApiLimits::default()
        };
        for (body, expected) in [
            ("{}", "ok"),
            (r#"{"a":[[1]]}"#, "ok"),
            (r#"{"a":[[[]]]}"#, "TooDeep"),
            ("[[[[[[[[[[[[", "TooDeep"),
            (r#"{"a":"[[[[[[,,,,,,,,,,,,,,,"}"#, "ok"),
            (r#"{"a":"\"[[[[[["}"#, "ok"),
            (r#"{"a":"\\","b":[[[[1]]]]}"#, "TooDeep"),
            (r#"{"a":[1,2,3,4,5,6]}"#, "ok"),
            (r#"{"a":[1,2,3,4,5,6,7,8]}"#, "TooManyValues"),
            ("", "NotJson"),
            ("nonsense", "NotJson"),
            ("{} {}", "NotJson"),
            (r#"{"a":1e999}"#, "NotJson"),
            (r#"{"a":"\ud800"}"#, "ok"),
            ("]]]]", "NotJson"),
            ("[]", "NotObject"),
            ("null", "NotObject"),
            ("\"text\"", "NotObject"),
        ] {
            let got = match parse(body.as_bytes(), &limits) {
                Ok(_) => "ok".to_owned(),
                Err(error) => format!("{error:?}"),
            };
            assert!(got.starts_with(expected), "{body}: {got}");
        }
        let got = parse(b"{\"a\":\"\xff\"}", &limits);
        assert!(matches!(got, Err(Rejection::NotJson { .. })));
    }

    #[test]
    fn values_are_shown_in_few_characters() {
        for (value, expected) in [
            (serde_json::json!(null), "null"),
            (serde_json::json!(1.5), "1.5"),
            (serde_json::json!("a\n"), r#""a\n""#),
            (serde_json::json!("x".repeat(61)), "a text"),
            (serde_json::json!([]), "[]"),
            (serde_json::json!([1]), "an array"),
            (serde_json::json!({"a": 1}), "an object"),
        ] {
            assert_eq!(show(&value), expected);
        }
    }
}
