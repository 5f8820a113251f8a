//! `paceline bench plan`: the planner's predictions for local nodes, compared with measurements.

use paceline_bench::model::{generate, tokens};
use paceline_bench::plan::{SplitRuns, bars, rows, table};
use paceline_engine::EngineConfig;
use paceline_model::{Config, Split, SplitKind};
use paceline_node::forecast::Probes;
use paceline_node::sharding::ways;

use crate::compute::{ComputeArgs, EngineArgs};
use crate::interrupt::Signals;
use crate::load;
use crate::local_model::{LocalModel, NodeTransport, ReadyModel, SplitArgs, kernels, subject};
use crate::output::print;
use crate::pull;

const PROMPT: u32 = 4;

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
    /// How nodes reach each other: any (shared memory where available, else TCP), shm, tcp
    #[arg(long, value_enum, value_name = "HOW", default_value_t = NodeTransport::Any,
          hide_possible_values = true)]
    transport: NodeTransport,
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

struct MeasuredSplit {
    split: Split,
    loaded: ReadyModel,
    /// By round.
    predicted: Vec<f64>,
    runs: Vec<f64>,
}

/// Predicts, measures and prints.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    crate::plaintext::asked_for(args.transport.backend(), args.plaintext)?;
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
        LocalModel::new(&found.path, (compute, EngineArgs::default()), &cut, sizes)
    };
    let first = open(1, SplitKind::Auto)?;
    let mut all = Vec::new();
    for (kind, split) in ways(first.config(), args.nodes) {
        all.push(MeasuredSplit {
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
            // Rotated, so that each starts equally many rounds.
            let place = (turn + round as usize) % all.len();
            let way = &mut all[place];
            // Measured anew: a machine's speed changes within seconds, and with other load.
            let local = probes.now(&way.split)?;
            let said = local.facts_at(first.config(), &way.split, PROMPT + args.r#gen / 2)?;
            way.predicted.push(said);
            let speed = way.decode(args, round)?;
            way.runs.push(speed);
        }
    }
    let runs: Vec<SplitRuns> = all.into_iter().map(MeasuredSplit::runs).collect();
    let rows = rows(&runs);
    print(&if args.json {
        serde_json::json!({ "model": args.model, "rows": rows, "bars": bars(&rows) }).to_string()
    } else {
        bars(&rows)
            .iter()
            .fold(table(&rows), |text, bar| text + &bar.line())
    })
}

impl MeasuredSplit {
    fn runs(self) -> SplitRuns {
        SplitRuns {
            nodes: self.loaded.nodes(),
            split: self.loaded.split().to_string(),
            predicted: self.predicted,
            measured: self.runs,
        }
    }

    /// Tokens a second.
    fn decode(&self, args: &Args, round: u32) -> anyhow::Result<f64> {
        let subject = subject(&self.loaded);
        let prompt = tokens(subject, PROMPT as usize, round);
        let answer = generate(subject, &prompt, args.r#gen as usize)?;
        let time = (answer.last - answer.prompt_read).as_secs_f64();
        Ok((answer.tokens - 1) as f64 / time)
    }
}
