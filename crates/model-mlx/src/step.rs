//! A step on MLX: the operations of the families' layers, as a graph.
//!
//! Nothing is computed while the graph is made. It is cut where this rank must wait for others or
//! they for it. That is before each exchange of a tensor split and at the borders of stages. The
//! last cut is the end, where the logits and the cache are evaluated together. Rows of all
//! sequences go through the products together; attention is by sequence.

use paceline_mlx::{Array, Dtype, Mask, Stream};
use paceline_model::backend::{Half, LayerStep};
use paceline_model::{Batch, Error, LayerCache, LayerCut, LayerShape, LeafCut, Links};
use paceline_tensor::RopePairs;

use super::cache::{Cache, Span, SpanKind};
use super::decoding::Decoding;
use super::exchange::{Receive, Way};
use super::gates;
use super::host::Watch;
use super::logits::StepLogits;
use super::matrix::Linear;
use super::weights::{self, Layer, Mixer, Summed, Weights};
use super::{Constants, MlxModel};

mod capped;
mod delta_net;
mod experts;
mod indexer;
mod latent;
mod output_rows;
mod per_layer;
mod projections;

use delta_net::NetRows;
pub(super) use delta_net::Triangles;
use output_rows::OutputRows;

/// Queries of one sequence, `(1, heads, rows, D)`, if it has some. Its keys and values, where the
/// layer has its own.
#[derive(Debug)]
struct Turned {
    query: Option<Array>,
    key_value: Option<[Array; 2]>,
}

/// A step in progress.
pub(super) struct Step<'a> {
    pub(super) parts: Parts<'a>,
    pub(super) batch: &'a Batch<'a>,
    /// `(T,)`
    tokens: Array,
    /// Of each sequence, by kind of span.
    spans: Vec<Vec<Span>>,
    /// Decoding rows in lanes, in layers that have lanes.
    decoding: Option<Decoding>,
    /// Rows that the last layer computes, where these are not all.
    output_rows: Option<OutputRows>,
    /// `(T, C)`
    pub(super) residual: Array,
    /// `(T, C)`
    x: Array,
    /// `(T, H, D)`; none for a rank without heads.
    query: Option<Array>,
    /// `(T, K, D)` and `(T, K, E)`, where the layer has its own.
    key_value: Option<[Array; 2]>,
    /// `(T, H, D)`: gates of heads, where these have some.
    gates: Option<Array>,
    /// Inputs of a delta net.
    net: Option<NetRows>,
    /// Queries `(1, H, rows, R + P)` and keys `(1, 1, rows, R + P)` of each sequence, of latent
    /// attention.
    latent: Vec<[Array; 2]>,
    /// `(T, A)`: compressed queries of latent attention, for an indexer.
    compressed: Option<Array>,
    /// Positions that each sequence's rows attend to, by the last indexer.
    selected: Vec<indexer::Selected>,
    /// Of the decoding rows in lanes, `(lanes, heads, 1, D)`, if the layer has lanes.
    decoded: Option<Turned>,
    /// Of each other sequence, with its place in the batch.
    turned: Vec<(usize, Turned)>,
    /// `(T, H D)`
    attended: Option<Array>,
    /// `(T, F)` each
    gate_up: Option<[Array; 2]>,
    /// `(T, F)`
    hidden: Option<Array>,
    /// `(T, C)`
    delta: Array,
    /// `(T, C)`: output of a dense feed-forward that has parallel experts.
    aside: Option<Array>,
    /// `(T, layers held, P)`: what the layers' own embeddings give, where there are some.
    per_layer: Option<Array>,
    /// Layer of the model.
    index: usize,
}

/// The objects that a step works with.
pub(super) struct Parts<'a> {
    pub(super) model: &'a MlxModel,
    pub(super) stream: &'a Stream,
    pub(super) weights: &'a Weights,
    /// Positions per radian, for each of [`Config::ropes`](paceline_model::Config::ropes).
    pub(super) periods: &'a [Array],
    pub(super) constants: &'a Constants,
    pub(super) cache: &'a mut Cache,
    pub(super) receive: &'a mut Receive,
    pub(super) watch: &'a Watch,
}

