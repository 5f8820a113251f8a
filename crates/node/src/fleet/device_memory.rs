//! Memory of an instance's ranks on the devices of MLX, and the positions that the nodes' memory
//! allows. A worker admits its rank by the same sum.

use std::collections::BTreeMap;
use std::iter::zip;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_cluster::nodes::NodeId;
use paceline_engine::EngineConfig;
use paceline_fleet::InstanceId;
use paceline_fleet::InstanceSpec;
use paceline_model::{Config, ModelSource, Split, SplitKind};
use paceline_model_mlx::MlxRankBytes;
use paceline_tensor::KvType;

use super::Inner;
use super::engines::shares_by_memory;
use crate::PreparedModel;
use crate::context_size::{ContextBudget, KvMemory, needed_positions};
use paceline_fleet::memory::{own_part, part_bytes, weight_bytes};
use paceline_worker::load::mlx_rank_bytes;

/// Ranks on MLX take more memory than the devices of their nodes have to spare.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{model} does not fit the devices of its nodes: {}", told(.nodes))]
pub(super) struct DevicesTooSmall {
    model: String,
    nodes: Vec<NodeNeed>,
}

/// A model's files and its shape.
pub(super) type OpenModel<'a> = (&'a ModelSource, &'a Config);

/// Bytes that the ranks of a node take, and bytes to spare there.
#[derive(Debug, PartialEq, Eq)]
struct NodeNeed {
    name: String,
    needed: MlxRankBytes,
    room: u64,
}

fn told(nodes: &[NodeNeed]) -> String {
    let told = nodes.iter().map(|NodeNeed { name, needed, room }| {
        let MlxRankBytes {
            weights,
            cache,
            step,
        } = needed;
        format!(
            "{name} needs {} (weights {weights}, keys and values {cache}, a step {step}) and has {}",
            needed.total(),
            Bytes(*room)
        )
    });
    told.collect::<Vec<_>>().join("; ")
}

/// Bytes of the weights, and of keys and values at the positions that it needs, of an instance with
/// ranks on MLX. 0 on the CPU, and for a model without a cache.
fn device_bytes((source, config): OpenModel<'_>, record: &InstanceSpec) -> (u64, u64) {
    let mut nodes = record.nodes.iter().chain(&record.prompts);
    let on_mlx = nodes.find(|id| record.is_on_mlx(**id));
    let class = on_mlx.and_then(|id| record.class_of(*id).parse().ok());
    let planned = class.and_then(|class| {
        let sizes = needed_sizes(config, record);
        let whole = (&Split::whole(config), Rank(0), (class, kv_of(record)));
        mlx_rank_bytes((source, config), whole, (&sizes, &[])).ok() // its load says why
    });
    planned.map_or((0, 0), |bytes| (bytes.weights.0, bytes.cache.0))
}

/// The type of keys and values that was asked for.
fn kv_of(record: &InstanceSpec) -> Option<KvType> {
    let kv = record.machine.as_ref().and_then(|it| it.kv.as_deref());
    kv.and_then(|kv| kv.parse().ok())
}

fn needed_sizes(config: &Config, record: &InstanceSpec) -> EngineConfig {
    EngineConfig {
        max_running: usize::from(record.options.parallel.max(1)),
        ..EngineConfig::single("", needed_positions(config, &record.options))
    }
}

/// Bytes for all ranks together where each has its share of them. `rooms` are the bytes for each
/// node; without `shares` all are equal. Unlimited nodes limit nothing.
fn for_all(rooms: &[u64], shares: &[u32]) -> Option<u64> {
    let share = |place: usize| f64::from(shares.get(place).copied().unwrap_or(1));
    let all: f64 = (0..rooms.len()).map(share).sum();
    let known = rooms
        .iter()
        .enumerate()
        .filter(|(_, room)| **room != u64::MAX);
    let each = known.map(|(place, room)| (*room as f64 / share(place).max(1.0) * all) as u64);
    each.min()
}

