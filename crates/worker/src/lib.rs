//! The data plane: worker processes, which compute one rank of a model each.
//!
//! ```text
//! owner --ToWorker--> process::run: Epoch(shard, group) --FromWorker--> owner
//!                       |  leader: paceline_engine::Engine
//!                       +- kv_transfer: pages of prompts from and to other groups
//! ```
//!
//! A token passes [`process`] and `paceline_engine` only, between the API server and the kernels.
//! Which machine computes what is decided elsewhere: a worker obeys the [`messages`] of its owner.
//!
//! - [`process`]: the program of a worker process; [`messages`] with its owner.
//! - [`partial_source`]: weights of a file that is still arriving.
//! - [`DiskCache`]: the prefix cache on disk.
//! - [`prefill_classes`]: which kernel classes read prompts for which.
//! - [`texts`]: tokenizer and chat template of a model; [`interpreter`]: the template in a process
//!   of its own.
//! - [`identity`]: a hash that identifies a model's files. [`AdapterOf`]: an adapter of a model.
//! - [`load_whole`]: a model in this process, on any engine.
//! - [`RankTraffic`]: bytes and times of a rank's collectives.
//! - [`Error`].

pub mod adapters;
pub mod disk;
mod error;
pub mod identity;
pub mod interpreter;
pub mod load;
pub mod messages;
pub mod partial_source;
pub mod prefill_classes;
pub mod process;
mod stamp;
pub mod texts;
mod traffic;

/// Revision of the numerics: raised with every change that docs/numerics.md lists as affecting
/// answers. Nodes with different revisions share no instance.
pub const NUMERICS: u32 = 1;

pub use adapters::AdapterOf;
pub use disk::DiskCache;
pub use error::Error;
pub use identity::identity;
pub use load::load_whole;
pub use partial_source::open_checked;
pub use traffic::{CollectiveTraffic, InstanceTraffic, RankTraffic};
