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
//! - [`commands`]: commands from its dashboard and from programs of its machine.
//! - [`doctor`]: checks of this machine, and the command that mends each gap.
//! - [`engines`]: engines that compute here.
//! - [`answer`]: an answer as it is collected, and its cost.
//! - [`holds`]: news of workers, as lines; [`trainings`]: forecasts of trainings.
//! - [`machines`]: machines that compute for a program of this machine.
//! - [`borrowed`]: an instance that a program has for as long as it runs.
//! - [`cables`]: cables between machines, for people.
//! - [`findings`]: the user's own findings, beside those of the knowledge base.
//! - [`figures`]: metrics of an instance.
//! - [`fits`]: models of the catalogue that fit, and their speed.
//! - [`foreseen`]: forecast for a model on this machine.
//! - [`named`]: models, clusters and engines by their names.
//! - [`served`]: names, tokenizer and template of a model, for clients.
//! - [`shown`]: facts about one model.
//! - [`tables`]: a node's reports, as lines.
//! - [`member`]: a node as a member of its cluster.
//! - [`screen`]: a board's reports, as a frame of text.
//! - [`Error`].
//!
//! It reads no environment and prints nothing: settings are arguments, and lines for people go to a
//! [`Tell`].

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
mod peers;
mod removal;
pub mod screen;
pub mod served;
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
