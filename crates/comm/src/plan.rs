//! The plan of a collective, as data: for each step the transfers, then the local reductions.
//!
//! Every call makes a new plan, in reused memory. It depends on the call, the algorithm, the rank
//! and the size only. `transport_group` runs it. `docs/algorithms.md` has steps and bytes of all
//! algorithms. [`choose`] picks one.

use std::fmt;
use std::ops::Range;

use crate::reduce::OperandSide;
use crate::tuning::choose;
use crate::{Algorithm, Collective, Dtype, ElementCounts, Reduce, Tuning};

/// Longest part of one rank's buffer that a one-shot reduction moves in one step. Scratch memory is
/// at most this times the number of ranks.
pub(crate) const SEGMENT_BYTES: usize = 128 << 10;

/// The buffers of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlanBuffer {
    /// The caller's input, never written.
    Input,
    /// The result; for reductions and broadcasts also the input.
    Work,
    /// Memory of the group.
    Scratch,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BufferSpan {
    pub(crate) place: PlanBuffer,
    pub(crate) range: Range<usize>,
}

impl BufferSpan {
    pub(crate) const fn new(place: PlanBuffer, range: Range<usize>) -> Self {
        Self { place, range }
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }
}

/// The use of arriving bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveAction {
    /// They are copied to their place.
    Copy,
    /// They are reduced into the bytes there.
    Fold(OperandSide),
}

/// An action of a step. A step has at most one `Send` and one `Receive` for each peer, and no
/// received span overlaps a sent one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlanAction {
    /// Sends these bytes to `peer`.
    Send { peer: usize, span: BufferSpan },
    /// Receives bytes of `peer`.
    Receive {
        peer: usize,
        span: BufferSpan,
        take: ReceiveAction,
    },
    /// `into = from`. Runs in order after all transfers of the step, like the following variants.
    Copy { into: BufferSpan, from: BufferSpan },
    /// `into = into op from`, or the other way round.
    Fold {
        into: BufferSpan,
        from: BufferSpan,
        side: OperandSide,
    },
    /// `into` = all ranks' parts, reduced in rank order. The own part is in `into`, that of rank r
    /// at `r * into.len()` of the scratch memory.
    Reduce { into: BufferSpan },
    /// Converts elements to f32, in the scratch memory.
    Widen { into: BufferSpan, from: BufferSpan },
    /// Converts back, rounded.
    Narrow { into: BufferSpan, from: BufferSpan },
}

/// All steps of one rank.
#[derive(Debug)]
pub(crate) struct CollectivePlan {
    acts: Vec<PlanAction>,
    /// End of each step in `acts`.
    ends: Vec<usize>,
    /// Bytes of scratch memory.
    pub(crate) scratch: usize,
    pub(crate) algorithm: Algorithm,
    /// Folds are of f32 for any dtype: elements were widened.
    pub(crate) wide: bool,
    /// The reduced result of step 0's bytes belongs in their own place. A peer that writes it back
    /// need not send it in step 1.
    pub(crate) comes_back: bool,
    rank: usize,
    size: usize,
    /// The order of rings.
    pub(crate) route: Route,
}

/// The order in which a ring visits the ranks, and whether data moves in both directions at once.
///
/// In a full mesh of equal links that is rank order and one direction. Over cables, a ring follows
/// them, and a cable carries as much backward as forward.
#[derive(Debug, Default)]
pub(crate) struct Route {
    /// Ranks by position; empty for rank order.
    order: Vec<usize>,
    /// The inverse: positions by rank.
    places: Vec<usize>,
    both: bool,
}

impl Route {
    /// A ring over `order`, in both directions.
    pub(crate) fn new(order: Vec<usize>) -> Self {
        let mut places = vec![0; order.len()];
        for (place, rank) in order.iter().enumerate() {
            places[*rank] = place;
        }
        let both = true;
        Self {
            order,
            places,
            both,
        }
    }

    /// The rank `steps` positions after `rank`, of `size`.
    fn after(&self, rank: usize, steps: usize, size: usize) -> usize {
        let place = self.places.get(rank).copied().unwrap_or(rank);
        let place = (place + steps) % size;
        self.order.get(place).copied().unwrap_or(place)
    }
}

/// Shortest vector that uses both directions: below, steps cost more than bytes. JACCL's figure.
const BOTH_WAYS_BYTES: usize = 32 << 10;

