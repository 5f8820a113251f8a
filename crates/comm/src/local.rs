//! Ranks as threads of one process. They use the same rings as processes (`shared_rings`), without
//! a join, heartbeats or silence limits.
//!
//! A message longer than a ring is transferred while its receiver polls: `send` waits for that.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use paceline_base::Rank;

use crate::locks::lock;
use crate::shared_rings::{FailureNotifier, Segment, SharedRings};
use crate::split::{SplitMember, members};
use crate::status::GroupStatus;
use crate::transport::SpinPolicy;
use crate::transport_group::TransportGroup;
use crate::{Deadline, Error, Group, Tuning};

/// Polls of the rings, with a pause instruction between them, before a rank yields its core: some
/// µs.
///
/// A peer that arrives within this time is noticed in 1 µs. Longer spinning gains nothing, since
/// yielding on an idle core costs 0.3 µs, and it hurts when the peer waits for this very core.
const SPINS: u32 = 64;

/// Polls with the core yielded between them, before a rank sleeps: about 0.1 ms on an idle core.
/// Sleeping at once would cost a wake-up of about 8 µs.
const YIELDS: u32 = 300;

/// α and β of rings within a process, by `benches/local.rs` on a 2-core EPYC VM, November 2026.
/// Constants, so that threads choose the same algorithms in every run.
pub(crate) const TUNING: Tuning = Tuning {
    alpha_us: 1.0,
    beta_ns: 0.2,
    force: None,
    wire: false,
};

/// A group of `size` ranks: one handle each, in rank order, to be moved to its thread.
///
/// Reads the number of cores once, to decide how long ranks spin. Memory: 320 KiB for each ordered
/// pair, touched with use.
///
/// # Panics
/// If the system has no memory.
pub fn ranks(size: u32) -> Vec<Local> {
    ranks_with(size, TUNING)
}

/// [`ranks`] that choose algorithms by `tuning`.
///
/// # Panics
/// If the system has no memory.
pub fn ranks_with(size: u32, tuning: Tuning) -> Vec<Local> {
    let hall = Arc::new(ThreadGroup::new(size as usize, tuning));
    (0..size)
        .map(|rank| Local::new(Rank(rank), Arc::clone(&hall)))
        .collect()
}

/// The spin policy for `here` ranks of one machine.
pub fn patience(here: usize) -> SpinPolicy {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // With more ranks than cores, a rank that spins keeps the one it waits for from running.
    SpinPolicy {
        spins: if here > cores { 0 } else { SPINS },
        yields: YIELDS,
    }
}

/// State shared by all ranks of a group.
struct ThreadGroup {
    segments: Vec<Arc<Segment>>,
    gone: Arc<[AtomicBool]>,
    status: Arc<GroupStatus>,
    tuning: Tuning,
    /// Groups split off this one that some members have not obtained yet.
    parts: Mutex<Vec<PendingSplit>>,
}

/// A group that is being split off.
struct PendingSplit {
    /// Number of the split, and color.
    key: (u64, u32),
    hall: Arc<ThreadGroup>,
    /// Members that have not obtained it.
    missing: usize,
}

impl ThreadGroup {
    fn new(size: usize, tuning: Tuning) -> Self {
        let segment = |_| Segment::new(size, None).expect("memory for the rings of a group");
        Self {
            segments: (0..size).map(segment).map(Arc::new).collect(),
            gone: (0..size).map(|_| AtomicBool::new(false)).collect(),
            status: Arc::default(),
            tuning,
            parts: Mutex::default(),
        }
    }

    /// The state of a new group of `size` ranks: the same for all callers with this key.
    fn part(&self, key: (u64, u32), size: usize) -> Arc<Self> {
        let mut parts = lock(&self.parts);
        let known = parts.iter().position(|part| part.key == key);
        let index = known.unwrap_or_else(|| {
            let hall = Arc::new(Self::new(size, self.tuning));
            parts.push(PendingSplit {
                key,
                hall,
                missing: size,
            });
            parts.len() - 1
        });
        parts[index].missing -= 1;
        match parts[index].missing {
            0 => parts.swap_remove(index).hall,
            _ => Arc::clone(&parts[index].hall),
        }
    }
}

/// A rank of a group of threads. Dropping it ends the group for the others.
#[derive(derive_more::Debug)]
#[debug("{:?}", self.linked)]
pub struct Local {
    linked: TransportGroup<SharedRings>,
    hall: Arc<ThreadGroup>,
    splits: AtomicU64,
}

impl Local {
    fn new(rank: Rank, hall: Arc<ThreadGroup>) -> Self {
        let shared = SharedRings::new(
            rank.0 as usize,
            hall.segments.clone(),
            Arc::clone(&hall.gone),
            FailureNotifier::Threads(Arc::clone(&hall.status)),
            patience(hall.segments.len()),
        );
        let size = u32::try_from(hall.segments.len()).expect("made of a u32");
        let linked = TransportGroup::with_status(rank, size, shared, Arc::clone(&hall.status));
        linked.agree(hall.tuning);
        Self {
            linked,
            hall,
            splits: AtomicU64::new(0),
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.linked.leave();
        self.linked.transport().leave();
    }
}

impl Group for Local {
    crate::group_methods!(linked);

    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        let SplitMember { rank, ranks, .. } = members(self, color, key, deadline)?;
        let number = self.splits.fetch_add(1, Ordering::Relaxed) + 1;
        let hall = self.hall.part((number, color), ranks.len());
        Ok(Box::new(Self::new(rank, hall)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{Algorithm, Reduce, testing};

    fn make(size: u32) -> testing::Ranks {
        ranks(size)
            .into_iter()
            .map(|rank| Box::new(rank) as Box<dyn Group>)
            .collect()
    }

    #[test]
    fn conforms() {
        // All sizes, as groups are cheapest here.
        testing::run_sizes(&make, 0x5eed_0001, &testing::SIZES);
    }

    #[test]
    fn every_algorithm_gives_the_right_results() {
        for algorithm in Algorithm::ALL {
            let tuning = Tuning {
                force: Some(algorithm),
                ..TUNING
            };
            let make = |size| -> testing::Ranks {
                let ranks = ranks_with(size, tuning).into_iter();
                ranks.map(|rank| Box::new(rank) as Box<dyn Group>).collect()
            };
            testing::run_collectives(&make, 0x5eed_0003);
        }
    }

    #[test]
    fn sums_are_in_rank_order() {
        let parts = [1e8_f32, 3.0, -1e8, 5.5, 0.1];
        let expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]) + parts[4];
        let deadline = Deadline::at(Instant::now() + Duration::from_secs(60));
        for length in [3, 100_000] {
            let ranks = ranks(5).into_iter().zip(parts).collect();
            let sums = testing::on_threads(ranks, move |(rank, part)| {
                let mut data = vec![part; length];
                let done = (&rank as &dyn Group).all_reduce(&mut data, Reduce::Sum, deadline);
                done.map(|()| data)
            });
            assert_eq!(sums, vec![Ok(vec![expected; length]); 5]);
        }
    }
}
