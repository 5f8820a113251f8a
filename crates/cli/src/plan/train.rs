//! `paceline plan MODEL --train`: forecast of a training on this machine or a cluster.

use std::path::Path;

use paceline_base::Bytes;
use paceline_board::trainings::{ModelSizes, json, of_cluster, report, this_machine, told};
use paceline_model::adapter::files::TARGETS;
use paceline_plan::catalogue::Catalogue;
use paceline_train::{Lora, Method, TrainingSpec, changes, forecast, too_small};

use super::error::several_clusters;
use super::local_path;
use crate::error::Error;
use crate::load;
use crate::output::print;
use crate::train::{ShardArg, of_name};

/// What is asked about a training.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct TrainPlan {
    /// Say what training the model would take, instead of answering with it: on this machine, which
    /// is measured, or on those of --cluster
    #[arg(long)]
    train: bool,
    /// lora, qlora or full
    #[arg(long, value_name = "HOW", default_value = "lora", requires = "train",
          value_parser = of_name::<Method>)]
    method: Method,
    /// Inner dimension of adapters
    #[arg(long, value_name = "R", default_value_t = 16, requires = "train")]
    rank: usize,
    /// Rows of a step
    #[arg(long, value_name = "B", default_value_t = 4, requires = "train")]
    batch: usize,
    /// Tokens of a row
    #[arg(long, value_name = "N", default_value_t = 512, requires = "train")]
    row: usize,
    /// Worker processes on this machine
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "train",
        conflicts_with = "cluster"
    )]
    nodes: usize,
    /// Stages that the model is cut into, at most one a node
    #[arg(long, value_name = "N", default_value_t = 1, requires = "train")]
    stages: usize,
    /// Workers share out state or all as ranks of one group; auto is all for --method full
    #[arg(long, value_name = "HOW", requires = "train", conflicts_with = "stages",
          value_parser = ShardArg::parse)]
    shard: Option<ShardArg>,
    /// Steps of the training, for what all of it takes
    #[arg(long, value_name = "N", requires = "train")]
    steps: Option<u64>,
    /// Watts of this machine under load [default: as measured now, where the system tells]
    #[arg(long, value_name = "W", requires = "train", conflicts_with = "cluster")]
    watts: Option<f64>,
    /// Price of a kilowatt-hour in dollars
    #[arg(long, value_name = "PRICE", requires = "train")]
    kwh_usd: Option<f64>,
}

impl TrainPlan {
    pub(super) const fn is_asked(&self) -> bool {
        self.train
    }
}

/// Prints the forecast of a training.
pub(super) fn run(
    model: &str,
    (args, cluster): (&TrainPlan, &[String]),
    as_json: bool,
) -> anyhow::Result<()> {
    let mut catalogue = Catalogue::builtin()?;
    let sizes = sizes(model, &catalogue)?;
    let (machines, link) = match cluster {
        [] => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let kernels = load::free_kernels(threads)?;
            let machine = this_machine(&kernels, args.watts, args.nodes.max(1));
            (vec![machine], None)
        }
        [one] => of_cluster(&super::cluster(one, &mut catalogue)?),
        several => return Err(several_clusters(several.len()).into()),
    };
    let nodes: usize = machines.iter().map(|machine| machine.processes).sum();
    let stages = args.stages.clamp(1, nodes);
    let targets = TARGETS.map(|(_, _, name)| name.to_owned());
    let plan = TrainingSpec {
        method: args.method,
        lora: Lora {
            rank: args.rank,
            alpha: 2.0 * args.rank as f32,
        },
        targets: &targets,
        file_bytes: sizes.file_bytes,
        tied: sizes.is_tied,
        tokens: args.row,
        leaves: args.batch,
        nodes,
        stages,
        sharding: args.shard.map(|shard| shard.for_method(args.method)),
    };
    let said = forecast(&sizes.shape, &plan, &machines, (link, args.kwh_usd));
    let lacking = too_small(&sizes.shape, &plan, &machines);
    if as_json {
        let would_fit = lacking.map(|_| told(&changes(&sizes.shape, &plan, &machines)));
        let facts = json(&said, &machines, args.steps, would_fit);
        return print(&facts.to_string());
    }
    if let Some((machine, needs, has)) = lacking {
        let (needs, has, machine) = (Bytes(needs), Bytes(has), &machines[machine].name);
        let mut hints = told(&changes(&sizes.shape, &plan, &machines));
        if hints.is_empty() {
            hints.push("no single change of the plan is enough".to_owned());
        }
        let text = format!("this training needs {needs} on {machine}, which has {has}");
        return Err(Error::Failed { text, hints }.into());
    }
    print(&report(&said, args.batch * args.row, args.steps, nodes))
}

/// The sizes of a model that is here, else of one of the catalogue.
fn sizes(model: &str, catalogue: &Catalogue) -> anyhow::Result<ModelSizes> {
    Ok(match local_path(model) {
        Some(path) => ModelSizes::of_files(Path::new(&path))?,
        None => catalogue.model(model)?.into(),
    })
}
