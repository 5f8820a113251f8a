//! Revocations in the shared map, each signed by a member.
//!
//! ```text
//! revoked/ID -> signature by a member's static key of "paceline revocation 1", ID
//! ```
//! Any member may revoke another one, and others forward the entry. The signature proves which
//! member wrote it, or received it with a new key from another one. An entry without a signature,
//! or by a node not in the map, is refused. A revocation is final, so a replayed entry changes
//! nothing.
//!
//! Nodes can be removed from the map, revocations cannot. A member that has a revocation of a
//! removed signer signs it again, so that newcomers accept it. The same holds for unsigned
//! revocations of earlier versions, which are valid on a node's own disk.

use super::identity::{Error, Identity};
use super::{NodeId, RegisterKey, Registers, Signature};

fn message(id: NodeId) -> Vec<u8> {
    format!("paceline revocation 1\n{id}\n").into_bytes()
}

/// The entry of a node that `by` revokes.
///
/// # Errors
/// [`Error::Random`].
pub(super) fn entry(by: &Identity, id: NodeId) -> Result<String, Error> {
    let signature = by.sign(&message(id))?;
    Ok(serde_json::to_string(&signature).expect("a signature is JSON"))
}

/// Whether another node of the map has signed the entry of `id`. Cost: 0.2 ms.
pub(super) fn is_signed(map: &Registers, id: NodeId, entry: &str) -> bool {
    let Some((by, signature)) = signed(map, entry) else {
        return false;
    };
    by != id && signature.is_of(by, &message(id))
}

/// Revoked nodes whose entries have no signer in the map, and the entries' epochs.
pub(super) fn unsigned(map: &Registers) -> Vec<(NodeId, u64)> {
    let of = |(key, register): (&RegisterKey, &super::Register)| match (key, &register.value) {
        (RegisterKey::Revoked(id), Some(entry)) if signed(map, entry).is_none() => {
            Some((*id, register.epoch))
        }
        _ => None,
    };
    map.iter().filter_map(of).collect()
}

/// The signature of an entry, and its claimed signer in the map. A node that left counts until its
/// tombstone is removed.
fn signed(map: &Registers, entry: &str) -> Option<(NodeId, Signature)> {
    let signature: Signature = serde_json::from_str(entry).ok()?;
    let by = signature.claimed()?;
    map.register(&RegisterKey::Node(by))?;
    Some((by, signature))
}

#[cfg(test)]
mod tests {
    use super::super::{HybridTimestamp, Register};
    use super::*;

    #[test]
    fn only_another_node_of_the_map_revokes() {
        let [one, two] = [(); 2].map(|()| Identity::random().unwrap());
        let facts = |node: NodeId| Register {
            epoch: 0,
            stamp: HybridTimestamp {
                ms: 1,
                count: 0,
                node,
            },
            value: Some("{}".to_owned()),
        };
        let id = NodeId([3; 16]);
        let known = (RegisterKey::Node(one.id()), facts(one.id()));
        let map = Registers::from_entries([known]);
        let by_one = entry(&one, id).unwrap();
        assert!(is_signed(&map, id, &by_one));
        assert!(!is_signed(&map, NodeId([4; 16]), &by_one), "another node");
        assert!(!is_signed(&map, id, &entry(&two, id).unwrap()), "unknown");
        assert!(!is_signed(&map, one.id(), &entry(&one, one.id()).unwrap()));
        assert!(!is_signed(&map, id, "{}"));

        let revoked = |value: String| Register {
            epoch: 2,
            value: Some(value),
            ..facts(one.id())
        };
        let entries = [
            (NodeId([3; 16]), by_one),
            (NodeId([4; 16]), entry(&two, id).unwrap()),
            (NodeId([5; 16]), "{}".to_owned()),
        ];
        let entries = entries.map(|(id, value)| (RegisterKey::Revoked(id), revoked(value)));
        let all = entries
            .into_iter()
            .chain([(RegisterKey::Node(one.id()), facts(id))]);
        let map = Registers::from_entries(all);
        assert_eq!(unsigned(&map), [4, 5].map(|id| (NodeId([id; 16]), 2)));
    }
}
