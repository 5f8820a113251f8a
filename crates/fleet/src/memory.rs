//! Memory of a machine: what records of instances place there, and what is left for others.

use paceline_base::Bytes;
use paceline_cluster::nodes::agent::{EngineDevice, NodeFacts, NodeView};
use paceline_cluster::nodes::{NodeId, Registers};

use crate::{InstanceSpec, specs};

/// Memory of packed weights as a multiple of their files' bytes.
pub const WEIGHTS: f64 = 1.2;

/// Fraction of a machine's memory for models: the rest is for the system and other programs.
pub const USABLE: f64 = 0.8;

/// Fraction of a machine's memory for models and automatic standbys together.
pub const AUTO_USABLE: f64 = 0.5;

/// Bytes of an instance's weights in the form of its engines.
pub fn weight_bytes(wanted: &InstanceSpec) -> u64 {
    match wanted.weight_bytes {
        0 => (wanted.bytes as f64 * WEIGHTS) as u64,
        bytes => bytes,
    }
}

/// Bytes that each of `ranks` ranks needs for its weights, keys and values, as if all parts were
/// equal. Previews, loads, placements and admissions compare them with [`room`]. At most what the
/// instance may have of a node's memory.
pub fn part_bytes(wanted: &InstanceSpec, ranks: usize) -> u64 {
    within_limit(wanted, whole_bytes(wanted) / ranks.max(1) as u64)
}

/// Bytes of all ranks for weights, keys and values, in memory or on disk.
fn whole_bytes(wanted: &InstanceSpec) -> u64 {
    weight_bytes(wanted) + wanted.cache_bytes
}

/// Of a part's bytes those in memory; the rest is read from disk.
fn within_limit(wanted: &InstanceSpec, part: u64) -> u64 {
    part.min(wanted.options.memory.unwrap_or(u64::MAX))
}

/// A node has too little memory for a part of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node}: too little memory: its part needs {part}, and {room} are free")]
pub struct NoRoom {
    pub node: String,
    pub part: Bytes,
    pub room: Bytes,
}

/// Bytes for models in the memory in which a node has ranks on MLX or on the CPU; 0 if unknown.
/// A GPU's are those that it lends, by which a worker is admitted. Otherwise they are a part of
/// main memory; MLX on a processor may lend less.
pub fn usable(view: &NodeView, is_on_mlx: bool) -> u64 {
    let main = (view.facts.memory_bytes as f64 * USABLE) as u64;
    let device = mlx_device(&view.facts).filter(|_| is_on_mlx);
    match device.and_then(|device| Some((device.kind == "gpu", device.memory_bytes?))) {
        Some((true, lent)) => lent,
        Some((false, lent)) if main > 0 => lent.min(main),
        _ => main,
    }
}

/// The device on which MLX computes on a node: a GPU, else the processor.
pub fn mlx_device(facts: &NodeFacts) -> Option<&EngineDevice> {
    let is_usable = |device: &&EngineDevice| device.engine == "mlx" && device.problem.is_none();
    let processor = facts.devices.iter().find(is_usable);
    facts.gpu("mlx").or(processor)
}

/// Whether a node has ranks on MLX, or on the CPU, and others in one memory. A GPU has its own, but
/// on a Mac.
pub fn is_one_memory(view: &NodeView, is_on_mlx: bool, other: bool) -> bool {
    let gpu = view.facts.gpu("mlx");
    let is_apart = gpu.is_some_and(|gpu| gpu.backend != "metal");
    !is_apart || is_on_mlx == other
}

/// Free bytes for a rank on MLX or on the CPU of a node after the parts of `records`. Unlimited if
/// the node does not report its memory.
pub fn room(view: &NodeView, is_on_mlx: bool, records: &[InstanceSpec]) -> u64 {
    match usable(view, is_on_mlx) {
        0 => u64::MAX,
        usable => usable.saturating_sub(held(records, view, is_on_mlx)),
    }
}

