//! Remote memory access (one-sided): memory that other ranks read and write between fences.
//!
//! Every rank *exposes* a buffer. Between two fences a rank records its `put`s into and `get`s from
//! others' buffers; nothing moves. A fence, which all ranks call, executes them: first every put,
//! by rank, then every get. So a get sees all puts of its epoch. Of two puts to one location that
//! of the higher rank remains. Between fences a rank has exclusive use of its buffer. No other
//! coherence is promised.
//!
//! Steps of a fence: four (lengths, then requests with the data of puts; lengths, then responses).
//! Bytes: 24 for each request, 16 for each peer, and the data once.
//!
//! Both the puts and the gets of one rank at another between two fences are bounded by the other's
//! exposed bytes plus [`SPARE_BYTES`]. So a rank never allocates more, regardless of its peers. A
//! rank that announces more fails the fence on all ranks: [`Error::Length`] of `receives`, with the
//! announced number.

use paceline_base::Rank;

use crate::{Deadline, Error, Group};

/// A rank's exposed buffer and its requests for the next fence.
#[derive(Debug)]
pub struct Window<'a> {
    group: &'a dyn Group,
    memory: Vec<u8>,
    /// Bytes that each rank exposes.
    sizes: Vec<u64>,
    /// By rank: encoded requests for the next fence.
    requests: Vec<Vec<u8>>,
    /// By rank: bytes requested by gets.
    wanted: Vec<u64>,
    /// By rank: number and length of each get.
    gets: Vec<Vec<(usize, usize)>>,
    count: usize,
}

/// Identifies a get until the next fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(usize);

/// The results of the gets before a fence.
#[derive(Debug, Default)]
pub struct GetResults(Vec<Vec<u8>>);

impl GetResults {
    /// The result of this get.
    ///
    /// # Panics
    /// If the ticket is of another epoch with more gets.
    pub fn of(&self, ticket: Ticket) -> &[u8] {
        &self.0[ticket.0]
    }
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    #[error("{rank} exposes {exposed} bytes, {length} at {offset} are not among them")]
    Outside {
        /// The rank that exposes the memory.
        rank: Rank,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes that it exposes; 0 if there is no such rank.
        exposed: u64,
    },
    /// More bytes than a rank accepts between two fences.
    #[error(
        "{rank} would get requests or give answers of {bytes} bytes, at most {most} in a fence"
    )]
    Full {
        /// The rank that exposes the memory.
        rank: Rank,
        /// Bytes including this request.
        bytes: u64,
        /// Its exposed bytes plus [`SPARE_BYTES`].
        most: u64,
    },
}

/// Bytes of requests, and of responses, that a rank accepts from another at a fence beyond its
/// exposed bytes: heads of 43,690 requests.
pub const SPARE_BYTES: u64 = 1 << 20;

/// Bytes of a request: kind, offset, length.
const REQUEST_BYTES: usize = 24;
const PUT: u64 = 1;
const GET: u64 = 2;

impl<'a> Window<'a> {
    /// Exposes `memory` to all ranks of `group`. Collective; lengths may differ.
    ///
    /// # Errors
    /// Any [`Error`].
    #[track_caller]
    pub fn expose(
        group: &'a dyn Group,
        memory: Vec<u8>,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let size = group.size() as usize;
        let mut sizes = vec![0; size];
        group.all_gather(&[memory.len() as u64], &mut sizes, deadline)?;
        Ok(Self {
            group,
            memory,
            sizes,
            requests: vec![Vec::new(); size],
            wanted: vec![0; size],
            gets: vec![Vec::new(); size],
            count: 0,
        })
    }

