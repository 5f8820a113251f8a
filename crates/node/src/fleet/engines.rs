//! Choice of the engine, and with it the kernel class, of each node of an instance.

use std::path::Path;

use paceline_base::{Bytes, KernelClass, UnknownKernelClass};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::NodeFacts;
use paceline_engine::EngineConfig;
use paceline_fleet::InstanceSpec;
use paceline_model::{Config, ModelSource};

use super::device_memory::NodeRooms;
use super::{Inner, LoadRequest};
use crate::classes::{self, Classes, EngineChoice, Engines};
use crate::forecast::devices::{DeviceSpeed, chunk_rows};
use paceline_fleet::memory::{mlx_device, weight_bytes};
use paceline_worker::prefill_classes::UnlikePrefill;

/// Name of the engine MLX in a node's facts.
const MLX: &str = "mlx";

/// Sum of the shares of nodes by their memory. Shares up to a thousand are exact.
const SHARES: f64 = 1000.0;

/// Why nodes cannot compute with the engines of a request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Classes(#[from] classes::Error),
    #[error(transparent)]
    Class(#[from] UnknownKernelClass),
    #[error("{node} has no engine mlx: `paceline engines install mlx` there")]
    Missing { node: String },
    #[error("{node} cannot use its engine mlx: {problem}")]
    Broken { node: String, problem: String },
    #[error("{node} has not listed its engines yet: try again in some seconds")]
    Unlisted { node: String },
}

/// The nodes of an instance together lack memory for it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{model} needs {} of memory (weights {}, keys and values {}), and its nodes have {} to spare: \
     {}",
    Bytes(.weights + .cache),
    Bytes(*.weights),
    Bytes(*.cache),
    Bytes(.rooms.iter().map(|(_, room)| room).sum()),
    told(.rooms)
)]
pub(super) struct TooLarge {
    model: String,
    weights: u64,
    cache: u64,
    /// Names of nodes, and their free bytes.
    rooms: Vec<(String, u64)>,
}

fn told(rooms: &[(String, u64)]) -> String {
    let told = rooms
        .iter()
        .map(|(node, room)| format!("{node} {}", Bytes(*room)));
    told.collect::<Vec<_>>().join(", ")
}

/// Shares of an instance for nodes with these free bytes. The record's shares, else none, which
/// means equal parts, where these fit; else in proportion to the memory. Weights, and keys and
/// values, are in bytes.
fn shares(
    model: &str,
    (weights, cache): (u64, u64),
    recorded: &[u32],
    rooms: Vec<(String, u64)>,
) -> Result<Vec<u32>, TooLarge> {
    let needed = weights + cache;
    let equal = vec![1; rooms.len()];
    let fit = |shares: &[u32]| {
        let all: u32 = shares.iter().sum();
        let part = |share: u32| (needed as f64 * f64::from(share) / f64::from(all.max(1))) as u64;
        let mut each = rooms.iter().zip(shares);
        shares.len() == rooms.len() && each.all(|((_, room), share)| *room >= part(*share))
    };
    if fit(recorded) {
        return Ok(recorded.to_vec());
    }
    if fit(&equal) {
        return Ok(Vec::new());
    }
    let all: u64 = rooms
        .iter()
        .map(|(_, room)| room)
        .fold(0, |a, b| a.saturating_add(*b));
    if all < needed {
        let model = model.to_owned();
        return Err(TooLarge {
            model,
            weights,
            cache,
            rooms,
        });
    }
    let share = |(_, room): &(String, u64)| (*room as f64 / all as f64 * SHARES) as u32;
    Ok(rooms.iter().map(|room| share(room).max(1)).collect())
}

/// Shares of an instance that computes on MLX, by its record or by the memory of its nodes. None
/// for one that the planner divides.
pub(super) fn shares_by_memory(
    wanted: &InstanceSpec,
    rooms: &NodeRooms,
) -> Result<Vec<u32>, TooLarge> {
    let is_on_mlx = wanted.nodes.iter().any(|node| wanted.is_on_mlx(*node));
    if !is_on_mlx || wanted.on_one_machine().is_some() {
        return Ok(Vec::new());
    }
    let rooms = wanted.nodes.iter().map(|id| rooms.of(*id)).collect();
    let recorded = wanted.nodes.iter().map(|id| wanted.shares.get(id).copied());
    let recorded: Option<Vec<u32>> = recorded.collect();
    let needed = (weight_bytes(wanted), wanted.cache_bytes);
    shares(&wanted.model, needed, &recorded.unwrap_or_default(), rooms)
}

