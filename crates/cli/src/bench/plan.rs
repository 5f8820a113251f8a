//! `paceline bench plan`: what the planner says of local nodes, beside what they do.

use paceline_engine::EngineConfig;
use paceline_model::{Config, Split, SplitKind};
use paceline_node::forecast::Probes;
use serde::Serialize;

use super::model::{generate, tokens};
use super::{Spread, quantile};
use crate::compute::{ComputeArgs, EngineArgs};
use crate::interrupt::Signals;
use crate::load;
use crate::loaded::{Loaded, Opened, SplitArgs, Transport, kernels};
use crate::output::print;
use crate::plan::here::ways;
use crate::pull;

/// Tokens of a prompt.
const PROMPT: u32 = 4;

/// Arguments of `paceline bench plan`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias, GGUF file, folder of safetensors, or hub id
    model: String,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Most local nodes; all are loaded at once, in every split
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=4))]
    nodes: u32,
    /// How nodes reach each other: any (shared memory where it can be had, else TCP), shm, tcp
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Transport::Any,
          hide_possible_values = true)]
    transport: Transport,
    /// Allow a transport that cannot encrypt
    #[arg(long)]
    plaintext: bool,
    /// Tokens of a run
    #[arg(long, value_name = "N", default_value_t = 96,
          value_parser = clap::value_parser!(u32).range(2..=100_000))]
    r#gen: u32,
    /// Measured runs of each, in turns, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One way to cut the model.
#[derive(Debug, Serialize)]
struct Row {
    nodes: u32,
    split: String,
    /// Decode, tokens a second: from facts measured before each run, without any run's figures. How
    /// far they spread is what the machine's own pace does.
    predicted: Spread,
    measured: Spread,
    /// Predicted over measured, less 1, of the medians.
    error: f64,
    /// The planner's choice among those with as many nodes.
    chosen: bool,
    /// Measured over the best with as many nodes; the median of the rounds.
    of_best: f64,
}

struct Way {
    split: Split,
    loaded: Loaded,
    /// Of each round.
    predicted: Vec<f64>,
    runs: Vec<f64>,
}

