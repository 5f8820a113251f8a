//! The buffers of one call, addressed by spans of a plan.

use std::ops::Range;

use half::{bf16, f16};

use crate::peer_bytes::{PeerBytes, PeerBytesMut};
use crate::plan::{BufferSpan, CollectivePlan, PlanAction, PlanBuffer};
use crate::reduce::{OperandSide, fold, fold_lent, reduce_parts};
use crate::sync::copy;
use crate::{Collective, Dtype, Reduce};

/// Block size for reduce-then-copy, so that a block stays in L1. A whole number of elements of any
/// type.
const BLOCK_BYTES: usize = 8 << 10;

pub(super) struct Buffers<'a> {
    input: &'a [u8],
    work: &'a mut [u8],
    scratch: &'a mut [u8],
    dtype: Dtype,
    /// The element type of folds: f32 if the plan widens.
    folds: Dtype,
    op: Reduce,
    rank: usize,
    size: usize,
}

impl<'a> Buffers<'a> {
    /// The buffers of `collective`; this rank's input of a gather is copied to its place in the
    /// output.
    pub(super) fn new(
        collective: &'a mut Collective<'_>,
        plan: &CollectivePlan,
        scratch: &'a mut [u8],
        (rank, size): (usize, usize),
    ) -> Self {
        let (input, work, dtype, op): (&[u8], &mut [u8], _, _) = match collective {
            Collective::Barrier => (&[], &mut [], Dtype::U8, Reduce::Sum),
            Collective::AllGather {
                input,
                output,
                counts,
            } => {
                let dtype = output.dtype();
                let start = counts.before(rank) * dtype.bytes();
                let work = output.bytes_mut();
                if let Some(input) = input {
                    let own = start..start + input.bytes().len();
                    copy(&mut work[own], input.bytes());
                }
                (&[], work, dtype, Reduce::Sum)
            }
            Collective::AllReduce { data, op } => {
                let dtype = data.dtype();
                (&[], data.bytes_mut(), dtype, *op)
            }
            Collective::ReduceScatter {
                input, output, op, ..
            } => (input.bytes(), output.bytes_mut(), input.dtype(), *op),
            Collective::AllToAll { input, output, .. } => (
                input.bytes(),
                output.bytes_mut(),
                input.dtype(),
                Reduce::Sum,
            ),
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
            folds: if plan.wide { Dtype::F32 } else { dtype },
            op,
            rank,
            size,
        }
    }

    pub(super) fn get(&self, span: &BufferSpan) -> &[u8] {
        let range = span.range.clone();
        match span.place {
            PlanBuffer::Input => &self.input[range],
            PlanBuffer::Work => &self.work[range],
            PlanBuffer::Scratch => &self.scratch[range],
        }
    }

    /// Plans never write to the input.
    pub(super) fn get_mut(&mut self, span: &BufferSpan) -> &mut [u8] {
        let range = span.range.clone();
        match span.place {
            PlanBuffer::Input => unreachable!("a plan writes to the input"),
            PlanBuffer::Work => &mut self.work[range],
            PlanBuffer::Scratch => &mut self.scratch[range],
        }
    }

    /// Bytes of one element of a fold.
    pub(super) const fn fold_width(&self) -> usize {
        self.folds.bytes()
    }

    /// Reduces bytes that arrived into `span`, at offset `at`.
    pub(super) fn fold(
        &mut self,
        span: &BufferSpan,
        at: usize,
        side: OperandSide,
        bytes: PeerBytes<'_>,
    ) {
        let (op, dtype) = (self.op, self.folds);
        let into = &mut self.get_mut(span)[at..at + bytes.len()];
        fold_lent(op, dtype, side, into, bytes);
    }

    /// Like `fold`, for the first bytes of `bytes` that fit `range` of the span; writes the result
    /// to both.
    pub(super) fn fold_both(
        &mut self,
        span: &BufferSpan,
        range: Range<usize>,
        side: OperandSide,
        bytes: &mut PeerBytesMut<'_>,
    ) {
        let (op, dtype) = (self.op, self.folds);
        let into = &mut self.get_mut(span)[range];
        let starts = (0..).step_by(BLOCK_BYTES);
        for (at, into) in starts.zip(into.chunks_mut(BLOCK_BYTES)) {
            let from = bytes.read().part(at, into.len());
            fold_lent(op, dtype, side, into, from);
            bytes.write(at, into);
        }
    }

