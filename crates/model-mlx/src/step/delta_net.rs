//! Gated delta nets: pages of rows at once, from the state behind the page before.
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

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;
use paceline_tensor::{AttentionRows, PAGE};

use super::super::cache::DeltaPages;
use super::Step;
use super::weights::{self, Layer, Mixer};

/// Added to the sum of squares of a key or query, as transformers does.
const EPS: f32 = 1e-6;

/// Inputs of a step, T rows, all in f32. Letters as in [`weights::DeltaNet`].
#[derive(Debug)]
pub(super) struct NetRows {
    /// `(T, 2 K D + H E)`, not yet convolved.
    inputs: Array,
    /// `(T, H, E)`
    gates: Array,
    /// `(T, H)`: how much of a difference is taken in.
    steps: Array,
    /// `(T, H)`: logarithms of decays.
    decays: Array,
}

/// Rows of one sequence within a page, all `(H, n, ..)` and in f32.
struct PageRows<'a> {
    stream: &'a Stream,
    triangles: &'a Triangles,
    /// Of the rows that are new.
    queries: Array,
    values: Array,
    steps: Array,
    /// Of all rows of the page, those before too.
    keys: Array,
    /// `(H, rows, 1)`
    sums: Array,
    /// `(H, before, E)`: what rows before took in.
    deltas: Option<Array>,
    /// `(H, D, E)`
    state: Option<Array>,
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

impl<'a> Step<'a> {
    /// x (T, C) -> inputs, gates, steps and decays.
    pub(super) fn net_rows(&mut self, w: &Layer) -> Result<(), Error> {
        self.net = None;
        let Mixer::Delta(own) = &w.mixer else {
            return Ok(());
        };
        let stream = self.parts.stream;
        let wide = |array: &Array| stream.astype(array, Dtype::F32);
        let (x, shape) = (wide(&self.x)?, self.layer().0);
        let gates = wide(&own.gate.apply(stream, &self.x)?)?;
        let sizes = [self.batch.rows() as i32, -1, shape.value_dim as i32];
        let decays = stream.add(&stream.matmul(&x, &own.decay)?, &own.bias)?;
        let zero = stream.scalar(0.0, Dtype::F32)?;
        let decays = stream.log_add_exp(&decays, &zero)?;
        self.net = Some(NetRows {
            inputs: wide(&own.inputs.apply(stream, &self.x)?)?,
            gates: stream.reshape(&gates, &sizes)?,
            steps: stream.sigmoid(&stream.matmul(&x, &own.step)?)?,
            decays: stream.multiply(&decays, &own.scale)?,
        });
        Ok(())
    }

    /// Inputs -> attended (T, H E): takes rows in, reads the states, norms and gates each head.
    pub(super) fn read_net(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let (Mixer::Delta(own), Some(net)) = (&w.mixer, self.net.take()) else {
            return Ok(());
        };
        let kind = self.parts.constants.kinds.of(index);
        let (mut first, mut parts) = (0, Vec::new());
        for s in self.batch.sequences {
            let rows = s.rows_of(kind);
            let own_rows = first..first + rows.rows;
            parts.push(self.net_sequence(own, &net, &rows, own_rows)?);
            first += rows.rows;
        }
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let parts: Vec<&Array> = parts.iter().collect();
        let read = stream.concatenate(&parts, 0)?;
        let eps = self.parts.model.config.norm_eps;
        let normed = stream.rms_norm(&read, &own.norm, eps)?;
        let gated = stream.multiply(&normed, &self.silu(&net.gates)?)?;
        let gated = stream.reshape(&gated, &[self.batch.rows() as i32, -1])?;
        self.attended = Some(stream.astype(&gated, dtype)?);
        Ok(())
    }

