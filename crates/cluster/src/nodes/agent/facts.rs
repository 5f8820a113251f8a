//! Facts of a node, and their presentation in a list of nodes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::super::discovery::DiscoveryMethod;
use super::super::member::Life;
use super::super::paths::Path;
use super::super::rdma::RdmaDevice;
use super::super::{NodeId, RegisterKey, Registers};

/// Version of the protocol between nodes. Raised when an older node would misunderstand.
pub const PROTOCOL: u32 = 5;

/// A node's description of itself, an entry of the shared map.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeFacts {
    pub name: String,
    /// Version of the program.
    pub build: String,
    /// [`PROTOCOL`] of the program.
    pub protocol: u32,
    pub numerics: u32,
    /// Main memory in bytes, 0 if the system does not report it.
    pub memory_bytes: u64,
    pub cores: u32,
    /// Default kernel class of the node.
    pub kernel_class: String,
    /// Instruction sets that the kernels use.
    pub instructions: String,
    /// Control port; filled in by the agent.
    pub port: u16,
    /// Random number of the process; filled in by the agent.
    pub boot: u64,
    /// Addresses that others may reach; filled in by the agent.
    pub addresses: Vec<IpAddr>,
    /// The only addresses for data between workers, with a dedicated data interface; filled in by
    /// the agent.
    pub data: Vec<IpAddr>,
    /// Names of interfaces on trusted networks, where data between workers needs no encryption.
    pub trusted: Vec<String>,
    /// Addresses of the HTTP API, set by [`Agent::set_api`](super::Agent::set_api).
    pub api: Vec<SocketAddr>,
    /// Whether the node is draining, so that it gets no work; set by
    /// [`Agent::set_leaving`](super::Agent::set_leaving).
    pub leaving: bool,
    /// Whether its owner lets users of the cluster run programs on it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub programs: bool,
    /// Devices of its engines, set by [`Agent::set_devices`](super::Agent::set_devices); empty
    /// until the node has listed them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<EngineDevice>,
    /// RDMA devices, set by [`Agent::set_rdma`](super::Agent::set_rdma).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rdma: Vec<RdmaDevice>,
}

/// A device on which an engine of a node computes, as `paceline engines` lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineDevice {
    /// Name of the engine: `cpu` or `mlx`.
    pub engine: String,
    /// `cpu` or `gpu`.
    pub kind: String,
    /// An instruction set, `metal`, `cuda` or `cpu`.
    pub backend: String,
    pub name: Option<String>,
    /// Memory that the device lends to this program, in bytes.
    pub memory_bytes: Option<u64>,
    /// All memory of a device, if `memory_bytes` is what is free there. Absent in facts of a node,
    /// where `memory_bytes` has the memory of its own ranks too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Why it cannot be used, if it cannot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// As `paceline engines --measure` has measured it; absent before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rates: Option<DeviceRates>,
}

/// Measured rates of a device in whole numbers: facts are compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceRates {
    /// Rates of products, by the form of the matrices.
    pub forms: Vec<FormRates>,
    /// Nanoseconds that an operation adds to an evaluation.
    pub operation_ns: u64,
    /// Nanoseconds from the request for a result until the processor can read it: what each
    /// exchange with other ranks costs besides the network.
    pub crossing_ns: u64,
}

/// Measured rates of products with matrices of one form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FormRates {
    /// Bits of a number with its part of a group's scale and bias.
    pub bits: u32,
    /// Whether the other factors are 32 bits wide, as in class `mlx-f32`; else 16.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wide: bool,
    /// Bytes of matrices a second with one row.
    pub reads: u64,
    /// Operations a second with many rows.
    pub computes: u64,
}

/// Compatibility of nodes: equal for nodes that compute together, also in different kernel
/// classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
#[display("revision {numerics} of the numbers, protocol {protocol}")]
pub struct Kind {
    /// As [`NodeFacts::protocol`].
    pub protocol: u32,
    /// As [`NodeFacts::numerics`].
    pub numerics: u32,
}

impl NodeFacts {
    /// Nodes of one kind compute together.
    pub const fn kind(&self) -> Kind {
        Kind {
            protocol: self.protocol,
            numerics: self.numerics,
        }
    }

    /// The usable devices of an engine that the node has listed.
    fn of_engine(&self, engine: &str) -> impl Iterator<Item = &EngineDevice> {
        let devices = self.devices.iter();
        devices.filter(move |device| device.engine == engine && device.problem.is_none())
    }

    /// Whether the node has listed a usable device of this engine.
    pub fn has_engine(&self, engine: &str) -> bool {
        self.of_engine(engine).next().is_some()
    }

    /// The first usable GPU of this engine that the node has listed.
    pub fn gpu(&self, engine: &str) -> Option<&EngineDevice> {
        self.of_engine(engine).find(|device| device.kind == "gpu")
    }

    /// Why the first device of this engine that cannot be used cannot.
    pub fn problem_of(&self, engine: &str) -> Option<&str> {
        let mut devices = self.devices.iter().filter(|device| device.engine == engine);
        devices.find_map(|device| device.problem.as_deref())
    }
}

