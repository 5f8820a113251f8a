//! `paceline plan MODEL` without a cluster: predictions for this machine, compared with past runs.

use std::path::Path;

use paceline_base::KernelClass;
use paceline_board::run_forecast::{MOST, json, rows, table};
use paceline_comm::Backend;
use paceline_model::{Config, ModelSource};
use paceline_node::forecast::{Forecast, Setting};

use crate::local_model::kernels;
use crate::output::print;

/// Predicts 1 to 4 nodes of `threads` threads each, in every split, for one answer and several.
pub(super) fn run(
    path: &Path,
    (threads, answers): (usize, u32),
    as_json: bool,
) -> anyhow::Result<()> {
    let source = ModelSource::open(path)?;
    let config = Config::read(&source)?;
    let setting = Setting {
        source: &source,
        config: &config,
        class: KernelClass::Cpu,
        threads,
        backend: Backend::Any,
    };
    let home = crate::home::home()?;
    let local = Forecast::new(home.root(), setting, MOST, kernels)?;
    let rows = rows(&local, &config, answers);
    if as_json {
        return print(&json((threads, answers), &rows).to_string());
    }
    print(table((threads, answers), &rows).trim_end())
}
