//! The values of one table, with a problem for each that is not what it should be.
//!
//! A getter never fails: it notes the problem and gives an empty value, so that one reading finds
//! all problems of a file. The entries are thrown away when there was any.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Place;
use crate::error::{Fault, Problem};
use crate::nearest::nearest;

/// Start offsets of lines, and the errors so far.
pub(super) struct Reader<'t> {
    text: &'t str,
    line_starts: Vec<usize>,
    pub(super) problems: Vec<Problem>,
}

impl<'t> Reader<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        let newlines = text.match_indices('\n').map(|(at, _)| at + 1);
        Self {
            text,
            line_starts: std::iter::once(0).chain(newlines).collect(),
            problems: Vec::new(),
        }
    }

    /// The line of a byte, from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= at)
    }

    /// The table of an entry whose header is on line `header`.
    pub(super) fn fields<'r, 'd>(
        &'r mut self,
        entry: String,
        header: usize,
        table: &'r DeTable<'d>,
    ) -> Fields<'r, 't, 'd> {
        let lines = table
            .keys()
            .map(|key| (key.get_ref().to_string(), self.line(key.span().start)));
        let place = Place {
            entry,
            header,
            keys: lines.collect(),
        };
        Fields {
            reader: self,
            table,
            place,
        }
    }

    /// Like [`Self::fields`], for a table with no keys other than `known`.
    pub(super) fn table<'r, 'd>(
        &'r mut self,
        entry: String,
        header: usize,
        table: &'r DeTable<'d>,
        known: &[&str],
    ) -> Fields<'r, 't, 'd> {
        let mut fields = self.fields(entry, header, table);
        fields.known(known);
        fields
    }

    pub(super) fn wrong_type(
        &mut self,
        entry: &str,
        line: usize,
        key: &str,
        expected: &'static str,
        got: &DeValue<'_>,
    ) {
        let got = got.type_str();
        self.problems.push(Problem {
            line,
            entry: entry.to_owned(),
            key: key.to_owned(),
            fault: Fault::WrongType { expected, got },
        });
    }
}

/// The fields of a table.
pub(super) struct Fields<'r, 't, 'd> {
    reader: &'r mut Reader<'t>,
    table: &'r DeTable<'d>,
    place: Place,
}

impl<'r, 'd> Fields<'r, '_, 'd> {
    pub(super) fn place(&self) -> Place {
        self.place.clone()
    }

    pub(super) fn problem(&mut self, key: &str, fault: Fault) {
        self.reader.problems.push(self.place.problem(key, fault));
    }

    /// Notes every key that is not among `known`.
    pub(super) fn known(&mut self, known: &[&str]) {
        let keys = self.table.keys().map(|key| key.get_ref().as_ref());
        let unknown: Vec<&str> = keys.filter(|key| !known.contains(key)).collect();
        for key in unknown {
            let close = nearest(key, known.iter().copied(), 1);
            let fault = Fault::UnknownKey {
                nearest: close.first().map(|&name| name.to_owned()),
                known: known.join(", "),
            };
            self.problem(key, fault);
        }
    }

    /// A string that must be there and not be blank.
    pub(super) fn string(&mut self, key: &str) -> String {
        match self.optional_string(key) {
            Some(text) if text.trim().is_empty() => {
                self.problem(key, Fault::Empty);
                text
            }
            Some(text) => text,
            None => {
                if !self.table.contains_key(key) {
                    self.problem(key, Fault::Missing);
                }
                String::new()
            }
        }
    }

    /// A string that may be missing.
    pub(super) fn optional_string(&mut self, key: &str) -> Option<String> {
        let value = self.table.get(key)?;
        self.text_of(key, value, "a string")
    }

    /// A list of strings; empty when it is missing.
    pub(super) fn strings(&mut self, key: &str) -> Vec<String> {
        let items = self.items(key, "a list of strings");
        let texts = items
            .iter()
            .filter_map(|item| self.text_of(key, item, "a list of strings"));
        texts.collect()
    }

    /// A list of ids in the order of the file; empty when it is missing.
    pub(super) fn ids(&mut self, key: &str) -> Vec<u32> {
        let items = self.items(key, "a list of ids");
        let ids = items.iter().filter_map(|item| self.id_of(key, item));
        ids.collect()
    }

    /// An id that must be there.
    pub(super) fn id(&mut self, key: &str) -> Option<u32> {
        match self.table.get(key) {
            Some(value) => self.id_of(key, value),
            None => {
                self.problem(key, Fault::Missing);
                None
            }
        }
    }

    fn items(&mut self, key: &str, expected: &'static str) -> &'r [Spanned<DeValue<'d>>] {
        let table: &'r DeTable<'d> = self.table;
        let Some(value) = table.get(key) else {
            return &[];
        };
        match value.get_ref() {
            DeValue::Array(items) => items,
            other => {
                let line = self.reader.line(value.span().start);
                let entry = &self.place.entry;
                self.reader.wrong_type(entry, line, key, expected, other);
                &[]
            }
        }
    }

    fn text_of(
        &mut self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        expected: &'static str,
    ) -> Option<String> {
        let line = self.reader.line(value.span().start);
        let DeValue::String(text) = value.get_ref() else {
            let entry = &self.place.entry;
            let got = value.get_ref();
            self.reader.wrong_type(entry, line, key, expected, got);
            return None;
        };
        let harmful = |c: &char| c.is_control() && !matches!(c, '\n' | '\t' | '\r');
        if let Some(code) = text.chars().find(harmful) {
            let code = u32::from(code);
            self.at(line, key, Fault::ControlCharacter { code });
        }
        Some(text.to_string())
    }

    fn id_of(&mut self, key: &str, value: &Spanned<DeValue<'_>>) -> Option<u32> {
        let found = id(value.get_ref());
        if found.is_none() {
            let span = value.span();
            let text = self.reader.text.get(span.clone()).unwrap_or_default();
            let got = text.chars().take(40).collect();
            self.at(self.reader.line(span.start), key, Fault::NotAnId { got });
        }
        found
    }

    fn at(&mut self, line: usize, key: &str, fault: Fault) {
        let entry = self.place.entry.clone();
        let key = key.to_owned();
        self.reader.problems.push(Problem {
            line,
            entry,
            key,
            fault,
        });
    }
}

/// A whole number from 1 to `u32::MAX`.
pub(super) fn id(value: &DeValue<'_>) -> Option<u32> {
    let DeValue::Integer(number) = value else {
        return None;
    };
    let id = u32::from_str_radix(number.as_str(), number.radix()).ok();
    id.filter(|id| *id > 0)
}
