//! `paceline mapreduce`: array jobs over files, on threads, worker processes or machines.

mod hosts;
mod job;
mod jobs;
mod sort;
mod watch;

use std::path::PathBuf;

use paceline_base::{Bytes, BytesError};
use paceline_mapreduce::reduce::Op;
use paceline_mapreduce::worker::{self, FileAccess};

use crate::error::started_by_hand;
use job::ArrayJobArgs;

/// What to compute.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// One number of all values: an exact sum, a mean, a variance, an extreme
    Reduce(ReduceArgs),
    /// How many values lie in each of some intervals; NaN is counted apart
    Hist(HistArgs),
    /// The largest or smallest values and their rows; NaN is counted and left out
    Topk(TopkArgs),
    /// The values in ascending order, written to a .npy file; also of files larger than memory
    Sort(SortArgs),
    /// A reduction for each key
    Groupby(GroupbyArgs),
    /// A join of two tables by keys, reduced for each key
    Join(JoinArgs),
    /// Clusters of rows, and their means; rows with NaN or infinities are refused
    Kmeans(KmeansArgs),
    /// The mean of an expression over random numbers, with its error
    Montecarlo(MontecarloArgs),
    /// An expression of each row, written to a .npy file
    Map(MapArgs),
    /// The product of two matrices larger than memory: f64 with the same bits for any number of
    /// nodes; with --device gpu f32
    Matmul(MatmulArgs),
    /// Computes parts for one of the other commands, which starts it
    #[command(hide = true)]
    Worker(WorkerArgs),
}

/// How a worker is reached.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct WorkerArgs {
    /// Its parent is on another machine: what is to be written goes there
    #[arg(long)]
    stdio: bool,
    /// Start a worker on this host, and pass on what both say
    #[arg(long, value_name = "HOST", conflicts_with = "stdio")]
    on: Option<String>,
    /// Have this node start a worker, and pass on what both say
    #[arg(long, value_name = "ID", conflicts_with_all = ["stdio", "on"])]
    node: Option<String>,
    /// Read no input but those below --folder
    #[arg(long, requires = "stdio")]
    lent: bool,
    /// A folder with inputs; may be given several times
    #[arg(long, value_name = "DIR", requires = "lent")]
    folder: Vec<PathBuf>,
}

