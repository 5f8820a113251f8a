//! Machines and the links between them, as facts in SI units.

use std::collections::BTreeMap;

use paceline_base::Bytes;

use crate::Error;
use crate::check::finite_in;

/// The most nodes of a cluster. The solver answers for 100 within seconds; beyond a few hundred
/// the answer is a data centre's scheduler, not this.
pub const MAX_NODES: usize = 512;

/// The most links: several for each pair of the most nodes.
pub const MAX_LINKS: usize = 4 * MAX_NODES * (MAX_NODES - 1) / 2;

/// The backend that runs a node's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backend {
    /// Apple GPU.
    Metal,
    /// NVIDIA GPU.
    Cuda,
    /// Any other GPU.
    Gpu,
    /// Processor cores.
    Cpu,
}

/// Arithmetic rates of a node by kernel class, in operations a second as quoted or measured. The
/// fraction of them that programs reach is in the calibration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Dense products with many rows.
    pub matmul: f64,
    /// Products of routed experts: many small ones.
    pub expert: f64,
    /// Attention over long prompts.
    pub attention: f64,
}

impl Rates {
    /// The same rate for every class.
    pub const fn uniform(rate: f64) -> Self {
        Self {
            matmul: rate,
            expert: rate,
            attention: rate,
        }
    }
}

/// A machine, or a GPU where one machine has several.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterNode {
    /// Unique in the cluster.
    pub name: String,
    /// The catalogue's name for machines like it.
    pub kind: String,
    /// Built-in memory that weights may use.
    pub memory: Bytes,
    /// Share of `memory` that the system lets a model have.
    pub usable: f64,
    /// Memory bandwidth, bytes a second.
    pub bandwidth: f64,
    /// Whether `bandwidth` and `rates` were measured with our kernels; quoted otherwise.
    pub measured: bool,
    /// `None`: not known, and prefill cannot be predicted.
    pub rates: Option<Rates>,
    /// Reading weights from disk, bytes a second; `None` where it is not to be used.
    pub disk: Option<f64>,
    /// Watts when idle.
    pub idle_w: Option<f64>,
    /// Watts under load.
    pub load_w: Option<f64>,
    /// Price in dollars.
    pub price_usd: Option<f64>,
    /// The backend that computes.
    pub backend: Backend,
    /// Name of the engine whose constants apply.
    pub engine: String,
}

/// A measured connection between two nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeLink {
    /// An end of the link, index of a node.
    pub a: usize,
    /// The other end.
    pub b: usize,
    /// The catalogue's name, `tb5-rdma`.
    pub kind: String,
    /// Transport, which decides the cost of handing bytes over.
    pub transport: LinkTransport,
    /// Seconds for a small message, one way.
    pub alpha: f64,
    /// Bytes a second, one way.
    pub beta: f64,
    /// Whether all links of this kind share one medium, so that transfers at a time divide it.
    pub shared: bool,
}

/// Transport of bytes between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkTransport {
    /// GPU to GPU inside a machine (NVLink).
    Fabric,
    /// Remote direct memory access.
    Rdma,
    /// Sockets.
    Tcp,
    /// Shared memory of one machine.
    Shm,
}

/// Nodes and links.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// For reports.
    pub name: String,
    /// Machines.
    pub nodes: Vec<ClusterNode>,
    /// Several may join the same pair; the better one for a message is used.
    pub links: Vec<NodeLink>,
}

impl ClusterNode {
    /// Bytes that a model may use.
    pub fn budget(&self) -> f64 {
        self.memory.0 as f64 * self.usable
    }

