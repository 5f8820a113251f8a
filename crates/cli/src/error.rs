//! Errors of the commands themselves.

use std::path::PathBuf;

use paceline_base::KernelClass;
use paceline_engine::ParamError;
use paceline_serve::agent::Program;

/// Largest prompt that is read from standard input. It is far above any context, so that a larger
/// input is a mistake, such as a file of another kind.
pub(crate) const PROMPT_BYTES_MAX: u64 = 16 << 20;

/// Why a command ends early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Nobody reads stdout any more. Not a failure: the command ends quietly.
    #[error("nobody reads standard output")]
    ReaderGone,
    /// A number on the command line is out of range.
    #[error("--{} is {}, expected {}", .0.name.replace('_', "-"), .0.got, .0.expected)]
    Param(ParamError),
    /// The argument or standard input that should be the prompt has no text.
    #[error("the prompt is empty")]
    NoPrompt,
    /// A model that is to make embeddings and does not.
    #[error("{model} makes no embeddings: expected a folder of bert, roberta or xlm-roberta")]
    NoEncoder {
        /// The model as it was given.
        model: String,
    },
    /// An option that has no effect on models that make embeddings.
    #[error("{option} has no effect: the model makes embeddings, on one node and in f32")]
    OfDecoders {
        /// The option.
        option: &'static str,
    },
    /// An option that makes no sense in a chat.
    #[error("{flag} needs a prompt")]
    NotInChat {
        /// The option.
        flag: &'static str,
    },
    /// The prompt on standard input is no text.
    #[error("the prompt on standard input is not UTF-8 text, byte {at} is {byte:#04x}")]
    PromptNotUtf8 {
        /// Place of the first bad byte.
        at: usize,
        /// That byte.
        byte: u8,
    },
    /// The prompt on standard input goes on and on.
    #[error("the prompt on standard input is larger than {} MiB", PROMPT_BYTES_MAX >> 20)]
    PromptTooLarge,
    /// A coding agent that is not installed.
    #[error("{} is not installed", .program.name())]
    NoAgent {
        /// Which.
        program: Program,
    },
    /// Nothing answers as a server does.
    #[error("no paceline answers at {url}: {reason}")]
    NoServer {
        /// The URL that was asked.
        url: String,
        /// The outcome in place of an answer.
        reason: String,
    },
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {tokens} tokens, but the context holds {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions, one of them for the answer.
        context: usize,
        /// Positions that the model was trained for.
        trained: usize,
        /// Whether a chat became too long.
        in_chat: bool,
    },
    /// A model that only completes text was asked to chat.
    #[error("{model} has no chat template: it completes text and cannot chat")]
    CannotChat {
        /// MODEL of the command line.
        model: String,
    },
    /// A model that only completes text was given a system message.
    #[error("{model} has no chat template that --system could go into")]
    NoSystem {
        /// MODEL of the command line.
        model: String,
    },
    /// `--split` says how many nodes there are, and `--nodes` says otherwise.
    #[error("--split {tensor}x{pipeline} is for {} nodes, but --nodes is {nodes}", tensor * pipeline)]
    Grid {
        /// Nodes that share a layer.
        tensor: u32,
        /// Stages.
        pipeline: u32,
        /// Value of `--nodes`.
        nodes: u32,
    },
    /// `--shares` has not one number for each node.
    #[error("--shares has {got} numbers, but --nodes is {nodes}, expected one for each node")]
    Shares {
        /// How many it has.
        got: usize,
        /// Value of `--nodes`.
        nodes: u32,
    },
    /// A wire that cannot encrypt, and nobody said that this is meant.
    #[error("{backend} is plaintext: what ranks say to each other can be read by others")]
    Plaintext {
        /// The wire.
        backend: paceline_comm::Backend,
    },
    /// `--engine` has not one engine for each node.
    #[error("--engine has {got} engines, but --nodes is {nodes}, expected one, or one for each")]
    Engines {
        /// How many it has.
        got: u32,
        /// Value of `--nodes`.
        nodes: u32,
    },
    /// `--class` is of an engine that no node has.
    #[error("--class {class} is not one of the engine that --engine names")]
    ClassOfOther {
        /// Value of `--class`.
        class: KernelClass,
    },
    /// Nodes that share layers would compute them by different rules.
    #[error("nodes that share layers compute as {a} and as {b}, expected one class in a stage")]
    MixedStage {
        /// A class of the stage.
        a: KernelClass,
        /// Another.
        b: KernelClass,
    },
    /// An option that means nothing where MLX computes.
    #[error("{option} is for the engine cpu, but --engine is mlx")]
    CpuOnly {
        /// The option.
        option: &'static str,
    },
    /// A person started what paceline starts.
    #[error("`paceline worker` is a part of a model that other commands start, not a command")]
    WorkerByHand,
    /// A draft model guesses for one model.
    #[error("--draft is for one model that has guesses, and there is {with}")]
    DraftOf {
        /// The situation in place of one model with guesses.
        with: &'static str,
    },
    /// An argument that neither the command line nor a configuration has.
    #[error("{name} is given neither here nor in the configuration")]
    Needed {
        /// The argument.
        name: &'static str,
    },
    /// An adapter is given, and several models.
    #[error("--adapter is for one model, and there are several")]
    AdapterOfSeveral,
    /// Two models that clients could not tell apart.
    #[error("two models would answer by the name {name}")]
    SameName {
        /// The name.
        name: String,
    },
    /// An adapter, and no model.
    #[error("--adapter is for a model, and there is none")]
    AdapterAlone,
    /// Something lies where a result is to go.
    #[error("{} is there already", path.display())]
    OutputThere {
        /// The path.
        path: PathBuf,
    },
    /// MLX is not published for a system.
    #[error("{build} is not published for {os} on {arch}")]
    NoMlx {
        /// The wheel, or MLX as a whole.
        build: String,
        /// Operating system.
        os: String,
        /// Processor.
        arch: String,
    },
    /// A usual name of a model that the engine cannot compute.
    #[error("{model} is a {architecture} model, which this version does not compute")]
    NotComputed {
        /// The model as it was given.
        model: String,
        /// `general.architecture` of its files.
        architecture: String,
    },
    /// Nothing says where models are kept.
    #[error("neither PACELINE_HOME nor HOME is set")]
    NoHome,
    /// `PACELINE_CPU` names nothing known.
    #[error("PACELINE_CPU is {value:?}, expected one of {known}")]
    UnknownCpu {
        /// Its value.
        value: String,
        /// Names of instruction sets.
        known: String,
    },
    /// `PACELINE_CPU` names what this machine lacks.
    #[error("PACELINE_CPU is {value:?}, but this machine has {available}")]
    CpuLacks {
        /// Its value.
        value: String,
        /// Names of instruction sets that work here.
        available: String,
    },
}

impl Error {
    /// Whether the command line is wrong, rather than the world.
    pub(crate) const fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Param(_)
                | Self::NoPrompt
                | Self::NotInChat { .. }
                | Self::Grid { .. }
                | Self::Shares { .. }
                | Self::Plaintext { .. }
                | Self::Engines { .. }
                | Self::ClassOfOther { .. }
                | Self::MixedStage { .. }
                | Self::CpuOnly { .. }
                | Self::DraftOf { .. }
                | Self::WorkerByHand
                | Self::AdapterOfSeveral
                | Self::AdapterAlone
                | Self::SameName { .. }
                | Self::Needed { .. }
        )
    }
}