/// Inputs that are taken value by value.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ColumnArgs {
    /// .npy files of the same length
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<PathBuf>,
    /// Compute this of each row first: x, y, z and w are the inputs, i is the row's number
    #[arg(long, value_name = "EXPR", allow_hyphen_values = true)]
    map: Option<String>,
    /// Compute this WGSL function of each row first, on a graphics processor: one function of as
    /// many f32, i32 or u32 as there are inputs, without loops. Results of f32 differ between
    /// devices
    #[arg(long, value_name = "FILE", conflicts_with = "map")]
    wgsl: Option<PathBuf>,
    /// The WGSL function reads rows nearby, this many to each side, or all. It is
    /// `fn f(row: i32, column: i32) -> f32`, or `fn f(row: i32) -> T` with T an f32, a vector or
    /// array<f32, N>. It reads the inputs as x(row, column), y, z and w; rows are the first axis.
    /// Beyond an edge they give the value at the edge. rows() and columns() are those of x
    #[arg(long, value_name = "ROWS", requires = "wgsl", value_parser = halo)]
    halo: Option<u64>,
    /// Compute that function this many times, each time of its last result
    #[arg(long, value_name = "N", requires = "halo", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    steps: u32,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReduceArgs {
    /// sum, mean, min, max, var, std, dot (of two files) or count
    #[arg(value_name = "OP", value_parser = op)]
    op: Op,
    #[command(flatten)]
    columns: ColumnArgs,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct HistArgs {
    #[command(flatten)]
    columns: ColumnArgs,
    /// Bins of equal width
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    bins: u32,
    /// Left edge of the first bin and right edge of the last [default: all values of a type of
    /// integers; the least and greatest value, which takes a pass more]
    #[arg(long, value_names = ["LOW", "HIGH"], num_args = 2, allow_negative_numbers = true)]
    range: Vec<f64>,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TopkArgs {
    #[command(flatten)]
    columns: ColumnArgs,
    /// How many values
    #[arg(short, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    k: u32,
    /// The smallest values, not the largest
    #[arg(long)]
    smallest: bool,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SortArgs {
    /// A .npy file; of floats -0 comes before 0, and NaN last, or first with a negative sign
    #[arg(value_name = "INPUT")]
    input: PathBuf,
    /// The .npy file to write, of the same type. OUT.part and OUT.sort exist meanwhile
    #[arg(short, value_name = "OUT")]
    out: PathBuf,
    /// Bytes for all nodes together, as 500M or 2G [default: half of what is available]
    #[arg(long, value_name = "BYTES", value_parser = memory)]
    memory: Option<u64>,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GroupbyArgs {
    /// sum, mean, min, max or count
    #[arg(value_name = "OP", value_parser = op)]
    op: Op,
    /// A .npy file of integers: the keys
    #[arg(value_name = "KEYS")]
    keys: PathBuf,
    /// A .npy file of as many values
    #[arg(value_name = "VALUES")]
    values: PathBuf,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct JoinArgs {
    /// sum, mean, min, max or count, of all pairs of rows with a key
    #[arg(value_name = "OP", value_parser = op)]
    op: Op,
    /// .npy files: keys and values of the left table, then those of the right one, which must fit
    /// the memory of each node. Keys are integers
    #[arg(value_names = ["KEYS", "VALUES", "KEYS2", "VALUES2"], num_args = 4, required = true)]
    inputs: Vec<PathBuf>,
    /// The value of a pair: an expression of the left value x and the right value y
    #[arg(
        long,
        value_name = "EXPR",
        allow_hyphen_values = true,
        default_value = "x * y"
    )]
    map: String,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct KmeansArgs {
    /// A .npy file of rows, its first axis, of finite numbers
    #[arg(value_name = "INPUT")]
    input: PathBuf,
    /// How many clusters
    #[arg(short, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    k: u32,
    /// Most iterations; it ends before when no centroid moves
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iterations: u32,
    /// Which rows are the first centroids: k with different values, drawn by this number
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// A .npy file of the first centroids, k rows
    #[arg(long, value_name = "FILE")]
    init: Option<PathBuf>,
    /// Write the centroids to this .npy file
    #[arg(short, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MontecarloArgs {
    /// An expression of x, y, z and w, which are random from 0 to 1
    #[arg(value_name = "EXPR", allow_hyphen_values = true)]
    expr: String,
    /// How many samples
    #[arg(long, value_name = "N", default_value_t = 10_000_000,
          value_parser = clap::value_parser!(u64).range(1..=1 << 53))]
    samples: u64,
    /// Which random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    columns: ColumnArgs,
    /// The .npy file to write, of f64
    #[arg(short, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    job: ArrayJobArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MatmulArgs {
    /// A .npy file of the first matrix: rows by depth
    #[arg(value_name = "A")]
    left: PathBuf,
    /// A .npy file of the second one: depth by columns
    #[arg(value_name = "B")]
    right: PathBuf,
    /// The .npy file to write, of f64
    #[arg(short, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    job: ArrayJobArgs,
}

/// Parses a size such as `500M` or `2G`.
pub(crate) fn memory(text: &str) -> Result<u64, BytesError> {
    Bytes::parse(text).map(|bytes| bytes.0)
}

fn halo(text: &str) -> Result<u64, String> {
    match text {
        "all" => Ok(u64::MAX),
        text => text
            .parse()
            .map_err(|_| "expected a number of rows, or all".to_owned()),
    }
}

fn op(name: &str) -> Result<Op, String> {
    let known = Op::ALL.map(Op::name).join(", ");
    let mut all = Op::ALL.into_iter();
    all.find(|op| op.name() == name)
        .ok_or_else(|| format!("reductions are {known}"))
}

/// Runs a job, or a worker of one.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Reduce(args) => jobs::reduce(args),
        Command::Hist(args) => jobs::hist(args),
        Command::Topk(args) => jobs::topk(args),
        Command::Sort(args) => sort::sort(args),
        Command::Groupby(args) => jobs::groupby(args),
        Command::Join(args) => jobs::join(args),
        Command::Kmeans(args) => jobs::kmeans(args),
        Command::Montecarlo(args) => jobs::montecarlo(args),
        Command::Map(args) => jobs::map(args),
        Command::Matmul(args) => jobs::matmul(args),
        Command::Worker(args) => compute(args),
    }
}

pub(crate) fn hint(cause: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    use paceline_mapreduce::Error;
    match cause.downcast_ref()? {
        Error::NoDistance { .. } => Some("leave such rows out, or give them finite values"),
        Error::Distinct { .. } => Some("take a smaller -k"),
        Error::Edges { .. } => {
            Some("--range LOW HIGH gives the edges; values in no bin are counted apart")
        }
        _ => None,
    }
}

/// Runs a worker for a parent, here or on another host.
fn compute(args: &WorkerArgs) -> anyhow::Result<()> {
    if let Some(host) = &args.on {
        return hosts::bridge(host);
    }
    if let Some(id) = &args.node {
        return hosts::bridge_to_node(id);
    }
    let ended = match (args.stdio, args.lent) {
        (false, _) => worker::run(),
        (true, false) => worker::run_over_stdio(&FileAccess::Inputs),
        (true, true) => worker::run_over_stdio(&FileAccess::Lent(args.folder.clone())),
    };
    match ended {
        Ok(never) => match never {},
        Err(paceline_mapreduce::Error::Cluster(_)) => Err(started_by_hand().into()),
        Err(error) => Err(error.into()), // the parent was told
    }
}
