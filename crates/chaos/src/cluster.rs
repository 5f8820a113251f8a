//! A cluster of node processes on this machine, each with its own home and ports.

mod node_process;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use paceline_cluster::nodes::agent::local;
use paceline_model::SplitKind;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::faults::Fault;
use super::spaces::{self, Link, Spaces};
use super::streams::{ApiEndpoint, ClientRequest};
use super::{ProgramPaths, ProgressSink, streams};
use node_process::{NodeProcess, rot, signal, starve};

/// Time limit of a node's reply over its socket.
const ASK_LIMIT: Duration = Duration::from_secs(30);

/// Time limit for nodes to start and discover each other.
const MEET_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for a model to load, and to be copied to the other nodes.
const LOAD_LIMIT: Duration = Duration::from_secs(300);

/// Kills of a worker before its node must be left out.
const FLAPS: u32 = 3;

/// Pause between two kills of a worker.
const FLAP_PAUSE: Duration = Duration::from_millis(500);

/// Folder of the model. In namespaces the first node alone sees it, and others fetch copies.
const MODEL: &str = "model";

/// Length of a partition, and of bad links. A node is silent after 1.5 s and dead some 2 s later;
/// then another node owns its models.
const SPLIT_FOR: Duration = Duration::from_secs(5);

/// Time limit for detection of a worker's loss and recovery of the model.
const FLAP_LIMIT: Duration = Duration::from_secs(60);

/// A path between continents, which is a hundred times as slow as the model.
const DELAYED: Link = Link {
    delay_ms: 50,
    ..Link::GOOD
};

/// A bad DSL line.
const LIMITED: Link = Link {
    rate_kbit_s: 1000,
    ..Link::GOOD
};

/// A bad wireless network.
const LOSSY: Link = Link {
    loss_percent: 5,
    ..Link::GOOD
};

/// Distance of changed bytes in a file with bit rot: each group of a hash tree has some.
const ROT_EVERY: u64 = 32 << 10;

/// Time limit for the kernel to kill a worker without memory. It took 0.03 to 0.11 s, for busy and
/// idle workers (SmolLM2 over two and three nodes, two cores of an EPYC, 2026-11-26).
const STARVE_LIMIT: Duration = Duration::from_secs(5);

/// Polling interval.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// A cluster that ends, with its files, when this is dropped. Its nodes end with this process in
/// any case, and with the thread that called [`start`](Self::start) and [`heal`](Self::heal).
pub(crate) struct Cluster {
    nodes: Vec<NodeProcess>,
    /// The `load` request, repeated after nodes were lost.
    wanted: Value,
    stopped: Vec<Pid>,
    /// Networks and disks of the nodes; without, those of this machine.
    spaces: Option<Spaces>,
    /// Disconnected nodes.
    cut: Vec<usize>,
    /// Links without traffic.
    cut_links: Vec<(usize, usize)>,
    folder: TempDir,
    program: ProgramPaths,
    tell: ProgressSink,
}

/// A thread that waits until the ingress node reports its instance as disturbed.
pub(crate) struct FaultWatch {
    thread: JoinHandle<Option<Instant>>,
    /// The end of polling, once it is known.
    end: Arc<OnceLock<Instant>>,
}

impl FaultWatch {
    /// Time from `moment` to the node's report; `None` if it reports nothing within `grace`.
    pub(crate) fn since(self, moment: Instant, grace: Duration) -> Option<Duration> {
        let _ = self.end.set(Instant::now() + grace); // nobody else sets it
        let told = self.thread.join().ok()??;
        Some(told.saturating_duration_since(moment))
    }
}