impl Parts<'_> {
    /// The rows with logits, which the last layer computes alone; `None` for all rows.
    fn output_rows(
        &self,
        batch: &Batch<'_>,
        lanes: &[Option<usize>],
    ) -> Result<Option<OutputRows>, Error> {
        let (model, constants) = (self.model, self.constants);
        let is_alone = |links: &std::sync::Arc<Links>| links.stage.size() == 1;
        let is_alone = model.links.as_ref().is_none_or(is_alone);
        match model.config.layers.len().checked_sub(1) {
            Some(last) if self.weights.head.is_some() && is_alone => {
                let has_keys = !matches!(model.config.layers[last].cache, LayerCache::Delta(_));
                let kind = has_keys.then(|| constants.span_kinds[constants.span_kind_of[last]]);
                OutputRows::new(self.stream, batch, (lanes, kind))
            }
            _ => Ok(None),
        }
    }

    /// The residual `(n, width)` from the stage before, which arrives when the step
    /// [settles](Step::settle). So this stage makes its graph while that one computes.
    fn residual_to_come(&mut self, links: &Links, n: usize) -> Result<Array, Error> {
        let (model, stream) = (self.model, self.stream);
        let rows = self
            .receive
            .residual((stream, links), [n, model.config.width])?;
        Ok(stream.astype(&rows, model.dtype)?)
    }
}

impl<'a> Step<'a> {
    /// Starts a step: embeds the tokens or takes the residual from the stage before. `tokens` are
    /// those of the batch, where the device has them already.
    pub(super) fn new(
        mut parts: Parts<'a>,
        batch: &'a Batch<'a>,
        tokens: Option<Array>,
    ) -> Result<Self, Error> {
        let (model, stream) = (parts.model, parts.stream);
        let tokens = tokens.map_or_else(|| tokens_of(stream, batch), Ok)?;
        let (weights, constants) = (parts.weights, parts.constants);
        parts.cache.begin();
        let rows = super::rows_in_cache(batch);
        let place = || parts.cache.lanes_of(stream, &rows);
        let lanes = parts.watch.during_part(batch.rows(), place)?;
        let spans = |(s, lane): (&paceline_model::BatchSequence<'_>, &Option<usize>)| {
            let span = |of: &SpanKind| {
                let lane = lane.filter(|_| of.kind == 0);
                Span::new(stream, &s.rows_of(of.kind), of.window, lane)
            };
            constants.span_kinds.iter().map(span).collect()
        };
        let spans = batch.sequences.iter().zip(&lanes).map(spans);
        let spans = spans.collect::<Result<Vec<Vec<Span>>, Error>>()?;
        let windows = constants.span_kinds.iter().map(|kind| kind.window);
        let output_rows = parts.output_rows(batch, &lanes)?;
        let lanes = (&*lanes, parts.cache.lanes());
        let decoding = Decoding::new(stream, batch, lanes, windows)?;
        let kinds = &constants.span_kind_of[model.shard.layers.clone()];
        let end = |layer: usize| spans.iter().map(|of| of[kinds[layer]].end()).max();
        let growth = parts.cache.growth(|layer| end(layer).unwrap_or(0));
        if !growth.is_empty() {
            let grow = || parts.cache.grow(stream, &growth);
            parts.watch.during(batch.rows(), grow)?;
        }
        let residual = match &model.links {
            Some(links) if !model.shard.embeds() => parts.residual_to_come(links, batch.rows())?,
            _ => embed(model, stream, weights, constants, &tokens)?,
        };
        let mut step = Self {
            x: residual.clone(),
            delta: residual.clone(),
            residual,
            query: None,
            key_value: None,
            gates: None,
            net: None,
            latent: Vec::new(),
            compressed: None,
            selected: Vec::new(),
            decoded: None,
            turned: Vec::new(),
            attended: None,
            gate_up: None,
            hidden: None,
            aside: None,
            per_layer: None,
            index: 0,
            parts,
            batch,
            tokens,
            spans,
            decoding,
            output_rows,
        };
        step.per_layer = step.per_layer_inputs()?;
        Ok(step)
    }

    /// The layer that it is at, and this rank's part of it.
    fn layer(&self) -> (&'a LayerShape, &'a LayerCut) {
        let model = self.parts.model;
        (
            &model.config.layers[self.index],
            model.shard.layer(self.index),
        )
    }

    /// The place of a layer among those that this rank holds.
    const fn held(&self, layer: usize) -> usize {
        layer - self.parts.model.shard.layers.start
    }

