//! The definitions: what every fast kernel must reproduce bit for bit.
//!
//! Plain loops over stored blocks, one number at a time. Slow, and meant to be read.

use std::ops::Range;

use half::{bf16, f16};
use paceline_base::{BlockType, tree};

use crate::attention::PAGE;
use crate::kv::CUTS;
use crate::packing::span;
use crate::storage::units::{UNIT, UNIT_CHUNKS, Unit, is_wide};
use crate::storage::{self, Chunk};
use crate::{InstructionSet, Precision, StoredMatrix};

/// Quantised activations of one row: `(q, scale)` per span; see [`crate::activations`].
pub fn quantise(x: &[f32], span: usize, precision: Precision) -> Vec<(Vec<i32>, f32)> {
    x.chunks(span)
        .map(|span| quantise_span(span, precision))
        .collect()
}

fn quantise_span(x: &[f32], precision: Precision) -> (Vec<i32>, f32) {
    let largest = x
        .iter()
        .fold(0.0f32, |m, v| if v.abs() > m { v.abs() } else { m });
    if largest <= 1e-34 || !largest.is_finite() {
        return (vec![0; x.len()], 0.0);
    }
    let inverse = precision.steps() / largest;
    let q = x.iter().map(|x| (x * inverse).round_ties_even() as i32);
    (q.collect(), largest / precision.steps())
}

/// `y = W x`: `x` is `(cols,)`, the result `(rows,)`. `leaf_cols` as in
/// [`PackOptions`](crate::PackOptions); `precision` matters for quantised weights.
pub fn matvec(w: StoredMatrix<'_>, leaf_cols: usize, x: &[f32], precision: Precision) -> Vec<f32> {
    let row_bytes = w.block_type.row_bytes(w.cols).expect("whole blocks");
    let span = span(leaf_cols, precision);
    let leaf_cols = if leaf_cols == 0 {
        w.cols.max(1)
    } else {
        leaf_cols
    };
    w.bytes
        .chunks_exact(row_bytes)
        .map(|row| {
            let leaf_at = |start: usize| {
                let columns = start..(start + leaf_cols).min(w.cols);
                [leaf(w.block_type, row, x, columns, (span, precision))]
            };
            let leaves: Vec<[f32; 1]> = (0..w.cols).step_by(leaf_cols).map(leaf_at).collect();
            let leaves: Vec<&[f32]> = leaves.iter().map(|leaf| &leaf[..]).collect();
            tree::sum_all(&leaves)[0]
        })
        .collect()
}

/// The dot product over some columns of one row.
fn leaf(
    block_type: BlockType,
    row: &[u8],
    x: &[f32],
    columns: Range<usize>,
    (span, precision): (usize, Precision),
) -> f32 {
    if block_type == BlockType::BF16 && precision == Precision::Eight {
        return bf16_leaf(row, x, columns);
    }
    if block_type.computed().is_float() {
        return float_leaf(block_type, row, x, columns);
    }
    let mut sum = 0.0f32;
    let mut start = columns.start;
    for (q, scale) in quantise(&x[columns], span, precision) {
        let unit = Unit::of(block_type, row, start / UNIT);
        let total = span_dot(block_type, row, &unit, start, &q);
        let cut = |bits: u32| {
            let high = (total >> bits) as f32;
            high.mul_add((1 << bits) as f32, (total & ((1 << bits) - 1)) as f32)
        };
        let inner = match precision {
            _ if is_wide(block_type) => cut(14),
            Precision::Eight => total as f32,
            Precision::Fifteen => cut(7),
        };
        sum = (inner * unit.step).mul_add(scale, sum);
        start += q.len();
    }
    sum
}

/// `T` of the formula in [`crate::matmul`], of a span from column `start` on.
fn span_dot(block_type: BlockType, row: &[u8], unit: &Unit, start: usize, q: &[i32]) -> i64 {
    let mut total = 0;
    for (c, q) in (start / Chunk::LEN..).zip(q.chunks(Chunk::LEN)) {
        let (chunk, factors) = (
            storage::chunk(block_type, row, c),
            unit.factors[c % UNIT_CHUNKS],
        );
        for (k, (&w, &x)) in chunk.q.iter().zip(q).enumerate() {
            let weight = factors.scale[k / 16] * i32::from(w) + factors.min[k / 16];
            let bits = if is_wide(block_type) { 20 } else { 16 };
            assert!(
                weight.abs() < 1 << (bits - 1),
                "{block_type}: weights have {bits} bits"
            );
            total += i64::from(weight) * i64::from(x);
        }
    }
    total
}

fn float_leaf(block_type: BlockType, row: &[u8], x: &[f32], columns: Range<usize>) -> f32 {
    let mut weights = vec![0.0; row.len() / block_type.bytes() * block_type.len()];
    storage::dequantise(block_type, row, &mut weights);
    let mut a = [0.0f32; 4];
    for k in columns {
        a[k % 4] = weights[k].mul_add(x[k], a[k % 4]);
    }
    (a[0] + a[1]) + (a[2] + a[3])
}

