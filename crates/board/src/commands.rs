//! Commands of a node, for local programs and for users of its dashboard.
//!
//! Commands are JSON in, JSON out. Programs reach them over the agent's local socket, the dashboard
//! over HTTP.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use paceline_auth::keys::{self, KeyInfo, KeyRole, Keys};
use paceline_base::{Bytes, CallbackError, KernelClass};
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::agent::local::CommandProgress;
use paceline_cluster::nodes::pairing::Code;
use paceline_engine::{DraftCounts, EngineConfig, Service};
use paceline_fleet::{AdapterFile, AdapterNaming, InstanceSpec};
use paceline_model::Config;
use paceline_node::context_size::{ContextBudget, KvMemory};
use paceline_node::fleet::{
    self, Fleet, FleetSpec, LoadRequest, MakeKernels, TraceRequest, journals, leases,
};
use paceline_node::{DRAFTS, tunnel};
use paceline_process::Program;
use paceline_serve::{
    JournalMatch, JournalPart, Mirror, MirrorCallback, MirrorOutcome, ModelRegistry, Upstreams,
};
use paceline_serve::{UnservedModel, UnservedState};
use paceline_store::{Home, PullOptions};
use paceline_worker::interpreter::ChildProgram;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::hub::StoreHub;
use crate::pulls::{MEND, check_first_use, copies};
use crate::{CommandError, Error, MessageSink, api_model, chain, stores, upstreams};

/// Interval of signs of life from a command: a third of the 10 s of the most impatient client.
/// A load may hash a model first, a second a gigabyte.
const AWAKE_EVERY: Duration = Duration::from_secs(3);

/// Maximum queued requests; further ones are rejected as busy. That is one per connection of the
/// server's default limit.
pub const WAITING_MAX: usize = 512;

/// Starts the local end of a connection from another machine.
pub type ProgramStarter = Box<dyn Fn() -> io::Result<Program> + Send + Sync>;

/// Settings of a node that runs models of the cluster.
#[derive(derive_more::Debug)]
#[debug("workers by {}", self.program.0.display())]
pub struct NodeSettings {
    /// Paceline's files.
    pub home: Home,
    /// Worker program and arguments.
    pub program: (PathBuf, Vec<OsString>),
    /// Complete environment of each worker.
    pub worker_env: Vec<(OsString, OsString)>,
    /// Folders below which workers may write.
    pub worker_folders: Vec<PathBuf>,
    /// Maximum bytes of models on disk; `None` for all free space.
    pub disk_budget: Option<u64>,
    /// Whether other nodes may remove models of this machine's user.
    pub lets_others_remove: bool,
    /// Whether the journals of open answers are on disk.
    pub is_durable: bool,
    pub pull: PullOptions,
    /// Runs chat templates.
    pub templates: ChildProgram,
    pub kernels: Box<MakeKernels>,
    /// The only interface that workers listen on; `None` for all.
    pub interface: Option<String>,
    /// Start programs that join trainings, benchmarks, array jobs and upgrades led by other
    /// machines, by service.
    pub starters: Vec<(&'static str, ProgramStarter)>,
    /// Lines for people; must not block.
    pub tell: MessageSink,
}

/// Starts this node's instances and commands; instances register at `doors`.
pub fn start(
    agent: &Agent,
    spec: NodeSettings,
    doors: &ModelRegistry,
) -> Result<Arc<Fleet>, Error> {
    let (spec, services) = divided(spec, doors);
    let fleet = Fleet::start(agent.clone(), spec).map_err(Error::Thread)?;
    let fleet = Arc::new(fleet);
    let copies = FleetMirror(Arc::downgrade(&fleet));
    doors.journals().mirror_to(Arc::new(copies));
    answer_commands(agent, &fleet);
    answer_lists(agent, &fleet, doors.upstreams());
    upstreams::share(agent, doors, &fleet).map_err(Error::Thread)?;
    serve(agent, &fleet, "move", |fleet, _, progress| {
        let mut beat = || {
            progress(Value::Null);
        };
        leave(&fleet, &mut beat)?;
        Ok(json!({}))
    });
    serve(agent, &fleet, "answer", |fleet, arguments, progress| {
        Ok(leases::answer(&fleet, arguments, progress)?)
    });
    // Consent of this machine's owner is for programs of others, not for its own.
    lead_to(agent, &fleet, tunnel::PROGRAMS);
    for (service, start) in services {
        tunnel::serve(agent, service, start);
        lead_to(agent, &fleet, service);
    }
    let own = Arc::downgrade(&fleet);
    agent.serve_local(
        "borrow",
        move |arguments: &Value, progress: &mut CommandProgress<'_>| {
            let request = parse_load(arguments)?;
            Ok(leases::lend(&own, &request, progress)?)
        },
    );
    Ok(fleet)
}