    /// Output of a dense feed-forward that has parallel experts, until it is added.
    pub(super) const fn aside(&self) -> Option<&Array> {
        self.aside.as_ref()
    }

    /// Runs all layers.
    pub(super) fn layers(&mut self) -> Result<(), Error> {
        let (weights, shard) = (self.parts.weights, &self.parts.model.shard);
        for (index, layer) in shard.layers.clone().zip(&weights.layers) {
            self.index = index;
            self.parts.model.config.family.layer(self, layer, index)?;
        }
        if weights.head.is_some() {
            let rows = self.residual.shape()[0] as u64;
            self.parts.model.counters.output_rows.add(rows);
        }
        Ok(())
    }

    /// Evaluates `arrays` and the cache, watched.
    fn eval(&mut self, arrays: &[&Array]) -> Result<(), Error> {
        self.settle()?;
        let all = arrays.iter().copied().chain(self.parts.cache.arrays());
        let rows = self.batch.rows();
        let evaluate = || self.parts.stream.eval(all);
        let evaluated = self.parts.watch.during(rows, evaluate);
        evaluated.map_err(|error| self.parts.receive.reason(error))
    }

    /// Submits `logits` and the cache to the device.
    pub(super) fn submit(&mut self, logits: &StepLogits) -> Result<(), Error> {
        self.settle()?;
        let cache = self.parts.cache.arrays().into_iter();
        let all = logits.arrays().into_iter().chain(cache);
        let submit = || self.parts.stream.submit(all);
        Ok(self.parts.watch.during_part(self.batch.rows(), submit)?)
    }

    /// Logits of the wanted rows, where this rank has the whole head and there are some. They are
    /// still to be evaluated.
    pub(super) fn logits(&self) -> Result<Option<StepLogits>, Error> {
        let model = self.parts.model;
        if model.shard.vocab().len() < model.config.vocab {
            return Ok(None);
        }
        let of = |all| StepLogits::new(self.parts.stream, all, &self.batch.requests());
        self.head_rows()?.map(of).transpose()
    }

    /// Evaluates `logits` and the cache.
    pub(super) fn evaluate(&mut self, logits: &StepLogits) -> Result<(), Error> {
        // The residual too: others may still read what ranks exchanged.
        let residual = self.residual.clone();
        let all = logits.arrays().into_iter().chain([&residual]);
        let all: Vec<&Array> = all.collect();
        self.eval(&all)
    }

    /// Logits `(R, V)` of the wanted rows, of this rank's part of the vocabulary. `None` without
    /// such rows, and at other stages than the last.
    fn head_rows(&self) -> Result<Option<Array>, Error> {
        let Some((norm, head)) = &self.parts.weights.head else {
            return Ok(None);
        };
        let mut wanted = Vec::new();
        self.batch.wanted(&mut wanted);
        let (n, all) = (wanted.len(), self.residual.shape()[0] as usize);
        if n == 0 {
            return Ok(None);
        }
        let rows = if n == all {
            self.residual.clone()
        } else {
            let wanted: Vec<u32> = wanted.iter().map(|row| *row as u32).collect();
            let wanted = self.parts.stream.array_u32(&wanted, &[n as i32])?;
            self.parts.stream.take(&self.residual, &wanted, 0)?
        };
        let normed = self.normed(&rows, norm)?;
        self.capped(self.product(head, &normed)?).map(Some)
    }

    /// Ends a step without [`logits`](Self::logits). Sends the residual stream (T, C) to the next
    /// stage, or gathers logits (R, V) with the other ranks of the last stage. Returns R at the
    /// leader.
    pub(super) fn finish(mut self, logits: &mut Vec<f32>) -> Result<usize, Error> {
        if self.parts.weights.head.is_none() {
            let rows = self.parts.stream.rows_f32(&self.residual)?;
            self.eval(&[&rows])?;
            let links = self.parts.model.links.as_ref();
            let links = links.expect("an earlier stage has links");
            let model = self.parts.model;
            links.send_residual(&model.shard, rows.as_f32()?)?;
            let way = Way::of_residual(self.parts.stream, model.dtype)?;
            let bytes = rows.n_bytes() as usize * model.shard.targets().count();
            model.exchanged.add(way, bytes);
            return Ok(0);
        }
        let Some(own) = self.head_rows()? else {
            // Alone, only keys and values are of use.
            let residual = self.residual.clone();
            let links = self.parts.model.links.as_ref();
            let all: Vec<&Array> = links.map(|_| &residual).into_iter().collect();
            self.eval(&all)?;
            return Ok(0);
        };
        let own = self.parts.stream.rows_f32(&own)?;
        // The residual too: others may still read what ranks exchanged.
        let residual = self.residual.clone();
        self.eval(&[&own, &residual])?;
        self.gather(self.batch.logit_rows(), own.as_f32()?, logits)
    }

