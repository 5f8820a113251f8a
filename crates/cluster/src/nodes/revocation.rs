//! Which nodes are revoked, from the revocations in the shared map.
//!
//! ```text
//! revoked/ID, slot of a member -> that member revokes ID
//! ```
//! A revocation counts while its signer is not revoked itself. One signer alone has **one**
//! revocation; each further one needs a second signer. So no member can revoke all others at once.
//!
//! - A member's only revocation without a second signer is the earliest such one, by timestamp.
//! - A node's own revocations always count on that node.
//! - Of two nodes that revoke each other, both are revoked, until a third member decides.
//! - Every member signs a single revocation after a day, so that its signer can write another.
//!
//! The result depends on the set of revocations only, not on the order of their arrival. It is the
//! grounded extension of an argumentation framework, with revocations as attacks. Undecided nodes
//! count as revoked. Source: Dung, Artificial Intelligence 77, 1995.
//!
//! A revocation is final: nobody deletes it. It ends when its signers are revoked.

use std::collections::{BTreeMap, BTreeSet};

use super::{HybridTimestamp, NodeId};

/// The timestamps of revocations, which name the signers, by the revoked node.
pub(super) type Claims = BTreeMap<NodeId, Vec<HybridTimestamp>>;

/// The revoked nodes as the node `own` sees them, without itself.
pub(super) fn revoked(claims: &Claims, own: Option<NodeId>) -> BTreeSet<NodeId> {
    let alone = alone(claims);
    let counts = |id: &NodeId, signers: &[HybridTimestamp], signer: NodeId| {
        signers.len() > 1 || own == Some(signer) || alone.get(&signer) == Some(id)
    };
    let (mut stay, mut go) = (BTreeSet::new(), BTreeSet::new());
    stay.extend(own);
    loop {
        let before = stay.len() + go.len();
        for (id, signers) in claims {
            if stay.contains(id) || go.contains(id) {
                continue;
            }
            let mut by = signers.iter().map(|stamp| stamp.node);
            let is_valid = |signer: &NodeId| !claims.contains_key(signer) || stay.contains(signer);
            if by
                .clone()
                .any(|it| counts(id, signers, it) && is_valid(&it))
            {
                go.insert(*id);
            } else if by.all(|it| !counts(id, signers, it) || go.contains(&it)) {
                stay.insert(*id);
            }
        }
        if stay.len() + go.len() == before {
            let revoked = claims.keys().filter(|id| !stay.contains(*id));
            return revoked.copied().collect();
        }
    }
}

/// The one node that each member revokes without a second signer.
fn alone(claims: &Claims) -> BTreeMap<NodeId, NodeId> {
    let mut earliest: BTreeMap<NodeId, (HybridTimestamp, NodeId)> = BTreeMap::new();
    for (id, signers) in claims {
        if let [stamp] = signers[..] {
            let first = earliest.entry(stamp.node).or_insert((stamp, *id));
            *first = (*first).min((stamp, *id));
        }
    }
    earliest.into_iter().map(|(by, (_, id))| (by, id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    /// The nodes revoked by `claims`, each a signer, its target and a time, as `own` sees them.
    fn gone(claims: &[(u8, u8, u64)], own: u8) -> Vec<u8> {
        let mut all = Claims::new();
        for (by, of, ms) in claims {
            let (ms, count, node) = (*ms, 0, id(*by));
            let stamp = HybridTimestamp { ms, count, node };
            all.entry(id(*of)).or_default().push(stamp);
        }
        let gone = revoked(&all, Some(id(own)));
        gone.iter().map(|id| id.0[0]).collect()
    }

    #[test]
    fn one_signer_revokes_one_node_and_two_revoke_any_number() {
        assert_eq!(gone(&[(1, 5, 1)], 9), [5]);
        assert_eq!(gone(&[(1, 5, 1), (1, 6, 2), (1, 7, 3)], 9), [5]);
        let both = [(1, 5, 1), (1, 6, 2), (1, 7, 3), (2, 6, 9), (2, 7, 9)];
        assert_eq!(gone(&both, 9), [5, 6, 7]);
        // A second signer frees the first one for another revocation.
        assert_eq!(gone(&[(1, 5, 1), (2, 5, 2), (1, 6, 3)], 9), [5, 6]);
        assert_eq!(gone(&[(1, 5, 1), (1, 6, 2)], 1), [5, 6], "its own view");
    }

    #[test]
    fn a_revoked_node_revokes_nobody() {
        for (claims, expected) in [
            // Node 5 is bad; 1, 2 and 3 are not.
            (&[(5, 1, 1), (2, 5, 2)][..], &[5][..]),
            (&[(5, 1, 1), (5, 2, 2), (5, 3, 3), (2, 5, 4)], &[5]),
            (&[(5, 1, 1), (1, 5, 2)], &[1, 5]), // each the other
            (&[(5, 1, 1), (1, 5, 2), (2, 5, 3)], &[5]),
            (&[(5, 1, 1), (5, 2, 0), (1, 5, 2), (2, 5, 3)], &[5]),
            // It signs a revocation of another: that one's signer stays.
            (&[(1, 4, 1), (5, 4, 2), (2, 5, 3)], &[4, 5]),
        ] {
            assert_eq!(gone(claims, 9), expected, "{claims:?}");
        }
        assert_eq!(gone(&[(5, 1, 1), (1, 5, 2)], 1), [5], "its own view");
    }

    #[test]
    fn the_order_of_arrival_does_not_matter() {
        let mut random = paceline_base::SplitMix64::new(55);
        for _ in 0..500 {
            let mut draw = |bound: usize| random.below(bound) as u8;
            let claims = (0..1 + draw(8)).map(|_| (draw(5), draw(5), u64::from(draw(9))));
            let mut claims: Vec<(u8, u8, u64)> = claims.filter(|(by, of, _)| by != of).collect();
            claims.sort_unstable();
            claims.dedup_by_key(|(by, of, _)| (*by, *of));
            let first = gone(&claims, 9);
            for _ in 0..3 {
                let by = claims.len().min(1);
                claims.rotate_left(by);
                assert_eq!(gone(&claims, 9), first, "{claims:?}");
            }
        }
    }
}
