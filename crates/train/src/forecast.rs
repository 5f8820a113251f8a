//! Forecast of what a training would take, before anything is loaded.
//!
//! Pure: counts of the model's shape, rates and watts of machines in, memory, seconds, bytes and
//! joules out.

mod rate;

use paceline_model::adapter::files::TARGETS;
use paceline_model::{Config, LayerShape};

use crate::net::{TrainableModel, kept_bytes, layer_bytes};
use crate::params::Lora;
use crate::rows::BLOCK_ROWS;
use crate::shard::Sharding;
use crate::weights::{ATTENTION, EXPERTS, Method, layer_numbers, sizes, takes_adapter};
pub(crate) use rate::flop_share;
pub use rate::measured_flops;

/// The sizes of a model, of its files or of a catalogue.
#[derive(Clone, Debug)]
pub struct TrainedShape {
    /// Elements of a token between layers.
    pub width: usize,
    /// Tokens of the table.
    pub vocab: usize,
    pub layers: Vec<LayerShape>,
}

impl From<&Config> for TrainedShape {
    fn from(config: &Config) -> Self {
        Self {
            width: config.width,
            vocab: config.vocab,
            layers: config.layers.clone(),
        }
    }
}

impl TrainedShape {
    /// Numbers of all matrices and tables.
    pub fn numbers(&self, tied: bool) -> u64 {
        let (inner, _, table) = weights(self);
        inner + if tied { table } else { 2 * table }
    }
}

/// The training to forecast.
#[derive(Clone, Copy, Debug)]
pub struct TrainingSpec<'a> {
    /// The method of training.
    pub method: Method,
    /// The size of adapters.
    pub lora: Lora,
    /// Names out of [`TARGETS`].
    pub targets: &'a [String],
    /// Bytes of the model's files.
    pub file_bytes: u64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Tokens of a row.
    pub tokens: usize,
    /// Leaves of a step, of one row each.
    pub leaves: usize,
    /// Worker processes.
    pub nodes: usize,
    /// Stages that the model is cut into, at most as many as nodes.
    pub stages: usize,
    /// Parts of the state that the processes share out as ranks, if they do.
    pub sharding: Option<Sharding>,
}

/// A machine with some of the processes.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingMachine {
    /// The name for people.
    pub name: String,
    /// Bytes that programs may have.
    pub memory_bytes: u64,
    /// Floating-point operations a second that products of training reach.
    pub flops: f64,
    /// Watts under load, where they are known.
    pub watts: Option<f64>,
    pub processes: usize,
}

/// Memory, time, bytes and energy that a training takes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Forecast {
    /// Numbers that are trained.
    pub numbers: u64,
    /// Bytes of a process that computes leaves.
    pub memory_bytes: u64,
    /// Floating-point operations of a step, all nodes together.
    pub step_flop: f64,
    /// Bytes that a step exchanges, all nodes together.
    pub exchange_bytes: u64,
    /// Seconds of a step.
    pub step_s: f64,
    /// Seconds of communication among them.
    pub exchange_s: f64,
    /// Tokens a second.
    pub tokens_s: f64,
    /// Joules of a step, where all machines' watts are known.
    pub joules: Option<f64>,
    /// The price of a million tokens, where a price of energy is known too.
    pub usd_per_million: Option<f64>,
}

/// A change of a plan that makes it fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FitChange {
    /// The base stays as it is stored.
    Qlora,
    /// Rows of this many tokens.
    Row(usize),
    /// Adapters of this rank.
    Rank(usize),
    /// A process on each machine.
    OneProcess,
    /// This many stages, on as many machines like the largest.
    Stages(usize),
}

/// Shortest row that is proposed.
const ROW_MIN: usize = 64;

/// Joules of a kilowatt-hour.
const KWH: f64 = 3.6e6;

/// Weights of all layers' matrices, those of them that a token meets, and of a table of tokens.
fn weights(shape: &TrainedShape) -> (u64, u64, u64) {
    let layers = shape.layers.iter();
    let each = layers.map(|layer| layer_numbers(shape.width, layer));
    let (all, met) = each.fold((0, 0), |(all, met), own| (all + own.0, met + own.1));
    (all, met, (shape.vocab * shape.width) as u64)
}

/// Operations of a step that its result needs: nothing that is computed again counts.
pub(crate) fn step_flop(net: &TrainableModel, method: Method, tokens: u64) -> f64 {
    let (_, met, table) = weights(&net.config().into());
    let passes = if method == Method::Full { 3.0 } else { 2.0 };
    passes * 2.0 * (met + table) as f64 * tokens as f64
}

