//! The choice of algorithms.

use crate::Collective;

paceline_base::named_enum! {
    /// Algorithm of a collective. `docs/algorithms.md` has steps and bytes of each.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Algorithm {
        /// Every rank sends to every other at once. Sums in rank order.
        OneShot = "one-shot",
        /// All-reduce: each rank reduces one chunk and broadcasts the result. Sums in rank order.
        TwoShot = "two-shot",
        /// Data moves around a ring; sums follow the ring.
        Ring = "ring",
        /// All-reduce: recursive halving, then doubling; sums follow a tree over the ranks.
        Halving = "halving",
        /// All-reduce: recursive doubling; sums follow a tree over the ranks.
        Doubling = "doubling",
        /// Broadcast along a binomial tree.
        Tree = "tree",
    }
}

impl Algorithm {
    /// Its number on the wire.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }
}

/// The measurements behind the choice of algorithms. All ranks agree on them when a group is made,
/// as all must choose alike.
///
/// Measurements choose only among algorithms that give the same bits (one-shot and two-shot sum in
/// rank order). So a result never depends on the state of the network. The other algorithms run
/// only on request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// α: fixed time of a step, in microseconds.
    pub alpha_us: f64,
    /// β: time for each byte that a rank sends, in nanoseconds.
    pub beta_ns: f64,
    /// Use this algorithm wherever the operation has it.
    pub force: Option<Algorithm>,
    /// Whether the processor may idle while a transfer runs: some pair is joined by a cable, or by
    /// a connection that leaves the machine. Long exchanges then gain from overlapping other work.
    /// Elsewhere they take processor time from it. No choice of an algorithm depends on this.
    /// Groups of foreign libraries (MLX, MPI, NCCL), which agree on nothing, report false.
    pub wire: bool,
}

/// γ: time for each byte that is reduced, in nanoseconds. A sum of two f32 vectors from L2 runs at
/// about 10 GB/s of either on the machines of `docs/algorithms.md`.
const GAMMA_NS: f64 = 0.1;

impl Default for Tuning {
    /// TCP over loopback, as measured on a 2-core EPYC VM, November 2026.
    fn default() -> Self {
        Self {
            alpha_us: 5.0,
            beta_ns: 0.3,
            force: None,
            wire: false,
        }
    }
}

impl Tuning {
    /// The expected time of an all-reduce of `bytes` by `algorithm`, in microseconds.
    pub fn all_reduce_us(&self, algorithm: Algorithm, bytes: usize, size: usize) -> f64 {
        let (bytes, ranks) = (bytes as f64, size as f64);
        let rounds = ranks.log2().ceil();
        let share = (ranks - 1.0) / ranks;
        let (steps, sent, reduced) = match algorithm {
            Algorithm::OneShot | Algorithm::Tree => {
                (1.0, (ranks - 1.0) * bytes, (ranks - 1.0) * bytes)
            }
            Algorithm::TwoShot => (2.0, 2.0 * share * bytes, share * bytes),
            Algorithm::Ring => (2.0 * (ranks - 1.0), 2.0 * share * bytes, share * bytes),
            Algorithm::Halving => (2.0 * rounds, 2.0 * share * bytes, share * bytes),
            Algorithm::Doubling => (rounds, rounds * bytes, rounds * bytes),
        };
        steps * self.alpha_us + (sent * self.beta_ns + reduced * GAMMA_NS) / 1e3
    }

    /// The expected time of a broadcast, in microseconds.
    fn broadcast_us(&self, algorithm: Algorithm, bytes: usize, size: usize) -> f64 {
        let (steps, copies) = match algorithm {
            Algorithm::Tree => (f64::from(size.next_power_of_two().ilog2()), 1.0),
            _ => (1.0, (size - 1) as f64),
        };
        let each = copies * bytes as f64 * self.beta_ns / 1e3;
        match algorithm {
            Algorithm::Tree => steps * (self.alpha_us + each),
            _ => self.alpha_us + each,
        }
    }

    /// The algorithm of an all-reduce of `bytes` over `size` ranks.
    pub fn all_reduce(&self, bytes: usize, size: usize) -> Algorithm {
        let rank_order = [Algorithm::OneShot, Algorithm::TwoShot];
        self.force
            .filter(|forced| *forced != Algorithm::Tree)
            .unwrap_or_else(|| cheapest(rank_order, |a| self.all_reduce_us(a, bytes, size)))
    }

    /// The algorithm of a broadcast of `bytes` over `size` ranks.
    pub fn broadcast(&self, bytes: usize, size: usize) -> Algorithm {
        let both = [Algorithm::OneShot, Algorithm::Tree];
        let forced = self.force.filter(|forced| both.contains(forced));
        forced.unwrap_or_else(|| cheapest(both, |a| self.broadcast_us(a, bytes, size)))
    }

    /// Gathers and scatters use a ring only if forced. Every rank has a link to every other, so the
    /// direct exchange moves the same bytes in one step.
    fn ring_or_one_shot(&self) -> Algorithm {
        match self.force {
            Some(Algorithm::Ring) => Algorithm::Ring,
            _ => Algorithm::OneShot,
        }
    }

    /// The table of choices over `size` ranks, as text: each algorithm and its smallest buffer.
    pub fn explain(&self, size: usize) -> String {
        let mut text = format!(
            "{size} ranks, alpha {:.1} us, beta {:.3} ns per byte\n",
            self.alpha_us, self.beta_ns
        );
        type Choose<'a> = &'a dyn Fn(usize) -> Algorithm;
        let rows: [(&str, Choose<'_>); 5] = [
            ("all_reduce", &|bytes| self.all_reduce(bytes, size)),
            ("all_gather", &|_| self.ring_or_one_shot()),
            ("reduce_scatter", &|_| self.ring_or_one_shot()),
            ("broadcast", &|bytes| self.broadcast(bytes, size)),
            ("all_to_all", &|_| Algorithm::OneShot),
        ];
        for (name, choose) in rows {
            text += &format!("{name:<15} {}", choose(4));
            let mut last = choose(4);
            for bytes in (3..31).map(|bit| 1_usize << bit) {
                if choose(bytes) != last {
                    last = choose(bytes);
                    text += &format!(", from {} {last}", paceline_base::Bytes(bytes as u64));
                }
            }
            text.push('\n');
        }
        text
    }
}

fn cheapest(among: [Algorithm; 2], cost: impl Fn(Algorithm) -> f64) -> Algorithm {
    if cost(among[1]) < cost(among[0]) {
        among[1]
    } else {
        among[0]
    }
}

/// The algorithm of `collective` for `size` ranks: the same on all of them.
pub(crate) fn choose(collective: &Collective<'_>, tuning: &Tuning, size: usize) -> Algorithm {
    match collective {
        _ if size == 1 => Algorithm::OneShot,
        Collective::Barrier | Collective::AllToAll { .. } => Algorithm::OneShot,
        Collective::AllReduce { data, .. } => tuning.all_reduce(data.bytes().len(), size),
        Collective::Broadcast { data, .. } => tuning.broadcast(data.bytes().len(), size),
        Collective::AllGather { .. } | Collective::ReduceScatter { .. } => {
            tuning.ring_or_one_shot()
        }
    }
}
