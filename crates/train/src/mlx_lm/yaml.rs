//! YAML as mlx-lm reads it: the types of PyYAML 6.0's `SafeLoader`, and floats such as `1e-5`.
//!
//! The syntax is `granit-parser`'s. Types of plain scalars are PyYAML's, which follow YAML 1.1,
//! with the pattern for floats that `mlx_lm/lora.py` adds. Any value is that of mlx-lm, or an error
//! with its line. Errors are aliases, tags, dates, numbers in other bases and second documents.
//! Without aliases, memory is a small multiple of the file's size. JSON is YAML.

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, Tag};
use regex::Regex;

use super::Error;

/// Deepest nesting: mlx-lm's own files have 3 levels.
const NESTING_MAX: usize = 16;

/// PyYAML's pattern for floats and mlx-lm's together, without base 60.
const FLOAT: &str = r"(?x)^(?:
     [-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$";

/// PyYAML's pattern for integers, without other bases.
const INTEGER: &str = r"^[-+]?(?:0|[1-9][0-9_]*)$";

/// Plain scalars for which PyYAML has a number in base 2, 8, 16 or 60, or a date.
const OTHER: &str = r"(?x)^(?:
     [-+]?0b[01_]+
    |[-+]?0[0-7_]+
    |[-+]?0x[0-9a-fA-F_]+
    |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?
    |[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt\ \t].*)?
    |<<|=)$";

/// A value and the line where it begins, from 1.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct YamlNode {
    pub(super) line: usize,
    pub(super) value: YamlValue,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum YamlValue {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<YamlNode>),
    Map(Vec<YamlEntry>),
}

/// An entry of a map; no two of a map have the same name.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct YamlEntry {
    pub(super) name: String,
    pub(super) line: usize,
    pub(super) node: YamlNode,
}

impl std::fmt::Display for YamlValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(items) => write!(f, "a list of {}", items.len()),
            Self::Map(entries) => write!(f, "a map of {}", entries.len()),
        }
    }
}

/// The entries of the map that `text` is.
///
/// # Errors
/// The line of what is no such map.
pub(super) fn read(text: &str) -> Result<Vec<YamlEntry>, Error> {
    let options = granit_parser::options! {
        block_scalar_eof_without_line_feed: true, // as PyYAML
        flow_nesting_limit: NESTING_MAX,
        block_nesting_limit: NESTING_MAX,
    };
    let mut reader = YamlReader {
        events: Parser::new_from_str_with_options(text, options),
        scalars: Scalars::new(),
    };
    let mut root = None;
    loop {
        match reader.next()? {
            (Event::StreamEnd, _) => break,
            (Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd, _) => {}
            (_, line) if root.is_some() => {
                return Err(form(line, "a second document"));
            }
            first => root = Some(reader.node(first)?),
        }
    }
    match root {
        Some(YamlNode {
            value: YamlValue::Map(entries),
            ..
        }) => Ok(entries),
        Some(YamlNode { line, value }) => Err(Error::Value {
            line,
            name: "the configuration".to_owned(),
            value: value.to_string(),
            expected: "a map".to_owned(),
        }),
        None => Err(form(1, "an empty configuration")),
    }
}

const fn form(line: usize, form: &'static str) -> Error {
    Error::Form { line, form }
}

type YamlEvents<'a> = Parser<'a, granit_parser::StrInput<'a>>;

struct YamlReader<'a> {
    events: YamlEvents<'a>,
    scalars: Scalars,
}