impl Inner {
    /// Sizes of an engine over several nodes, whose positions are those for which each node has the
    /// memory. Unchanged where the positions were asked for.
    pub(super) fn within_nodes(
        &self,
        (id, wanted): (InstanceId, &InstanceSpec),
        config: &Config,
        sizes: EngineConfig,
    ) -> EngineConfig {
        if wanted.nodes.len() < 2 || wanted.options.context.is_some() {
            return sizes;
        }
        let rooms = self.rooms_beside(Some(id), wanted);
        let limit = wanted.options.memory.unwrap_or(u64::MAX);
        let room = |id: &NodeId| rooms.get(id).copied().unwrap_or(u64::MAX).min(limit);
        let rooms: Vec<u64> = wanted.nodes.iter().map(room).collect();
        let shares = wanted.nodes.iter().map(|id| wanted.shares.get(id).copied());
        let shares: Option<Vec<u32>> = shares.collect();
        let Some(memory) = for_all(&rooms, &shares.unwrap_or_default()) else {
            return sizes;
        };
        let kv = kv_of(wanted);
        let form = |id: &NodeId| {
            let class: KernelClass = wanted.class_of(*id).parse().unwrap_or_default();
            match class.is_mlx() {
                true => KvMemory::Device(class, kv),
                false => KvMemory::Main(kv.unwrap_or(KvType::of(class))),
            }
        };
        let page_bytes = wanted.nodes.iter().map(|id| form(id).page_bytes(config));
        let left = Bytes(memory.saturating_sub(weight_bytes(wanted)));
        let room = ContextBudget::within(
            config.context,
            page_bytes.max().unwrap_or(0),
            Some(left),
            sizes.max_running,
        );
        EngineConfig {
            context: room.context,
            cache_positions: room.all,
            ..sizes
        }
    }

