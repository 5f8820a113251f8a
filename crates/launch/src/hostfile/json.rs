//! JSON with the exact layout of Python's `json` module.

use std::fmt::Write;

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::PrettyFormatter;

/// `value` as `json.dumps(value)` writes it: one line, a blank after each comma and colon, all
/// non-printable and non-ASCII characters escaped.
pub(super) fn one_line(value: &impl Serialize) -> String {
    let text = indented(value);
    // Strings have no newlines, so a line ends with a comma only between values.
    let lines = text.lines().map(str::trim_start);
    let spaced = |line: &str| match line.ends_with(',') {
        true => format!("{line} "),
        false => line.to_owned(),
    };
    lines.map(spaced).collect()
}

/// `value` as `json.dumps(value, indent=4)` writes it, without a newline at its end.
pub(super) fn indented(value: &impl Serialize) -> String {
    let mut bytes = Vec::new();
    let layout = PrettyFormatter::with_indent(b"    ");
    let written = value.serialize(&mut Serializer::with_formatter(&mut bytes, layout));
    written.expect("strings, lists and named fields always have a JSON form");
    let text = String::from_utf8(bytes).expect("JSON is UTF-8");
    let mut ascii = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, ' '..='~' | '\n') {
            ascii.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(ascii, "\\u{unit:04x}"); // a String takes it
        }
    }
    ascii
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Expected texts are the output of Python 3.11 for the same values.
    #[test]
    fn layouts_are_pythons() {
        let cases = [
            (json!([]), "[]", "[]"),
            (json!({}), "{}", "{}"),
            (json!([[], {}]), "[[], {}]", "[\n    [],\n    {}\n]"),
            (
                json!({"a": [1, null], "b": "x"}),
                r#"{"a": [1, null], "b": "x"}"#,
                "{\n    \"a\": [\n        1,\n        null\n    ],\n    \"b\": \"x\"\n}",
            ),
            (
                json!("\u{e9}\u{1f600}\u{7f}\n\t\"\\/\u{1}"),
                r#""\u00e9\ud83d\ude00\u007f\n\t\"\\/\u0001""#,
                r#""\u00e9\ud83d\ude00\u007f\n\t\"\\/\u0001""#,
            ),
        ];
        for (value, line, lines) in cases {
            assert_eq!(one_line(&value), line);
            assert_eq!(indented(&value), lines);
        }
    }
}