/// The kernel classes of nodes with these facts, in their order.
///
/// Without an engine, a class and a prediction the nodes compute on MLX if each has a GPU for it,
/// else on the CPU. MLX on CPUs is slower than the CPU engine.
fn choose(
    engine: Option<Engines>,
    class: Option<KernelClass>,
    nodes: &[&NodeFacts],
) -> Result<Classes, Error> {
    let count = nodes.len() as u32;
    if engine.is_none() && class.is_none() {
        let is_gpu = !nodes.is_empty() && nodes.iter().all(|facts| facts.gpu(MLX).is_some());
        let class = if is_gpu {
            KernelClass::Mlx
        } else {
            KernelClass::Cpu
        };
        return Ok(Classes::same(class, count));
    }
    let classes = Classes::new(engine, class, count)?;
    for (class, facts) in classes.each().iter().zip(nodes) {
        let node = || facts.name.clone();
        match class.is_mlx() {
            true if facts.devices.is_empty() => return Err(Error::Unlisted { node: node() }),
            true if !facts.has_engine(MLX) => {
                return Err(match facts.problem_of(MLX).map(str::to_owned) {
                    Some(problem) => Error::Broken {
                        node: node(),
                        problem,
                    },
                    None => Error::Missing { node: node() },
                });
            }
            _ => {}
        }
    }
    Ok(classes)
}

impl Inner {
    /// States the kernel classes of a record's nodes: those of the request, else `planned` ones.
    ///
    /// # Errors
    /// A node lacks its engine, or the request contradicts itself.
    pub(super) fn set_classes(
        &self,
        ask: &LoadRequest,
        planned: Option<Vec<(NodeId, KernelClass)>>,
        record: &mut InstanceSpec,
    ) -> Result<(), String> {
        let is_open = ask.engine.is_none() && ask.class.is_none();
        let classes = match planned.filter(|_| is_open) {
            Some(classes) => classes,
            None => {
                let classes = self.classes_of(ask, &record.nodes);
                classes.map_err(|error| error.to_string())?
            }
        };
        state_classes(classes, record);
        Ok(())
    }

    /// Checks the prefill nodes of a record: they need the engine of their class, and memory. They
    /// must be allowed to read prompts for the other nodes. Reads the model's shape.
    pub(super) fn check_readers(&self, path: &Path, record: &InstanceSpec) -> Result<(), String> {
        let Some(first) = record.prompts.first() else {
            return Ok(());
        };
        let class = |id: &NodeId| record.class_of(*id).parse();
        let decoding: Result<Vec<KernelClass>, UnknownKernelClass> =
            record.nodes.iter().map(class).collect();
        let classes = class(first).and_then(|class| Ok((class, decoding?)));
        let (reading, decoding) = classes.map_err(|error| error.to_string())?;
        let views = self.agent.nodes();
        let views = views
            .iter()
            .filter(|view| record.prompts.contains(&view.id));
        let facts: Vec<&NodeFacts> = views.map(|view| &view.facts).collect();
        choose(None, Some(reading), &facts).map_err(|error| error.to_string())?;
        let config = ModelSource::open(path).and_then(|source| Config::read(&source));
        let config = config.map_err(|error| format!("{}: {error}", path.display()))?;
        let (classes, numbers) = ((Some(reading), &*decoding), (None, record.options.strict));
        let may_read = UnlikePrefill::of(classes, numbers, &config);
        may_read.map_err(|error| error.to_string())?;
        let readers = InstanceSpec {
            nodes: record.prompts.clone(),
            ..record.clone()
        };
        let shares = shares_by_memory(&readers, &self.rooms_named(None, &readers));
        shares.map(drop).map_err(|error| error.to_string())
    }