/// Numbers, memory, operations and bytes of a training.
struct Counts {
    /// Numbers that are trained.
    numbers: u64,
    /// Bytes of each process.
    memory: u64,
    /// Operations of a step.
    flop: f64,
    /// Bytes of a step, all processes together.
    exchanged: u64,
    /// The share of those that the busiest process sends or receives.
    busiest: f64,
}

/// Numbers that are trained, and of all matrices and tables.
fn numbers(shape: &TrainedShape, plan: &TrainingSpec<'_>) -> (u64, u64) {
    let mut pairs = 0;
    for layer in &shape.layers {
        let count = if layer.experts.is_some() {
            ATTENTION
        } else {
            TARGETS.len()
        };
        let has_experts = plan.targets.iter().any(|name| name == EXPERTS);
        if let Some(of) = layer.experts.filter(|_| has_experts) {
            let shared = if of.shared > 0 {
                of.shared + shape.width
            } else {
                0
            };
            let sides = of.count * (of.width + shape.width) + shared;
            pairs += (3 * plan.lora.rank * sides) as u64;
        }
        let matrices = TARGETS.iter().zip(sizes(shape.width, layer)).enumerate();
        for (nth, (part, [rows, cols])) in matrices.take(count) {
            let is_target = plan.targets.iter().any(|name| name == part.2);
            if is_target && takes_adapter(layer, nth) {
                pairs += (plan.lora.rank * (rows + cols)) as u64;
            }
        }
    }
    let all = shape.numbers(plan.tied);
    (
        if plan.method == Method::Full {
            all
        } else {
            pairs
        },
        all,
    )
}

/// Counts of a training on machines with at least `memory` bytes.
fn counts(shape: &TrainedShape, plan: &TrainingSpec<'_>, memory: u64) -> Counts {
    let (_, met, table) = weights(shape);
    let (numbers, all) = numbers(shape, plan);
    let (stages, nodes) = (plan.stages.max(1), plan.nodes.max(1));
    let is_full = plan.method == Method::Full;
    let tokens = plan.tokens as f64;
    let heads = shape.layers.iter().map(|l| (l.heads * l.head_dim) as f64);
    let attention = 4.0 * heads.sum::<f64>() * tokens * tokens;
    let products = 2.0 * (met + table) as f64 * tokens;
    let layers = shape.layers.len();
    let own_tokens = match plan.sharding {
        Some(Sharding::Rows | Sharding::Experts) => plan.tokens.div_ceil(nodes),
        _ => plan.tokens,
    };
    let layer = layer_bytes(shape.width, &shape.layers, own_tokens);
    let own = layers.div_ceil(stages);
    // Leaves of a process that are under way in its layers at the same time.
    let together = match (is_full, stages) {
        (true, 1) if own_tokens < plan.tokens => plan.leaves,
        (true, 1) => plan.leaves.div_ceil(nodes),
        _ => stages,
    };
    let most = kept_bytes(Some(memory));
    let kept = most / (layer * together).max(1);
    let again = own.saturating_sub(kept) as f64 / own.max(1) as f64;
    let passes = 2.0 + again + if is_full { 1.0 } else { 0.0 };
    let elsewhere = match plan.sharding {
        Some(Sharding::Experts) => routed(shape) - routed(shape).div_ceil(nodes as u64),
        _ => 0,
    };
    let base = match plan.method {
        Method::Qlora => plan.file_bytes - plan.file_bytes / all.max(1) * elsewhere,
        Method::Lora => 4 * (all - elsewhere),
        Method::Full => 0,
    };
    // The largest stage has the head besides its share.
    let base = base.div_ceil(stages as u64) + if stages > 1 { 4 * table } else { 0 };
    let logits = 4 * (plan.tokens.min(256) * shape.vocab) as u64;
    let kept = (own * layer * together).min(most) as u64;
    let inputs = (4 * own * own_tokens * shape.width * together) as u64;
    let (exchanged, busiest) = exchanged(shape, plan, numbers);
    Counts {
        numbers,
        memory: base
            + state_bytes(shape, plan, numbers)
            + kept
            + inputs
            + layer as u64
            + 2 * logits,
        flop: plan.leaves as f64 * (passes * products + (passes + 1.0) * attention),
        exchanged,
        busiest,
    }
}

