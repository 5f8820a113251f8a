//! An incremental scanner of JSON: finds the end of a value in text that arrives in fragments, and
//! whether it is valid.

/// Deepest nesting of arguments.
const MAX_DEPTH: usize = 128;

/// Effect of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonScanStatus {
    /// The value is incomplete.
    More,
    /// The value is complete with this character.
    Done,
    /// The value was complete before this character.
    DoneBefore,
    /// This is no JSON.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    Value,
    /// A value, or the end of an empty array.
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    /// In a string; a key if so.
    Text {
        is_key: bool,
    },
    Escape {
        is_key: bool,
    },
    Hex {
        is_key: bool,
        left: u8,
    },
    /// In a number or a word, which is checked at its end.
    Scalar,
}

/// Reads one value, character by character.
#[derive(Clone, Debug)]
pub(super) struct Scanner {
    open: Vec<char>,
    expect: Expect,
    scalar: String,
}

impl Default for Scanner {
    fn default() -> Self {
        Self {
            open: Vec::new(),
            expect: Expect::Value,
            scalar: String::new(),
        }
    }
}

impl Scanner {
    /// Reads `c` and appends its form in JSON to `out`. That is the character itself, or an escape
    /// for a control character in a string, which JSON forbids and models write.
    pub(super) fn push(&mut self, c: char, out: &mut String) -> JsonScanStatus {
        if self.expect == Expect::Scalar && !is_scalar(c) {
            if !is_value(&self.scalar) {
                return JsonScanStatus::Bad;
            }
            if self.open.is_empty() {
                return JsonScanStatus::DoneBefore;
            }
            self.expect = Expect::CommaOrEnd;
        }
        if matches!(self.expect, Expect::Text { .. }) && c < ' ' {
            return self.push_control(c, out);
        }
        let step = self.step(c);
        if step != JsonScanStatus::Bad {
            out.push(c);
        }
        step
    }

    /// Whether the value is complete when nothing follows.
    pub(super) fn ends(&self) -> bool {
        self.open.is_empty() && self.expect == Expect::Scalar && is_value(&self.scalar)
    }

    /// Whether a key may follow.
    pub(super) const fn expects_key(&self) -> bool {
        matches!(self.expect, Expect::Key | Expect::KeyOrEnd)
    }

    fn push_control(&mut self, c: char, out: &mut String) -> JsonScanStatus {
        out.push_str(
            serde_json::Value::from(c.to_string())
                .to_string()
                .trim_matches('"'),
        );
        JsonScanStatus::More
    }

    fn step(&mut self, c: char) -> JsonScanStatus {
        match self.expect {
            Expect::Text { is_key } => self.in_text(c, is_key),
            Expect::Escape { is_key } => {
                self.expect = match c {
                    'u' => Expect::Hex { is_key, left: 4 },
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => Expect::Text { is_key },
                    _ => return JsonScanStatus::Bad,
                };
                JsonScanStatus::More
            }
            Expect::Hex { is_key, left } if c.is_ascii_hexdigit() => {
                self.expect = match left {
                    1 => Expect::Text { is_key },
                    _ => Expect::Hex {
                        is_key,
                        left: left - 1,
                    },
                };
                JsonScanStatus::More
            }
            Expect::Hex { .. } => JsonScanStatus::Bad,
            Expect::Scalar if is_scalar(c) => {
                self.scalar.push(c);
                if self.scalar.len() > MAX_DEPTH {
                    JsonScanStatus::Bad
                } else {
                    JsonScanStatus::More
                }
            }
            _ if matches!(c, ' ' | '\t' | '\n' | '\r') => JsonScanStatus::More,
            expect => self.structure(expect, c),
        }
    }

    const fn in_text(&mut self, c: char, is_key: bool) -> JsonScanStatus {
        match c {
            '\\' => self.expect = Expect::Escape { is_key },
            '"' if is_key => self.expect = Expect::Colon,
            '"' => return self.complete(),
            _ => {}
        }
        JsonScanStatus::More
    }

    fn structure(&mut self, expect: Expect, c: char) -> JsonScanStatus {
        use Expect::{Colon, CommaOrEnd, Key, KeyOrEnd, Value, ValueOrEnd};
        match (expect, c) {
            (Value | ValueOrEnd, '{') => self.begin('{', KeyOrEnd),
            (Value | ValueOrEnd, '[') => self.begin('[', ValueOrEnd),
            (Value | ValueOrEnd, '"') => self.goto(Expect::Text { is_key: false }),
            (Value | ValueOrEnd, c) if is_scalar(c) => {
                self.scalar.clear();
                self.scalar.push(c);
                self.goto(Expect::Scalar)
            }
            (Key | KeyOrEnd, '"') => self.goto(Expect::Text { is_key: true }),
            (Colon, ':') => self.goto(Value),
            (CommaOrEnd, ',') if self.open.last() == Some(&'{') => self.goto(Key),
            (CommaOrEnd, ',') => self.goto(Value),
            (KeyOrEnd | CommaOrEnd, '}') if self.open.last() == Some(&'{') => self.end(),
            (ValueOrEnd | CommaOrEnd, ']') if self.open.last() == Some(&'[') => self.end(),
            _ => JsonScanStatus::Bad,
        }
    }

