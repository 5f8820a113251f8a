//! Gated delta nets, Kimi delta attention and Mamba 2. Rows go into a state page by page. Their
//! reads are normed and gated.
//!
//! ```text
//! gated delta net   step = sigmoid(W_step x)   decay = scale * softplus(W_decay x + bias)
//!                   attended = norm(read, of each head) * silu(gate)
//! Kimi              the same with a decay for each element of a key; sigmoid in place of silu
//! Mamba 2           step = softplus(W_step x + bias)   decay = scale * step
//!                   attended = norm(read * silu(gate), over the heads of a group)
//! ```
//!
//! [`PageRows`] has the rule of the state.

use std::ops::Range;

use paceline_mlx::{Array, Dtype};
use paceline_model::Error;
use paceline_tensor::{AttentionRows, PAGE, StateRule};

use super::Step;
use super::convolution::{by_page, rows_from};
use super::delta_page::{PageRows, columns};
use super::weights::{DeltaNet, Layer, Mixer};

/// Added to the sum of squares of a key or query, as transformers does.
const EPS: f32 = 1e-6;

/// Inputs of a step, T rows, all in f32. Letters as in [`DeltaNet`].
#[derive(Debug)]
pub(super) struct NetRows {
    /// `(T, 2 K D + H E)`, not yet convolved.
    inputs: Array,
    /// `(T, H, E)`
    gates: Array,
    /// `(T, H)`: factors of what is taken in.
    steps: Array,
    /// `(T, H, G)`: logarithms of decays.
    decays: Array,
}

impl<'a> Step<'a> {
    /// x (T, C) -> inputs, gates, steps and decays.
    pub(super) fn net_rows(&mut self, w: &Layer) -> Result<(), Error> {
        self.net = None;
        let Mixer::Delta(own) = &w.mixer else {
            return Ok(());
        };
        let (stream, rows) = (self.parts.stream, self.batch.rows() as i32);
        let wide = |array: &Array| stream.astype(array, Dtype::F32);
        let heads = |array: &Array| {
            let each = array.shape()[1] / own.key_heads.shape()[0];
            stream.reshape(array, &[rows, -1, each])
        };
        let gates = match &own.gate_down {
            Some(down) => own.gate.apply(stream, &down.apply(stream, &self.x)?)?,
            None => own.gate.apply(stream, &self.x)?,
        };
        let x = wide(&self.x)?;
        let steps = stream.matmul(&x, &own.step)?;
        let (steps, decays) = match &own.decay {
            Some(decay) => {
                let x = match &own.decay_down {
                    Some(down) => stream.matmul(&x, down)?,
                    None => x,
                };
                let sums = stream.add(&stream.matmul(&x, decay)?, &own.bias)?;
                (stream.sigmoid(&steps)?, self.decays(own, &heads(&sums)?)?)
            }
            None => {
                let steps = self.softplus(&stream.add(&steps, &own.bias)?)?;
                let decays = stream.multiply(&heads(&steps)?, &own.scale)?;
                (steps, decays)
            }
        };
        self.net = Some(NetRows {
            inputs: wide(&own.inputs.apply(stream, &self.x)?)?,
            gates: heads(&wide(&gates)?)?,
            steps,
            decays,
        });
        Ok(())
    }

    /// Logarithms of decays for sums `(T, H, G)`.
    fn decays(&self, own: &DeltaNet, sums: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let Some(least) = own.least_decay else {
            return Ok(stream.multiply(&self.softplus(sums)?, &own.scale)?);
        };
        let negative = stream.negative(&stream.multiply(sums, &own.scale)?)?;
        let least = stream.scalar(least, Dtype::F32)?;
        Ok(stream.multiply(&stream.sigmoid(&negative)?, &least)?)
    }

    /// `ln(1 + exp(x))`
    fn softplus(&self, x: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        Ok(stream.log_add_exp(x, &stream.scalar(0.0, Dtype::F32)?)?)
    }

    /// Inputs -> attended (T, H E): takes rows in, reads the states, norms and gates them.
    pub(super) fn read_net(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let (Mixer::Delta(own), Some(net)) = (&w.mixer, self.net.take()) else {
            return Ok(());
        };
        let read = self.by_sequence(index, |step, rows, of| {
            step.net_sequence(own, &net, rows, of)
        })?;
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let gated = self.normed_and_gated(own, &net.gates, &read)?;
        let gated = stream.reshape(&gated, &[self.batch.rows() as i32, -1])?;
        self.attended = Some(stream.astype(&gated, dtype)?);
        Ok(())
    }

