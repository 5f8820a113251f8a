//! The buffers of one call, addressed as plans do.

use crate::plan::{Act, Place, Span};
use crate::reduce::fold;
use crate::{Collective, Dtype, Reduce};

/// See [`Place`].
pub(super) struct Buffers<'a> {
    input: &'a [u8],
    work: &'a mut [u8],
    scratch: &'a mut [u8],
    dtype: Dtype,
    op: Reduce,
}

impl<'a> Buffers<'a> {
    /// The buffers of `collective`; what `rank` brings to a gather is put in its place.
    pub(super) fn new(
        collective: &'a mut Collective<'_>,
        scratch: &'a mut [u8],
        rank: usize,
    ) -> Self {
        let (input, work, dtype, op): (&[u8], &mut [u8], _, _) = match collective {
            Collective::Barrier => (&[], &mut [], Dtype::U8, Reduce::Sum),
            Collective::AllGather {
                input,
                output,
                counts,
            } => {
                let dtype = output.dtype();
                let start: usize = (0..rank).map(|r| counts.of(r) * dtype.bytes()).sum();
                let work = output.bytes_mut();
                work[start..start + input.bytes().len()].copy_from_slice(input.bytes());
                (input.bytes(), work, dtype, Reduce::Sum)
            }
            Collective::AllReduce { data, op } => {
                let dtype = data.dtype();
                (&[], data.bytes_mut(), dtype, *op)
            }
            Collective::Broadcast { data, .. } => {
                let dtype = data.dtype();
                (&[], data.bytes_mut(), dtype, Reduce::Sum)
            }
        };
        Self {
            input,
            work,
            scratch,
            dtype,
            op,
        }
    }

    pub(super) fn get(&self, span: &Span) -> &[u8] {
        let range = span.range.clone();
        match span.place {
            Place::Input => &self.input[range],
            Place::Work => &self.work[range],
            Place::Scratch => &self.scratch[range],
        }
    }

    /// Plans never write to the input.
    pub(super) fn get_mut(&mut self, span: &Span) -> &mut [u8] {
        let range = span.range.clone();
        match span.place {
            Place::Input => unreachable!("a plan writes to the input"),
            Place::Work => &mut self.work[range],
            Place::Scratch => &mut self.scratch[range],
        }
    }

    /// Does what a step has to do after its transfers.
    pub(super) fn finish(&mut self, acts: &[Act]) {
        for act in acts {
            match act {
                Act::Send { .. } | Act::Receive { .. } => {}
                Act::Fold { into, from } => {
                    let (dtype, op) = (self.dtype, self.op);
                    let (into, from) = self.pair(into, from);
                    fold(op, dtype, into, from);
                }
                Act::Copy { into, from } => {
                    let (into, from) = self.pair(into, from);
                    into.copy_from_slice(from);
                }
            }
        }
    }

    /// Two different spans, the first to be written.
    fn pair(&mut self, into: &Span, from: &Span) -> (&mut [u8], &[u8]) {
        let (a, b) = (into.range.clone(), from.range.clone());
        match (into.place, from.place) {
            (Place::Work, Place::Scratch) => (&mut self.work[a], &self.scratch[b]),
            (Place::Scratch, Place::Work) => (&mut self.scratch[a], &self.work[b]),
            (Place::Work, Place::Input) => (&mut self.work[a], &self.input[b]),
            (Place::Scratch, Place::Input) => (&mut self.scratch[a], &self.input[b]),
            (Place::Work, Place::Work) => disjoint(self.work, a, b),
            (Place::Scratch, Place::Scratch) => disjoint(self.scratch, a, b),
            (Place::Input, _) => unreachable!("a plan writes to the input"),
        }
    }
}

/// Two ranges of one buffer that do not overlap.
fn disjoint(
    bytes: &mut [u8],
    into: std::ops::Range<usize>,
    from: std::ops::Range<usize>,
) -> (&mut [u8], &[u8]) {
    if into.end <= from.start {
        let (low, high) = bytes.split_at_mut(from.start);
        (&mut low[into], &high[..from.end - from.start])
    } else {
        assert!(from.end <= into.start, "a plan's spans overlap");
        let (low, high) = bytes.split_at_mut(into.start);
        (&mut high[..into.end - into.start], &low[from])
    }
}
