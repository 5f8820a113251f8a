//! Schemas of request bodies.

use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::field::{Field, object_schema};
use crate::model::ServedModel;
use crate::request::fields::{CHAT, COMPLETION, MESSAGE};

pub(super) fn schemas(config: &Config, model: &ServedModel) -> Map<String, Value> {
    let limits = &config.limits;
    let vocab = model.vocab();
    let mut names = vec![&model.id];
    names.extend(&model.aliases);
    let mut chat = object_schema(CHAT);
    let mut completion = object_schema(COMPLETION);
    for request in [&mut chat, &mut completion] {
        request["properties"]["model"]["enum"] = json!(names);
        crate::field::allow_null(&mut request["properties"]["model"]);
    }
    chat["allOf"] = json!([
        needs("top_logprobs", "logprobs"),
        needs("stream_options", "stream"),
        {"not": {"required": ["max_tokens", "max_completion_tokens"]}},
    ]);
    narrow_tools(&mut chat, model);
    completion["allOf"] = json!([needs("stream_options", "stream"),]);
    let messages = json!({
        "type": "array",
        "items": {"anyOf": messages()},
        "minItems": 1,
        "maxItems": limits.messages,
    });
    let choices = json!({"type": "integer", "minimum": 1, "maximum": limits.choices});
    let token =
        json!({"type": "string", "pattern": format!("^({})$", up_to(vocab.saturating_sub(1)))});
    Map::from_iter([
        ("ChatRequest".to_owned(), chat),
        ("CompletionRequest".to_owned(), completion),
        ("Messages".to_owned(), messages),
        ("Prompt".to_owned(), prompt(limits.prompts, model)),
        ("Choices".to_owned(), choices),
        ("TokenId".to_owned(), token),
    ])
}

/// Requires empty `tools` for models without tool calls.
pub(super) fn narrow_tools(request: &mut Value, model: &ServedModel) {
    if !model.has_calls() {
        request["properties"]["tools"] = json!({"enum": [[], null]});
        request["properties"]["tool_choice"] = json!({"enum": ["auto", "none", null]});
    }
}

/// Requires `other: true` with `field`.
fn needs(field: &str, other: &str) -> Value {
    json!({
        "if": {"required": [field], "properties": {field: {"not": {"type": "null"}}}},
        "then": {"required": [other], "properties": {other: {"const": true}}},
    })
}

fn prompt(most: usize, model: &ServedModel) -> Value {
    let text = json!({"type": "string", "minLength": 1});
    let id = json!({"type": "integer", "minimum": 0, "maximum": model.vocab().saturating_sub(1)});
    let most_ids = model.context.saturating_sub(1);
    let ids = json!({"type": "array", "items": id, "minItems": 1, "maxItems": most_ids});
    let list =
        |items: &Value| json!({"type": "array", "items": items, "minItems": 1, "maxItems": most});
    json!({"anyOf": [text, list(&text), ids, list(&ids)]})
}

/// Message fields by role. Without `tool_calls` or `tool_call_id`, the role may not have it.
fn messages() -> Vec<Value> {
    let of = |roles: &[&str], without: &[&str], required: &[&str]| {
        let schema = |field: &Field| match without.contains(&field.name) {
            true => json!({"type": "null"}),
            false => field.schema(),
        };
        let mut properties: Map<String, Value> = MESSAGE
            .iter()
            .map(|field| (field.name.to_owned(), schema(field)))
            .collect();
        properties.insert("role".into(), json!({"type": "string", "enum": roles}));
        for name in required.iter().filter(|name| **name != "role") {
            properties.get_mut(*name).into_iter().for_each(forbid_null);
        }
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            // Noted and passed over.
            "additionalProperties": true,
        })
    };
    vec![
        of(
            &["system", "developer", "user"],
            &["tool_calls", "tool_call_id"],
            &["role", "content"],
        ),
        // Clients send assistant messages without text back unchanged.
        of(&["assistant"], &["tool_call_id"], &["role"]),
        of(&["tool"], &["tool_calls"], &["role", "content"]),
    ]
}

/// Removes `null` from the types of a required field.
fn forbid_null(schema: &mut Value) {
    if let Some(Value::Array(kinds)) = schema.get_mut("anyOf") {
        kinds.retain(|kind| kind["type"] != "null");
    }
    if let Some(Value::Array(kinds)) = schema.get_mut("type") {
        kinds.retain(|kind| kind != "null");
    }
}

/// A regular expression for the integers from 0 to `most`, in digits without leading zeros.
fn up_to(most: u32) -> String {
    let digits = most.to_string();
    let more = |n: usize| match n {
        0 => String::new(),
        n => format!("[0-9]{{{n}}}"),
    };
    let shorter = (1..digits.len()).map(|len| format!("[1-9]{}", more(len - 1)));
    // Of equal length: equal up to one smaller digit.
    let smaller = digits.char_indices().filter_map(|(i, digit)| {
        let least = if i == 0 { '1' } else { '0' };
        let below = char::from(digit as u8 - 1);
        let rest = more(digits.len() - i - 1);
        (digit > least).then(|| format!("{}[{least}-{below}]{rest}", &digits[..i]))
    });
    let zero = (most > 0).then(|| "0".to_owned());
    let all = zero
        .into_iter()
        .chain(shorter)
        .chain(smaller)
        .chain([digits.clone()]);
    all.collect::<Vec<_>>().join("|")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the pattern, of the few forms that `up_to` writes, matches all of `text`.
    fn matches(pattern: &str, text: &str) -> bool {
        pattern.split('|').any(|alternative| {
            let (mut sets, mut rest) = (Vec::new(), alternative);
            while !rest.is_empty() {
                if let Some(set) = rest.strip_prefix('[') {
                    let (set, after) = set.split_once(']').unwrap();
                    let range = (set.as_bytes()[0], set.as_bytes()[2]);
                    rest = after;
                    let mut n = 1;
                    if let Some(count) = rest.strip_prefix('{') {
                        let (count, after) = count.split_once('}').unwrap();
                        (n, rest) = (count.parse().unwrap(), after);
                    }
                    sets.extend(std::iter::repeat_n(range, n));
                } else {
                    let byte = rest.as_bytes()[0];
                    sets.push((byte, byte));
                    rest = &rest[1..];
                }
            }
            let in_set = |((low, high), byte): (&(u8, u8), u8)| (*low..=*high).contains(&byte);
            sets.len() == text.len() && sets.iter().zip(text.bytes()).all(in_set)
        })
    }

    #[test]
    fn token_ids_have_an_exact_pattern() {
        for most in [0, 1, 9, 10, 11, 31, 99, 100, 109, 250, 999, 1000, 1234] {
            let pattern = up_to(most);
            for id in 0..=most + 1200 {
                let got = matches(&pattern, &id.to_string());
                assert_eq!(got, id <= most, "{id} of {most}: {pattern}");
            }
            assert!(!matches(&pattern, "00") && !matches(&pattern, "01") && !matches(&pattern, ""));
        }
    }
}
