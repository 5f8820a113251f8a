//! The byte streams of a call: socket and order of every byte, on which both ends of MLX's ring
//! must agree.
//!
//! The protocol carries array bytes only, so a rank that cuts or orders them differently causes
//! garbage or a hang. A call becomes one or more [`RingStream`]s, each on sockets of its own
//! direction.
//!
//! Worked example, 3 ranks, an all_reduce of 7 elements, one stream leftwards
//! (`SendDirection::Left`: to the left, from the right). Segments have ceil(7 / 3) = 3 elements:
//! `0..3`, `3..6`, `6..7`.
//!
//! ```text
//! rank 1 sends     3..6, then its last received: 6..7, 0..3 (now complete), 3..6
//! rank 1 receives        6..7 and 0..3 reducing,       3..6 and 6..7 overwriting
//! ```
//!
//! Source: `ring.cpp` of ml-explore/mlx at 846d1762; the live tests check every rule.

use std::ops::Range;

use paceline_comm::Dtype;

/// Bytes per stream that MLX requires before it opens another: `min_send_size` of `ring.cpp`.
const COURSE_BYTES_MIN: usize = 262_144;

/// MLX's buffer for an all_reduce of fewer elements than ranks: its `char buffer[1024]`.
pub(super) const PADDED_BYTES_MAX: usize = 1024;

/// Fewest bytes of a message that MLX sends over one socket: the 1024 of its `send`.
const PIECE_BYTES_MIN: usize = 1024;

/// The neighbour that a stream sends to; it receives from the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendDirection {
    /// Sends to the next rank, receives from the previous one: MLX's direction -1.
    Right,
    /// Sends to the previous rank, receives from the next one: MLX's direction 1.
    Left,
}

impl SendDirection {
    /// MLX alternates between streams, beginning with its direction 1.
    const fn of(course: usize) -> Self {
        if course.is_multiple_of(2) {
            Self::Left
        } else {
            Self::Right
        }
    }

    /// The segment after `segment` of `size` in this direction.
    const fn next(self, segment: usize, size: usize) -> usize {
        match self {
            Self::Right => (segment + size - 1) % size,
            Self::Left => (segment + 1) % size,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReceiveRange {
    /// Its place in the buffer.
    pub(super) range: Range<usize>,
    /// Whether it is reduced into the buffer, or overwrites it.
    pub(super) reduces: bool,
}

/// A stream of bytes out and one in, over the same numbered socket of the two sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RingStream {
    /// Index of the connection, on either side.
    pub(super) connection: usize,
    pub(super) way: SendDirection,
    /// The bytes that are sent first.
    pub(super) own: Range<usize>,
    /// The received ranges. All but the last are forwarded once received.
    pub(super) takes: Vec<ReceiveRange>,
}

impl RingStream {
    /// Bytes sent in total.
    pub(super) fn sends(&self) -> usize {
        let onward = self.takes.len().saturating_sub(1);
        let takes = self.takes[..onward].iter().map(|take| take.range.len());
        self.own.len() + takes.sum::<usize>()
    }

    /// Place in the buffer of sent byte `at`, and of the contiguous bytes after it.
    pub(super) fn sent_range(&self, at: usize) -> Range<usize> {
        let mut start = 0;
        let takes = self.takes.iter().map(|take| &take.range);
        for range in std::iter::once(&self.own).chain(takes) {
            if at < start + range.len() {
                return range.start + (at - start)..range.end;
            }
            start += range.len();
        }
        0..0
    }
}

/// A rank's position in the ring, and its number of connections to either neighbour.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingPosition {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) connections: usize,
}

impl RingPosition {
    pub(super) const fn right(self) -> usize {
        (self.rank + 1) % self.size
    }

    pub(super) const fn left(self) -> usize {
        (self.rank + self.size - 1) % self.size
    }

    /// Number of streams of a call of `bytes`.
    fn courses(self, bytes: usize, bytes_min: usize) -> usize {
        (2 * self.connections).min(bytes / bytes_min).max(1)
    }

    /// An all_reduce of `len >= size` elements.
    pub(super) fn all_reduce(self, len: usize, dtype: Dtype) -> Vec<RingStream> {
        let courses = self.courses(len * dtype.bytes(), self.size * COURSE_BYTES_MIN);
        let step = len.div_ceil(courses);
        let part = |i: usize| (i * step).min(len)..((i + 1) * step).min(len);
        (0..courses)
            .map(|i| self.reduce(i / 2, SendDirection::of(i), part(i), dtype))
            .collect()
    }