impl Cluster {
    /// Starts `count` nodes that connect by address and join the first one's cluster. With `disk`,
    /// they are in namespaces, each with a disk of `disk` bytes.
    ///
    /// # Errors
    /// A node that does not start, or a failed system call.
    pub(crate) fn start(
        count: usize,
        disk: Option<u64>,
        program: ProgramPaths,
        tell: ProgressSink,
    ) -> Result<Self> {
        tell(&format!("{count} nodes form a cluster on this machine"));
        let folder = tempfile::Builder::new().prefix("pl-chaos").tempdir()?;
        fs::create_dir(folder.path().join(MODEL))?;
        let mut spaces = disk.map(|_| Spaces::new(count)).transpose()?;
        let nodes = (0..count)
            .map(|number| NodeProcess::new(folder.path(), number, spaces.as_ref()))
            .collect::<Result<Vec<NodeProcess>>>()?;
        if let (Some(spaces), Some(bytes)) = (&mut spaces, disk) {
            for node in &nodes {
                spaces.mount(&node.home, bytes)?;
            }
        }
        let mut cluster = Self {
            nodes,
            wanted: Value::Null,
            stopped: Vec::new(),
            spaces,
            cut: Vec::new(),
            cut_links: Vec::new(),
            folder,
            program,
            tell,
        };
        for number in 0..count {
            cluster.up(number)?;
        }
        cluster.join()?;
        Ok(cluster)
    }

    /// Starts the process of a node and waits until it replies.
    fn up(&mut self, number: usize) -> Result<()> {
        let host = match &self.spaces {
            Some(_) => spaces::address(0),
            None => Ipv4Addr::LOCALHOST,
        };
        let first = SocketAddr::from((host, self.nodes[0].control));
        let node = &mut self.nodes[number];
        node.start(&self.program, (number > 0).then_some(first))?;
        until(MEET_LIMIT, &format!("{} starts", node.name), || {
            node.check()?;
            Ok(node.request("nodes", json!({})).is_ok())
        })
    }

    fn join(&self) -> Result<()> {
        let key = self.nodes[0].request("token", json!({}))?; // {"token": ...}, as `join` takes it
        for node in &self.nodes[1..] {
            node.request("join", key.clone())?;
        }
        until(MEET_LIMIT, "all nodes see each other", || {
            Ok(self.is_whole())
        })
    }

    /// Whether each node sees all of them alive.
    fn is_whole(&self) -> bool {
        let sees_all = |node: &NodeProcess| {
            let told = node.request("nodes", json!({})).unwrap_or_default();
            let all = told["nodes"].as_array().into_iter().flatten();
            // A node that has returned takes work once its former life's facts are replaced.
            let works = |other: &&Value| other["state"] == "alive" && other["leaving"] != true;
            all.filter(works).count() == self.nodes.len()
        };
        self.nodes.iter().all(sees_all)
    }

    /// The node that reports the cluster's state: the last one without a fault.
    fn entry(&self) -> &NodeProcess {
        let runs = |node: &&NodeProcess| node.process.is_some() && !node.is_hit;
        let running = self.nodes.iter().rev().find(runs);
        running.unwrap_or_else(|| self.nodes.last().expect("a cluster has two nodes at least"))
    }

    /// The APIs of all nodes, beginning with node `first`.
    fn doors(&self, first: usize) -> Vec<ApiEndpoint> {
        let mut doors: Vec<ApiEndpoint> = self.nodes.iter().map(|node| node.api.clone()).collect();
        let len = doors.len();
        doors.rotate_left(first % len);
        doors
    }

    /// For each request the APIs to try; each begins at another node.
    pub(crate) fn clients(
        &self,
        requests: &[ClientRequest],
    ) -> Vec<(Vec<ApiEndpoint>, ClientRequest)> {
        let each = requests.iter().cloned().enumerate();
        each.map(|(number, request)| (self.doors(number), request))
            .collect()
    }

    pub(crate) fn name(&self, victim: usize) -> String {
        self.nodes[victim].name.clone()
    }

    /// Loads `model` over all nodes.
    pub(crate) fn load(
        &mut self,
        model: &Path,
        split: SplitKind,
        (threads, parallel, spare): (u16, u16, u16),
    ) -> Result<()> {
        let model =
            fs::canonicalize(model).with_context(|| format!("cannot find {}", model.display()))?;
        ensure!(
            model.is_file(),
            "{}: a cluster loads models of one GGUF file",
            model.display()
        );
        let model = match &self.spaces {
            Some(_) => self.place(&model)?,
            None => model,
        };
        self.wanted = json!({
            "model": model.to_str().context("the model's path is not UTF-8")?,
            "count": self.nodes.len(),
            "nodes": [],
            "split": split.to_string(),
            "threads": threads,
            "parallel": parallel,
            "spare": spare,
        });
        self.load_wanted()
    }

