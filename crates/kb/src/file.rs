//! From the bytes of a user file to its entries, or to everything that is wrong with it.
//!
//! serde would stop at the first error, so [`Checker`] first compares the parsed table with the
//! lists of keys below. Whether ids and topics fit the rest of the knowledge base is for
//! [`crate::KnowledgeBase::check`] to say.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::entry::{Finding, GRADES, QuickAnswer, Topic};
use crate::error::{EntryError, Error, KeyError};
use crate::similarity::nearest;

/// Most bytes of one file. The 52 built-in findings take 50 KB, so this is room for a thousand.
pub const FILE_BYTES_MAX: usize = 1 << 20;

/// Knowledge area and topic of a finding that names none.
const DEFAULT_SKILL: &str = "gpu-distributed";
const DEFAULT_TOPIC: &str = "Own findings";

/// A file and its name for messages.
#[derive(Debug, Clone, Copy)]
pub struct UserFile<'a> {
    pub name: &'a str,
    pub bytes: &'a [u8],
}

/// Values that a key takes.
#[derive(Clone, Copy)]
enum Kind {
    Id,
    Ids,
    Text,
    /// A required text that is not blank.
    Required,
    Texts,
    /// A text in a list.
    Item,
    Grade,
    Tables(Keys),
}

/// Entries by their key and index.
type Places = BTreeMap<(&'static str, usize), FindingPlace>;

type Keys = &'static [(&'static str, Kind)];

const FILE: Keys = &[
    ("skill", Kind::Text),
    ("description", Kind::Text),
    ("topic", Kind::Tables(TOPIC)),
    ("finding", Kind::Tables(FINDING)),
    ("answer", Kind::Tables(ANSWER)),
];
const TOPIC: Keys = &[
    ("name", Kind::Required),
    ("description", Kind::Text),
    ("ids", Kind::Ids),
    ("also", Kind::Ids),
];
const FINDING: Keys = &[
    ("id", Kind::Id),
    ("skill", Kind::Text),
    ("statement", Kind::Required),
    ("evidence", Kind::Text),
    ("confidence", Kind::Grade),
    ("source", Kind::Text),
    ("tags", Kind::Texts),
    ("topic", Kind::Text),
    ("conflicts", Kind::Ids),
    ("conflict_note", Kind::Text),
];
const ANSWER: Keys = &[
    ("question", Kind::Required),
    ("answer", Kind::Required),
    ("findings", Kind::Ids),
    ("note", Kind::Text),
];

/// The entries of one file, each valid by itself.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Document {
    pub(crate) skill: Option<String>,
    pub(crate) description: String,
    #[serde(rename = "topic")]
    pub(crate) topics: Vec<Topic>,
    #[serde(rename = "finding")]
    pub(crate) findings: Vec<Finding>,
    #[serde(rename = "answer")]
    pub(crate) answers: Vec<QuickAnswer>,
    #[serde(skip)]
    places: Places,
}

/// Location of an entry, for error messages.
#[derive(Debug, Default)]
struct FindingPlace {
    entry: String,
    header: usize,
    keys: BTreeMap<String, usize>,
}

impl FindingPlace {
    fn problem(&self, key: &str, fault: KeyError) -> EntryError {
        EntryError {
            line: self.keys.get(key).copied().unwrap_or(self.header),
            entry: self.entry.clone(),
            key: key.to_owned(),
            fault,
        }
    }
}

impl Document {
    /// Reads a file in time linear in its bytes; the TOML parser limits nesting to 80 levels.
    ///
    /// # Errors
    /// Every [`Error`]: no byte of the file is trusted.
    pub(crate) fn read(file: UserFile<'_>) -> Result<Self, Error> {
        let text = decode(file.bytes)?;
        let table = DeTable::parse(text).map_err(|error| syntax(text, &error))?;
        let places = Checker::new(text).check(table.get_ref())?;
        let document = Self::deserialize(toml::Deserializer::from(table));
        let mut document = document.map_err(|error| syntax(text, &error))?;
        document.places = places;
        document.complete(file.name);
        Ok(document)
    }

