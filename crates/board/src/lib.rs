//! Administration of a node: reports on itself and its cluster, and commands.
//!
//! ```text
//! agent, fleet, instances --> Board --> dashboard, events, audit log     (JSON: screen, page)
//!                               |  '--> facts --> /metrics
//! commands: load, unload, preview, ps, join, keys, ... --> fleet, agent, files of keys
//! files of a model --> served --> the model as clients see it
//! ```
//!
//! - [`Board`]: cluster, telemetry, instances and requests; [`Local`]: instances of a process
//!   without a fleet.
//! - [`commands`]: commands of the dashboard and of local programs.
//! - [`doctor`]: checks of this machine, with remedies.
//! - [`engines`]: compute engines of this machine.
//! - [`adapters`]: facts of adapters, and fusing.
//! - [`answer`]: collects an answer with its statistics.
//! - [`holds`]: workers' notices as lines; [`trainings`]: forecasts of trainings.
//! - [`machines`]: machines that compute for a local program.
//! - [`borrowed`]: a leased instance of this machine's node.
//! - [`cables`]: cabling between machines.
//! - [`findings`]: the user's own findings for the knowledge base.
//! - [`figures`]: metrics of an instance.
//! - [`fits`]: models that fit, and their speed.
//! - [`foreseen`]: speed forecast for a model on this machine.
//! - [`named`]: finds models, clusters and engines by name.
//! - [`opened`]: loads a model for a local program.
//! - [`pulls`]: downloads and verifies models.
//! - [`servers`]: settings, protocol and certificate of a server.
//! - [`session`]: a model that answers prompts in turn.
//! - [`settings`]: settings from the environment, and paths of files.
//! - [`served`]: a model's names, tokenizer and template for clients.
//! - [`shown`]: facts about one model.
//! - [`tables`]: a node's reports as lines.
//! - [`member`]: a node as a member of its cluster.
//! - [`screen`]: the dashboard as a text frame, for `paceline top`.
//! - [`Error`].
//!
//! It does not read the environment and prints nothing: settings are arguments, and lines for
//! people go to a [`Tell`].

pub mod adapters;
pub mod answer;
mod board;
pub mod borrowed;
pub mod cables;
mod changes;
pub mod commands;
pub mod doctor;
mod downloads;
pub mod engines;
mod error;
pub mod figures;
pub mod findings;
pub mod fits;
mod fleet;
pub mod foreseen;
mod heap;
pub mod holds;
mod hub;
mod label;
mod links;
mod local;
pub mod machines;
pub mod member;
pub mod named;
pub mod opened;
mod peers;
pub mod pulls;
mod removal;
pub mod screen;
pub mod served;
pub mod servers;
pub mod session;
pub mod settings;
pub mod shown;
mod stores;
pub mod tables;
mod traffic;
pub mod trainings;

use std::sync::Arc;

pub use board::{Dashboard, DashboardOutputs, DashboardThreads, InstanceSource, TrafficSource};
pub use downloads::PullSource;
pub use error::{Error, chain};
pub use local::LocalInstances;
pub use removal::remover;

/// Receives lines for people; must not block.
pub type MessageSink = Arc<dyn Fn(&str) + Send + Sync>;