/// Bytes of values, moments and gradients of a process.
fn state_bytes(shape: &TrainedShape, plan: &TrainingSpec<'_>, numbers: u64) -> u64 {
    let (inner, _, table) = weights(shape);
    let layers = shape.layers.len().max(1) as u64;
    let largest = match plan.method {
        Method::Full => table.max(inner / layers),
        Method::Lora | Method::Qlora => numbers / layers,
    };
    // A leaf's gradient of a part, and those that the tree over leaves holds.
    let depth = u64::from(plan.leaves.next_power_of_two().trailing_zeros());
    let under_way = largest * (2 + depth);
    let nodes = plan.nodes.max(1) as u64;
    let held = match plan.sharding.filter(|_| nodes > 1) {
        // Values, two moments, and the sum of gradients.
        None => 4 * numbers,
        // The own shard and a copy; two parts of values, and one whose gradients are on their way.
        Some(Sharding::All) => 2 * (4 * numbers).div_ceil(nodes) + 3 * largest,
        Some(Sharding::State) => 2 * (4 * numbers).div_ceil(nodes) + numbers + largest,
        // A gradient of each block of rows, of a part.
        Some(Sharding::Rows | Sharding::Experts) => {
            4 * numbers + largest * blocks(plan).div_ceil(nodes)
        }
    };
    4 * (held + under_way)
}

/// Numbers of all routed experts.
fn routed(shape: &TrainedShape) -> u64 {
    let experts = shape.layers.iter().filter_map(|layer| layer.experts);
    let each = experts.map(|of| 3 * of.count * of.width * shape.width);
    each.sum::<usize>() as u64
}

/// Blocks of a leaf.
const fn blocks(plan: &TrainingSpec<'_>) -> u64 {
    plan.tokens.div_ceil(BLOCK_ROWS) as u64
}

/// Bytes of a step that processes send, and the share of the busiest.
fn exchanged(shape: &TrainedShape, plan: &TrainingSpec<'_>, numbers: u64) -> (u64, f64) {
    let (stages, nodes) = (plan.stages.max(1), plan.nodes.max(1) as u64);
    if nodes == 1 {
        return (0, 0.0);
    }
    let sent = match plan.sharding {
        // Values forward and back, gradients, and the gradients of the copy.
        Some(Sharding::All) => 4 * numbers * (3 * (nodes - 1) + 1),
        Some(Sharding::State) => 4 * numbers * (2 * (nodes - 1) + 1),
        // Values and the sum through the run's process; keys and values, gathered and gradients of
        // them; gradients of blocks that rank 0 adds. Rows of cut experts go to their ranks and
        // back, and so do gradients.
        Some(sharding @ (Sharding::Rows | Sharding::Experts)) => {
            let keys = shape.layers.iter();
            let keys: usize = keys.map(|l| l.kv_heads * (l.head_dim + l.value_dim)).sum();
            let uses = shape.layers.iter().filter_map(|layer| layer.experts);
            let uses = match sharding {
                Sharding::Experts => uses.map(|of| of.used).sum(),
                _ => 0,
            };
            let of_leaf = 2 * (keys * plan.tokens) as u64 * (nodes - 1)
                + 4 * (uses * plan.tokens * shape.width) as u64 * (nodes - 1) / nodes
                + numbers * blocks(plan) * (nodes - 1) / nodes;
            4 * (numbers * (nodes + 1) + plan.leaves as u64 * of_leaf)
        }
        None if stages == 1 => 4 * numbers * 2 * nodes,
        None => {
            let borders = 2 * 4 * (stages - 1) * plan.leaves * plan.tokens * shape.width;
            4 * numbers * 2 * nodes.div_ceil(stages as u64) + borders as u64
        }
    };
    // Without ranks, all of it passes through the run's machine.
    let busiest = match plan.sharding {
        Some(_) => 1.0 / nodes as f64,
        None => (nodes - 1) as f64 / nodes as f64,
    };
    (sent, busiest)
}

/// Forecast of a training on `machines`, whose slowest link carries `link` bytes a second (none on
/// one machine). `usd_per_kwh`: the price of energy.
pub fn forecast(
    shape: &TrainedShape,
    plan: &TrainingSpec<'_>,
    machines: &[TrainingMachine],
    (link, usd_per_kwh): (Option<f64>, Option<f64>),
) -> Forecast {
    let least = machines.iter().map(|machine| machine.memory_bytes).min();
    let counts = counts(shape, plan, least.unwrap_or(0));
    let (step_flop, exchange_bytes) = (counts.flop, counts.exchanged);
    let flops: f64 = machines.iter().map(|machine| machine.flops).sum();
    let (stages, leaves) = (plan.stages.max(1) as f64, plan.leaves.max(1) as f64);
    let idle = (stages - 1.0) / leaves; // the first leaf fills the pipeline, the last empties it
    let compute_s = step_flop / flops.max(1.0) * (1.0 + idle);
    let exchange_s = link.map_or(0.0, |link| exchange_bytes as f64 * counts.busiest / link);
    let step_s = compute_s + exchange_s;
    let tokens = (plan.leaves * plan.tokens) as f64;
    let watts: Option<f64> = machines.iter().map(|machine| machine.watts).sum();
    let joules = watts.map(|watts| watts * step_s);
    let usd = joules.zip(usd_per_kwh);
    Forecast {
        numbers: counts.numbers,
        memory_bytes: counts.memory,
        step_flop,
        exchange_bytes,
        step_s,
        exchange_s,
        tokens_s: tokens / step_s.max(1e-9),
        joules,
        usd_per_million: usd.map(|(joules, price)| joules / KWH * price * 1e6 / tokens.max(1.0)),
    }
}

