//! Jobs of one pass, or two.

use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use paceline_mapreduce::clusters::{self, Clusters};
use paceline_mapreduce::expr::COLUMNS;
use paceline_mapreduce::groupby::Grouping;
use paceline_mapreduce::hist::Bins;
use paceline_mapreduce::reduce::Op;
use paceline_mapreduce::topk::Pick;
use paceline_mapreduce::{Dtype, FileSink, Kind, Origin, Partial, Task, Value};
use serde::Serialize;

use super::job::Running;
use super::{
    Columns, GroupbyArgs, HistArgs, JobArgs, KmeansArgs, MapArgs, MontecarloArgs, ReduceArgs,
    TopkArgs,
};

/// Most bytes of a file with a WGSL function that are read: more are refused by their number.
const FUNCTION_BYTES_MAX: u64 = 1 << 20;

fn task(columns: &Columns, job: &JobArgs, kind: Kind) -> anyhow::Result<Task> {
    let mut task = Task::of_files(job.flat(columns)?, kind);
    task.map.clone_from(&columns.map);
    task.wgsl = columns.wgsl.as_deref().map(function).transpose()?;
    Ok(task)
}

/// The text of a file with a WGSL function.
fn function(path: &Path) -> anyhow::Result<String> {
    let wrong = || format!("cannot read {}", path.display());
    let file = std::fs::File::open(path).with_context(wrong)?;
    let mut text = String::new();
    let read = file.take(FUNCTION_BYTES_MAX).read_to_string(&mut text);
    read.with_context(wrong)?;
    Ok(text)
}

/// Runs a reduction.
fn number(running: &mut Running<'_>, task: &Task) -> anyhow::Result<Value> {
    match running.run(task)? {
        Partial::Reduce(state) => Ok(state.value(task.dtype())?),
        other => unreachable!("a reduction gives {other:?}"),
    }
}

/// `paceline mapreduce reduce`.
pub(super) fn reduce(args: &ReduceArgs) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Reduced {
        op: &'static str,
        value: Value,
        dtype: Dtype,
    }
    let task = task(&args.columns, &args.job, Kind::Reduce(args.op))?;
    let mut running = args.job.start()?;
    let value = number(&mut running, &task)?;
    let reduced = Reduced {
        op: args.op.name(),
        value,
        dtype: task.dtype(),
    };
    let figures = running.end(task.rows())?;
    figures.print(args.job.json, reduced, |reduced| reduced.value.to_string())
}

/// `paceline mapreduce hist`.
pub(super) fn hist(args: &HistArgs) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Histogram {
        counts: Vec<u64>,
        edges: Vec<f64>,
        below: u64,
        above: u64,
        nan: u64,
    }
    let mut running = args.job.start()?;
    let (low, high) = match args.range[..] {
        [low, high] => (low, high),
        _ => range(args, &mut running)?,
    };
    let bins = Bins::new(low, high, args.bins)
        .with_context(|| format!("--range is {low} to {high}, expected finite and ascending"))?;
    let task = task(&args.columns, &args.job, Kind::Hist(bins))?;
    let Partial::Hist(counts) = running.run(&task)? else {
        unreachable!("a histogram gives counts");
    };
    let [below, above, nan] = counts.outside();
    let histogram = Histogram {
        counts: counts.counts().to_vec(),
        edges: bins.edges(),
        below,
        above,
        nan,
    };
    let figures = running.end(task.rows())?;
    figures.print(args.job.json, histogram, |histogram| {
        let bins = histogram.edges.iter().zip(&histogram.counts);
        let lines: Vec<String> = bins
            .map(|(edge, count)| format!("{edge}\t{count}"))
            .collect();
        lines.join("\n")
    })
}

/// All values of an integer type, or the least and greatest value.
fn range(args: &HistArgs, running: &mut Running<'_>) -> anyhow::Result<(f64, f64)> {
    let of = |op| task(&args.columns, &args.job, Kind::Reduce(op));
    let least = of(Op::Min)?;
    match least.dtype() {
        Dtype::U32 => return Ok((0.0, 2f64.powi(32))),
        Dtype::U16 => return Ok((0.0, 65536.0)),
        Dtype::U8 | Dtype::Bool => return Ok((0.0, 256.0)),
        _ if args.job.resumes() => bail!("--resume needs --range: the bounds take a pass before"),
        _ => {}
    }
    let low = number(running, &least)?.as_f64();
    let high = number(running, &of(Op::Max)?)?.as_f64();
    Ok(match low == high {
        true => (low - 0.5, high + 0.5), // as NumPy
        false => (low, high),
    })
}

