//! Errors of loading and computing a model.

use std::borrow::Cow;
use std::time::Duration;

use paceline_base::{KernelClass, Rank};
use paceline_formats::tensor::Absent;
use paceline_formats::{gguf, hf};

use crate::role::Role;
use crate::split;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    #[error(transparent)]
    Hf(#[from] hf::Error),
    /// Weights of a file that still arrives do not come.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// The file is of an architecture that paceline does not know.
    #[error("model architecture {architecture:?} is not supported, expected one of {supported}")]
    Architecture {
        /// The name in the file.
        architecture: String,
        supported: String,
    },
    #[error("config.json has no {field}")]
    MissingField { field: &'static str },
    /// A field of the configuration is of another type.
    #[error("config.json: {field} is {got}, expected {expected}")]
    FieldType {
        field: String,
        expected: &'static str,
        /// The value that is there.
        got: String,
    },
    /// A value that no model of this family has, or that paceline cannot compute with.
    #[error("{field} is {got}, expected {expected}")]
    Value {
        field: &'static str,
        got: String,
        /// Values that would be accepted.
        expected: Cow<'static, str>,
    },
    /// A weight has another shape than the configuration says.
    #[error("tensor {name}: shape {got:?}, expected {expected:?}")]
    Shape {
        name: String,
        /// Shape in the file, outermost first.
        got: Vec<usize>,
        expected: Vec<usize>,
    },
    /// A weight is infinite or not a number, where that would decide everything else.
    #[error("tensor {name} holds {got}, expected finite numbers")]
    NotFinite { name: String, got: f32 },
    #[error("tensor {name}: {source}")]
    Pack {
        name: String,
        source: paceline_tensor::Error,
    },
    /// The shape of a layer is not one that can be computed.
    #[error("layer {layer}: {what}")]
    Layer { layer: usize, what: &'static str },
    /// A kernel class is for models whose layers are all alike and dense.
    #[error(
        "kernel class {class} does not compute models of the family {family}, whose layers have \
         experts, states or sizes of their own"
    )]
    FamilyClass {
        /// The name of the family.
        family: &'static str,
        /// The class that was asked for.
        class: KernelClass,
    },
    /// An adapter is for another model, or for matrices that nothing can be added to.
    #[error("adapter {name}: {reason}")]
    Adapter {
        name: String,
        /// The part that does not fit.
        reason: String,
    },
    /// More adapters than a model may have beside it.
    #[error("{got} adapters, expected at most {most}")]
    Adapters {
        got: usize,
        /// [`ADAPTERS_MAX`](crate::ADAPTERS_MAX).
        most: usize,
    },
    /// The engine has no adapters beside its weights.
    #[error("engine {engine} adds no adapters to its weights: fuse them")]
    AdapterEngine {
        /// The engine that was asked.
        engine: &'static str,
    },
    #[error("engine {engine} does not compute recurrent layers other than gated delta nets")]
    Recurrence {
        /// The engine that was asked.
        engine: &'static str,
    },
    /// The engine has no split in which ranks share the experts alone.
    #[error("engine {engine} does not compute stages whose ranks share the experts alone")]
    ExpertSplit {
        /// The engine that was asked.
        engine: &'static str,
    },
    /// Matrices that are computed with together are stored in different forms.
    #[error("engine {engine} needs the experts or heads of a layer in one storage type")]
    MixedForms {
        /// The engine that was asked.
        engine: &'static str,
    },
    /// Positions beyond those that a sparse attention's indexer takes all of.
    #[error(
        "context is {context}, expected at most {top_k}: beyond, the model's indexer chooses which \
         positions a row sees, and paceline does not compute it"
    )]
    Indexer {
        /// Positions asked for.
        context: usize,
        /// Positions that the indexer chooses.
        top_k: usize,
    },
    #[error("key/value cache: {0}")]
    Cache(paceline_tensor::Error),
    #[error(transparent)]
    Split(#[from] split::Error),
    /// MLX cannot be used, or a call of it failed.
    #[error(transparent)]
    Mlx(#[from] paceline_mlx::Error),
    #[error("kernel class {class} is not one of engine {engine}")]
    Class {
        /// The class that was asked for.
        class: KernelClass,
        /// The engine that was asked.
        engine: &'static str,
    },
    /// A rank's columns of a matrix begin or end within a group of quantised values.
    #[error(
        "{role:?}: a cut at column {column} is within a group of {group} quantised values, which \
         mlx does not cut"
    )]
    CutGroup {
        role: Role,
        column: usize,
        group: usize,
    },
    /// A matrix of a type that the engine would hold with other values.
    #[error("{engine} has no form for {block_type}, which {role:?} is of")]
    NoForm {
        role: Role,
        /// How the file has it.
        block_type: &'static str,
        engine: &'static str,
    },
    /// The system refuses a thread: that which MLX computes on, or that which exchanges sums.
    #[error("start a thread: {0}")]
    Thread(std::io::Error),
    /// A half of a step, which takes turns with the other, does not come.
    #[error("the {half} half of the step did not come within {} s", limit.as_secs_f64())]
    HalfLate {
        /// Which: first or second.
        half: &'static str,
        /// The longest that is waited for.
        limit: Duration,
    },
    #[error("{}", hung(*limit, *usual))]
    Hung {
        /// The longest that is waited for.
        limit: Duration,
        /// The longest that it should take by those before; `None` for the first.
        usual: Option<Duration>,
    },
    /// The thread that MLX computes on has panicked.
    #[error("the thread of mlx is gone")]
    Gone,
    /// Another rank failed, or the way to it.
    #[error(transparent)]
    Comm(#[from] paceline_comm::Error),
    /// A rank of the same stage failed, or the way to it. Its number counts from the first of the
    /// stage.
    #[error("among the ranks of the stage, counted from {first}: {source}")]
    Stage {
        /// The first rank of the stage.
        first: Rank,
        /// The error of the group.
        source: paceline_comm::Error,
    },
    /// The leader asked for a step that does not fit this rank's sizes.
    #[error("plan of a step: {what} is {got}, expected at most {limit}")]
    Plan {
        /// The size that does not fit.
        what: &'static str,
        /// Size that the leader asked for.
        got: usize,
        limit: usize,
    },
    /// A layer whose pages the ranks of one split cannot give those of another.
    #[error(
        "layer {layer} is a gated delta net whose heads the prompts' nodes share otherwise than \
         the others: its states cannot be handed over"
    )]
    NotHanded {
        /// The layer, counted from 0.
        layer: usize,
    },
}