    /// An all_reduce of fewer elements than ranks, padded to `size` elements.
    pub(super) fn all_reduce_padded(self, dtype: Dtype) -> Vec<RingStream> {
        vec![self.reduce(0, SendDirection::Right, 0..self.size, dtype)]
    }

    /// Two rounds of the ring: reducing, then overwriting.
    fn reduce(
        self,
        connection: usize,
        way: SendDirection,
        part: Range<usize>,
        dtype: Dtype,
    ) -> RingStream {
        let segment_len = part.len().div_ceil(self.size);
        let segment = |i: usize| {
            let bound = |i: usize| (part.start + i * segment_len).min(part.end) * dtype.bytes();
            bound(i)..bound(i + 1)
        };
        let passes = [true, false].into_iter();
        let order = passes.flat_map(|reduces| (1..self.size).map(move |_| reduces));
        let mut at = self.rank;
        let takes = order.map(|reduces| {
            at = way.next(at, self.size);
            let range = segment(at);
            ReceiveRange { range, reduces }
        });
        RingStream {
            connection,
            way,
            own: segment(self.rank),
            takes: takes.collect(),
        }
    }

    /// An all_gather of `bytes` from each rank, into one buffer of all blocks.
    pub(super) fn all_gather(self, bytes: usize) -> Vec<RingStream> {
        let courses = self.courses(bytes, COURSE_BYTES_MIN);
        let step = bytes.div_ceil(courses);
        let part = |i: usize| (i * step).min(bytes)..((i + 1) * step).min(bytes);
        (0..courses)
            .map(|i| self.gather(i / 2, SendDirection::of(i), part(i), bytes))
            .collect()
    }

    fn gather(
        self,
        connection: usize,
        way: SendDirection,
        part: Range<usize>,
        bytes: usize,
    ) -> RingStream {
        let block = |rank: usize| rank * bytes + part.start..rank * bytes + part.end;
        let mut at = self.rank;
        let takes = (1..self.size).map(|_| {
            at = way.next(at, self.size);
            let range = block(at);
            ReceiveRange {
                range,
                reduces: false,
            }
        });
        RingStream {
            connection,
            way,
            own: block(self.rank),
            takes: takes.collect(),
        }
    }

    /// The direction to `peer`, if it is a neighbour. With two ranks each is both neighbours of the
    /// other: bytes sent to the right then arrive from the left.
    pub(super) fn way_to(self, peer: usize) -> Option<SendDirection> {
        match peer {
            peer if peer == self.right() => Some(SendDirection::Right),
            peer if peer == self.left() => Some(SendDirection::Left),
            _ => None,
        }
    }

    /// The direction of bytes from `peer`, if it is a neighbour.
    pub(super) fn way_from(self, peer: usize) -> Option<SendDirection> {
        match peer {
            peer if peer == self.left() => Some(SendDirection::Right),
            peer if peer == self.right() => Some(SendDirection::Left),
            _ => None,
        }
    }

    /// A message of `bytes`, to be sent.
    pub(super) fn send(self, way: SendDirection, bytes: usize) -> Vec<RingStream> {
        let course = |(connection, own)| RingStream {
            connection,
            way,
            own,
            takes: Vec::new(),
        };
        self.pieces(bytes).map(course).collect()
    }

    /// A message of `bytes`, to be received.
    pub(super) fn recv(self, way: SendDirection, bytes: usize) -> Vec<RingStream> {
        let course = |(connection, range)| {
            let reduces = false;
            RingStream {
                connection,
                way,
                own: 0..0,
                takes: vec![ReceiveRange { range, reduces }],
            }
        };
        self.pieces(bytes).map(course).collect()
    }

