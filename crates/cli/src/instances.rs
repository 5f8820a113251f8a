//! `paceline load`, `unload` and `ps`: instances on the machines of a cluster. The commands send
//! JSON to this machine's node, which places and loads the model; `load` polls its progress.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use paceline_base::Bytes;
use paceline_board::lookup::{self, weights};
use paceline_board::pulls;
use paceline_board::tables::{instances as instances_told, label, names, proposals};
use paceline_fleet::{InstanceOptions, WeightDistribution};
use paceline_model::SplitKind;
use paceline_node::classes::Engines;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::adapter;
use crate::compute::context;
use crate::draft_limit::DraftLimit;
use crate::error::{Error, failed};
use crate::interrupt::Signals;
use crate::output::{print, print_err};
use crate::{home, mapreduce, member, plan, pull};

/// Poll interval of `load`.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Longest wait for the names of machines that have just joined, as for their facts in the node.
const NAMES_WAIT: Duration = Duration::from_secs(5);

/// Time between two looks at these names.
const NAMES_EVERY: Duration = Duration::from_millis(50);

const EXAMPLES: &str = "\
Examples:
  paceline load smollm2 --nodes 3
  paceline load qwen3:8b --nodes mini,studio --split pipeline
  paceline load qwen3:8b --preview                  placements with predictions; loads nothing
  paceline load smollm2 --nodes 2 --adapter poet=my-adapter      answers as smollm2:poet too
  paceline load smollm2 --replicas 2                two whole copies, on machines of their own
  paceline load qwen3:8b --nodes mini --prefill-nodes tower
  paceline ps";

/// Arguments of `paceline load`. Serialises as a
/// [`LoadRequest`](paceline_node::fleet::LoadRequest).
#[derive(Debug, clap::Args, Serialize)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LoadArgs {
    /// Model of this machine, or one to fetch first
    #[arg(value_name = "MODEL")]
    model: String,
    /// How many machines compute it, or their names [default: 1]
    #[arg(long, value_name = "N|A,B,..", value_delimiter = ',')]
    #[serde(flatten, serialize_with = "count_or_names")]
    nodes: Option<Vec<String>>,
    /// Whole copies of the model, each on N machines of its own while there are enough, or on its
    /// share of those that are named; `auto`: one, and more on idle machines while requests wait
    #[arg(long, value_name = "R", default_value = "1", value_parser = replicas)]
    #[serde(flatten)]
    replicas: ReplicaCount,
    /// How the model is cut: auto, tensor, pipeline, experts, TENSORxPIPELINE such as 2x2, or
    /// 2x2-experts
    #[arg(long, value_name = "SPLIT", default_value_t)]
    split: SplitKind,
    /// What computes: cpu or mlx (Metal, CUDA), or one for each machine as cpu,mlx [default: mlx
    /// where all have a GPU, else cpu]
    #[arg(long, value_name = "ENGINE")]
    engine: Option<Engines>,
    /// Numbers of the engine: cpu, mlx, mlx-f32 or mlx-exact (docs/numerics.md) [default: the
    /// engine's own]
    #[arg(long, value_name = "CLASS")]
    class: Option<String>,
    /// Threads of each machine [default: as many as this one has cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Most tokens of a conversation and its answer; max: those that the model was trained for
    #[arg(long, value_name = "N|max", value_parser = context)]
    context: Option<u32>,
    /// Answers that are computed at the same time; more wait
    #[arg(long, value_name = "N", default_value_t = InstanceOptions::default().parallel,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Most memory of each machine for the model and its conversations, such as 8G. Weights that do
    /// not fit are read from its disk while it computes, with the same answers
    #[arg(long, value_name = "SIZE", value_parser = mapreduce::memory)]
    memory: Option<u64>,
    /// Standby copies of each machine's part, packed on another one. An answer whose machine is
    /// lost continues without loading [default: 1 where half of a machine's memory has room for
    /// all, once the model has answered for half a minute]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1))]
    spare: Option<u16>,
    /// Guesses tokens, which MODEL checks together: a small model of the same vocabulary, or a
    /// draft head (EAGLE-3, DFlash, DSpark, Gemma 4's assistant). The same answers in less time
    /// [default: the prediction layer in MODEL's files, if there is one]
    #[arg(long, visible_alias = "drafter", value_name = "MODEL")]
    draft: Option<String>,
    /// An adapter that answers too, as MODEL:NAME, from the same weights: its folder, or its file
    /// of weights (PEFT's, MLX's or GGUF's form); machines that lack it get it; may be given
    /// several times
    #[arg(long, value_name = "NAME=FILE", value_parser = adapter::named)]
    #[serde(rename = "adapters")]
    adapter: Vec<(String, PathBuf)>,
    /// Most tokens of an answer that are guessed and checked in one step, where that pays; 0 for
    /// none. auto: 8, none on MLX
    #[arg(long, value_name = "N", default_value_t)]
    drafts: DraftLimit,
    /// Have machines that compute slower than before, because somebody uses them, give work to the
    /// others meanwhile
    #[arg(long)]
    follow: bool,
    /// End an answer on MLX with an error where it would continue with other bits
    #[arg(long)]
    strict: bool,
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
    /// Have them compute in this class: answers are near those of the other machines, and name
    /// both. Not with --strict
    #[arg(long, value_name = "CLASS", requires = "prefill_nodes")]
    prefill_class: Option<String>,
    /// Return at once instead of waiting until it answers
    #[arg(long)]
    #[serde(skip)]
    no_wait: bool,
    /// Load nothing: show placements with predictions, from measured speeds and ways
    #[arg(long, conflicts_with = "no_wait")]
    #[serde(skip)]
    preview: bool,
    /// Print one JSON object: the placements of --preview, else the instances
    #[arg(long)]
    #[serde(skip)]
    json: bool,
}