impl<'a> YamlReader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, usize), Error> {
        let told = |(event, span): (Event<'a>, Span)| (event, span.start.line());
        let wrong = |error: ScanError| Error::Syntax {
            line: error.marker().line(),
            reason: error.info(),
        };
        let next = self.events.next().unwrap_or_else(|| {
            let end = Span::default();
            Ok((Event::StreamEnd, end))
        });
        next.map(told).map_err(wrong)
    }

    /// The node that an event begins. Recursion ends at [`NESTING_MAX`] of both styles.
    fn node(&mut self, (event, line): (Event<'a>, usize)) -> Result<YamlNode, Error> {
        let value = match event {
            Event::Scalar(text, style, _, tag) => {
                untagged(line, tag.as_deref())?;
                match style {
                    ScalarStyle::Plain => self.scalars.value(&text, line)?,
                    _ => YamlValue::Text(text.into_owned()),
                }
            }
            Event::SequenceStart(_, _, tag) => {
                untagged(line, tag.as_deref())?;
                YamlValue::List(self.items()?)
            }
            Event::MappingStart(_, _, tag) => {
                untagged(line, tag.as_deref())?;
                YamlValue::Map(self.entries()?)
            }
            Event::Alias(_) => return Err(form(line, "an alias")),
            _ => return Err(form(line, "a node of this kind")),
        };
        Ok(YamlNode { line, value })
    }

    fn items(&mut self) -> Result<Vec<YamlNode>, Error> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                first => items.push(self.node(first)?),
            }
        }
    }

    fn entries(&mut self) -> Result<Vec<YamlEntry>, Error> {
        let mut entries: Vec<YamlEntry> = Vec::new();
        loop {
            let (name, line) = match self.next()? {
                (Event::MappingEnd, _) => return Ok(entries),
                (Event::Scalar(name, ..), line) => (name.into_owned(), line),
                (_, line) => return Err(form(line, "a name that is no text")),
            };
            if entries.iter().any(|entry| entry.name == name) {
                return Err(Error::Twice { line, name });
            }
            let first = self.next()?;
            let node = self.node(first)?;
            entries.push(YamlEntry { name, line, node });
        }
    }
}

const fn untagged(line: usize, tag: Option<&Tag>) -> Result<(), Error> {
    match tag {
        None => Ok(()),
        Some(_) => Err(form(line, "a tag")),
    }
}

/// Types of plain scalars.
struct Scalars {
    float: Regex,
    integer: Regex,
    other: Regex,
}

impl Scalars {
    fn new() -> Self {
        let of = |pattern| Regex::new(pattern).expect("the pattern is a constant");
        Self {
            float: of(FLOAT),
            integer: of(INTEGER),
            other: of(OTHER),
        }
    }

    fn value(&self, text: &str, line: usize) -> Result<YamlValue, Error> {
        let not_read = || form(line, "a number or date in this form");
        Ok(match text {
            "" | "~" | "null" | "Null" | "NULL" => YamlValue::Null,
            "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
                YamlValue::Bool(true)
            }
            "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
                YamlValue::Bool(false)
            }
            text if self.float.is_match(text) => {
                let float = float(&text.replace('_', ""));
                YamlValue::Float(float.ok_or_else(not_read)?)
            }
            text if self.integer.is_match(text) => {
                let integer = text.replace('_', "").parse();
                YamlValue::Integer(integer.map_err(|_| not_read())?)
            }
            text if self.other.is_match(text) => return Err(not_read()),
            text => YamlValue::Text(text.to_owned()),
        })
    }
}

