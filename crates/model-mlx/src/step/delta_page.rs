//! The rows of one page of a delta net at once, from the state behind the page before.
//!
//! The definition is that of the CPU's kernels (`paceline_tensor`, `delta.rs`). A state changes at
//! the ends of pages only, and a row reads it and the page's rows before. In a page, G is the
//! running sum of its decays, S the state before, and `c[t][i] = exp(G[t] - G[i])`:
//!
//! ```text
//! L[t][i]   = b[t] c[t][i] k[t].k[i]   for i < t          P = exp(G) S k
//! delta     = (1 + L)^-1 b (v - P)                        o = exp(G) S q + (c q.k) delta
//! S         = exp(G[63]) S + sum over i of c[63][i] k[i] delta[i]
//! ```
//!
//! The inverse of `1 + L` is made of those of its diagonal blocks of 1, 2, 4, ... rows. A block
//! below two of them is `-B L A`. It is as stable as rows one after the other, and takes a few
//! products.
//!
//! Mamba 2 has no P and no L, and adds a factor of v to o. In Kimi delta attention G has a sum for
//! each element of a key, so c belongs to the terms of a product `k[t].k[i]`. Both rows then have a
//! factor, `exp(G[t] - R)` and `exp(R - G[i])`, with R of a row between them. Both factors are at
//! most 1. Where no row is between, terms are multiplied one by one, in blocks of [`BLOCK`] rows.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;
use paceline_tensor::{PAGE, StateRule};

use super::weights;

/// Rows whose products have their terms multiplied one by one: `16 * 16 * D` numbers a head. It is
/// the sub-block of flash-linear-attention's kernel of Kimi delta attention (`chunk_intra.py`).
const BLOCK: usize = 16;

/// Rows of one sequence within a page, all `(H, n, ..)` and in f32. Letters as in
/// [`weights::DeltaNet`].
pub(super) struct PageRows<'a> {
    pub(super) stream: &'a Stream,
    pub(super) triangles: &'a Triangles,
    pub(super) own: &'a weights::DeltaNet,
    /// Of the rows that are new.
    pub(super) queries: Array,
    pub(super) values: Array,
    pub(super) steps: Array,
    /// Of all rows of the page, those before too.
    pub(super) keys: Array,
    /// `(H, rows, G)`
    pub(super) sums: Array,
    /// `(H, before, E)`: what rows before took in.
    pub(super) deltas: Option<Array>,
    /// `(H, D, E)`
    pub(super) state: Option<Array>,
}

/// Masks over the rows of a page, `(PAGE, PAGE)` each.
#[derive(Debug)]
pub(crate) struct Triangles {
    /// 1 where a row sees another, itself included.
    seen: Array,
    /// 1 where a row is behind another.
    behind: Array,
    /// Of blocks of 1, 2, 4, ... rows: 1 below each second one.
    below: Vec<Array>,
}

impl Triangles {
    pub(crate) fn new(stream: &Stream) -> Result<Self, Error> {
        let mask = |holds: &dyn Fn(usize, usize) -> bool| {
            let of_row = |t: usize| (0..PAGE).map(move |i| f32::from(u8::from(holds(t, i))));
            let values: Vec<f32> = (0..PAGE).flat_map(of_row).collect();
            Ok::<_, Error>(stream.array_f32(&values, &[PAGE as i32, PAGE as i32])?)
        };
        let below = |log: u32| {
            mask(&|t, i| {
                let (row, column) = (t >> log, i >> log);
                row == column + 1 && row % 2 == 1
            })
        };
        Ok(Self {
            seen: mask(&|t, i| i <= t)?,
            behind: mask(&|t, i| i < t)?,
            below: (0..PAGE.ilog2()).map(below).collect::<Result<_, _>>()?,
        })
    }
}

