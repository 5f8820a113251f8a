//! Faults of an input, and reasons why a model does not fit.

use paceline_base::Bytes;

/// Why there is no plan. The texts name the given and the expected value. Advice belongs to the
/// caller, which knows whether the numbers came from a file or from a measurement.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A number that no machine, link or model can have.
    #[error("{what}: {field} is {got}, expected {expected}")]
    Value {
        /// Owner of the number: a node, a link, a model.
        what: String,
        /// Name of the number, with its unit.
        field: &'static str,
        got: String,
        expected: &'static str,
    },
    #[error("the cluster has no nodes")]
    NoNodes,
    #[error("the cluster has {got} nodes, at most {max} are planned for")]
    TooManyNodes { got: usize, max: usize },
    #[error("the cluster has {got} links, at most {max} are planned for")]
    TooManyLinks { got: usize, max: usize },
    #[error("two nodes are named {name:?}")]
    DuplicateNode { name: String },
    /// A link names a node that is not there, or joins a node with itself.
    #[error("link {link}: {problem} {node:?}")]
    LinkEnd {
        link: String,
        /// `no node named` or `both ends are`.
        problem: &'static str,
        node: String,
    },
    #[error("no link joins {a:?} with {b:?}, directly or through other nodes")]
    Disconnected { a: String, b: String },
    /// A name that the catalogue does not have.
    #[error("{kind} {name:?} is not in the catalogue; nearest: {nearest}")]
    Unknown {
        /// `model`, `machine`, `link` or `engine`.
        kind: &'static str,
        name: String,
        nearest: String,
    },
    /// The facts of a machine that the prediction needs are not known.
    #[error("{node}: {fact} is not known, so nothing can be predicted for it")]
    MissingFact {
        /// The node or its kind.
        node: String,
        fact: &'static str,
    },
    #[error("{what}: {reason}")]
    Toml {
        /// Kind of text: a catalogue, a cluster, published rows.
        what: String,
        /// Message of the parser, with line and column.
        reason: String,
    },
    #[error("{0}")]
    Infeasible(Box<Infeasible>),
    /// The placement to predict does not suit model or cluster.
    #[error("placement: {problem}")]
    Placement { problem: String },
    #[error("the integer program ({rows} rows, {columns} columns) has no answer: {reason}")]
    Program {
        rows: usize,
        columns: usize,
        reason: String,
    },
}

/// A model that fits no placement on these nodes, and the smallest change that makes it fit.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "{model} needs {need} in {context} tokens of context, the nodes have {have} for it{detail}"
)]
pub struct Infeasible {
    pub model: String,
    /// Weights, cache and buffers of the smallest placement.
    pub need: Bytes,
    /// Usable memory of all nodes together.
    pub have: Bytes,
    /// Context per request times requests.
    pub context: u64,
    /// Facts that the totals leave out, starting with a comma; empty when there are none.
    pub detail: String,
    /// Changes that are each enough alone, smallest first.
    pub changes: Vec<PlanChange>,
}

/// A single change that makes a plan possible.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanChange {
    /// A shorter context per request.
    Context { tokens: u32 },
    /// Fewer requests at a time.
    Concurrency { requests: u32 },
    /// Fewer bits per weight.
    Bits {
        /// The most bits that fit, stored bits on average.
        bits: f64,
    },
    /// More memory in the cluster.
    Memory { bytes: Bytes },
    /// More nodes like one that is there.
    Nodes { count: u32, kind: String },
    /// Reading weights from disk for every token.
    Disk {
        /// Tokens a second that this would give.
        tok_s: f64,
    },
}
