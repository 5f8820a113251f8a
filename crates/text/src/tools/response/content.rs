//! The parsers and transforms that response templates name: from a region's text to a JSON value.
//!
//! They get the whole text of a region. Finding regions is for `regions`.

use std::collections::BTreeMap;

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value as Json};

use super::{ResponseError, Scope};

const JSON_KEYS: [&str; 3] = ["unquoted_keys", "string_delims", "allow_non_json"];
const TAG_KEYS: [&str; 3] = ["tag_pattern", "value_parser", "merge_duplicates"];
const LINE_KEYS: [&str; 4] = ["line_sep", "kv_sep", "value_parser", "strip"];

/// Deepest nesting of parsers for values.
const MAX_DEPTH: usize = 4;

/// A parser of a region's text.
#[derive(Debug)]
pub(super) enum Content {
    Text { strips: bool },
    Int,
    Float,
    Bool,
    Json(Dialect),
    Tags(Tags),
    Lines(KeyValueLines),
}

/// Allowed deviations from standard JSON.
#[derive(Debug)]
pub(super) struct Dialect {
    /// Keys without quotes: matches the text before a key, and the key.
    bare_keys: Option<Regex>,
    /// Texts that quote strings instead of `"`: the opening and the closing one.
    quotes: Vec<(String, String)>,
    /// Text that is no JSON counts as a string.
    takes_text: bool,
}

/// Pairs in tags.
#[derive(Debug)]
pub(super) struct Tags {
    pattern: Regex,
    value: Option<Box<Content>>,
    /// Values of one key become a list, instead of the last one's.
    merges: bool,
}

/// A pair a line.
#[derive(Debug)]
pub(super) struct KeyValueLines {
    line_end: String,
    separator: String,
    value: Option<Box<Content>>,
    strips: bool,
}

impl Content {
    /// The parser that a field names.
    ///
    /// # Errors
    /// For a name or an argument that is not known.
    pub(super) fn read(field: &Scope<'_>) -> Result<Self, ResponseError> {
        let name = field.text("content", "text")?;
        Self::named(field, &name, field.get("content_args"), "content", 0)
    }

    fn named(
        field: &Scope<'_>,
        name: &str,
        arguments: Option<&Json>,
        key: &'static str,
        depth: usize,
    ) -> Result<Self, ResponseError> {
        const EXPECTED: &str = "text, int, float, bool, json, xml-inline or kv-lines";
        let none = Json::Object(Map::new());
        let arguments = arguments.unwrap_or(&none);
        let scope = |keys: &[&str]| Scope::new(&field.place, arguments, keys);
        match name {
            "text" => Ok(Self::Text {
                strips: scope(&["strip"])?.flag("strip", true)?,
            }),
            "int" => Ok(Self::Int),
            "float" => Ok(Self::Float),
            "bool" => Ok(Self::Bool),
            "json" => Dialect::read(&scope(&JSON_KEYS)?).map(Self::Json),
            "xml-inline" => Tags::read(&scope(&TAG_KEYS)?, depth).map(Self::Tags),
            "kv-lines" => KeyValueLines::read(&scope(&LINE_KEYS)?, depth).map(Self::Lines),
            _ => Err(field.wrong(key, &name.into(), EXPECTED)),
        }
    }

    /// Whether white space at the borders of a region is none of it.
    pub(super) const fn strips(&self) -> bool {
        !matches!(self, Self::Text { strips: false })
    }

    /// The value of a region with this text; `None` where it cannot be read.
    pub(super) fn value(&self, text: &str) -> Option<Json> {
        match self {
            Self::Text { strips: true } => Some(text.trim().into()),
            Self::Text { strips: false } => Some(text.into()),
            Self::Int => text.trim().parse::<i64>().ok().map(Json::from),
            Self::Float => text.trim().parse::<f64>().ok().map(Json::from),
            Self::Bool => {
                let word = text.trim().to_lowercase();
                Some(matches!(word.as_str(), "true" | "1").into())
            }
            Self::Json(dialect) => dialect.value(text),
            Self::Tags(tags) => tags.value(text),
            Self::Lines(lines) => lines.value(text),
        }
    }
}

/// The parser of values that arguments name.
fn value_parser(scope: &Scope<'_>, depth: usize) -> Result<Option<Box<Content>>, ResponseError> {
    const EXPECTED: &str = "an object with the name of a parser, at most 4 deep";
    let Some(parser) = scope.get("value_parser") else {
        return Ok(None);
    };
    let name = parser.get("name").and_then(Json::as_str).unwrap_or("text");
    if !parser.is_object() || depth >= MAX_DEPTH {
        return Err(scope.wrong("value_parser", parser, EXPECTED));
    }
    let arguments = parser.get("args");
    let content = Content::named(scope, name, arguments, "value_parser", depth + 1)?;
    Ok(Some(Box::new(content)))
}

fn value_of(parser: Option<&Content>, text: &str) -> Option<Json> {
    parser.map_or_else(|| Some(text.into()), |parser| parser.value(text))
}

