//! `--drafts`: the most tokens of an answer that are drafted at a time.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// Largest number of `--drafts`.
const DRAFTS_MAX: u8 = 16;

/// Most draft tokens of a step; `None` for `auto`, the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct DraftLimit(pub(crate) Option<u8>);

/// A value of `--drafts` that is neither `auto` nor in range.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("auto, or a number from 0 to {DRAFTS_MAX}")]
pub(crate) struct NotDrafts;

impl FromStr for DraftLimit {
    type Err = NotDrafts;

    fn from_str(text: &str) -> Result<Self, NotDrafts> {
        if text == "auto" {
            return Ok(Self(None));
        }
        let most = text.parse().ok().filter(|most| *most <= DRAFTS_MAX);
        most.map(|most| Self(Some(most))).ok_or(NotDrafts)
    }
}

impl fmt::Display for DraftLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("auto"),
            Some(most) => most.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_auto_or_small_numbers() {
        for text in ["auto", "0", "16"] {
            let limit: DraftLimit = text.parse().unwrap();
            assert_eq!(limit.to_string(), text);
        }
        for wrong in ["", "17", "-1", "Auto", "8.5"] {
            assert_eq!(wrong.parse::<DraftLimit>(), Err(NotDrafts), "{wrong}");
        }
    }
}