    /// The own buffer, as of the last fence.
    pub fn memory(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// Records a write of `bytes` to the buffer of `rank`, at `offset`.
    ///
    /// # Errors
    /// Any [`WindowError`]; nothing is recorded.
    pub fn put(&mut self, rank: Rank, offset: u64, bytes: &[u8]) -> Result<(), WindowError> {
        self.note(PUT, rank, offset, bytes.len() as u64)?;
        self.requests[rank.0 as usize].extend_from_slice(bytes);
        Ok(())
    }

    /// Records a read of `length` bytes of the buffer of `rank`, at `offset`.
    ///
    /// # Errors
    /// Any [`WindowError`]; nothing is recorded.
    pub fn get(&mut self, rank: Rank, offset: u64, length: usize) -> Result<Ticket, WindowError> {
        self.note(GET, rank, offset, length as u64)?;
        self.gets[rank.0 as usize].push((self.count, length));
        self.count += 1;
        Ok(Ticket(self.count - 1))
    }

    fn note(&mut self, what: u64, rank: Rank, offset: u64, length: u64) -> Result<(), WindowError> {
        let exposed = self.sizes.get(rank.0 as usize).copied().unwrap_or(0);
        let known = (rank.0 as usize) < self.sizes.len();
        if !known || offset.checked_add(length).is_none_or(|end| end > exposed) {
            return Err(WindowError::Outside {
                rank,
                offset,
                length,
                exposed,
            });
        }
        let requests = &mut self.requests[rank.0 as usize];
        let wanted = &mut self.wanted[rank.0 as usize];
        let (put, got) = if what == PUT {
            (length, 0)
        } else {
            (0, length)
        };
        let requested = (requests.len() + REQUEST_BYTES) as u64 + put;
        let (bytes, most) = (requested.max(*wanted + got), most_of(exposed));
        if bytes > most {
            return Err(WindowError::Full { rank, bytes, most });
        }
        *wanted += got;
        let words = [what, offset, length].map(u64::to_le_bytes);
        requests.extend(words.concat());
        Ok(())
    }

    /// Executes all requests since the last fence, on all ranks. Collective.
    ///
    /// # Errors
    /// Any [`Error`]; the exposed buffers are then unspecified. [`Error::Length`] if a rank sends
    /// more than it may.
    #[track_caller]
    pub fn fence(&mut self, deadline: Deadline) -> Result<GetResults, Error> {
        let requests: Vec<Vec<u8>> = self.requests.iter_mut().map(std::mem::take).collect();
        let most = vec![self.most(); requests.len()];
        let received = exchange(self.group, &requests, &most, deadline)?;
        for requests in &received {
            self.apply(requests, PUT, &mut Vec::new());
        }
        let answers: Vec<Vec<u8>> = received
            .iter()
            .map(|requests| {
                let mut answer = Vec::new();
                self.apply(requests, GET, &mut answer);
                answer
            })
            .collect();
        let wanted: Vec<u64> = self.wanted.iter_mut().map(std::mem::take).collect();
        let received = exchange(self.group, &answers, &wanted, deadline)?;
        let mut gets = vec![Vec::new(); std::mem::take(&mut self.count)];
        for (wanted, bytes) in self.gets.iter_mut().map(std::mem::take).zip(&received) {
            let mut rest = &bytes[..];
            for (number, length) in wanted {
                let (part, after) = rest.split_at(length.min(rest.len()));
                gets[number] = part.to_vec();
                rest = after;
            }
        }
        Ok(GetResults(gets))
    }

    /// Bytes that one rank may send to this one at a fence, or read from it.
    fn most(&self) -> u64 {
        most_of(self.memory.len() as u64)
    }

    /// Executes the requests of one kind. Requests beyond this buffer or a response's bound are
    /// skipped; a correct peer never sends them.
    fn apply(&mut self, mut requests: &[u8], kind: u64, answer: &mut Vec<u8>) {
        let most = usize::try_from(self.most()).unwrap_or(usize::MAX);
        while let Some((head, rest)) = requests.split_first_chunk::<REQUEST_BYTES>() {
            let word = |at: usize| {
                let bytes = head[at..].first_chunk().copied().unwrap_or_default();
                usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
            };
            let (what, offset, length) = (word(0) as u64, word(8), word(16));
            let end = offset.saturating_add(length);
            let data = if what == PUT {
                length.min(rest.len())
            } else {
                0
            };
            let (data, after) = rest.split_at(data);
            requests = after;
            match self.memory.get_mut(offset..end) {
                Some(place) if what == kind && what == PUT && data.len() == length => {
                    place.copy_from_slice(data);
                }
                Some(place) if what == kind && what == GET && length <= most - answer.len() => {
                    answer.extend_from_slice(place);
                }
                _ => {}
            }
        }
    }
}

/// Bytes that a rank with `exposed` bytes accepts from another.
const fn most_of(exposed: u64) -> u64 {
    exposed.saturating_add(SPARE_BYTES)
}

/// Sends each rank its bytes and returns the bytes of each, at most `most`: lengths, then bytes.
/// Two steps.
#[track_caller]
fn exchange(
    group: &dyn Group,
    outgoing: &[Vec<u8>],
    most: &[u64],
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>, Error> {
    let sends: Vec<u64> = outgoing.iter().map(|bytes| bytes.len() as u64).collect();
    let mut receives = vec![0; sends.len()];
    group.all_to_all(&sends, &mut receives, deadline)?;
    // No room is allocated beyond that: a rank that sends more makes the call fail.
    for (announced, most) in receives.iter_mut().zip(most) {
        *announced = (*announced).min(*most);
    }
    let index = |counts: Vec<u64>| -> Vec<usize> {
        let count = |count| usize::try_from(count).unwrap_or(usize::MAX);
        counts.into_iter().map(count).collect()
    };
    let (sends, receives) = (index(sends), index(receives));
    let mut incoming = vec![0; receives.iter().sum()];
    group.all_to_all_v(
        &outgoing.concat(),
        &sends,
        &mut incoming,
        &receives,
        deadline,
    )?;
    let mut rest = &incoming[..];
    let parts = receives.iter().map(|count| {
        let (part, after) = rest.split_at(*count);
        rest = after;
        part.to_vec()
    });
    Ok(parts.collect())
}

/// For fuzzing: parses `bytes` as the requests of a peer to a small window.
pub(crate) fn parse(bytes: &[u8]) {
    const EXPOSED: usize = 64;
    let group = crate::local::ranks(1).remove(0);
    let mut window = Window {
        group: &group,
        memory: vec![0; EXPOSED],
        sizes: vec![EXPOSED as u64],
        requests: vec![Vec::new()],
        wanted: vec![0],
        gets: vec![Vec::new()],
        count: 0,
    };
    for kind in [PUT, GET] {
        let mut answer = Vec::new();
        window.apply(bytes, kind, &mut answer);
        let most = bytes.len() / REQUEST_BYTES * EXPOSED;
        assert!(answer.len() <= most, "more than was asked for");
        assert!(answer.len() as u64 <= window.most(), "without a bound");
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::local;

    #[test]
    fn puts_and_gets_happen_at_the_fence() {
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        let threads = local::ranks(3).into_iter().map(|group| {
            thread::spawn(move || {
                let (group, rank): (&dyn Group, _) = (&group, group.rank().0);
                let own = u8::try_from(rank).unwrap();
                let mut window =
                    Window::expose(group, vec![100 + own; 4 + rank as usize], by).unwrap();
                let next = Rank((rank + 1) % 3);
                window.put(next, 1, &[own, own]).unwrap();
                window.put(Rank(0), 3, &[50 + own]).unwrap();
                let (all, none) = (
                    window.get(next, 0, 4).unwrap(),
                    window.get(next, 2, 0).unwrap(),
                );
                assert_eq!(
                    window.memory()[1],
                    100 + own,
                    "nothing moves before the fence"
                );
                let answers = window.fence(by).unwrap();
                let last = if next == Rank(0) { 52 } else { 101 + own };
                let first = if next == Rank(0) { 100 } else { 101 + own };
                assert_eq!(answers.of(all), [first, own, own, last]);
                assert_eq!(answers.of(none), [0_u8; 0]);
                let outside = window.put(Rank(2), 5, &[0; 2]).unwrap_err();
                assert_eq!(
                    outside.to_string(),
                    "rank 2 exposes 6 bytes, 2 at 5 are not among them"
                );
                assert!(window.get(Rank(3), 0, 0).is_err());
                assert!(window.get(Rank(0), u64::MAX, 2).is_err());
                window.fence(by).unwrap();
            })
        });
        threads
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|t| t.join().unwrap());
    }

    #[test]
    fn what_is_noted_between_fences_is_bounded() {
        let group = local::ranks(1).remove(0);
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        let mut window = Window::expose(&group, vec![0; 1000], by).unwrap();
        let most = 1000 + SPARE_BYTES;
        let full = |bytes| WindowError::Full {
            rank: Rank(0),
            bytes,
            most,
        };
        let puts = most / (1000 + 24);
        for _ in 0..puts {
            window.put(Rank(0), 0, &[1; 1000]).unwrap();
        }
        let error = window.put(Rank(0), 0, &[1; 1000]).unwrap_err();
        assert_eq!(error, full((puts + 1) * 1024));
        assert_eq!(
            error.to_string(),
            "rank 0 would get requests or give answers of 1049600 bytes, at most 1049576 in a fence"
        );
        window.fence(by).unwrap();
        let gets = most / 1000;
        let tickets: Vec<Ticket> = (0..gets)
            .map(|_| window.get(Rank(0), 0, 1000).unwrap())
            .collect();
        let error = window.get(Rank(0), 0, 1000).unwrap_err();
        assert_eq!(error, full((gets + 1) * 1000));
        let answers = window.fence(by).unwrap();
        assert_eq!(answers.of(tickets[tickets.len() - 1]), [1; 1000]);
    }

    /// Rank 1 believes that rank 0 exposes more than it does, and sends as much.
    #[test]
    fn a_rank_that_sends_more_than_it_may_fails_the_fence_by_name() {
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        let threads = local::ranks(2).into_iter().map(|group| {
            thread::spawn(move || {
                let rank = group.rank();
                let mut window = Window::expose(&group, vec![0; 100], by).unwrap();
                if rank == Rank(1) {
                    window.sizes[0] = 4 << 20;
                    window.put(Rank(0), 0, &vec![1; 4 << 20]).unwrap();
                }
                window.fence(by).unwrap_err()
            })
        });
        let threads: Vec<_> = threads.collect();
        let mut errors = threads.into_iter().map(|rank| rank.join().unwrap());
        let (sent, most) = (24 + (4 << 20), 100 + SPARE_BYTES);
        let Some(Error::Length {
            rank,
            buffer,
            expected,
            got,
            ..
        }) = errors.next()
        else {
            panic!("the receiver has another error");
        };
        assert_eq!((rank, buffer), (Rank(0), "receives"));
        assert_eq!((expected, got), (sent, most));
        assert!(errors.next().is_some(), "the sender hears of it too");
    }
}
