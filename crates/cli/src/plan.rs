//! `paceline plan`: compares machines, splits and speeds.

mod error;
mod local;
mod train;
mod validate;

use std::path::{Path, PathBuf};

use paceline_bench::limits;
use paceline_board::{lookup, own_cluster};
use paceline_model::shape;
use paceline_plan::report::{Comparison, PlanRequest};
use paceline_plan::solver::Options;
use paceline_plan::{Calibration, Catalogue, Cluster, ModelShape, Objective, Workload};
use paceline_tensor::KvType;
use serde_json::{Value, json};

pub(crate) use error::hints;
use error::several_clusters;

use crate::output::{draw, print, print_err};
use crate::{home, load, member};

pub(crate) fn shape_of(path: &Path) -> anyhow::Result<ModelShape> {
    shape::from_files(path, None).map_err(in_files)
}

fn in_files(error: shape::Error) -> anyhow::Error {
    match error {
        shape::Error::Gguf(error) => error.into(),
        shape::Error::Hf(error) => error.into(),
        shape::Error::Plan(error) => error.into(),
        other => other.into(),
    }
}

fn of_name(error: lookup::Error) -> anyhow::Error {
    match error {
        lookup::Error::Shape(error) => in_files(error),
        lookup::Error::Plan(error) => error.into(),
        other => other.into(),
    }
}

/// The local files that `run` would use for `name`: a path, or a model of the store.
fn local_path(name: &str) -> Option<PathBuf> {
    lookup::local_path(&home::home().ok()?, name)
}

/// A cluster from a file, or else from the short form.
pub(crate) fn cluster(text: &str, catalogue: &mut Catalogue) -> anyhow::Result<Cluster> {
    lookup::cluster(text, catalogue).map_err(of_name)
}

/// The machines of this home's node, of those the chosen ones; this machine where no node runs. Its
/// rates are measured, which takes half a second.
pub(crate) fn own_cluster(chosen: Option<&[String]>) -> anyhow::Result<Cluster> {
    let rates = own_rates()?;
    Ok(match own_nodes() {
        Some(nodes) => own_cluster::own_cluster(&nodes, chosen, rates)?,
        None => own_cluster::this_machine(rates)?,
    })
}

/// Measures this machine for half a second.
pub(crate) fn own_rates() -> anyhow::Result<own_cluster::MeasuredRates> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let kernels = load::kernels(threads)?;
    Ok(limits::measured(&kernels)?)
}

/// The machines that this home's node lists, if it runs.
fn own_nodes() -> Option<Value> {
    let told = member::ask_if_up("nodes", json!({})).ok().flatten()?;
    Some(told["nodes"].clone())
}

/// Prints the plan of `load --preview` for a model that is not here, by its shape in the catalogue.
pub(crate) fn preview(model: &str, chosen: Option<&[String]>, as_json: bool) -> anyhow::Result<()> {
    let catalogue = Catalogue::builtin()?;
    print_err(format_args!(
        "{model} is not here: planned by its shape; nothing is fetched"
    ));
    let question = PlanRequest {
        calibration: Calibration::builtin()?,
        clusters: vec![own_cluster(chosen)?],
        model: lookup::model(None, model, None, &catalogue).map_err(of_name)?,
        workload: Workload::ONE,
        options: Options::default(),
        hosted_usd: None,
        accepted: None,
        catalogue,
    };
    one(&question, false, as_json)
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A model of the catalogue, a GGUF file, or a folder with config.json
    #[arg(required_unless_present_any = ["validate", "fit", "list"])]
    model: Option<String>,
    /// A cluster: a TOML file, or `4 x KIND + KIND @ 2 x LINK`. Several are compared [default: the
    /// machines of `paceline nodes`, or measured local nodes]
    #[arg(long, value_name = "FILE|NODES", num_args = 1)]
    cluster: Vec<String>,
    /// Stored bits per weight on average [default: as in the file, else 4.5]
    #[arg(long, value_name = "B")]
    bits: Option<f64>,
    /// How keys and values are kept: f16, f32, q8 or q4 [default: f16]
    #[arg(long, value_name = "TYPE")]
    kv: Option<KvType>,
    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = Workload::ONE.prompt)]
    prompt: u32,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = Workload::ONE.output)]
    output: u32,
    /// Requests at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    concurrency: u32,
    /// Positions to reserve per request [default: 4096, or as many as prompt and answer need]
    #[arg(long, value_name = "N")]
    context: Option<u32>,
    /// What is best
    #[arg(long, value_enum, default_value_t)]
    objective: PlanGoal,
    /// Constants of this engine for every node; `--list` shows the engines
    #[arg(long, value_name = "NAME")]
    engine: Option<String>,
    /// Let nodes with a known disk rate read layers from disk for every token
    #[arg(long)]
    disk: bool,
    /// Put the clusters side by side
    #[arg(long)]
    compare: bool,
    /// Dollars that a hosted API asks for a million answer tokens: shows after how many tokens and
    /// months the machines have cost as little
    #[arg(long, value_name = "PRICE", requires = "cluster")]
    hosted: Option<f64>,
    /// Also predict decoding with this number of accepted draft tokens a step, as `ps` shows it
    #[arg(long, value_name = "TOKENS")]
    accepted: Option<f64>,
    /// Also write the comparison as a picture
    #[arg(long, value_name = "FILE", visible_alias = "svg", requires = "compare")]
    plot: Option<PathBuf>,
    /// Compare predictions with published measurements: those in the tree, or in FILE
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    validate: Option<Option<PathBuf>>,
    /// Print the constants that the fit rows of the tree give
    #[arg(long)]
    fit: bool,
    /// List machines, links, models and engines of the catalogue
    #[arg(long)]
    list: bool,
    /// Threads of each node on this machine, when there is no --cluster
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "cluster",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    #[command(flatten)]
    train: train::TrainPlan,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What is best.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum PlanGoal {
    /// One request answered soonest
    #[default]
    Latency,
    /// Most tokens a second over all requests
    Throughput,
    /// Fewest joules a token
    Energy,
    /// Fewest nodes
    Nodes,
}

