//! Contents of a knowledge base, as files write them.

use serde::{Deserialize, Serialize};

/// Origin of an entry that is part of the program. Other origins are names of user files.
pub const BUILT_IN: &str = "built-in";

/// Grades of confidence, best first: read in the original; several sources or a close one; a
/// source at second hand or an inference; hearsay.
pub const GRADES: [&str; 4] = ["verified", "high", "medium", "low"];

/// A claim. Texts are empty where the file has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// Unique among all findings, built in or not.
    pub id: u32,
    /// The knowledge area it was collected for.
    pub skill: String,
    pub statement: String,
    /// Figures, and how they are known.
    pub evidence: String,
    /// The collector's grade, one of [`GRADES`].
    pub confidence: Option<String>,
    /// Title that the claim was taken from.
    pub source: String,
    /// Key words.
    pub tags: Vec<String>,
    /// Name of its first topic.
    pub topic: String,
    /// Findings whose claims disagree with this one, ascending; always symmetric.
    pub conflicts: Vec<u32>,
    /// Their disagreement, and doubts that need no second finding.
    pub conflict_note: String,
    /// [`BUILT_IN`] or the name of the user's file.
    #[serde(skip)]
    pub origin: String,
}

impl Finding {
    /// Its confidence for people.
    pub(crate) fn grade(&self) -> &str {
        self.confidence.as_deref().unwrap_or("not graded")
    }
}

/// A knowledge area.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Topic {
    pub name: String,
    /// A sentence; may be empty.
    pub description: String,
    /// Findings that the area's source lists.
    pub ids: Vec<u32>,
    /// Findings placed here although the source lists them elsewhere or nowhere.
    pub also: Vec<u32>,
    /// [`BUILT_IN`] or the name of the user's file.
    #[serde(skip)]
    pub origin: String,
}

impl Topic {
    /// The name as one types it: `Cost & Power` is `cost-power`.
    pub fn slug(&self) -> String {
        slug(&self.name)
    }

    /// All findings, those of `ids` first.
    pub fn findings(&self) -> impl Iterator<Item = u32> + '_ {
        self.ids.iter().chain(&self.also).copied()
    }
}

/// Lower case, words joined by `-`.
pub(crate) fn slug(name: &str) -> String {
    let lower = name.to_lowercase();
    let words = lower.split(|c: char| !c.is_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    words.join("-")
}

/// A common question with a short answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct QuickAnswer {
    pub question: String,
    pub answer: String,
    /// Findings that it rests on.
    pub findings: Vec<u32>,
    /// The part of the answer that goes beyond the findings. May be empty.
    pub note: String,
    /// [`BUILT_IN`] or the name of the user's file.
    #[serde(skip_deserializing)]
    pub origin: String,
}

/// An assumption of the planner where findings disagree.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Assumption {
    /// The subject on which the findings disagree.
    pub subject: String,
    /// The findings: at least two that conflict, or one that carries a doubt of its own.
    pub findings: Vec<u32>,
    /// The planner's assumption.
    pub assumes: String,
    pub why: String,
}

/// A command that checks findings on the user's own machines.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    pub findings: Vec<u32>,
    /// The command as one types it, `paceline` first; the user fills in words in capitals.
    pub command: String,
    /// The result that it shows.
    pub shows: String,
}
