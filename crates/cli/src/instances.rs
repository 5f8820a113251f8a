//! `paceline load`, `unload` and `ps`: models over the machines of a cluster.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::agent::local::Progress;
use paceline_cluster::nodes::pairing::Code;
use paceline_cluster::nodes::placement::Wanted;
use paceline_engine::{EngineConfig, Service};
use paceline_model::{Config, SplitKind};
use paceline_node::DRAFTS;
use paceline_node::fleet::lent;
use paceline_node::fleet::{self, Ask, Fleet, FleetSpec, TraceAsk, journals};
use paceline_node::room::Room;
use paceline_node::tunnel;
use paceline_serve::{Done, Doors, Kept, Mirror, Piece};
use paceline_tensor::KvType;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::interrupt::Signals;
use crate::member::NodeArgs;
use crate::nodes::aligned;
use crate::output::{print, printable, tell};
use crate::process::{own_program, worker_env};
use crate::{bench, home, key, loaded, member, pull, train, up};

/// How often `load` asks how far it is.
const ASK_EVERY: Duration = Duration::from_millis(200);

const EXAMPLES: &str = "\
Examples:
  paceline load smollm2 --nodes 3
  paceline load qwen3:8b --nodes mini,studio --split pipeline
  paceline load qwen3:8b --preview                  placements with predictions; loads nothing
  paceline load smollm2 --replicas 2                two whole copies, on machines of their own
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
    replicas: Replicas,
    /// How the model is cut: auto, tensor, pipeline, or TENSORxPIPELINE such as 2x2
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
    /// Further copies of each machine's part that wait packed on another one, so that an answer
    /// whose machine is lost goes on without loading [default: 1 where half of a machine's memory
    /// has room for all, once the model has answered for half a minute]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1))]
    spare: Option<u16>,
    /// A small model of the same vocabulary that guesses tokens, which MODEL checks together: the
    /// same answers in less time, where that pays
    #[arg(long, value_name = "MODEL")]
    draft: Option<String>,
    /// Most tokens of an answer that are guessed, from its own text or by --draft, and checked in
    /// one step, where that pays; 0 for none [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=16))]
    drafts: Option<u8>,
    /// Have machines that compute slower than before, because somebody uses them, give work to the
    /// others meanwhile
    #[arg(long)]
    follow: bool,
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
enum Replicas {
    Count(u16),
    /// One, and more while requests wait.
    Auto,
}

/// `auto`, or a number from 1 to 64.
fn replicas(text: &str) -> Result<Replicas, String> {
    if text == "auto" {
        return Ok(Replicas::Auto);
    }
    let count = text.parse().ok().filter(|count| (1..=64).contains(count));
    let count = count.ok_or("expected `auto` or a number from 1 to 64")?;
    Ok(Replicas::Count(count))
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
/// A model that cannot be had, nodes that there are not, why it cannot be loaded.
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
        tell("it goes on loading: `paceline ps` shows how far it is");
        Ok(())
    })
}

/// The instances with these ids; nothing where one is missing.
fn instances<'a>(all: &'a Value, ids: &[String]) -> Option<Vec<&'a Value>> {
    let all = all.as_array()?;
    let of = |id: &String| all.iter().find(|it| it["id"] == id.as_str());
    ids.iter().map(of).collect()
}

/// Whether all instances answer; shows how the first of the others is.
///
/// # Errors
/// Why an instance failed, and what becomes of the others.
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

/// A model's name, with the replica's number where it has several.
fn label(it: &Value) -> String {
    let model = printable(it["model"].as_str().unwrap_or_default());
    let replica = &it["replica"];
    match (replica["number"].as_u64(), replica["of"].as_u64()) {
        (Some(number), Some(of)) => format!("{model} replica {number}/{of}"),
        _ => model.into_owned(),
    }
}

/// Shows placements of a model, and loads nothing.
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
        tell(format_args!(
            "note: {}",
            printable(note.as_str().unwrap_or_default())
        ));
    }
    Ok(())
}

