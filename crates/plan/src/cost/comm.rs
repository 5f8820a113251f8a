//! Alpha-beta cost of exchanges.
//!
//! A message of n bytes takes alpha + n/beta on a link (Hockney, Parallel Computing 20, 1994).
//! For P ranks and an all-reduce of n bytes (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005):
//!
//! | algorithm | steps | bytes sent per rank | seconds |
//! |---|---|---|---|
//! | one-shot exchange | 1 | (P-1) n | alpha + (P-1) n / beta |
//! | recursive doubling | ceil(log2 P) | ceil(log2 P) n | ceil(log2 P) (alpha + n/beta) |
//! | ring | 2 (P-1) | 2 n (P-1)/P | 2 (P-1) (alpha + n/(P beta)) |
//!
//! On a shared medium (Wi-Fi, a hub) the bytes of all ranks add up.

use crate::NodeLink;

/// Algorithm of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostedAlgorithm {
    /// Everybody sends everything to everybody.
    OneShot,
    /// Pairs, then pairs of pairs.
    RecursiveDoubling,
    /// Reduce-scatter, then all-gather, around a ring.
    Ring,
}

/// Seconds of an all-reduce of `bytes` among `ranks` by `algorithm`.
pub fn all_reduce_by(algorithm: CostedAlgorithm, link: &NodeLink, ranks: usize, bytes: f64) -> f64 {
    if ranks < 2 {
        return 0.0;
    }
    let p = ranks as f64;
    let doublings = f64::from(usize::BITS - (ranks - 1).leading_zeros());
    // On a shared medium the transfers of a step follow each other.
    let at_once = if link.shared { p } else { 1.0 };
    let transfer = at_once * bytes / link.beta;
    match algorithm {
        CostedAlgorithm::OneShot => link.alpha + (p - 1.0) * transfer,
        CostedAlgorithm::RecursiveDoubling => doublings * (link.alpha + transfer),
        CostedAlgorithm::Ring => 2.0 * (p - 1.0) * (link.alpha + transfer / p),
    }
}

/// The soonest of the algorithms and its seconds; ties go to the one with fewest steps.
pub fn all_reduce(link: &NodeLink, ranks: usize, bytes: f64) -> (CostedAlgorithm, f64) {
    let all = [
        CostedAlgorithm::OneShot,
        CostedAlgorithm::RecursiveDoubling,
        CostedAlgorithm::Ring,
    ];
    let timed = all.map(|algorithm| (algorithm, all_reduce_by(algorithm, link, ranks, bytes)));
    let soonest =
        |x: (CostedAlgorithm, f64), y: (CostedAlgorithm, f64)| if y.1 < x.1 { y } else { x };
    timed.into_iter().fold(timed[0], soonest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LinkTransport;

    fn link(alpha: f64, beta: f64, shared: bool) -> NodeLink {
        NodeLink {
            a: 0,
            b: 1,
            kind: "test".into(),
            transport: LinkTransport::Tcp,
            alpha,
            beta,
            shared,
        }
    }

    #[test]
    fn steps_and_bytes_are_those_of_the_table() {
        let l = link(1.0, 1.0, false);
        for (ranks, one_shot, doubling, ring) in [
            (1, 0.0, 0.0, 0.0),
            (2, 13.0, 13.0, 14.0),
            (3, 25.0, 26.0, 20.0),
            (4, 37.0, 26.0, 24.0),
            (5, 49.0, 39.0, 8.0 * (1.0 + 12.0 / 5.0)),
        ] {
            let by = |a| all_reduce_by(a, &l, ranks, 12.0);
            assert_eq!(by(CostedAlgorithm::OneShot), one_shot, "{ranks}");
            assert_eq!(by(CostedAlgorithm::RecursiveDoubling), doubling, "{ranks}");
            assert!((by(CostedAlgorithm::Ring) - ring).abs() < 1e-12, "{ranks}");
        }
    }

    #[test]
    fn small_messages_want_few_steps_and_large_ones_few_bytes() {
        let l = link(5e-6, 6e9, false);
        assert_eq!(all_reduce(&l, 4, 8192.0).0, CostedAlgorithm::OneShot);
        assert_eq!(all_reduce(&l, 4, 64e6).0, CostedAlgorithm::Ring);
        assert_eq!(all_reduce(&l, 1, 64e6).1, 0.0);
    }

    #[test]
    fn a_shared_medium_pays_for_every_rank() {
        let (own, shared) = (link(0.0, 1.0, false), link(0.0, 1.0, true));
        assert_eq!(all_reduce_by(CostedAlgorithm::OneShot, &own, 4, 1.0), 3.0);
        assert_eq!(
            all_reduce_by(CostedAlgorithm::OneShot, &shared, 4, 1.0),
            12.0
        );
    }
}
