//! Model families over the kernels: configuration, weights and the forward pass.
//!
//! - [`ModelSource`] opens a GGUF file or a Hugging Face folder and finds weights by role.
//! - [`Config`] is the checked shape of a model file.
//! - [`Model`] holds packed weights; [`Model::forward`] runs one step over a batch of sequences.
//! - [`LoadedModel`] and [`Compute`] are the interface between an engine and a backend. This crate
//!   has that of the CPU; the one of MLX is made with [`backend`].
//! - [`Adapter`]: LoRA adapters over unchanged base weights, selected per sequence.
//! - [`DraftHead`]: EAGLE-3 heads, which propose tokens from a model's residual stream.
//! - [`shape`]: a model's sizes for the planner, including models that paceline cannot compute.
//! - [`trace`]: what a rank did when, for `paceline trace`.
//! - [`encoder`]: a text in, one vector out; one node, no cache.
//! - [`families`] has a file for each group of relatives: a configuration reader, and a layer.
//!
//! A model knows no requests, sampling or text. Each [`BatchSequence`] lists the cache pages of its
//! sequence.
//!
//! **Numerics rule.** A logit depends on the model, the tokens before it and the kernel class. The
//! bits of a position in [`Model::forward`] are the same in a chunk of 1 or 500 rows, alone or in a
//! batch. They are the same on any number of threads. The sums over attention heads and over the
//! feed-forward width are canonical trees ([`LayerShape::attention_leaf`], [`Config::ffn_leaf`]).
//! So a tensor split gives the same bits too.

pub mod adapter;
mod assistant;
pub mod backend;
mod block_head;
mod candidates;
mod compute;
mod config;
mod draft_head;
mod eagle;
pub mod encoder;
mod error;
mod expert_usage;
pub mod families;
mod kv_transfer;
mod layer_kinds;
mod links;
mod locations;
mod model;
mod next_token;
mod numbers;
mod packed_file;
mod page_store;
mod plan;
mod progress;
mod role;
mod rope;
pub mod shape;
mod source;
pub mod split;
mod step;
mod streaming;
pub mod testing;
pub mod trace;
mod weights;

pub use adapter::{ADAPTERS_MAX, Adapter, AdapterId, AdapterPair};
pub use assistant::AssistantHead;
pub use block_head::{BlockConfig, BlockHead};
pub use compute::{Compute, ExchangeBytes, LoadedModel};
pub use config::{
    Activation, CLAMP_SLOPE, Compressed, CompressedExperts, Config, Constraint, DeltaNet,
    ExpertGroups, Experts, Gating, HeadOrder, Indexer, KeyRuns, LEAST_SUM, Latent, LayerCache,
    LayerShape, NgramTable, Ngrams, PoolIndexer, PositionScaling, Selection, StreamRule, Streams,
};
pub use draft_head::files::{draft_captures, load_draft_head};
pub use draft_head::{DraftBlock, DraftHead, DraftHeadCompute, DraftPlace, HeadRows, PassKind};
pub use eagle::{EagleHead, HeadConfig};
pub use error::Error;
pub use expert_usage::ExpertUses;
pub use families::ModelFamily;
pub use kv_transfer::{CopyRange, KvTransferPlan, kv_transfer_plan};
pub use layer_kinds::{Kinds, WindowPool};
pub use links::Links;
pub use model::{FollowOutcome, LoadOptions, Model, ModelSample};
pub use next_token::NextTokenHead;
pub use numbers::numbers_name;
pub use packed_file::{PackedFault, PackedFile, remove_packed_orphans};
pub use page_store::{KEPT_MAX, PageName, PageStore, PersistedPage};
pub use progress::{ComputeTime, ProgressSnapshot, StepActivity, StepProgress};
pub use role::{LayerRole, Nth, Role, StreamPart};
pub use rope::{LongContext, LongFrequencies, Rope};
pub use source::ModelSource;
pub use split::{LayerCut, LeafCut, Shard, Split, SplitKind, StageKind};
pub use step::{
    Batch, BatchSequence, BatchSize, ForbiddenTokens, Logits, TokenDraw, TopLogits, WindowPages,
    Workspace,
};
pub use streaming::{MemoryLimit, StreamCounts, read_sample};
