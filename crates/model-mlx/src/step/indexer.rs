//! Sparse attention by a lightning indexer, as on the CPU. Index keys follow the keys of latent
//! attention in the cache. A single row gathers the keys that it attends to; more rows get a mask.
//!
//! I queries of a row of X elements, n rows of a sequence, m positions.

use paceline_mlx::{Array, Dtype, Mask};
use paceline_model::{Error, Indexer, Selection};
use paceline_tensor::{Choice, RopePairs};

use super::Step;
use super::weights::{self, Layer, Mixer};

/// Added to the variance of index keys: the constant of `DeepseekV32Indexer`.
const EPS: f32 = 1e-6;

/// Far more than any score.
pub(super) const FAR: f32 = 1e30;

/// Most scores of queries that are computed at once, of 4 bytes each: 256 MiB.
const SCORES_MAX: usize = 1 << 26;

/// Positions that a sequence's rows attend to.
#[derive(Debug)]
pub(super) enum Selected {
    All,
    /// `(top_k,)`: of one row.
    Positions(Array),
    /// `(1, 1, n, m)` or `(1, H, n, m)`: truth values; of compressed keys 0 and 1 in f32.
    Mask(Array),
}

impl Step<'_> {
    /// Writes keys with index keys to the cache, and selects the positions of each sequence.
    pub(super) fn index_rows(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let Mixer::Latent(own) = &w.mixer else {
            return Ok(());
        };
        let selection = self.layer().0.latent.map(|latent| latent.selection);
        let (Some(own), Some(Selection::Own(of))) = (&own.indexer, selection) else {
            return Ok(());
        };
        let (stream, held) = (self.parts.stream, self.held(index));
        let compressed = self.compressed.take().expect("queries were projected");
        let queries = self.product(&own.query, &compressed)?;
        let rows = self.batch.rows() as i32;
        let queries = stream.reshape(&queries, &[rows, of.heads as i32, of.dim as i32])?;
        let keys = self.index_keys(own, of)?;
        let weights = self.index_weights(own, of)?;
        let gates = own.gate.as_ref().map(|(gate, biases)| {
            let gates = stream.astype(&self.product(gate, &self.x)?, Dtype::F32)?;
            Ok::<_, Error>((stream.reshape(&gates, &[rows, 1, -1])?, biases))
        });
        let gates = gates.transpose()?;
        let kind = self.parts.constants.span_kind_of[index];
        self.selected.clear();
        let mut first = 0;
        for (i, s) in self.batch.sequences.iter().enumerate() {
            let (n, at) = (s.tokens.len() as i32, s.position as i32);
            let neighbours = of.pairs == RopePairs::Adjacent;
            let roped = |x: &Array| {
                let x = self.turned(x, first, n)?;
                self.roped_by(&x, |periods, _| stream.rope(&x, periods, neighbours, at))
            };
            let [query, key] = [roped(&queries)?, roped(&keys)?];
            let weights = stream.slice(&weights, &[first, 0], &[first + n, of.heads as i32])?;
            if let Some((gates, biases)) = &gates {
                let gates = self.turned(gates, first, n)?;
                let rows = [&stream.astype(&key, Dtype::F32)?, &gates];
                let rows = stream.concatenate(&rows, 3)?;
                let place = (i, held);
                let span = &self.spans[i][kind];
                let latent = &self.latent[i][1];
                self.parts.cache.write_latent(stream, held, span, latent)?;
                let finish = |step: &Self, rows: &Array, _| step.weighed_pools(rows, biases);
                self.write_pools(place, (of.pool, &rows), finish)?;
                let choice = Choice {
                    top_k: of.top_k,
                    pool: of.pool,
                    local: 0,
                };
                let of_rows = (&query, &weights);
                let selected = self.select_pools(choice, place, of_rows, of.dim)?;
                self.selected.push(selected.unwrap_or(Selected::All));
                first += n;
                continue;
            }
            let both = stream.concatenate(&[&self.latent[i][1], &key], 3)?;
            let span = &self.spans[i][kind];
            self.parts.cache.write_latent(stream, held, span, &both)?;
            let selected = match s.position + s.tokens.len() > of.top_k {
                true => self.select(of, (i, held), (&query, &weights))?,
                false => Selected::All,
            };
            self.selected.push(selected);
            first += n;
        }
        Ok(())
    }

    /// x -> index keys `(T, 1, X)`, normed.
    fn index_keys(&self, own: &weights::Indexer, of: Indexer) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let keys = self.product(&own.key, &self.x)?;
        let wide = stream.astype(&keys, Dtype::F32)?;
        let n = stream.scalar(of.dim as f32, Dtype::F32)?;
        let mean = stream.divide(&stream.sum_along(&wide, 1)?, &n)?;
        let centred = stream.subtract(&wide, &mean)?;
        let normed = stream.rms_norm(&centred, &own.norm[0], EPS)?;
        let normed = stream.astype(&stream.add(&normed, &own.norm[1])?, keys.dtype())?;
        Ok(stream.reshape(&normed, &[-1, 1, of.dim as i32])?)
    }

    /// The rows (1, P, pool, 2 X) of pools, inputs then gates -> their keys (1, P, 1, 2 X).
    ///
    /// A key is the mean of inputs, weighted by the softmax of gates with biases (1, 1, pool, X).
    /// Zeros are in the place of gates.
    fn weighed_pools(&self, rows: &Array, biases: &Array) -> Result<Array, Error> {
        let (stream, sizes) = (self.parts.stream, rows.shape());
        let dim = sizes[3] / 2;
        let mut stop = sizes.clone();
        stop[3] = dim;
        let inputs = stream.slice(rows, &[0; 4], &stop)?;
        let gates = stream.slice(rows, &[0, 0, 0, dim], &sizes)?;
        let weights = stream.softmax(&stream.add(&gates, biases)?, 2)?;
        let keys = stream.sum_along(&stream.multiply(&weights, &inputs)?, 2)?;
        let zeros = stream.zeros(&keys.shape(), Dtype::F32)?;
        Ok(stream.concatenate(&[&keys, &zeros], 3)?)
    }

    /// x -> weights of index queries `(T, I)`, scaled, in f32.
    fn index_weights(&self, own: &weights::Indexer, of: Indexer) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let wide = stream.astype(&self.x, Dtype::F32)?;
        let scale = 1.0 / ((of.heads * of.dim) as f32).sqrt();
        let scale = stream.scalar(scale, Dtype::F32)?;
        Ok(stream.multiply(&stream.matmul(&wide, &own.weights)?, &scale)?)
    }

    /// Selects the positions of sequence `i` by its queries `(1, I, n, X)` and weights `(n, I)`.
    fn select(
        &self,
        of: Indexer,
        (i, held): (usize, usize),
        (query, weights): (&Array, &Array),
    ) -> Result<Selected, Error> {
        let stream = self.parts.stream;
        let kind = self.parts.constants.span_kind_of[self.index];
        let view = &self.spans[i][kind].view;
        let keys = self.parts.cache.read_index(stream, held, (view, of.dim))?;
        let (n, m) = (query.shape()[2], keys.shape()[2]);
        let scores = self.index_scores([query, &keys, weights])?;
        let seen = causal(self, n, m)?;
        let scores = match &seen {
            None => scores,
            Some(seen) => self.seen_only(&scores, seen)?,
        };
        let top_k = of.top_k as i32;
        let order = stream.argpartition(&stream.negative(&scores)?, top_k - 1, 3)?;
        let best = stream.slice(&order, &[0; 4], &[1, 1, n, top_k])?;
        let Some(seen) = seen else {
            return Ok(Selected::Positions(stream.reshape(&best, &[top_k])?));
        };
        let one = stream.reshape(&stream.scalar(1.0, Dtype::F32)?, &[1, 1, 1, 1])?;
        let zeros = stream.zeros(&[1, 1, n, m], Dtype::F32)?;
        let chosen = stream.put_along(&zeros, &best, &one, 3)?;
        let half = stream.scalar(0.5, Dtype::F32)?;
        let mask = stream.less(&half, &stream.multiply(&chosen, &seen)?)?;
        Ok(Selected::Mask(mask))
    }

    /// `scores` where `seen` is 1, [`FAR`] below where it is 0.
    pub(super) fn seen_only(&self, scores: &Array, seen: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let [one, far] = [1.0, FAR].map(|x| stream.scalar(x, Dtype::F32));
        let hidden = stream.multiply(&stream.subtract(seen, &one?)?, &far?)?;
        Ok(stream.add(&stream.multiply(scores, seen)?, &hidden)?)
    }

    /// Scores `(1, 1, n, m)` in f32, some rows at a time. Queries are `(1, I, n, X)`, keys
    /// `(1, 1, m, X)`, weights `(n, I)`.
    pub(super) fn index_scores(&self, [query, keys, weights]: [&Array; 3]) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let [_, heads, n, dim] = query.shape()[..] else {
            unreachable!("queries have heads and rows");
        };
        let m = keys.shape()[2];
        let turned = stream.transpose(&stream.astype(keys, Dtype::F32)?, &[0, 1, 3, 2])?;
        let zero = stream.scalar(0.0, Dtype::F32)?;
        let weights = stream.transpose(weights, &[1, 0])?;
        let weights = stream.reshape(&weights, &[1, heads, n, 1])?;
        let together = (SCORES_MAX / (heads as usize * m as usize)).max(1);
        let part = |first: i32| {
            let end = n.min(first + together as i32);
            let query = stream.slice(query, &[0, 0, first, 0], &[1, heads, end, dim])?;
            let weights = stream.slice(&weights, &[0, 0, first, 0], &[1, heads, end, 1])?;
            let products = stream.matmul(&stream.astype(&query, Dtype::F32)?, &turned)?;
            let products = stream.multiply(&stream.maximum(&products, &zero)?, &weights)?;
            Ok::<_, Error>(stream.sum_along(&products, 1)?)
        };
        let parts = (0..n).step_by(together).map(part);
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        let parts: Vec<&Array> = parts.iter().collect();
        Ok(stream.concatenate(&parts, 2)?)
    }

    /// Attention `(1, H, n, R)` of sequence `i` over the positions that its rows attend to.
    pub(super) fn selected_attention(
        &self,
        i: usize,
        keeper: usize,
        query: &Array,
    ) -> Result<Array, Error> {
        let (stream, index) = (self.parts.stream, self.parts.cache.index_len(keeper));
        let kind = self.parts.constants.span_kind_of[self.index];
        let view = &self.spans[i][kind].view;
        let [keys, values] = self.parts.cache.read(stream, keeper, view)?;
        let keys = match index {
            0 => keys,
            index => {
                let mut stop = keys.shape();
                stop[3] -= index;
                stream.slice(&keys, &[0; 4], &stop)?
            }
        };
        self.attended_to(i, [query, &keys, &values], None)
    }

    /// Attention of sequence `i` over the positions of keys and values that its rows attend to.
    pub(super) fn attended_to(
        &self,
        i: usize,
        [query, keys, values]: [&Array; 3],
        sinks: Option<&Array>,
    ) -> Result<Array, Error> {
        match self.selected.get(i).unwrap_or(&Selected::All) {
            Selected::All => self.attended_by([query, keys, values], self.view(i).mask(), sinks),
            Selected::Positions(positions) => {
                let taken = |x: &Array| self.parts.stream.take(x, positions, 2);
                let (keys, values) = (taken(keys)?, taken(values)?);
                self.attended_by([query, &keys, &values], Mask::None, sinks)
            }
            Selected::Mask(mask) => {
                self.attended_by([query, keys, values], Mask::Array(mask), sinks)
            }
        }
    }
}

/// The mask of `m` positions for each of the last `n`: `(1, 1, n, m)` of 0 and 1 in f32. `None` for
/// a single row, which sees all.
pub(super) fn causal(step: &Step<'_>, n: i32, m: i32) -> Result<Option<Array>, Error> {
    if n == 1 {
        return Ok(None);
    }
    let stream = step.parts.stream;
    let numbers = |range: std::ops::Range<i32>| range.map(|i| i as f32).collect::<Vec<_>>();
    let keys = stream.array_f32(&numbers(0..m), &[1, 1, 1, m])?;
    let ends = stream.array_f32(&numbers(m - n + 1..m + 1), &[1, 1, n, 1])?;
    Ok(Some(
        stream.astype(&stream.less(&keys, &ends)?, Dtype::F32)?,
    ))
}