/// A direction of a ring, and the part of every chunk that moves in it.
#[derive(Clone, Copy)]
enum RingDirection {
    /// Forward, the whole chunk.
    Only,
    /// Forward, the first half.
    Forth,
    /// Backward, the second half.
    Back,
}

impl RingDirection {
    /// The part of a chunk of elements of `width` bytes.
    fn part(self, chunk: BufferSpan, width: usize) -> BufferSpan {
        let Range { start, end } = chunk.range;
        let middle = start + (end - start) / width / 2 * width;
        let range = match self {
            Self::Only => start..end,
            Self::Forth => start..middle,
            Self::Back => middle..end,
        };
        BufferSpan { range, ..chunk }
    }
}

/// A vector that is cut into one chunk per rank, its location and element width.
#[derive(Clone, Copy)]
struct ChunkedVector {
    place: PlanBuffer,
    /// Elements.
    length: usize,
    /// Bytes of one element.
    width: usize,
}

impl ChunkedVector {
    /// Chunk `index` of `count`: the first ones are one longer if it does not divide.
    fn chunk(&self, index: usize, count: usize) -> BufferSpan {
        let (least, longer) = (self.length / count, self.length % count);
        let start = |index: usize| (index * least + index.min(longer)) * self.width;
        BufferSpan::new(self.place, start(index)..start(index + 1))
    }

    /// Chunks `first..last`.
    fn chunks(&self, chunks: Range<usize>, count: usize) -> BufferSpan {
        let (first, last) = (
            self.chunk(chunks.start, count),
            self.chunk(chunks.end - 1, count),
        );
        BufferSpan::new(self.place, first.range.start..last.range.end)
    }

    fn all(&self) -> BufferSpan {
        self.chunk(0, 1)
    }
}

impl Default for CollectivePlan {
    fn default() -> Self {
        Self {
            acts: Vec::new(),
            ends: Vec::new(),
            scratch: 0,
            algorithm: Algorithm::OneShot,
            wide: false,
            comes_back: false,
            rank: 0,
            size: 1,
            route: Route::default(),
        }
    }
}

