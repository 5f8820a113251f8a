//! `paceline bench model`: prefill and decode speed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_bench::limits::Limit;
use paceline_bench::model::{Report, SpeedRun, SpeedSpec, measure};
use paceline_bench::peer::{PeerProcess, PeerRun};
use paceline_engine::EngineConfig;
use paceline_model::Config;
use paceline_tensor::PAGE;

use crate::compute::{ComputeArgs, EngineArgs};
use crate::instance_choice::{self, NodeInstance};
use crate::interrupt::Signals;
use crate::local_model::{LocalModel, ReadyModel, SplitArgs, subject};
use crate::output::{draw, print};
use crate::{home, load, pull};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias, GGUF file, folder of safetensors, or hub id
    model: String,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    split: SplitArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Tokens to decode after it, or after --depth
    #[arg(long, value_name = "N", default_value_t = 128,
          value_parser = clap::value_parser!(u32).range(1..))]
    r#gen: u32,
    /// Decode from this position instead of the prompt's end
    #[arg(long, value_name = "N")]
    depth: Option<u32>,
    /// Measure the instance of MODEL that this machine's node has loaded over the cluster
    #[arg(long, conflicts_with_all = ["against", "against_one", "against_process"])]
    instance: bool,
    /// With --instance, alternate with the same model over --nodes local processes, by --split and
    /// --transport
    #[arg(long, requires = "instance")]
    against_local: bool,
    /// Measured runs, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Alternate with llama.cpp: a folder with the npm package node-llama-cpp 3.22.1
    /// (npm install --ignore-scripts --prefix DIR --no-save node-llama-cpp@3.22.1); or with
    /// `mlx-lm`, of the Python that PACELINE_MLX_PYTHON names, else of python3
    #[arg(long, value_name = "DIR|mlx-lm")]
    against: Option<PathBuf>,
    /// Alternate with one node that has the threads of one of the nodes
    #[arg(long, conflicts_with = "against")]
    against_one: bool,
    /// Alternate with one node that has the threads of all nodes
    #[arg(long, conflicts_with_all = ["against", "against_one"])]
    against_process: bool,
    /// Also write the speeds as a picture
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    args.split.check()?;
    let instance = args.instance.then(|| instance_choice::loaded(&args.model));
    let instance = instance.transpose()?;
    let path = match &instance {
        Some(instance) => instance.path.clone(),
        None => pull::ensure(&args.model, signals)?.path,
    };
    let open = |compute: ComputeArgs, split: &SplitArgs| {
        let sizes = |_: &Config| args.sizes();
        let mut opened = LocalModel::new(&path, (compute, args.engine), split, sizes)?;
        opened.forecast();
        opened.stay(); // all runs are of one split
        opened.load()
    };
    let loaded = match &instance {
        Some(instance) => args.at(instance)?,
        None => open(args.compute, &args.split)?,
    };
    let mut peer = peer(args, &path, &loaded, &open)?;
    let limit = limit(&loaded)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=args.runs {
        // The first run of each is a warm-up.
        let run = measure(subject(&loaded), &limit, &args.spec(), round)?;
        ours.extend((round > 0).then_some(run));
        if let Some(peer) = &mut peer {
            let run = peer.run(args, round)?;
            theirs.extend((round > 0).then_some(run));
        }
    }
    let spec = args.spec();
    let report = Report {
        spec: &spec,
        subject: subject(&loaded),
        limit: limit.name(),
        peer: peer.as_ref().map_or("", BenchBaseline::name),
        ours,
        theirs,
    };
    draw(args.plot.as_deref(), || report.svg())?;
    print(&if args.json {
        report.json().to_string()
    } else {
        report.table()
    })
}