/// Whether a device is slow can be told only where it was measured before.
fn hung(limit: Duration, usual: Option<Duration>) -> String {
    let limit = limit.as_secs();
    match usual {
        Some(usual) => format!(
            "mlx hangs: an evaluation has taken more than {limit} s, at most {:.3} s by those before",
            usual.as_secs_f64()
        ),
        None => format!(
            "mlx is slow or hangs: an evaluation has taken more than {limit} s, and none before it \
             was measured"
        ),
    }
}

impl Error {
    /// The rank of the split that a failure between ranks is to be blamed on.
    pub const fn blamed(&self) -> Option<Rank> {
        match self {
            Self::Comm(error) => at_fault(error),
            Self::Stage { first, source } => match at_fault(source) {
                Some(rank) => Some(Rank(first.0 + rank.0)),
                None => None,
            },
            _ => None,
        }
    }
}

/// The rank that a failed call names, in its own group.
const fn at_fault(error: &paceline_comm::Error) -> Option<Rank> {
    use paceline_comm::Error;
    match error {
        Error::PeerLost { rank, .. }
        | Error::Timeout { rank, .. }
        | Error::Mismatch { rank, .. }
        | Error::Silent { rank, .. }
        | Error::Garbled { rank, .. } => Some(*rank),
        Error::Length { .. }
        | Error::NoSuchRank { .. }
        | Error::Unsupported { .. }
        | Error::Library { .. }
        | Error::System { .. } => None,
    }
}