    /// Checks that each node has memory for its ranks on MLX.
    ///
    /// # Errors
    /// [`DevicesTooSmall`] as text, and what is wrong with the files.
    pub(super) fn check_devices(
        &self,
        (id, wanted): (InstanceId, &InstanceSpec),
        prepared: &PreparedModel,
    ) -> Result<(), String> {
        let rooms = self.rooms_named(Some(id), wanted);
        let groups = [
            Some((prepared, &wanted.nodes)),
            prepared.prompts().map(|prompts| (prompts, &wanted.prompts)),
        ];
        for (model, nodes) in groups.into_iter().flatten() {
            let bytes = model.device_bytes().map_err(|error| error.to_string())?;
            let needs = by_node(nodes, &bytes, wanted.options.memory);
            let fit = fit_devices(&wanted.model, needs, &rooms);
            fit.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// The memory that other instances leave on each node.
    pub(super) fn rooms_named(&self, id: Option<InstanceId>, wanted: &InstanceSpec) -> NodeRooms {
        let rooms = self.rooms_beside(id, wanted).into_iter();
        NodeRooms(
            rooms
                .map(|(id, room)| (id, (self.name(id), room)))
                .collect(),
        )
    }
}

/// Names of nodes, and the bytes that each has for a further instance.
pub(super) struct NodeRooms(BTreeMap<NodeId, (String, u64)>);

impl NodeRooms {
    /// Unlimited for an unknown node.
    pub(super) fn of(&self, id: NodeId) -> (String, u64) {
        let unknown = || (id.to_string(), u64::MAX);
        self.0.get(&id).cloned().unwrap_or_else(unknown)
    }

    /// Whether each node has room for all its ranks.
    fn hold(&self, ranks: &[NodeId], bytes: &[u64]) -> bool {
        let needed = |id: &NodeId| {
            let own = zip(ranks, bytes).filter(|(rank, _)| *rank == id);
            own.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
        };
        ranks.iter().all(|id| needed(id) <= self.of(*id).1)
    }
}

fn fit_devices(
    model: &str,
    needs: BTreeMap<NodeId, MlxRankBytes>,
    rooms: &NodeRooms,
) -> Result<(), DevicesTooSmall> {
    let need = |(node, needed)| {
        let (name, room) = rooms.of(node);
        NodeNeed { name, needed, room }
    };
    let nodes: Vec<NodeNeed> = needs.into_iter().map(need).collect();
    match nodes.iter().all(|it| it.needed.total().0 <= it.room) {
        true => Ok(()),
        false => Err(DevicesTooSmall {
            model: model.to_owned(),
            nodes,
        }),
    }
}

/// Shares by which the ranks of an instance on MLX fit their devices, by what each will take. The
/// record's shares, else equal ones, where these fit. Stages of a pipeline then follow the memory.
/// None for an instance on the CPU, and for equal shares.
///
/// # Errors
/// [`TooLarge`](super::engines::TooLarge) and [`DevicesTooSmall`] as text.
pub(super) fn fitting_shares(
    model: Option<OpenModel<'_>>,
    wanted: &InstanceSpec,
    rooms: &NodeRooms,
) -> Result<Vec<u32>, String> {
    let by_all = shares_by_memory(wanted, rooms).map_err(|error| error.to_string())?;
    let Some(ranks) = model.and_then(|model| MlxRanks::of(model, wanted)) else {
        return Ok(by_all);
    };
    let limits: Vec<u64> = wanted.nodes.iter().map(|id| rooms.of(*id).1).collect();
    let fits = |shares: &[u32]| ranks.spare(shares, &limits).is_none_or(|it| it.is_fit());
    if fits(&by_all) {
        return Ok(by_all);
    }
    match ranks.fitted(&limits) {
        Some(shares) => Ok(shares),
        None => {
            let needed = ranks.needed(&by_all).unwrap_or_default();
            let needs = by_node(&wanted.nodes, &needed, wanted.options.memory);
            let fit = fit_devices(&wanted.model, needs, rooms);
            fit.map(|()| by_all).map_err(|error| error.to_string())
        }
    }
}

/// States the memory of a record with engines and a split: bytes in all, shares by which its ranks
/// fit, and the bytes of each. Loads and previews do, and placements count by it.
///
/// # Errors
/// As [`fitting_shares`]; the bytes are then those of the shares that the record had.
pub(super) fn plan_memory(
    model: Option<OpenModel<'_>>,
    record: &mut InstanceSpec,
    rooms: &NodeRooms,
) -> Result<(), String> {
    let bytes = model.map(|model| device_bytes(model, record));
    (record.weight_bytes, record.cache_bytes) = bytes.unwrap_or_default();
    let shares = fitting_shares(model, record, rooms);
    if let Ok(shares) = &shares {
        record.shares = zip(record.nodes.iter().copied(), shares.iter().copied()).collect();
    }
    let ranks = model.and_then(|model| MlxRanks::of(model, record));
    record.needs = ranks.map_or_else(BTreeMap::new, |ranks| ranks.needs(record));
    shares.map(drop)
}

/// Bytes that each rank of a record needs, and whether the nodes have them. A load and the
/// placement of ranks use the same sum.
pub(super) fn verdict(
    model: OpenModel<'_>,
    record: &mut InstanceSpec,
    rooms: &NodeRooms,
) -> (Vec<u64>, bool) {
    let is_planned = plan_memory(Some(model), record, rooms).is_ok();
    let bytes: Vec<u64> = record
        .nodes
        .iter()
        .map(|id| own_part(record, *id))
        .collect();
    let fits = is_planned && rooms.hold(&record.nodes, &bytes);
    (bytes, fits)
}

/// Ranks of an instance, one a node, some of them on MLX.
struct MlxRanks<'a> {
    model: OpenModel<'a>,
    kind: SplitKind,
    classes: Vec<KernelClass>,
    sizes: EngineConfig,
    kv: Option<KvType>,
    /// Most memory of each node; other weights are on its disk.
    memory: Option<Bytes>,
    /// Bytes of the whole instance; a rank on the CPU takes its share of them.
    whole: u64,
}

/// Bytes to spare of each rank, negative for a rank that does not fit.
struct SpareBytes(Vec<i128>);

impl SpareBytes {
    fn is_fit(&self) -> bool {
        self.0.iter().all(|spare| *spare >= 0)
    }
}

impl<'a> MlxRanks<'a> {
    /// The ranks of a record, at the positions that it needs. `None` for one on the CPU alone, and
    /// for workers of one machine, which are not nodes.
    fn of(model: OpenModel<'a>, wanted: &InstanceSpec) -> Option<Self> {
        let is_on_mlx = wanted.nodes.iter().any(|id| wanted.is_on_mlx(*id));
        if !is_on_mlx || wanted.on_one_machine().is_some() {
            return None;
        }
        let class = |id: &NodeId| wanted.class_of(*id).parse().ok();
        Some(Self {
            model,
            kind: match wanted.split.parse().ok()? {
                SplitKind::Auto => SplitKind::Pipeline,
                kind => kind,
            },
            classes: wanted.nodes.iter().map(class).collect::<Option<_>>()?,
            sizes: needed_sizes(model.1, wanted),
            kv: kv_of(wanted),
            memory: wanted.options.memory.map(Bytes),
            whole: part_bytes(wanted, 1),
        })
    }

