//! `paceline mapreduce sort`: sorts values in ascending order.

use std::path::Path;

use paceline_cluster::machine;
use paceline_mapreduce::Dtype;
use paceline_mapreduce::sort::Sort;
use serde::Serialize;

use super::job::{end, show};
use super::watch::JobWatcher;
use super::{ArrayJobArgs, SortArgs};

/// Memory limit if the available memory is unknown.
const MEMORY: u64 = 1 << 30;

/// The object that `sort --json` prints.
#[derive(Serialize)]
struct SortReport<'a> {
    out: &'a Path,
    dtype: Dtype,
    buckets: usize,
    /// Bytes of memory for all nodes together.
    memory: u64,
    /// Whether the values stayed in memory; else they were written and read once.
    in_memory: bool,
}

pub(super) fn sort(args: &SortArgs) -> anyhow::Result<()> {
    let input = args.job.input(&args.input)?.flat();
    let available = machine::memory().and_then(|memory| memory.available);
    let half = available.map_or(MEMORY, |available| available.0 / 2);
    let sort = Sort {
        input,
        out: ArrayJobArgs::place(&args.out),
        memory: args.memory.unwrap_or(half),
        journal: args.job.journal().map(Path::to_owned),
    };
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let sorted = runs.sort(&sort)?;
    let shown = SortReport {
        out: &args.out,
        dtype: sort.input.dtype,
        buckets: sorted.buckets,
        memory: sort.memory,
        in_memory: sorted.in_memory,
    };
    let figures = end(runs, sorted.rows)?;
    show(&figures, args.job.json, &shown, |shown| {
        shown.out.display().to_string()
    })
}
