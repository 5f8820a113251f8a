//! Requests in, text out: batches, sampling, sequences and their snapshots.
//!
//! ```text
//! Request --submit--> waiting --admitted--> running --step--> Event::Token ... Event::Finished
//!                                           |     ^
//!                                 preempted |     | admitted first
//!                                           v     |
//!                       Snapshot --restore--> resuming            any queue --> Snapshot
//! ```
//!
//! [`Engine::step`] is synchronous: it admits what fits, runs one batch of prompt chunks and
//! decode rows, samples, and returns what happened. It does no IO and reads no clock. The cache
//! and the buffers of a step are allocated when the engine is made. Each sequence is in exactly
//! one queue, and every queue has a bound.
//!
//! - [`Engine`], [`EngineConfig`], [`Request`], [`Event`]: the scheduler.
//! - [`SamplingParams`]: from logits to a token, seeded per request.
//! - [`Snapshot`]: everything of a sequence but its cache, which the numerics rule lets any engine
//!   of the same kernel class compute again to the bit.

mod config;
mod engine;
mod error;
mod pages;
mod request;
mod sampling;
mod sequence;
mod snapshot;

pub use config::EngineConfig;
pub use engine::Engine;
pub use error::Error;
pub use request::{Event, Finish, Request, SequenceId};
pub use sampling::{ParamError, SamplingParams};
pub use snapshot::Snapshot;
