//! `paceline models --fits`: which models fit this machine or a cluster, how fast, and how split.
//!
//! Memory, bandwidth and arithmetic of this machine are measured (half a second); those of a
//! cluster come from the planner's catalogue.

use paceline_bench::limits;
use paceline_board::fits::{json, rows, text, this_machine};
use paceline_plan::{Calibration, Catalogue};

use crate::output::print;
use crate::{load, plan};

/// Prints which models fit; `clusters` is that of the command line, empty for this machine.
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