    /// A problem with `key` of the entry `number` of those called `kind`.
    pub(crate) fn problem(
        &self,
        (kind, number): (&'static str, usize),
        key: &str,
        fault: KeyError,
    ) -> EntryError {
        self.places[&(kind, number)].problem(key, fault)
    }

    fn complete(&mut self, name: &str) {
        let skill = self.skill.as_deref().unwrap_or(DEFAULT_SKILL);
        for finding in &mut self.findings {
            for (text, default) in [
                (&mut finding.skill, skill),
                (&mut finding.topic, DEFAULT_TOPIC),
            ] {
                if text.trim().is_empty() {
                    default.clone_into(text);
                }
            }
        }
        let topics = self.topics.iter_mut().map(|topic| &mut topic.origin);
        let findings = self.findings.iter_mut().map(|f| &mut f.origin);
        let answers = self.answers.iter_mut().map(|answer| &mut answer.origin);
        for origin in topics.chain(findings).chain(answers) {
            name.clone_into(origin);
        }
    }
}

fn decode(bytes: &[u8]) -> Result<&str, Error> {
    if bytes.len() > FILE_BYTES_MAX {
        let max = FILE_BYTES_MAX;
        return Err(Error::TooLarge { max });
    }
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        let line = 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count();
        let byte = bytes[at];
        Error::NotUtf8 { line, at, byte }
    })
}

fn syntax(text: &str, error: &toml::de::Error) -> Error {
    let at = text.floor_char_boundary(error.span().map_or(0, |span| span.start));
    let before = &text[..at];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    Error::Syntax {
        line: 1 + before.matches('\n').count(),
        column: 1 + text[line_start..at].chars().count(),
        key: key_near(text, line_start),
        message: error.message().replace('\n', ", "),
    }
}

/// The key or header on the line that starts at `line_start`, or the last one above it. An open
/// string or list runs over lines that have neither.
fn key_near(text: &str, line_start: usize) -> String {
    let line_end = text[line_start..].find('\n').map(|end| line_start + end);
    let mut lines = text[..line_end.unwrap_or(text.len())].lines().rev();
    let key = lines.find_map(|line| {
        let line = line.trim();
        if line.starts_with('[') {
            return Some(line.chars().take(60).collect());
        }
        let (key, _) = line.split_once('=')?;
        let key = key.trim();
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        let is_key = !key.is_empty() && key.len() <= 60 && key.chars().all(plain);
        is_key.then(|| key.to_owned())
    });
    key.unwrap_or_default()
}

/// Compares tables with lists of keys and collects all problems.
struct Checker<'t> {
    text: &'t str,
    line_starts: Vec<usize>,
    problems: Vec<EntryError>,
    places: Places,
}

impl<'t> Checker<'t> {
    fn new(text: &'t str) -> Self {
        let newlines = text.match_indices('\n').map(|(at, _)| at + 1);
        Self {
            text,
            line_starts: std::iter::once(0).chain(newlines).collect(),
            problems: Vec::new(),
            places: BTreeMap::new(),
        }
    }

    fn check(mut self, file: &DeTable<'_>) -> Result<Places, Error> {
        let top = self.place(String::new(), 0, file);
        self.table(&top, file, FILE);
        let filled = |key| {
            let items = file.get(key).map(Spanned::get_ref);
            matches!(items, Some(DeValue::Array(items)) if !items.is_empty())
        };
        if self.problems.is_empty() && !filled("finding") && !filled("answer") {
            self.problems.push(top.problem("", KeyError::NothingThere));
        }
        Error::of(self.problems).map(|()| self.places)
    }