/// A node as `paceline nodes` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    pub id: NodeId,
    pub state: Life,
    /// How this node discovered it: `self`, or a name of [`DiscoveryMethod`].
    pub found_by: String,
    /// All methods by which it was discovered, the best first.
    pub heard_by: Vec<DiscoveryMethod>,
    /// Whether there is a session with it.
    pub linked: bool,
    /// Milliseconds of its last answer to a ping of this node, while its answers are late; see
    /// [`Pace::late`](super::super::member::Pace::late).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_ms: Option<u64>,
    /// Its facts; only the name is set before they arrive. The name has a suffix if another node
    /// has the same, and comes from the id if the node has none.
    #[serde(flatten)]
    pub facts: NodeFacts,
}

impl NodeView {
    /// Whether the node's facts have arrived. Before, its name comes from its id.
    pub fn has_told(&self) -> bool {
        self.facts.protocol != 0
    }
}

/// A node with its measured network paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePaths {
    #[serde(flatten)]
    pub node: NodeView,
    pub paths: Vec<NetworkPath>,
}

/// A measured network path from a node to another, with names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkPath {
    /// Name of the other node.
    pub to_name: String,
    #[serde(flatten)]
    pub path: Path,
}

/// Paths with names, to known nodes.
pub(super) fn ways(paths: Vec<Path>, names: &BTreeMap<NodeId, String>) -> Vec<NetworkPath> {
    let named = paths.into_iter().filter_map(|path| {
        let to_name = names.get(&path.to)?.clone();
        Some(NetworkPath { to_name, path })
    });
    named.collect()
}

pub(super) fn all(map: &Registers) -> BTreeMap<NodeId, NodeFacts> {
    let facts = map.iter().filter_map(|(key, register)| {
        let RegisterKey::Node(id) = key else {
            return None;
        };
        let facts = serde_json::from_str(register.value.as_deref()?).ok()?;
        Some((*id, facts))
    });
    facts.collect()
}

pub(super) fn of(map: &Registers, id: NodeId) -> Option<NodeFacts> {
    serde_json::from_str(map.get(&RegisterKey::Node(id))?).ok()
}

/// Displayed names: a host name belongs to the lowest id that has it; the others get a suffix.
///
/// All nodes with the same map compute the same names.
pub(super) fn names(facts: &BTreeMap<NodeId, NodeFacts>) -> BTreeMap<NodeId, String> {
    distinct(facts.iter().map(|(id, facts)| (*id, &*facts.name)))
}

/// Displayed names of nodes with these host names: the first node of a name has it.
pub(super) fn distinct<'a>(
    plain: impl Iterator<Item = (NodeId, &'a str)>,
) -> BTreeMap<NodeId, String> {
    let mut taken = std::collections::BTreeSet::new();
    let name = |(id, name): (NodeId, &str)| {
        let plain = shown(name, id);
        let name = match taken.contains(&plain) {
            true => format!("{plain}-{}", &id.to_string()[..4]),
            false => plain,
        };
        taken.insert(name.clone());
        (id, name)
    };
    plain.map(name).collect()
}

/// A host name safe for a terminal, or the beginning of the id if there is none.
pub(super) fn shown(name: &str, id: NodeId) -> String {
    let is_harmless = |c: &char| c.is_alphanumeric() || "-_.".contains(*c);
    let clean: String = name.chars().filter(is_harmless).take(64).collect();
    match clean.is_empty() {
        true => format!("node-{}", &id.to_string()[..8]),
        false => clean,
    }
}

/// The JSON name of `how`.
pub(super) fn word(how: DiscoveryMethod) -> &'static str {
    match how {
        DiscoveryMethod::Beacon6 => "beacon6",
        DiscoveryMethod::Beacon4 => "beacon4",
        DiscoveryMethod::Mdns => "mdns",
        DiscoveryMethod::Peer => "peer",
        DiscoveryMethod::Incoming => "incoming",
        DiscoveryMethod::Told => "told",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_host_names_get_a_suffix() {
        let named = |name: &str| NodeFacts {
            name: name.to_owned(),
            ..NodeFacts::default()
        };
        let facts = BTreeMap::from([
            (NodeId([1; 16]), named("mini")),
            (NodeId([2; 16]), named("mini")),
            (NodeId([3; 16]), named("\x1b[2J")),
            (NodeId([4; 16]), named("")),
        ]);
        let names: Vec<String> = names(&facts).into_values().collect();
        assert_eq!(names, ["mini", "mini-0202", "2J", "node-04040404"]);
    }

    #[test]
    fn a_device_with_a_problem_is_no_engine() {
        let mut facts = NodeFacts {
            devices: vec![EngineDevice {
                engine: "mlx".to_owned(),
                kind: "gpu".to_owned(),
                ..EngineDevice::default()
            }],
            ..NodeFacts::default()
        };
        assert!(facts.has_engine("mlx") && facts.gpu("mlx").is_some());
        facts.devices[0].problem = Some("no driver".to_owned());
        assert!(!facts.has_engine("mlx") && facts.gpu("mlx").is_none());
        assert_eq!(facts.problem_of("mlx"), Some("no driver"));
    }
}