/// Prepares the baseline, which alternates with `local_model`, the model at `path`; `None` without
/// one. `open` loads the same model again.
fn peer(
    args: &Args,
    path: &Path,
    loaded: &ReadyModel,
    open: &dyn Fn(ComputeArgs, &SplitArgs) -> anyhow::Result<ReadyModel>,
) -> anyhow::Result<Option<BenchBaseline>> {
    Ok(match &args.against {
        Some(given) => {
            let task = PeerRun {
                threads: loaded.options().threads,
                prompt: args.prompt as usize,
                generate: args.r#gen as usize,
                depth: args.depth(),
            };
            Some(BenchBaseline::Other(if given == Path::new("mlx-lm") {
                let python = std::env::var_os("PACELINE_MLX_PYTHON");
                PeerProcess::mlx_lm(python.filter(|value| !value.is_empty()), path, task)?
            } else {
                PeerProcess::llama_cpp(given, path, task)?
            }))
        }
        None if args.against_local => {
            let local = open(args.compute, &args.split)?;
            Some(BenchBaseline::Local(Box::new((limit(&local)?, local))))
        }
        None if args.against_one || args.against_process => {
            let nodes = if args.against_one {
                1
            } else {
                loaded.nodes() as usize
            };
            let mut compute = args.compute;
            compute.threads = Some(u16::try_from(loaded.options().threads * nodes)?);
            let one = open(compute, &SplitArgs::one_node())?;
            Some(BenchBaseline::OneNode(Box::new((limit(&one)?, one))))
        }
        None => None,
    })
}

/// The hardware limit of a model's device; of the processor if some nodes use it.
fn limit(loaded: &ReadyModel) -> anyhow::Result<Limit> {
    if loaded
        .options()
        .classes
        .each()
        .iter()
        .all(|class| class.is_mlx())
    {
        return Ok(Limit::of_mlx(&home::mlx_places()?)?);
    }
    let threads = loaded.options().threads * loaded.nodes() as usize;
    Ok(Limit::of_cpu(load::kernels(threads)?)?)
}

/// The baseline that alternates with the model.
enum BenchBaseline {
    Other(PeerProcess),
    OneNode(Box<(Limit, ReadyModel)>),
    Local(Box<(Limit, ReadyModel)>),
}

impl BenchBaseline {
    const fn name(&self) -> &'static str {
        match self {
            Self::Other(peer) => peer.name(),
            Self::OneNode(_) => "one node",
            Self::Local(_) => "local processes",
        }
    }

    fn run(&mut self, args: &Args, round: u32) -> anyhow::Result<SpeedRun> {
        let (prefill, decode) = match self {
            Self::Other(peer) => peer.run()?,
            Self::OneNode(one) | Self::Local(one) => {
                return measure(subject(&one.1), &one.0, &args.spec(), round);
            }
        };
        Ok(SpeedRun {
            prefill,
            decode,
            moved: None,
            limit: f64::NAN,
        })
    }
}

impl Args {
    fn depth(&self) -> usize {
        self.depth.unwrap_or(self.prompt) as usize
    }

    fn spec(&self) -> SpeedSpec {
        SpeedSpec {
            model: self.model.clone(),
            prompt: self.prompt,
            generate: self.r#gen,
            depth: self.depth(),
        }
    }

    /// Positions of the longest sequence: one more than measured.
    fn context(&self) -> usize {
        self.depth().max(self.prompt as usize) + self.r#gen as usize + 2
    }

    fn at(&self, instance: &NodeInstance) -> anyhow::Result<ReadyModel> {
        let split = SplitArgs {
            nodes: instance.nodes,
            split: instance.split,
            ..SplitArgs::one_node()
        };
        let sizes = |_: &Config| self.sizes();
        let opened = LocalModel::new(&instance.path, (self.compute, self.engine), &split, sizes)?;
        opened.with_service(Arc::clone(&instance.service), instance.on.clone())
    }

    /// The engine's sizes: room for a prompt and the tokens before `--depth`, whose pages stay
    /// cached between runs.
    fn sizes(&self) -> EngineConfig {
        let context = self.context();
        EngineConfig {
            cache_positions: context + self.prompt as usize + 2 * PAGE,
            ..EngineConfig::single(self.model.clone(), context)
        }
    }
}
