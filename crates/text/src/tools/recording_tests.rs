//! Calls in the form of each family, as SGLang, mlx-lm and transformers read them. Recorded by
//! `scripts/golden/tool_calls.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value as Json;

use super::tests::outcome;
use super::*;

#[derive(Deserialize)]
pub(super) struct Recorded {
    pub(super) tools: Vec<Json>,
    /// Response templates by family.
    pub(super) responses: BTreeMap<String, Json>,
    pub(super) cases: Vec<Case>,
}

#[derive(Deserialize)]
pub(super) struct Case {
    family: String,
    pub(super) name: String,
    /// Markers of the chat template.
    pub(super) template: String,
    pub(super) prompt: String,
    pub(super) answer: String,
    text: String,
    calls: Vec<(String, Json)>,
    /// Programs that read these calls.
    read_by: BTreeSet<String>,
}

/// Cases in the file: 12 lists of calls in 14 spellings, 2 of them behind a text in 12 spellings.
const CASES: usize = 192;

pub(super) fn recorded() -> Recorded {
    let text = include_str!("../../tests/golden/tool_calls.json");
    serde_json::from_str(text).unwrap()
}

/// The text and the calls of a response that arrives in `pieces`.
fn read(reader: ToolCallParser, pieces: &[&str]) -> (String, Vec<(String, Json)>) {
    let read = outcome(reader, pieces);
    assert_eq!((&*read.reasoning, read.failed), ("", 0));
    (read.text.trim().to_owned(), read.calls)
}

/// `make` gives a new reader.
fn check(case: &Case, make: impl Fn() -> ToolCallParser) {
    let expected = (case.text.clone(), case.calls.clone());
    let place = format!("{}, {}: {}", case.family, case.name, case.answer);
    assert_eq!(read(make(), &[&case.answer]), expected, "{place}");
    let one_by_one: Vec<String> = case.answer.chars().map(String::from).collect();
    let one_by_one: Vec<&str> = one_by_one.iter().map(String::as_str).collect();
    assert_eq!(read(make(), &one_by_one), expected, "{place}");
}

#[test]
fn calls_are_read_as_other_programs_read_them() {
    let recorded = recorded();
    assert_eq!(recorded.cases.len(), CASES);
    for case in &recorded.cases {
        assert!(!case.read_by.is_empty(), "{}, {}", case.family, case.name);
        let syntax = Syntax::of_source(&case.template);
        for holds_calls in [false, true] {
            let options = ReaderOptions {
                holds_calls,
                id_seed: 1,
            };
            check(case, || {
                syntax.reader_after(&case.prompt, &recorded.tools, options)
            });
        }
    }
}

#[test]
fn response_templates_are_read_as_transformers_reads_them() {
    let recorded = recorded();
    for (family, template) in &recorded.responses {
        let template = Arc::new(ResponseTemplate::read(template).unwrap());
        let cases = recorded.cases.iter().filter(|case| case.family == *family);
        let by_transformers = cases.filter(|case| case.read_by.contains("transformers"));
        let mut checked = 0;
        for case in by_transformers {
            let options = ReaderOptions::default();
            check(case, || {
                template.reader_after(&case.prompt, &recorded.tools, options)
            });
            checked += 1;
        }
        assert_eq!(checked, 14, "{family}");
    }
}
