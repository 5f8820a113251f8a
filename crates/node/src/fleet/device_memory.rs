//! Memory of an instance's ranks on the devices of MLX, and the positions that the nodes' memory
//! allows. A worker admits its rank by the same sum.

use std::collections::BTreeMap;
use std::path::Path;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_cluster::nodes::placement::InstanceSpec;
use paceline_cluster::nodes::{InstanceId, NodeId};
use paceline_engine::EngineConfig;
use paceline_model::{Config, MlxRankBytes, ModelSource, Split, SplitKind};
use paceline_tensor::KvType;

use super::Inner;
use super::hosts::weight_bytes;
use crate::PreparedModel;
use crate::context_size::{ContextBudget, KvMemory, needed_positions};
use crate::load::mlx_rank_bytes;

/// Ranks on MLX take more memory than the devices of their nodes have to spare.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{model} does not fit the devices of its nodes: {}", told(.nodes))]
pub(super) struct DevicesTooSmall {
    model: String,
    nodes: Vec<NodeNeed>,
}

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
pub(super) fn device_bytes(path: &Path, record: &InstanceSpec) -> (u64, u64) {
    let mut nodes = record.nodes.iter().chain(&record.prompts);
    let on_mlx = nodes.find(|id| record.is_on_mlx(**id));
    let class = on_mlx.and_then(|id| record.class_of(*id).parse().ok());
    let source = class.and_then(|_| ModelSource::open(path).ok());
    let read = source.and_then(|source| Some((Config::read(&source).ok()?, source)));
    let planned = class.zip(read).and_then(|(class, (config, source))| {
        let sizes = needed_sizes(&config, record);
        let whole = (&Split::whole(&config), Rank(0), class);
        mlx_rank_bytes((&source, &config), whole, &sizes).ok() // its load says why
    });
    planned.map_or((0, 0), |bytes| (bytes.weights.0, bytes.cache.0))
}

