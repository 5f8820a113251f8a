//! Errors of `paceline plan`, and hints for the planner's.

use paceline_base::Bytes;
use paceline_board::lookup;
use paceline_model::shape::Error as ShapeError;
use paceline_plan::{Infeasible, PlanChange};

use crate::error::{Error, failed};

/// Several clusters without `--compare`.
pub(super) fn several_clusters(count: usize) -> Error {
    failed(
        format!("{count} clusters are given, a plan is for one"),
        "--compare puts them side by side",
    )
}

pub(crate) fn hints(cause: &(dyn std::error::Error + 'static)) -> Vec<String> {
    if let Some(lookup::Error::Name { near, .. }) = cause.downcast_ref() {
        return vec![format!("did you mean {}?", near.join(" or "))];
    }
    if let Some(ShapeError::Field { .. }) = cause.downcast_ref() {
        return vec!["take another conversion of the model".to_owned()];
    }
    cause.downcast_ref().map_or_else(Vec::new, of_planner)
}

fn of_planner(error: &paceline_plan::Error) -> Vec<String> {
    use paceline_plan::Error as E;
    let one = |text: &str| vec![text.to_owned()];
    match error {
        E::Infeasible(why) => changes(why),
        E::Unknown { kind: "model", .. } => one(
            "`paceline plan --list` shows the catalogue; MODEL may be a GGUF file, a folder or a \
             config.json too",
        ),
        E::Unknown { .. } => one(
            "`paceline plan --list` shows the catalogue; a cluster file may describe its own in \
             [[hardware]] and [[link_kind]]",
        ),
        E::Disconnected { .. } => {
            one("add a [[link]] that joins them, or in the short form @ LINK, such as @ tb5-rdma")
        }
        E::MissingFact { .. } => one("state it in a cluster file, in the [[node]] table"),
        E::TooManyNodes { .. } | E::TooManyLinks { .. } => {
            one("plan for a part of it, or for one of each kind")
        }
        E::Toml { .. } | E::LinkEnd { .. } | E::DuplicateNode { .. } | E::NoNodes => {
            one("docs/planner.md describes cluster files")
        }
        E::Value { .. } | E::Placement { .. } | E::Program { .. } => Vec::new(),
    }
}

/// A line per sufficient change.
fn changes(why: &Infeasible) -> Vec<String> {
    why.changes.iter().map(change).collect()
}

fn change(change: &PlanChange) -> String {
    match change {
        PlanChange::Context { tokens } => format!("it fits with --context {tokens}"),
        PlanChange::Concurrency { requests } => format!("it fits with --concurrency {requests}"),
        PlanChange::Bits { bits } => format!("it fits with {bits} bits per weight (--bits {bits})"),
        PlanChange::Memory { bytes } => {
            format!(
                "it fits with {} more memory for the model",
                gigabytes(*bytes)
            )
        }
        PlanChange::Nodes { count: 1, kind } => format!("it fits with one more {kind}"),
        PlanChange::Nodes { count, kind } => format!("it fits with {count} more {kind}"),
        PlanChange::Disk { tok_s } => {
            format!("--disk reads layers from disk for every token: {tok_s:.2} tok/s")
        }
    }
}

fn gigabytes(bytes: Bytes) -> String {
    format!("{:.0} GB", (bytes.0 as f64 / 1e9).ceil())
}