/// Whole copies of a model.
#[derive(Clone, Copy, Debug, Serialize)]
struct ReplicaCount {
    replicas: u16,
    /// Whether load adds more.
    grows: bool,
}

/// Parses `auto`, or a number from 1 to 64.
fn replicas(text: &str) -> Result<ReplicaCount, String> {
    let grows = text == "auto";
    let count = if grows { Some(1) } else { text.parse().ok() };
    let count = count.filter(|count| (1..=64).contains(count));
    let replicas = count.ok_or("expected `auto` or a number from 1 to 64")?;
    Ok(ReplicaCount { replicas, grows })
}

/// The value of `--nodes` in a request.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum NodeChoice<'a> {
    Count(usize),
    Nodes(&'a [String]),
}

fn count_or_names<S: Serializer>(
    nodes: &Option<Vec<String>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let choice = nodes.as_deref().map(|nodes| match nodes {
        [one] => one
            .parse()
            .map_or(NodeChoice::Nodes(nodes), NodeChoice::Count),
        _ => NodeChoice::Nodes(nodes),
    });
    choice.serialize(serializer)
}

#[derive(Debug, clap::Args)]
pub(crate) struct UnloadArgs {
    /// Name of the model, or id of the instance
    #[arg(value_name = "MODEL")]
    model: String,
    /// Only the replica with this number, as `paceline ps` shows it
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u16).range(1..))]
    replica: Option<u16>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PsArgs {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// The cluster's nodes, once those that live have told their names; as they are after
/// [`NAMES_WAIT`].
fn named_nodes() -> anyhow::Result<Value> {
    let began = Instant::now();
    loop {
        let nodes = member::ask("nodes", json!({}))?["nodes"].take();
        if have_told(&nodes) || began.elapsed() >= NAMES_WAIT {
            return Ok(nodes);
        }
        std::thread::sleep(NAMES_EVERY);
    }
}

/// Whether the facts of all live nodes have arrived. Before, a name comes from an id.
fn have_told(nodes: &Value) -> bool {
    let mut all = nodes.as_array().into_iter().flatten();
    all.all(|node| node["state"] != "alive" || node["protocol"] != 0)
}

/// Loads a model over machines of the cluster, and waits until it answers.
pub(crate) fn load(args: &LoadArgs, signals: &Signals) -> anyhow::Result<()> {
    let memory = args.check_nodes(&named_nodes()?)?;
    if args.preview && is_absent(&args.model)? && weights(&args.model).is_some() {
        return plan::preview(&args.model, args.nodes.as_deref(), args.json);
    }
    pull::ensure_within(&args.model, || memory, signals)?;
    if let Some(draft) = &args.draft {
        pull::ensure(draft, signals)?;
    }
    if args.preview {
        return preview(args);
    }
    let answer = member::ask("load", serde_json::to_value(args)?)?;
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

fn text(node: &Value, key: &str) -> String {
    node[key].as_str().unwrap_or_default().to_owned()
}

/// Whether a machine has this name, or an id that begins so.
fn is_called(node: &Value, name: &str) -> bool {
    let by_id = name.len() >= 4 && text(node, "id").starts_with(name);
    by_id || text(node, "name") == name
}

/// Memory of machines for models: their own, and that of graphics cards. `None` if one does not
/// tell.
fn memory(nodes: &[&Value]) -> Option<Bytes> {
    let cards = |node: &Value| -> u64 {
        let devices = node["devices"].as_array().into_iter().flatten();
        // Metal's memory is the machine's own.
        let cards = devices.filter(|it| it["kind"] == "gpu" && it["backend"] != "metal");
        cards.filter_map(|it| it["memory_bytes"].as_u64()).sum()
    };
    let each = nodes.iter().map(|node| {
        let own = node["memory_bytes"].as_u64().filter(|bytes| *bytes > 0);
        own.map(|own| own + cards(node))
    });
    each.sum::<Option<u64>>().map(Bytes)
}

/// Whether a model is neither here nor a copy of the cluster's.
fn is_absent(model: &str) -> anyhow::Result<bool> {
    let home = home::home()?;
    Ok(lookup::local_path(&home, model).is_none() && pulls::copied(&home, model).is_none())
}

/// The instances with these ids; `None` if one is missing.
fn instances<'a>(all: &'a Value, ids: &[String]) -> Option<Vec<&'a Value>> {
    let all = all.as_array()?;
    let of = |id: &String| all.iter().find(|it| it["id"] == id.as_str());
    ids.iter().map(of).collect()
}

