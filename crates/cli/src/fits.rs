//! `paceline models --fits`: models that fit this machine or a cluster, with speed and split.
//!
//! This machine's memory, bandwidth and arithmetic are measured (half a second); a cluster's come
//! from the planner's catalogue.

use paceline_bench::limits;
use paceline_board::fits::{json, rows, text, this_machine};
use paceline_plan::{Calibration, Catalogue};

use crate::output::print;
use crate::{load, plan};

/// Prints the models that fit `cluster`, or this machine if `None`.
pub(crate) fn run(cluster: Option<&str>, as_json: bool) -> anyhow::Result<()> {
    let mut catalogue = Catalogue::builtin()?;
    let calibration = Calibration::builtin()?;
    let cluster = match cluster {
        Some(text) => plan::cluster(text, &mut catalogue)?,
        None => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let kernels = load::kernels(threads)?;
            this_machine(limits::measured(&kernels)?)?
        }
    };
    let rows = rows(&cluster, &catalogue, &calibration)?;
    print(&match as_json {
        true => json(&cluster, &rows).to_string(),
        false => text(&cluster, &rows),
    })
}