impl PlanGoal {
    const fn objective(self) -> Objective {
        match self {
            Self::Latency => Objective::Latency,
            Self::Throughput => Objective::Throughput,
            Self::Energy => Objective::Energy,
            Self::Nodes => Objective::Nodes,
        }
    }
}

/// Plans, compares, or validates the cost model against published numbers.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(file) = &args.validate {
        return validate::run(file.as_deref(), args.json);
    }
    if args.fit {
        return validate::fit();
    }
    if args.list {
        return print(&lookup::list(
            &Catalogue::builtin()?,
            &Calibration::builtin()?,
        ));
    }
    if args.train.is_asked() {
        let model = args.model.as_deref().unwrap_or_default();
        return train::run(model, (&args.train, &args.cluster), args.json);
    }
    let mut catalogue = Catalogue::builtin()?;
    let clusters = match args.cluster.as_slice() {
        [] => {
            let model = args.model.as_deref().unwrap_or_default();
            let several = own_nodes().is_some_and(|nodes| is_several(&nodes));
            if let Some(path) = local_path(model).filter(|_| !several) {
                return local::run(&path, (args.threads.into(), args.concurrency), args.json);
            }
            vec![own_cluster(None)?]
        }
        named => {
            let each = named.iter().map(|text| cluster(text, &mut catalogue));
            each.collect::<Result<_, _>>()?
        }
    };
    let question = question(args, clusters, catalogue)?;
    if args.compare {
        return compare(&question, args);
    }
    if question.clusters.len() > 1 {
        return Err(several_clusters(question.clusters.len()).into());
    }
    one(&question, args.disk, args.json)
}

fn one(question: &PlanRequest, disk: bool, as_json: bool) -> anyhow::Result<()> {
    let costs = question.costs(&question.clusters[0])?;
    let answer = question.answer(&costs, disk)?;
    if as_json {
        return print(&answer.json(question, &costs).to_string());
    }
    print(&answer.text(question, &costs))
}

fn compare(question: &PlanRequest, args: &Args) -> anyhow::Result<()> {
    let comparison = Comparison::new(question);
    draw(args.plot.as_deref(), || comparison.svg())?;
    if args.json {
        return print(&comparison.json().to_string());
    }
    print(&comparison.text())
}

/// Whether several machines live.
fn is_several(nodes: &Value) -> bool {
    let nodes = nodes.as_array().into_iter().flatten();
    nodes.filter(|node| node["state"] == "alive").count() > 1
}

fn question(
    args: &Args,
    mut clusters: Vec<Cluster>,
    catalogue: Catalogue,
) -> anyhow::Result<PlanRequest> {
    let calibration = Calibration::builtin()?;
    if let Some(engine) = &args.engine {
        lookup::set_engine(&mut clusters, engine, &calibration)?;
    }
    let name = args.model.as_deref().unwrap_or_default();
    let home = home::home().ok();
    let mut model = lookup::model(home.as_ref(), name, args.bits, &catalogue).map_err(of_name)?;
    model.bits.kv = args.kv.map_or(model.bits.kv, KvType::stored_bits);
    let needed = args.prompt.saturating_add(args.output);
    Ok(PlanRequest {
        catalogue,
        calibration,
        clusters,
        model,
        workload: Workload {
            prompt: args.prompt,
            output: args.output,
            concurrency: args.concurrency,
            context: args.context.unwrap_or(Workload::ONE.context.max(needed)),
        },
        options: Options {
            objective: args.objective.objective(),
            ..Options::default()
        },
        hosted_usd: args.hosted,
        accepted: args.accepted,
    })
}