    /// The line of a byte, from 1.
    fn line(&self, at: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= at)
    }

    fn place(&self, entry: String, at: usize, table: &DeTable<'_>) -> FindingPlace {
        let keys = table.keys();
        let keys = keys.map(|key| (key.get_ref().to_string(), self.line(key.span().start)));
        FindingPlace {
            entry,
            header: self.line(at),
            keys: keys.collect(),
        }
    }

    fn table(&mut self, place: &FindingPlace, table: &DeTable<'_>, keys: Keys) {
        let names: Vec<&str> = keys.iter().map(|(name, _)| *name).collect();
        for key in table.keys().map(|key| key.get_ref().as_ref()) {
            if !names.contains(&key) {
                let near = nearest(key, names.iter().copied(), 1);
                let fault = KeyError::UnknownKey {
                    nearest: near.concat(),
                    known: names.join(", "),
                };
                self.problems.push(place.problem(key, fault));
            }
        }
        for &(key, kind) in keys {
            match table.get(key) {
                Some(value) => self.value(place, key, kind, value),
                None if matches!(kind, Kind::Id | Kind::Required) => {
                    self.problems.push(place.problem(key, KeyError::Missing));
                }
                None => {}
            }
        }
    }

    fn value(
        &mut self,
        place: &FindingPlace,
        key: &'static str,
        kind: Kind,
        value: &Spanned<DeValue<'_>>,
    ) {
        let at = value.span().start;
        let expected = match (kind, value.get_ref()) {
            (Kind::Id, number) => match id(number) {
                Some(_) => return,
                None => return self.problem(place, at, key, self.not_an_id(value)),
            },
            (Kind::Text | Kind::Required | Kind::Grade | Kind::Item, DeValue::String(text)) => {
                return self.text(place, at, key, kind, text);
            }
            (Kind::Ids, DeValue::Array(items)) => {
                let items = items.iter();
                return items.for_each(|item| self.value(place, key, Kind::Id, item));
            }
            (Kind::Texts, DeValue::Array(items)) => {
                let items = items.iter();
                return items.for_each(|item| self.value(place, key, Kind::Item, item));
            }
            (Kind::Tables(keys), DeValue::Array(items)) => {
                return self.tables(place, key, keys, items);
            }
            (Kind::Text | Kind::Required | Kind::Grade, _) => "a string",
            (Kind::Ids, _) => "a list of ids",
            (Kind::Texts | Kind::Item, _) => "a list of strings",
            (Kind::Tables(_), _) => "a list of tables ([[...]])",
        };
        let got = value.get_ref().type_str();
        self.problem(place, at, key, KeyError::WrongType { expected, got });
    }

    fn not_an_id(&self, value: &Spanned<DeValue<'_>>) -> KeyError {
        let text = self.text.get(value.span()).unwrap_or_default();
        let got = text.chars().take(40).collect();
        KeyError::NotAnId { got }
    }

    fn text(&mut self, place: &FindingPlace, at: usize, key: &str, kind: Kind, text: &str) {
        let harmful = |c: &char| c.is_control() && !matches!(c, '\n' | '\t' | '\r');
        if let Some(code) = text.chars().find(harmful).map(u32::from) {
            self.problem(place, at, key, KeyError::ControlCharacter { code });
        }
        match kind {
            Kind::Required if text.trim().is_empty() => {
                self.problem(place, at, key, KeyError::Empty);
            }
            Kind::Grade if !GRADES.contains(&text) => {
                let got = text.to_owned();
                self.problem(place, at, key, KeyError::NotAConfidence { got });
            }
            _ => {}
        }
    }

    fn tables(
        &mut self,
        file: &FindingPlace,
        kind: &'static str,
        keys: Keys,
        items: &[Spanned<DeValue<'_>>],
    ) {
        for (number, item) in items.iter().enumerate() {
            let at = item.span().start;
            let DeValue::Table(table) = item.get_ref() else {
                let (expected, got) = ("a table ([[...]])", item.get_ref().type_str());
                self.problem(file, at, kind, KeyError::WrongType { expected, got });
                continue;
            };
            let mut entry = format!("[[{kind}]] {}", number + 1);
            if let Some(id) = table.get("id").and_then(|value| id(value.get_ref())) {
                entry += &format!(" (id {id})");
            }
            let place = self.place(entry, at, table);
            self.table(&place, table, keys);
            self.places.insert((kind, number), place);
        }
    }

    fn problem(&mut self, place: &FindingPlace, at: usize, key: &str, fault: KeyError) {
        let line = self.line(at);
        self.problems.push(EntryError {
            line,
            ..place.problem(key, fault)
        });
    }
}

/// A whole number from 1 to `u32::MAX`.
fn id(value: &DeValue<'_>) -> Option<u32> {
    let DeValue::Integer(number) = value else {
        return None;
    };
    let id = u32::from_str_radix(number.as_str(), number.radix()).ok();
    id.filter(|id| *id > 0)
}