/// A heading, and a line for each placement.
fn proposals(preview: &Value) -> Vec<String> {
    let heading = ["NODES", "SPLIT", "TOKENS/S", "FIRST TOKEN", "FITS"].map(str::to_owned);
    let row = |it: &Value| {
        let number = |name: &str, unit: &str| match it[name].as_f64() {
            Some(value) => format!("{value:.1}{unit}"),
            None => "-".to_owned(),
        };
        let fits = if it["fits"] == true { "yes" } else { "no" };
        let replicas = it["replicas"].as_array().into_iter().flatten();
        let replicas: Vec<String> = replicas.map(names).collect();
        let nodes = match replicas.is_empty() {
            true => names(&it["nodes"]),
            false => replicas.join(" + "),
        };
        [
            nodes,
            it["split"].as_str().unwrap_or_default().to_owned(),
            number("decode_tok_s", ""),
            number("ttft_ms", " ms"),
            fits.to_owned(),
        ]
    };
    let placements = preview["placements"].as_array().into_iter().flatten();
    let rows: Vec<_> = std::iter::once(heading)
        .chain(placements.map(row))
        .collect();
    aligned(&rows)
}

impl LoadArgs {
    /// Prints that instances answer.
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
                Replicas::Count(count) => count,
                Replicas::Auto => 1,
            },
            "grows": self.replicas == Replicas::Auto,
            "draft": self.draft,
            "drafts": self.drafts,
            "follow": self.follow,
        })
    }
}

/// A bar while bytes or steps are counted.
pub(crate) struct LoadProgress(Option<(String, ProgressBar)>);

impl LoadProgress {
    /// Shows nothing yet.
    pub(crate) const fn new() -> Self {
        Self(None)
    }

