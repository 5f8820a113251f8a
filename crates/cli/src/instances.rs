//! `paceline load`, `unload` and `ps`: instances on the machines of a cluster. The commands send
//! JSON to this machine's node, which places and loads the model; `load` polls its progress.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use paceline_board::tables::{instances as instances_told, label, names, proposals};
use paceline_cluster::nodes::placement::WeightDistribution;
use paceline_model::SplitKind;
use serde_json::{Value, json};

use crate::adapter;
use crate::interrupt::Signals;
use crate::output::{print, print_err, printable};
use crate::{member, pull};

/// Poll interval of `load`.
const ASK_EVERY: Duration = Duration::from_millis(200);

const EXAMPLES: &str = "\
Examples:
  paceline load smollm2 --nodes 3
  paceline load qwen3:8b --nodes mini,studio --split pipeline
  paceline load qwen3:8b --preview                  placements with predictions; loads nothing
  paceline load smollm2 --nodes 2 --adapter poet=my-adapter      answers as smollm2:poet too
  paceline load smollm2 --replicas 2                two whole copies, on machines of their own
  paceline load qwen3:8b --nodes mini --prefill-nodes tower
  paceline ps";

/// Arguments of `paceline load`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LoadArgs {
    /// Model of this machine, or one to fetch first
    #[arg(value_name = "MODEL")]
    model: String,
    /// How many machines compute it, or their names [default: 1]
    #[arg(long, value_name = "N|A,B,..", value_delimiter = ',')]
    nodes: Option<Vec<String>>,
    /// Whole copies of the model, each on N machines of its own while there are enough, or on its
    /// share of those that are named; `auto`: one, and more on idle machines while requests wait
    #[arg(long, value_name = "R", default_value = "1", value_parser = replicas)]
    replicas: ReplicaCount,
    /// How the model is cut: auto, tensor, pipeline, experts, TENSORxPIPELINE such as 2x2, or
    /// 2x2-experts
    #[arg(long, value_name = "SPLIT", default_value_t)]
    split: SplitKind,
    /// Threads of each machine [default: as many as this one has cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Most tokens of a conversation and its answer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Answers that are computed at the same time; more wait
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Standby copies of each machine's part, packed on another one. An answer whose machine is
    /// lost continues without loading [default: 1 where half of a machine's memory has room for
    /// all, once the model has answered for half a minute]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1))]
    spare: Option<u16>,
    /// A small model of the same vocabulary that guesses tokens, which MODEL checks together: the
    /// same answers in less time, where that pays
    #[arg(long, value_name = "MODEL")]
    draft: Option<String>,
    /// An adapter that answers too, as MODEL:NAME, from the same weights: its folder, or its file
    /// of weights (PEFT's, MLX's or GGUF's form); machines that lack it get it; may be given
    /// several times
    #[arg(long, value_name = "NAME=FILE", value_parser = adapter::named)]
    adapter: Vec<(String, PathBuf)>,
    /// Most tokens of an answer that are guessed, from its own text or by --draft, and checked in
    /// one step, where that pays; 0 for none [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=16))]
    drafts: Option<u8>,
    /// Have machines that compute slower than before, because somebody uses them, give work to the
    /// others meanwhile
    #[arg(long)]
    follow: bool,
    /// How much of the model's file each machine gets before it computes: what it computes with
    /// (shard), all of it (whole), or, of a file over 256 MiB, first its part and all of it on one
    /// more machine later, so that no single loss loses weights (auto)
    #[arg(long, value_name = "WHICH", default_value = "auto",
          value_parser = str::parse::<WeightDistribution>)]
    weights: WeightDistribution,
    /// Names of machines that only read prompts, and transfer their KV to the others, which decode
    /// meanwhile: for long prompts
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        conflicts_with = "preview"
    )]
    prefill_nodes: Vec<String>,
    /// Return at once instead of waiting until it answers
    #[arg(long)]
    no_wait: bool,
    /// Load nothing: show placements with predictions, from measured speeds and ways
    #[arg(long, conflicts_with = "no_wait")]
    preview: bool,
    /// Print one JSON object: the placements of --preview, else the instances
    #[arg(long)]
    json: bool,
}

