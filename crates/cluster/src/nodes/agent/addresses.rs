//! Address book: addresses of nodes, and how each was discovered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use super::super::NodeId;
use super::super::discovery::DiscoveryMethod;
use super::super::member::PEERS_MAX;

/// Most addresses of a node: two families on four interfaces.
const ADDRESSES_MAX: usize = 8;

/// Addresses by node, the last working one first, and the methods by which each node was
/// discovered.
#[derive(Debug, Default)]
pub(super) struct AddressBook(
    BTreeMap<NodeId, Vec<(SocketAddr, DiscoveryMethod)>>,
    BTreeMap<NodeId, BTreeSet<DiscoveryMethod>>,
);

impl AddressBook {
    /// Adds an address; drops the oldest one if there are too many.
    pub(super) fn add(&mut self, id: NodeId, addr: SocketAddr, how: DiscoveryMethod) {
        if self.0.len() >= PEERS_MAX && !self.0.contains_key(&id) {
            return;
        }
        self.1.entry(id).or_default().insert(how);
        let known = self.0.entry(id).or_default();
        match known.iter_mut().find(|(other, _)| *other == addr) {
            Some((_, before)) => *before = how.min(*before),
            None => {
                known.truncate(ADDRESSES_MAX - 1);
                known.push((addr, how));
            }
        }
    }

    /// Puts an address first, because a session was established there.
    pub(super) fn worked(&mut self, id: NodeId, addr: SocketAddr, how: DiscoveryMethod) {
        self.add(id, addr, how);
        let known = self.0.entry(id).or_default();
        if let Some(at) = known.iter().position(|(other, _)| *other == addr) {
            known[..=at].rotate_right(1);
        }
    }

    pub(super) fn addresses(&self, id: NodeId) -> Vec<SocketAddr> {
        let known = self.0.get(&id).into_iter().flatten();
        known.map(|(addr, _)| *addr).collect()
    }

    /// Whether a node has this address.
    pub(super) fn is_address(&self, ip: IpAddr) -> bool {
        let mut known = self.0.values().flatten();
        known.any(|(addr, _)| addr.ip().to_canonical() == ip)
    }

    pub(super) fn heard_by(&self, id: NodeId) -> Vec<DiscoveryMethod> {
        self.1.get(&id).into_iter().flatten().copied().collect()
    }

    /// The best method by which a node was discovered.
    pub(super) fn how(&self, id: NodeId) -> DiscoveryMethod {
        let known = self.0.get(&id).into_iter().flatten();
        known
            .map(|(_, how)| *how)
            .min()
            .unwrap_or(DiscoveryMethod::Told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_that_worked_comes_first_and_the_list_is_bounded() {
        let (mut book, id) = (AddressBook::default(), NodeId([1; 16]));
        let addr = |port| SocketAddr::from(([10, 0, 0, 1], port));
        for port in 1..=20 {
            book.add(id, addr(port), DiscoveryMethod::Told);
        }
        assert_eq!(book.addresses(id).len(), ADDRESSES_MAX);
        book.worked(id, addr(3), DiscoveryMethod::Beacon4);
        assert_eq!(book.addresses(id)[..2], [addr(3), addr(1)]);
        assert_eq!(book.how(id), DiscoveryMethod::Beacon4);
        assert_eq!(book.how(NodeId([2; 16])), DiscoveryMethod::Told);
    }
}