    /// Values that the rows of one sequence read, (n, H, E).
    fn net_sequence(
        &mut self,
        own: &weights::DeltaNet,
        net: &NetRows,
        rows: &AttentionRows<'_>,
        of: Range<usize>,
    ) -> Result<Array, Error> {
        let (stream, held) = (self.parts.stream, self.held(self.index));
        let part = |x: &Array| self.rows_of(x, of.start, of.len());
        let (inputs, steps, decays) = (part(&net.inputs)?, part(&net.steps)?, part(&net.decays)?);
        let pages = self.parts.cache.delta(held);
        for (page, at, new) in by_page(rows) {
            let of_new = |x: &Array| rows_from(stream, x, new.clone());
            let (inputs, decays) = (of_new(&inputs)?, of_new(&decays)?);
            pages.put(stream, page, at, [&inputs, &decays])?;
        }
        let mixed = self.convolved(own, rows, held)?;
        let [queries, keys, values] = self.heads(own, &mixed)?;
        let steps = stream.transpose(&steps, &[1, 0])?;
        let steps = stream.reshape(&steps, &[values.shape()[0], -1, 1])?;
        let of_new = [&queries, &values, &steps];
        let mut out = Vec::new();
        for (page, at, new) in by_page(rows) {
            let of_page = rows_from(stream, &keys, new.clone())?;
            let pages = self.parts.cache.delta(held);
            pages.put_keys(stream, page, at, &of_page)?;
            let page_rows = self.page_rows(own, (rows, held), (page, at, new), of_new)?;
            let (read, deltas) = page_rows.read(at)?;
            let state = page_rows.state_behind(at, &deltas)?;
            let pages = self.parts.cache.delta(held);
            pages.put_deltas(stream, page, at, &deltas)?;
            if let Some(state) = state {
                pages.put_state(page, state);
            }
            out.push(stream.transpose(&read, &[1, 0, 2])?);
        }
        let out: Vec<&Array> = out.iter().collect();
        Ok(stream.concatenate(&out, 0)?)
    }

    /// The rows of a page of the cache. The sequence's rows `new` are new, and the first of them is
    /// row `at` of the page.
    fn page_rows(
        &self,
        own: &weights::DeltaNet,
        (rows, held): (&AttentionRows<'_>, usize),
        (page, at, new): (usize, usize, Range<usize>),
        of_new: [&Array; 3],
    ) -> Result<PageRows<'a>, Error> {
        let stream = self.parts.stream;
        let (pages, n) = (self.parts.cache.delta_read(held), at + new.len());
        let [queries, values, steps] = of_new.map(|x| columns(stream, x, new.clone()));
        Ok(PageRows {
            stream,
            triangles: &self.parts.constants.triangles,
            queries: queries?,
            values: values?,
            steps: steps?,
            keys: self.of_value_heads(own, &pages.keys(stream, page, n)?)?,
            sums: pages.sums(stream, page, n)?,
            deltas: pages.deltas(stream, page, at)?,
            state: state_before(pages, rows, rows.position + new.start),
        })
    }

    /// The convolution of a sequence's inputs, which are in the cache, behind `silu`:
    /// `(n, 2 K D + H E)`.
    fn convolved(
        &self,
        own: &weights::DeltaNet,
        rows: &AttentionRows<'_>,
        held: usize,
    ) -> Result<Array, Error> {
        let (stream, taps) = (self.parts.stream, own.taps.len());
        let back = (taps - 1).min(rows.position);
        let seen = AttentionRows {
            position: rows.position - back,
            rows: rows.rows + back,
            ..*rows
        };
        let pages = self.parts.cache.delta_read(held);
        let inputs = by_page(&seen).map(|(page, at, new)| {
            let end = at + new.len();
            pages.inputs(stream, page, at..end)
        });
        let mut inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let missing = (taps - 1 - back) as i32;
        if missing > 0 {
            let channels = inputs[0].shape()[1];
            inputs.insert(0, stream.zeros(&[missing, channels], Dtype::F32)?);
        }
        let inputs: Vec<&Array> = inputs.iter().collect();
        let inputs = stream.concatenate(&inputs, 0)?;
        let mut sum: Option<Array> = None;
        for (i, tap) in own.taps.iter().enumerate() {
            let part = rows_from(stream, &inputs, i..i + rows.rows)?;
            let part = stream.multiply(&part, tap)?;
            sum = Some(match sum {
                Some(sum) => stream.add(&sum, &part)?,
                None => part,
            });
        }
        self.silu(&sum.expect("a convolution looks at an input at least"))
    }