    /// Shows how an instance is; true when it answers.
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

/// Names of nodes for people.
pub(crate) fn names(nodes: &Value) -> String {
    let names = nodes.as_array().into_iter().flatten();
    let names: Vec<_> = names
        .filter_map(Value::as_str)
        .map(|name| printable(name).into_owned())
        .collect();
    names.join(", ")
}

/// Unloads a model.
///
/// # Errors
/// What the node says, or that it does not run.
pub(crate) fn unload(args: &UnloadArgs) -> anyhow::Result<()> {
    let ask = json!({ "model": args.model, "replica": args.replica });
    let answer = member::ask("unload", ask)?;
    let (model, count) = (printable(&args.model), answer["unloaded"].as_u64());
    match (args.replica, count) {
        (Some(replica), _) => tell(format_args!("unloaded {model} replica {replica}")),
        (None, Some(count @ 2..)) => tell(format_args!("unloaded {count} replicas of {model}")),
        (None, _) => tell(format_args!("unloaded {model}")),
    }
    Ok(())
}

/// Lists what is loaded.
///
/// # Errors
/// What the node says, or that it does not run.
pub(crate) fn ps(args: &PsArgs) -> anyhow::Result<()> {
    let all = member::ask("ps", json!({}))?;
    if args.json {
        return print(&all.to_string());
    }
    let heading = ["MODEL", "STATE", "NODES", "EPOCH", "ID"].map(str::to_owned);
    let row = |it: &Value| {
        let text = |name: &str| printable(it[name].as_str().unwrap_or_default()).into_owned();
        let epoch = it["epoch"].to_string();
        [label(it), state(it), names(&it["nodes"]), epoch, text("id")]
    };
    let rows: Vec<[String; 5]> = std::iter::once(heading)
        .chain(all.as_array().into_iter().flatten().map(row))
        .collect();
    aligned(&rows).iter().try_for_each(|line| print(line))
}

/// How an instance is, with how far or why.
fn state(it: &Value) -> String {
    let state = it["state"].as_str().unwrap_or_default();
    if let Some(reason) = it["reason"].as_str() {
        return format!("{state}: {}", printable(reason));
    }
    match (it["progress"][0].as_u64(), it["progress"][1].as_u64()) {
        (Some(done), Some(of)) if of > 0 => format!("{state} {} %", done * 100 / of),
        _ => state.to_owned(),
    }
}

/// Starts what this machine's node does about instances; they are answered at `doors`.
///
/// # Errors
/// What the system refuses.
pub(crate) fn start(
    (agent, node): (&Agent, &NodeArgs),
    doors: Doors,
) -> anyhow::Result<Arc<Fleet>> {
    let program = own_program().context("cannot find this program's own file")?;
    let (train_program, bench_program) = (program.clone(), program.clone());
    let bench_args = node.rank_args();
    let home = home::folder()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spec = FleetSpec {
        program: (program, node.worker_args()),
        worker_env: worker_env(),
        find: Box::new(find),
        copies: home.join("copies"),
        home: home.clone(),
        kernels: Box::new(loaded::kernels),
        interface: node.data_interface().map(str::to_owned),
        sizes: Box::new(sizes),
        threads: cores,
        doors: Box::new(Api(doors.clone())),
        tell: Arc::new(|line| tell(line)),
    };
    let fleet = Fleet::start(agent.clone(), spec).context("cannot start a thread")?;
    let fleet = Arc::new(fleet);
    let copies = Copies(Arc::downgrade(&fleet));
    doors.journals().mirror_to(Arc::new(copies));
    for (name, command) in [
        ("load", ask_load as Command),
        ("unload", ask_unload),
        ("preview", ask_preview),
        ("ps", ask_ps),
        ("trace", ask_trace),
        ("using", ask_using),
    ] {
        let own = Arc::downgrade(&fleet);
        agent.serve_local(name, move |arguments: &Value, _: &mut Progress<'_>| {
            let fleet = own.upgrade().ok_or("the node is stopping")?;
            command(&fleet, arguments)
        });
    }
    let own = Arc::downgrade(&fleet);
    agent.serve_local("move", move |_: &Value, progress: &mut Progress<'_>| {
        let fleet = own.upgrade().ok_or("the node is stopping")?;
        let mut beat = || {
            progress(Value::Null);
        };
        leave(&fleet, &mut beat).map(|()| json!({}))
    });
    let own = Arc::downgrade(&fleet);
    agent.serve_local(
        "answer",
        move |arguments: &Value, progress: &mut Progress<'_>| {
            let fleet = own.upgrade().ok_or("the node is stopping")?;
            lent::answer(&fleet, arguments, progress)
        },
    );
    tunnel::serve(agent, tunnel::TRAIN, move || {
        train::start_far(&train_program)
    });
    tunnel::serve(agent, tunnel::BENCH, move || {
        bench::start_rank(&bench_program, &bench_args)
    });
    for service in [tunnel::TRAIN, tunnel::BENCH] {
        let own = Arc::downgrade(&fleet);
        agent.serve_local(
            service,
            move |arguments: &Value, progress: &mut Progress<'_>| {
                let fleet = own.upgrade().ok_or("the node is stopping")?;
                let agent = fleet.agent();
                drop(fleet); // a program elsewhere does not keep the fleet alive
                tunnel::lead(&agent, service, arguments, progress)
            },
        );
    }
    let own = Arc::downgrade(&fleet);
    agent.serve_local(
        "borrow",
        move |arguments: &Value, progress: &mut Progress<'_>| {
            lent::lend(&own, &asked(arguments)?, progress)
        },
    );
    Ok(fleet)
}

