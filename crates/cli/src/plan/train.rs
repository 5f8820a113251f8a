//! `paceline plan MODEL --train`: forecast of a training on this machine or a cluster.

use std::path::Path;

use paceline_base::Bytes;
use paceline_board::trainings::{json, of_cluster, report, this_machine, told};
use paceline_model::adapter::files::TARGETS;
use paceline_model::{
    Config, DeltaNet, Experts, Gating, HeadOrder, Latent, LayerCache, LayerShape, ModelSource,
    Role, Selection,
};
use paceline_plan::catalogue::{Catalogue, ModelEntry};
use paceline_tensor::StateRule;
use paceline_train::{Lora, Method, TrainedShape, TrainingSpec, changes, forecast, too_small};

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

struct ModelSizes {
    shape: TrainedShape,
    file_bytes: u64,
    is_tied: bool,
}

/// The sizes of a model that is here, else of one of the catalogue.
fn sizes(model: &str, catalogue: &Catalogue) -> anyhow::Result<ModelSizes> {
    let Some(path) = local_path(model) else {
        let entry = catalogue.model(model)?;
        return Ok(of_catalogue(entry));
    };
    let source = ModelSource::open(Path::new(&path))?;
    let config = Config::read(&source)?;
    let is_tied = match config.tied {
        Some(tied) => tied,
        None => source.opt_weight(config.family, Role::Output)?.is_none(),
    };
    Ok(ModelSizes {
        shape: (&config).into(),
        file_bytes: source.file_bytes().0,
        is_tied,
    })
}

/// Bits of a weight where the catalogue tells none.
const BITS: f64 = 16.0;

/// The sizes of a model by its entry. Layers of a kind stand one after the other: their order has
/// no part in a forecast.
fn of_catalogue(entry: &ModelEntry) -> ModelSizes {
    let layer = |i: u32| {
        let has_experts = entry.experts > 0 && i >= entry.first_dense_layers;
        let mut layer = plain_layer(entry);
        layer.experts = has_experts.then(|| experts(entry));
        layer.latent = (entry.kv_lora_rank > 0).then(|| latent(entry));
        if i < entry.linear_layers {
            layer.cache = LayerCache::Delta(DeltaNet {
                least_decay: None,
                low_rank_gates: false,
                taps: 4,
                order: HeadOrder::Grouped,
                rule: StateRule::Difference,
            });
            layer.heads = entry.linear_num_value_heads as usize;
            layer.kv_heads = entry.linear_num_key_heads as usize;
            layer.head_dim = entry.linear_head_dim as usize;
            layer.value_dim = entry.linear_head_dim as usize;
        }
        layer
    };
    let shape = TrainedShape {
        width: entry.hidden as usize,
        vocab: entry.vocab as usize,
        layers: (0..entry.layers).map(layer).collect(),
    };
    let numbers = shape.numbers(entry.tied_embeddings) as f64;
    ModelSizes {
        shape,
        file_bytes: (numbers * entry.bits.unwrap_or(BITS) / 8.0) as u64,
        is_tied: entry.tied_embeddings,
    }
}

/// A layer with attention and a dense feed-forward.
fn plain_layer(entry: &ModelEntry) -> LayerShape {
    LayerShape {
        cache: LayerCache::Rows,
        window: None,
        rope: 0,
        heads: entry.heads as usize,
        kv_heads: entry.kv_heads as usize,
        head_dim: entry.head_dim as usize,
        value_dim: entry.head_dim as usize,
        query_scale: 1.0,
        gated: false,
        ffn: entry.ffn as usize,
        gate_cutoff: None,
        experts: None,
        latent: None,
        pooled: None,
        dense_beside: false,
        value_norm: false,
        keys_as_values: false,
    }
}

fn experts(entry: &ModelEntry) -> Experts {
    Experts {
        count: entry.experts as usize,
        used: entry.active_experts as usize,
        width: entry.moe_ffn as usize,
        gating: Gating::Softmax,
        normalised: true,
        scale: 1.0,
        corrected: false,
        shared: (entry.shared_experts * entry.moe_ffn) as usize,
        shared_gate: false,
        clamp: None,
        groups: None,
        scaled: false,
        compressed: None,
    }
}

fn latent(entry: &ModelEntry) -> Latent {
    Latent {
        query_rank: (entry.q_lora_rank > 0).then_some(entry.q_lora_rank as usize),
        rank: entry.kv_lora_rank as usize,
        plain: entry.qk_nope_head_dim as usize,
        turned: entry.qk_rope_head_dim as usize,
        value_dim: entry.v_head_dim as usize,
        norm_eps: 0.0,
        growth: None,
        selection: Selection::All,
        gated: false,
    }
}
