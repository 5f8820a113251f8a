//! Choice of the engine, and with it the kernel class, of each node of an instance.

use paceline_base::KernelClass;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::NodeFacts;
use paceline_cluster::nodes::placement::InstanceSpec;

use super::{Inner, LoadRequest};
use crate::classes::{self, Classes, Engines};

/// Name of the engine MLX in a node's facts.
const MLX: &str = "mlx";

/// Why nodes cannot compute with the engines of a request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Classes(#[from] classes::Error),
    #[error(transparent)]
    Class(#[from] paceline_base::UnknownKernelClass),
    #[error(
        "{node} has no engine mlx: `paceline engines install mlx` there, then restart its node"
    )]
    Missing { node: String },
    #[error("{node} has not listed its engines yet: try again in some seconds")]
    Unlisted { node: String },
}

/// The kernel classes of nodes with these facts, in their order.
///
/// Without an engine and a class the nodes compute on MLX if each has a GPU for it, else on the
/// CPU. MLX on CPUs is slower than the CPU engine.
fn choose(
    engine: Option<Engines>,
    class: Option<KernelClass>,
    nodes: &[&NodeFacts],
) -> Result<Classes, Error> {
    let count = nodes.len() as u32;
    if engine.is_none() && class.is_none() {
        let is_gpu = !nodes.is_empty() && nodes.iter().all(|facts| facts.has_gpu(MLX));
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
            true if !facts.has_engine(MLX) => return Err(Error::Missing { node: node() }),
            _ => {}
        }
    }
    Ok(classes)
}

impl Inner {
    /// States the kernel classes of a record's nodes.
    ///
    /// # Errors
    /// A node lacks its engine, or the request contradicts itself.
    pub(super) fn set_classes(
        &self,
        ask: &LoadRequest,
        record: &mut InstanceSpec,
    ) -> Result<(), String> {
        let classes = self.classes_of(ask, &record.nodes);
        let classes = classes.map_err(|error| error.to_string())?;
        let first = classes[0].1;
        record.class = match first == KernelClass::default() {
            true => String::new(),
            false => first.name().to_owned(),
        };
        let others = classes.into_iter().filter(|(_, class)| *class != first);
        let named = others.map(|(id, class)| (id, class.name().to_owned()));
        record.classes = named.collect();
        Ok(())
    }

    fn classes_of(
        &self,
        ask: &LoadRequest,
        nodes: &[NodeId],
    ) -> Result<Vec<(NodeId, KernelClass)>, Error> {
        let class = ask.class.as_deref().map(str::parse).transpose()?;
        let views = self.agent.nodes();
        let order = self.in_order_of_request(ask, nodes);
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
}
