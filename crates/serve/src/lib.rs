//! The HTTP API of a node: the dialects of OpenAI, Anthropic, Ollama and llama-server in front of
//! an engine [`Service`].
//!
//! ```text
//! client --HTTP--> connection --> access --> api --> request --> conversation --> Ask
//!                                                                                  |
//!        <--JSON or events-- render, stream <-- calling, choice <-- answer <--> engine::Service
//! ```
//!
//! Only this crate knows HTTP. It sees the model as a [`Service`] and its text side as a
//! [`ServedModel`], whether it runs in one process or many. It listens on loopback by default, and
//! a web page of another site cannot use it.
//!
//! - [`Server`], [`Config`]: bind, run, stop.
//! - [`Upstreams`]: other servers, whose models are listed with the own ones.
//! - [`Journals`]: the replies of streamed responses. Events have ids. A disconnected client sends
//!   the same request with the last id in `Last-Event-ID`, and the stream resumes after it. It can
//!   also call `/v1/responses/{id}?stream=true&starting_after=N`. A [`Mirror`] keeps copies on
//!   other nodes, so that any of them can resume the stream.
//!
//! Invariants:
//! - Every field of a request is honoured, known to have no effect, or rejected by name. Each
//!   dialect has one table for this.
//! - Every wait has a deadline and every queue a bound.
//! - A client that disconnects cancels its request.
//! - The OpenAPI document is made from the table that checks requests.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::{Instant, SystemTime};
//!
//! use paceline_serve::{TimeSource, Config, ServedModel, HttpServer};
//! # fn example(model: ServedModel, service: Arc<dyn paceline_engine::Service>)
//! #     -> Result<(), paceline_serve::Error> {
//! let unix_s = || SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
//! let clock = TimeSource { now: Instant::now, unix_s };
//! let config = Config::new(paceline_serve::DEFAULT_PORT, clock);
//! let server = HttpServer::bind(config, model, service)?;
//! let handle = server.handle(); // give it to the signal handler
//! # drop(handle);
//! server.run(); // until handle.shutdown()
//! # Ok(())
//! # }
//! ```
//!
//! [`Service`]: paceline_engine::Service

mod access;
pub mod agent;
mod api;
mod choice;
mod clock;
mod concurrency;
mod config;
mod connection;
mod conversation;
mod dashboard;
mod endpoint;
mod error;
pub mod events;
mod facts;
mod journal;
mod json;
mod limits;
mod live_requests;
mod log;
mod markdown;
mod metrics;
mod model;
mod openapi;
mod phase;
mod rejection;
mod render;
mod request;
mod response_stream;
mod schema;
mod server;
mod store;
mod stream;
mod tally;
pub mod testing;
mod tool_support;
mod unserved;
mod upstream;

pub use access::Access;
pub use api::no_model::Loading;
pub use api::registry::ModelRegistry;
pub use clock::TimeSource;
pub use config::{
    CommandHandler, Config, DEFAULT_PORT, DashboardConfig, PullStep, Puller, Removal, Remover,
    StageProbe, StatusSource, Timeouts,
};
pub use error::Error;
pub use facts::{MetricSample, ProcessMetrics};
pub use journal::{
    JournalMatch, JournalPart, Journals, MIRROR_LIMIT, Mirror, MirrorCallback, MirrorOutcome,
};
pub use limits::ApiLimits;
pub use live_requests::{LiveRequests, RunningChoice};
pub use log::PROMPTS;
pub use metrics::METRIC_NAMES;
pub use model::{ModelDetails, ServedModel, default_sampling, recommended_sampling};
pub use server::{HttpServer, ServerHandle};
pub use unserved::{UnservedModel, UnservedState};
pub use upstream::{
    ReplicaUse, SpecError, UpstreamArg, UpstreamDialer, UpstreamNotice, UpstreamSpec, Upstreams,
};