    pub(super) fn all(&self, place: PlanBuffer) -> &[u8] {
        match place {
            PlanBuffer::Input => self.input,
            PlanBuffer::Work => self.work,
            PlanBuffer::Scratch => self.scratch,
        }
    }

    /// Runs the local actions of a step, after its transfers.
    pub(super) fn finish(&mut self, acts: &[PlanAction]) {
        for act in acts {
            match act {
                PlanAction::Send { .. } | PlanAction::Receive { .. } => {}
                PlanAction::Copy { into, from } => {
                    let (into, from) = self.pair(into, from);
                    copy(into, from);
                }
                PlanAction::Fold { into, from, side } => {
                    let (dtype, op) = (self.folds, self.op);
                    let (into, from) = self.pair(into, from);
                    fold(op, dtype, *side, into, from);
                }
                PlanAction::Reduce { into } => self.reduce(into),
                PlanAction::Widen { into, from } => {
                    let dtype = self.dtype;
                    let (into, from) = self.pair(into, from);
                    widen(dtype, into, from);
                }
                PlanAction::Narrow { into, from } => {
                    let dtype = self.dtype;
                    let (into, from) = self.pair(into, from);
                    narrow(dtype, into, from);
                }
            }
        }
    }

    fn reduce(&mut self, into: &BufferSpan) {
        let (rank, bytes, scratch) = (self.rank, into.len(), &*self.scratch);
        let part = |r: usize| (r != rank).then(|| &scratch[r * bytes..(r + 1) * bytes]);
        let into = &mut self.work[into.range.clone()];
        reduce_parts(self.op, self.dtype, into, self.size, part);
    }

    /// Two different spans, the first writable.
    fn pair(&mut self, into: &BufferSpan, from: &BufferSpan) -> (&mut [u8], &[u8]) {
        let (a, b) = (into.range.clone(), from.range.clone());
        match (into.place, from.place) {
            (PlanBuffer::Work, PlanBuffer::Scratch) => (&mut self.work[a], &self.scratch[b]),
            (PlanBuffer::Scratch, PlanBuffer::Work) => (&mut self.scratch[a], &self.work[b]),
            (PlanBuffer::Work, PlanBuffer::Input) => (&mut self.work[a], &self.input[b]),
            (PlanBuffer::Scratch, PlanBuffer::Input) => (&mut self.scratch[a], &self.input[b]),
            (PlanBuffer::Work, PlanBuffer::Work) => disjoint(self.work, a, b),
            (PlanBuffer::Scratch, PlanBuffer::Scratch) => disjoint(self.scratch, a, b),
            (PlanBuffer::Input, _) => unreachable!("a plan writes to the input"),
        }
    }
}

/// Two ranges of one buffer that do not overlap.
fn disjoint(bytes: &mut [u8], into: Range<usize>, from: Range<usize>) -> (&mut [u8], &[u8]) {
    if into.end <= from.start {
        let (low, high) = bytes.split_at_mut(from.start);
        (&mut low[into], &high[..from.end - from.start])
    } else {
        assert!(from.end <= into.start, "a plan's spans overlap");
        let (low, high) = bytes.split_at_mut(into.start);
        (&mut high[..into.end - into.start], &low[from])
    }
}

/// Half floats, `(n,)`, to f32, `(n,)`. Only f16 and bf16 are widened.
fn widen(dtype: Dtype, into: &mut [u8], from: &[u8]) {
    let wide = |bytes: [u8; 2]| match dtype {
        Dtype::F16 => f16::from_ne_bytes(bytes).to_f32(),
        _ => bf16::from_ne_bytes(bytes).to_f32(),
    };
    for (wide_bytes, bytes) in into.as_chunks_mut().0.iter_mut().zip(from.as_chunks().0) {
        *wide_bytes = wide(*bytes).to_ne_bytes();
    }
}

/// The inverse, rounded to nearest even.
fn narrow(dtype: Dtype, into: &mut [u8], from: &[u8]) {
    let half = |value: f32| match dtype {
        Dtype::F16 => f16::from_f32(value).to_ne_bytes(),
        _ => bf16::from_f32(value).to_ne_bytes(),
    };
    for (bytes, wide) in into.as_chunks_mut().0.iter_mut().zip(from.as_chunks().0) {
        *bytes = half(f32::from_ne_bytes(*wide));
    }
}
