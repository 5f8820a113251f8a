//! Jobs of one or two passes.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use paceline_mapreduce::clusters::{self, Clusters};
use paceline_mapreduce::hist::Bins;
use paceline_mapreduce::jobs::{
    Columns, Estimate, Grouped, Histogram, ReductionResult, Runs, TopValues, Writing, grouped,
    joined, random,
};
use paceline_mapreduce::{InputFile, Kind};
use serde::Serialize;

use super::job::{end, show};
use super::watch::JobWatcher;
use super::{
    ArrayJobArgs, GroupbyArgs, HistArgs, JoinArgs, KmeansArgs, MapArgs, MatmulArgs, MontecarloArgs,
    ReduceArgs, TopkArgs,
};
use crate::output::print_err;

/// `paceline mapreduce reduce`.
pub(super) fn reduce(args: &ReduceArgs) -> anyhow::Result<()> {
    let task = args.job.columns(&args.columns)?.task(Kind::Reduce(args.op));
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let reduced = ReductionResult {
        op: args.op.name(),
        value: runs.number(&task)?,
        dtype: task.dtype(),
    };
    let figures = end(runs, task.rows())?;
    show(&figures, args.job.json, &reduced, |reduced| {
        reduced.value.to_string()
    })
}

/// `paceline mapreduce hist`.
pub(super) fn hist(args: &HistArgs) -> anyhow::Result<()> {
    let columns = args.job.columns(&args.columns)?;
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let (low, high) = match args.range[..] {
        [low, high] => (low, high),
        _ => range(args, &columns, &mut runs)?,
    };
    let bins = Bins::new(low, high, args.bins)
        .with_context(|| format!("--range is {low} to {high}, expected finite and ascending"))?;
    let task = columns.task(Kind::Hist(bins));
    let histogram = runs.histogram(&task, &bins)?;
    let figures = end(runs, task.rows())?;
    if !args.job.json {
        histogram.left_out().iter().for_each(print_err);
    }
    show(&figures, args.job.json, &histogram, Histogram::text)
}

/// The full range of an integer type, or the minimum and maximum.
fn range(args: &HistArgs, columns: &Columns, runs: &mut Runs<'_>) -> anyhow::Result<(f64, f64)> {
    match Bins::of_type(columns.dtype()) {
        Some(range) => Ok(range),
        None if args.job.resumes() => {
            bail!("--resume needs --range: the bounds take a pass before")
        }
        None => Ok(runs.bounds(columns)?),
    }
}

/// `paceline mapreduce topk`.
pub(super) fn topk(args: &TopkArgs) -> anyhow::Result<()> {
    let task = args.job.columns(&args.columns)?.best(args.k, args.smallest);
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let best = runs.best(&task)?;
    let figures = end(runs, task.rows())?;
    if !args.job.json {
        best.left_out().iter().for_each(print_err);
    }
    show(&figures, args.job.json, &best, TopValues::text)
}

/// `paceline mapreduce groupby`.
pub(super) fn groupby(args: &GroupbyArgs) -> anyhow::Result<()> {
    let input = |path: &Path| args.job.input(path).map(InputFile::flat);
    let task = grouped([input(&args.keys)?, input(&args.values)?], args.op);
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let groups = runs.grouped(&task, args.op)?;
    let figures = end(runs, task.rows())?;
    show(&figures, args.job.json, &groups, Grouped::text)
}

/// `paceline mapreduce join`.
pub(super) fn join(args: &JoinArgs) -> anyhow::Result<()> {
    let inputs = args.inputs.iter();
    let inputs = inputs.map(|path| args.job.input(path).map(InputFile::flat));
    let inputs: Vec<InputFile> = inputs.collect::<Result<_, _>>()?;
    let inputs: [InputFile; 4] = inputs.try_into().expect("clap takes four");
    let task = joined(inputs, args.op, args.map.clone());
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let groups = runs.grouped(&task, args.op)?;
    let figures = end(runs, task.rows())?;
    show(&figures, args.job.json, &groups, Grouped::text)
}

/// `paceline mapreduce kmeans`.
pub(super) fn kmeans(args: &KmeansArgs) -> anyhow::Result<()> {
    ensure!(!args.job.resumes(), "--resume is for jobs of one pass");
    let input = args.job.input(&args.input)?;
    let first = clusters::first(&input, args.k, args.seed, args.init.as_deref())?;
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let (clusters, centroids) = runs.clusters(&input, first, args.iterations)?;
    if let Some(out) = &args.out {
        clusters::write(out, &centroids)?;
    }
    let figures = end(runs, input.rows)?;
    show(&figures, args.job.json, &clusters, Clusters::text)
}

/// `paceline mapreduce montecarlo`.
pub(super) fn montecarlo(args: &MontecarloArgs) -> anyhow::Result<()> {
    let task = random(args.expr.clone(), args.seed, args.samples);
    let mut watch = JobWatcher::default();
    let mut runs = args.job.start(&mut watch)?;
    let estimate = runs.estimate(&task, args.seed, args.samples)?;
    let figures = end(runs, args.samples)?;
    show(&figures, args.job.json, &estimate, Estimate::text)
}

/// `paceline mapreduce map`.
pub(super) fn map(args: &MapArgs) -> anyhow::Result<()> {
    let (job, columns) = (&args.job, args.job.columns(&args.columns)?);
    let writing = Writing::new(&columns, ArrayJobArgs::place(&args.out), job.journal())?;
    write(job, &writing, &args.out)
}

/// `paceline mapreduce matmul`.
pub(super) fn matmul(args: &MatmulArgs) -> anyhow::Result<()> {
    let (job, out) = (&args.job, ArrayJobArgs::place(&args.out));
    let matrices = [job.input(&args.left)?, job.input(&args.right)?];
    let writing = Writing::product(matrices, out, job.journal())?;
    write(job, &writing, &args.out)
}

/// Runs a job that writes a file.
fn write(job: &ArrayJobArgs, writing: &Writing, out: &Path) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct MapReport<'a> {
        out: &'a Path,
    }
    let mut watch = JobWatcher::default();
    let mut runs = job.start(&mut watch)?;
    runs.write(writing)?;
    let figures = end(runs, writing.rows())?;
    let written = MapReport { out };
    show(&figures, job.json, &written, |written| {
        written.out.display().to_string()
    })
}
