//! Administration of a node: reports on itself and its cluster, and commands.
//!
//! ```text
//! agent, fleet, instances --> Board --> dashboard, events, audit log     (JSON: screen, page)
//!                               |  '--> facts --> /metrics
//! commands: load, unload, preview, ps, join, keys, ... --> fleet, agent, files of keys
//! files of a model --> served --> the model as clients see it
//! ```
//!
//! - [`Dashboard`]: cluster, telemetry, instances and requests.
//! - [`commands`]: commands of the dashboard and of local programs.
//! - [`doctor`]: checks of this machine, with remedies.
//! - [`engines`]: compute engines of this machine.
//! - [`adapters`]: facts of adapters, and fusing.
//! - [`answer`]: collects an answer with its statistics.
//! - [`trainings`]: forecasts of trainings.
//! - [`machines`]: machines that compute for a local program.
//! - [`own_cluster`]: the user's own machines, for the planner.
//! - [`lease`]: a leased instance of this machine's node.
//! - [`cables`]: cabling between machines.
//! - [`fast_sync`]: waits for Apple's GPUs without the system.
//! - [`findings`]: the user's own findings for the knowledge base.
//! - [`host`]: this machine, by the program around the node.
//! - [`fits`]: models that fit, and their speed.
//! - [`run_forecast`]: speed forecast for a model on this machine.
//! - [`lookup`]: finds models, clusters and engines by name.
//! - [`pulls`]: downloads and verifies models; [`previews`]: size, licence and memory before.
//! - [`servers`]: settings, protocol and certificate of a server.
//! - [`settings`]: settings from the environment, and paths of files.
//! - [`api_model`]: a model's names, tokenizer and template for clients.
//! - [`model_facts`]: facts about one model.
//! - [`tables`]: a node's reports as lines.
//! - [`member`]: a node as a member of its cluster.
//! - [`screen`]: the dashboard as a text frame, for `paceline top`.
//! - [`upgrade`]: a release for all machines.
//! - [`Error`].
//!
//! It does not read the environment and prints nothing: settings are arguments, and lines for
//! people go to a [`MessageSink`].

pub mod adapters;
pub mod answer;
pub mod api_model;
pub mod cables;
mod changes;
pub mod commands;
mod dashboard;
mod devices;
pub mod doctor;
mod downloads;
pub mod engines;
mod error;
pub mod fast_sync;
mod figures;
pub mod findings;
pub mod fits;
mod fleet;
mod heap;
pub mod host;
mod hub;
mod label;
pub mod lease;
mod links;
pub mod lookup;
pub mod machines;
pub mod member;
pub mod model_facts;
pub mod own_cluster;
mod page_commands;
mod peers;
pub mod previews;
pub mod pulls;
pub mod rdma;
mod removal;
pub mod run_forecast;
pub mod screen;
pub mod servers;
pub mod settings;
mod stores;
pub mod tables;
mod traffic;
pub mod trainings;
pub mod upgrade;
mod upstreams;

use std::sync::Arc;

pub use dashboard::{Dashboard, DashboardOutputs, DashboardThreads, InstanceSource, TrafficSource};
pub use downloads::PullSource;
pub use error::{CommandError, Error, chain};
pub use removal::{model_users, remover};

/// Receives lines for people; must not block.
pub type MessageSink = Arc<dyn Fn(&str) + Send + Sync>;