    /// Bytes of each rank on MLX by these shares; none are equal ones.
    fn needed(&self, shares: &[u32]) -> Option<Vec<Option<MlxRankBytes>>> {
        let n = self.classes.len() as u32;
        let split = Split::plan(self.model.1, self.kind, n, shares).ok()?;
        let of = |(rank, class): (u32, &KernelClass)| {
            let place = (&split, Rank(rank), (*class, self.kv));
            let bytes = || mlx_rank_bytes(self.model, place, (&self.sizes, &[]));
            let bytes = class.is_mlx().then(bytes).transpose().ok()?;
            Some(bytes.map(|bytes| bytes.limited(self.memory)))
        };
        (0..).zip(&self.classes).map(of).collect()
    }

    /// Bytes of each rank.
    fn totals(&self, shares: &[u32]) -> Option<Vec<u64>> {
        let ranks = self.classes.len();
        let all: u32 = shares.iter().sum();
        let part = |rank: usize| match shares.get(rank) {
            Some(share) => self.whole as f64 * f64::from(*share) / f64::from(all.max(1)),
            None => self.whole as f64 / ranks as f64,
        };
        let needed = self.needed(shares)?.into_iter().enumerate();
        let total = |(rank, bytes): (usize, Option<MlxRankBytes>)| match bytes {
            Some(bytes) => bytes.total().0,
            None => part(rank) as u64,
        };
        Some(needed.map(total).collect())
    }

    /// Bytes of each node of a record, by its shares.
    fn needs(&self, record: &InstanceSpec) -> BTreeMap<NodeId, u64> {
        let shares = record.nodes.iter().map(|id| record.shares.get(id).copied());
        let shares: Option<Vec<u32>> = shares.collect();
        let totals = self.totals(&shares.unwrap_or_default());
        zip(record.nodes.iter().copied(), totals.unwrap_or_default()).collect()
    }

    fn spare(&self, shares: &[u32], limits: &[u64]) -> Option<SpareBytes> {
        let spare = |(needed, limit): (u64, &u64)| i128::from(*limit) - i128::from(needed);
        let totals = self.totals(shares)?.into_iter();
        Some(SpareBytes(totals.zip(limits).map(spare).collect()))
    }

