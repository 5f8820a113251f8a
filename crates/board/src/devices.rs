//! Devices of nodes' engines, and the memory that models take there, for `/metrics` and the page.

use paceline_cluster::nodes::Registers;
use paceline_cluster::nodes::agent::{EngineDevice, NodeView};
use paceline_node::fleet::placed_bytes;
use paceline_serve::MetricSample;
use serde_json::Value;

use crate::label::label;

/// Metrics of each device of a node, grouped by name.
pub(crate) fn facts(node: &NodeView, map: &Registers) -> Vec<MetricSample> {
    let devices = &node.facts.devices;
    let placed = placed_bytes(map, node);
    let sample = |(name, help), device: &EngineDevice, bytes: u64| MetricSample {
        name,
        help,
        labels: labels(device),
        value: bytes as f64,
    };
    let lent = (
        "node_device_memory_bytes",
        "Memory that a device lends to models",
    );
    let used = (
        "node_device_placed_bytes",
        "Memory of a device that loaded models are planned to take",
    );
    let lends = devices
        .iter()
        .filter_map(|device| Some(sample(lent, device, device.memory_bytes?)));
    let uses = devices.iter().zip(placed);
    let uses = uses.map(|(device, bytes)| sample(used, device, bytes));
    lends.chain(uses).collect()
}

fn labels(device: &EngineDevice) -> String {
    let name = device.name.as_deref().unwrap_or_default();
    let all = [
        ("engine", &*device.engine),
        ("kind", &device.kind),
        ("backend", &device.backend),
        ("device", name),
    ];
    all.map(|(key, value)| label(key, value)).join(",")
}

/// Adds the memory that loaded models are planned to take to the devices of `told`, the JSON of
/// `node`.
pub(crate) fn add_placed(told: &mut Value, node: &NodeView, map: &Registers) {
    let devices = told["devices"].as_array_mut().into_iter().flatten();
    for (device, bytes) in devices.zip(placed_bytes(map, node)) {
        device["placed_bytes"] = bytes.into();
    }
}