impl CollectivePlan {
    pub(crate) fn steps(&self) -> impl Iterator<Item = &[PlanAction]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.acts[start..*end])
    }

    pub(crate) fn make(
        &mut self,
        collective: &Collective<'_>,
        tuning: &Tuning,
        rank: usize,
        size: usize,
    ) {
        self.acts.clear();
        self.ends.clear();
        (self.scratch, self.wide, self.rank, self.size) = (0, false, rank, size);
        self.comes_back = false;
        self.algorithm = choose(collective, tuning, size);
        let ring = self.algorithm == Algorithm::Ring;
        match collective {
            Collective::Barrier => {}
            Collective::AllGather { output, counts, .. } => {
                let width = output.dtype().bytes();
                let part = |peer| part(counts, width, peer);
                match ring {
                    true => {
                        let chunk = |peer| BufferSpan::new(PlanBuffer::Work, part(peer));
                        self.ring_gather(chunk, width, output.bytes().len());
                    }
                    false => self.one_shot_gather(part),
                }
            }
            Collective::AllReduce { data, op } => {
                self.all_reduce(data.len(), data.dtype(), *op);
            }
            Collective::ReduceScatter {
                input, counts, op, ..
            } => {
                let width = input.dtype().bytes();
                match ring {
                    true => self.ring_scatter(counts, input.dtype(), *op),
                    false => self.one_shot_scatter(|peer| part(counts, width, peer)),
                }
            }
            Collective::Broadcast { data, root } => {
                let (bytes, root) = (data.bytes().len(), root.0 as usize);
                match self.algorithm {
                    Algorithm::Tree => self.tree_broadcast(bytes, root),
                    _ => self.one_shot_broadcast(bytes, root),
                }
            }
            Collective::AllToAll {
                input,
                sends,
                receives,
                ..
            } => {
                let width = input.dtype().bytes();
                let (send, receive) = (
                    |peer| part(sends, width, peer),
                    |peer| part(receives, width, peer),
                );
                self.one_shot_exchange(send, receive);
            }
        }
    }

    fn all_reduce(&mut self, length: usize, dtype: Dtype, op: Reduce) {
        let width = dtype.bytes();
        let vector = ChunkedVector {
            place: PlanBuffer::Work,
            length,
            width,
        };
        match self.algorithm {
            Algorithm::OneShot | Algorithm::Tree => self.one_shot_reduce(length * width, width),
            Algorithm::TwoShot if self.size == 2 => self.pair_reduce(vector),
            Algorithm::TwoShot => self.two_shot_reduce(vector),
            Algorithm::Ring | Algorithm::Halving | Algorithm::Doubling => {
                let wide = self.widen(vector, dtype, op);
                match self.algorithm {
                    Algorithm::Ring => self.ring_reduce(wide, vector),
                    Algorithm::Halving => self.halving_reduce(wide, vector),
                    _ => self.doubling_reduce(wide, vector),
                }
            }
        }
    }

    fn send(&mut self, peer: usize, span: BufferSpan) {
        self.acts.push(PlanAction::Send { peer, span });
    }

    fn receive(&mut self, peer: usize, span: BufferSpan) {
        let take = ReceiveAction::Copy;
        self.acts.push(PlanAction::Receive { peer, span, take });
    }

    /// Receives the operand before (`Second`) or after the existing one, in the order of the sum.
    fn receive_fold(&mut self, peer: usize, span: BufferSpan, side: OperandSide) {
        let take = ReceiveAction::Fold(side);
        self.acts.push(PlanAction::Receive { peer, span, take });
    }

    fn end_step(&mut self) {
        self.ends.push(self.acts.len());
    }

    /// All other ranks, the next one first, so that not all send to rank 0 at once.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.size);
        (1..size).map(move |offset| (rank + offset) % size)
    }

    fn one_shot_gather(&mut self, part: impl Fn(usize) -> Range<usize>) {
        for peer in self.others() {
            self.send(peer, BufferSpan::new(PlanBuffer::Work, part(self.rank)));
            self.receive(peer, BufferSpan::new(PlanBuffer::Work, part(peer)));
        }
        self.end_step();
    }

    /// In every step each rank forwards to its successor what it received from its predecessor.
    /// Chunks have elements of `width` bytes, and `bytes` all together.
    fn ring_gather(&mut self, chunk: impl Fn(usize) -> BufferSpan, width: usize, bytes: usize) {
        for step in 0..self.size - 1 {
            for way in self.ways(bytes) {
                let sent = way.part(chunk(self.behind(*way, step)), width);
                let received = way.part(chunk(self.behind(*way, step + 1)), width);
                let (next, before) = (self.behind(*way, self.size - 1), self.behind(*way, 1));
                self.send(next, sent);
                self.receive(before, received);
            }
            self.end_step();
        }
    }

    /// The directions that this many bytes use. With two ranks both lead to the same peer.
    fn ways(&self, bytes: usize) -> &'static [RingDirection] {
        match self.route.both && self.size > 2 && bytes > BOTH_WAYS_BYTES {
            true => &[RingDirection::Forth, RingDirection::Back],
            false => &[RingDirection::Only],
        }
    }

    /// The rank `steps` positions before this one in this direction.
    fn behind(&self, way: RingDirection, steps: usize) -> usize {
        let (size, steps) = (self.size, steps % self.size);
        match way {
            RingDirection::Only | RingDirection::Forth => {
                self.route.after(self.rank, size - steps, size)
            }
            RingDirection::Back => self.route.after(self.rank, steps, size),
        }
    }

    /// A step for each segment.
    fn one_shot_reduce(&mut self, bytes: usize, width: usize) {
        let most = SEGMENT_BYTES - SEGMENT_BYTES % width;
        let mut start = 0;
        loop {
            let end = bytes.min(start + most);
            let own = BufferSpan::new(PlanBuffer::Work, start..end);
            for peer in self.others() {
                self.send(peer, own.clone());
                self.receive(peer, staged(peer, end - start));
            }
            self.reduce(own);
            self.end_step();
            if end == bytes {
                return;
            }
            start = end;
        }
    }

    /// Reduces the own part, which is in `into`, with all staged ones.
    fn reduce(&mut self, into: BufferSpan) {
        self.scratch = self.scratch.max(self.size * into.len());
        self.acts.push(PlanAction::Reduce { into });
    }

    /// Each rank reduces one chunk and broadcasts the result. The same sums as one-shot, in the
    /// same order, hence the same bits.
    fn two_shot_reduce(&mut self, vector: ChunkedVector) {
        let size = self.size;
        let own = vector.chunk(self.rank, size);
        for peer in self.others() {
            self.send(peer, vector.chunk(peer, size));
            self.receive(peer, staged(peer, own.len()));
        }
        self.reduce(own.clone());
        self.end_step();
        for peer in self.others() {
            self.send(peer, own.clone());
            self.receive(peer, vector.chunk(peer, size));
        }
        self.end_step();
    }

    /// Two-shot for two ranks: the other part is reduced as it arrives.
    fn pair_reduce(&mut self, vector: ChunkedVector) {
        let peer = 1 - self.rank;
        let (own, other) = (vector.chunk(self.rank, 2), vector.chunk(peer, 2));
        let side = if self.rank == 0 {
            OperandSide::First
        } else {
            OperandSide::Second
        };
        self.comes_back = true;
        self.send(peer, other.clone());
        self.receive_fold(peer, own.clone(), side);
        self.end_step();
        self.send(peer, own);
        self.receive(peer, other);
        self.end_step();
    }

    /// For algorithms that send partial results: half floats are widened first, so that they are
    /// not rounded at every hop.
    fn widen(&mut self, vector: ChunkedVector, dtype: Dtype, op: Reduce) -> ChunkedVector {
        let half = matches!(dtype, Dtype::F16 | Dtype::Bf16);
        if !half || matches!(op, Reduce::Max | Reduce::Min) {
            return vector;
        }
        let wide = ChunkedVector {
            place: PlanBuffer::Scratch,
            width: 4,
            ..vector
        };
        (self.wide, self.scratch) = (true, wide.all().len());
        let (into, from) = (wide.all(), vector.all());
        self.acts.push(PlanAction::Widen { into, from });
        self.end_step();
        wide
    }

    /// Rounds a wide result into its place.
    fn narrow(&mut self, into: BufferSpan, from: BufferSpan) {
        if self.wide {
            self.acts.push(PlanAction::Narrow { into, from });
        }
    }

    /// Chunk c is added in the order c + 1, c + 2, ..., c around the ring and ends on rank c. With
    /// both directions, that holds for its first half, and c - 1, c - 2, ..., c for the second.
    fn ring_reduce(&mut self, wide: ChunkedVector, vector: ChunkedVector) {
        let (rank, size, bytes) = (self.rank, self.size, vector.all().len());
        self.ring_fold(|peer| wide.chunk(peer, size), wide.width, bytes);
        self.narrow(vector.chunk(rank, size), wide.chunk(rank, size));
        self.end_step();
        self.ring_gather(|peer| vector.chunk(peer, size), vector.width, bytes);
    }

    fn ring_fold(&mut self, chunk: impl Fn(usize) -> BufferSpan, width: usize, bytes: usize) {
        for step in 0..self.size - 1 {
            for way in self.ways(bytes) {
                let sent = way.part(chunk(self.behind(*way, step + 1)), width);
                let received = way.part(chunk(self.behind(*way, step + 2)), width);
                let (next, before) = (self.behind(*way, self.size - 1), self.behind(*way, 1));
                self.send(next, sent);
                self.receive_fold(before, received, OperandSide::Second);
            }
            self.end_step();
        }
    }

    /// The part of a reduce-scatter that this rank keeps, from a copy: the input is not changed.
    fn ring_scatter(&mut self, counts: &ElementCounts<'_>, dtype: Dtype, op: Reduce) {
        let (rank, size) = (self.rank, self.size);
        let length = counts.total(size);
        let vector = ChunkedVector {
            place: PlanBuffer::Input,
            length,
            width: dtype.bytes(),
        };
        let wide = self.widen(vector, dtype, op);
        if !self.wide {
            self.scratch = vector.all().len();
            let (into, from) = (
                BufferSpan::new(PlanBuffer::Scratch, vector.all().range),
                vector.all(),
            );
            self.acts.push(PlanAction::Copy { into, from });
            self.end_step();
        }
        let own = |peer| BufferSpan::new(PlanBuffer::Scratch, part(counts, wide.width, peer));
        self.ring_fold(own, wide.width, vector.all().len());
        let (from, bytes) = (own(rank), counts.of(rank) * dtype.bytes());
        let into = BufferSpan::new(PlanBuffer::Work, 0..bytes);
        match self.wide {
            true => self.narrow(into, from),
            false => self.acts.push(PlanAction::Copy { into, from }),
        }
        self.end_step();
    }

    fn one_shot_scatter(&mut self, part: impl Fn(usize) -> Range<usize>) {
        let own = part(self.rank);
        let into = BufferSpan::new(PlanBuffer::Work, 0..own.len());
        for peer in self.others() {
            self.send(peer, BufferSpan::new(PlanBuffer::Input, part(peer)));
            self.receive(peer, staged(peer, own.len()));
        }
        let from = BufferSpan::new(PlanBuffer::Input, own);
        let kept = into.clone();
        self.acts.push(PlanAction::Copy { into: kept, from });
        self.reduce(into);
        self.end_step();
    }

    fn one_shot_broadcast(&mut self, bytes: usize, root: usize) {
        let all = BufferSpan::new(PlanBuffer::Work, 0..bytes);
        if self.rank == root {
            for peer in self.others() {
                self.send(peer, all.clone());
            }
        } else {
            self.receive(root, all);
        }
        self.end_step();
    }

    /// In every step each rank that has the data sends it to one that lacks it.
    fn tree_broadcast(&mut self, bytes: usize, root: usize) {
        let (size, all) = (self.size, BufferSpan::new(PlanBuffer::Work, 0..bytes));
        let place = (self.rank + size - root) % size;
        let rank = |place: usize| (place + root) % size;
        let mut have = 1;
        while have < size {
            if place < have && place + have < size {
                self.send(rank(place + have), all.clone());
            } else if (have..2 * have).contains(&place) {
                self.receive(rank(place - have), all.clone());
            }
            self.end_step();
            have *= 2;
        }
    }

    fn one_shot_exchange(
        &mut self,
        send: impl Fn(usize) -> Range<usize>,
        receive: impl Fn(usize) -> Range<usize>,
    ) {
        for peer in self.others() {
            self.send(peer, BufferSpan::new(PlanBuffer::Input, send(peer)));
            self.receive(peer, BufferSpan::new(PlanBuffer::Work, receive(peer)));
        }
        let into = BufferSpan::new(PlanBuffer::Work, receive(self.rank));
        let from = BufferSpan::new(PlanBuffer::Input, send(self.rank));
        self.acts.push(PlanAction::Copy { into, from });
        self.end_step();
    }

    /// Recursive halving, then recursive doubling.
    fn halving_reduce(&mut self, wide: ChunkedVector, vector: ChunkedVector) {
        let (inner, rank) = self.fold_surplus(wide);
        let mut own = 0..inner;
        if let Some(rank) = rank {
            let mut distance = inner / 2;
            while distance > 0 {
                let peer = self.outer(rank ^ distance, inner);
                let middle = own.start + distance;
                let (low, high) = (own.start..middle, middle..own.end);
                let lower = rank & distance == 0;
                let (kept, sent) = if lower { (low, high) } else { (high, low) };
                self.send(peer, wide.chunks(sent, inner));
                let side = if lower {
                    OperandSide::First
                } else {
                    OperandSide::Second
                };
                self.receive_fold(peer, wide.chunks(kept.clone(), inner), side);
                self.end_step();
                own = kept;
                distance /= 2;
            }
            let (into, from) = (
                vector.chunks(own.clone(), inner),
                wide.chunks(own.clone(), inner),
            );
            self.narrow(into, from);
            self.end_step();
            let mut distance = 1;
            while distance < inner {
                let peer = self.outer(rank ^ distance, inner);
                let other = (own.start ^ distance)..(own.start ^ distance) + distance;
                self.send(peer, vector.chunks(own.clone(), inner));
                self.receive(peer, vector.chunks(other.clone(), inner));
                self.end_step();
                own = own.start.min(other.start)..own.end.max(other.end);
                distance *= 2;
            }
        } else {
            (0..2 * inner.ilog2() + 1).for_each(|_| self.end_step());
        }
        self.hand_to_surplus(vector);
    }

    /// Recursive doubling: everything is exchanged with one peer per step.
    fn doubling_reduce(&mut self, wide: ChunkedVector, vector: ChunkedVector) {
        let (inner, rank) = self.fold_surplus(wide);
        let bytes = wide.all().len();
        let staging = self.scratch;
        self.scratch += bytes;
        let mut distance = 1;
        while distance < inner {
            if let Some(rank) = rank {
                let peer = self.outer(rank ^ distance, inner);
                let from = BufferSpan::new(PlanBuffer::Scratch, staging..staging + bytes);
                self.send(peer, wide.all());
                self.receive(peer, from.clone());
                let side = if rank & distance == 0 {
                    OperandSide::First
                } else {
                    OperandSide::Second
                };
                let into = wide.all();
                self.acts.push(PlanAction::Fold { into, from, side });
            }
            self.end_step();
            distance *= 2;
        }
        if rank.is_some() {
            self.narrow(vector.all(), wide.all());
        }
        self.end_step();
        self.hand_to_surplus(vector);
    }

    /// Handles ranks beyond the largest power of two: among the first ranks, each odd one sends its
    /// data to its predecessor and waits. Returns that power, and this rank's number among the
    /// others.
    fn fold_surplus(&mut self, vector: ChunkedVector) -> (usize, Option<usize>) {
        let inner = 1 << self.size.ilog2();
        let surplus = self.size - inner;
        if surplus == 0 {
            return (inner, Some(self.rank));
        }
        let paired = self.rank < 2 * surplus;
        if paired && self.rank % 2 == 1 {
            self.send(self.rank - 1, vector.all());
        } else if paired {
            self.receive_fold(self.rank + 1, vector.all(), OperandSide::First);
        }
        self.end_step();
        match (paired, self.rank % 2) {
            (true, 0) => (inner, Some(self.rank / 2)),
            (true, _) => (inner, None),
            (false, _) => (inner, Some(self.rank - surplus)),
        }
    }

    /// The rank with number `rank` among those that take part.
    fn outer(&self, rank: usize, inner: usize) -> usize {
        let surplus = self.size - inner;
        if rank < surplus {
            2 * rank
        } else {
            rank + surplus
        }
    }

    fn hand_to_surplus(&mut self, vector: ChunkedVector) {
        let surplus = self.size - (1 << self.size.ilog2());
        if self.rank < 2 * surplus {
            match self.rank % 2 {
                0 => self.send(self.rank + 1, vector.all()),
                _ => self.receive(self.rank - 1, vector.all()),
            }
        }
        self.end_step();
    }
}