    /// The norm of rows of the residual, `(rows, C)`, as the family has it.
    fn normed(&self, rows: &Array, weight: &Array) -> Result<Array, Error> {
        let (stream, config) = (self.parts.stream, &self.parts.model.config);
        if !config.family.centres_norms() {
            return Ok(stream.rms_norm(rows, weight, config.norm_eps)?);
        }
        let wide = stream.astype(rows, Dtype::F32)?;
        let width = stream.scalar(config.width as f32, Dtype::F32)?;
        let mean = stream.divide(&stream.sum_along(&wide, 1)?, &width)?;
        let centred = stream.astype(&stream.subtract(&wide, &mean)?, rows.dtype())?;
        Ok(stream.rms_norm(&centred, weight, config.norm_eps)?)
    }

    /// `cap * tanh(z / cap)` of logits, where the model has a cap; in f32.
    fn capped(&self, logits: Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let Some(cap) = self.parts.model.config.softcap else {
            return Ok(logits);
        };
        let cap = stream.scalar(cap, Dtype::F32)?;
        let share = stream.divide(&stream.astype(&logits, Dtype::F32)?, &cap)?;
        Ok(stream.multiply(&cap, &stream.tanh(&share)?)?)
    }

    /// Brings the ranks' logits together at the leader.
    fn gather(&self, rows: usize, own: &[f32], logits: &mut Vec<f32>) -> Result<usize, Error> {
        let (shard, vocab) = (&self.parts.model.shard, self.parts.model.config.vocab);
        let links = self.parts.model.links.as_ref();
        let links = links.expect("a rank with a part of the vocabulary has links");
        logits.resize(if shard.leads() { rows * vocab } else { 0 }, 0.0);
        let mut scratch = vec![0.0; Links::logits_room(shard, rows)];
        links.gather_logits(shard, &self.batch.extents(), own, logits, &mut scratch)?;
        Ok(if shard.leads() { rows } else { 0 })
    }

    /// x (T, in) -> (T, out); of class `mlx-exact` row by row, whose bits are those of one row.
    fn product(&self, linear: &Linear, x: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let [rows, cols] = x.shape()[..] else {
            unreachable!("products are of matrices");
        };
        if rows == 1 || !self.parts.model.is_exact() {
            return linear.apply(stream, x);
        }
        let row = |i| linear.apply(stream, &stream.slice(x, &[i, 0], &[i + 1, cols])?);
        let products = (0..rows).map(row).collect::<Result<Vec<_>, _>>()?;
        let products: Vec<&Array> = products.iter().collect();
        Ok(stream.concatenate(&products, 0)?)
    }

    /// x (T, in) -> delta (T, C), of all ranks of the stage. `cut` says which columns of x they
    /// have.
    fn sum(&mut self, x: Option<&Array>, w: &Summed, cut: &LeafCut) -> Result<(), Error> {
        let model = self.parts.model;
        let links = model.links.as_ref();
        let sum = match links.filter(|links| links.stage.size() > 1) {
            Some(links) if model.is_exact() => self.whole_product(links, x, w, cut)?,
            _ => {
                let part = self.part(x, w)?;
                match cut.is_whole() {
                    true => self.parts.stream.astype(&part, model.dtype)?,
                    false => self.sum_parts(&part)?,
                }
            }
        };
        self.delta = match &w.bias {
            Some(bias) => self.parts.stream.add(&sum, bias)?,
            None => sum,
        };
        Ok(())
    }

    /// This rank's part of a sum: zeros where it has none.
    fn part(&self, x: Option<&Array>, w: &Summed) -> Result<Array, Error> {
        let stream = self.parts.stream;
        match (x, &w.mine) {
            (Some(x), Some(mine)) => self.product(mine, x),
            _ => Ok(stream.zeros(&self.residual.shape(), self.parts.model.dtype)?),
        }
    }

