//! A node's cluster membership: its facts, and the shared file of API keys.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::thread::available_parallelism;

use paceline_auth::keys::Keys;
use paceline_base::KernelClass;
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::{Agent, KeyFile, NodeFacts};
use paceline_tensor::InstructionSet;
use serde_json::{Value, json};

/// This machine's facts as the node `name`, with default kernel class `class`.
pub fn facts(name: String, class: KernelClass) -> NodeFacts {
    let best = InstructionSet::available().pop();
    NodeFacts {
        name,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        numerics: paceline_worker::NUMERICS,
        memory_bytes: machine::memory().map_or(0, |memory| memory.total.0),
        cores: available_parallelism().map_or(0, |cores| cores.get() as u32),
        kernel_class: class.name().to_owned(),
        instructions: best.map_or("scalar", InstructionSet::name).to_owned(),
        ..NodeFacts::default()
    }
}

/// The host name, without its domain.
pub fn host_name() -> String {
    let file = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = file.or_else(|| machine::first_line("hostname", &[]));
    let name = name.unwrap_or_default();
    name.trim().split('.').next().unwrap_or_default().to_owned()
}

/// The file of API keys, shared by the cluster.
#[derive(Clone, Debug)]
pub struct ApiKeys(pub PathBuf);

impl KeyFile for ApiKeys {
    fn read(&self) -> io::Result<BTreeMap<String, String>> {
        let keys = Keys::open(&self.0).map_err(io::Error::other)?;
        Ok(keys.entries())
    }

    fn write(&self, entries: &BTreeMap<String, String>) -> io::Result<()> {
        let mut keys = Keys::open(&self.0).map_err(io::Error::other)?;
        keys.replace_entries(entries).map_err(io::Error::other)
    }

    fn restrict(&self, id: &str, entry: &str) -> Option<String> {
        paceline_auth::keys::restricted(id, entry)
    }
}

/// A node's report on its cluster, as JSON.
pub fn cluster(agent: &Agent) -> Value {
    json!({
        "cluster": agent.cluster(),
        "nodes": agent.nodes_and_ways(),
        "problems": agent.problems(),
    })
}