/// Whether all instances are ready; shows the state of the first other one.
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
    let preview = member::ask("preview", serde_json::to_value(args)?)?;
    if args.json {
        return print(&preview.to_string());
    }
    for line in proposals(&preview) {
        print(&line)?;
    }
    for note in preview["notes"].as_array().into_iter().flatten() {
        let note = note.as_str().unwrap_or_default();
        print_err(format_args!("note: {note}"));
    }
    Ok(())
}

/// More machines than live.
fn too_few(wanted: usize, living: &[String], dead: &[String]) -> Error {
    let dead = match dead {
        [] => String::new(),
        dead => format!("; dead: {}", dead.join(", ")),
    };
    let (n, names) = (living.len(), living.join(", "));
    failed(
        format!("{wanted} nodes are wanted and {n} live: {names}{dead}"),
        format!("take --nodes {n}, or let machines in: `paceline nodes invite`"),
    )
}

/// A machine that is not `known`. The advice names one that differs in a third of its letters.
fn no_machine(name: &str, known: &[String]) -> Error {
    let distance = |other: &&String| strsim::damerau_levenshtein(name, other);
    let near = known.iter().min_by_key(distance);
    let near = near.filter(|near| distance(near) <= (name.chars().count() / 3).max(1));
    let hint = match near {
        Some(near) => format!("did you mean {near}?"),
        None => format!("`paceline nodes` lists them: {}", known.join(", ")),
    };
    failed(format!("no machine of the cluster is named {name:?}"), hint)
}

impl LoadArgs {
    /// Checks number and names of the machines against the cluster's `nodes`, before anything is
    /// fetched. Returns the memory of those that may compute, if all tell it.
    fn check_nodes(&self, nodes: &Value) -> Result<Option<Bytes>, Error> {
        let all: Vec<&Value> = nodes.as_array().into_iter().flatten().collect();
        let lives = |node: &&Value| matches!(node["state"].as_str(), Some("alive" | "suspect"));
        let (living, dead): (Vec<&Value>, Vec<&Value>) = all.iter().partition(|it| lives(it));
        let names = |nodes: &[&Value]| -> Vec<String> {
            nodes.iter().map(|node| text(node, "name")).collect()
        };
        let named = self.nodes.as_deref().unwrap_or_default();
        let wanted = match named {
            [] => Some(1),
            [one] => one.parse::<usize>().ok(),
            _ => None,
        };
        match wanted {
            Some(wanted) if wanted > living.len() => {
                return Err(too_few(wanted, &names(&living), &names(&dead)));
            }
            Some(_) => return Ok(memory(&living)),
            None => {}
        }
        let find = |name: &String| {
            let found = all.iter().find(|node| is_called(node, name)).copied();
            found.ok_or_else(|| no_machine(name, &names(&all)))
        };
        let found = named.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        Ok(memory(&found))
    }

