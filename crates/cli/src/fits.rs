//! `paceline models --fits`: models that fit this machine or a cluster, with speed and split.
//!
//! This machine's bandwidth and arithmetic are measured (half a second); those of a named cluster
//! come from the planner's catalogue.

use paceline_board::fits::{json, rows, text};
use paceline_plan::{Calibration, Catalogue};

use crate::output::print;
use crate::plan;

/// Prints the models that fit `cluster`, or the machines of this one's node if `None`.
pub(crate) fn run(cluster: Option<&str>, as_json: bool) -> anyhow::Result<()> {
    let mut catalogue = Catalogue::builtin()?;
    let calibration = Calibration::builtin()?;
    let cluster = match cluster {
        Some(text) => plan::cluster(text, &mut catalogue)?,
        None => plan::own_cluster(None)?,
    };
    let rows = rows(&cluster, &catalogue, &calibration)?;
    print(&match as_json {
        true => json(&cluster, &rows).to_string(),
        false => text(&cluster, &rows),
    })
}
