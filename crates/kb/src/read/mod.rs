//! From the bytes of a file to its entries, or to everything that is wrong with it.
//!
//! Reading is in two passes: [`fields`] looks at types and keys of one table, this module at what
//! an entry needs. Whether ids and topics fit the rest of the knowledge base is for
//! [`crate::KnowledgeBase::check`] to say.

mod fields;

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::entry::{Assumption, Check, Confidence, Finding, Origin, QuickAnswer, Topic};
use crate::error::{Error, Fault, PROBLEMS_MAX, Problem};
use fields::{Fields, Reader};

/// Most bytes of one file. The 52 built-in findings take 50 KB, so this is room for a thousand.
pub const FILE_BYTES_MAX: usize = 1 << 20;

/// Knowledge area of a finding that names none.
const DEFAULT_SKILL: &str = "gpu-distributed";

/// Topic of a finding that names none.
const DEFAULT_TOPIC: &str = "Own findings";

/// The entries of one file, each valid by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) skill: Option<String>,
    pub(crate) description: String,
    pub(crate) topics: Vec<(Place, Topic)>,
    pub(crate) findings: Vec<(Place, Finding)>,
    pub(crate) answers: Vec<(Place, QuickAnswer)>,
    pub(crate) assumptions: Vec<Assumption>,
    pub(crate) checks: Vec<Check>,
}

/// Location of an entry, for error messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    entry: String,
    /// Line of the header.
    header: usize,
    /// Lines of the keys.
    keys: BTreeMap<String, usize>,
}

impl Place {
    /// A problem with `key` of this entry.
    pub(crate) fn problem(&self, key: &str, fault: Fault) -> Problem {
        Problem {
            line: self.keys.get(key).copied().unwrap_or(self.header),
            entry: self.entry.clone(),
            key: key.to_owned(),
            fault,
        }
    }
}

/// Kinds of entry that a file may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Topics, findings and answers.
    Findings,
    /// Assumptions and checks: only our own file has them.
    Planner,
}

/// Reads a file.
///
/// Cost: linear in the bytes; nesting is limited by the TOML parser (80 levels).
///
/// # Errors
/// Every [`Error`]: no byte of the file is trusted.
pub(crate) fn read(bytes: &[u8], dialect: Dialect, origin: &Origin) -> Result<Document, Error> {
    let text = decode(bytes)?;
    let table = DeTable::parse(text).map_err(|error| syntax(text, &error))?;
    let mut reader = Reader::new(text);
    let document = match dialect {
        Dialect::Findings => findings(&mut reader, table.get_ref(), origin),
        Dialect::Planner => planner(&mut reader, table.get_ref()),
    };
    finish(reader.problems).map(|()| document)
}

/// `Ok` when there are no problems, else the first of them by line.
pub(crate) fn finish(mut problems: Vec<Problem>) -> Result<(), Error> {
    if problems.is_empty() {
        return Ok(());
    }
    problems.sort_by_key(|problem| problem.line);
    let more = problems.len().saturating_sub(PROBLEMS_MAX);
    problems.truncate(PROBLEMS_MAX);
    Err(Error::Invalid { problems, more })
}

fn decode(bytes: &[u8]) -> Result<&str, Error> {
    if bytes.len() > FILE_BYTES_MAX {
        return Err(Error::TooLarge {
            max: FILE_BYTES_MAX,
        });
    }
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        Error::NotUtf8 {
            line: 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count(),
            at,
            byte: bytes[at],
        }
    })
}