    /// Adds the parts (T, C) of all ranks of the stage, in their order, in f32. With one rank it is
    /// that part, in the type of activations.
    fn sum_parts(&mut self, mine: &Array) -> Result<Array, Error> {
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let links = self.parts.model.links.as_ref();
        let Some(links) = links.filter(|links| links.stage.size() > 1) else {
            return Ok(stream.astype(mine, dtype)?);
        };
        let columns = vec![self.parts.model.config.width; links.stage.size() as usize];
        let parts = self.gather_columns(links, Some(mine), &columns, dtype)?;
        let mut sum = stream.astype(&parts[0], Dtype::F32)?;
        for part in &parts[1..] {
            sum = stream.add(&sum, &stream.astype(part, Dtype::F32)?)?;
        }
        Ok(stream.astype(&sum, dtype)?)
    }

    /// Gathers the whole input, computes this rank's outputs of it, and gathers these.
    fn whole_product(
        &mut self,
        links: &Links,
        x: Option<&Array>,
        w: &Summed,
        cut: &LeafCut,
    ) -> Result<Array, Error> {
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let columns: Vec<usize> = cut.columns_by_rank().map(|c| c.len()).collect();
        let x = joined(stream, &self.gather_columns(links, x, &columns, dtype)?)?;
        let mine = w.mine.as_ref().map(|mine| self.product(mine, &x));
        let mine = mine.transpose()?;
        let outputs = &self.parts.model.shard.outputs;
        let outputs: Vec<usize> = outputs.iter().map(|rows| rows.len()).collect();
        joined(
            stream,
            &self.gather_columns(links, mine.as_ref(), &outputs, dtype)?,
        )
    }

    /// Rows `first..first + n` of `(T, heads, D)` as `(1, heads, n, D)`.
    fn turned(&self, x: &Array, first: i32, n: i32) -> Result<Array, Error> {
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
    fn roped(&self, x: &Array, at: i32) -> Result<Array, Error> {
        self.roped_by(|periods, neighbours| self.parts.stream.rope(x, periods, neighbours, at))
    }

    /// As [`roped`](Self::roped), of the decoding rows in lanes, `(lanes, heads, 1, D)`.
    fn roped_each(&self, x: &Array, at: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        self.roped_by(|periods, neighbours| stream.rope_each(x, periods, neighbours, at))
    }

    /// `x` turned by `turn`, which gets the periods of the layer's rope and which values turn
    /// together.
    fn roped_by(
        &self,
        turn: impl FnOnce(&Array, bool) -> Result<Array, paceline_mlx::Error>,
    ) -> Result<Array, Error> {
        let (stream, index) = (self.parts.stream, self.layer().0.rope);
        let (rope, periods) = (
            &self.parts.model.config.ropes[index],
            &self.parts.periods[index],
        );
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
    fn attention(
        &self,
        sequence: usize,
        keeper: usize,
        q: &Array,
        sinks: Option<&Array>,
    ) -> Result<Array, Error> {
        let view = self.view(sequence);
        let [k, v] = self.parts.cache.read(self.parts.stream, keeper, view)?;
        let gathered = if view.is_gathered() { 2 } else { 0 };
        self.parts.model.counters.gathers.add(gathered);
        self.attended_by([q, &k, &v], view.mask(), sinks)
    }

    /// Attention `(n, H, rows, E)` of queries over keys and values.
    fn attended_by(
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
            self.one_attention([&q, &k, &v], scale, mask, sinks.as_ref())
        };
        let parts = groups.iter().enumerate().map(group);
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        let parts: Vec<&Array> = parts.iter().collect();
        Ok(stream.concatenate(&parts, 1)?)
    }

    /// The decoding rows in lanes, if the layer has lanes.
    fn decoding(&self) -> Option<&Decoding> {
        let constants = self.parts.constants;
        let kind = constants.span_kinds[constants.span_kind_of[self.index]].kind;
        self.decoding.as_ref().filter(|_| kind == 0)
    }

    /// Attention of the decoding rows in lanes, `(lanes, H, 1, E)`, after their keys and values are
    /// written.
    fn decoded_attention(
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
            cache.write_lanes(stream, held, &decoding.written, [k, v])?;
        }
        let [k, v] = cache.read_lanes(stream, keeper, decoding.seen(kind))?;
        let query = query.as_ref().expect("decoding rows have queries");
        self.attended_by([query, &k, &v], decoding.mask(kind), sinks)
    }