    /// Numbers of layers in proportion to the limits; then layers move from ranks that do not fit
    /// to the one with the most to spare. `None` if that does not help, and for a split that is no
    /// pipeline.
    fn fitted(&self, limits: &[u64]) -> Option<Vec<u32>> {
        if self.kind != SplitKind::Pipeline {
            return None;
        }
        let all = self.model.1.layers.len() as u32;
        let mut layers = in_proportion(all, limits)?;
        for _ in 0..2 * all {
            let SpareBytes(spare) = self.spare(&layers, limits)?;
            let by_spare = |rank: &usize| spare[*rank];
            let most = (0..spare.len()).max_by_key(by_spare)?;
            let least = (0..spare.len()).min_by_key(by_spare)?;
            match (spare[least] >= 0, spare[most] > 0 && layers[least] > 1) {
                (true, _) => return Some(layers),
                (false, true) => {
                    layers[least] -= 1;
                    layers[most] += 1;
                }
                (false, false) => return None,
            }
        }
        None
    }
}

/// `all` layers for ranks with these limits, at least one for each; `None` for fewer layers than
/// ranks.
fn in_proportion(all: u32, limits: &[u64]) -> Option<Vec<u32>> {
    let spare = all.checked_sub(limits.len() as u32)?;
    let sum: f64 = limits.iter().map(|limit| *limit as f64).sum();
    let part = |limit: &u64| (*limit as f64 / sum.max(1.0) * f64::from(spare)) as u32;
    let mut layers: Vec<u32> = limits.iter().map(|limit| 1 + part(limit)).collect();
    let left = all - layers.iter().sum::<u32>();
    let largest = (0..limits.len()).max_by_key(|rank| limits[*rank])?;
    layers[largest] += left;
    Some(layers)
}

/// The sum of the ranks of each node, which may have `memory` together. Ranks beyond `nodes` are on
/// the first one.
fn by_node(
    nodes: &[NodeId],
    ranks: &[Option<MlxRankBytes>],
    memory: Option<u64>,
) -> BTreeMap<NodeId, MlxRankBytes> {
    let mut all = BTreeMap::new();
    for (place, bytes) in ranks.iter().enumerate() {
        let node = nodes.get(place).or(nodes.first());
        if let (Some(node), Some(bytes)) = (node, bytes) {
            let sum = all.entry(*node).or_insert(MlxRankBytes::default());
            sum.weights.0 += bytes.weights.0;
            sum.cache.0 += bytes.cache.0;
            sum.step.0 += bytes.step.0;
        }
    }
    all.values_mut()
        .for_each(|sum| *sum = sum.limited(memory.map(Bytes)));
    all
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_node_with_the_least_memory_for_its_share_limits_all() {
        const GB: u64 = 1_000_000_000;
        let rooms = [8, 16, 24].map(|gb| gb * GB);
        assert_eq!(for_all(&rooms, &[]), Some(24 * GB));
        assert_eq!(for_all(&rooms, &[1, 2, 3]), Some(48 * GB));
        assert_eq!(for_all(&[u64::MAX, 16 * GB], &[3, 1]), Some(64 * GB));
        assert_eq!(for_all(&[u64::MAX], &[]), None);
    }

    #[test]
    fn layers_follow_the_memory_of_devices() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/hf");
        let source = ModelSource::open(&golden.join("gemma3-bf16")).unwrap();
        let config = Config::read(&source).unwrap();
        let pipeline = MlxRanks {
            model: (&source, &config),
            kind: SplitKind::Pipeline,
            classes: vec![KernelClass::MlxF32; 3],
            kv: None,
            memory: None,
            sizes: EngineConfig::single("", 256),
            whole: 0,
        };
        let total = |bytes: &Option<MlxRankBytes>| bytes.unwrap().total().0;
        let needed = |shares: &[u32]| -> Vec<u64> {
            pipeline.needed(shares).unwrap().iter().map(total).collect()
        };
        // Seven layers; the first rank has the embeddings, too.
        let (first, last) = ([3, 2, 2], [2, 2, 3]);
        let (more, less) = (needed(&first), needed(&last));
        let layer = less[2] - more[2];
        assert!(pipeline.spare(&first, &more).unwrap().is_fit());
        let less = [less[0], less[1], less[2] + layer];
        assert!(!pipeline.spare(&first, &less).unwrap().is_fit());
        let layers = pipeline.fitted(&less).unwrap();
        assert_eq!(layers.iter().sum::<u32>(), 7);
        assert!(layers[0] < 3 && layers[2] > 2, "{layers:?}");
        assert_eq!(pipeline.fitted(&[layer / 2; 3]), None);
        assert_eq!(in_proportion(12, &[8, 16, 24]), Some(vec![2, 4, 6]));
        assert_eq!(in_proportion(2, &[8, 16, 24]), None);
    }

