//! Model families over the kernels: configuration, weights and the forward pass.
//!
//! - [`Source`] opens a GGUF file or a Hugging Face folder and finds weights by their role.
//! - [`Config`] is what a model file says about its shape, checked.
//! - [`Model`] holds packed weights; [`Model::forward`] runs one step over a batch of sequences.
//! - [`families`] has one file per family, each a configuration reader and one layer.
//!
//! A model knows nothing of requests, sampling or text. Which pages of the cache belong to which
//! sequence is told with each [`BatchSequence`].
//!
//! **Numerics rule.** A logit depends on the model, the tokens before it and the kernel class.
//! [`Model::forward`] gives the same bits for a position whether it comes in a chunk of 1 or 500
//! rows, alone or among strangers, on any number of threads. The sums over attention heads and
//! over the feed-forward width are canonical trees ([`Config::attention_leaf`],
//! [`Config::ffn_leaf`]), so that a tensor split can give them too.

mod config;
mod error;
pub mod families;
mod links;
mod model;
mod plan;
mod rope;
mod source;
pub mod split;
mod step;
mod weights;

pub use config::{Activation, Config, LayerKind};
pub use error::Error;
pub use families::Family;
pub use links::Links;
pub use model::{Followed, LoadOptions, Model};
pub use rope::Rope;
pub use source::{Part, Role, Source};
pub use split::{Shard, Split, SplitKind};
pub use step::{Batch, BatchSequence, BatchSize, Logits, Workspace};
