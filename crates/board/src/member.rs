//! A node as a member of its cluster: its facts, and the file of API keys that all nodes share.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::thread::available_parallelism;

use paceline_base::KernelClass;
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::{Agent, Facts, KeyFile};
use paceline_serve::keys::Keys;
use paceline_tensor::InstructionSet;
use serde_json::{Value, json};

/// The facts of this machine as the node `name`, which computes in `class` by default.
pub fn facts(name: String, class: KernelClass) -> Facts {
    let best = InstructionSet::available().pop();
    Facts {
        name,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        numerics: paceline_node::NUMERICS,
        memory_bytes: machine::memory().map_or(0, |memory| memory.total.0),
        cores: available_parallelism().map_or(0, |cores| cores.get() as u32),
        kernel_class: class.name().to_owned(),
        instructions: best.map_or("scalar", InstructionSet::name).to_owned(),
        ..Facts::default()
    }
}

/// The name of this machine, without its domain.
pub fn host_name() -> String {
    let file = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = file.or_else(|| machine::first_line("hostname", &[]));
    let name = name.unwrap_or_default();
    name.trim().split('.').next().unwrap_or_default().to_owned()
}

/// The file of API keys, as the cluster shares it.
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
}

/// A node's report on its cluster.
pub fn cluster(agent: &Agent) -> Value {
    json!({
        "cluster": agent.cluster(),
        "nodes": agent.nodes_and_ways(),
        "problems": agent.problems(),
    })
}
