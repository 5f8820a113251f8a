//! Contents of a knowledge base: findings, topics, quick answers, and the planner's assumptions
//! about them.

use std::fmt;

/// Confidence of a finding's collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// Read in the original.
    Verified,
    /// Several sources, or one that is close to the matter.
    High,
    /// A source at second hand, or an inference.
    Medium,
    /// Hearsay.
    Low,
}

impl Confidence {
    /// All grades, best first.
    pub const ALL: [Self; 4] = [Self::Verified, Self::High, Self::Medium, Self::Low];

    /// The word that files use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::High => "high",
            Self::Medium => "medium",
            Self::Low => "low",
        }
    }
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Source of an entry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// Part of the program.
    BuiltIn,
    /// A file of the user's, by its name.
    File(String),
}

/// A claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Unique among all findings, built in or not.
    pub id: u32,
    /// The knowledge area it was collected for.
    pub skill: String,
    pub statement: String,
    /// Figures, and how they are known. May be empty.
    pub evidence: String,
    /// The collector's grade; `None` where none was given.
    pub confidence: Option<Confidence>,
    /// Title that the claim was taken from; empty where unknown.
    pub source: String,
    /// Key words.
    pub tags: Vec<String>,
    /// Name of its first topic.
    pub topic: String,
    /// Findings whose claims disagree with this one, ascending; always symmetric.
    pub conflicts: Vec<u32>,
    /// Their disagreement, and doubts that need no second finding. May be empty.
    pub conflict_note: String,
    pub origin: Origin,
}

/// A knowledge area.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topic {
    /// Display name.
    pub name: String,
    /// A sentence; may be empty.
    pub description: String,
    /// Findings that the area's source lists.
    pub ids: Vec<u32>,
    /// Findings placed here although the source lists them elsewhere or nowhere.
    pub also: Vec<u32>,
    pub origin: Origin,
}

impl Topic {
    /// The name as one types it: lower case, words joined by `-`.
    pub fn slug(&self) -> String {
        slug(&self.name)
    }

    /// All findings, those of `ids` first.
    pub fn findings(&self) -> impl Iterator<Item = u32> + '_ {
        self.ids.iter().chain(&self.also).copied()
    }
}

/// Lower case, words joined by `-`: `"Cost & Power"` gives `"cost-power"`.
pub(crate) fn slug(name: &str) -> String {
    let lower = name.to_lowercase();
    let words = lower.split(|c: char| !c.is_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    words.join("-")
}

/// A common question with a short answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuickAnswer {
    /// The question as it was collected.
    pub question: String,
    pub answer: String,
    /// Findings that it rests on.
    pub findings: Vec<u32>,
    /// The part of the answer that goes beyond the findings. May be empty.
    pub note: String,
    pub origin: Origin,
}

/// An assumption of the planner where findings disagree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assumption {
    /// The subject on which the findings disagree.
    pub subject: String,
    /// The findings: at least two that conflict, or one that carries a doubt of its own.
    pub findings: Vec<u32>,
    /// The planner's assumption.
    pub assumes: String,
    /// Why it does.
    pub why: String,
}

/// A command that checks findings on the user's own machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    pub findings: Vec<u32>,
    /// The command as one types it, `paceline` first; words in capitals are for the user to fill
    /// in.
    pub command: String,
    /// The result that it shows.
    pub shows: String,
}

/// Two findings that disagree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// The smaller id.
    pub first: u32,
    /// The larger id.
    pub second: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs_are_what_one_types() {
        for (name, slugged) in [
            ("JACCL Backend", "jaccl-backend"),
            ("Cost & Power", "cost-power"),
            ("RDMA over Thunderbolt 5", "rdma-over-thunderbolt-5"),
            ("Non-ML Distributed Compute", "non-ml-distributed-compute"),
            ("  --  ", ""),
            ("Größe", "größe"),
        ] {
            assert_eq!(slug(name), slugged);
        }
    }
}
