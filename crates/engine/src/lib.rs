//! Text generation for requests: continuous batching, sampling, sequences and their snapshots.
//!
//! `serve` and `node` submit through [`Service`]; the engine calls `model` for forward passes. It
//! does not know the cluster: ranks and splits are inside the model.
//!
//! ```text
//! Request --submit--> waiting --admitted--> running --step--> Reply::Token ... Reply::Finished
//!                                           |     ^
//!                                 preempted |     | admitted first
//!                                           v     |
//!                       Snapshot --restore--> resuming            any queue --> Snapshot
//! ```
//!
//! [`Engine::step`] is synchronous: it admits sequences, runs one batch of prompt chunks and decode
//! rows, samples, and returns events. It does no I/O and reads no clock. Cache and buffers are
//! allocated when the engine is created. Each sequence is in exactly one queue, and every queue has
//! a bound. Sequences with a common prefix share its cache pages: the next turn of a chat computes
//! only what is new.
//!
//! - [`Engine`], [`EngineConfig`], [`GenerationRequest`], [`Event`]: the scheduler.
//! - [`Draft`]: a draft model for speculative decoding.
//! - [`Order`]: priority, deadline and client of a request.
//! - [`StepTimeTarget`]: limit of the step time while prompts are computed.
//! - [`SamplingParams`]: how a token is sampled from logits, seeded per request.
//! - [`Grammars`]: constrained decoding.
//! - [`AdaptedService`]: a service that uses one of its model's adapters.
//! - [`Runner`]: an engine on its own thread, for many callers; a [`Service`].
//! - [`Snapshot`]: the state of a sequence without its cache. By the numerics rule, any engine of
//!   the same kernel class recomputes the cache to the bit.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use paceline_engine::{Engine, EngineConfig, GenerationRequest, Reply, SamplingParams};
//! use paceline_text::tokenizer::{Specials, Tokenizer};
//! use paceline_model::{LoadOptions, Model, ModelSource};
//! use paceline_tensor::Kernels;
//!
//! let source = ModelSource::open("model".as_ref())?; // a Hugging Face folder
//! let kernels = Arc::new(Kernels::new(2)?);
//! let model = Model::load(&source, LoadOptions::default(), kernels, |_, _| {})?;
//! let tokenizer = Arc::new(Tokenizer::from_hf_dir("model".as_ref())?);
//! let prompt = tokenizer.encode("Why is the sky blue?", Specials::AsText, true)?;
//!
//! let config = EngineConfig::single("model", 4096);
//! let mut engine = Engine::new(Arc::new(model), tokenizer, config)?;
//! engine.submit(GenerationRequest {
//!     prompt,
//!     max_tokens: 100,
//!     sampling: SamplingParams { temperature: 0.7, seed: 1, ..SamplingParams::default() },
//!     stop: vec!["\n\n".to_owned()],
//!     logprobs: None,
//!     ..GenerationRequest::default()
//! })?;
//! let mut answer = String::new();
//! while !engine.is_idle() {
//!     for event in engine.step()? {
//!         if let Reply::Token { text, .. } | Reply::Finished { text, .. } = event.reply {
//!             answer.push_str(&text);
//!         }
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adapter_service;
mod chain;
mod config;
mod constraint;
mod draft_counters;
mod draft_proposer;
mod embedding;
mod engine;
mod error;
mod fairness;
mod follower;
mod ngram;
mod pages;
mod prefill_budget;
mod proposer;
mod queue_order;
mod request;
mod runner;
mod sampling;
mod sequence;
mod service;
mod snapshot;

pub use adapter_service::AdaptedService;
pub use config::EngineConfig;
pub use constraint::{ConstraintError, Grammars};
pub use draft_counters::{DraftCounters, DraftCounts};
pub use draft_proposer::{Draft, DraftNetwork};
pub use embedding::{Embedder, EncoderService};
pub use engine::Engine;
pub use error::Error;
pub use follower::Follower;
pub use prefill_budget::StepTimeTarget;
pub use queue_order::SchedulingParams;
pub use request::{
    Finish, GenerationRequest, MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, MAX_SHOWN, ResumeOutcome,
    SequenceId, TokenLogprobs,
};
pub use runner::{Runner, StepClock};
pub use sampling::{MAX_LOGIT_BIAS, ParamError, SamplingParams, TemperatureOrder};
pub use service::{
    Event, Reply, RequestFailure, RequestMessage, Service, ServiceStatus, Sink, State, Submission,
    Ticket,
};
pub use snapshot::Snapshot;