/// `paceline mapreduce topk`.
pub(super) fn topk(args: &TopkArgs) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Found {
        values: Vec<Value>,
        indices: Vec<u64>,
    }
    let mut task = task(&args.columns, &args.job, Kind::Reduce(Op::Count))?;
    task.kind = Kind::TopK(Pick {
        k: args.k,
        largest: !args.smallest,
        dtype: task.dtype(),
    });
    let mut running = args.job.start()?;
    let Partial::TopK(top) = running.run(&task)? else {
        unreachable!("the best values");
    };
    let (values, indices) = top.values().into_iter().unzip();
    let found = Found { values, indices };
    let figures = running.end(task.rows())?;
    figures.print(args.job.json, found, |found| {
        let rows = found.values.iter().zip(&found.indices);
        let lines: Vec<String> = rows.map(|(value, row)| format!("{value}\t{row}")).collect();
        lines.join("\n")
    })
}

/// `paceline mapreduce groupby`.
pub(super) fn groupby(args: &GroupbyArgs) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Grouped {
        op: &'static str,
        groups: usize,
        keys: Vec<i128>,
        values: Vec<Value>,
    }
    let input = |path: &Path| args.job.input(path).map(|input| input.flat());
    let inputs = vec![input(&args.keys)?, input(&args.values)?];
    let grouping = Grouping {
        op: args.op,
        keys: inputs[0].dtype,
        values: inputs[1].dtype,
    };
    let task = Task::of_files(inputs, Kind::GroupBy(grouping));
    let mut running = args.job.start()?;
    let Partial::GroupBy(groups) = running.run(&task)? else {
        unreachable!("groups");
    };
    let (keys, values): (Vec<i128>, Vec<Value>) = groups.values().into_iter().unzip();
    let grouped = Grouped {
        op: args.op.name(),
        groups: keys.len(),
        keys,
        values,
    };
    let figures = running.end(task.rows())?;
    figures.print(args.job.json, grouped, |grouped| {
        let rows = grouped.keys.iter().zip(&grouped.values);
        let lines: Vec<String> = rows.map(|(key, value)| format!("{key}\t{value}")).collect();
        lines.join("\n")
    })
}

/// `paceline mapreduce kmeans`.
pub(super) fn kmeans(args: &KmeansArgs) -> anyhow::Result<()> {
    ensure!(!args.job.resumes(), "--resume is for jobs of one pass");
    let input = args.job.input(&args.input)?;
    let first = clusters::first(&input, args.k, args.seed, args.init.as_deref())?;
    let mut running = args.job.start()?;
    let iterations = args.iterations;
    let (clusters, centroids) =
        clusters::iterate(&input, first, iterations, |task| running.run(task))?;
    if let Some(out) = &args.out {
        clusters::write(out, &centroids)?;
    }
    let figures = running.end(input.rows)?;
    figures.print(args.job.json, clusters, Clusters::text)
}

/// `paceline mapreduce montecarlo`.
pub(super) fn montecarlo(args: &MontecarloArgs) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Estimate {
        value: f64,
        /// The standard deviation of `value`.
        std_error: f64,
        seed: u64,
    }
    let task = Task {
        origin: Origin::Random {
            seed: args.seed,
            samples: args.samples,
            columns: COLUMNS.len() as u32,
        },
        map: Some(args.expr.clone()),
        wgsl: None,
        kind: Kind::Reduce(Op::Var),
    };
    let mut running = args.job.start()?;
    let Partial::Reduce(state) = running.run(&task)? else {
        unreachable!("a reduction");
    };
    let estimate = Estimate {
        value: state.mean(),
        std_error: (state.value(Dtype::F64)?.as_f64() / args.samples as f64).sqrt(),
        seed: args.seed,
    };
    let figures = running.end(args.samples)?;
    figures.print(args.job.json, estimate, |estimate| {
        format!("{:?} ± {:.1e}", estimate.value, estimate.std_error)
    })
}

/// `paceline mapreduce map`.
pub(super) fn map(args: &MapArgs) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Written<'a> {
        out: &'a Path,
    }
    // The result has its name only once it is whole.
    let out = JobArgs::place(&args.out);
    let mut part = out.clone().into_os_string();
    part.push(".part");
    let part = std::path::PathBuf::from(part);
    let task = task(&args.columns, &args.job, Kind::Write(part.clone()))?;
    let goes_on = args.job.journal().is_some_and(Path::exists);
    ensure!(
        !goes_on || part.exists(),
        "{} is gone, which this job has written in part",
        part.display()
    );
    if !goes_on {
        FileSink::create(&part, Dtype::F64, task.rows())?;
    }
    let mut running = args.job.start()?;
    let ran = running.run(&task);
    if ran.is_err() && !args.job.resumes() {
        let _ = std::fs::remove_file(&part); // the error says more than that it stays
    }
    ran?;
    std::fs::rename(&part, &out)
        .with_context(|| format!("cannot rename {} to {}", part.display(), out.display()))?;
    let written = Written { out: &args.out };
    let figures = running.end(task.rows())?;
    figures.print(args.job.json, written, |written| {
        written.out.display().to_string()
    })
}