fn syntax(text: &str, error: &toml::de::Error) -> Error {
    let mut at = error.span().map_or(0, |span| span.start).min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
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
fn key_near(text: &str, line_start: usize) -> Option<String> {
    let line_end = text[line_start..].find('\n').map(|end| line_start + end);
    let mut lines = text[..line_end.unwrap_or(text.len())].lines().rev();
    lines.find_map(|line| {
        let line = line.trim();
        if line.starts_with('[') {
            return Some(line.chars().take(60).collect());
        }
        let key = line.split('=').next()?.trim();
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        let is_key = !key.is_empty() && key.len() <= 60 && key.chars().all(plain);
        (is_key && line.len() > key.len()).then(|| key.to_owned())
    })
}

fn findings(reader: &mut Reader<'_>, table: &DeTable<'_>, origin: &Origin) -> Document {
    const KEYS: [&str; 5] = ["skill", "description", "topic", "finding", "answer"];
    let mut top = reader.table(String::new(), 1, table, &KEYS);
    let skill = top.optional_string("skill");
    let description = top.optional_string("description").unwrap_or_default();
    let mut document = Document {
        description,
        ..Document::default()
    };
    each(reader, table, "topic", |fields| {
        document
            .topics
            .push((fields.place(), topic(fields, origin)));
    });
    let of_file = skill.as_deref().unwrap_or(DEFAULT_SKILL);
    each(reader, table, "finding", |fields| {
        let finding = finding(fields, of_file, origin);
        document.findings.push((fields.place(), finding));
    });
    each(reader, table, "answer", |fields| {
        document
            .answers
            .push((fields.place(), answer(fields, origin)));
    });
    if document.findings.is_empty() && document.answers.is_empty() && reader.problems.is_empty() {
        let whole_file = Place {
            entry: String::new(),
            header: 1,
            keys: BTreeMap::new(),
        };
        reader
            .problems
            .push(whole_file.problem("", Fault::NothingThere));
    }
    document.skill = skill;
    document
}

fn planner(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Document {
    let mut document = Document::default();
    reader.table(String::new(), 1, table, &["assumption", "check"]);
    each(reader, table, "assumption", |fields| {
        fields.known(&["subject", "findings", "assumes", "why"]);
        document.assumptions.push(Assumption {
            subject: fields.string("subject"),
            findings: fields.ids("findings"),
            assumes: fields.string("assumes"),
            why: fields.string("why"),
        });
    });
    each(reader, table, "check", |fields| {
        fields.known(&["findings", "command", "shows"]);
        document.checks.push(Check {
            findings: fields.ids("findings"),
            command: fields.string("command"),
            shows: fields.string("shows"),
        });
    });
    document
}

/// Calls `visit` for every table of the list called `kind`.
fn each(
    reader: &mut Reader<'_>,
    table: &DeTable<'_>,
    kind: &str,
    mut visit: impl FnMut(&mut Fields<'_, '_, '_>),
) {
    let Some(value) = table.get(kind) else { return };
    let DeValue::Array(items) = value.get_ref() else {
        let line = reader.line(value.span().start);
        reader.wrong_type(
            "",
            line,
            kind,
            "a list of tables ([[...]])",
            value.get_ref(),
        );
        return;
    };
    for (number, item) in (1..).zip(items.iter()) {
        let line = reader.line(item.span().start);
        match item.get_ref() {
            DeValue::Table(table) => {
                let entry = entry_name(kind, number, table.get("id"));
                visit(&mut reader.fields(entry, line, table));
            }
            other => reader.wrong_type("", line, kind, "a table ([[...]])", other),
        }
    }
}

fn entry_name(kind: &str, number: usize, id: Option<&Spanned<DeValue<'_>>>) -> String {
    match id.and_then(|id| fields::id(id.get_ref())) {
        Some(id) => format!("[[{kind}]] {number} (id {id})"),
        None => format!("[[{kind}]] {number}"),
    }
}

fn topic(fields: &mut Fields<'_, '_, '_>, origin: &Origin) -> Topic {
    fields.known(&["name", "description", "ids", "also"]);
    Topic {
        name: fields.string("name"),
        description: fields.optional_string("description").unwrap_or_default(),
        ids: fields.ids("ids"),
        also: fields.ids("also"),
        origin: origin.clone(),
    }
}

fn finding(fields: &mut Fields<'_, '_, '_>, skill: &str, origin: &Origin) -> Finding {
    fields.known(&[
        "id",
        "skill",
        "statement",
        "evidence",
        "confidence",
        "source",
        "tags",
        "topic",
        "conflicts",
        "conflict_note",
    ]);
    let mut text = |key| fields.optional_string(key).unwrap_or_default();
    let [evidence, source, conflict_note] = ["evidence", "source", "conflict_note"].map(&mut text);
    let [own_skill, topic] = ["skill", "topic"].map(&mut text);
    let or = |text: String, default: &str| match text.trim() {
        "" => default.to_owned(),
        _ => text,
    };
    Finding {
        id: fields.id("id").unwrap_or_default(),
        skill: or(own_skill, skill),
        statement: fields.string("statement"),
        evidence,
        confidence: confidence(fields),
        source,
        tags: fields.strings("tags"),
        topic: or(topic, DEFAULT_TOPIC),
        conflicts: fields.ids("conflicts"),
        conflict_note,
        origin: origin.clone(),
    }
}

fn confidence(fields: &mut Fields<'_, '_, '_>) -> Option<Confidence> {
    let word = fields.optional_string("confidence")?;
    let found = Confidence::ALL.into_iter().find(|c| c.name() == word);
    if found.is_none() {
        fields.problem("confidence", Fault::NotAConfidence { got: word });
    }
    found
}

fn answer(fields: &mut Fields<'_, '_, '_>, origin: &Origin) -> QuickAnswer {
    fields.known(&["question", "answer", "findings", "note"]);
    QuickAnswer {
        question: fields.string("question"),
        answer: fields.string("answer"),
        findings: fields.ids("findings"),
        note: fields.optional_string("note").unwrap_or_default(),
        origin: origin.clone(),
    }
}

#[cfg(test)]
mod tests;