    fn check(&self) -> Result<(), Error> {
        const RATE: &str = "more than 0 and finite";
        let what = format!("node {}", self.name);
        let memory = self.memory.0 as f64;
        finite_in(&what, "memory in bytes", memory, 1.0, 1e16, "1 to 10^16")?;
        finite_in(
            &what,
            "usable share of memory",
            self.usable,
            0.01,
            1.0,
            "0.01 to 1",
        )?;
        let tiny = f64::MIN_POSITIVE;
        finite_in(
            &what,
            "memory bandwidth in B/s",
            self.bandwidth,
            tiny,
            1e18,
            RATE,
        )?;
        if let Some(rates) = self.rates {
            for rate in [rates.matmul, rates.expert, rates.attention] {
                finite_in(&what, "rate in FLOP/s", rate, tiny, 1e20, RATE)?;
            }
        }
        for (field, value) in [
            ("disk rate in B/s", self.disk),
            ("idle power in W", self.idle_w.map(|w| w + tiny)),
            ("power under load in W", self.load_w),
            ("price in USD", self.price_usd.map(|usd| usd + tiny)),
        ] {
            if let Some(value) = value {
                finite_in(&what, field, value, tiny, 1e18, RATE)?;
            }
        }
        Ok(())
    }
}

impl NodeLink {
    /// Seconds to move `bytes` one way.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.alpha + bytes / self.beta
    }

    fn check(&self, nodes: &[ClusterNode]) -> Result<(), Error> {
        for end in [self.a, self.b] {
            if end >= nodes.len() {
                return Err(Error::LinkEnd {
                    link: self.kind.clone(),
                    problem: "no node named",
                    node: format!("#{end}"),
                });
            }
        }
        if self.a == self.b {
            return Err(Error::LinkEnd {
                link: self.kind.clone(),
                problem: "both ends are",
                node: nodes[self.a].name.clone(),
            });
        }
        let what = format!(
            "link {} of {} and {}",
            self.kind, nodes[self.a].name, nodes[self.b].name
        );
        finite_in(&what, "latency in s", self.alpha, 0.0, 3600.0, "0 to 3600")?;
        let (low, range) = (f64::MIN_POSITIVE, "more than 0 and finite");
        finite_in(&what, "bandwidth in B/s", self.beta, low, 1e18, range)
    }
}

impl Cluster {
    /// Refuses clusters that cannot be planned for, in time linear in nodes and links.
    ///
    /// # Errors
    /// [`Error::TooManyNodes`] before anything else is looked at; then the first node, link or
    /// gap that is wrong.
    pub fn check(&self) -> Result<(), Error> {
        if self.nodes.is_empty() {
            return Err(Error::NoNodes);
        }
        if self.nodes.len() > MAX_NODES {
            return Err(Error::TooManyNodes {
                got: self.nodes.len(),
                max: MAX_NODES,
            });
        }
        if self.links.len() > MAX_LINKS {
            return Err(Error::TooManyLinks {
                got: self.links.len(),
                max: MAX_LINKS,
            });
        }
        let mut names = BTreeMap::new();
        for node in &self.nodes {
            if names.insert(node.name.as_str(), ()).is_some() {
                return Err(Error::DuplicateNode {
                    name: node.name.clone(),
                });
            }
            node.check()?;
        }
        for link in &self.links {
            link.check(&self.nodes)?;
        }
        self.check_connected()
    }

    /// Every node can be reached from the first.
    fn check_connected(&self) -> Result<(), Error> {
        let mut neighbours = vec![Vec::new(); self.nodes.len()];
        for link in &self.links {
            neighbours[link.a].push(link.b);
            neighbours[link.b].push(link.a);
        }
        let mut seen = vec![false; self.nodes.len()];
        let mut open = vec![0];
        seen[0] = true;
        while let Some(node) = open.pop() {
            for &next in &neighbours[node] {
                if !seen[next] {
                    seen[next] = true;
                    open.push(next);
                }
            }
        }
        match seen.iter().position(|seen| !seen) {
            None => Ok(()),
            Some(lost) => Err(Error::Disconnected {
                a: self.nodes[0].name.clone(),
                b: self.nodes[lost].name.clone(),
            }),
        }
    }
}