/// Scratch location of the part of `peer`.
fn staged(peer: usize, bytes: usize) -> BufferSpan {
    BufferSpan::new(PlanBuffer::Scratch, peer * bytes..(peer + 1) * bytes)
}

/// Byte range of one rank's part among all parts.
fn part(counts: &ElementCounts<'_>, width: usize, peer: usize) -> Range<usize> {
    let start = counts.before(peer) * width;
    start..start + counts.of(peer) * width
}

impl fmt::Display for CollectivePlan {
    /// A line for each step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, acts) in self.steps().enumerate() {
            write!(f, "step {number}:")?;
            for act in acts {
                match act {
                    PlanAction::Send { peer, span } => {
                        write!(f, " send {} to {peer};", span.len())?
                    }
                    PlanAction::Receive { peer, span, .. } => {
                        write!(f, " receive {} from {peer};", span.len())?;
                    }
                    _ => {}
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataMut, RegisteredMemory};

    /// JACCL's mesh counts bytes in `int` and ends at 2 GiB for each rank. The memory is mapped and
    /// never touched.
    #[test]
    fn payloads_beyond_2_gib_are_planned_in_whole() {
        const PART: usize = (2 << 30) + 4096;
        let mut all = RegisteredMemory::<u8>::new(None, 2 * PART);
        let tuning = Tuning {
            force: Some(Algorithm::Ring),
            ..Tuning::default()
        };
        let call = Collective::AllGather {
            input: None,
            output: DataMut::new(&mut all),
            counts: ElementCounts::Even(PART),
        };
        let mut plan = CollectivePlan::default();
        plan.make(&call, &tuning, 1, 2);
        let sent: Vec<_> = plan
            .steps()
            .flatten()
            .filter_map(|act| match act {
                PlanAction::Send { span, .. } => Some(span.range.clone()),
                _ => None,
            })
            .collect();
        assert_eq!(sent, std::slice::from_ref(&(PART..2 * PART)));
    }
}