/// Whole copies of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplicaCount {
    Count(u16),
    /// A single copy, and more while requests wait.
    Auto,
}

/// Parses `auto`, or a number from 1 to 64.
fn replicas(text: &str) -> Result<ReplicaCount, String> {
    if text == "auto" {
        return Ok(ReplicaCount::Auto);
    }
    let count = text.parse().ok().filter(|count| (1..=64).contains(count));
    let count = count.ok_or("expected `auto` or a number from 1 to 64")?;
    Ok(ReplicaCount::Count(count))
}

/// Arguments of `paceline unload`.
#[derive(Debug, clap::Args)]
pub(crate) struct UnloadArgs {
    /// Name of the model, or id of the instance
    #[arg(value_name = "MODEL")]
    model: String,
    /// Only the replica with this number, as `paceline ps` shows it
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u16).range(1..))]
    replica: Option<u16>,
}

/// Arguments of `paceline ps`.
#[derive(Debug, clap::Args)]
pub(crate) struct PsArgs {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Loads a model over machines of the cluster, and waits until it answers.
///
/// # Errors
/// A model that cannot be found, missing nodes, a failed load.
pub(crate) fn load(args: &LoadArgs, signals: &Signals) -> anyhow::Result<()> {
    member::ask("ps", json!({}))?; // before anything is fetched
    pull::ensure(&args.model, signals)?;
    if let Some(draft) = &args.draft {
        pull::ensure(draft, signals)?;
    }
    if args.preview {
        return preview(args);
    }
    let answer = member::ask("load", args.ask())?;
    let ids = answer["ids"].as_array().into_iter().flatten();
    let ids: Vec<String> = ids.filter_map(Value::as_str).map(str::to_owned).collect();
    if args.no_wait {
        return match args.json {
            true => print(&answer.to_string()),
            false => ids.iter().try_for_each(|id| print(id)),
        };
    }
    signals.orderly(|cancel| {
        let mut bar = LoadProgress::new();
        while !cancel.is_cancelled() {
            let all = member::ask("ps", json!({}))?;
            let own = instances(&all, &ids);
            let own = own.with_context(|| format!("{} was unloaded", args.model))?;
            if all_done(&own, &mut bar)? {
                return args.tell_ready(&own);
            }
            std::thread::sleep(ASK_EVERY);
        }
        print_err("loading continues: `paceline ps` shows how far it is");
        Ok(())
    })
}

/// The instances with these ids; `None` if one is missing.
fn instances<'a>(all: &'a Value, ids: &[String]) -> Option<Vec<&'a Value>> {
    let all = all.as_array()?;
    let of = |id: &String| all.iter().find(|it| it["id"] == id.as_str());
    ids.iter().map(of).collect()
}

/// Whether all instances are ready; shows the state of the first other one.
///
/// # Errors
/// Why an instance failed, with the state of the others.
fn all_done(own: &[&Value], bar: &mut LoadProgress) -> anyhow::Result<bool> {
    for it in own.iter().filter(|it| it["state"] == "failed") {
        let label = label(it);
        let others = "the other replicas stay: `paceline ps` shows them";
        let failed = bar.done(it);
        match own.len() {
            1 => failed?,
            _ => failed.with_context(|| format!("{label} cannot be loaded; {others}"))?,
        };
    }
    match own.iter().find(|it| it["state"] != "ready") {
        Some(it) => bar.done(it),
        None => {
            bar.clear();
            Ok(true)
        }
    }
}

/// Shows placements of a model without loading it.
fn preview(args: &LoadArgs) -> anyhow::Result<()> {
    let mut ask = args.ask();
    if args.nodes.is_none() {
        ask["count"] = Value::Null;
    }
    let preview = member::ask("preview", ask)?;
    if args.json {
        return print(&preview.to_string());
    }
    for line in proposals(&preview) {
        print(&line)?;
    }
    for note in preview["notes"].as_array().into_iter().flatten() {
        print_err(format_args!(
            "note: {}",
            printable(note.as_str().unwrap_or_default())
        ));
    }
    Ok(())
}