    /// Gives the model to the first node.
    fn place(&self, model: &Path) -> Result<PathBuf> {
        let name = model.file_name().context("the model has no name")?;
        let place = self.folder.path().join(MODEL).join(name);
        if fs::hard_link(model, &place).is_err() {
            let copied = fs::copy(model, &place); // another file system
            copied.with_context(|| format!("cannot copy to {}", place.display()))?;
        }
        Ok(place)
    }

    fn load_wanted(&self) -> Result<()> {
        (self.tell)("the model is loaded over all nodes");
        self.nodes[0].request("load", self.wanted.clone())?;
        self.ready(LOAD_LIMIT)
    }

    fn ready(&self, limit: Duration) -> Result<()> {
        until(limit, "the model is ready", || {
            let instance = self.instance()?;
            if instance["state"] == "failed" {
                bail!("the model cannot be loaded: {}", instance["reason"]);
            }
            let answers = |node: &NodeProcess| matches!(streams::model(&node.api), Ok(Some(_)));
            Ok(instance["state"] == "ready" && self.nodes.iter().all(answers))
        })
    }

    /// The only instance, as the ingress node sees it; null if there is none.
    fn instance(&self) -> Result<Value> {
        Ok(self.entry().request("ps", json!({}))?[0].clone())
    }

    /// Nodes of the instance: one that `fault` can hit, selected by `choice`, and another one.
    pub(crate) fn victims(&self, fault: Fault, choice: usize) -> Result<[usize; 2]> {
        let nodes = self.instance()?["nodes"].clone();
        let has = |node: &NodeProcess| {
            let all = nodes.as_array();
            all.is_some_and(|all| all.contains(&json!(node.name)))
        };
        let all = 0..self.nodes.len();
        let able: Vec<usize> = all.filter(|number| has(&self.nodes[*number])).collect();
        ensure!(able.len() > 1, "one node alone computes the model");
        let can_be_hit = |number: &usize| match fault {
            Fault::LoseInLoad => *number > 0, // the first node's command loads
            _ => !fault.is_of_copy() || !self.nodes[*number].copies().is_empty(),
        };
        let hit: Vec<usize> = able.iter().copied().filter(can_be_hit).collect();
        ensure!(!hit.is_empty(), "no node has a copy of the model");
        let first = hit[choice % hit.len()];
        let others: Vec<usize> = able.into_iter().filter(|it| *it != first).collect();
        Ok([first, others[choice / hit.len() % others.len()]])
    }

    /// Starts to poll a node other than `victims` for the moment at which it reports a fault.
    pub(crate) fn watch(&mut self, victims: &[usize]) -> Result<FaultWatch> {
        for victim in victims {
            self.nodes[*victim].is_hit = true;
        }
        let before = self.instance()?;
        let home = self.entry().home.clone();
        let end = Arc::new(OnceLock::<Instant>::new());
        let ends = end.clone();
        let thread = thread::spawn(move || {
            loop {
                let is_last = ends.get().is_some_and(|end| Instant::now() >= *end);
                // A node without a timely reply reports nothing, and is polled again.
                let told = local::ask(&home, "ps", json!({}), ASK_LIMIT, |_| {});
                let differs = |now: &Value| {
                    // The last catches a state that ended between two polls.
                    ["state", "epoch", "nodes", "since_unix_s"]
                        .iter()
                        .any(|name| now[name] != before[name])
                };
                if told.is_ok_and(|told| differs(&told[0])) {
                    return Some(Instant::now());
                }
                if is_last {
                    return None;
                }
                thread::sleep(ASK_EVERY / 4);
            }
        });
        Ok(FaultWatch { thread, end })
    }

