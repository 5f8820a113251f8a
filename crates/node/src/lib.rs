//! Model instances on this machine: worker processes that compute one model together.
//!
//! ```text
//! parent (run, up, bench)                      workers, one rank each
//! Instance  -- Start, Join, Submit, Cancel -->  worker::run   rank 0   shard 0 --+
//!     ^     <-- Listening, Ready, Reply ------                rank 1   shard 1 --+-- one group
//!     |                                                       ...                |   over TCP
//!  Service: submit, cancel, status                            leader: Engine   --+
//! ```
//!
//! The parent starts the workers, tells each what to load and where the others listen, and from
//! then on talks to the *leader* only (the rank that gets the logits and plans the steps). The
//! workers talk to one another directly: plans, activations and logits pass no third process.
//!
//! When a worker ends, crashes, is stopped or falls silent, the parent ends the others, and every
//! open request gets [`Failure::Lost`](paceline_engine::Failure::Lost) with the rank that caused
//! it. When the parent ends, by whatever, the workers end themselves.
//!
//! - [`Instance`], [`InstanceSpec`]: the parent's side.
//! - [`worker`]: what a worker process runs.
//! - [`load_whole`]: a model in this process, on whichever engine.
//! - [`Error`].

mod cause;
mod error;
mod instance;
mod load;
mod messages;
mod moved;
pub mod worker;

pub use error::Error;
pub use instance::{Instance, InstanceSpec, RankFacts};
pub use load::load_whole;
pub use moved::Moved;