impl Dialect {
    fn read(scope: &Scope<'_>) -> Result<Self, ResponseError> {
        const EXPECTED: &str = "a list of pairs of texts that are not empty";
        let bare_keys = match scope.flag("unquoted_keys", false)? {
            true => Regex::new(r"([{,])(\w+):").ok(),
            false => None,
        };
        let quotes = match scope.get("string_delims") {
            None => Vec::new(),
            Some(list) => {
                let pairs = list.as_array().map_or(&[][..], Vec::as_slice);
                let pairs = pairs.iter().map(pair).collect::<Option<Vec<_>>>();
                pairs
                    .filter(|pairs| !pairs.is_empty())
                    .ok_or_else(|| scope.wrong("string_delims", list, EXPECTED))?
            }
        };
        Ok(Self {
            bare_keys,
            quotes,
            takes_text: scope.flag("allow_non_json", false)?,
        })
    }

    fn value(&self, text: &str) -> Option<Json> {
        let standard = self.standard(text);
        match serde_json::from_str(&standard) {
            Ok(value) => Some(value),
            Err(_) => self.takes_text.then(|| text.trim().into()),
        }
    }

    /// The text as standard JSON, as far as it goes: quoted texts are copied as strings, keys
    /// between them get quotes.
    fn standard(&self, text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some((before, inner, after)) = self.next_quoted(rest) {
            out.push_str(&self.quote_keys(before));
            out.push_str(&Json::from(inner).to_string());
            rest = after;
        }
        out + &self.quote_keys(rest)
    }

    /// The text before the first quoted one, that one without its quotes, and the text behind.
    fn next_quoted<'a>(&self, text: &'a str) -> Option<(&'a str, &'a str, &'a str)> {
        let places = self.quotes.iter().filter_map(|(open, close)| {
            let at = text.find(open.as_str())?;
            let inner = &text[at + open.len()..];
            let end = inner.find(close.as_str())?;
            Some((&text[..at], &inner[..end], &inner[end + close.len()..]))
        });
        places.min_by_key(|(before, ..)| before.len())
    }

    fn quote_keys(&self, text: &str) -> String {
        match &self.bare_keys {
            None => text.to_owned(),
            Some(keys) => keys.replace_all(text, "$1\"$2\":").into_owned(),
        }
    }
}

fn pair(value: &Json) -> Option<(String, String)> {
    let text = |value: &Json| value.as_str().filter(|t| !t.is_empty()).map(str::to_owned);
    match value.as_array()?.as_slice() {
        [open, close] => Some((text(open)?, text(close)?)),
        _ => None,
    }
}

impl Tags {
    fn read(scope: &Scope<'_>, depth: usize) -> Result<Self, ResponseError> {
        let source = scope.text("tag_pattern", "")?;
        let mut builder = RegexBuilder::new(&source);
        builder.dot_matches_new_line(true);
        let built = builder
            .size_limit(super::delimiter::MAX_COMPILED_BYTES)
            .build();
        let pattern = built.map_err(|e| scope.bad_pattern("tag_pattern", &e.to_string()))?;
        if !pattern.capture_names().any(|name| name == Some("key")) {
            let got = Json::from(source);
            return Err(scope.wrong("tag_pattern", &got, "a pattern with a group named key"));
        }
        Ok(Self {
            pattern,
            value: value_parser(scope, depth)?,
            merges: scope.flag("merge_duplicates", false)?,
        })
    }

    fn value(&self, text: &str) -> Option<Json> {
        let mut out = Map::new();
        for found in self.pattern.captures_iter(text) {
            let group = |name| found.name(name).map_or("", |group| group.as_str());
            let key = found.name("key")?.as_str().to_owned();
            let value = value_of(self.value.as_deref(), group("value"))?;
            match out.get_mut(&key).filter(|_| self.merges) {
                Some(Json::Array(values)) => values.push(value),
                Some(first) => *first = Json::Array(vec![first.take(), value]),
                None => drop(out.insert(key, value)),
            }
        }
        Some(Json::Object(out))
    }
}

impl KeyValueLines {
    fn read(scope: &Scope<'_>, depth: usize) -> Result<Self, ResponseError> {
        Ok(Self {
            line_end: scope.text("line_sep", "\n")?,
            separator: scope.text("kv_sep", ":")?,
            value: value_parser(scope, depth)?,
            strips: scope.flag("strip", true)?,
        })
    }

    fn value(&self, text: &str) -> Option<Json> {
        let strip = |text: &str| {
            let stripped = if self.strips { text.trim() } else { text };
            stripped.to_owned()
        };
        let mut out = Map::new();
        for line in text.split(self.line_end.as_str()) {
            let Some((key, value)) = line.split_once(self.separator.as_str()) else {
                continue;
            };
            let value = value_of(self.value.as_deref(), &strip(value))?;
            out.insert(strip(key), value);
        }
        Some(Json::Object(out))
    }
}

