//! Model instances: workers that compute one model together, and the supervisor that owns their
//! life.
//!
//! ```text
//! Prepared --over(crew)--> Instance: thread + Supervisor (pure)      workers, one rank each
//!                             |  Crew::send   -- Assign, Submit -->  worker::run   rank 0 --+
//!                             |  Crew::receive <-- Ready, Reply ---                rank 1 --+
//!                          Service: submit, cancel, status           leader: Engine         |
//! ```
//!
//! The supervisor assigns each worker its part of an *epoch*: its shard, and the addresses of the
//! others. From then on it communicates with the *leader* only (the rank that gets the logits and
//! plans the steps). The workers communicate directly: plans, activations and logits pass through
//! no third process.
//!
//! When a worker ends, crashes, is stopped or falls silent, the epoch ends. The other workers keep
//! their processes and weights for the next epoch, where open answers continue after the callers'
//! last token with the same bits. On MLX, which is not exact, they end with
//! [`Failure::Lost`](paceline_engine::Failure::Lost) and the rank that caused it. When the
//! instance's process ends, for any reason, local workers exit too.
//!
//! - [`PreparedModel`], [`Loaded`]: a model from its files, until it answers.
//! - [`Instance`], [`supervisor`]: a model on workers.
//! - [`prefill`]: disaggregated prefill.
//! - [`sharding`]: from a placement to each worker's part of the model.
//! - [`workers`]: worker processes on this machine or others; [`worker_notices`]: their notices as
//!   lines.
//! - [`fleet`]: instances over the nodes of a cluster.
//! - [`forecast`]: the predicted speed of each split on this machine.
//! - [`context_size`]: default context size of a model on this machine.
//! - [`service`]: a node as a service of the operating system.
//! - [`trace`]: breakdown of an answer's time over all ranks.
//! - [`tunnel`]: byte streams between programs on two machines.
//! - [`launcher_env`]: transports from a launcher's environment.
//! - [`classes`]: the kernel class of each node.
//! - [`Error`].

mod cause;
pub mod classes;
pub mod context_size;
mod error;
pub mod fleet;
pub mod forecast;
mod instance;
pub mod launcher_env;
mod model_setup;
pub mod prefill;
pub mod service;
pub mod sharding;
mod summary;
pub mod supervisor;
pub mod testing;
pub mod trace;
pub mod tunnel;
pub mod worker_notices;
pub mod workers;

pub use error::Error;
pub use instance::{Instance, InstanceConfig, Observer, SharedForecast};
pub use model_setup::{
    DRAFTS, Options, PrefillOptions, PreparedModel, Rehearsal, ReplyStream, ServingModel,
};
pub use sharding::PlannedSplit;
pub use summary::{InstanceSummary, Prompts, Shard};