    /// `(m, heads, n, E)` of each part as rows, `(sum of m n, heads E)`.
    fn as_rows(&self, parts: &[Array]) -> Result<Option<Array>, Error> {
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
    fn rows_of(&self, x: &Array, first: usize, n: usize) -> Result<Array, Error> {
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
    fn take_queries(&mut self, both: Array) -> Result<(), Error> {
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
    fn grown(&self, query: Array) -> Result<Array, Error> {
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

    /// `gate / (1 + exp(-gate))`
    fn silu(&self, gate: &Array) -> Result<Array, Error> {
        Ok(gates::silu(self.parts.stream, gate)?)
    }

    /// The model's function on a gate.
    fn activated(&self, gate: &Array) -> Result<Array, Error> {
        let (gates, stream) = (&self.parts.constants.gates, self.parts.stream);
        gates.activated(stream, gate)
    }
}

/// Parts `(T, n)` side by side.
fn joined(stream: &Stream, parts: &[Array]) -> Result<Array, Error> {
    let parts: Vec<&Array> = parts.iter().collect();
    Ok(stream.concatenate(&parts, 1)?)
}

/// The tokens of a batch, `(T,)`.
fn tokens_of(stream: &Stream, batch: &Batch<'_>) -> Result<Array, Error> {
    let tokens = batch.sequences.iter().flat_map(|s| s.tokens).copied();
    let tokens: Vec<u32> = tokens.collect();
    Ok(stream.array_u32(&tokens, &[tokens.len() as i32])?)
}

/// tokens -> residual (T, C)
fn embed(
    model: &MlxModel,
    stream: &Stream,
    weights: &Weights,
    constants: &Constants,
    tokens: &Array,
) -> Result<Array, Error> {
    let table = weights.embedding.as_ref();
    let table = table.expect("the first stage embeds");
    let rows = table.rows(stream, tokens, model.dtype)?;
    if model.config.embedding_scale == 1.0 {
        return Ok(rows);
    }
    Ok(stream.multiply(&rows, &constants.embedding_scale)?)
}

impl LayerStep for Step<'_> {
    type Layer = Layer;

    fn norm(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.attention_norm.as_ref(),
            Half::FeedForward => w.ffn_norm.as_ref(),
            Half::ParallelExperts => Some(&beside(w).before),
        };
        let weight = weight.expect("loaded for this family");
        self.x = self.normed(&self.residual, weight)?;
        Ok(())
    }

    fn take_residual(&mut self) -> Result<(), Error> {
        self.x = self.residual.clone();
        Ok(())
    }

    fn project_qkv(&mut self, w: &Layer) -> Result<(), Error> {
        (self.query, self.key_value, self.gates) = (None, None, None);
        let Some(own) = attention(w) else {
            return Ok(());
        };
        let (shape, stream) = (self.layer().0, self.parts.stream);
        let project = |linear: &Linear, x: &Array, dim: usize| {
            let product = self.product(linear, x)?;
            let rows = product.shape()[0];
            Ok::<_, Error>(stream.reshape(&product, &[rows, -1, dim as i32])?)
        };
        let both = project(&own.query, &self.query_input()?, query_dim(shape))?;
        let key_value = own.key.as_ref().map(|key| {
            let key = project(key, &self.x, shape.head_dim)?;
            let value = match &own.value {
                Some(value) => project(value, &self.x, shape.value_dim)?,
                None => key.clone(), // keys as values
            };
            Ok::<_, Error>([key, value])
        });
        self.key_value = key_value.transpose()?;
        self.take_queries(both)
    }

    fn clamp_qkv(&mut self) -> Result<(), Error> {
        let Some(limit) = self.parts.model.config.clamp_qkv else {
            return Ok(());
        };
        let stream = self.parts.stream;
        let key_value = self.key_value.iter_mut().flatten();
        for x in self.query.iter_mut().chain(key_value) {
            let low = stream.scalar(-limit, x.dtype())?;
            let high = stream.scalar(limit, x.dtype())?;
            *x = stream.maximum(&stream.minimum(x, &high)?, &low)?;
        }
        Ok(())
    }

    fn norm_heads(&mut self, w: &Layer) -> Result<(), Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let Some(own) = attention(w) else {
            return Ok(());
        };
        let keys = self.key_value.as_mut().map(|[key, _]| key);
        let pairs = [
            (self.query.as_mut(), &own.query_norm),
            (keys, &own.key_norm),
        ];
        for (x, weight) in pairs {
            if let (Some(x), Some(weight)) = (x, weight) {
                *x = stream.rms_norm(x, weight, eps)?;
            }
        }
        Ok(())
    }

    fn norms_heads(&self, w: &Layer) -> bool {
        attention(w).is_some_and(|own| own.query_norm.is_some())
    }

    fn norm_values(&mut self, w: &Layer) -> Result<(), Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let weight = attention(w).and_then(|own| own.value_norm.as_ref());
        if let (Some([_, value]), Some(weight)) = (&mut self.key_value, weight) {
            *value = stream.rms_norm(value, weight, eps)?;
        }
        Ok(())
    }