/// Python's `float` of digits, or an infinity or NaN with YAML's dot.
fn float(text: &str) -> Option<f64> {
    let words = text.to_ascii_lowercase();
    match words.as_str() {
        ".nan" => Some(f64::NAN),
        ".inf" | "+.inf" => Some(f64::INFINITY),
        "-.inf" => Some(f64::NEG_INFINITY),
        digits => digits.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<YamlValue, Error> {
        let mut entries = read(&format!("k: {text}"))?;
        assert_eq!(entries.len(), 1, "{text}");
        Ok(entries.remove(0).node.value)
    }

    /// Recorded from the loader of mlx-lm 0.32.2 (`yaml_loader` of `mlx_lm/lora.py`) with PyYAML
    /// 6.0.4, of `k: ` and the text.
    #[test]
    fn scalars_are_those_of_mlx_lm() {
        for (text, integer) in [("8", 8), ("-3", -3), ("+5", 5), ("0", 0), ("1_000", 1000)] {
            assert_eq!(value(text), Ok(YamlValue::Integer(integer)), "{text}");
        }
        for (text, float) in [
            ("1.5", 1.5),
            ("1e-5", 1e-5),
            ("-1e-5", -1e-5),
            ("1E5", 1e5),
            ("2.5e-4", 0.00025),
            ("1.e-3", 0.001),
            ("1.5E+3", 1500.0),
            (".5", 0.5),
            (".5e-3", 0.0005),
            ("5.", 5.0),
            ("1_0.5", 10.5),
            ("09.5", 9.5),
            (".inf", f64::INFINITY),
            ("-.INF", f64::NEG_INFINITY),
            ("1e400", f64::INFINITY),
        ] {
            assert_eq!(value(text), Ok(YamlValue::Float(float)), "{text}");
        }
        for (text, flag) in [("yes", true), ("No", false), ("on", true), ("TRUE", true)] {
            assert_eq!(value(text), Ok(YamlValue::Bool(flag)), "{text}");
        }
        for text in ["", "~", "null", "Null"] {
            assert_eq!(value(text), Ok(YamlValue::Null), "{text}");
        }
        // With a sign, without one in the exponent, or in quotes these are texts.
        for text in [
            "-.5", "+.5", ".5e3", "1e", "e5", "1.2.3", "tRUE", "y", "none", "a#b", "inf", "NaN",
            "0o10", "08", "__1", "20.0,", "C:\\d",
        ] {
            assert_eq!(value(text), Ok(YamlValue::Text(text.to_owned())), "{text}");
        }
        for (text, said) in [
            ("\"1e-5\"", "1e-5"),
            ("'8'", "8"),
            ("'it''s'", "it's"),
            ("\"a\\tb\"", "a\tb"),
            ("|\n  text", "text"),
            (">-\n  a\n  b", "a b"),
        ] {
            assert_eq!(value(text), Ok(YamlValue::Text(said.to_owned())), "{text}");
        }
        assert_eq!(value("8 # why"), Ok(YamlValue::Integer(8)));
    }

    /// mlx-lm reads these as other numbers, dates, or errors.
    #[test]
    fn other_forms_end_with_their_line() {
        for text in [
            "010",
            "0x10",
            "0b11",
            "1:30",
            "1:30.5",
            "2026-11-28",
            "2026-11-28T10:00:00",
            "<<",
            "=",
            "._",
            "12345678901234567890",
            "!!float 1",
            "&a [*a]",
            "*a",
            "@x",
            "a: b",
            "- 1",
            "[1, 2",
            "{rank: 8",
            "{1: 2, 1: 3}",
            "1\n---\nk: 2",
            "{[1]: 2}",
        ] {
            let error = value(text).unwrap_err().to_string();
            assert!(error.starts_with("line "), "{text}: {error}");
        }
        let error = read("a: 1\nb:\n  - 1\n  - *x\n").unwrap_err().to_string();
        assert!(error.starts_with("line 4: "), "{error}");
        let deep = "[".repeat(100_000);
        assert!(value(&deep).is_err());
        for text in ["", "# nothing", "text", "- 1"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn braces_brackets_and_lines_have_the_same_values() {
        let block = "lora_parameters:\n  rank: 4\n  keys:\n  - a\n  - 'b'\n";
        for flow in [
            "lora_parameters: {rank: 4, keys: [a, 'b']}",
            "lora_parameters: { \"rank\": 4,\n  keys: [a, # one\n  'b',], }",
            "{\"lora_parameters\": {\"rank\": 4, \"keys\": [\"a\", \"b\"]}}",
        ] {
            let (mut one, mut other) = (read(block).unwrap(), read(flow).unwrap());
            for entries in [&mut one, &mut other] {
                forget_lines(entries);
            }
            assert_eq!(one, other, "{flow}");
        }
    }

    fn forget_lines(entries: &mut [YamlEntry]) {
        for entry in entries {
            entry.line = 0;
            forget_line(&mut entry.node);
        }
    }

    fn forget_line(node: &mut YamlNode) {
        node.line = 0;
        match &mut node.value {
            YamlValue::List(items) => items.iter_mut().for_each(forget_line),
            YamlValue::Map(entries) => forget_lines(entries),
            _ => {}
        }
    }
}
