//! The planner: places a model on machines and predicts its speed. It has a cost model that was
//! compared with published measurements, and a solver on top of it.
//!
//! Pure: no files, no clock, no threads. Facts come in as values ([`Cluster`], [`ModelShape`],
//! [`Workload`]) or as TOML text ([`catalogue`]). A [`Placement`] and its [`Prediction`] come out,
//! or an [`Error`] that says why there is none.
//!
//! ```
//! use paceline_plan::{Calibration, Catalogue, Costs, Pipeline, Placement, Split, Workload};
//!
//! let catalogue = Catalogue::builtin()?;
//! let cluster = paceline_plan::catalogue::short_cluster(
//!     "2 x mac-studio-m3-ultra-512 @ tb5-rdma",
//!     &catalogue,
//! )?;
//! let model = catalogue.model("Qwen3-235B-A22B")?.shape(8.5)?;
//! let calibration = Calibration::builtin()?;
//! let costs = Costs::new(&cluster, &model, Workload::ONE, &calibration)?;
//! let tensor = Placement::single(Pipeline::group(model.layers, Split::Tensor, &[0, 1]));
//! let said = paceline_plan::predict(&costs, &tensor)?;
//! assert!(said.decode_tok_s > 20.0 && said.decode_tok_s < 35.0);
//! # Ok::<(), paceline_plan::Error>(())
//! ```
//!
//! In reading order:
//! - [`model`] and [`cluster`]: facts.
//! - [`placement`]: the decisions.
//! - [`cost`]: seconds and bytes.
//! - [`predict()`], and [`drafts`] for several tokens a step.
//! - [`calibration`] and [`mod@fit`]: constants.
//! - [`published`] and [`mod@validate`]: the check against reality.
//! - [`solver`], [`advice`].
//! - [`draw`]: pictures of any of it.

#![forbid(unsafe_code)]

pub mod advice;
pub mod calibration;
pub mod catalogue;
mod check;
pub mod cluster;
pub mod cost;
pub mod drafts;
pub mod draw;
mod error;
pub mod fit;
pub mod model;
mod network;
pub mod origin;
pub mod placement;
pub mod predict;
pub mod prefill_offload;
pub mod publications;
pub mod rebalance;
pub mod report;
pub mod solver;
pub mod split_selection;
pub mod validate;
mod workload;

pub use calibration::{Calibration, EXPERT_REUSE};
pub use catalogue::Catalogue;
pub use cluster::{Backend, Cluster, ClusterNode, LinkTransport, NodeLink, Rates};
pub use cost::Costs;
pub use error::{Error, Infeasible, PlanChange};
pub use model::{AttentionKind, Bits, Caches, DeltaNet, Indexer, ModelShape, Moe, Sliding};
pub use network::LinkTable;
pub use placement::{Pipeline, PipelineStage, Placement, Split, StageMember};
pub use predict::{Prediction, STEPS_MAX, predict};
pub use workload::{CHUNK, Objective, Workload};