/// The machine that has no room for its processes by the most: its number, what they need and what
/// it has.
pub fn too_small(
    shape: &TrainedShape,
    plan: &TrainingSpec<'_>,
    machines: &[TrainingMachine],
) -> Option<(usize, u64, u64)> {
    let lacking = machines.iter().enumerate().filter_map(|(i, machine)| {
        let each = counts(shape, plan, machine.memory_bytes).memory;
        let needs = each.saturating_mul(machine.processes as u64);
        (needs > machine.memory_bytes).then_some((i, needs, machine.memory_bytes))
    });
    lacking.max_by_key(|(_, needs, has)| needs - has)
}

/// Changes that each make a plan fit that does not.
pub fn changes(
    shape: &TrainedShape,
    plan: &TrainingSpec<'_>,
    machines: &[TrainingMachine],
) -> Vec<FitChange> {
    let fits = |plan: TrainingSpec<'_>, machines: &[TrainingMachine]| {
        too_small(shape, &plan, machines).is_none()
    };
    let mut found = Vec::new();
    if plan.method == Method::Lora {
        let method = Method::Qlora;
        if fits(TrainingSpec { method, ..*plan }, machines) {
            found.push(FitChange::Qlora);
        }
    }
    let halves = |from: usize, least: usize| {
        std::iter::successors(Some(from / 2), |n| Some(n / 2)).take_while(move |n| *n >= least)
    };
    let row = |tokens: &usize| {
        let tokens = *tokens;
        fits(TrainingSpec { tokens, ..*plan }, machines)
    };
    found.extend(halves(plan.tokens, ROW_MIN).find(row).map(FitChange::Row));
    let rank = |rank: &usize| {
        let lora = Lora {
            rank: *rank,
            ..plan.lora
        };
        fits(TrainingSpec { lora, ..*plan }, machines)
    };
    if plan.method != Method::Full {
        found.extend(halves(plan.lora.rank, 1).find(rank).map(FitChange::Rank));
    }
    let alone: Vec<TrainingMachine> = machines.iter().cloned().map(one_process).collect();
    if machines.iter().any(|machine| machine.processes > 1) && fits(*plan, &alone) {
        found.push(FitChange::OneProcess);
    }
    let largest = alone.iter().max_by_key(|machine| machine.memory_bytes);
    if let Some(largest) = largest.filter(|_| plan.method != Method::Full || !plan.tied) {
        let mut more = plan.stages + 1..=shape.layers.len();
        let enough = |stages: &usize| {
            let (nodes, stages) = (*stages, *stages);
            let plan = TrainingSpec {
                nodes,
                stages,
                ..*plan
            };
            fits(plan, std::slice::from_ref(largest))
        };
        found.extend(more.find(enough).map(FitChange::Stages));
    }
    found
}