/// Predicts, measures and prints.
///
/// # Errors
/// A model that cannot be had or loaded.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    crate::wires::asked_for(args.transport.backend(), args.plaintext)?;
    let found = pull::ensure(&args.model, signals)?;
    let open = |nodes, split| {
        let cut = SplitArgs {
            nodes,
            split,
            transport: args.transport,
            ..SplitArgs::one_node()
        };
        let sizes = |_: &Config| EngineConfig::single(args.model.clone(), args.r#gen as usize + 8);
        let mut compute = args.compute;
        let threads = load::threads(compute, args.nodes);
        compute.threads = Some(u16::try_from(threads)?);
        Opened::new(
            &found.path,
            (compute, EngineArgs { engine: None }),
            &cut,
            sizes,
        )
    };
    let first = open(1, SplitKind::Auto)?;
    let mut all = Vec::new();
    for (kind, split) in ways(first.config(), args.nodes) {
        all.push(Way {
            loaded: open(split.ranks(), kind)?.load()?,
            split,
            predicted: Vec::new(),
            runs: Vec::new(),
        });
    }
    let setting = first.setting(args.transport.probed());
    let probes = Probes::new(setting, args.nodes, kernels)?;
    for way in &mut all {
        way.decode(args, 0)?; // warms up
    }
    for round in 1..=args.runs {
        for turn in 0..all.len() {
            // In turns, each beginning a round as often as the others.
            let place = (turn + round as usize) % all.len();
            let way = &mut all[place];
            // What a machine can do changes within seconds, and with what else runs.
            let local = probes.now(&way.split)?;
            let said = local.facts_at(first.config(), &way.split, PROMPT + args.r#gen / 2)?;
            way.predicted.push(said);
            let speed = way.decode(args, round)?;
            way.runs.push(speed);
        }
    }
    let rows: Vec<Row> = all.iter().map(|way| way.row(&all)).collect();
    print(&if args.json {
        serde_json::json!({ "model": args.model, "rows": rows, "bars": bars(&rows) }).to_string()
    } else {
        bars(&rows)
            .iter()
            .fold(table(&rows), |text, bar| text + &bar.line())
    })
}

impl Way {
    fn nodes(&self) -> u32 {
        self.loaded.nodes()
    }

    /// As predicted, the median of all rounds.
    fn expected(&self) -> f64 {
        quantile(&self.predicted, 0.5)
    }

    /// Tokens a second.
    fn decode(&self, args: &Args, round: u32) -> anyhow::Result<f64> {
        let prompt = tokens(&self.loaded, PROMPT as usize, round);
        let answer = generate(&self.loaded, &prompt, args.r#gen as usize)?;
        let time = (answer.last - answer.prompt_read).as_secs_f64();
        Ok((answer.tokens - 1) as f64 / time)
    }

    fn row(&self, all: &[Self]) -> Row {
        let rivals = || all.iter().filter(|way| way.nodes() == self.nodes());
        let best = |round: usize| rivals().map(|way| way.runs[round]).fold(0.0, f64::max);
        let shares: Vec<f64> = (0..self.runs.len())
            .map(|round| self.runs[round] / best(round))
            .collect();
        let (predicted, measured) = (Spread::of(&self.predicted), Spread::of(&self.runs));
        let chosen = rivals().all(|way| self.expected() >= way.expected());
        Row {
            nodes: self.nodes(),
            split: self.loaded.split().to_string(),
            error: predicted.median / measured.median - 1.0,
            predicted,
            measured,
            chosen,
            of_best: quantile(&shares, 0.5),
        }
    }
}

/// A bar of the project, and where these runs stand.
#[derive(Debug, Serialize)]
struct Bar {
    what: &'static str,
    /// The worst may be off by so much.
    limit: f64,
    worst: f64,
    kept: bool,
}

impl Bar {
    fn line(&self) -> String {
        format!(
            "\n{}: {}, worst {:.0} % of {:.0} %",
            self.what,
            if self.kept { "kept" } else { "MISSED" },
            100.0 * self.worst,
            100.0 * self.limit,
        )
    }
}

/// The bars that there are rows for.
fn bars(rows: &[Row]) -> Vec<Bar> {
    let off = |row: &Row| row.error.abs();
    let slower = |row: &Row| 1.0 / row.of_best - 1.0;
    let bar = |what, limit, counts: &dyn Fn(&Row) -> bool, size: &dyn Fn(&Row) -> f64| {
        let sizes: Vec<f64> = rows.iter().filter(|row| counts(row)).map(size).collect();
        let worst = sizes.iter().copied().reduce(f64::max)?;
        let kept = worst <= limit;
        Some(Bar {
            what,
            limit,
            worst,
            kept,
        })
    };
    let all = [
        bar("predicted, 1-2 nodes", 0.20, &|row| row.nodes <= 2, &off),
        bar("predicted, 3-4 nodes", 0.30, &|row| row.nodes > 2, &off),
        bar(
            "auto slower than the best fixed split",
            0.15,
            &|row| row.chosen && row.nodes > 1,
            &slower,
        ),
    ];
    all.into_iter().flatten().collect()
}

fn table(rows: &[Row]) -> String {
    let head = format!(
        "decode, tokens a second: median (p10 .. p90)\n{:>5}  {:<10}{:>24}{:>24}{:>8}{:>9}",
        "nodes", "split", "predicted", "measured", "error", "of best"
    );
    rows.iter().fold(head, |text, row| {
        text + &format!(
            "\n{:>5}  {:<10}{:>24}{:>24}{:>6.0} %{:>7.0} %{}",
            row.nodes,
            row.split,
            row.predicted.text(),
            row.measured.text(),
            100.0 * row.error,
            100.0 * row.of_best,
            if row.chosen { "  chosen" } else { "" },
        )
    })
}