/// Bytes of a node's parts by all records, in the memory of ranks on MLX or on the CPU.
pub fn held(records: &[InstanceSpec], view: &NodeView, is_on_mlx: bool) -> u64 {
    let records = records.iter();
    let records = records.filter(|it| is_one_memory(view, is_on_mlx, it.is_on_mlx(view.id)));
    let held = records.map(|other| held_bytes(other, view.id));
    held.fold(0, u64::saturating_add)
}

/// The records of all instances.
pub fn all_records(map: &Registers) -> Vec<InstanceSpec> {
    specs(map).map(|(.., wanted)| wanted).collect()
}

/// Bytes of a node's part by one record: as decode node, as prefill node, or 0.
pub fn held_bytes(wanted: &InstanceSpec, id: NodeId) -> u64 {
    let decodes = wanted.nodes.contains(&id).then(|| own_part(wanted, id));
    let prompts = wanted.prompts.contains(&id);
    let reads = prompts.then(|| part_bytes(wanted, wanted.prompts.len()));
    decodes.unwrap_or(0).saturating_add(reads.unwrap_or(0))
}

/// Bytes of the part of one of a record's nodes: as planned for these nodes, else by its shares.
pub fn own_part(wanted: &InstanceSpec, id: NodeId) -> u64 {
    let is_planned = |id: &NodeId| wanted.needs.contains_key(id);
    let are_all = wanted.needs.len() == wanted.nodes.len() && wanted.nodes.iter().all(is_planned);
    match wanted.needs.get(&id).filter(|_| are_all) {
        Some(bytes) => *bytes,
        None => within_limit(wanted, share_bytes(wanted, id)),
    }
}

/// Bytes that a node of a record reads from its disk, because they are beyond the limit of memory.
/// About: ranks are taken to hold weights in proportion to their shares, and the memory of the
/// program itself is not counted.
pub fn disk_bytes(wanted: &InstanceSpec, id: NodeId) -> u64 {
    let part = share_bytes(wanted, id);
    part - within_limit(wanted, part)
}

/// Bytes of a node's part by its share of the instance, in memory or on disk.
fn share_bytes(wanted: &InstanceSpec, id: NodeId) -> u64 {
    let shares = wanted.nodes.iter().map(|id| wanted.shares.get(id).copied());
    let all = shares.sum::<Option<u32>>().filter(|all| *all > 0);
    match (all, wanted.shares.get(&id)) {
        (Some(all), Some(share)) => {
            (whole_bytes(wanted) as f64 * f64::from(*share) / f64::from(all)) as u64
        }
        _ => whole_bytes(wanted) / wanted.nodes.len().max(1) as u64,
    }
}

/// Bytes that the records of instances place on each device of a node, in the order of its facts.
/// An engine computes on its GPU where it has one.
pub fn placed_bytes(map: &Registers, view: &NodeView) -> Vec<u64> {
    placed(&all_records(map), view)
}

pub fn placed(records: &[InstanceSpec], view: &NodeView) -> Vec<u64> {
    let facts = &view.facts;
    let bytes = |device: &EngineDevice| {
        let is_used = device.kind == "gpu" || facts.gpu(&device.engine).is_none();
        let is_mlx = device.engine == "mlx";
        let own = records.iter().filter(|it| it.is_on_mlx(view.id) == is_mlx);
        let bytes = own.map(|it| held_bytes(it, view.id));
        bytes.filter(|_| is_used).fold(0, u64::saturating_add)
    };
    facts.devices.iter().map(bytes).collect()
}

/// The devices of a node as its facts have them. To what is free on a device belongs what its own
/// models hold: what the records place there, at most what is not free. A model that a record has
/// and that is still loading counts by the memory of other programs, until the next listing.
pub fn lent_devices(map: &Registers, view: &NodeView) -> Vec<EngineDevice> {
    lent(&all_records(map), view)
}

