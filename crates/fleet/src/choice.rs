//! Request routing: chooses the replica of a model for a request.
//!
//! The replica with the longest cached prefix of the prompt wins. The least loaded replica wins if
//! that one is busier by more than a margin, or if no prefix is known.

use std::cmp::Reverse;

/// A replica as seen by the ingress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaCandidate {
    /// Whether it answers now.
    pub is_ready: bool,
    /// Its running requests, of all nodes.
    pub load: usize,
    /// Answers that it computes concurrently; further requests wait.
    pub parallel: usize,
    /// Leading blocks of the prompt (64 tokens each) in its prefix
    /// cache.
    pub blocks: usize,
    /// Requests that this ingress has sent to it.
    pub asked: u64,
}

/// The index of the chosen replica; `None` if there is none. Chooses one that is not ready only if
/// no replica is.
pub fn choose(replicas: &[ReplicaCandidate]) -> Option<usize> {
    let some_ready = replicas.iter().any(|it| it.is_ready);
    let open = || {
        let all = replicas.iter().enumerate();
        all.filter(move |(_, it)| it.is_ready || !some_ready)
    };
    let (idlest, idle) = open().min_by_key(|(_, it)| (it.load, Reverse(it.blocks), it.asked))?;
    let (warmest, warm) = open().min_by_key(|(_, it)| (Reverse(it.blocks), it.load, it.asked))?;
    match warm.load <= idle.load + margin(warm, idle) {
        true => Some(warmest),
        false => Some(idlest),
    }
}

/// How many more requests the replica with the longer prefix may have and still be chosen.
///
/// One request for each cached block, at most [`ReplicaCandidate::parallel`]. Both bounds are
/// estimates, not measurements. Prefill of a block delays the replica's other answers by one step
/// of 64 rows, about as much as one more concurrent answer. With `parallel` more requests, a
/// request waits for a whole answer, which takes longer than a prefill.
fn margin(warm: &ReplicaCandidate, idle: &ReplicaCandidate) -> usize {
    warm.blocks.saturating_sub(idle.blocks).min(warm.parallel)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(load: usize, blocks: usize) -> ReplicaCandidate {
        ReplicaCandidate {
            is_ready: true,
            load,
            parallel: 4,
            blocks,
            asked: 0,
        }
    }

    fn lost(load: usize, blocks: usize) -> ReplicaCandidate {
        ReplicaCandidate {
            is_ready: false,
            ..ready(load, blocks)
        }
    }

    #[test]
    fn the_longest_prefix_wins_unless_its_replica_is_too_busy() {
        let cases: [(&str, &[ReplicaCandidate], Option<usize>); 12] = [
            ("none", &[], None),
            ("the only one", &[ready(9, 0)], Some(0)),
            ("the idlest", &[ready(2, 0), ready(1, 0)], Some(1)),
            ("the first of equals", &[ready(1, 0), ready(1, 0)], Some(0)),
            ("the prefix", &[ready(0, 0), ready(0, 3)], Some(1)),
            ("longer", &[ready(0, 2), ready(0, 3)], Some(1)),
            ("busier by a block", &[ready(0, 0), ready(1, 1)], Some(1)),
            ("by more", &[ready(0, 0), ready(2, 1)], Some(0)),
            ("by parallel", &[ready(0, 0), ready(4, 99)], Some(1)),
            ("by more than that", &[ready(0, 0), ready(5, 99)], Some(0)),
            ("a little longer", &[ready(0, 98), ready(2, 99)], Some(0)),
            (
                "of equal prefixes the idlest",
                &[ready(1, 5), ready(0, 5)],
                Some(1),
            ),
        ];
        for (what, replicas, chosen) in cases {
            assert_eq!(choose(replicas), chosen, "{what}");
        }
    }

    #[test]
    fn a_replica_that_does_not_answer_is_avoided() {
        assert_eq!(choose(&[lost(0, 9), ready(7, 0)]), Some(1));
        assert_eq!(choose(&[ready(7, 0), lost(0, 9)]), Some(0));
        assert_eq!(choose(&[lost(1, 0), lost(0, 0)]), Some(1), "none answers");
    }

    #[test]
    fn requests_one_after_another_are_shared_out() {
        let mut replicas = [ready(0, 0); 3];
        for round in 1..=4 {
            for _ in 0..3 {
                let chosen = choose(&replicas).unwrap();
                replicas[chosen].asked += 1;
            }
            assert_eq!(replicas.map(|it| it.asked), [round; 3]);
        }
    }

    /// Eight prompts, each asked twice, all at the same time: halves for both, and every second
    /// request at the replica of the first.
    #[test]
    fn pairs_meet_and_replicas_stay_level() {
        let mut replicas = [ready(0, 0); 2];
        let mut homes = Vec::new();
        for _ in 0..8 {
            let chosen = choose(&replicas).unwrap();
            replicas[chosen].load += 1;
            homes.push(chosen);
        }
        for home in homes {
            let mut seen = replicas;
            seen[home].blocks = 3;
            assert_eq!(choose(&seen), Some(home));
            replicas[home].load += 1;
        }
        assert_eq!(replicas.map(|it| it.load), [8, 8]);
    }
}