impl PageRows<'_> {
    /// Values that new rows read, and the differences that they take in: `(H, n, E)` each. The
    /// first of the rows is row `before` of the page.
    pub(super) fn read(&self, before: usize) -> Result<[Array; 2], Error> {
        let stream = self.stream;
        let keys = self.fresh(&self.keys, before)?;
        let sums = self.fresh(&self.sums, before)?;
        let near = self.near(&sums)?;
        let read = self.earlier(&self.queries, &sums, before)?;
        let deltas = if self.own.rule == StateRule::Sum {
            stream.multiply(&self.steps, &self.values)?
        } else {
            let missing = match self.earlier(&keys, &sums, before)? {
                Some(expected) => stream.subtract(&self.values, &expected)?,
                None => self.values.clone(),
            };
            let taken = stream.multiply(&self.steps, &missing)?;
            self.solved((&keys, &sums, near.as_ref()), taken)?
        };
        let scores = self.within([&self.queries, &keys], &sums, near.as_ref())?;
        let scores = stream.multiply(&scores, &self.mask(&self.triangles.seen)?)?;
        let mut read = self.plus(read, stream.matmul(&scores, &deltas)?)?;
        if let Some(skip) = &self.own.skip {
            read = stream.add(&read, &stream.multiply(&self.values, skip)?)?;
        }
        Ok([read, deltas])
    }

    /// The state behind the page, where its last row is among the new ones; `before` rows are
    /// older, `deltas` are those of the new ones.
    pub(super) fn state_behind(
        &self,
        before: usize,
        deltas: &Array,
    ) -> Result<Option<Array>, Error> {
        let stream = self.stream;
        let rows = self.keys.shape()[1] as usize;
        debug_assert_eq!(before + deltas.shape()[1] as usize, rows);
        if rows < PAGE {
            return Ok(None);
        }
        let deltas = match &self.deltas {
            Some(old) => stream.concatenate(&[old, deltas], 1)?,
            None => deltas.clone(),
        };
        let last = columns(stream, &self.sums, rows - 1..rows)?;
        let keys = stream.multiply(&self.keys, &self.since(&last, &self.sums)?)?;
        let taken = stream.matmul(&stream.transpose(&keys, &[0, 2, 1])?, &deltas)?;
        let old = self.state.as_ref().map(|state| {
            let far = stream.transpose(&stream.exp(&last)?, &[0, 2, 1])?;
            Ok::<_, Error>(stream.multiply(state, &far)?)
        });
        self.plus(old.transpose()?, taken).map(Some)
    }

    /// Reads the state and the page's rows before, by new rows `x (H, n, D)`: `(H, n, E)`.
    fn earlier(&self, x: &Array, sums: &Array, before: usize) -> Result<Option<Array>, Error> {
        let (stream, mut read) = (self.stream, None);
        if let Some(state) = &self.state {
            let far = stream.multiply(x, &stream.exp(sums)?)?;
            read = Some(stream.matmul(&far, state)?);
        }
        if let Some(deltas) = &self.deltas {
            let old = |x: &Array| columns(stream, x, 0..before);
            let scores = self.across([x, sums], [&old(&self.keys)?, &old(&self.sums)?])?;
            read = Some(self.plus(read, stream.matmul(&scores, deltas)?)?);
        }
        Ok(read)
    }

    /// The rows of `x (H, rows, ..)` behind the first `before`.
    fn fresh(&self, x: &Array, before: usize) -> Result<Array, Error> {
        let rows = x.shape()[1] as usize;
        columns(self.stream, x, before..rows)
    }

    /// `exp(a - b)`, at most 1; sizes of 1 repeated.
    fn since(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let (stream, zero) = (self.stream, self.stream.scalar(0.0, Dtype::F32)?);
        Ok(stream.exp(&stream.minimum(&stream.subtract(a, b)?, &zero)?)?)
    }

    /// `c` of rows with these sums, `(H, n, n)`, where a head has one decay.
    fn near(&self, sums: &Array) -> Result<Option<Array>, Error> {
        if sums.shape()[2] > 1 {
            return Ok(None);
        }
        let across = self.stream.transpose(sums, &[0, 2, 1])?;
        self.since(sums, &across).map(Some)
    }

    /// Products of each row of `a (H, n, D)` and of `b (H, m, D)`: `(H, n, m)`.
    fn scores(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let across = self.stream.transpose(b, &[0, 2, 1])?;
        Ok(self.stream.matmul(a, &across)?)
    }

    /// `c` times products of each row of `a (H, n, D)` and of `b (H, m, D)`, all of them earlier:
    /// `(H, n, m)`. Each with its sums.
    fn across(&self, [a, a_sums]: [&Array; 2], [b, b_sums]: [&Array; 2]) -> Result<Array, Error> {
        let first = columns(self.stream, a_sums, 0..1)?;
        let a = self.stream.multiply(a, &self.since(a_sums, &first)?)?;
        let b = self.stream.multiply(b, &self.since(&first, b_sums)?)?;
        self.scores(&a, &b)
    }

    /// `c` times products of rows `a` and `b`, `(H, n, D)` each with `sums`: `(H, n, n)`. What is
    /// above the diagonal is finite and of no use.
    fn within(
        &self,
        [a, b]: [&Array; 2],
        sums: &Array,
        near: Option<&Array>,
    ) -> Result<Array, Error> {
        let stream = self.stream;
        if let Some(near) = near {
            return Ok(stream.multiply(&self.scores(a, b)?, near)?);
        }
        let [heads, n] = [a.shape()[0], a.shape()[1]];
        let block = |first: usize| {
            let end = (first + BLOCK).min(n as usize);
            let own = |x: &Array| columns(stream, x, first..end);
            let old = |x: &Array| columns(stream, x, 0..first);
            let (a, own_sums) = (own(a)?, own(sums)?);
            let mut parts = Vec::new();
            if first > 0 {
                parts.push(self.across([&a, &own_sums], [&old(b)?, &old(sums)?])?);
            }
            parts.push(self.one_by_one([&a, &own(b)?], &own_sums)?);
            let later = n - end as i32;
            if later > 0 {
                parts.push(stream.zeros(&[heads, (end - first) as i32, later], Dtype::F32)?);
            }
            Ok(stream.concatenate(&parts.iter().collect::<Vec<_>>(), 2)?)
        };
        let blocks = (0..n as usize).step_by(BLOCK).map(block);
        let blocks = blocks.collect::<Result<Vec<_>, Error>>()?;
        Ok(stream.concatenate(&blocks.iter().collect::<Vec<_>>(), 1)?)
    }

    /// As [`within`](Self::within), of few rows with a decay for each element.
    fn one_by_one(&self, [a, b]: [&Array; 2], sums: &Array) -> Result<Array, Error> {
        let stream = self.stream;
        let [heads, n, dim] = a.shape()[..] else {
            unreachable!("rows of heads");
        };
        let down = |x: &Array| stream.reshape(x, &[heads, n, 1, dim]);
        let along = |x: &Array| stream.reshape(x, &[heads, 1, n, dim]);
        let terms = stream.multiply(&down(a)?, &along(b)?)?;
        let terms = stream.multiply(&terms, &self.since(&down(sums)?, &along(sums)?)?)?;
        Ok(stream.reshape(&stream.sum_along(&terms, 3)?, &[heads, n, n])?)
    }

    fn plus(&self, a: Option<Array>, b: Array) -> Result<Array, Error> {
        Ok(match a {
            Some(a) => self.stream.add(&a, &b)?,
            None => b,
        })
    }

    /// The part of a mask that is of the new rows.
    fn mask(&self, mask: &Array) -> Result<Array, Error> {
        let n = self.values.shape()[1];
        Ok(self.stream.slice(mask, &[0, 0], &[n, n])?)
    }

    /// `(1 + L)^-1 taken` for `taken (H, n, E)`.
    fn solved(
        &self,
        (keys, sums, near): (&Array, &Array, Option<&Array>),
        taken: Array,
    ) -> Result<Array, Error> {
        let stream = self.stream;
        let n = keys.shape()[1];
        if n == 1 {
            return Ok(taken);
        }
        let scores = stream.multiply(&self.within([keys, keys], sums, near)?, &self.steps)?;
        let lower = stream.multiply(&scores, &self.mask(&self.triangles.behind)?)?;
        let mut inverse = self.identity(n)?;
        for (log, below) in self.triangles.below.iter().enumerate() {
            if 1 << log >= n {
                break;
            }
            let block = stream.multiply(&lower, &self.mask(below)?)?;
            let right = stream.matmul(&block, &inverse)?;
            inverse = stream.subtract(&inverse, &stream.matmul(&inverse, &right)?)?;
        }
        Ok(stream.matmul(&inverse, &taken)?)
    }

    /// `(1, n, n)`
    fn identity(&self, n: i32) -> Result<Array, Error> {
        let Triangles { seen, behind, .. } = self.triangles;
        let (seen, behind) = (self.mask(seen)?, self.mask(behind)?);
        let diagonal = self.stream.subtract(&seen, &behind)?;
        Ok(self.stream.reshape(&diagonal, &[1, n, n])?)
    }
}

/// The rows `of` along the second axis of three.
pub(super) fn columns(stream: &Stream, x: &Array, of: Range<usize>) -> Result<Array, Error> {
    let mut stop = x.shape();
    let mut start = vec![0; stop.len()];
    (start[1], stop[1]) = (of.start as i32, of.end as i32);
    Ok(stream.slice(x, &start, &stop)?)
}