    /// The part of a message for each connection.
    fn pieces(self, bytes: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let piece = bytes.div_ceil(self.connections).max(PIECE_BYTES_MIN);
        let range = move |i: usize| i * piece..((i + 1) * piece).min(bytes);
        (0..self.connections)
            .map(move |i| (i, range(i)))
            .take_while(|(_, range)| !range.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(rank: usize, size: usize, connections: usize) -> RingPosition {
        RingPosition {
            rank,
            size,
            connections,
        }
    }

    #[test]
    fn the_worked_example_is_true() {
        let courses = seat(1, 3, 1).all_reduce(7, Dtype::U8);
        let take = |range, reduces| ReceiveRange { range, reduces };
        let expected = RingStream {
            connection: 0,
            way: SendDirection::Left,
            own: 3..6,
            takes: vec![
                take(6..7, true),
                take(0..3, true),
                take(3..6, false),
                take(6..7, false),
            ],
        };
        assert_eq!(courses, [expected]);
        assert_eq!(courses[0].sends(), 3 + 1 + 3 + 3);
        let sent: Vec<_> = [0, 2, 3, 4, 7, 9]
            .map(|at| courses[0].sent_range(at))
            .into();
        assert_eq!(sent, [3..6, 5..6, 6..7, 0..3, 3..6, 5..6]);
    }

    /// A rank sends over a connection exactly the stream that its neighbour receives from it.
    #[test]
    fn neighbours_agree_on_every_stream() {
        let near = [0, 1, 2, 3, 7, 10, 1024, 100_003];
        // Elements and bytes beyond 32 bits.
        let far = [1 << 20, (4 << 20) + 5, (1 << 30) + 5, (5 << 30) + 1];
        let lens = [&near[..], &far].concat();
        for (size, connections, len) in (2..6)
            .flat_map(|size| (1..4).map(move |c| (size, c)))
            .flat_map(|(size, c)| lens.iter().map(move |len| (size, c, *len)))
        {
            let plans = |make: &dyn Fn(RingPosition) -> Vec<RingStream>| -> Vec<Vec<RingStream>> {
                (0..size)
                    .map(|r| make(seat(r, size, connections)))
                    .collect()
            };
            let mut all = vec![plans(&|s| s.all_gather(len))];
            match len {
                len if len < size => all.push(plans(&|s| s.all_reduce_padded(Dtype::F32))),
                len => all.push(plans(&|s| s.all_reduce(len, Dtype::F32))),
            }
            for plan in all {
                for (rank, courses) in plan.iter().enumerate() {
                    for (i, course) in courses.iter().enumerate() {
                        let place = seat(rank, size, connections);
                        let to = match course.way {
                            SendDirection::Right => place.right(),
                            SendDirection::Left => place.left(),
                        };
                        let theirs = &plan[to][i];
                        assert_eq!(
                            (theirs.way, theirs.connection),
                            (course.way, course.connection)
                        );
                        assert!(course.connection < connections);
                        let takes: Vec<_> = theirs.takes.iter().map(|t| t.range.clone()).collect();
                        let onward = course.takes.iter().map(|t| t.range.clone());
                        let mut sends: Vec<_> =
                            std::iter::once(course.own.clone()).chain(onward).collect();
                        sends.pop();
                        assert_eq!(sends, takes, "rank {rank} of {size}, {len} elements");
                    }
                }
            }
        }
    }

    #[test]
    fn large_calls_use_more_courses_but_no_more_than_there_are_sockets() {
        let courses = |len, connections| seat(0, 2, connections).all_reduce(len, Dtype::F32).len();
        for (len, connections, expected) in [
            (2, 1, 1),
            (131_072, 1, 1),
            (262_143, 1, 1),
            (262_144, 1, 2),
            (1 << 22, 1, 2),
            (1 << 22, 2, 4),
            (393_216, 2, 3),
        ] {
            assert_eq!(
                courses(len, connections),
                expected,
                "{len} over {connections}"
            );
        }
    }

    #[test]
    fn messages_are_cut_as_mlx_cuts_them() {
        for (bytes, connections, expected) in [
            (0, 2, &[][..]),
            (1, 2, &[(0, 1)]),
            (1025, 2, &[(0, 1024), (1024, 1025)]),
            (5001, 2, &[(0, 2501), (2501, 5001)]),
            (5001, 1, &[(0, 5001)]),
            (2500, 3, &[(0, 1024), (1024, 2048), (2048, 2500)]),
        ] {
            let courses = seat(0, 2, connections).send(SendDirection::Right, bytes);
            let ranges = courses
                .iter()
                .map(|course| (course.own.start, course.own.end));
            assert_eq!(
                ranges.collect::<Vec<_>>(),
                expected,
                "{bytes} over {connections}"
            );
        }
    }

    #[test]
    fn only_neighbours_have_a_way() {
        assert_eq!(seat(1, 4, 1).way_to(3), None);
        assert_eq!(seat(1, 4, 1).way_from(3), None);
        assert_eq!(seat(1, 4, 1).way_to(2), Some(SendDirection::Right));
        assert_eq!(seat(1, 4, 1).way_from(2), Some(SendDirection::Left));
        // With two ranks, bytes sent to the right arrive from the left.
        let (zero, one) = (seat(0, 2, 1), seat(1, 2, 1));
        assert_eq!(zero.way_to(1), one.way_from(0));
    }
}