impl LoadArgs {
    /// Prints that the instances are ready.
    fn tell_ready(&self, own: &[&Value]) -> anyhow::Result<()> {
        if self.json {
            return print(&json!({ "model": self.model, "instances": own }).to_string());
        }
        let line = |it: &Value| format!("{} answers, on {}", label(it), names(&it["nodes"]));
        own.iter().try_for_each(|it| print(&line(it)))
    }

    fn ask(&self) -> Value {
        let named = self.nodes.as_deref().unwrap_or_default();
        let count = match named {
            [] => Some(1),
            [one] => one.parse::<usize>().ok(),
            _ => None,
        };
        json!({
            "model": self.model,
            "count": count.unwrap_or(0),
            "nodes": if count.is_some() { Vec::new() } else { named.to_vec() },
            "split": self.split.to_string(),
            "threads": self.threads,
            "context": self.context,
            "parallel": self.parallel,
            "spare": self.spare,
            "replicas": match self.replicas {
                ReplicaCount::Count(count) => count,
                ReplicaCount::Auto => 1,
            },
            "grows": self.replicas == ReplicaCount::Auto,
            "draft": self.draft,
            "adapters": self.adapter,
            "drafts": self.drafts,
            "follow": self.follow,
            "weights": self.weights,
            "prefill_nodes": self.prefill_nodes,
        })
    }
}

/// A progress bar for counted bytes or steps.
pub(crate) struct LoadProgress(Option<(String, ProgressBar)>);

impl LoadProgress {
    /// Without a bar.
    pub(crate) const fn new() -> Self {
        Self(None)
    }

    /// Shows an instance's state; true when it is ready.
    ///
    /// # Errors
    /// Why it failed.
    pub(crate) fn done(&mut self, it: &Value) -> anyhow::Result<bool> {
        let state = it["state"].as_str().unwrap_or_default();
        let reason = it["reason"]
            .as_str()
            .unwrap_or("for no reason that it says");
        match state {
            "ready" | "failed" => self.clear(),
            _ => self.show(state, &it["progress"]),
        }
        match state {
            "failed" => bail!("{}", printable(reason)),
            state => Ok(state == "ready"),
        }
    }

    fn show(&mut self, state: &str, progress: &Value) {
        if self.0.as_ref().is_none_or(|(shown, _)| shown != state) {
            self.clear();
            let style = ProgressStyle::with_template("{msg} {wide_bar}");
            let style = style.expect("a template that `load` has shown");
            let bar = ProgressBar::new(0).with_style(style);
            bar.set_message(state.to_owned());
            self.0 = Some((state.to_owned(), bar));
        }
        if let (Some((_, bar)), Some(done), Some(of)) =
            (&self.0, progress[0].as_u64(), progress[1].as_u64())
        {
            bar.set_length(of);
            bar.set_position(done);
        }
    }

    fn clear(&mut self) {
        if let Some((_, bar)) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

/// Unloads a model.
///
/// # Errors
/// The node's error, or that it does not run.
pub(crate) fn unload(args: &UnloadArgs) -> anyhow::Result<()> {
    let ask = json!({ "model": args.model, "replica": args.replica });
    let answer = member::ask("unload", ask)?;
    let (model, count) = (printable(&args.model), answer["unloaded"].as_u64());
    match (args.replica, count) {
        (Some(replica), _) => print_err(format_args!("unloaded {model} replica {replica}")),
        (None, Some(count @ 2..)) => {
            print_err(format_args!("unloaded {count} replicas of {model}"))
        }
        (None, _) => print_err(format_args!("unloaded {model}")),
    }
    Ok(())
}

/// Lists what is loaded.
///
/// # Errors
/// The node's error, or that it does not run.
pub(crate) fn ps(args: &PsArgs) -> anyhow::Result<()> {
    let all = member::ask("ps", json!({}))?;
    if args.json {
        return print(&all.to_string());
    }
    instances_told(&all).iter().try_for_each(|line| print(line))
}
