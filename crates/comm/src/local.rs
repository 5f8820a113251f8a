//! Ranks as threads of one process.
//!
//! Every rank owns a *lane* in a shared arena: two banks of bytes, used in turn. A collective runs
//! in rounds of one segment each; in every round a rank
//!
//! ```text
//! 1. writes its call and its segment into bank (round mod 2) of its own lane,
//! 2. arrives, and waits until all have: it spins, then yields, both bounded, then sleeps,
//! 3. compares the calls of all lanes (the lockstep guard),
//! 4. reads the segments of all lanes, in rank order.
//! ```
//!
//! Two banks are enough without a second wait: a rank writes round k + 2 only after all ranks have
//! arrived in k + 1, and a rank arrives there only after it has read round k. So the locks around
//! the banks are never contended; they are what makes this provable to the compiler. Every rank
//! adds the same segments in rank order 0, 1, ..., hence equal bits. Memory is bounded by
//! 2 * size * [`SEGMENT_BYTES`], reached with the first long call; later calls do not allocate.
//!
//! Messages have an inbox per receiver (`inbox`). Both kinds of waiting end when the group is
//! poisoned (`arena`).

mod arena;
mod inbox;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use paceline_base::{Bytes, Rank};

use self::arena::{Arena, lock, read};
use crate::reduce::fold;
use crate::split::{Member, members};
use crate::{Call, Collective, Data, DataMut, Deadline, Error, Group, Kind, Traffic};

/// Longest part of one rank's data that is moved in one round.
///
/// 1 MiB from each of 2 ranks gathered in 334, 257, 206, 187, 175 and 143 µs with segments of 16,
/// 32, 64, 128, 256 and 1024 KiB (`benches/local.rs`, 2-core EPYC 9004 VM with 1 MiB of L2 a
/// core, November 2026). Beyond 128 KiB there is little to gain, and 8 ranks still fit one L2.
pub const SEGMENT_BYTES: usize = 128 << 10;

/// A group of `size` ranks: one handle each, in rank order, to be moved to its thread.
///
/// Reads the number of cores once, to decide how long ranks spin. Cost: no buffers yet.
pub fn ranks(size: u32) -> Vec<Local> {
    let arena = Arc::new(Arena::new(size));
    (0..size)
        .map(|rank| Local::new(Rank(rank), Arc::clone(&arena)))
        .collect()
}

