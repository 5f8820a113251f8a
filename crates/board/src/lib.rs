//! What a node tells of itself and its cluster, and what it is told to do.
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
//! - [`figures`]: metrics of an instance.
//! - [`fits`]: which models of the catalogue fit, and how fast.
//! - [`served`]: names, tokenizer and template of a model, for clients.
//! - [`member`]: what a node is to its cluster.
//! - [`screen`]: what a board tells, as a frame of text.
//! - [`Error`].
//!
//! It reads no environment and prints nothing: settings are arguments, and lines for people go to a
//! [`Tell`].

mod board;
mod changes;
pub mod commands;
mod downloads;
mod error;
pub mod figures;
pub mod fits;
mod hub;
mod label;
mod links;
mod local;
pub mod member;
mod peers;
mod removal;
pub mod screen;
pub mod served;
mod stores;
mod traffic;

use std::sync::Arc;

pub use board::{Board, Counts, Instances, Watch, Watching};
pub use downloads::Source;
pub use error::{Error, chain};
pub use local::Local;
pub use removal::remover;

/// Takes lines for people; must not block.
pub type Tell = Arc<dyn Fn(&str) + Send + Sync>;
