//! RDMA devices of nodes, the cables between them, and a machine's trust in its cables.
//!
//! A cable is a pair of devices of two nodes whose interfaces reach each other. RDMA encrypts
//! nothing, so that a cable carries data of workers only where both nodes trust it. The trust is a
//! file of each machine: no other member can write it.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use super::NodeId;
use super::paths::Path;

/// Most devices in a node's facts: twice the ports of a Mac Studio.
pub const DEVICES_MAX: usize = 16;

/// Most cables between two nodes: those that a group uses (`paceline_comm_rdma::CABLES_MAX`).
const CABLES_MAX: usize = 4;

/// Longest name of a device or an interface (Linux: 63 and 15 bytes), and longest problem.
const NAME_BYTES_MAX: usize = 64;
const PROBLEM_BYTES_MAX: usize = 300;

/// Most cables that a machine trusts.
pub(super) const TRUSTED_MAX: usize = 64;

/// An RDMA device of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RdmaDevice {
    /// Its name in the verbs library.
    pub name: String,
    /// Its network interface; empty if unknown.
    pub interface: String,
    pub address: Option<Ipv4Addr>,
    /// Its rate in Mbit/s, if the driver reports one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mbit_per_s: Option<u32>,
    /// Why it is unusable: its port is down, or a setting is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Nodes to which the machine trusts its cables; filled in by the agent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trusted: Vec<NodeId>,
}

/// At most [`DEVICES_MAX`] devices with names and texts of bounded length, sorted by name.
pub(super) fn bounded(mut devices: Vec<RdmaDevice>) -> Vec<RdmaDevice> {
    let is_short = |text: &str| text.len() <= NAME_BYTES_MAX;
    devices.retain(|device| is_short(&device.name) && is_short(&device.interface));
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    devices.truncate(DEVICES_MAX);
    for problem in devices.iter_mut().filter_map(|it| it.problem.as_mut()) {
        let end = problem.floor_char_boundary(PROBLEM_BYTES_MAX);
        problem.truncate(end);
    }
    devices
}

/// A node with its devices and its measured paths.
#[derive(Clone, Copy, Debug)]
pub struct CableEnd<'a> {
    pub node: NodeId,
    pub devices: &'a [RdmaDevice],
    pub paths: &'a [Path],
}

impl CableEnd<'_> {
    fn reaches(&self, device: &RdmaDevice, there: NodeId, other: &RdmaDevice) -> bool {
        let Some(address) = other.address else {
            return false;
        };
        let leads_there = |path: &Path| {
            let is_over = path.up && path.to == there && path.interface == device.interface;
            is_over && path.remote.ip().to_canonical() == IpAddr::V4(address)
        };
        !device.interface.is_empty() && self.paths.iter().any(leads_there)
    }
}

/// A cable between two nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cable {
    pub devices: [String; 2],
    pub trusted: [bool; 2],
}

/// The cables between two nodes, at most four: devices whose interfaces reach each other by a
/// measured path of either node. A device is at the end of one cable.
pub fn cables(a: CableEnd<'_>, b: CableEnd<'_>) -> Vec<Cable> {
    let mut taken = BTreeSet::new();
    let mut cables = Vec::new();
    for device in a.devices.iter().filter(|device| device.problem.is_none()) {
        let is_end = |other: &&RdmaDevice| {
            let reaches = || a.reaches(device, b.node, other) || b.reaches(other, a.node, device);
            other.problem.is_none() && !taken.contains(&other.name) && reaches()
        };
        let Some(other) = b.devices.iter().find(is_end) else {
            continue;
        };
        taken.insert(&other.name);
        cables.push(Cable {
            devices: [device.name.clone(), other.name.clone()],
            trusted: [
                device.trusted.contains(&b.node),
                other.trusted.contains(&a.node),
            ],
        });
    }
    cables.truncate(CABLES_MAX);
    cables
}

