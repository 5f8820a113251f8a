//! A node's reports on itself and its cluster, and the commands that it takes.
//!
//! ```text
//! agent, fleet, instances --> Board --> dashboard, events, audit log     (JSON: screen, page)
//!                               |  '--> facts --> /metrics
//! commands: load, unload, preview, ps, join, keys, ... --> fleet, agent, files of keys
//! files of a model --> served --> the model as clients see it
//! ```
//!
//! - [`Board`]: the cluster, telemetry, instances and requests; [`Local`]: instances of a process
//!   without a fleet.
//! - [`commands`]: what a node does for its dashboard and for programs of its machine.
//! - [`doctor`]: what this machine can do, what is missing, and what mends it.
//! - [`engines`]: what computes here.
//! - [`adapters`]: what an adapter is, and a model with one in its matrices.
//! - [`answer`]: an answer as it is collected, and what it cost.
//! - [`holds`]: what becomes of workers, as lines; [`trainings`]: what a training would take.
//! - [`machines`]: those that compute for a program of this machine.
//! - [`borrowed`]: an instance that a program has for as long as it runs.
//! - [`cables`]: cables between machines, for people.
//! - [`findings`]: the user's own findings, beside those of the knowledge base.
//! - [`figures`]: metrics of an instance.
//! - [`fits`]: models of the catalogue that fit, and their speed.
//! - [`foreseen`]: forecast for a model on this machine.
//! - [`named`]: models, clusters and engines by their names.
//! - [`opened`]: a model from its files to something that answers.
//! - [`pulls`]: models that are fetched or checked, for people and clients.
//! - [`servers`]: settings, protocol and certificate of a server.
//! - [`session`]: a model that answers one prompt after the other.
//! - [`settings`]: what an environment says, and the places of files.
//! - [`served`]: names, tokenizer and template of a model, for clients.
//! - [`shown`]: facts about one model.
//! - [`tables`]: a node's reports, as lines.
//! - [`member`]: a node as a member of its cluster.
//! - [`screen`]: a board's reports, as a frame of text.
//! - [`Error`].
//!
//! It reads no environment and prints nothing: settings are arguments, and lines for people go to a
//! [`Tell`].

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

pub use board::{Board, Counts, Instances, Watch, Watching};
pub use downloads::Source;
pub use error::{Error, chain};
pub use local::Local;
pub use removal::remover;

/// Takes lines for people; must not block.
pub type Tell = Arc<dyn Fn(&str) + Send + Sync>;