/// Splits `spec` into the fleet's settings and the starters of programs for other machines.
fn divided(
    spec: NodeSettings,
    doors: &ModelRegistry,
) -> (FleetSpec, Vec<(&'static str, ProgramStarter)>) {
    let own_store = stores::own(&spec);
    let home = spec.home;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let store = home.clone();
    let services = spec.starters;
    let spec = FleetSpec {
        program: spec.program,
        worker_env: spec.worker_env,
        worker_folders: spec.worker_folders,
        find: Box::new(move |name: &str| find(&store, name)),
        copies: copies(&home),
        store: own_store,
        hub: Arc::new(StoreHub {
            home: home.clone(),
            options: spec.pull,
            tell: Arc::clone(&spec.tell),
        }),
        home: home.root().to_owned(),
        journals: spec.is_durable.then(|| home.root().join("journals")),
        kernels: spec.kernels,
        interface: spec.interface,
        sizes: Box::new(sizes),
        threads: cores,
        doors: Box::new(HttpAdmission {
            doors: doors.clone(),
            templates: spec.templates,
        }),
        tell: spec.tell,
    };
    (spec, services)
}

/// Connects local programs to those that other nodes start for `service`.
fn lead_to(agent: &Agent, fleet: &Arc<Fleet>, service: &'static str) {
    serve(agent, fleet, service, move |fleet, arguments, progress| {
        let agent = fleet.agent();
        drop(fleet); // a program elsewhere does not keep the fleet alive
        tunnel::lead(&agent, service, arguments, progress)
    });
}

/// Serves a local command by the fleet, as long as there is one.
fn serve(
    agent: &Agent,
    fleet: &Arc<Fleet>,
    name: &'static str,
    run: impl Fn(Arc<Fleet>, &Value, &mut CommandProgress<'_>) -> Result<Value, CallbackError>
    + Send
    + Sync
    + 'static,
) {
    let own = Arc::downgrade(fleet);
    agent.serve_local(
        name,
        move |arguments: &Value, progress: &mut CommandProgress<'_>| {
            let fleet = own.upgrade().ok_or("the node is stopping")?;
            run(fleet, arguments, progress)
        },
    );
}

/// Runs a command on its own thread and reports an empty progress at each interval until its end.
/// Clients then wait as long as the node works.
fn awake<T: Send>(
    progress: &mut CommandProgress<'_>,
    every: Duration,
    run: impl FnOnce() -> T + Send,
) -> T {
    std::thread::scope(|scope| {
        let (end, ended) = mpsc::channel::<()>();
        let running = scope.spawn(move || {
            let _end = end; // closed with the command
            run()
        });
        while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
            progress(Value::Null);
        }
        let ended = running.join();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Serves local commands about models and instances.
fn answer_commands(agent: &Agent, fleet: &Arc<Fleet>) {
    for (name, command) in [
        ("load", ask_load as Command),
        ("unload", ask_unload),
        ("preview", ask_preview),
        ("trace", ask_trace),
        ("using", ask_using),
        ("remove", stores::ask_remove),
    ] {
        serve(agent, fleet, name, move |fleet, arguments, progress| {
            Ok(awake(progress, AWAKE_EVERY, || command(&fleet, arguments))?)
        });
    }
    serve(agent, fleet, "send", |fleet, arguments, progress| {
        Ok(stores::ask_send(&fleet, arguments, progress)?)
    });
    serve(agent, fleet, MEND, |fleet, arguments, progress| {
        Ok(stores::ask_mend(&fleet, arguments, progress)?)
    });
}

/// Serves local lists of instances and of stored models, which include those of upstreams.
fn answer_lists(agent: &Agent, fleet: &Arc<Fleet>, upstreams: &Upstreams) {
    for (name, command) in [("ps", ask_ps as Listing), ("stores", stores::ask_stores)] {
        let upstreams = upstreams.clone();
        serve(agent, fleet, name, move |fleet, _, _| {
            Ok(command(&fleet, upstreams.instances())?)
        });
    }
}

type Listing = fn(&Fleet, Vec<Value>) -> Result<Value, CommandError>;

/// Runs a dashboard command; `keys` is the file of API keys.
pub fn manage(
    (agent, fleet): (&Agent, &Fleet),
    (home, keys): (&Home, &Path),
    command: &str,
    arguments: &Value,
) -> Result<Value, CommandError> {
    match command {
        "load" => ask_load(fleet, arguments),
        "unload" => ask_unload(fleet, arguments),
        "preview" => ask_preview(fleet, arguments),
        "models" => {
            let all = paceline_store::list(home).map_err(CommandError::other)?;
            let told = all.iter().map(|entry| {
                let (name, files) = (entry.name.to_string(), entry.file_count());
                let problem = entry.found().err().map(|error| error.to_string());
                json!({ "name": name, "bytes": entry.bytes.0, "file_count": files,
                        "problem": problem })
            });
            let told: Vec<Value> = told.collect();
            Ok(json!({ "models": told }))
        }
        "join" | "forget" | "revoke" => of_cluster(agent, command, arguments),
        "keys" | "new_key" | "revoke_key" => {
            of_keys(keys, command, arguments).map_err(CommandError::Keys)
        }
        "invite" => {
            let code = agent.invite().map_err(CommandError::other)?;
            Ok(json!({ "code": code.shown(), "port": agent.port() }))
        }
        other => {
            let command = other.to_owned();
            Err(CommandError::UnknownCommand { command })
        }
    }
}

/// Timeout of moving an instance: a large model's load from disk.
const MOVE_LIMIT: Duration = Duration::from_secs(120);

/// Moves this node's instances to other nodes before it leaves.
pub fn leave(fleet: &Fleet, wait: &mut dyn FnMut()) -> Result<(), CommandError> {
    let models = fleet.leave(MOVE_LIMIT, wait);
    match models.is_empty() {
        true => Ok(()),
        false => Err(CommandError::NotMoved { models }),
    }
}

type Command = fn(&Fleet, &Value) -> Result<Value, CommandError>;

/// API keys: `keys`, `new_key`, `revoke_key`.
///
/// # Errors
/// An unusable or full key file, an invalid name, or an unknown id.
fn of_keys(file: &Path, command: &str, arguments: &Value) -> Result<Value, keys::Error> {
    let mut keys = Keys::open(file)?;
    let text = |name: &str| arguments[name].as_str().unwrap_or_default();
    Ok(match command {
        "new_key" => {
            let is_admin = arguments["admin"].as_bool().unwrap_or(false);
            let role = if is_admin {
                KeyRole::Admin
            } else {
                KeyRole::User
            };
            let (key, info) = keys.make(text("name"), role, unix_s())?;
            json!({ "key": key, "id": info.id })
        }
        "revoke_key" => json!({ "id": keys.revoke(text("id"))?.id }),
        _ => {
            let all: Vec<&KeyInfo> = keys.list().collect();
            json!({ "keys": all })
        }
    })
}

pub(crate) fn unix_s() -> u64 {
    let since = SystemTime::UNIX_EPOCH.elapsed();
    since.map_or(0, |since| since.as_secs())
}

/// Joins another cluster, or removes or revokes a machine of this one.
fn of_cluster(agent: &Agent, command: &str, arguments: &Value) -> Result<Value, CommandError> {
    let text = |name: &str| arguments[name].as_str().unwrap_or_default();
    let done = match command {
        "forget" => Some(agent.forget(text("node")).map(|_| json!({}))),
        "revoke" => Some(agent.revoke(text("node")).map(|told| json!(told))),
        _ => None,
    };
    if let Some(done) = done {
        return done.map_err(CommandError::other);
    }
    let code = Code::parse(text("code")).map_err(CommandError::other)?;
    let peer = Some(text("peer")).filter(|peer| !peer.is_empty());
    let joined = agent.join_by_code(&code, peer);
    let joined = joined.map_err(CommandError::other)?;
    Ok(serde_json::to_value(joined)?)
}

fn ask_load(fleet: &Fleet, arguments: &Value) -> Result<Value, CommandError> {
    let ids = fleet.load(&parse_load(arguments)?)?;
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    Ok(json!({ "id": ids.first(), "ids": ids }))
}

fn ask_preview(fleet: &Fleet, arguments: &Value) -> Result<Value, CommandError> {
    let preview = fleet.preview(&parse_load(arguments)?)?;
    Ok(serde_json::to_value(preview)?)
}

/// Parses a request; a field that is null counts as absent. A wrong field is reported before a
/// missing model.
fn parse_load(arguments: &Value) -> Result<LoadRequest, CommandError> {
    let mut arguments = arguments.clone();
    if let Some(fields) = arguments.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
    let request = LoadRequest::deserialize(arguments)?;
    match request.model.is_empty() {
        true => Err(CommandError::NoModel),
        false => Ok(request),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnloadArguments {
    model: String,
    replica: Option<u16>,
}

fn ask_unload(fleet: &Fleet, arguments: &Value) -> Result<Value, CommandError> {
    let UnloadArguments { model, replica } = UnloadArguments::deserialize(arguments)?;
    let count = fleet.unload(&model, replica)?;
    Ok(json!({ "unloaded": count }))
}

fn ask_using(fleet: &Fleet, arguments: &Value) -> Result<Value, CommandError> {
    let model = arguments["model"].as_str().unwrap_or_default();
    Ok(serde_json::to_value(fleet.using(model))?)
}

fn ask_ps(fleet: &Fleet, upstreams: Vec<Value>) -> Result<Value, CommandError> {
    let measured = fleet.ready().into_iter().map(|(id, it)| (id, it.guesses()));
    let measured: BTreeMap<String, DraftCounts> = measured.collect();
    let own = fleet.list().into_iter().map(|view| {
        let drafts = measured.get(&view.id).filter(|drafts| drafts.steps > 0);
        let mut told = json!(view);
        if let Some(drafts) = drafts {
            told["drafts"] = json!(drafts);
        }
        told
    });
    Ok(own.chain(upstreams).collect())
}

fn ask_trace(fleet: &Fleet, arguments: &Value) -> Result<Value, CommandError> {
    let ask: TraceRequest = serde_json::from_value(arguments.clone())?;
    Ok(serde_json::to_value(fleet.trace(&ask)?)?)
}

/// Path of a local model's file. Reads all of a stored model the first time.
fn find(home: &Home, name: &str) -> Result<PathBuf, CallbackError> {
    match paceline_store::resolve(home, name)? {
        paceline_store::Resolution::Path(found) => {
            check_first_use(home, &found)?;
            Ok(found.path)
        }
        _ => Err(format!("there is no model {name:?} on this machine").into()),
    }
}

fn sizes(path: &Path, config: &Config, wanted: &InstanceSpec) -> EngineConfig {
    let parallel = usize::from(wanted.options.parallel.max(1));
    let owner = wanted.nodes.first().map(|owner| wanted.class_of(*owner));
    let class = owner.and_then(|class| class.parse().ok());
    let machine = wanted.machine.as_ref();
    let kv = machine.and_then(|it| it.kv.as_ref()?.parse().ok());
    let pace = machine.and_then(|it| it.pace.parse().ok());
    let (form, available) = KvMemory::of_machine(class.unwrap_or_default(), kv);
    let memory = (form, wanted.options.memory.map(Bytes).or(available));
    let room = ContextBudget::of((path, config), memory, wanted.options.context, parallel);
    EngineConfig {
        max_running: parallel,
        max_waiting: WAITING_MAX,
        pace: pace.unwrap_or_default(),
        drafts: match wanted.options.drafts {
            Some(most) => most.into(),
            None if class.is_some_and(|class: KernelClass| class.is_mlx()) => 0, // not measured
            None => DRAFTS,
        },
        strict: wanted.options.strict,
        ..room.engine(&wanted.model)
    }
}

/// Registers instances at the HTTP API.
struct HttpAdmission {
    doors: ModelRegistry,
    templates: ChildProgram,
}

impl fleet::ModelRegistrar for HttpAdmission {
    fn open(
        &self,
        key: &str,
        (wanted, adapter): (&InstanceSpec, Option<&AdapterFile>),
        path: &Path,
        service: Arc<dyn Service>,
    ) -> Result<(), CallbackError> {
        let model = api_model::instance(path, wanted, &self.templates);
        let mut model = model.map_err(|error| chain(&error))?;
        if let Some(adapter) = adapter {
            let qualified = wanted.adapted(&adapter.name);
            (model.id, model.aliases) = match wanted.adapter_naming {
                AdapterNaming::Qualified => (qualified, Vec::new()),
                AdapterNaming::Bare => (adapter.name.clone(), vec![qualified]),
                AdapterNaming::Model => (model.id, model.aliases),
            };
            let digits = adapter.sha256.get(..8).unwrap_or_default();
            model.fingerprint = format!("{}-{digits}", model.fingerprint);
        }
        Ok(self.doors.register(key, model, service)?)
    }

    fn close(&self, key: &str) {
        self.doors.unregister(key);
    }

    fn set_unserved(&self, models: Vec<fleet::UnservedModel>) {
        let model = |fleet::UnservedModel { names, state }| UnservedModel {
            names,
            state: match state {
                fleet::UnservedState::Loading => UnservedState::Loading,
                fleet::UnservedState::Failed(reason) => UnservedState::Failed(reason),
                fleet::UnservedState::Elsewhere(at) => UnservedState::Elsewhere(at),
            },
        };
        self.doors
            .set_unserved(models.into_iter().map(model).collect());
    }

    fn journal(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>> {
        let own = self.doors.journals().release(id, key);
        own.or_else(|| self.doors.response(id, key))
    }
}

/// Mirrors journals of streamed responses through the fleet.
struct FleetMirror(Weak<Fleet>);

impl Mirror for FleetMirror {
    fn put(&self, piece: JournalPart, done: MirrorCallback) {
        let Some(fleet) = self.0.upgrade() else {
            return done(MirrorOutcome::No("the node is stopping".to_owned()));
        };
        let JournalPart { id, at, bytes } = piece;
        let kept = |kept| match kept {
            journals::JournalStored::Yes => MirrorOutcome::Yes,
            journals::JournalStored::Gap => MirrorOutcome::Gap,
            journals::JournalStored::No(reason) => MirrorOutcome::No(reason),
        };
        let piece = journals::ReplicatedSegment { id, at, bytes };
        fleet.keep(piece, Box::new(move |it| done(kept(it))));
    }

    fn find(&self, id: &str, key: Option<&str>) -> JournalMatch {
        let fleet = self.0.upgrade();
        match fleet.map(|fleet| fleet.find_journal(id, key)) {
            Some(journals::JournalSearch::Copy(bytes)) => JournalMatch::Copy(bytes),
            Some(journals::JournalSearch::Nowhere) | None => JournalMatch::Nowhere,
            Some(journals::JournalSearch::Unsure) => JournalMatch::Unsure,
        }
    }

    fn find_longer(&self, id: &str, key: Option<&str>, than: usize) -> Option<Vec<u8>> {
        self.0.upgrade()?.find_longer_journal(id, key, than)
    }
}

#[cfg(test)]
mod tests {
    use paceline_fleet::WeightDistribution;

    use super::*;

    #[test]
    fn a_command_that_takes_long_shows_that_it_works() {
        let (sign, signs) = mpsc::channel();
        let mut progress = |told: Value| sign.send(told).is_ok();
        let run = move || (signs.recv().unwrap(), signs.recv().unwrap());
        let told = awake(&mut progress, Duration::from_millis(1), run);
        assert_eq!(told, (Value::Null, Value::Null));
    }

    #[test]
    fn a_request_has_defaults_and_names_wrong_fields() {
        let body = json!({ "model": "m", "split": "2x1", "parallel": null, "weights": "shard" });
        let request = parse_load(&body).unwrap();
        assert_eq!((request.count, request.options.parallel), (None, 4));
        assert_eq!(request.split.to_string(), "2x1");
        assert_eq!(request.options.weights, WeightDistribution::Shard);
        for (field, value, told) in [
            ("model", Value::Null, "missing field `model`"),
            ("nods", json!(["a"]), "unknown field `nods`"),
            ("split", json!("half"), "half"),
            ("weights", json!("some"), "some"),
            ("parallel", json!(70_000), "70000"),
            ("threads", json!("all"), "all"),
        ] {
            let mut body = json!({ "model": "m" });
            body[field] = value;
            let reason = parse_load(&body).unwrap_err().to_string();
            assert!(reason.contains(told), "{field}: {reason}");
        }
        let misspelt = parse_load(&json!({ "modell": 1 })).unwrap_err().to_string();
        assert!(misspelt.contains("modell"), "{misspelt}");
    }
}