/// What the dashboard asks of a node whose models come and go.
///
/// # Errors
/// A reason for people.
pub(crate) fn manage(
    (agent, fleet): (&Agent, &Fleet),
    command: &str,
    arguments: &Value,
) -> Result<Value, String> {
    match command {
        "load" => ask_load(fleet, arguments),
        "unload" => ask_unload(fleet, arguments),
        "preview" => ask_preview(fleet, arguments),
        "models" => {
            let home = home::home().map_err(|error| error.to_string())?;
            let all = paceline_store::list(&home).map_err(|error| error.to_string())?;
            let whole = all.iter().filter(|entry| entry.found().is_ok());
            let told: Vec<Value> = whole
                .map(|entry| {
                    let name = entry.name.to_string();
                    json!({ "name": name, "bytes": entry.bytes.0 })
                })
                .collect();
            Ok(json!({ "models": told }))
        }
        "join" | "forget" | "revoke" => of_cluster(agent, command, arguments),
        "keys" | "new_key" | "revoke_key" => {
            key::manage(command, arguments).map_err(|error| format!("{error:#}"))
        }
        "invite" => {
            let code = agent.invite().map_err(|error| error.to_string())?;
            Ok(json!({ "code": code.shown(), "port": agent.port() }))
        }
        other => Err(format!("the node has no command {other:?}")),
    }
}

/// Longest wait for work to move: the load of a large model from disk.
const MOVE_LIMIT: Duration = Duration::from_secs(120);

/// Moves this node's work to others before it goes.
///
/// # Errors
/// Names of the models that could not be moved.
pub(crate) fn leave(fleet: &Fleet, wait: &mut dyn FnMut()) -> Result<(), String> {
    let stuck = fleet.leave(MOVE_LIMIT, wait);
    match stuck.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "no other machine could take over {}",
            stuck.join(", ")
        )),
    }
}

type Command = fn(&Fleet, &Value) -> Result<Value, String>;

/// Joins another cluster, or forgets or revokes a machine of this one.
fn of_cluster(agent: &Agent, command: &str, arguments: &Value) -> Result<Value, String> {
    let text = |name: &str| arguments[name].as_str().unwrap_or_default();
    let done = match command {
        "forget" => Some(agent.forget(text("node"))),
        "revoke" => Some(agent.revoke(text("node"))),
        _ => None,
    };
    if let Some(done) = done {
        return done.map(|_| json!({})).map_err(|error| error.to_string());
    }
    let code = Code::parse(text("code")).map_err(|error| error.to_string())?;
    let peer = Some(text("peer")).filter(|peer| !peer.is_empty());
    let joined = agent.join_by_code(&code, peer);
    serde_json::to_value(joined.map_err(|error| error.to_string())?)
        .map_err(|error| error.to_string())
}

fn ask_load(fleet: &Fleet, arguments: &Value) -> Result<Value, String> {
    let ask = asked(arguments)?;
    let ids = fleet.load(&ask)?;
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    Ok(json!({ "id": ids.first(), "ids": ids }))
}

fn ask_preview(fleet: &Fleet, arguments: &Value) -> Result<Value, String> {
    let mut ask = asked(arguments)?;
    if arguments["count"].is_null() {
        ask.count = 0; // any number
    }
    let preview = fleet.preview(&ask)?;
    serde_json::to_value(preview).map_err(|error| error.to_string())
}

/// Parses a client's arguments of `load` or `preview`, and fills in defaults.
fn asked(arguments: &Value) -> Result<Ask, String> {
    let body = Body::deserialize(arguments).map_err(|error| error.to_string())?;
    let split = body.split.as_deref().unwrap_or("auto").parse();
    Ok(Ask {
        model: body.model,
        nodes: body.nodes.unwrap_or_default(),
        count: body.count.unwrap_or(1),
        split: split.map_err(|error: paceline_model::split::Error| error.to_string())?,
        threads: body.threads,
        context: body.context,
        parallel: body.parallel.unwrap_or(4),
        spare: body.spare.map(|spare| spare.min(1)),
        replicas: body.replicas.unwrap_or(1).max(1),
        draft: body.draft,
        drafts: body.drafts,
        follow: body.follow.unwrap_or(false),
        grows: body.grows.unwrap_or(false),
    })
}