/// Values of the placeholders of a transform, such as `{name}` and `{content.args}`.
pub(super) struct Placeholders(Map<String, Json>);

impl Placeholders {
    pub(super) fn of_content(captures: &BTreeMap<String, String>, content: Json) -> Self {
        let mut scope = named(captures);
        scope.insert("content".to_owned(), content);
        Self(scope)
    }

    /// Placeholders of an element of a list; `None` when it is no object.
    pub(super) fn of_item(captures: &BTreeMap<String, String>, item: &Json) -> Option<Self> {
        let mut scope = named(captures);
        scope.extend(item.as_object()?.clone());
        Some(Self(scope))
    }

    /// `transform` with values instead of placeholders; `None` for one without a value.
    pub(super) fn fill(&self, transform: &Json) -> Option<Json> {
        match transform {
            Json::Object(map) => {
                let filled = map
                    .iter()
                    .map(|(key, it)| Some((key.clone(), self.fill(it)?)));
                filled.collect::<Option<Map<_, _>>>().map(Json::Object)
            }
            Json::Array(items) => {
                let filled = items.iter().map(|item| self.fill(item));
                filled.collect::<Option<Vec<_>>>().map(Json::Array)
            }
            Json::String(text) => match path_in(text) {
                Some(path) => self.look_up(path).cloned(),
                None => Some(transform.clone()),
            },
            other => Some(other.clone()),
        }
    }

    fn look_up(&self, path: &str) -> Option<&Json> {
        let mut parts = path.split('.');
        let root = self.0.get(parts.next()?)?;
        parts.try_fold(root, |value, part| value.as_object()?.get(part))
    }
}

fn named(captures: &BTreeMap<String, String>) -> Map<String, Json> {
    let pairs = captures.iter();
    pairs
        .map(|(name, text)| (name.clone(), text.as_str().into()))
        .collect()
}

/// The path of a text that is one placeholder.
fn path_in(text: &str) -> Option<&str> {
    let path = text.strip_prefix('{')?.strip_suffix('}')?;
    let is_word =
        |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_');
    path.split('.').all(is_word).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn value(name: &str, arguments: Json, text: &str) -> Option<Json> {
        let field = json!({"content": name, "content_args": arguments});
        let scope = Scope::new("field", &field, &["content", "content_args"]).unwrap();
        Content::read(&scope).unwrap().value(text)
    }

    #[test]
    fn regions_have_values() {
        let quotes = json!({"unquoted_keys": true, "string_delims": [["<q>", "<q>"]]});
        let tags = json!({"tag_pattern": "<p=(?P<key>\\w+)>(?P<value>.*?)</p>", "merge_duplicates": true,
                          "value_parser": {"name": "json", "args": {"allow_non_json": true}}});
        let lines = json!({"kv_sep": "=", "value_parser": {"name": "int"}});
        for (name, arguments, text, expected) in [
            ("text", json!({}), " a\n", Some(json!("a"))),
            ("text", json!({"strip": false}), " a\n", Some(json!(" a\n"))),
            ("int", json!({}), " 12 ", Some(json!(12))),
            ("int", json!({}), "x", None),
            ("float", json!({}), "1.5", Some(json!(1.5))),
            ("bool", json!({}), "True", Some(json!(true))),
            ("json", json!({}), "{\"a\": [1]}", Some(json!({"a": [1]}))),
            ("json", json!({}), "{a: 1}", None),
            (
                "json",
                quotes.clone(),
                "{a:<q>x,b:\"<q>,b:{c:2}}",
                Some(json!({"a": "x,b:\"", "b": {"c": 2}})),
            ),
            ("json", quotes, "{a:<q>x}", None),
            (
                "xml-inline",
                tags,
                "<p=a>1</p> <p=b>x\ny</p><p=a>2</p><p=a>3</p>",
                Some(json!({"a": [1, 2, 3], "b": "x\ny"})),
            ),
            (
                "kv-lines",
                lines,
                "a = 1\n\nno\nb=2",
                Some(json!({"a": 1, "b": 2})),
            ),
        ] {
            assert_eq!(value(name, arguments, text), expected, "{name} {text:?}");
        }
    }

    #[test]
    fn placeholders_are_filled_in() {
        let captures = BTreeMap::from([("name".to_owned(), "f".to_owned())]);
        let scope = Placeholders::of_content(&captures, json!({"args": {"a": 1}}));
        let transform = json!({"n": "{name}", "l": ["{content.args}", "plain", 2], "{name}": null});
        let expected = json!({"n": "f", "l": [{"a": 1}, "plain", 2], "{name}": null});
        assert_eq!(scope.fill(&transform), Some(expected));
        for unknown in ["{other}", "{content.other}", "{name.x}"] {
            assert_eq!(scope.fill(&json!(unknown)), None, "{unknown}");
        }
        assert_eq!(scope.fill(&json!("{ name }")), Some(json!("{ name }")));
    }
}