    fn norm_projections(&mut self, w: &Layer) -> Result<(), Error> {
        self.norm_over_heads(attention(w))
    }

    fn rotate(&mut self, _: usize) -> Result<(), Error> {
        self.turned.clear();
        let Some(query) = self.query.take() else {
            return Ok(());
        };
        let query = self.grown(query)?;
        let key_value = self.key_value.take();
        self.decoded = match self.decoding() {
            Some(decoding) => {
                let (stream, at) = (self.parts.stream, &decoding.positions);
                let roped = |x: &Array| self.roped_each(&decoding.turned(stream, x)?, at);
                let both = |[key, value]: &[Array; 2]| {
                    Ok::<_, Error>([roped(key)?, decoding.turned(stream, value)?])
                };
                Some(Turned {
                    query: Some(roped(&query)?),
                    key_value: key_value.as_ref().map(both).transpose()?,
                })
            }
            None => None,
        };
        let (mut first, mut first_query) = (0, 0);
        for (i, s) in self.batch.sequences.iter().enumerate() {
            let (n, at) = (s.tokens.len() as i32, s.position as i32);
            let queries = self.n_queries(i) as i32;
            if !self.decoding().is_some_and(|decoding| decoding.has(i)) {
                let own = || self.turned(&query, first_query, queries);
                let own = || self.roped(&own()?, at + n - queries);
                let query = (queries > 0).then(own).transpose()?;
                let own = key_value.as_ref().map(|[key, value]| {
                    let key = self.roped(&self.turned(key, first, n)?, at)?;
                    Ok::<_, Error>([key, self.turned(value, first, n)?])
                });
                let key_value = own.transpose()?;
                self.turned.push((i, Turned { query, key_value }));
            }
            first += n;
            first_query += queries;
        }
        Ok(())
    }

    fn attend(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let turned = std::mem::take(&mut self.turned);
        let (stream, held) = (self.parts.stream, self.held(index));
        let keeper = match self.layer().0.cache {
            LayerCache::Of(of) => self.held(of),
            _ => held,
        };
        let kind = self.parts.constants.span_kind_of[index];
        for (i, own) in &turned {
            if let Some([k, v]) = &own.key_value {
                let span = &self.spans[*i][kind];
                self.parts.cache.write(stream, held, span, [k, v])?;
            }
        }
        let sinks = attention(w).and_then(|own| own.sinks.as_ref());
        let decoded = self.decoded.take();
        let decoded = decoded.map(|decoded| self.decoded_attention(decoded, keeper, sinks));
        let of = |(i, own): &(usize, Turned)| {
            let query = own.query.as_ref();
            query.map(|query| self.attention(*i, keeper, query, sinks))
        };
        let parts = decoded.into_iter().chain(turned.iter().filter_map(of));
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        self.attended = match (self.as_rows(&parts)?, self.decoding()) {
            (Some(rows), Some(decoding)) => Some(decoding.in_order(stream, rows)?),
            (rows, _) => rows,
        };
        self.keep_output_rows()
    }

    fn project_latent(&mut self, w: &Layer) -> Result<(), Error> {
        self.latent_queries(w)
    }

    fn select_positions(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.index_rows(w, index)
    }

    fn attend_latent(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.latent_attention(w, index)?;
        self.keep_output_rows()
    }

    fn gate_attention(&mut self, _: &Layer) -> Result<(), Error> {
        let stream = self.parts.stream;
        let Some(gates) = self.gates.take() else {
            return Ok(());
        };
        if let Some(attended) = self.attended.take() {
            let gates = stream.reshape(&stream.sigmoid(&gates)?, &attended.shape())?;
            self.attended = Some(stream.multiply(&attended, &gates)?);
        }
        Ok(())
    }