    /// Rooms within a byte of the need of each rank: a worker admits what a preview and a load say.
    #[test]
    fn a_preview_a_load_and_an_admission_agree_at_the_limit() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/hf");
        let source = ModelSource::open(&golden.join("gemma3-bf16")).unwrap();
        let config = Config::read(&source).unwrap();
        let nodes = [1, 2].map(|number| NodeId([number; 16]));
        let mut verdicts = Vec::new();
        for (split, class, n) in [
            ("auto", "mlx-f32", 1),
            ("pipeline", "mlx", 2),
            ("tensor", "mlx-f32", 2),
        ] {
            let record = || InstanceSpec {
                nodes: nodes[..n].to_vec(),
                split: split.to_owned(),
                class: class.to_owned(),
                bytes: source.file_bytes().0,
                ..InstanceSpec::default()
            };
            let judged = |rooms: &[u64]| {
                let rooms = zip(nodes, rooms).map(|(id, room)| (id, (String::new(), *room)));
                let (mut said, rooms) = (record(), NodeRooms(rooms.collect()));
                let (bytes, fits) = verdict((&source, &config), &mut said, &rooms);
                let load = plan_memory(Some((&source, &config)), &mut record(), &rooms);
                assert_eq!(load.is_ok(), fits, "{split} in {bytes:?}: {load:?}");
                (said, bytes, fits)
            };
            let (.., bytes, fits) = judged(&[u64::MAX; 2][..n]);
            assert!(fits && bytes.len() == n);
            let near = (0..n).flat_map(|rank| [0, 1, 2].map(|more| (rank, more)));
            for (rank, more) in near {
                let mut rooms = bytes.clone();
                rooms[rank] += more;
                rooms[rank] -= 1;
                let (said, bytes, fits) = judged(&rooms);
                let kind = said.split.parse().unwrap();
                let kind = if n == 1 { SplitKind::Pipeline } else { kind };
                let shares: Vec<u32> = said.shares.values().copied().collect();
                let split = Split::plan(&config, kind, n as u32, &shares).unwrap();
                let sizes = needed_sizes(&config, &said);
                let class: KernelClass = said.class.parse().unwrap();
                let admits = |rank: usize| {
                    let place = (&split, Rank(rank as u32), (class, None));
                    let needed = mlx_rank_bytes((&source, &config), place, (&sizes, &[])).unwrap();
                    assert_eq!(needed.total().0, bytes[rank]);
                    needed.total().0 <= rooms[rank]
                };
                assert_eq!((0..n).all(admits), fits, "{said:?} in {rooms:?}");
                verdicts.push(fits);
            }
        }
        assert_eq!(verdicts[..3], [false, true, true]);
        assert!(verdicts[3..].contains(&false) && verdicts[3..].contains(&true));
    }

    #[test]
    fn devices_that_are_too_small_are_told_with_all_figures() {
        let need = |name: &str, gb: u64, room: u64| NodeNeed {
            name: name.to_owned(),
            needed: MlxRankBytes {
                weights: Bytes(gb << 30),
                cache: Bytes(1 << 30),
                step: Bytes(1 << 29),
            },
            room: room << 30,
        };
        let error = DevicesTooSmall {
            model: "m".to_owned(),
            nodes: vec![need("a", 9, 8), need("b", 13, 16)],
        };
        let told = "m does not fit the devices of its nodes: a needs 10.5 GiB (weights 9.0 GiB, \
                    keys and values 1.0 GiB, a step 512.0 MiB) and has 8.0 GiB; b needs 14.5 GiB \
                    (weights 13.0 GiB, keys and values 1.0 GiB, a step 512.0 MiB) and has 16.0 GiB";
        assert_eq!(error.to_string(), told);
    }

    #[test]
    fn ranks_of_one_node_share_its_device() {
        let bytes = |gb: u64| MlxRankBytes {
            weights: Bytes(gb),
            cache: Bytes(2),
            step: Bytes(1),
        };
        let nodes = [1, 2, 1].map(|number| NodeId([number; 16]));
        let ranks = [Some(bytes(8)), None, Some(bytes(9))];
        let all = by_node(&nodes, &ranks, None);
        assert_eq!(all.len(), 1);
        assert_eq!(all[&nodes[0]].total(), Bytes(23));
        let here = |memory| by_node(&nodes[..1], &ranks, memory)[&nodes[0]].total();
        assert_eq!([None, Some(9)].map(here), [Bytes(23), Bytes(9)]);
    }
}
