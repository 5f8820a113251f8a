//! Clusters: TOML files, and the short form `4 x mac-studio-m3-ultra-512 @ tb5-rdma`.

use serde::Deserialize;

use super::{Catalogue, HardwareEntry, LinkKind, ModelEntry, parse};
use crate::cluster::{MAX_LINKS, MAX_NODES};
use crate::{Cluster, ClusterNode, Error};

/// A cluster as a user writes it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// For reports.
    #[serde(default)]
    pub name: String,
    /// Machines.
    #[serde(default)]
    pub node: Vec<NodeEntry>,
    #[serde(default)]
    pub link: Vec<LinkEntry>,
    /// Machines that the catalogue lacks.
    #[serde(default)]
    pub hardware: Vec<HardwareEntry>,
    /// Kinds of link that the catalogue lacks.
    #[serde(default)]
    pub link_kind: Vec<LinkKind>,
    /// Models that the catalogue lacks.
    #[serde(default)]
    pub model: Vec<ModelEntry>,
}

/// Machines of one kind. Facts stated here go before the catalogue's.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct NodeEntry {
    /// Name, when `count` is 1.
    pub name: Option<String>,
    /// The catalogue's name.
    pub kind: String,
    /// Number of such nodes.
    pub count: Option<u32>,
    /// GB for weights.
    pub memory_gb: Option<f64>,
    pub memory_bandwidth_gb_s: Option<f64>,
    pub fp16_tflops: Option<f64>,
    /// Share of memory that a model may use.
    pub usable_fraction: Option<f64>,
    pub disk_gb_s: Option<f64>,
    /// Watts idle.
    pub idle_w: Option<f64>,
    /// Watts under load.
    pub load_w: Option<f64>,
    /// Dollars.
    pub price_usd: Option<f64>,
    /// Engine whose constants apply.
    pub engine: Option<String>,
    /// Threads, for processors.
    pub threads: Option<u32>,
}

/// A link among all nodes, or among those named.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct LinkEntry {
    /// The catalogue's name.
    pub kind: String,
    /// Names of nodes that the link joins, every pair of them; all when missing.
    pub between: Option<Vec<String>>,
    /// µs one way, before the catalogue's.
    pub latency_us: Option<f64>,
    /// Gbit/s one way, before the catalogue's.
    pub bandwidth_gbit_s: Option<f64>,
    /// Whether all share one medium.
    pub shared: Option<bool>,
    /// Cables of each pair, over which messages are divided; 1 when missing.
    pub cables: Option<u32>,
}

/// Most cables of a pair: a Mac has six ports for Thunderbolt, and other machines fewer.
const CABLES_MAX: u32 = 8;

/// Reads a cluster file and adds its tables to `catalogue`.
///
/// # Errors
/// Faults of the text or a number in it; names that are not known.
pub fn parse_cluster(text: &str, what: &str, catalogue: &mut Catalogue) -> Result<Cluster, Error> {
    let mut file: ClusterFile = parse(text, what)?;
    catalogue.add(Catalogue {
        hardware: std::mem::take(&mut file.hardware),
        links: std::mem::take(&mut file.link_kind),
        models: std::mem::take(&mut file.model),
    });
    if file.name.is_empty() {
        file.name = what.to_owned();
    }
    file.cluster(catalogue)
}

/// The link of a short form with several nodes that names none: what a desk's switch has.
const LINK_DEFAULT: &str = "10gbe";

/// A cluster of the short form: `[N x] KIND [+ [N x] KIND ...] [@ [N x] LINK]`. Spaces do not
/// matter; the link, or that number of cables of it, joins all nodes. Without a link it is
/// [`LINK_DEFAULT`], and the cluster's name says so.
///
/// # Errors
/// [`Error::Unknown`] for names that are not in the catalogue.
pub fn short_cluster(text: &str, catalogue: &Catalogue) -> Result<Cluster, Error> {
    let (machines, link) = text.split_once('@').unwrap_or((text, ""));
    let node: Vec<NodeEntry> = machines.split('+').map(short_node).collect();
    let is_several = node.len() > 1 || node[0].count > Some(1);
    let link = match link.trim() {
        "" if is_several => LINK_DEFAULT,
        named => named,
    };
    let name = match text.contains('@') || !is_several {
        true => text.trim().to_owned(),
        false => format!("{} @ {link}", text.trim()),
    };
    let (cables, link) = counted(link);
    let links = (!link.is_empty()).then(|| LinkEntry {
        kind: link.to_owned(),
        cables: Some(cables),
        ..LinkEntry::default()
    });
    let file = ClusterFile {
        name,
        node,
        link: links.into_iter().collect(),
        ..ClusterFile::default()
    };
    file.cluster(catalogue)
}

/// A kind and its number: `4 x KIND`, or `KIND` for one.
fn counted(text: &str) -> (u32, &str) {
    let text = text.trim();
    let counted = text.split_once(['x', '*', ' ']).and_then(|(count, kind)| {
        let count = count.trim().parse().ok()?;
        Some((count, kind.trim().trim_start_matches(['x', '*']).trim()))
    });
    counted.unwrap_or((1, text))
}