fn one_process(machine: TrainingMachine) -> TrainingMachine {
    TrainingMachine {
        processes: 1,
        ..machine
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use paceline_model::ModelSource;

    use super::*;

    fn config() -> TrainedShape {
        shape("llama-tied")
    }

    fn shape(model: &str) -> TrainedShape {
        let golden = "../../tests-data/golden/hf";
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(golden)
            .join(model);
        let source = ModelSource::open(&folder).unwrap();
        (&Config::read(&source).unwrap()).into()
    }

    fn plan(targets: &[String]) -> TrainingSpec<'_> {
        TrainingSpec {
            method: Method::Lora,
            lora: Lora {
                rank: 8,
                alpha: 16.0,
            },
            targets,
            file_bytes: 1 << 20,
            tied: true,
            tokens: 512,
            leaves: 4,
            nodes: 1,
            stages: 1,
            sharding: None,
        }
    }

    fn machine(memory_bytes: u64) -> TrainingMachine {
        TrainingMachine {
            name: "a".to_owned(),
            memory_bytes,
            flops: 1e9,
            watts: Some(20.0),
            processes: 1,
        }
    }

    #[test]
    fn time_energy_and_cost_follow_from_rates() {
        let (config, targets) = (config(), TARGETS.map(|t| t.2.to_owned()));
        let plan = plan(&targets);
        let one = forecast(&config, &plan, &[machine(1 << 40)], (None, Some(0.5)));
        assert!((one.step_s - one.step_flop / 1e9).abs() < 1e-12);
        assert!((one.joules.unwrap() - 20.0 * one.step_s).abs() < 1e-12);
        let per_token = one.joules.unwrap() / 2048.0 / 3.6e6 * 0.5;
        assert!((one.usd_per_million.unwrap() / (per_token * 1e6) - 1.0).abs() < 1e-12);
        let two = TrainingSpec { nodes: 2, ..plan };
        let machines = [machine(1 << 40), machine(1 << 40)];
        let both = forecast(&config, &two, &machines, (Some(1e6), None));
        assert!((both.step_s - both.exchange_s - one.step_s / 2.0).abs() < 1e-12);
        assert!((both.exchange_s - both.exchange_bytes as f64 / 2.0 / 1e6).abs() < 1e-12);
        // ZeRO's 3 P (N - 1) / N numbers a rank, and P / N for the copy.
        let of_ranks = |nodes: usize, sharding| {
            let sharding = Some(sharding);
            let full = Method::Full;
            let plan = TrainingSpec {
                nodes,
                sharding,
                method: full,
                ..plan
            };
            let said = forecast(&config, &plan, &machines, (Some(1e6), None));
            let a_rank = said.exchange_bytes as f64 / nodes as f64 / 4.0;
            assert!((said.exchange_s - 4.0 * a_rank / 1e6).abs() < 1e-12);
            (a_rank / said.numbers as f64, said.memory_bytes)
        };
        assert!((of_ranks(2, Sharding::All).0 - 2.0).abs() < 1e-12);
        assert!((of_ranks(4, Sharding::All).0 - 2.5).abs() < 1e-12);
        assert!((of_ranks(4, Sharding::State).0 - 1.75).abs() < 1e-12);
        assert!(of_ranks(4, Sharding::All).1 < of_ranks(4, Sharding::State).1);
        let unknown = TrainingMachine {
            watts: None,
            ..machine(1)
        };
        let dark = forecast(&config, &plan, &[unknown], (None, Some(0.5)));
        assert_eq!((dark.joules, dark.usd_per_million), (None, None));
    }

    #[test]
    fn ranks_of_experts_have_their_own_and_exchange_rows() {
        let (config, targets) = (shape("qwen3moe-bf16"), [EXPERTS.to_owned()]);
        let of = |sharding| {
            let plan = TrainingSpec {
                nodes: 2,
                sharding: Some(sharding),
                ..plan(&targets)
            };
            counts(&config, &plan, 0)
        };
        let (rows, own) = (of(Sharding::Rows), of(Sharding::Experts));
        assert_eq!(rows.memory - own.memory, 4 * (routed(&config) / 2));
        let experts = || config.layers.iter().filter_map(|layer| layer.experts);
        let uses: usize = experts().map(|of| of.used).sum();
        // Rows and gradients of four leaves go and come back; half of them stay.
        let moved = 4 * 4 * 4 * uses * 512 * config.width / 2;
        assert_eq!(own.exchanged - rows.exchanged, moved as u64);
        let pairs = experts().map(|of| of.count * 3 * 8 * (of.width + config.width));
        assert_eq!(own.numbers, pairs.sum::<usize>() as u64);
    }

    #[test]
    fn what_does_not_fit_is_told_with_changes_that_each_suffice() {
        let (config, targets) = (config(), TARGETS.map(|t| t.2.to_owned()));
        let plan = plan(&targets);
        let needs = counts(&config, &plan, 0).memory;
        assert_eq!(too_small(&config, &plan, &[machine(needs)]), None);
        let small = [machine(needs - 1)];
        assert_eq!(
            too_small(&config, &plan, &small),
            Some((0, needs, needs - 1))
        );
        let found = changes(&config, &plan, &small);
        assert!(
            found.contains(&FitChange::Row(256)) && found.contains(&FitChange::Rank(4)),
            "{found:?}"
        );
        let crowded = [TrainingMachine {
            processes: 2,
            ..machine(needs)
        }];
        assert!(changes(&config, &plan, &crowded).contains(&FitChange::OneProcess));
        assert_eq!(changes(&config, &plan, &[machine(0)]), []);
    }
}