    const fn goto(&mut self, expect: Expect) -> JsonScanStatus {
        self.expect = expect;
        JsonScanStatus::More
    }

    fn begin(&mut self, bracket: char, expect: Expect) -> JsonScanStatus {
        if self.open.len() >= MAX_DEPTH {
            return JsonScanStatus::Bad;
        }
        self.open.push(bracket);
        self.goto(expect)
    }

    fn end(&mut self) -> JsonScanStatus {
        self.open.pop();
        self.complete()
    }

    /// A value inside the whole, or the whole, is complete.
    const fn complete(&mut self) -> JsonScanStatus {
        if self.open.is_empty() {
            return JsonScanStatus::Done;
        }
        self.goto(Expect::CommaOrEnd)
    }
}

const fn is_scalar(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.')
}

/// Whether `text` is a number or one of the three words.
fn is_value(text: &str) -> bool {
    serde_json::from_str::<serde_json::Value>(text).is_ok()
}

/// Reads the available part of a value from the front of `input`. Returns the new text and whether
/// the value is complete; `None` when it is not JSON.
pub(super) fn read_value(
    scanner: &mut Scanner,
    input: &mut super::input::UnreadText,
) -> Option<(String, bool)> {
    let (mut out, mut at, mut is_done) = (String::new(), 0, false);
    let rest = input.rest();
    for (start, c) in rest.char_indices() {
        match scanner.push(c, &mut out) {
            JsonScanStatus::More => at = start + c.len_utf8(),
            JsonScanStatus::Done => (at, is_done) = (start + c.len_utf8(), true),
            JsonScanStatus::DoneBefore => is_done = true,
            JsonScanStatus::Bad => return None,
        }
        if is_done {
            break;
        }
    }
    let is_done = is_done || input.is_ended && scanner.ends();
    input.skip(at);
    Some((out, is_done))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The part of `text` that is read, and whether it was complete; `None` if it is no JSON.
    fn read(text: &str) -> Option<(String, bool)> {
        let mut input = super::super::input::UnreadText::default();
        input.push(text);
        input.is_ended = true;
        read_value(&mut Scanner::default(), &mut input)
    }

    #[test]
    fn values_end_where_they_end() {
        for (text, expected) in [
            (
                r#"{"a": [1, "}", {"b": null}]} tail"#,
                Some((r#"{"a": [1, "}", {"b": null}]}"#, true)),
            ),
            ("12,", Some(("12", true))),
            ("true", Some(("true", true))),
            ("truth", Some(("truth", false))),
            ("\"a\nb\t\" x", Some((r#""a\nb\t""#, true))),
            (r#""\u00e9\"" "#, Some((r#""\u00e9\"""#, true))),
            (r#"{"a" 1}"#, None),
            (r#"{"a": 01}"#, None),
            ("[1,]", None),
            ("{,}", None),
            ("[}", None),
            (r#""\x""#, None),
            (r#"{"a": "#, Some((r#"{"a": "#, false))),
        ] {
            let read = read(text);
            assert_eq!(
                read.as_ref().map(|(t, d)| (t.as_str(), *d)),
                expected,
                "{text}"
            );
        }
        assert_eq!(read(&"[".repeat(MAX_DEPTH + 1)), None);
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f32>()
                .prop_filter("finite", |x| x.is_finite())
                .prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::btree_map(any::<String>(), inner, 0..4)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_serde_writes_is_read_to_its_end(value in json(), is_pretty: bool) {
            let text = if is_pretty {
                serde_json::to_string_pretty(&value).unwrap()
            } else {
                value.to_string()
            };
            prop_assert_eq!(read(&(text.clone() + " ]}x")), Some((text, true)));
        }

        #[test]
        fn what_is_complete_is_json(text in "[\\[\\]{}:,\"a1 \\\\ntrue.-]{0,16}") {
            if let Some((read, true)) = read(&text) {
                let value = serde_json::from_str::<serde_json::Value>(&read);
                prop_assert!(value.is_ok(), "{}", read);
            }
        }
    }
}