    /// Prints that the instances are ready.
    fn tell_ready(&self, own: &[&Value]) -> anyhow::Result<()> {
        if self.json {
            return print(&json!({ "model": self.model, "instances": own }).to_string());
        }
        let line = |it: &Value| format!("{} answers, on {}", label(it), names(&it["nodes"]));
        own.iter().try_for_each(|it| print(&line(it)))
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
            "failed" => bail!("{reason}"),
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

pub(crate) fn unload(args: &UnloadArgs) -> anyhow::Result<()> {
    let ask = json!({ "model": args.model, "replica": args.replica });
    let answer = member::ask("unload", ask)?;
    let (model, count) = (&args.model, answer["unloaded"].as_u64());
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
pub(crate) fn ps(args: &PsArgs) -> anyhow::Result<()> {
    let all = member::ask("ps", json!({}))?;
    if args.json {
        return print(&all.to_string());
    }
    instances_told(&all).iter().try_for_each(|line| print(line))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use paceline_node::fleet::LoadRequest;
    use serde::Deserialize;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        load: LoadArgs,
    }

    #[test]
    fn names_are_known_once_all_that_live_have_told_them() {
        let nodes = |state: &str, protocol: u32| {
            json!([{ "name": "studio", "state": "alive", "protocol": 3 },
                   { "name": "node-a003b795", "state": state, "protocol": protocol }])
        };
        assert!(!have_told(&nodes("alive", 0)), "it has just joined");
        assert!(have_told(&nodes("alive", 3)) && have_told(&nodes("dead", 0)));
    }

    #[test]
    fn machines_are_checked_before_anything_is_fetched() {
        let node = |name: &str, state: &str| {
            json!({ "id": format!("{name}00"), "name": name, "state": state,
                    "memory_bytes": 8_u64 << 30 })
        };
        let nodes = json!([
            node("mini", "alive"),
            node("studio", "alive"),
            node("old", "dead")
        ]);
        let check = |options: &str| {
            let words = ["load", "m"].into_iter().chain(options.split_whitespace());
            Command::parse_from(words).load.check_nodes(&nodes)
        };
        let gib = |n: u64| Some(Bytes(n << 30));
        assert_eq!(check("").unwrap(), gib(16));
        assert_eq!(check("--nodes 2").unwrap(), gib(16));
        assert_eq!(check("--nodes studio").unwrap(), gib(8));
        assert_eq!(check("--nodes mini00,studio").unwrap(), gib(16));
        let error = check("--nodes 3").unwrap_err().to_string();
        assert_eq!(
            error,
            "3 nodes are wanted and 2 live: mini, studio; dead: old"
        );
        let error = check("--nodes mimi").unwrap_err();
        assert!(error.to_string().contains("named \"mimi\""), "{error}");
        assert_eq!(error.hints(), ["did you mean mini?"]);
    }

    /// The request of `load m` with these options, as the node gets it.
    fn sent(options: &str) -> Value {
        let words = ["load", "m"].into_iter().chain(options.split_whitespace());
        serde_json::to_value(&Command::parse_from(words).load).unwrap()
    }

    fn request(options: &str) -> LoadRequest {
        LoadRequest::deserialize(sent(options)).unwrap()
    }

    /// No list maps one to the other. A new option is a field of each; the record keeps `options`
    /// whole, and a rule reads it there.
    #[test]
    fn a_field_of_a_request_is_an_option_of_load_or_of_up_alone() {
        let of_up = ["names", "adapter_naming", "machine"];
        let options = "--replicas auto --drafts 5 --follow --strict --weights shard --memory 8G";
        let (by_name, by_count) = (sent(&format!("{options} --nodes a")), sent("--nodes 2"));
        let fields = serde_json::to_value(request(options)).unwrap();
        for name in fields.as_object().unwrap().keys() {
            let is_option = by_name.get(name).or(by_count.get(name)).is_some();
            assert!(is_option != of_up.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn options_of_load_are_the_fields_of_a_request() {
        let plain = LoadRequest {
            model: "m".to_owned(),
            replicas: 1,
            ..LoadRequest::default()
        };
        assert_eq!(request(""), plain);
        let asked = request(
            "--nodes a,b --replicas auto --split 2x1 --threads 3 --context 512 --parallel 2 \
             --spare 1 --draft d --adapter poet=/p --drafts 5 --follow --strict \
             --weights shard --memory 8G --prefill-nodes c --prefill-class mlx --no-wait --json",
        );
        let expected = LoadRequest {
            nodes: vec!["a".to_owned(), "b".to_owned()],
            split: SplitKind::Grid {
                tensor: 2,
                pipeline: 1,
            },
            threads: Some(3),
            options: InstanceOptions {
                context: Some(512),
                parallel: 2,
                memory: Some(8 << 30),
                drafts: Some(5),
                follow: true,
                grows: true,
                weights: WeightDistribution::Shard,
                strict: true,
            },
            spare: Some(1),
            draft: Some("d".to_owned()),
            adapters: vec![("poet".to_owned(), "/p".into())],
            prefill_nodes: vec!["c".to_owned()],
            prefill_class: Some("mlx".to_owned()),
            ..plain
        };
        assert_eq!(asked, expected);
        assert_eq!(request("--nodes 3").count, Some(3));
        assert_eq!(request("--nodes one").nodes, ["one"]);
    }
}