pub fn lent(records: &[InstanceSpec], view: &NodeView) -> Vec<EngineDevice> {
    let lent = |device: &EngineDevice| {
        let mut device = device.clone();
        if let (Some(free), Some(total)) = (device.memory_bytes, device.total_bytes.take()) {
            let held = held(records, view, device.engine == "mlx");
            device.memory_bytes = Some(free.saturating_add(held).min(total));
        }
        device
    };
    view.facts.devices.iter().map(lent).collect()
}

/// Whether a shard fits into `usable` bytes in addition to `held` ones; true for a node that does
/// not report its memory.
pub const fn fits(usable: u64, held: u64, shard: u64) -> bool {
    usable == 0 || held.saturating_add(shard) <= usable
}

#[cfg(test)]
mod tests {
    use paceline_cluster::nodes::member::Life;

    use super::*;

    const GB: u64 = 1_000_000_000;

    fn node() -> NodeView {
        NodeView {
            id: NodeId([1; 16]),
            state: Life::Alive,
            found_by: String::new(),
            heard_by: Vec::new(),
            linked: true,
            slow_ms: None,
            facts: NodeFacts::default(),
        }
    }

    #[test]
    fn instances_on_one_device_see_each_other() {
        let view = |backend: &str| {
            let device = |engine: &str, kind: &str, gb: u64| EngineDevice {
                engine: engine.to_owned(),
                kind: kind.to_owned(),
                backend: backend.to_owned(),
                memory_bytes: Some(gb * GB),
                ..EngineDevice::default()
            };
            let mut view = node();
            view.facts.memory_bytes = 64 * GB;
            view.facts.devices = vec![
                device("cpu", "cpu", 60),
                device("mlx", "cpu", 50),
                device("mlx", "gpu", 24),
            ];
            view
        };
        let on = |class: &str, bytes: u64| InstanceSpec {
            bytes,
            nodes: vec![NodeId([1; 16])],
            class: class.to_owned(),
            ..InstanceSpec::default()
        };
        let (gpu, cpu) = (on("mlx", 10 * GB), on("", 20 * GB));
        let records = [gpu.clone(), cpu.clone()];
        let rooms = |backend: &str| {
            let view = view(backend);
            [true, false].map(|is_on_mlx| room(&view, is_on_mlx, &records) / (GB / 10))
        };
        // 24 GB without 1.2 times 10, and 0.8 of 64 GB without 1.2 times 20.
        assert_eq!(rooms("cuda"), [120, 272]);
        assert_eq!(rooms("metal"), [0, 152], "one memory for both");
        let mut small = view("cpu");
        small.facts.devices.pop();
        assert_eq!(
            usable(&small, true),
            50 * GB,
            "what MLX lends of 0.8 of 64 GB"
        );

        let placed = placed(&records, &view("cuda"));
        assert_eq!(placed, [24 * GB, 0, 12 * GB]);

        // A card that states 24 GB in all and what is free. In turn: without the models of the
        // records, with them, with 3 GB of another program, during a load, almost full.
        let card = |free: u64, records: &[InstanceSpec]| {
            let mut view = view("cuda");
            view.facts.devices[2].memory_bytes = Some(free * GB);
            view.facts.devices[2].total_bytes = Some(24 * GB);
            view.facts.devices = lent(records, &view);
            let [.., gpu] = &view.facts.devices[..] else {
                panic!("{:?}", view.facts.devices)
            };
            assert_eq!(gpu.total_bytes, None);
            (
                gpu.memory_bytes.unwrap() / GB,
                room(&view, true, records) / GB,
            )
        };
        assert_eq!(card(24, &[]), (24, 24));
        assert_eq!(card(12, &records), (24, 12), "listed with its model");
        assert_eq!(card(9, &records), (21, 9), "another program has 3 GB");
        assert_eq!(card(24, &records), (24, 12), "still loading");
        assert_eq!(card(2, &records), (14, 2), "another program has 10 GB");
    }

    #[test]
    fn a_shard_fits_beside_what_a_node_holds() {
        assert!(fits(800, 700, 100));
        assert!(!fits(800, 701, 100));
        assert!(!fits(1000, u64::MAX, 1));
        assert!(fits(0, 700, 100), "it does not tell");
    }
}
