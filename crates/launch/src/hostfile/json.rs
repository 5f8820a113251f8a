//! JSON with the exact layout of Python's `json` module.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

/// `value` as `json.dumps(value)` writes it: one line, a blank after each comma and colon, all
/// non-printable and non-ASCII characters escaped.
pub(super) fn one_line(value: &impl Serialize) -> String {
    text(value, None)
}

/// `value` as `json.dumps(value, indent=4)` writes it, without a newline at its end.
pub(super) fn indented(value: &impl Serialize) -> String {
    text(value, Some(0))
}

fn text(value: &impl Serialize, depth: Option<usize>) -> String {
    let mut bytes = Vec::new();
    let python = Python {
        depth,
        has_value: false,
    };
    let written = value.serialize(&mut Serializer::with_formatter(&mut bytes, python));
    written.expect("strings, lists and named fields always have a JSON form");
    String::from_utf8(bytes).expect("the formatter writes ASCII")
}

/// The layout. `depth` is the nesting depth, if lines are broken at all.
struct Python {
    depth: Option<usize>,
    has_value: bool,
}

impl Python {
    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth = self.depth.map(|depth| depth + 1);
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth = self.depth.map(|depth| depth - 1);
        if self.has_value {
            self.break_line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn separate<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            let comma: &[u8] = if self.depth.is_some() { b"," } else { b", " };
            writer.write_all(comma)?;
        }
        self.break_line(writer)
    }

    fn break_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(depth) = self.depth else {
            return Ok(());
        };
        writer.write_all(b"\n")?;
        (0..depth).try_for_each(|_| writer.write_all(b"    "))
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for c in fragment.chars() {
            if matches!(c, ' '..='~') {
                writer.write_all(&[c as u8])?;
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
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
