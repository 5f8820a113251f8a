//! The workload that a placement is planned for.

use crate::Error;
use crate::check::whole_in;

/// Requests of one kind, as many at a time as `concurrency` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Tokens of a prompt.
    pub prompt: u32,
    /// Tokens of an answer.
    pub output: u32,
    /// Requests at a time.
    pub concurrency: u32,
    /// Positions reserved per request; at least prompt and output together.
    pub context: u32,
}

/// The figure that is to be best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// A single request answered soonest: time to first token plus the rest of the answer.
    #[default]
    Latency,
    /// Most tokens a second over all requests.
    Throughput,
    /// Fewest joules a token.
    Energy,
    /// Fewest nodes, then latency.
    Nodes,
}

/// Prompt tokens of one step. The engine's own limit, and llama.cpp's `n_ubatch`.
pub const CHUNK: u32 = 512;

impl Workload {
    /// A single request with a short prompt and answer.
    pub const ONE: Self = Self {
        prompt: 512,
        output: 256,
        concurrency: 1,
        context: 4096,
    };

    /// Keys that a decode step sees, averaged over the answer.
    pub fn decode_context(&self) -> f64 {
        f64::from(self.prompt) + f64::from(self.output) / 2.0
    }

    /// Positions reserved for all requests.
    pub fn positions(&self) -> u64 {
        u64::from(self.context) * u64::from(self.concurrency)
    }

    /// Refuses a workload out of range.
    ///
    /// # Errors
    /// [`Error::Value`] with the field and its range.
    pub fn check(&self) -> Result<(), Error> {
        const MOST: u32 = 1 << 27;
        whole_in("workload", "prompt tokens", self.prompt, 1, MOST)?;
        whole_in("workload", "answer tokens", self.output, 1, MOST)?;
        whole_in(
            "workload",
            "requests at a time",
            self.concurrency,
            1,
            1 << 20,
        )?;
        let least = self.prompt.saturating_add(self.output);
        whole_in("workload", "context tokens", self.context, least, MOST)
    }
}
