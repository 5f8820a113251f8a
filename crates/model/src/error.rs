//! Errors of loading and computing a model, with the offending values.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_weights::tensor::Absent;
use paceline_weights::{gguf, hf};

use crate::packed_file::PackedFault;
use crate::role::Role;
use crate::split;

/// Why a model cannot be loaded or computed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    #[error(transparent)]
    Hf(#[from] hf::Error),
    /// Weights of a file that is still downloading do not arrive.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// Weights that stay on the disk cannot be read.
    #[error("cannot read weights from {}: {reason}", path.display())]
    Streaming { path: PathBuf, reason: String },
    /// There is no file to read weights from: the model's files are still fetched.
    #[error("a model can be larger than memory once all of its files are on this machine")]
    StreamPlace,
    /// Weights that would stay on the disk cannot be written there.
    #[error(transparent)]
    Packed(#[from] PackedFault),
    /// A process may have too little memory to compute even one layer at a time.
    #[error(
        "{given} of memory are too little: {needed} are needed, of them {units} for the largest \
         layer and expert, and the rest for the program, its cache and its steps"
    )]
    StreamMemory {
        /// The most memory of the process.
        given: Bytes,
        needed: Bytes,
        /// Of the largest layer and expert.
        units: Bytes,
    },
    /// An architecture that paceline does not support.
    #[error("model architecture {architecture:?} is not supported, expected one of {supported}")]
    Architecture {
        architecture: String,
        supported: String,
    },
    /// A key in a GGUF file's own name space that no reader of the family knows.
    #[error("{key} is no known key of models of the family {family}")]
    UnknownKey { key: String, family: &'static str },
    #[error("config.json has no {field}")]
    MissingField { field: &'static str },
    /// A configuration field has another type.
    #[error("config.json: {field} is {got}, expected {expected}")]
    FieldType {
        field: String,
        expected: &'static str,
        got: String,
    },
    /// A value that no model of this family has, or that paceline cannot compute with.
    #[error("{field} is {got}, expected {expected}")]
    Value {
        field: &'static str,
        got: String,
        /// Accepted values.
        expected: Cow<'static, str>,
    },
    /// A weight's shape differs from the configuration.
    #[error("tensor {name}: shape {got:?}, expected {expected:?}")]
    Shape {
        name: String,
        /// Shape in the file, outermost first.
        got: Vec<usize>,
        expected: Vec<usize>,
    },
    /// A weight that affects every result is infinite or NaN.
    #[error("tensor {name} holds {got}, expected finite numbers")]
    NotFinite { name: String, got: f32 },
    #[error("tensor {name}: {source}")]
    Pack {
        name: String,
        source: paceline_tensor::Error,
    },
    /// A layer shape that cannot be computed.
    #[error("layer {layer}: {what}")]
    Layer { layer: usize, what: &'static str },
    /// The kernel class only supports dense models whose layers are all alike.
    #[error(
        "kernel class {class} does not compute models of the family {family}, whose layers have \
         experts, states or sizes of their own"
    )]
    FamilyClass {
        family: &'static str,
        /// Requested class.
        class: KernelClass,
    },
    /// An adapter for another model, or for matrices without adapter support.
    #[error("adapter {name}: {reason}")]
    Adapter { name: String, reason: String },
    /// More adapters than a model can load.
    #[error("{got} adapters, expected at most {most}")]
    Adapters {
        got: usize,
        /// [`ADAPTERS_MAX`](crate::ADAPTERS_MAX).
        most: usize,
    },
    /// The backend does not support adapters.
    #[error("engine {engine} adds no adapters to its weights: fuse them")]
    AdapterEngine { engine: &'static str },
    /// A backend has no keys and values of a type for a model.
    #[error("engine {engine} keeps no keys and values as {kv}: {reason}")]
    KvEngine {
        engine: &'static str,
        /// Requested type.
        kv: &'static str,
        reason: &'static str,
    },
    /// The backend holds weights in a form of its own.
    #[error("engine {engine} keeps no packed weights on disk")]
    PackedEngine { engine: &'static str },
    /// The backend reads no tables of n-grams.
    #[error("engine {engine} does not compute models with a memory of n-grams")]
    Ngrams { engine: &'static str },
    /// Matrices of one product are stored in different formats.
    #[error("engine {engine} needs the experts or heads of a layer in one storage type")]
    MixedForms { engine: &'static str },
    /// A context longer than the number of positions a sparse-attention indexer selects.
    #[error(
        "context is {context}, expected at most {top_k}: beyond, the model's indexer chooses which \
         positions a row sees, which is not computed for this file"
    )]
    Indexer {
        /// Requested positions.
        context: usize,
        /// Positions that the indexer selects.
        top_k: usize,
    },
    #[error("key/value cache: {0}")]
    Cache(paceline_tensor::Error),
    #[error(transparent)]
    Split(#[from] split::Error),
    /// MLX is unavailable, or a call of it failed.
    #[error(transparent)]
    Mlx(#[from] paceline_mlx::Error),
    /// Weights and the cache of these positions do not fit into the memory of MLX's device.
    #[error(
        "mlx: {positions} positions need {needed} ({what}), and the memory of device {device} has \
         {available}: {fitting} positions fit"
    )]
    DevicePositions {
        /// Of all sequences together.
        positions: usize,
        needed: Bytes,
        /// The parts of `needed`.
        what: String,
        device: &'static str,
        available: Bytes,
        /// The most that fit; 0 where the weights do not.
        fitting: usize,
    },
    #[error("kernel class {class} is not one of engine {engine}")]
    Class {
        /// Requested class.
        class: KernelClass,
        engine: &'static str,
    },
    /// A rank's columns of a matrix begin or end within a quantisation group.
    #[error(
        "{role:?}: a cut at column {column} is within a group of {group} quantised values, which \
         mlx does not cut"
    )]
    CutGroup {
        role: Role,
        column: usize,
        group: usize,
    },
    /// A matrix type that the backend could only hold with other values.
    #[error("{engine} has no form for {block_type}, which {role:?} is of")]
    NoForm {
        role: Role,
        /// Type in the file.
        block_type: &'static str,
        engine: &'static str,
    },
    /// The system refuses a thread: MLX's compute thread, or the exchange thread.
    #[error("start a thread: {0}")]
    Thread(std::io::Error),
    /// One half of a step does not arrive in time at its turn.
    #[error("the {half} half of the step did not come within {} s", limit.as_secs_f64())]
    HalfLate {
        /// `first` or `second`.
        half: &'static str,
        /// Timeout.
        limit: Duration,
    },
    #[error("{}", hung(*limit, *usual))]
    Hung {
        /// Timeout.
        limit: Duration,
        /// Expected maximum from earlier steps; `None` for the first step.
        usual: Option<Duration>,
    },
    /// MLX's compute thread panicked.
    #[error("the thread of mlx is gone")]
    Gone,
    /// Another rank, or the connection to it, failed.
    #[error(transparent)]
    Comm(#[from] paceline_comm::Error),
    /// A rank of the same stage, or the connection to it, failed. The error counts ranks from the
    /// first of the stage.
    #[error("among the ranks of the stage, counted from {first}: {source}")]
    Stage {
        /// First rank of the stage.
        first: Rank,
        source: paceline_comm::Error,
    },
    /// The leader's plan exceeds this rank's sizes.
    #[error("plan of a step: {what} is {got}, expected at most {limit}")]
    Plan {
        what: &'static str,
        /// Size in the plan.
        got: usize,
        limit: usize,
    },
    /// A layer whose pages cannot be transferred between the ranks of two splits.
    #[error(
        "layer {layer} is a gated delta net whose heads the prompts' nodes share otherwise than \
         the others: its states cannot be handed over"
    )]
    NotHanded {
        /// Layer, counted from 0.
        layer: usize,
    },
}

/// The text names a slow device only if an earlier step was measured.
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
    /// Whether the system ended this rank's work on a device because it took too long, so that a
    /// smaller step may succeed. The contents of the cache are unknown then.
    pub const fn is_interrupted(&self) -> bool {
        matches!(self, Self::Mlx(error) if error.is_interrupted())
    }

    /// The rank of the split that caused a failure between ranks.
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
