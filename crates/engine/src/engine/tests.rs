//! The engine on tiny random models, and on SmolLM2 if installed.

mod adapters;
mod constrained;
mod draft_head;
mod draft_model;
mod drafts;
mod edges;
mod hostile;
mod in_flight;
mod interrupted;
mod mlx;
mod page_store;
mod prefill_budget;
pub(crate) mod requests;
mod rig;
mod schedules;
mod scores;
mod shares;
mod sharing;
pub(crate) mod smollm2;
mod snapshots;
mod text;
pub(crate) mod tiny;
mod turns;
mod windows;