fn short_node(text: &str) -> NodeEntry {
    let (count, kind) = counted(text);
    NodeEntry {
        kind: kind.to_owned(),
        count: Some(count),
        ..NodeEntry::default()
    }
}

impl ClusterFile {
    /// Looks up kinds and joins nodes.
    ///
    /// # Errors
    /// The errors of [`parse_cluster`].
    pub fn cluster(&self, catalogue: &Catalogue) -> Result<Cluster, Error> {
        let counts = self
            .node
            .iter()
            .map(|node| u64::from(node.count.unwrap_or(1)));
        let total: u64 = counts.sum();
        if total > MAX_NODES as u64 {
            let got = usize::try_from(total).unwrap_or(usize::MAX);
            return Err(Error::TooManyNodes {
                got,
                max: MAX_NODES,
            });
        }
        let mut cluster = Cluster {
            name: self.name.clone(),
            nodes: Vec::new(),
            links: Vec::new(),
        };
        for entry in &self.node {
            for _ in 0..entry.count.unwrap_or(1) {
                cluster
                    .nodes
                    .push(entry.node(catalogue, cluster.nodes.len())?);
            }
        }
        for entry in &self.link {
            entry.join(catalogue, &mut cluster)?;
        }
        cluster.check()?;
        Ok(cluster)
    }
}

impl NodeEntry {
    fn node(&self, catalogue: &Catalogue, index: usize) -> Result<ClusterNode, Error> {
        let known = catalogue.machine(&self.kind)?;
        let mut entry = HardwareEntry {
            kind: known.kind.clone(),
            memory_gb: self.memory_gb,
            memory_bandwidth_gb_s: self.memory_bandwidth_gb_s,
            fp16_tflops: self.fp16_tflops,
            usable_fraction: self.usable_fraction,
            disk_gb_s: self.disk_gb_s,
            idle_w: self.idle_w,
            load_w: self.load_w,
            price_usd: self.price_usd,
            engine: self.engine.clone(),
            source: known.source.clone(),
            ..HardwareEntry::default()
        };
        entry.complete(known);
        let single = self.name.clone().filter(|_| self.count.unwrap_or(1) == 1);
        let name = single.unwrap_or_else(|| format!("n{index}"));
        entry.node(&name, self.threads)
    }
}

impl LinkEntry {
    fn join(&self, catalogue: &Catalogue, cluster: &mut Cluster) -> Result<(), Error> {
        let known = catalogue.link(&self.kind)?;
        let cables = self.cables.unwrap_or(1);
        crate::check::whole_in(&self.kind, "cables of a pair", cables, 1, CABLES_MAX)?;
        let members = match &self.between {
            None => (0..cluster.nodes.len()).collect(),
            Some(names) => self.members(names, cluster)?,
        };
        let got = cluster.links.len() + members.len() * members.len().saturating_sub(1) / 2;
        if got > MAX_LINKS {
            let max = MAX_LINKS;
            return Err(Error::TooManyLinks { got, max });
        }
        for (i, &a) in members.iter().enumerate() {
            for &b in &members[i + 1..] {
                let mut link = known.between(a, b);
                link.alpha = self.latency_us.map_or(link.alpha, |us| us * 1e-6);
                link.beta = self
                    .bandwidth_gbit_s
                    .map_or(link.beta, |gbit| gbit * 1e9 / 8.0)
                    * f64::from(cables);
                link.shared = self.shared.unwrap_or(link.shared);
                cluster.links.push(link);
            }
        }
        Ok(())
    }

    fn members(&self, names: &[String], cluster: &Cluster) -> Result<Vec<usize>, Error> {
        let end = |name: &String| {
            let found = cluster.nodes.iter().position(|node| node.name == *name);
            found.ok_or_else(|| Error::LinkEnd {
                link: self.kind.clone(),
                problem: "no node named",
                node: name.clone(),
            })
        };
        names.iter().map(end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_machines_without_a_link_have_the_default_one() {
        let catalogue = Catalogue::builtin().unwrap();
        let of = |text: &str| short_cluster(text, &catalogue).unwrap();
        let two = of("2 x mac-studio-m3-ultra-256");
        assert_eq!(two.name, "2 x mac-studio-m3-ultra-256 @ 10gbe");
        assert_eq!(two.links, of("2 x mac-studio-m3-ultra-256 @ 10gbe").links);
        assert!(of("raspberry-pi-5-8").links.is_empty());
    }

    #[test]
    fn cables_multiply_the_bandwidth_of_a_pair() {
        let catalogue = Catalogue::builtin().unwrap();
        let of = |link: &str| {
            let text = format!("2 x mac-studio-m3-ultra-512 @ {link}");
            short_cluster(&text, &catalogue).map(|cluster| cluster.links[0].clone())
        };
        let (one, two) = (of("tb5-rdma").unwrap(), of("2 x tb5-rdma").unwrap());
        assert_eq!((two.alpha, two.beta), (one.alpha, 2.0 * one.beta));
        for cables in ["0 x tb5-rdma", "9 x tb5-rdma"] {
            let error = of(cables).unwrap_err().to_string();
            assert!(error.contains("cables of a pair"), "{error}");
        }
    }
}