/// One rank of a group of threads. Dropping it ends the group for the others.
pub struct Local {
    rank: Rank,
    arena: Arc<Arena>,
    progress: Mutex<Progress>,
    messages: AtomicU64,
    splits: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

/// How far this rank is. Locked for the length of a collective.
#[derive(Default)]
struct Progress {
    calls: u64,
    rounds: u64,
}

impl Local {
    fn new(rank: Rank, arena: Arc<Arena>) -> Self {
        Self {
            rank,
            arena,
            progress: Mutex::default(),
            messages: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Moves one segment of `collective`; see the module documentation for the four steps.
    fn round(
        &self,
        collective: &mut Collective<'_>,
        call: Call,
        at: &Round,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let segment = outgoing(collective, self.rank, &at.segment);
        self.sent.fetch_add(segment.len() as u64, Ordering::Relaxed);
        self.arena.publish(self.rank, at.number, call, segment);
        self.arena.wait(at.number, call, deadline)?;
        self.arena.compare(at.number, call)?;
        absorb(collective, self.rank, &at.segment, &self.arena, at.number);
        let others = (0..)
            .zip(self.arena.banks(at.number))
            .filter(|(rank, _)| *rank != self.rank.0);
        let bytes: usize = others.map(|(_, bank)| read(bank).bytes.len()).sum();
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// The next message of this rank, checked.
    fn message(&self, kind: Kind, data: (crate::Dtype, usize)) -> Result<Call, Error> {
        let sequence = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        let (dtype, length) = (data.0, data.1 as u64);
        let call = Call {
            sequence,
            kind,
            dtype,
            length,
            digest: 0,
        };
        self.arena.check(call)?;
        call.with_peer(self.rank, self.size())
            .map_err(|error| self.arena.fail(error))
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local {} of {}", self.rank, self.size())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.arena.leave(self.rank);
    }
}

impl Group for Local {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> u32 {
        self.arena.size()
    }

    fn run(&self, mut collective: Collective<'_>, deadline: Deadline) -> Result<(), Error> {
        let mut progress = lock(&self.progress);
        progress.calls += 1;
        let call = Call::of(&collective, progress.calls, self.rank, self.size())
            .map_err(|error| self.arena.fail(error))?;
        self.arena.check(call)?;
        let bytes = longest(&collective);
        let mut start = 0;
        loop {
            progress.rounds += 1;
            let end = bytes.min(start + SEGMENT_BYTES);
            let round = Round {
                number: progress.rounds,
                segment: start..end,
            };
            self.round(&mut collective, call, &round, deadline)?;
            if end == bytes {
                return Ok(());
            }
            start = end;
        }
    }

    fn send_data(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let call = self.message(Kind::Send { to, tag }, (message.dtype(), message.len()))?;
        self.arena.put(self.rank, call, message.bytes(), deadline)?;
        let bytes = message.bytes().len() as u64;
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn recv_data(
        &self,
        mut into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let call = self.message(Kind::Recv { from, tag }, (into.dtype(), into.len()))?;
        self.arena
            .take(self.rank, call, into.bytes_mut(), deadline)?;
        let bytes = into.bytes().len() as u64;
        self.received.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        Traffic {
            sent: Bytes(self.sent.load(Ordering::Relaxed)),
            received: Bytes(self.received.load(Ordering::Relaxed)),
        }
    }

    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        let Member { rank, ranks, .. } = members(self, color, key, deadline)?;
        let number = self.splits.fetch_add(1, Ordering::Relaxed) + 1;
        let size = u32::try_from(ranks.len()).expect("no more than in this group");
        let arena = self.arena.part(number, color, size);
        Ok(Box::new(Self::new(rank, arena)))
    }
}

/// One round of a call: its number on every rank, from 1, and the bytes of each part it moves.
struct Round {
    number: u64,
    segment: Range<usize>,
}

/// Bytes of the longest part that any rank brings.
fn longest(collective: &Collective<'_>) -> usize {
    match collective {
        Collective::Barrier => 0,
        Collective::AllGather { input, counts, .. } => counts.max() * input.dtype().bytes(),
        Collective::AllReduce { data, .. } | Collective::Broadcast { data, .. } => {
            data.bytes().len()
        }
    }
}

/// What of `segment` lies in a part of `len` bytes.
fn clip(segment: &Range<usize>, len: usize) -> Range<usize> {
    segment.start.min(len)..segment.end.min(len)
}

/// The bytes that `rank` shows the others in this round.
fn outgoing<'a>(collective: &'a Collective<'_>, rank: Rank, segment: &Range<usize>) -> &'a [u8] {
    let part = match collective {
        Collective::Barrier => &[],
        Collective::AllGather { input, .. } => input.bytes(),
        Collective::AllReduce { data, .. } => data.bytes(),
        Collective::Broadcast { data, root } if *root == rank => data.bytes(),
        Collective::Broadcast { .. } => &[],
    };
    &part[clip(segment, part.len())]
}

/// Puts what the lanes hold in this round where `collective` wants it.
fn absorb(
    collective: &mut Collective<'_>,
    rank: Rank,
    segment: &Range<usize>,
    arena: &Arena,
    round: u64,
) {
    let mut banks = arena.banks(round).map(read).enumerate();
    match collective {
        Collective::Barrier => {}
        Collective::AllGather { output, counts, .. } => {
            let width = output.dtype().bytes();
            let mut rest = output.bytes_mut();
            for (from, bank) in banks {
                let bytes = counts.of(from) * width;
                let (part, after) = rest.split_at_mut(bytes);
                part[clip(segment, bytes)].copy_from_slice(&bank.bytes);
                rest = after;
            }
        }
        Collective::AllReduce { data, op } => {
            let dtype = data.dtype();
            let part = clip(segment, data.bytes().len());
            let data = &mut data.bytes_mut()[part];
            for (from, bank) in banks {
                match from {
                    0 => data.copy_from_slice(&bank.bytes),
                    _ => fold(*op, dtype, data, &bank.bytes),
                }
            }
        }
        Collective::Broadcast { root, .. } if *root == rank => {}
        Collective::Broadcast { data, root } => {
            let part = clip(segment, data.bytes().len());
            if let Some((_, bank)) = banks.nth(root.0 as usize) {
                data.bytes_mut()[part].copy_from_slice(&bank.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{Reduce, testing};

    fn make(size: u32) -> testing::Ranks {
        ranks(size)
            .into_iter()
            .map(|rank| Box::new(rank) as Box<dyn Group>)
            .collect()
    }

    #[test]
    fn conforms() {
        testing::run_all(&make, 0x5eed_0001);
    }

    #[test]
    fn sums_are_in_rank_order() {
        let parts = [1e8_f32, 3.0, -1e8, 5.5, 0.1];
        let expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]) + parts[4];
        let deadline = Deadline::at(Instant::now() + Duration::from_secs(60));
        let sums = ranks(5).into_iter().zip(parts).map(|(rank, part)| {
            thread::spawn(move || {
                let mut data = [part; 3];
                (&rank as &dyn Group)
                    .all_reduce(&mut data, Reduce::Sum, deadline)
                    .map(|()| data)
            })
        });
        for sum in sums.collect::<Vec<_>>() {
            assert_eq!(sum.join().unwrap(), Ok([expected; 3]));
        }
    }

    #[test]
    fn memory_is_bounded_and_kept() {
        let held = |group: &Local| -> Vec<usize> {
            let banks = (0..2).flat_map(|round| group.arena.banks(round));
            banks.map(|bank| read(bank).bytes.capacity()).collect()
        };
        let group = &ranks(1)[0];
        let mut data = vec![0_u8; 3 * SEGMENT_BYTES + 1];
        let deadline = Deadline::at(Instant::now());
        let mut call = || (group as &dyn Group).all_reduce(&mut data, Reduce::Sum, deadline);
        call().unwrap();
        let first = held(group);
        call().unwrap();
        assert_eq!(first, [SEGMENT_BYTES; 2]);
        assert_eq!(held(group), first);
    }
}
