//! Requests in, text out: batches, sampling, sequences and their snapshots.
//!
//! ```text
//! Request --submit--> waiting --admitted--> running --step--> Event::Text ... Event::Finished
//!                        ^                     |
//!                        +---- preempted ------+        snapshot <-> restore, in any engine
//! ```
//!
//! [`Engine::step`] is synchronous: it admits what fits, runs one batch of prompt chunks and
//! decode rows, samples, and returns what happened. It does no IO and reads no clock. Memory is
//! fixed when the engine is made. Each sequence is in exactly one queue.
//!
//! - [`Engine`], [`EngineConfig`], [`Request`], [`Event`]: the scheduler.
//! - [`SamplingParams`], [`Sampler`]: from logits to a token, seeded per request.
//! - [`Snapshot`]: everything of a sequence but its cache, which the numerics rule lets any engine
//!   of the same kernel class compute again to the bit.

mod engine;
mod error;
mod pages;
mod request;
mod sampling;
mod sequence;
mod snapshot;

pub use engine::{Engine, EngineConfig};
pub use error::Error;
pub use request::{Event, Finish, Request, SequenceId};
pub use sampling::{ParamError, Sampler, SamplingParams};
pub use snapshot::Snapshot;
