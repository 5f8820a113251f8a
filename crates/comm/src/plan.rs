//! What a collective does, as data: per step who sends what to whom, then what is added up.
//!
//! A plan is made anew for every call, into memory that is used again; it depends on the call, the
//! rank and the size only. [`crate::linked`] runs it.

use std::ops::Range;

use crate::{Collective, Counts};

/// Longest part of one rank's buffer that a one-shot reduction moves in one step, which bounds
/// the scratch memory at this times the number of ranks.
pub(crate) const SEGMENT_BYTES: usize = 128 << 10;

/// The buffers of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// What the caller brings and keeps.
    #[allow(dead_code, reason = "scatters will read from it")]
    Input,
    /// Where the result goes; for reductions and broadcasts also what the caller brings.
    Work,
    /// Memory of the group.
    Scratch,
}

/// Bytes of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) place: Place,
    pub(crate) range: Range<usize>,
}

impl Span {
    pub(crate) const fn new(place: Place, range: Range<usize>) -> Self {
        Self { place, range }
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }
}

/// One part of a step. A step has at most one `Send` and one `Receive` for each peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// These bytes go to `peer`.
    Send { peer: usize, span: Span },
    /// Bytes of `peer` go here.
    Receive { peer: usize, span: Span },
    /// After all transfers of the step: `into = into op from`.
    Fold { into: Span, from: Span },
    /// After all transfers of the step, in order with the folds.
    Copy { into: Span, from: Span },
}

/// All steps of one rank.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    acts: Vec<Act>,
    /// Where each step ends in `acts`.
    ends: Vec<usize>,
    /// Bytes of scratch memory.
    pub(crate) scratch: usize,
}

impl Plan {
    /// The acts of each step.
    pub(crate) fn steps(&self) -> impl Iterator<Item = &[Act]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.acts[start..*end])
    }

    fn end_step(&mut self) {
        self.ends.push(self.acts.len());
    }

    /// Plans `collective` for `rank` of `size` ranks.
    pub(crate) fn make(&mut self, collective: &Collective<'_>, rank: usize, size: usize) {
        self.acts.clear();
        self.ends.clear();
        self.scratch = 0;
        match collective {
            Collective::Barrier => {}
            Collective::AllGather { output, counts, .. } => {
                self.one_shot_gather(counts, output.dtype().bytes(), rank, size);
            }
            Collective::AllReduce { data, .. } => {
                self.one_shot_reduce(data.bytes().len(), rank, size);
            }
            Collective::Broadcast { data, root } => {
                self.one_shot_broadcast(data.bytes().len(), root.0 as usize, rank, size);
            }
        }
    }

    fn send(&mut self, peer: usize, span: Span) {
        self.acts.push(Act::Send { peer, span });
    }

    fn receive(&mut self, peer: usize, span: Span) {
        self.acts.push(Act::Receive { peer, span });
    }

    /// Every rank sends its part to all. 1 step; S_rank * (P - 1) bytes sent.
    fn one_shot_gather(&mut self, counts: &Counts<'_>, width: usize, rank: usize, size: usize) {
        let mut start = 0;
        let mut own = 0..0;
        for peer in 0..size {
            let part = start..start + counts.of(peer) * width;
            start = part.end;
            match peer == rank {
                true => own = part,
                false => self.receive(peer, Span::new(Place::Work, part)),
            }
        }
        for peer in others(rank, size) {
            self.send(peer, Span::new(Place::Work, own.clone()));
        }
        self.end_step();
    }

    /// Every rank sends its buffer to all and adds all of them in rank order. A step for each
    /// [`SEGMENT_BYTES`]; S * (P - 1) bytes sent.
    fn one_shot_reduce(&mut self, bytes: usize, rank: usize, size: usize) {
        let mut start = 0;
        loop {
            let end = bytes.min(start + SEGMENT_BYTES);
            self.reduce_segment(start..end, rank, size);
            if end == bytes {
                return;
            }
            start = end;
        }
    }

    fn reduce_segment(&mut self, segment: Range<usize>, rank: usize, size: usize) {
        let bytes = segment.len();
        let own = || Span::new(Place::Work, segment.clone());
        let theirs = |peer: usize| match peer == rank {
            true => own(),
            false => Span::new(Place::Scratch, peer * bytes..(peer + 1) * bytes),
        };
        self.scratch = self.scratch.max(size * bytes);
        for peer in others(rank, size) {
            self.send(peer, own());
            self.receive(peer, theirs(peer));
        }
        let folds = (1..size).map(|peer| Act::Fold {
            into: theirs(0),
            from: theirs(peer),
        });
        self.acts.extend(folds);
        if rank > 0 {
            let (into, from) = (own(), theirs(0));
            self.acts.push(Act::Copy { into, from });
        }
        self.end_step();
    }

    /// The root sends its buffer to all. 1 step; S * (P - 1) bytes sent by the root.
    fn one_shot_broadcast(&mut self, bytes: usize, root: usize, rank: usize, size: usize) {
        let all = Span::new(Place::Work, 0..bytes);
        if rank == root {
            others(rank, size).for_each(|peer| self.send(peer, all.clone()));
        } else {
            self.receive(root, all);
        }
        self.end_step();
    }
}

/// All ranks but this one, the next first, so that not all talk to rank 0 at once.
fn others(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |offset| (rank + offset) % size)
}
