//! Errors of the commands themselves.

use std::path::PathBuf;
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, counted};
use paceline_engine::ParamError;
use paceline_serve::agent::AgentProgram;

/// Maximum prompt from standard input. It is far above any context, so a larger input is a mistake,
/// such as another kind of file.
pub(crate) const PROMPT_BYTES_MAX: u64 = 16 << 20;

/// Why a command ends early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Stdout was closed. Not a failure: the command ends quietly.
    #[error("nobody reads standard output")]
    ReaderGone,
    /// A number on the command line is out of range.
    #[error("--{} is {}, expected {}", .0.name.replace('_', "-"), .0.got, .0.expected)]
    Param(ParamError),
    /// The prompt, from argument or standard input, is empty.
    #[error("the prompt is empty")]
    NoPrompt,
    /// `upgrade` without an address, on an installation that records none.
    #[error("the installation does not say where it came from")]
    NoReleaseSource,
    /// The model for embeddings is not an encoder.
    #[error("{model} makes no embeddings: expected a folder of bert, roberta or xlm-roberta")]
    NoEncoder {
        /// The model as it was given.
        model: String,
    },
    /// An option that has no effect on models that make embeddings.
    #[error("{option} has no effect: the model makes embeddings, on one node and in f32")]
    OfDecoders { option: &'static str },
    /// A chat line that begins like a command.
    #[error("the chat has no command {word}, or it needs an argument")]
    NoChatCommand {
        /// The first word.
        word: String,
    },
    /// `/set` of an unknown name.
    #[error("there is no setting {name:?}")]
    NoSetting { name: String },
    /// `/set` with a value that cannot be read.
    #[error("{name} is {value:?}, expected a number")]
    SettingValue { name: String, value: String },
    /// An option without meaning in a chat.
    #[error("{flag} needs a prompt")]
    NotInChat {
        /// The option.
        flag: &'static str,
    },
    /// The prompt on standard input is not UTF-8.
    #[error("the prompt on standard input is not UTF-8 text, byte {at} is {byte:#04x}")]
    PromptNotUtf8 {
        /// Offset of the first invalid byte.
        at: usize,
        /// The byte's value.
        byte: u8,
    },
    /// The prompt on standard input exceeds the limit.
    #[error("the prompt on standard input is larger than {} MiB", PROMPT_BYTES_MAX >> 20)]
    PromptTooLarge,
    /// A coding agent that is not installed.
    #[error("{} is not installed", .program.name())]
    NoAgent { program: AgentProgram },
    /// No server responds.
    #[error("no paceline answers at {url}: {reason}")]
    NoServer {
        url: String,
        /// Why it failed.
        reason: String,
    },
    /// A server without a model that answers.
    #[error("no model answers at {url} yet")]
    NotReady { url: String },
    /// A server whose certificate is not trusted.
    #[error("the certificate of {url} is not trusted: {reason}")]
    NotTrusted {
        url: String,
        /// The failed check of the certificate.
        reason: String,
    },
    /// A server that refuses the key, or wants one.
    #[error("{url} {}", if *has_key { "refuses the key" } else { "asks for a key" })]
    KeyRefused {
        url: String,
        /// Whether a key was sent.
        has_key: bool,
    },
    /// The prompt leaves no room for output.
    #[error("the prompt has {tokens} tokens, but the context holds {context}")]
    PromptTooLong {
        tokens: usize,
        /// Positions, at least one for the answer.
        context: usize,
        /// Positions that the model was trained for.
        trained: usize,
        /// Whether a chat became too long.
        in_chat: bool,
    },
    /// A model without a chat template cannot chat.
    #[error("{model} has no chat template: it completes text and cannot chat")]
    CannotChat {
        /// MODEL of the command line.
        model: String,
    },
    /// A model without a chat template has no system message.
    #[error("{model} has no chat template that --system could go into")]
    NoSystem {
        /// MODEL of the command line.
        model: String,
    },
    /// `--split` and `--nodes` have different numbers of nodes.
    #[error("--split {tensor}x{pipeline} is for {} nodes, but --nodes is {nodes}", tensor * pipeline)]
    Grid {
        /// Nodes that share a layer.
        tensor: u32,
        /// Stages.
        pipeline: u32,
        nodes: u32,
    },
    /// `--shares` needs one number per node.
    #[error("--shares has {got} numbers, but --nodes is {nodes}, expected one for each node")]
    Shares {
        /// How many it has.
        got: usize,
        nodes: u32,
    },
    /// An unencrypted transport without `--plaintext`.
    #[error("{backend} is plaintext: what ranks say to each other can be read by others")]
    Plaintext {
        /// The transport.
        backend: paceline_comm::Backend,
    },
    /// `--engine` needs one engine per node.
    #[error("--engine has {got} engines, but --nodes is {nodes}, expected one, or one for each")]
    Engines {
        /// How many it has.
        got: u32,
        nodes: u32,
    },
    /// `--class` belongs to an engine that no node uses.
    #[error("--class {class} is not one of the engine that --engine names")]
    ClassOfOther { class: KernelClass },
    /// Nodes that share layers would have different kernel classes.
    #[error("nodes that share layers compute as {a} and as {b}, expected one class in a stage")]
    MixedStage {
        a: KernelClass,
        /// Another.
        b: KernelClass,
    },
    /// An option without meaning with MLX.
    #[error("{option} is for the engine cpu, but --engine is mlx")]
    CpuOnly { option: &'static str },
    /// The hidden worker command was started by hand.
    #[error("`paceline worker` is a part of a model that other commands start, not a command")]
    WorkerByHand,
    /// A draft model needs exactly one model.
    #[error("--draft is for one model that has guesses, and there is {with}")]
    DraftOf {
        /// The conflicting situation.
        with: &'static str,
    },
    /// A required argument is missing on the command line and in the configuration.
    #[error("{name} is given neither here nor in the configuration")]
    Needed {
        /// The argument.
        name: &'static str,
    },
    #[error("--adapter is for one model, and there are several")]
    AdapterOfSeveral,
    /// Two models have the same name.
    #[error("two models would answer by the name {name}")]
    SameName { name: String },
    /// An adapter without a model.
    #[error("--adapter is for a model, and there is none")]
    AdapterAlone,
    /// A model whose weights exceed the memory of the machines.
    #[error("{model} has {weights} of weights, too large for {memory} of memory")]
    TooLarge {
        /// The model as it was given.
        model: String,
        weights: Bytes,
        /// Memory of all machines that would compute it.
        memory: Bytes,
    },
    /// More machines than live.
    #[error("{wanted} nodes are wanted and {} live: {}{}", living.len(), living.join(", "), told_dead(dead))]
    TooFewNodes {
        wanted: usize,
        /// Names of those that live.
        living: Vec<String>,
        /// Names of those that do not answer.
        dead: Vec<String>,
    },
    /// A machine of another name.
    #[error("no machine of the cluster is named {name:?}")]
    NoMachine {
        /// The name as it was given.
        name: String,
        /// All names.
        known: Vec<String>,
    },
    /// A code that pairs this machine with none, by a running node.
    #[error("{reason}")]
    NotPaired { reason: String },
    /// A model to remove that instances compute with.
    #[error("{model} is loaded: {}", users.join("; "))]
    Loaded {
        /// The model as it was given.
        model: String,
        /// Each instance with its machines.
        users: Vec<String>,
    },
    #[error("{} is there already", path.display())]
    OutputThere { path: PathBuf },
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
    /// MLX did not answer about its devices.
    #[error("{work} the devices of mlx took more than {limit:?}: one of them or its driver hangs")]
    DevicesLate {
        /// The work that did not end, as the message names it.
        work: &'static str,
        limit: Duration,
    },
    /// A usual name of an unsupported model.
    #[error("{model} is a {architecture} model, which this version does not compute")]
    NotComputed {
        /// The model as it was given.
        model: String,
        /// `general.architecture` of its files.
        architecture: String,
    },
    /// Checks of the self-test failed.
    #[error("the self-test failed: {}", counted(*failed, "check"))]
    Selftest {
        /// Number of failed checks.
        failed: usize,
    },
    /// A signal ended a command before it had its result.
    #[error("interrupted")]
    Interrupted,
    /// Paceline's folder is unknown.
    #[error("neither PACELINE_HOME nor HOME is set")]
    NoHome,
    /// `PACELINE_CPU` has an unknown value.
    #[error("PACELINE_CPU is {value:?}, expected one of {known}")]
    UnknownCpu {
        value: String,
        /// Names of instruction sets.
        known: String,
    },
    /// `PACELINE_CPU` names an instruction set that this machine lacks.
    #[error("PACELINE_CPU is {value:?}, but this machine has {available}")]
    CpuLacks {
        value: String,
        /// Names of usable instruction sets.
        available: String,
    },
}

/// The dead machines in an error.
fn told_dead(dead: &[String]) -> String {
    match dead {
        [] => String::new(),
        dead => format!("; dead: {}", dead.join(", ")),
    }
}

impl Error {
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