/// Activations rounded to bf16: [`crate::matmul`]'s `pairs`.
fn bf16_leaf(row: &[u8], x: &[f32], columns: Range<usize>) -> f32 {
    let mut weights = vec![0.0; row.len() / 2];
    storage::dequantise(BlockType::BF16, row, &mut weights);
    let smallest = 2.0f32.powi(-56);
    let rounded = |x: f32| {
        if x.abs() < smallest {
            0.0
        } else {
            bf16::from_f32(x).to_f32()
        }
    };
    let mut a = [0.0f32; 4];
    for (p, k) in columns.clone().step_by(2).enumerate() {
        if k + 1 < columns.end {
            a[p % 4] = weights[k + 1].mul_add(rounded(x[k + 1]), a[p % 4]);
        }
        a[p % 4] = weights[k].mul_add(rounded(x[k]), a[p % 4]);
    }
    (a[0] + a[1]) + (a[2] + a[3])
}

/// Causal attention of one query head over all positions it sees, as [`crate::attention`] defines
/// it. `query` is `(head_dim,)`, scaled. `keys` and `values` are `(position + 1, head_dim)`, as the
/// cache holds them. The query stands at the last position.
///
/// `sink`: a score that takes part in the softmax and has no value.
pub fn attention(
    query: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    window: usize,
    sink: Option<f32>,
) -> Vec<f32> {
    let start = keys.len().saturating_sub(window);
    let mut merged: Option<PagePartial> = None;
    for page in start / PAGE..keys.len().div_ceil(PAGE) {
        let visible = start.max(page * PAGE)..keys.len().min((page + 1) * PAGE);
        let next = attend_page(query, keys, values, visible);
        merged = Some(match merged {
            None => next,
            Some(before) => before.merge(&next),
        });
    }
    let mut merged = merged.expect("a query sees itself");
    if let Some(score) = sink {
        merged = merged.sink(score);
    }
    let PagePartial { l, o, .. } = merged;
    o.iter().map(|o| o / l).collect()
}

/// A head of keys or values as a cache of [`KvType::Q4`](crate::KvType) gives it back; keys have 32
/// levels, values 16.
pub fn q4(head: &[f32], levels: u8) -> Vec<f32> {
    let middle = f32::from(levels - 1) / 2.0;
    let cut = |x: &[f32], scale: f32| -> Vec<f32> {
        let one = |x: &f32| {
            let level = (x / scale + middle).clamp(0.0, 2.0 * middle);
            (level.round_ties_even() - middle) * scale
        };
        x.iter().map(one).collect()
    };
    let run = |x: &[f32]| -> Vec<f32> {
        let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let scales = CUTS.map(|cut| f16::from_f32(largest * cut / middle).to_f32());
        let mut best = (f32::INFINITY, vec![0.0; x.len()]);
        for scale in scales.into_iter().filter(|scale| *scale > 0.0) {
            let values = cut(x, scale);
            let errors = values.iter().zip(x).map(|(a, b)| (a - b) * (a - b));
            let error = errors.fold(0.0, |sum, x| sum + x);
            if error < best.0 {
                best = (error, values);
            }
        }
        best.1
    };
    head.chunks(64).flat_map(run).collect()
}

/// A head of keys or values as a cache of [`KvType::Q8`](crate::KvType) gives it back.
pub fn q8(head: &[f32]) -> Vec<f32> {
    let run = |x: &[f32]| -> Vec<f32> {
        let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let scale = f16::from_f32(largest / 127.0).to_f32();
        let one = |x: &f32| match scale {
            0.0 => 0.0,
            _ => (x / scale).clamp(-127.0, 127.0).round_ties_even() as i32 as f32 * scale,
        };
        x.iter().map(one).collect()
    };
    head.chunks(32).flat_map(run).collect()
}

/// The contribution of one page.
struct PagePartial {
    m: f32,
    l: f32,
    o: Vec<f32>,
}

impl PagePartial {
    fn sink(&self, score: f32) -> Self {
        let m = self.m.max(score);
        let (a, b) = (exp(self.m - m), exp(score - m));
        let l = self.l.mul_add(a, b);
        let o = self.o.iter().map(|o| o * a).collect();
        Self { m, l, o }
    }

    fn merge(&self, next: &Self) -> Self {
        let m = self.m.max(next.m);
        let (a, b) = (exp(self.m - m), exp(next.m - m));
        let add = |x: f32, y: f32| x.mul_add(a, y * b);
        let o = self
            .o
            .iter()
            .zip(&next.o)
            .map(|(&x, &y)| add(x, y))
            .collect();
        Self {
            m,
            l: add(self.l, next.l),
            o,
        }
    }
}

fn attend_page(
    query: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    visible: std::ops::Range<usize>,
) -> PagePartial {
    let score = |i: usize| {
        query
            .iter()
            .zip(keys[i])
            .fold(0.0f32, |s, (q, k)| q.mul_add(*k, s))
    };
    let m = visible.clone().map(score).fold(f32::NEG_INFINITY, f32::max);
    let mut p = [0.0f32; PAGE];
    let mut o = vec![0.0f32; query.len()];
    for i in visible {
        p[i % PAGE] = exp(score(i) - m);
        for (o, v) in o.iter_mut().zip(values[i]) {
            *o = p[i % PAGE].mul_add(*v, *o);
        }
    }
    let lane = |i: usize| (p[i] + p[i + 16]) + (p[i + 32] + p[i + 48]);
    let mut lanes: [f32; 16] = std::array::from_fn(lane);
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    PagePartial { m, l: lanes[0], o }
}

/// The exponential of the kernels for one number.
pub fn exp(x: f32) -> f32 {
    let mut out = [0.0; 16];
    // SAFETY: the portable version needs no CPU features.
    unsafe { (InstructionSet::Scalar.table().expect("always there").exp)(&[x; 16], &mut out) };
    out[0]
}
