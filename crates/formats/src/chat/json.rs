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
    indent: Option<usize>,
    item: String,
    key: String,
    sort_keys: bool,
}

/// `tojson(value, indent=none, separators=(item, key), sort_keys=false)`. Characters outside ASCII
/// are written as they are, as `transformers` has it.
pub(super) fn tojson(value: Value, kwargs: Kwargs) -> Result<String, Error> {
    let bad = |reason: String| Error::new(ErrorKind::InvalidOperation, reason);
    let indent: Option<usize> = kwargs.get("indent")?;
    if indent.is_some_and(|n| n > MAX_INDENT) {
        return Err(bad(format!("tojson: indent above {MAX_INDENT}")));
    }
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators.as_deref() {
        None => (item.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(bad("tojson: separators are not two".to_owned())),
    };
    let style = Style {
        indent,
        item,
        key,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(&value).map_err(|e| bad(e.to_string()))?;
    let mut out = String::new();
    style.write(&mut out, &json, 0);
    Ok(out)
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
            scalar => write_scalar(out, scalar),
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
                write_scalar(out, &Json::from(key));
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
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }
}

fn write_scalar(out: &mut String, scalar: &Json) {
    write!(out, "{scalar}").expect("writing to a string does not fail");
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
        let compact = Value::from(vec![",", ":"]);
        assert_eq!(
            dumps(r#"{"b":[1,2]}"#, &[("separators", compact)]),
            r#"{"b":[1,2]}"#
        );
    }

    #[test]
    fn a_huge_indent_is_refused() {
        let kwargs = [("indent", Value::from(1_000_000_000))]
            .into_iter()
            .collect();
        assert!(tojson(Value::from(1), kwargs).is_err());
    }
}
