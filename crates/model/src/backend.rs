//! Parts that another backend shares with the CPU's; crate `model-mlx` is the only user.
//!
//! A backend implements [`LoadedModel`](crate::LoadedModel) and [`Compute`](crate::Compute):
//!
//! - [`WeightReader`] finds and checks weights, [`StoredTensor`] is one as its file has it.
//! - [`LayerStep`] has the operations that a family's layer calls on a backend.
//! - [`StepPlan`] is a step as the leader sends it to the other ranks.
//! - [`LayerWriter`] writes layers to disk in the backend's form, [`StreamedLayers`] reads them.
//! - [`PersistentCache`] reads and writes the pages of a [`PageMemory`].
//! - [`LogitExtent`] says which logits of a row travel.

pub use crate::candidates::{LogitExtent, gathered};
pub use crate::compute::{depth, steps_max};
pub use crate::config::{CLAMP_SLOPE, LEAST_SUM, store};
pub use crate::families::{Half, LayerStep};
pub use crate::page_store::{PageMemory, PersistentCache};
pub use crate::plan::StepPlan;
pub use crate::split::HeadRanges;
pub use crate::step::PlanLimits;
pub use crate::streaming::{LayerWriter, StreamedLayers};
pub use crate::weights::{
    DeltaMatrices, DeltaRowLayout, DeltaVectors, MatrixRows, StoredTensor, WeightReader,
    read_rope_factors,
};