/// Arguments of `load` and `preview`. A placement of a preview gives `nodes` and `split`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: String,
    nodes: Option<Vec<String>>,
    count: Option<usize>,
    split: Option<String>,
    threads: Option<u16>,
    context: Option<u32>,
    parallel: Option<u16>,
    spare: Option<u16>,
    replicas: Option<u16>,
    draft: Option<String>,
    drafts: Option<u8>,
    follow: Option<bool>,
    grows: Option<bool>,
}

/// Arguments of `unload`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unload {
    model: String,
    replica: Option<u16>,
}

fn ask_unload(fleet: &Fleet, arguments: &Value) -> Result<Value, String> {
    let Unload { model, replica } =
        Unload::deserialize(arguments).map_err(|error| error.to_string())?;
    let unloaded = fleet.unload(&model, replica);
    unloaded.map(|count| json!({ "unloaded": count }))
}

fn ask_using(fleet: &Fleet, arguments: &Value) -> Result<Value, String> {
    let model = arguments["model"].as_str().unwrap_or_default();
    serde_json::to_value(fleet.using(model)).map_err(|error| error.to_string())
}

fn ask_ps(fleet: &Fleet, _: &Value) -> Result<Value, String> {
    serde_json::to_value(fleet.list()).map_err(|error| error.to_string())
}

fn ask_trace(fleet: &Fleet, arguments: &Value) -> Result<Value, String> {
    let ask: TraceAsk =
        serde_json::from_value(arguments.clone()).map_err(|error| error.to_string())?;
    let recording = fleet.trace(&ask)?;
    serde_json::to_value(recording).map_err(|error| error.to_string())
}

/// The file of a model of this machine.
fn find(name: &str) -> Result<PathBuf, String> {
    let home = home::home().map_err(|error| error.to_string())?;
    match paceline_store::resolve(&home, name) {
        Ok(paceline_store::Resolved::Path(found)) => Ok(found.path),
        Ok(_) => Err(format!("there is no model {name:?} on this machine")),
        Err(error) => Err(error.to_string()),
    }
}

fn sizes(path: &Path, config: &Config, wanted: &Wanted) -> EngineConfig {
    let parallel = usize::from(wanted.parallel.max(1));
    let memory = (Some(KvType::F16), machine::available());
    let room = Room::of((path, config), memory, wanted.context, parallel);
    EngineConfig {
        max_running: parallel,
        max_waiting: up::WAITING_MAX,
        drafts: wanted.drafts.map_or(DRAFTS, usize::from),
        ..room.engine(&wanted.model)
    }
}

/// Opens instances to HTTP.
struct Api(Doors);

impl fleet::Doors for Api {
    fn open(
        &self,
        key: &str,
        wanted: &Wanted,
        path: &Path,
        service: Arc<dyn Service>,
    ) -> Result<(), String> {
        let model = loaded::served(path, wanted).map_err(|error| format!("{error:#}"))?;
        let opened = self.0.open(key, model, service);
        opened.map_err(|error| error.to_string())
    }

    fn close(&self, key: &str) {
        self.0.close(key);
    }

    fn journal(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>> {
        let own = self.0.journals().give(id, key);
        own.or_else(|| self.0.response(id, key))
    }
}

/// Has other nodes keep what streamed answers were made of.
struct Copies(Weak<Fleet>);

impl Mirror for Copies {
    fn put(&self, piece: Piece, done: Done) {
        let Some(fleet) = self.0.upgrade() else {
            return done(Kept::No("the node is stopping".to_owned()));
        };
        let Piece { id, at, bytes } = piece;
        let kept = |kept| match kept {
            journals::Kept::Yes => Kept::Yes,
            journals::Kept::Gap => Kept::Gap,
            journals::Kept::No(reason) => Kept::No(reason),
        };
        let piece = journals::Piece { id, at, bytes };
        fleet.keep(piece, Box::new(move |it| done(kept(it))));
    }

    fn find(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>> {
        self.0.upgrade()?.find_journal(id, key)
    }

    fn find_longer(&self, id: &str, key: Option<&str>, than: usize) -> Option<Vec<u8>> {
        self.0.upgrade()?.find_longer_journal(id, key, than)
    }
}
