//! An instance of this machine's node, leased by a program until it ends.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_cluster::nodes::agent::local;
use paceline_engine::Service;
use paceline_model::SplitKind;
use paceline_node::fleet::LoadRequest;
use paceline_node::fleet::leases::LeasedInstance;
use serde_json::Value;

use crate::tables::{computing, counted};

/// Read timeout while a node loads; it reports five times a second.
const SILENCE: Duration = Duration::from_secs(60);

/// An instance on nodes that serves a program's requests.
#[derive(derive_more::Debug)]
#[debug("an instance on {}", self.on)]
pub struct NodeInstance {
    /// The model's file on this machine.
    pub path: PathBuf,
    /// Serves the requests.
    pub service: Arc<dyn Service>,
    pub nodes: u32,
    pub split: SplitKind,
    pub on: String,
    /// Unloads the instance on drop.
    _borrowed: Option<InstanceLease>,
}

impl NodeInstance {
    /// An instance from the node's description; a `lease` one is unloaded at the end.
    pub fn of(home: &Path, using: &Value, borrowed: Option<InstanceLease>) -> Self {
        let text = |name: &str| using[name].as_str().unwrap_or_default();
        let nodes = computing(using).len().max(1);
        Self {
            path: text("path").into(),
            service: Arc::new(LeasedInstance::new(home, text("id"))),
            nodes: u32::try_from(nodes).unwrap_or(1),
            split: text("split").parse().unwrap_or_default(),
            on: counted(using),
            _borrowed: borrowed,
        }
    }
}

/// Number of live nodes in a response to `nodes`.
pub fn alive(answer: &Value) -> u32 {
    let nodes = answer["nodes"].as_array().into_iter().flatten();
    let alive = nodes.filter(|node| node["state"] == "alive").count();
    u32::try_from(alive).unwrap_or(u32::MAX)
}

/// A lease: the instance is unloaded on drop, or when this process ends in any other way.
#[derive(Debug)]
pub struct InstanceLease {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl InstanceLease {
    /// Has the node of `home` load an instance. The receiver gets its state until it is ready.
    pub fn new(home: PathBuf, ask: &LoadRequest) -> io::Result<(Receiver<LeaseReport>, Self)> {
        let ask = serde_json::to_value(ask)?;
        let over = Arc::new(AtomicBool::new(false));
        let (sender, told) = channel();
        let own = Arc::clone(&over);
        let run = move || keep_loaded(&home, ask, &own, &sender);
        let thread = std::thread::Builder::new().name("borrow".to_owned());
        let thread = thread.spawn(run)?;
        let borrowed = Self {
            over,
            thread: Some(thread),
        };
        Ok((told, borrowed))
    }
}

/// A report on the instance, or the error that ends them.
pub type LeaseReport = Result<Value, local::Error>;

/// Holds the connection that keeps the instance loaded; reports until it is ready.
fn keep_loaded(home: &Path, ask: Value, over: &AtomicBool, sender: &Sender<LeaseReport>) {
    let outcome = local::ask_while(home, "borrow", ask, SILENCE, |view| {
        let _ = sender.send(Ok(view)); // nobody waits for it any more
        !over.load(Ordering::SeqCst)
    });
    let _ = sender.send(outcome);
}

impl Drop for InstanceLease {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result; it sees the end at the next report
        }
    }
}