    /// Applies `fault` to a node, and to its link to `other`.
    pub(crate) fn hit(&mut self, fault: Fault, [victim, other]: [usize; 2]) -> Result<()> {
        let node = &mut self.nodes[victim];
        match fault {
            Fault::CutPair => self.cut_links(&[(victim, other), (other, victim)]),
            Fault::CutOneWay => self.cut_links(&[(victim, other)]),
            Fault::DelayLinks => self.slow_links(victim, DELAYED),
            Fault::LimitLinks => self.slow_links(victim, LIMITED),
            Fault::LossyLinks => self.slow_links(victim, LOSSY),
            Fault::BitRot => node.damage(rot),
            Fault::CutFile => node.damage(|file| {
                let bytes = file.metadata()?.len();
                file.set_len(bytes / 2)
            }),
            Fault::KillNode | Fault::LoseInLoad => {
                node.kill();
                Ok(())
            }
            Fault::LeaveNode => {
                node.leaves = true;
                signal(&[node.pid()?], Signal::TERM)
            }
            Fault::Flap => self.flap(victim),
            Fault::CutNode => {
                self.cut.push(victim);
                self.spaces()?.connect(victim, false)
            }
            Fault::SplitNode => self.split(victim),
            Fault::FillDisk => node.fill(),
            Fault::OutOfMemory => starve(&node.workers()?),
            Fault::KillWorker => signal(&node.workers()?, Signal::KILL),
            Fault::HangWorker => signal(&node.workers()?, Signal::USR2),
            Fault::FreezeWorker => {
                let workers = node.workers()?;
                signal(&workers, Signal::STOP)?;
                self.stopped.extend(workers);
                Ok(())
            }
            Fault::FreezeNode => {
                let mut all = node.workers()?;
                all.insert(0, node.pid()?);
                signal(&all, Signal::STOP)?;
                self.stopped.extend(all);
                Ok(())
            }
        }
    }

    fn spaces(&self) -> Result<&Spaces> {
        let spaces = self.spaces.as_ref();
        spaces.context("no node has a network of its own")
    }

    /// Disconnects the node for a while: both halves declare the other one dead.
    fn split(&self, victim: usize) -> Result<()> {
        self.spaces()?.connect(victim, false)?;
        thread::sleep(SPLIT_FOR);
        self.spaces()?.connect(victim, true)
    }

    /// Makes all links of the node bad for a while.
    fn slow_links(&self, victim: usize, link: Link) -> Result<()> {
        self.spaces()?.set_all(victim, link)?;
        thread::sleep(SPLIT_FOR);
        self.spaces()?.set_all(victim, Link::GOOD)
    }

    fn cut_links(&mut self, links: &[(usize, usize)]) -> Result<()> {
        self.cut_links.extend(links);
        let spaces = self.spaces()?;
        links
            .iter()
            .try_for_each(|link| spaces.set(*link, Link::CUT))
    }

    /// Unloads the model and loads it again. `after` the start of the load, kills the worker of the
    /// node `victim`, or its process if it has no worker. Returns how long the load took.
    ///
    /// # Errors
    /// A load that fails, or takes longer than `limit`.
    pub(crate) fn lose_in_load(
        &mut self,
        (victim, after): (usize, Duration),
        spares_node: bool,
        limit: Duration,
    ) -> Result<Duration> {
        self.unload(limit)?;
        let (home, wanted) = (self.nodes[0].home.clone(), self.wanted.clone());
        let begun = Instant::now();
        let load = thread::spawn(move || local::ask(&home, "load", wanted, limit, |_| {}));
        thread::sleep(after);
        let workers = self.nodes[victim].workers().unwrap_or_default();
        match spares_node && !workers.is_empty() {
            true => signal(&workers, Signal::KILL)?,
            false => {
                self.nodes[victim].is_hit = true;
                self.nodes[victim].kill();
            }
        }
        let loaded = load.join().map_err(|_| anyhow!("a load panicked"))?;
        loaded.context("a node was lost while the model loaded")?;
        until(limit, "the model is ready", || {
            let instance = self.instance()?;
            if instance["state"] == "failed" {
                bail!("the model cannot be loaded: {}", instance["reason"]);
            }
            Ok(instance["state"] == "ready")
        })?;
        Ok(begun.elapsed())
    }