    /// mixed -> queries `(H, n, D)`, keys `(n, K, D)`, values `(H, n, E)`.
    fn heads(&self, own: &weights::DeltaNet, mixed: &Array) -> Result<[Array; 3], Error> {
        let (stream, shape) = (self.parts.stream, self.layer().0);
        let (n, all) = (mixed.shape()[0], mixed.shape()[1]);
        let keys = self.layer().1.kv_heads.len() * shape.head_dim;
        let (keys, dim) = (keys as i32, shape.head_dim as i32);
        let part = |first, end, size: usize| {
            let part = stream.slice(mixed, &[0, first], &[n, end])?;
            stream.reshape(&part, &[n, -1, size as i32])
        };
        let eps = EPS / dim as f32;
        let [query_length, key_length] = &own.lengths;
        let queries = part(0, keys, shape.head_dim)?;
        let queries = stream.rms_norm(&queries, query_length, eps)?;
        let key = part(keys, 2 * keys, shape.head_dim)?;
        let key = stream.rms_norm(&key, key_length, eps)?;
        let values = part(2 * keys, all, shape.value_dim)?;
        Ok([
            self.of_value_heads(own, &queries)?,
            key,
            stream.transpose(&values, &[1, 0, 2])?,
        ])
    }

    /// Copies the rows of each key head to its value heads: `(n, K, D)` -> `(H, n, D)`.
    fn of_value_heads(&self, own: &weights::DeltaNet, x: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let each = stream.take(x, &own.key_heads, 1)?;
        Ok(stream.transpose(&each, &[1, 0, 2])?)
    }
}

/// The rows of a sequence page by page: the page, the first row's place in it, and which rows.
fn by_page<'a>(
    rows: &AttentionRows<'a>,
) -> impl Iterator<Item = (usize, usize, Range<usize>)> + use<'a> {
    let AttentionRows {
        rows,
        position,
        pages,
        first_page,
    } = *rows;
    let end = position + rows;
    (position / PAGE..end.div_ceil(PAGE)).map(move |page| {
        let first = position.max(page * PAGE);
        let last = end.min((page + 1) * PAGE);
        let held = pages[page - first_page] as usize;
        (held, first % PAGE, first - position..last - position)
    })
}

/// The state before the page of `position`; none before the first.
fn state_before(pages: &DeltaPages, rows: &AttentionRows<'_>, position: usize) -> Option<Array> {
    let before = (position / PAGE).checked_sub(1)?;
    let held = rows.pages[before - rows.first_page] as usize;
    Some(pages.state(held))
}

/// The rows `of` along the first axis.
fn rows_from(stream: &Stream, x: &Array, of: Range<usize>) -> Result<Array, Error> {
    let mut stop = x.shape();
    let mut start = vec![0; stop.len()];
    (start[0], stop[0]) = (of.start as i32, of.end as i32);
    Ok(stream.slice(x, &start, &stop)?)
}

/// The rows `of` along the second axis of three.
fn columns(stream: &Stream, x: &Array, of: Range<usize>) -> Result<Array, Error> {
    let mut stop = x.shape();
    let mut start = vec![0; stop.len()];
    (start[1], stop[1]) = (of.start as i32, of.end as i32);
    Ok(stream.slice(x, &start, &stop)?)
}

