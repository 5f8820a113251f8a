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
//! - [`workers`]: worker processes on this machine or others; [`worker`]: the program of a worker
//!   process; [`messages`] between them; [`worker_notices`]: their notices as lines.
//! - [`fleet`]: instances over the nodes of a cluster.
//! - [`forecast`]: the predicted speed of each split on this machine.
//! - [`context_size`]: default context size of a model on this machine.
//! - [`service`]: a node as a service of the operating system.
//! - [`trace`]: breakdown of an answer's time over all ranks.
//! - [`texts`]: tokenizer and chat template of a model; [`interpreter`]: the template in a process
//!   of its own.
//! - [`tunnel`]: byte streams between programs on two machines.
//! - [`identity`]: a hash that identifies a model's files.
//! - [`launcher_env`]: transports from a launcher's environment.
//! - [`classes`]: the kernel class of each node.
//! - [`load_whole`]: a model in this process, on any engine.
//! - [`AdapterOf`]: an adapter of an instance's model.
//! - [`DiskCache`]: the prefix cache on disk. [`record_checksums`]: a file of the store that loads
//!   compare. [`storage`]: durable files.
//! - [`Error`].

mod adapters;
mod cause;
pub mod classes;
pub mod context_size;
mod disk;
mod error;
pub mod fleet;
pub mod forecast;
mod identity;
mod instance;
pub mod interpreter;
pub mod launcher_env;
mod load;
pub mod messages;
mod model_setup;
mod partial_source;
pub mod prefill;
mod prefill_classes;
pub mod service;
pub mod sharding;
pub mod storage;
mod summary;
pub mod supervisor;
pub mod testing;
pub mod texts;
pub mod trace;
mod traffic;
pub mod tunnel;
pub mod worker;
pub mod worker_notices;
pub mod workers;

/// Revision of the numerics: raised with every change that docs/numerics.md lists as affecting
/// answers. Nodes with different revisions share no instance.
pub const NUMERICS: u32 = 1;

pub use adapters::AdapterOf;
pub use disk::DiskCache;
pub use error::Error;
pub use fleet::checksums::{ChecksumError, has_checksums, record_checksums, record_own_checksums};
pub use identity::identity;
pub use instance::{Instance, InstanceConfig, Observer, SharedForecast};
pub use load::load_whole;
pub use model_setup::{DRAFTS, Options, PrefillOptions, PreparedModel, ReplyStream, ServingModel};
pub use partial_source::open_checked;
pub use sharding::PlannedSplit;
pub use summary::{InstanceSummary, Prompts, Shard};
pub use traffic::{CollectiveTraffic, InstanceTraffic, RankTraffic};
