//! The ways to divide a model, as a user names them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Error, MAX_RANKS};

/// How a model is divided. Serialises as its text, such as `2x2`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum SplitKind {
    /// Tensor split up to the number of heads, then pipeline.
    #[default]
    Auto,
    /// Tensor parallel: all ranks share every layer.
    Tensor,
    /// Pipeline parallel: every rank has its own layers.
    Pipeline,
    /// `tensor` ranks in each of `pipeline` stages.
    Grid { tensor: u32, pipeline: u32 },
    /// Expert parallel: all ranks share the experts, and the feed-forward of dense layers; each has
    /// all heads.
    Experts,
    /// A grid whose stages share only experts; stages without experts share heads too.
    GridOfExperts { tensor: u32, pipeline: u32 },
}

/// The part of a layer that the ranks of a stage divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageKind {
    /// Heads and feed-forward: two exchanges a layer.
    #[default]
    Tensor,
    /// Experts, or the feed-forward of a dense layer; all ranks have the attention: one exchange
    /// per layer.
    Experts,
}

impl fmt::Display for SplitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Tensor => write!(f, "tensor"),
            Self::Pipeline => write!(f, "pipeline"),
            Self::Grid { tensor, pipeline } => write!(f, "{tensor}x{pipeline}"),
            Self::Experts => write!(f, "experts"),
            Self::GridOfExperts { tensor, pipeline } => write!(f, "{tensor}x{pipeline}-experts"),
        }
    }
}

impl From<SplitKind> for String {
    fn from(kind: SplitKind) -> Self {
        kind.to_string()
    }
}

impl TryFrom<String> for SplitKind {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl FromStr for SplitKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let count = |text: &str| text.parse().ok().filter(|n| (1..=MAX_RANKS).contains(n));
        match text {
            "auto" => return Ok(Self::Auto),
            "tensor" => return Ok(Self::Tensor),
            "pipeline" => return Ok(Self::Pipeline),
            "experts" => return Ok(Self::Experts),
            _ => {}
        }
        let (sizes, of_experts) = match text.strip_suffix("-experts") {
            Some(sizes) => (sizes, true),
            None => (text, false),
        };
        let grid = sizes.split_once('x').and_then(|(tensor, pipeline)| {
            let (tensor, pipeline) = (count(tensor)?, count(pipeline)?);
            Some(match of_experts {
                true => Self::GridOfExperts { tensor, pipeline },
                false => Self::Grid { tensor, pipeline },
            })
        });
        grid.ok_or_else(|| Error::Kind {
            got: text.to_owned(),
        })
    }
}