    fn unload(&self, limit: Duration) -> Result<()> {
        let name = self.instance()?["id"].clone();
        self.entry().request("unload", json!({ "model": name }))?;
        until(limit, "the model is unloaded", || {
            Ok(self.instance()?.is_null())
        })
    }

    /// Kills the node's worker until the node is left out.
    fn flap(&self, victim: usize) -> Result<()> {
        for _ in 0..FLAPS {
            let Some(before) = self.flapping(victim)? else {
                return Ok(());
            };
            signal(&before, Signal::KILL)?;
            // Ready by another worker: its loss may not be detected yet.
            until(FLAP_LIMIT, "the model answers again", || {
                let now = self.instance()?;
                let out = is_left_out(&now);
                let workers = self.nodes[victim].workers();
                let is_new = workers.is_ok_and(|workers| workers != before);
                Ok(now["state"] == "ready" && (out || is_new))
            })?;
            // Lets answers make some progress, so that no request sees only failures.
            thread::sleep(FLAP_PAUSE);
        }
        let instance = self.instance()?;
        ensure!(
            is_left_out(&instance),
            "{} failed {FLAPS} times and is not left out: {instance}",
            self.nodes[victim].name
        );
        Ok(())
    }

    /// The workers of a flapping node, once it has some: the model may run without the node for a
    /// moment. `None` once the node is left out.
    fn flapping(&self, victim: usize) -> Result<Option<Vec<Pid>>> {
        let mut workers = None;
        until(FLAP_LIMIT, "the node has a worker", || {
            if is_left_out(&self.instance()?) {
                workers = None;
                return Ok(true);
            }
            workers = self.nodes[victim].workers().ok();
            Ok(workers.is_some())
        })?;
        Ok(workers)
    }

    /// Resumes stopped processes, restarts killed ones, and waits until all nodes compute the model
    /// again.
    ///
    /// # Errors
    /// A cluster that does not recover within `limit`.
    pub(crate) fn heal(&mut self, limit: Duration) -> Result<()> {
        for pid in std::mem::take(&mut self.stopped) {
            let _ = kill_process(pid, Signal::CONT); // some were killed meanwhile
        }
        for victim in std::mem::take(&mut self.cut) {
            self.spaces()?.connect(victim, true)?;
        }
        for link in std::mem::take(&mut self.cut_links) {
            self.spaces()?.set(link, Link::GOOD)?;
        }
        for number in 0..self.nodes.len() {
            let _ = fs::remove_file(self.nodes[number].filler()); // most have none
            self.nodes[number].is_hit = false;
            self.nodes[number].end_left(limit)?;
            if self.nodes[number].process.is_none() {
                self.up(number)?;
            }
        }
        until(limit, "all nodes are back", || Ok(self.is_whole()))?;
        let whole = |instance: &Value| {
            let nodes = instance["nodes"].as_array().map_or(0, Vec::len);
            nodes == self.nodes.len()
        };
        let instance = self.instance()?;
        // A lost node that has returned is listed while another one still computes its part.
        let all_compute = self.nodes.iter().all(|node| node.workers().is_ok());
        if whole(&instance) && instance["reason"].is_null() && all_compute {
            return self.ready(limit);
        }
        self.unload(limit)?;
        self.load_wanted()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for pid in std::mem::take(&mut self.stopped) {
            let _ = kill_process(pid, Signal::CONT);
        }
        for node in &mut self.nodes {
            node.kill();
        }
        self.spaces = None; // disks first: what is on them goes with them
        if thread::panicking() {
            return;
        }
        let _ = fs::remove_dir_all(self.folder.path());
    }
}

/// Whether an instance runs without a node that failed too often.
fn is_left_out(instance: &Value) -> bool {
    let told = instance["reason"].as_str();
    told.is_some_and(|told| told.contains("left out"))
}

/// Polls `done` until it returns true.
///
/// # Errors
/// The first error of `done`; `what` if it takes longer than `limit`.
fn until(limit: Duration, what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !done()? {
        ensure!(begun.elapsed() < limit, "{what}: not within {limit:?}");
        thread::sleep(ASK_EVERY);
    }
    Ok(())
}
