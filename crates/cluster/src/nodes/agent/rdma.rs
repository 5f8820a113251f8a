//! This node's RDMA devices, and the cables that its machine trusts.

use std::net::IpAddr;

use paceline_base::lock;

use super::super::NodeId;
use super::super::rdma::{self, Cable, CableEnd, CableView, RdmaDevice, TRUSTED_MAX};
use super::state::State;
use super::{Agent, Error, NodeFacts, NodeView, facts};

/// Whether a machine sends data of workers over a cable without encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CableTrust {
    Trusted,
    Untrusted,
}

impl Agent {
    /// Publishes this node's RDMA devices. Returns before the other nodes have them.
    pub fn set_rdma(&self, devices: Vec<RdmaDevice>) {
        lock(&self.inner.state).rdma = rdma::bounded(devices);
        self.inner.write_facts();
    }

    /// The RDMA cables between two nodes, by their facts and measured paths.
    pub fn cables(&self, a: NodeId, b: NodeId) -> Vec<Cable> {
        let state = lock(&self.inner.state);
        state.cables(a, b)
    }

    /// Whether this machine trusts the cable from a device of its own to a node.
    pub fn trusts_cable(&self, device: &str, node: NodeId) -> bool {
        let state = lock(&self.inner.state);
        state.trusted.contains(&(device.to_owned(), node))
    }

    /// The RDMA cables of this machine.
    pub fn cable_list(&self) -> Vec<CableView> {
        let (own, nodes) = (self.id(), self.nodes());
        let Some(own_name) = nodes.iter().find(|node| node.id == own) else {
            return Vec::new();
        };
        let own_name = &own_name.facts.name;
        let of_node = |node: &NodeView| {
            let cables = self.cables(own, node.id).into_iter();
            let view = |Cable { devices, trusted }: Cable| CableView {
                link: format!("{}:{}", devices[0], node.facts.name),
                other: format!("{}:{own_name}", devices[1]),
                here: trusted[0],
                there: trusted[1],
            };
            cables.map(view).collect::<Vec<_>>()
        };
        let others = nodes.iter().filter(|node| node.id != own);
        others.flat_map(of_node).collect()
    }

    /// Trusts a cable of this machine, or no longer does. `link` is a name of
    /// [`cable_list`](Self::cable_list); a cable that is unplugged can still lose its trust.
    ///
    /// # Errors
    /// [`Error::NoCable`], [`Error::NoNode`], [`Error::Ambiguous`], [`Error::File`].
    pub fn trust_cable(&self, link: &str, trust: CableTrust) -> Result<(), Error> {
        let unknown = || Error::NoCable {
            link: link.to_owned(),
        };
        let (device, node) = link.rsplit_once(':').ok_or_else(unknown)?;
        let node = self.find(node)?.id;
        let cables = self.cables(self.id(), node);
        let is_there = cables.iter().any(|cable| cable.devices[0] == device);
        let inner = &self.inner;
        let _turn = inner.files.turn();
        let mut trusted = lock(&inner.state).trusted.clone();
        let entry = (device.to_owned(), node);
        let is_known = match trust {
            CableTrust::Trusted => is_there && trusted.len() < TRUSTED_MAX,
            CableTrust::Untrusted => is_there || trusted.contains(&entry),
        };
        if !is_known {
            return Err(unknown());
        }
        match trust {
            CableTrust::Trusted => trusted.insert(entry),
            CableTrust::Untrusted => trusted.remove(&entry),
        };
        inner.files.save_trusted(&trusted)?;
        lock(&inner.state).trusted = trusted;
        inner.write_facts();
        Ok(())
    }
}

impl State {
    fn cables(&self, a: NodeId, b: NodeId) -> Vec<Cable> {
        let devices = [a, b].map(|id| {
            let NodeFacts { rdma, data, .. } = facts::of(self.member.map(), id).unwrap_or_default();
            let is_for_data = |device: &RdmaDevice| {
                let address = device.address.map(IpAddr::V4);
                data.is_empty() || address.is_some_and(|address| data.contains(&address))
            };
            rdma.into_iter().filter(is_for_data).collect::<Vec<_>>()
        });
        let paths = [a, b].map(|id| self.paths(id));
        let end = |node, at: usize| CableEnd {
            node,
            devices: &devices[at],
            paths: &paths[at],
        };
        rdma::cables(end(a, 0), end(b, 1))
    }

    /// The devices of this node, with the nodes to which their cables are trusted.
    pub(super) fn rdma_facts(&self) -> Vec<RdmaDevice> {
        let mut devices = self.rdma.clone();
        for device in &mut devices {
            let trusted = self.trusted.iter().filter(|(name, _)| *name == device.name);
            device.trusted = trusted.map(|(_, node)| *node).collect();
        }
        devices
    }
}
