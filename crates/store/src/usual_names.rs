//! Usual names of models, and their hub repositories.
//!
//! The names are those of other programs' libraries (`qwen3:8b`), listed in
//! `data/usual-names.json`. The list was written offline: an entry is *checked* once `cargo xtask
//! catalogue --check` has seen its files on the hub.

use std::sync::LazyLock;

use paceline_base::Bytes;
use serde::{Deserialize, Serialize};

use crate::catalogue::Catalogue;

/// A name with its repository.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UsualName {
    /// `family:size`.
    pub name: String,
    pub also: Vec<String>,
    /// Hub id, with a selector if the repository has several models.
    pub hub: String,
    /// Name of its shape in the planner's catalogue, if any.
    pub shape: Option<String>,
    /// Stored bits per weight on average.
    pub bits: f64,
    /// `general.architecture` of its files if unsupported, else `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncomputed: Option<String>,
    /// The hub's files; `None` if unchecked.
    pub checked: Option<HubFiles>,
}

/// The hub's files under a hub id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HubFiles {
    pub commit: String,
    /// The files of the model, in order.
    pub files: Vec<String>,
    /// Their total bytes.
    pub bytes: u64,
}

impl HubFiles {
    /// Size of all files.
    pub const fn size(&self) -> Bytes {
        Bytes(self.bytes)
    }
}

static NAMES: LazyLock<Vec<UsualName>> =
    LazyLock::new(|| parse(USUAL_NAMES).expect("a test reads the list"));

/// The built-in list.
pub const USUAL_NAMES: &str = include_str!("../data/usual-names.json");

/// Parses a list of names.
pub fn parse(text: &str) -> Result<Vec<UsualName>, serde_json::Error> {
    serde_json::from_str(text)
}

/// All names, grouped by family.
pub fn usual_names() -> &'static [UsualName] {
    &NAMES
}

/// The usual name for `spec`, ignoring case; a dash may replace the colon.
pub fn usual_name(spec: &str) -> Option<&'static UsualName> {
    if Catalogue::BUILTIN.find(spec).is_some() {
        return None; // the catalogue's own names come first
    }
    let is = |name: &String| {
        name.eq_ignore_ascii_case(spec) || name.replace(':', "-").eq_ignore_ascii_case(spec)
    };
    let mut names = NAMES.iter();
    names.find(|usual| is(&usual.name) || usual.also.iter().any(is))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::name::HubId;

    #[test]
    fn every_name_means_one_repository() {
        let mut seen = BTreeSet::new();
        for usual in usual_names() {
            for name in std::iter::once(&usual.name).chain(&usual.also) {
                assert!(seen.insert(name.clone()), "{name} twice");
                assert!(Catalogue::BUILTIN.find(name).is_none(), "{name}");
                assert_eq!(name.to_lowercase(), *name);
                let dashed = name.replace(':', "-");
                let ours = Catalogue::BUILTIN.find(&dashed).is_some();
                assert_eq!(usual_name(&dashed), Some(usual).filter(|_| !ours));
                assert_eq!(usual_name(&name.to_uppercase()), Some(usual));
            }
            let repo = usual.hub.split(':').next().unwrap();
            assert!(HubId::parse(repo).is_ok(), "{}", usual.hub);
            assert!((1.0..=32.0).contains(&usual.bits), "{}", usual.name);
        }
        for name in [
            "qwen3:8b",
            "gpt-oss:20b",
            "gemma3:1b",
            "llama3.2:3b",
            "nomic-embed-text",
        ] {
            assert!(seen.contains(name), "{name}");
        }
        assert_eq!(usual_name("qwen3:9b"), None);
        assert_eq!(usual_name(""), None);
    }
}
