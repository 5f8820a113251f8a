//! Tool calls in the formats of all families with a grammar.

use serde::Deserialize;

/// A family: markers of its template, control tokens, valid calls, invalid calls.
#[derive(Default, Deserialize)]
pub(super) struct Case {
    pub(super) template: String,
    pub(super) controls: Vec<String>,
    pub(super) calls: Vec<String>,
    pub(super) broken: Vec<String>,
}

impl Case {
    pub(super) fn all() -> Vec<Self> {
        serde_json::from_str(include_str!("families.json")).unwrap()
    }

    pub(super) fn controls(&self) -> Vec<&str> {
        self.controls.iter().map(String::as_str).collect()
    }
}
