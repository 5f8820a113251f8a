//! Attention by heads: rotation, keys and values in the cache, and decoding rows in lanes.

use paceline_mlx::{Array, Mask};
use paceline_model::Error;
use paceline_tensor::RopePairs;

use super::{Step, Turned};
use crate::decoding::Decoding;

impl Step<'_> {
    /// Rows `first..first + n` of `(T, heads, D)` as `(1, heads, n, D)`.
    pub(super) fn turned(&self, x: &Array, first: i32, n: i32) -> Result<Array, Error> {
        let shape = x.shape();
        let part = if n == shape[0] {
            x.clone()
        } else {
            let (start, stop) = ([first, 0, 0], [first + n, shape[1], shape[2]]);
            self.parts.stream.slice(x, &start, &stop)?
        };
        let rows = self
            .parts
            .stream
            .reshape(&part, &[1, n, shape[1], shape[2]])?;
        Ok(self.parts.stream.transpose(&rows, &[0, 2, 1, 3])?)
    }

    /// `x` `(1, heads, n, D)` turned from position `at` on, by the rope of the layer.
    pub(super) fn roped(&self, x: &Array, at: i32) -> Result<Array, Error> {
        let stream = self.parts.stream;
        self.roped_by(x, |periods, neighbours| {
            stream.rope(x, periods, neighbours, at)
        })
    }

    /// As [`roped`](Self::roped), of the decoding rows in lanes, `(lanes, heads, 1, D)`.
    pub(super) fn roped_each(&self, x: &Array, at: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        self.roped_by(x, |periods, neighbours| {
            stream.rope_each(x, periods, neighbours, at)
        })
    }

    /// `x` turned by `turn`, which gets the periods of the layer's rope and which values turn
    /// together.
    pub(super) fn roped_by(
        &self,
        x: &Array,
        turn: impl FnOnce(&Array, bool) -> Result<Array, paceline_mlx::Error>,
    ) -> Result<Array, Error> {
        let (stream, index) = (self.parts.stream, self.layer().0.rope);
        let (rope, periods) = (
            &self.parts.model.config.ropes[index],
            &self.parts.periods[index],
        );
        if rope.frequencies.is_empty() {
            return Ok(x.clone());
        }
        let neighbours = rope.pairs == RopePairs::Adjacent;
        let turned = turn(periods, neighbours)?;
        if rope.magnitude == 1.0 {
            return Ok(turned);
        }
        let factor = stream.scalar(rope.magnitude as f32, turned.dtype())?;
        let (shape, pairs) = (turned.shape(), rope.frequencies.len() as i32);
        let [one, heads, rows, dim] = shape[..] else {
            unreachable!("heads of rows of a sequence");
        };
        let part = |first, end| stream.slice(&turned, &[0, 0, 0, first], &[one, heads, rows, end]);
        let scaled = stream.multiply(&part(0, 2 * pairs)?, &factor)?;
        if 2 * pairs == dim {
            return Ok(scaled);
        }
        Ok(stream.concatenate(&[&scaled, &part(2 * pairs, dim)?], 3)?)
    }

    /// Attention of one sequence: `(1, H, n, E)`, over what the layer in place `keeper` keeps.
    pub(super) fn attention(
        &self,
        sequence: usize,
        keeper: usize,
        q: &Array,
        sinks: Option<&Array>,
    ) -> Result<Array, Error> {
        let view = self.view(sequence);
        let (stream, cache) = (self.parts.stream, &*self.parts.cache);
        let [k, v] = cache.read(stream, keeper, view)?;
        let q = cache.rotated(stream, keeper, q)?;
        let gathered = if view.is_gathered() { 2 } else { 0 };
        self.parts.model.counters.gathers.add(gathered);
        let attended = match self.layer().0.pooled {
            Some(_) => self.attended_to(sequence, [&q, &k, &v], sinks),
            None => self.attended_by([&q, &k, &v], view.mask(), sinks),
        };
        cache.rotated(stream, keeper, &attended?)
    }

    /// Attention `(n, H, rows, E)` of queries over keys and values.
    pub(super) fn attended_by(
        &self,
        [q, k, v]: [&Array; 3],
        mask: Mask<'_>,
        sinks: Option<&Array>,
    ) -> Result<Array, Error> {
        let (stream, constants) = (self.parts.stream, self.parts.constants);
        let scale = self.layer().0.query_scale;
        let groups = &constants.groups[self.held(self.index)];
        self.parts
            .model
            .counters
            .attentions
            .add(groups.len().max(1) as u64);
        if groups.is_empty() {
            return self.one_attention([q, k, v], scale, mask, sinks);
        }
        // Cut within the query heads of a KV head: each KV head apart.
        let heads = |x: &Array, heads: std::ops::Range<i32>| {
            let mut stop = x.shape();
            stop[1] = heads.end;
            stream.slice(x, &[0, heads.start, 0, 0], &stop)
        };
        let group = |(kv, queries): (usize, &std::ops::Range<i32>)| {
            let kv = kv as i32..kv as i32 + 1;
            let (k, v) = (heads(k, kv.clone())?, heads(v, kv)?);
            let q = heads(q, queries.clone())?;
            let own = |all| stream.slice(all, &[queries.start], &[queries.end]);
            let sinks = sinks.map(own).transpose()?;
            let own = match mask {
                Mask::Array(all) if all.shape().len() == 4 && all.shape()[1] > 1 => {
                    Some(heads(all, queries.clone())?)
                }
                _ => None,
            };
            let mask = own.as_ref().map_or(mask, Mask::Array);
            self.one_attention([&q, &k, &v], scale, mask, sinks.as_ref())
        };
        let parts = groups.iter().enumerate().map(group);
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        let parts: Vec<&Array> = parts.iter().collect();
        Ok(stream.concatenate(&parts, 1)?)
    }

    /// The decoding rows in lanes, if the layer has lanes.
    pub(super) fn decoding(&self) -> Option<&Decoding> {
        let kind = self.parts.constants.span_kind_of[self.index];
        let is_pooled = self.layer().0.pooled.is_some();
        let decoding = self.decoding.as_ref().filter(|_| !is_pooled);
        decoding.filter(|it| it.has_lanes(kind))
    }

    /// Attention of the decoding rows in lanes, `(lanes, H, 1, E)`, after their keys and values are
    /// written.
    pub(super) fn decoded_attention(
        &mut self,
        Turned { query, key_value }: Turned,
        keeper: usize,
        sinks: Option<&Array>,
    ) -> Result<Array, Error> {
        let (stream, held) = (self.parts.stream, self.held(self.index));
        let kind = self.parts.constants.span_kind_of[self.index];
        let decoding = self.decoding.as_ref().expect("decoding rows were turned");
        let cache = &mut *self.parts.cache;
        if let Some([k, v]) = &key_value {
            cache.write_lanes(stream, held, decoding.written(kind), [k, v])?;
            if let Some((rows, [k, v])) = decoding.in_pages(stream, kind, [k, v])? {
                cache.write_rows(stream, held, rows, [&k, &v])?;
            }
        }
        let [k, v] = cache.read_lanes(stream, keeper, decoding.read(kind))?;
        let query = query.as_ref().expect("decoding rows have queries");
        let query = cache.rotated(stream, keeper, query)?;
        let attended = self.attended_by([&query, &k, &v], decoding.mask(kind), sinks)?;
        self.parts.cache.rotated(stream, keeper, &attended)
    }

    /// `(m, heads, n, E)` of each part as rows, `(sum of m n, heads E)`.
    pub(super) fn as_rows(&self, parts: &[Array]) -> Result<Option<Array>, Error> {
        let stream = self.parts.stream;
        let rows = parts.iter().map(|part| {
            let n = part.shape()[0] * part.shape()[2];
            let rows = stream.transpose(part, &[0, 2, 1, 3])?;
            stream.reshape(&rows, &[n, -1])
        });
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let rows: Vec<&Array> = rows.iter().collect();
        Ok(match &rows[..] {
            [] => None,
            [one] => Some((*one).clone()),
            more => Some(stream.concatenate(more, 0)?),
        })
    }

    /// The rows of `x` that are those of sequence `s`, `n` from `first` on: the first axis.
    pub(super) fn rows_of(&self, x: &Array, first: usize, n: usize) -> Result<Array, Error> {
        let shape = x.shape();
        if n as i32 == shape[0] {
            return Ok(x.clone());
        }
        let mut start = vec![0; shape.len()];
        let mut stop = shape;
        (start[0], stop[0]) = (first as i32, (first + n) as i32);
        Ok(self.parts.stream.slice(x, &start, &stop)?)
    }

    /// Keeps queries (T, H, D), with the gates behind each where heads have some.
    pub(super) fn take_queries(&mut self, both: Array) -> Result<(), Error> {
        let (stream, shape) = (self.parts.stream, self.layer().0);
        if !shape.gated {
            self.query = Some(both);
            return Ok(());
        }
        let sizes = both.shape();
        let (rows, heads, dim) = (sizes[0], sizes[1], shape.head_dim as i32);
        self.query = Some(stream.slice(&both, &[0, 0, 0], &[rows, heads, dim])?);
        self.gates = Some(stream.slice(&both, &[0, 0, dim], &[rows, heads, 2 * dim])?);
        Ok(())
    }

    /// Queries (T, H, D) times their growth with position, where they grow. The rotation keeps
    /// lengths, so the order does not matter.
    pub(super) fn grown(&self, query: Array) -> Result<Array, Error> {
        let Some(growth) = self.parts.model.config.query_growth else {
            return Ok(query);
        };
        let positions = |(i, s): (usize, &paceline_model::BatchSequence<'_>)| {
            let end = s.position + s.tokens.len();
            end - self.n_queries(i)..end
        };
        let positions = self.batch.sequences.iter().enumerate().flat_map(positions);
        let factors: Vec<f32> = positions.map(|position| growth.at(position)).collect();
        let stream = self.parts.stream;
        let factors = stream.array_f32(&factors, &[factors.len() as i32, 1, 1])?;
        let factors = stream.astype(&factors, query.dtype())?;
        Ok(stream.multiply(&query, &factors)?)
    }
}