    /// Sizes of an engine whose prompt chunks suit the device with the longest fixed part.
    pub(super) fn with_chunks(
        &self,
        wanted: &InstanceSpec,
        config: &Config,
        sizes: EngineConfig,
    ) -> EngineConfig {
        let (views, n) = (self.agent.nodes(), wanted.nodes.len().max(1));
        let stage = (config.layers.len() / n, weight_bytes(wanted) / n as u64);
        let on_mlx = views.iter().filter(|view| {
            let is_rank = wanted.nodes.contains(&view.id);
            is_rank && wanted.is_on_mlx(view.id)
        });
        let devices = on_mlx.filter_map(|view| DeviceSpeed::of(mlx_device(&view.facts)?));
        let rows: Vec<usize> = devices.map(|device| device.fixed_rows(stage)).collect();
        let Some(fixed_rows) = rows.iter().copied().max() else {
            return sizes;
        };
        // A rank on a processor takes main memory for each row.
        let max_rows = match rows.len() == n {
            true => chunk_rows(fixed_rows, sizes.max_rows),
            false => sizes.max_rows,
        };
        EngineConfig {
            fixed_rows,
            max_rows,
            ..sizes
        }
    }

    /// The engines of a request on nodes of ranks.
    pub(super) fn engine_choice(
        &self,
        ask: &LoadRequest,
        ranks: &[NodeId],
    ) -> Result<EngineChoice, String> {
        if ask.engine.is_none() && ask.class.is_none() {
            return Ok(EngineChoice::Fastest);
        }
        let classes = self.classes_of(ask, ranks);
        let classes = classes.map_err(|error| error.to_string())?;
        let class = |id: &NodeId| {
            let class = classes.iter().find(|(other, _)| other == id);
            class.map_or(KernelClass::Cpu, |(_, class)| *class)
        };
        Ok(EngineChoice::Given(ranks.iter().map(class).collect()))
    }

    fn classes_of(
        &self,
        ask: &LoadRequest,
        nodes: &[NodeId],
    ) -> Result<Vec<(NodeId, KernelClass)>, Error> {
        let class = ask.class.as_deref().map(str::parse).transpose()?;
        let views = self.agent.nodes();
        let order = self.in_order_of_request(ask, nodes);
        if ask.machine.is_some() {
            // That program has opened the engine itself.
            let classes = Classes::new(ask.engine, class, order.len() as u32)?;
            return Ok(order
                .into_iter()
                .zip(classes.each().iter().copied())
                .collect());
        }
        let unknown = NodeFacts::default();
        let facts = |id: &NodeId| {
            let view = views.iter().find(|view| view.id == *id);
            view.map_or(&unknown, |view| &view.facts)
        };
        let facts: Vec<&NodeFacts> = order.iter().map(facts).collect();
        let classes = choose(ask.engine, class, &facts)?;
        Ok(order
            .into_iter()
            .zip(classes.each().iter().copied())
            .collect())
    }

    /// `nodes` in the order in which the request names them: a record has its owner in front.
    fn in_order_of_request(&self, ask: &LoadRequest, nodes: &[NodeId]) -> Vec<NodeId> {
        let named = self.named(ask).unwrap_or_default();
        let mut nodes = nodes.to_vec();
        nodes.sort_by_key(|id| named.iter().position(|it| it == id));
        nodes
    }
}

/// States the kernel classes of a record's nodes, at least one.
pub(super) fn state_classes(classes: Vec<(NodeId, KernelClass)>, record: &mut InstanceSpec) {
    let first = classes[0].1;
    record.class = match first == KernelClass::default() {
        true => String::new(),
        false => first.name().to_owned(),
    };
    let others = classes.into_iter().filter(|(_, class)| *class != first);
    let named = others.map(|(id, class)| (id, class.name().to_owned()));
    record.classes = named.collect();
}

/// Whether a node has a GPU that an engine computes on.
pub(super) fn has_gpu(facts: &NodeFacts) -> bool {
    facts.gpu(MLX).is_some()
}

/// Whether a node may be chosen for a request: it has the only engine that is asked for.
pub(super) fn may_compute(ask: &LoadRequest, facts: &NodeFacts) -> bool {
    !ask.engine.is_some_and(Engines::is_all_mlx) || facts.has_engine(MLX)
}

