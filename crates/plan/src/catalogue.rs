//! Machines, links and models by name, and clusters written in TOML.
//!
//! The tree's catalogues lie in `data/`, each number with its source. A file that a user writes
//! has the same tables and is looked into first:
//!
//! ```toml
//! name = "two studios and a box"
//!
//! [[node]]                      # one or `count` machines
//! kind = "mac-studio-m3-ultra-512"
//! count = 2
//!
//! [[node]]
//! name = "box"
//! kind = "my-box"
//!
//! [[link]]                      # joins all nodes, or those named in `between`
//! kind = "10gbe"
//!
//! [[hardware]]                  # what the catalogue lacks
//! kind = "my-box"
//! memory_gb = 64
//! memory_bandwidth_gb_s = 80
//! backend = "cpu"
//! source = "measured"
//! ```

mod cluster_file;
mod hardware;
mod models;

use serde::de::DeserializeOwned;

pub use cluster_file::{ClusterFile, LinkEntry, NodeEntry, parse_cluster, short_cluster};
pub use hardware::{HardwareEntry, LinkKind};
pub use models::ModelEntry;

use crate::Error;

/// Machines, links and models that the tree knows, and those that a user's file adds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Catalogue {
    /// Machines.
    pub hardware: Vec<HardwareEntry>,
    pub links: Vec<LinkKind>,
    pub models: Vec<ModelEntry>,
}

/// Reads TOML into `T`; `what` names the text in errors.
///
/// # Errors
/// [`Error::Toml`] with the parser's words.
pub fn parse<T: DeserializeOwned>(text: &str, what: &str) -> Result<T, Error> {
    toml::from_str(text).map_err(|error| Error::Toml {
        what: what.to_owned(),
        reason: reason(&error, text),
    })
}

/// Position of the error, start of that line, and cause. The parser's own message quotes the whole
/// line, which may be megabytes long.
fn reason(error: &toml::de::Error, text: &str) -> String {
    const SHOWN: usize = 120; // characters
    let before = error.span().and_then(|span| text.get(..span.start));
    let Some(before) = before else {
        return error.message().to_owned();
    };
    let start = before.rfind('\n').map_or(0, |end| end + 1);
    let column = before[start..].chars().count() + 1;
    let line = before.matches('\n').count() + 1;
    let shown: String = text[start..].chars().take(SHOWN).collect();
    let shown = shown.lines().next().unwrap_or_default();
    let why = error.message();
    format!("TOML parse error at line {line}, column {column}\n  {shown}\n{why}")
}

#[derive(Debug, Default, serde::Deserialize)]
struct Tables {
    #[serde(default)]
    hardware: Vec<HardwareEntry>,
    #[serde(default)]
    link: Vec<LinkKind>,
    #[serde(default)]
    model: Vec<ModelEntry>,
}

impl Catalogue {
    /// The catalogues in the tree.
    ///
    /// # Errors
    /// [`Error::Toml`] when a file in the tree is broken.
    pub fn builtin() -> Result<Self, Error> {
        let mut all = Self::default();
        for (text, what) in [
            (include_str!("../data/hardware.toml"), "hardware.toml"),
            (include_str!("../data/links.toml"), "links.toml"),
            (include_str!("../data/models.toml"), "models.toml"),
        ] {
            let tables: Tables = parse(text, what)?;
            all.hardware.extend(tables.hardware);
            all.links.extend(tables.link);
            all.models.extend(tables.model);
        }
        Ok(all)
    }

    /// Puts `own` before what is there, so that it is found first. A machine that both have keeps
    /// the facts that `own` does not state.
    pub fn add(&mut self, own: Self) {
        let mut hardware = own.hardware;
        for entry in &mut hardware {
            if let Some(known) = self.hardware.iter().find(|h| h.kind == entry.kind) {
                entry.complete(known);
            }
        }
        hardware.append(&mut self.hardware);
        self.hardware = hardware;
        self.links.splice(0..0, own.links);
        self.models.splice(0..0, own.models);
    }

    /// A machine by its kind.
    ///
    /// # Errors
    /// [`Error::Unknown`] with names that look like it.
    pub fn machine(&self, kind: &str) -> Result<&HardwareEntry, Error> {
        let names = self.hardware.iter().map(|h| h.kind.as_str());
        find(self.hardware.iter(), |h| &h.kind, kind).ok_or_else(|| unknown("machine", kind, names))
    }

    /// A link by its kind.
    ///
    /// # Errors
    /// [`Error::Unknown`] with names that look like it.
    pub fn link(&self, kind: &str) -> Result<&LinkKind, Error> {
        let names = self.links.iter().map(|l| l.kind.as_str());
        find(self.links.iter(), |l| &l.kind, kind).ok_or_else(|| unknown("link", kind, names))
    }

    /// A model by its name, or by a start of it that no other has; letters' case apart.
    ///
    /// # Errors
    /// [`Error::Unknown`] with names that look like it.
    pub fn model(&self, name: &str) -> Result<&ModelEntry, Error> {
        let names = self.models.iter().map(|m| m.name.as_str());
        let exact = find(self.models.iter(), |m| &m.name, name);
        let starts = |m: &&ModelEntry| {
            let start = m.name.get(..name.len());
            !name.is_empty() && start.is_some_and(|start| start.eq_ignore_ascii_case(name))
        };
        let mut by_start = self.models.iter().filter(starts);
        let single = by_start.next().filter(|_| by_start.next().is_none());
        exact
            .or(single)
            .ok_or_else(|| unknown("model", name, names))
    }
}

fn find<'a, T>(
    mut all: impl Iterator<Item = &'a T>,
    name_of: impl Fn(&T) -> &String,
    name: &str,
) -> Option<&'a T> {
    all.find(|entry| name_of(entry).eq_ignore_ascii_case(name))
}

/// The error for a name, with up to five that share most letter pairs with it.
fn unknown<'a>(kind: &'static str, name: &str, all: impl Iterator<Item = &'a str>) -> Error {
    let pairs = |text: &str| -> Vec<(char, char)> {
        let lower: Vec<char> = text.to_lowercase().chars().take(64).collect();
        lower.windows(2).map(|w| (w[0], w[1])).collect()
    };
    let wanted = pairs(name);
    let mut scored: Vec<(usize, &str)> = all
        .map(|candidate| {
            let own = pairs(candidate);
            (
                wanted.iter().filter(|pair| own.contains(pair)).count(),
                candidate,
            )
        })
        .collect();
    scored.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
    scored.dedup();
    let nearest: Vec<&str> = scored.iter().take(5).map(|s| s.1).collect();
    Error::Unknown {
        kind,
        name: name.chars().take(80).collect(),
        nearest: nearest.join(", "),
    }
}