/// Sizes of an engine with the positions that a record needs.
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
        let room = |id: &NodeId| rooms.get(id).copied().unwrap_or(u64::MAX);
        let rooms: Vec<u64> = wanted.nodes.iter().map(room).collect();
        let shares = wanted.nodes.iter().map(|id| wanted.shares.get(id).copied());
        let shares: Option<Vec<u32>> = shares.collect();
        let Some(memory) = for_all(&rooms, &shares.unwrap_or_default()) else {
            return sizes;
        };
        let form = |id: &NodeId| {
            let class: KernelClass = wanted.class_of(*id).parse().unwrap_or_default();
            match class.is_mlx() {
                true => KvMemory::Device(class),
                false => KvMemory::Main(KvType::of(class)),
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
        let rooms = self.rooms_beside(Some(id), wanted);
        let groups = [
            Some((prepared, &wanted.nodes)),
            prepared.prompts().map(|prompts| (prompts, &wanted.prompts)),
        ];
        for (model, nodes) in groups.into_iter().flatten() {
            let bytes = model.device_bytes().map_err(|error| error.to_string())?;
            let fit = self.fit_devices(&wanted.model, by_node(nodes, &bytes), &rooms);
            fit.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn fit_devices(
        &self,
        model: &str,
        needs: BTreeMap<NodeId, MlxRankBytes>,
        rooms: &BTreeMap<NodeId, u64>,
    ) -> Result<(), DevicesTooSmall> {
        let need = |(node, needed)| NodeNeed {
            name: self.name(node),
            needed,
            room: rooms.get(&node).copied().unwrap_or(u64::MAX),
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

    /// Shares by which the ranks of an instance on MLX fit their devices, by what each will take.
    /// The record's shares, else equal ones, where these fit. Stages of a pipeline then follow the
    /// memory. None for an instance on the CPU, and for equal shares.
    ///
    /// # Errors
    /// [`TooLarge`](super::engines::TooLarge) and [`DevicesTooSmall`] as text.
    pub(super) fn fitting_shares(
        &self,
        path: &Path,
        (id, wanted): (Option<InstanceId>, &InstanceSpec),
    ) -> Result<Vec<u32>, String> {
        let by_all = self.shares_by_memory(id, wanted);
        let by_all = by_all.map_err(|error| error.to_string())?;
        let Some(pipeline) = MlxPipeline::of(path, wanted) else {
            return Ok(by_all);
        };
        let rooms = self.rooms_beside(id, wanted);
        let room = |id: &NodeId| rooms.get(id).copied().unwrap_or(u64::MAX);
        let limits: Vec<u64> = wanted.nodes.iter().map(room).collect();
        let fits = |shares: &[u32]| {
            pipeline
                .spare(shares, &limits)
                .is_some_and(|it| it.is_fit())
        };
        if fits(&by_all) {
            return Ok(by_all);
        }
        match pipeline.fitted(&limits) {
            Some(shares) => Ok(shares),
            None => {
                let needs = by_node(&wanted.nodes, &pipeline.needed(&by_all).unwrap_or_default());
                let fit = self.fit_devices(&wanted.model, needs, &rooms);
                fit.map(|()| by_all).map_err(|error| error.to_string())
            }
        }
    }
}

/// A pipeline of one rank a stage, some of them on MLX.
struct MlxPipeline {
    source: ModelSource,
    config: Config,
    classes: Vec<KernelClass>,
    sizes: EngineConfig,
}

/// Bytes to spare of each rank, negative for a rank that does not fit.
struct SpareBytes(Vec<i128>);

impl SpareBytes {
    fn is_fit(&self) -> bool {
        self.0.iter().all(|spare| *spare >= 0)
    }
}

impl MlxPipeline {
    /// That of a record, at the positions that it needs; `None` for another split, one node, and
    /// files that cannot be read.
    fn of(path: &Path, wanted: &InstanceSpec) -> Option<Self> {
        let is_pipeline = matches!(wanted.split.as_str(), "auto" | "pipeline");
        if !is_pipeline || !wanted.splits_on_mlx() {
            return None;
        }
        let source = ModelSource::open(path).ok()?;
        let config = Config::read(&source).ok()?;
        let class = |id: &NodeId| wanted.class_of(*id).parse().ok();
        Some(Self {
            classes: wanted.nodes.iter().map(class).collect::<Option<_>>()?,
            sizes: needed_sizes(&config, wanted),
            source,
            config,
        })
    }

    /// Bytes of each rank on MLX by these shares; none are equal ones.
    fn needed(&self, shares: &[u32]) -> Option<Vec<Option<MlxRankBytes>>> {
        let n = self.classes.len() as u32;
        let split = Split::plan(&self.config, SplitKind::Pipeline, n, shares).ok()?;
        let of = |(rank, class): (u32, &KernelClass)| {
            let place = (&split, Rank(rank), *class);
            let bytes = || mlx_rank_bytes((&self.source, &self.config), place, &self.sizes);
            class.is_mlx().then(bytes).transpose().ok()
        };
        (0..).zip(&self.classes).map(of).collect()
    }

    fn spare(&self, shares: &[u32], limits: &[u64]) -> Option<SpareBytes> {
        let spare = |(bytes, limit): (Option<MlxRankBytes>, &u64)| {
            let needed = bytes.map_or(0, |bytes| bytes.total().0);
            i128::from(*limit) - i128::from(needed)
        };
        let needed = self.needed(shares)?.into_iter();
        Some(SpareBytes(needed.zip(limits).map(spare).collect()))
    }

    /// Numbers of layers in proportion to the limits; then layers move from ranks that do not fit
    /// to the one with the most to spare. `None` if that does not help.
    fn fitted(&self, limits: &[u64]) -> Option<Vec<u32>> {
        let all = self.config.layers.len() as u32;
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

/// The sum of the ranks of each node. Ranks beyond `nodes` are on the first one.
fn by_node(nodes: &[NodeId], ranks: &[Option<MlxRankBytes>]) -> BTreeMap<NodeId, MlxRankBytes> {
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
    all
}

#[cfg(test)]
mod tests {
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
        let pipeline = MlxPipeline {
            classes: vec![KernelClass::MlxF32; 3],
            sizes: EngineConfig::single("", 256),
            source,
            config,
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
        let all = by_node(&nodes, &ranks);
        assert_eq!(all.len(), 1);
        assert_eq!(all[&nodes[0]].total(), Bytes(23));
        assert_eq!(by_node(&nodes[..1], &ranks)[&nodes[0]].total(), Bytes(23));
    }
}