/// A cable of this machine, as `paceline nodes trust` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CableView {
    /// Its name here: the device, a colon, and the other node's name.
    pub link: String,
    /// Its name on the other node.
    pub other: String,
    /// Whether this machine trusts it.
    pub here: bool,
    /// Whether the other node says that it does.
    pub there: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);

    fn device(name: &str, address: [u8; 4]) -> RdmaDevice {
        RdmaDevice {
            name: format!("rdma_{name}"),
            interface: name.to_owned(),
            address: Some(address.into()),
            ..RdmaDevice::default()
        }
    }

    fn path(to: NodeId, interface: &str, remote: [u8; 4]) -> Path {
        Path {
            to,
            interface: interface.to_owned(),
            local: IpAddr::from([0; 4]),
            remote: (remote, 52416).into(),
            latency_us: 50,
            bytes_per_s: None,
            up: true,
            preferred: false,
        }
    }

    fn pairs(a: (&[RdmaDevice], &[Path]), b: (&[RdmaDevice], &[Path])) -> Vec<String> {
        let end = |node, (devices, paths)| CableEnd {
            node,
            devices,
            paths,
        };
        let cables = cables(end(A, a), end(B, b)).into_iter();
        cables.map(|it| it.devices.join(" ")).collect()
    }

    #[test]
    fn cables_are_devices_whose_interfaces_reach_each_other() {
        let ours = [
            device("en3", [192, 168, 0, 1]),
            device("en4", [192, 168, 0, 5]),
        ];
        let mut theirs = [
            device("en3", [192, 168, 0, 6]),
            device("en5", [192, 168, 0, 2]),
        ];
        let there = [
            path(B, "en0", [10, 0, 0, 2]),
            path(B, "en3", [192, 168, 0, 2]),
            path(B, "en4", [192, 168, 0, 6]),
        ];
        let crossed = ["rdma_en3 rdma_en5", "rdma_en4 rdma_en3"];
        assert_eq!(pairs((&ours, &there), (&theirs, &[])), crossed);
        let back = [
            path(A, "en5", [192, 168, 0, 1]),
            path(A, "en3", [192, 168, 0, 5]),
        ];
        assert_eq!(pairs((&ours, &[]), (&theirs, &back)), crossed);
        let mut down = there.clone();
        down[1].up = false;
        assert_eq!(pairs((&ours, &down), (&theirs, &[])), crossed[1..]);
        theirs[0].problem = Some("port 1 is down".to_owned());
        assert_eq!(pairs((&ours, &there), (&theirs, &[])), crossed[..1]);
        assert_eq!(pairs((&ours, &there[..1]), (&theirs, &[])), [""; 0]);
    }

    #[test]
    fn a_switch_gives_each_device_one_cable_to_a_peer() {
        let end = |host: u8| -> Vec<RdmaDevice> {
            let one = |at: u8| device(&format!("eth{at}"), [10, 0, host, at]);
            (0..6).map(one).collect()
        };
        let all = |host: u8| -> Vec<Path> {
            let one = |from: u8, to: u8| path(B, &format!("eth{from}"), [10, 0, host, to]);
            (0..6)
                .flat_map(|from| (0..6).map(move |to| one(from, to)))
                .collect()
        };
        let found = pairs((&end(1), &all(2)), (&end(2), &[]));
        let expected = ["0", "1", "2", "3"].map(|at| format!("rdma_eth{at} rdma_eth{at}"));
        assert_eq!(found, expected);
    }

    #[test]
    fn facts_are_bounded() {
        let long = RdmaDevice {
            problem: Some("ä".repeat(1000)),
            ..device("en1", [10, 0, 0, 1])
        };
        let mut many = vec![device(&"x".repeat(70), [0; 4]), long];
        many.extend((0..30).map(|at| device(&format!("en{at:02}"), [10, 0, 0, at])));
        let kept = bounded(many);
        assert_eq!(kept.len(), DEVICES_MAX);
        assert!(kept.iter().all(|it| it.name.len() < 70));
        let trusted = vec![A; TRUSTED_MAX];
        let full = kept.into_iter().map(|it| RdmaDevice {
            name: "x".repeat(64),
            interface: "x".repeat(64),
            problem: Some("x".repeat(PROBLEM_BYTES_MAX)),
            ..it
        });
        let mut full: Vec<RdmaDevice> = full.collect();
        full[0].trusted = trusted;
        let bytes = serde_json::to_string(&full).unwrap().len();
        assert!(
            bytes < super::super::registers::VALUE_BYTES_MAX - 4096,
            "{bytes}"
        );
    }
}