    fn is_delta_net(&self, _: &Layer) -> bool {
        matches!(self.layer().0.cache, LayerCache::Delta(_))
    }

    fn project_delta_net(&mut self, w: &Layer) -> Result<(), Error> {
        self.net_rows(w)
    }

    fn delta_net(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.read_net(w, index)?;
        self.keep_output_rows()
    }

    fn project_attention(&mut self, w: &Layer) -> Result<(), Error> {
        let attended = self.attended.take();
        let cut = &self.layer().1.attention;
        self.sum(attended.as_ref(), &w.attention_output, cut)
    }

    fn norm_delta(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.post_attention_norm.as_ref(),
            Half::FeedForward => w.post_ffn_norm.as_ref(),
            Half::ParallelExperts => Some(&beside(w).after),
        };
        let weight = weight.expect("loaded for this family");
        let eps = self.parts.model.config.norm_eps;
        self.delta = self.parts.stream.rms_norm(&self.delta, weight, eps)?;
        Ok(())
    }

    fn scale_delta(&mut self) -> Result<(), Error> {
        let scale = self.parts.model.config.residual_scale;
        if scale != 1.0 {
            let scale = self.parts.stream.scalar(scale, self.delta.dtype())?;
            self.delta = self.parts.stream.multiply(&self.delta, &scale)?;
        }
        Ok(())
    }

    fn add_delta(&mut self) -> Result<(), Error> {
        self.residual = self.parts.stream.add(&self.residual, &self.delta)?;
        Ok(())
    }

    fn has_experts(&self, w: &Layer) -> bool {
        w.experts.is_some()
    }

    fn experts(&mut self, w: &Layer) -> Result<(), Error> {
        let own = w.experts.as_ref().expect("the family asked");
        let part = self.expert_part(own)?;
        self.delta = self.sum_parts(&part)?;
        Ok(())
    }

    fn set_aside(&mut self, w: &Layer) -> Result<(), Error> {
        let (weight, eps) = (&beside(w).dense, self.parts.model.config.norm_eps);
        self.aside = Some(self.parts.stream.rms_norm(&self.delta, weight, eps)?);
        Ok(())
    }

    fn add_aside(&mut self) -> Result<(), Error> {
        if let Some(aside) = self.aside.take() {
            self.delta = self.parts.stream.add(&self.delta, &aside)?;
        }
        Ok(())
    }

    fn add_per_layer(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.add_own_embeddings(w, index)
    }

    fn scale_residual(&mut self, w: &Layer) -> Result<(), Error> {
        if let Some(scale) = &w.output_scale {
            self.residual = self.parts.stream.multiply(&self.residual, scale)?;
        }
        Ok(())
    }

    fn project_gate_up(&mut self, w: &Layer) -> Result<(), Error> {
        self.gate_up = match &dense(w).gate_up {
            Some([gate, up]) => Some([self.product(gate, &self.x)?, self.product(up, &self.x)?]),
            None => None,
        };
        Ok(())
    }

    fn activate(&mut self) -> Result<(), Error> {
        let Some([gate, up]) = self.gate_up.take() else {
            return Ok(());
        };
        let (gates, stream) = (&self.parts.constants.gates, self.parts.stream);
        self.hidden = Some(gates.hidden(stream, &gate, &up)?);
        Ok(())
    }

    fn project_down(&mut self, w: &Layer) -> Result<(), Error> {
        let hidden = self.hidden.take();
        let cut = self.layer().1.dense();
        self.sum(hidden.as_ref(), &dense(w).down, cut)
    }
}

/// Elements of a head's query, with its gate where it has one.
const fn query_dim(shape: &LayerShape) -> usize {
    if shape.gated {
        2 * shape.head_dim
    } else {
        shape.head_dim
    }
}

/// The weights of attention; none for a rank without heads.
const fn attention(w: &Layer) -> Option<&weights::Attention> {
    match &w.mixer {
        Mixer::Attention(own) => Some(own),
        _ => None,
    }
}

/// # Panics
/// If the layer has experts only.
const fn dense(w: &Layer) -> &weights::Dense {
    w.dense.as_ref().expect("a layer with experts only")
}

/// # Panics
/// If the layer has no experts parallel to its feed-forward.
const fn beside(w: &Layer) -> &weights::Beside {
    w.beside.as_ref().expect("loaded for this family")
}
