//! The filter `tojson`, which writes JSON as Python's `json.dumps` does.
//!
//! minijinja's own filter escapes `<`, `>` and `&` for HTML, and models were trained without.

use std::fmt::Write as _;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// Widest indentation; templates use 2 or 4.
const MAX_INDENT: usize = 16;

struct Style {
    /// Text of one level; none for one line.
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

/// `tojson(value, indent=none, separators=(item, key), sort_keys=false, ensure_ascii=false)`, as
/// `transformers` has it.
pub(super) fn tojson(value: Value, kwargs: Kwargs) -> Result<String, Error> {
    let bad = |reason: String| Error::new(ErrorKind::InvalidOperation, reason);
    let indent = indent(kwargs.get("indent")?).map_err(bad)?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators.as_deref() {
        None => (item.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(bad("tojson: separators are not two".to_owned())),
    };
    let flag = |name| Ok::<bool, Error>(kwargs.get::<Option<bool>>(name)?.unwrap_or(false));
    let style = Style {
        indent,
        item,
        key,
        sort_keys: flag("sort_keys")?,
        ensure_ascii: flag("ensure_ascii")?,
    };
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(&value).map_err(|e| bad(e.to_string()))?;
    let mut out = String::new();
    style.write(&mut out, &json, 0);
    Ok(out)
}

/// The text of one level: blanks for a number, and texts as they are.
fn indent(given: Option<Value>) -> Result<Option<String>, String> {
    let Some(given) = given.filter(|value| !value.is_none()) else {
        return Ok(None);
    };
    let one = match given.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let blanks = i64::try_from(given).map_err(|error| error.to_string())?;
            let blanks = usize::try_from(blanks.max(0)).unwrap_or(usize::MAX);
            // Checked before the text is made.
            " ".repeat(blanks.min(MAX_INDENT + 1))
        }
    };
    match one.len() > MAX_INDENT {
        true => Err(format!("tojson: indent above {MAX_INDENT}")),
        false => Ok(Some(one)),
    }
}

/// A number as Python writes it.
///
/// JSON's integers beyond 64 bits are floats here. One below 1e21 is written as an integer, as
/// Python's integers and JavaScript's numbers of this size are.
pub(super) fn python_float(number: f64) -> String {
    const INTEGERS: std::ops::Range<f64> = 18_446_744_073_709_551_616.0..1e21;
    if INTEGERS.contains(&number.abs()) {
        return format!("{number:.0}");
    }
    // The shortest digits that give the number again, as in Python.
    let text = format!("{number:e}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    match exponent.parse::<i32>() {
        Ok(-4..16) => format!("{number:?}"),
        Ok(exponent) => format!("{digits}e{}{:02}", sign(exponent), exponent.abs()),
        Err(_) => text,
    }
}

const fn sign(exponent: i32) -> char {
    if exponent < 0 { '-' } else { '+' }
}

impl Style {
    fn write(&self, out: &mut String, json: &Json, depth: usize) {
        match json {
            Json::Array(items) => {
                let items = items.iter().map(|item| (None, item)).collect();
                self.write_items(out, ('[', ']'), items, depth);
            }
            Json::Object(map) => {
                let mut items: Vec<_> = map.iter().map(|(k, v)| (Some(k.as_str()), v)).collect();
                if self.sort_keys {
                    items.sort_by_key(|(key, _)| *key);
                }
                self.write_items(out, ('{', '}'), items, depth);
            }
            scalar => self.write_scalar(out, scalar),
        }
    }

    fn write_scalar(&self, out: &mut String, scalar: &Json) {
        let float = scalar.as_f64().filter(|_| scalar.is_f64());
        let text = float.map_or_else(|| scalar.to_string(), python_float);
        if !self.ensure_ascii {
            return out.push_str(&text);
        }
        for c in text.chars() {
            if matches!(c, ' '..='~') {
                out.push(c);
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(out, "\\u{unit:04x}").expect("writing to a string does not fail");
            }
        }
    }

    fn write_items(
        &self,
        out: &mut String,
        (open, close): (char, char),
        items: Vec<(Option<&str>, &Json)>,
        depth: usize,
    ) {
        let is_empty = items.is_empty();
        out.push(open);
        for (i, (key, value)) in items.into_iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item);
            }
            self.break_line(out, depth + 1);
            if let Some(key) = key {
                self.write_scalar(out, &Json::from(key));
                out.push_str(&self.key);
            }
            self.write(out, value, depth + 1);
        }
        if !is_empty {
            self.break_line(out, depth);
        }
        out.push(close);
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;

    fn dumps(json: &str, kwargs: &[(&'static str, Value)]) -> String {
        let value: Json = serde_json::from_str(json).unwrap();
        let kwargs = kwargs.iter().cloned().collect();
        tojson(Value::from(Serde(value)), kwargs).unwrap()
    }

    #[test]
    fn as_python_dumps() {
        let json = r#"{"b":[1,2.5,null,true,"<é&'\"\n\u0001"],"a":{},"c":[]}"#;
        assert_eq!(
            dumps(json, &[]),
            r#"{"b": [1, 2.5, null, true, "<é&'\"\n\u0001"], "a": {}, "c": []}"#
        );
        assert_eq!(
            dumps(r#"{"b":[1,{"x":2}],"a":[]}"#, &[("indent", Value::from(2))]),
            "{\n  \"b\": [\n    1,\n    {\n      \"x\": 2\n    }\n  ],\n  \"a\": []\n}"
        );
        assert_eq!(
            dumps(r#"{"b":1,"a":2}"#, &[("sort_keys", Value::from(true))]),
            r#"{"a": 2, "b": 1}"#
        );
        assert_eq!(
            dumps(r#"["é\u007f😀<"]"#, &[("ensure_ascii", Value::from(true))]),
            r#"["\u00e9\u007f\ud83d\ude00<"]"#
        );
        assert_eq!(
            dumps("[[1]]", &[("indent", Value::from("\t"))]),
            "[\n\t[\n\t\t1\n\t]\n]"
        );
        assert_eq!(dumps("[1,2]", &[("indent", Value::from(0))]), "[\n1,\n2\n]");
        let compact = Value::from(vec![",", ":"]);
        assert_eq!(
            dumps(r#"{"b":[1,2]}"#, &[("separators", compact)]),
            r#"{"b":[1,2]}"#
        );
    }

    /// Written by Python 3.11 from these texts.
    #[test]
    fn numbers_are_pythons() {
        for (json, expected) in [
            ("100000000000000000000", "100000000000000000000"),
            ("18446744073709551615", "18446744073709551615"),
            ("1e-05", "1e-05"),
            ("1e-7", "1e-07"),
            ("0.0001", "0.0001"),
            ("-2.5e-300", "-2.5e-300"),
            ("1.0", "1.0"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1234567890123456.7", "1234567890123456.8"),
            ("123456789012345680.0", "1.2345678901234568e+17"),
            ("1e22", "1e+22"),
            ("0.1", "0.1"),
            ("-0.0", "-0.0"),
        ] {
            assert_eq!(dumps(json, &[]), expected, "{json}");
        }
    }

    #[test]
    fn a_huge_indent_is_refused() {
        let kwargs = [("indent", Value::from(1_000_000_000))]
            .into_iter()
            .collect();
        assert!(tojson(Value::from(1), kwargs).is_err());
    }
}