impl PageRows<'_> {
    /// Values that new rows read, and the differences that they take in: `(H, n, E)` each. The
    /// first of the rows is row `before` of the page.
    fn read(&self, before: usize) -> Result<(Array, Array), Error> {
        let stream = self.stream;
        let (keys, sums) = (
            self.fresh(&self.keys, before)?,
            self.fresh(&self.sums, before)?,
        );
        let far = stream.exp(&sums)?;
        let near = self.decays(&sums, &sums)?;
        let mut expected = None;
        let mut read = None;
        if let Some(state) = &self.state {
            expected = Some(stream.multiply(&stream.matmul(&keys, state)?, &far)?);
            read = Some(stream.multiply(&stream.matmul(&self.queries, state)?, &far)?);
        }
        if let Some(deltas) = &self.deltas {
            let old = columns(stream, &self.keys, 0..before)?;
            let decays = self.decays(&sums, &columns(stream, &self.sums, 0..before)?)?;
            let of = |x: &Array| {
                let scores = stream.multiply(&self.scores(x, &old)?, &decays)?;
                Ok::<_, Error>(stream.matmul(&scores, deltas)?)
            };
            expected = self.plus(expected, of(&keys)?).map(Some)?;
            read = self.plus(read, of(&self.queries)?).map(Some)?;
        }
        let missing = match expected {
            Some(expected) => stream.subtract(&self.values, &expected)?,
            None => self.values.clone(),
        };
        let taken = stream.multiply(&self.steps, &missing)?;
        let deltas = self.solved(&keys, &near, taken)?;
        let scores = stream.multiply(&self.scores(&self.queries, &keys)?, &near)?;
        let scores = stream.multiply(&scores, &self.mask(&self.triangles.seen)?)?;
        let read = self.plus(read, stream.matmul(&scores, &deltas)?)?;
        Ok((read, deltas))
    }

    /// The state behind the page, where its last row is among the new ones; `before` rows are
    /// older, `deltas` are those of the new ones.
    fn state_behind(&self, before: usize, deltas: &Array) -> Result<Option<Array>, Error> {
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
        let decays = self.decays(&last, &self.sums)?;
        let decays = stream.transpose(&decays, &[0, 2, 1])?;
        let keys = stream.multiply(&self.keys, &decays)?;
        let keys = stream.transpose(&keys, &[0, 2, 1])?;
        let taken = stream.matmul(&keys, &deltas)?;
        let old = self.state.as_ref().map(|state| {
            let far = stream.exp(&last)?;
            Ok::<_, Error>(stream.multiply(state, &far)?)
        });
        self.plus(old.transpose()?, taken).map(Some)
    }

    /// The rows of `x (H, rows, ..)` behind the first `before`.
    fn fresh(&self, x: &Array, before: usize) -> Result<Array, Error> {
        let rows = x.shape()[1] as usize;
        columns(self.stream, x, before..rows)
    }

    /// `exp(a - b)` of each row of a and of b, at most 1: `(H, n, 1)` and `(H, m, 1)` ->
    /// `(H, n, m)`.
    fn decays(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let stream = self.stream;
        let apart = stream.subtract(a, &stream.transpose(b, &[0, 2, 1])?)?;
        let zero = stream.scalar(0.0, Dtype::F32)?;
        Ok(stream.exp(&stream.minimum(&apart, &zero)?)?)
    }

    /// Products of each row of `a (H, n, D)` and of `b (H, m, D)`: `(H, n, m)`.
    fn scores(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let across = self.stream.transpose(b, &[0, 2, 1])?;
        Ok(self.stream.matmul(a, &across)?)
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
    fn solved(&self, keys: &Array, near: &Array, taken: Array) -> Result<Array, Error> {
        let stream = self.stream;
        let n = keys.shape()[1];
        if n == 1 {
            return Ok(taken);
        }
        let scores = stream.multiply(&self.scores(keys, keys)?, near)?;
        let scores = stream.multiply(&scores, &self.steps)?;
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