    /// `read` and `gates`, (T, H, E) -> the same norms of heads or groups of heads, by their gates.
    fn normed_and_gated(
        &self,
        own: &DeltaNet,
        gates: &Array,
        read: &Array,
    ) -> Result<Array, Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        Ok(match own.rule {
            StateRule::Difference | StateRule::Channels => {
                let factors = match own.sigmoid_gates {
                    true => stream.sigmoid(gates)?,
                    false => self.silu(gates)?,
                };
                stream.multiply(&stream.rms_norm(read, &own.norm, eps)?, &factors)?
            }
            StateRule::Sum => {
                let rows = read.shape()[0];
                let gated = stream.multiply(read, &self.silu(gates)?)?;
                let ones = own.group_ones.as_ref().expect("loaded for this rule");
                let groups = stream.reshape(&gated, &[rows, -1, ones.shape()[0]])?;
                let normed = stream.rms_norm(&groups, ones, eps)?;
                stream.multiply(&stream.reshape(&normed, &[rows, -1])?, &own.norm)?
            }
        })
    }

    /// Values that the rows of one sequence read, (n, H, E).
    fn net_sequence(
        &mut self,
        own: &DeltaNet,
        net: &NetRows,
        rows: &AttentionRows<'_>,
        of: Range<usize>,
    ) -> Result<Array, Error> {
        let (stream, held) = (self.parts.stream, self.held(self.index));
        let part = |x: &Array| rows_from(stream, x, of.clone());
        let (inputs, steps, decays) = (part(&net.inputs)?, part(&net.steps)?, part(&net.decays)?);
        let mixed = self.convolved(&own.taps, rows, &inputs)?;
        let [queries, keys, values] = self.heads(own, &self.silu(&mixed)?)?;
        let steps = stream.transpose(&steps, &[1, 0])?;
        let steps = stream.reshape(&steps, &[values.shape()[0], -1, 1])?;
        let of_new = [&queries, &values, &steps];
        let mut out = Vec::new();
        for (page, at, new) in by_page(rows) {
            let of_page = |x: &Array| rows_from(stream, x, new.clone());
            let pages = self.parts.cache.recurrent_mut(held);
            pages.put_keys(stream, (page, at), [&of_page(&keys)?, &of_page(&decays)?])?;
            let page_rows = self.page_rows(own, rows, (page, at, new), of_new)?;
            let [read, deltas] = page_rows.read(at)?;
            let state = page_rows.state_behind(at, &deltas)?;
            let pages = self.parts.cache.recurrent_mut(held);
            pages.put_deltas(stream, (page, at), &deltas)?;
            if let Some(state) = state {
                pages.put_state(page, state);
            }
            out.push(stream.transpose(&read, &[1, 0, 2])?);
        }
        Ok(stream.concatenate(&out.iter().collect::<Vec<_>>(), 0)?)
    }

    /// The rows of a page of the cache. The sequence's rows `new` are new, and the first of them is
    /// row `at` of the page.
    fn page_rows<'p>(
        &self,
        own: &'p DeltaNet,
        rows: &AttentionRows<'_>,
        (page, at, new): (usize, usize, Range<usize>),
        of_new: [&Array; 3],
    ) -> Result<PageRows<'p>, Error>
    where
        'a: 'p,
    {
        let (stream, held) = (self.parts.stream, self.held(self.index));
        let (pages, n) = (self.parts.cache.recurrent(held), at + new.len());
        let [queries, values, steps] = of_new.map(|x| columns(stream, x, new.clone()));
        // The state behind the page before; none before the first.
        let before = ((rows.position + new.start) / PAGE).checked_sub(1);
        let before = before.map(|before| rows.pages[before - rows.first_page] as usize);
        Ok(PageRows {
            stream,
            triangles: &self.parts.constants.triangles,
            own,
            queries: queries?,
            values: values?,
            steps: steps?,
            keys: self.of_value_heads(own, &pages.keys(stream, page, n)?)?,
            sums: pages.sums(stream, page, n)?,
            deltas: pages.deltas(stream, page, at)?,
            state: before.map(|page| pages.state(page)),
        })
    }

    /// mixed -> queries `(H, n, D)`, keys `(n, K, D)`, values `(H, n, E)`.
    fn heads(&self, own: &DeltaNet, mixed: &Array) -> Result<[Array; 3], Error> {
        let (stream, shape) = (self.parts.stream, self.layer().0);
        let (n, all) = (mixed.shape()[0], mixed.shape()[1]);
        let keys = self.layer().1.kv_heads.len() * shape.head_dim;
        let (keys, dim) = (keys as i32, shape.head_dim as i32);
        let part = |first, end, size: usize| {
            let part = stream.slice(mixed, &[0, first], &[n, end])?;
            stream.reshape(&part, &[n, -1, size as i32])
        };
        let (mut query, mut key) = (
            part(0, keys, shape.head_dim)?,
            part(keys, 2 * keys, shape.head_dim)?,
        );
        if let Some([query_length, key_length]) = &own.lengths {
            let eps = EPS / dim as f32;
            query = stream.rms_norm(&query, query_length, eps)?;
            key = stream.rms_norm(&key, key_length, eps)?;
        }
        let values = part(2 * keys, all, shape.value_dim)?;
        Ok([
            self.of_value_heads(own, &query)?,
            key,
            stream.transpose(&values, &[1, 0, 2])?,
        ])
    }

    /// Copies the rows of each key head to its value heads: `(n, K, D)` -> `(H, n, D)`.
    fn of_value_heads(&self, own: &DeltaNet, x: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let each = stream.take(x, &own.key_heads, 1)?;
        Ok(stream.transpose(&each, &[1, 0, 2])?)
    }
}