#[cfg(test)]
mod tests {
    use KernelClass::{Cpu, Mlx, MlxF32};
    use paceline_cluster::nodes::agent::EngineDevice;

    use super::*;

    fn node(name: &str, devices: &[(&str, &str)]) -> NodeFacts {
        let device = |(engine, kind): &(&str, &str)| EngineDevice {
            engine: (*engine).to_owned(),
            kind: (*kind).to_owned(),
            ..EngineDevice::default()
        };
        NodeFacts {
            name: name.to_owned(),
            devices: devices.iter().map(device).collect(),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn engines_follow_the_request_and_what_the_nodes_have() {
        let mac = node("mac", &[("cpu", "cpu"), ("mlx", "cpu"), ("mlx", "gpu")]);
        let host = node("host", &[("cpu", "cpu"), ("mlx", "cpu")]);
        let plain = node("plain", &[("cpu", "cpu")]);
        let old = node("old", &[]);
        let of = |engine: Option<&str>, class, nodes: &[&NodeFacts]| {
            let engine = engine.map(|text| text.parse().unwrap());
            let classes = choose(engine, class, nodes);
            let classes = classes.map(|classes| classes.each().to_vec());
            classes.map_err(|error| error.to_string())
        };
        assert_eq!(of(None, None, &[&mac, &mac]), Ok(vec![Mlx, Mlx]));
        assert_eq!(of(None, None, &[&mac, &host]), Ok(vec![Cpu, Cpu]));
        assert_eq!(of(None, None, &[&old]), Ok(vec![Cpu]));
        assert_eq!(of(Some("cpu"), None, &[&mac]), Ok(vec![Cpu]));
        assert_eq!(of(Some("mlx"), None, &[&mac, &host]), Ok(vec![Mlx, Mlx]));
        assert_eq!(of(Some("mlx"), Some(MlxF32), &[&host]), Ok(vec![MlxF32]));
        assert_eq!(
            of(Some("cpu,mlx"), None, &[&plain, &mac]),
            Ok(vec![Cpu, Mlx])
        );
        for (nodes, reason) in [
            ([&mac, &plain], "plain has no engine mlx"),
            ([&mac, &old], "old has not listed its engines yet"),
        ] {
            let error = of(Some("mlx"), None, &nodes).unwrap_err();
            assert!(error.starts_with(reason), "{error}");
        }
        let error = of(Some("cpu,mlx"), None, &[&mac]).unwrap_err();
        assert!(error.starts_with("2 engines for 1 nodes"), "{error}");
    }

    #[test]
    fn shares_follow_the_memory_where_equal_parts_do_not_fit() {
        const GB: u64 = 1_000_000_000;
        let rooms = |each: [u64; 3]| {
            let names = ["a", "b", "c"].map(str::to_owned);
            names
                .into_iter()
                .zip(each.map(|gb| gb * GB))
                .collect::<Vec<_>>()
        };
        let of = |needed: u64, each| shares("m", (needed * GB, 0), &[], rooms(each));
        let recorded = |needed: u64| shares("m", (needed * GB, 0), &[1, 2, 3], rooms([8, 16, 24]));
        assert_eq!(recorded(24), Ok(vec![1, 2, 3]));
        assert_eq!(recorded(49).map_err(|error| error.weights), Err(49 * GB));
        assert_eq!(
            shares("m", (8 * GB, 0), &[9, 0, 0], rooms([7, 7, 7])),
            Ok(vec![])
        );
        assert_eq!(of(24, [8, 16, 24]), Ok(vec![]));
        assert_eq!(of(40, [8, 16, 24]), Ok(vec![166, 333, 500]));
        let error = shares("m", (40 * GB, 9 * GB), &[], rooms([8, 16, 24]));
        let error = error.unwrap_err().to_string();
        let told = "m needs 45.6 GiB of memory (weights 37.3 GiB, keys and values 8.4 GiB), and its \
                    nodes have 44.7 GiB to spare: a 7.5 GiB, b 14.9 GiB, c 22.4 GiB";
        assert_eq!(error, told);
        assert_eq!(of(49, [u64::MAX / GB, 1, 1]).unwrap().len(), 3);
    }
}
