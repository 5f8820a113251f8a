//! A step on MLX: the operations of the families' layers, as a graph.
//!
//! Nothing is computed while the graph is made. It is cut where this rank must wait for others or
//! they for it. That is before each exchange of a tensor split and at the borders of stages. The
//! last cut is the end, where the logits and the cache are evaluated together. Rows of all
//! sequences go through the products together; attention is by sequence.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::{Batch, Error, LayerCut, LayerShape, LeafCut, Links};

use super::MlxModel;
use super::cache::{Cache, Ring, RingRow, Span, SpanKind};
use super::constants::Constants;
use super::decoding::Decoding;
use super::exchange::{Receive, Way};
use super::gates;
use super::host::Watch;
use super::logits::StepLogits;
use super::matrix::Linear;
use super::weights::{self, Layer, Ring as LayerRing, Summed, Weights};

mod alternating;
mod attention;
mod capped;
mod compressed;
mod convolution;
mod cutoff;
mod delta_net;
mod delta_page;
mod experts;
mod indexer;
mod inputs;
mod latent;
mod layers;
mod output_rows;
mod per_layer;
mod pooled;
mod projections;
mod results;
mod rounded;
mod streams;
mod tokens;

pub(super) use compressed::entry_rows;
use delta_net::NetRows;
pub(super) use delta_page::Triangles;
use inputs::{embed, tokens_of};
pub(super) use inputs::{rows_after, rows_in_cache};
use output_rows::OutputRows;
use projections::joined;
pub(super) use results::RankStep;
use streams::StreamState;

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
    /// `(T, C)`; `(T, S, C)` of several streams.
    pub(super) residual: Array,
    streams: StreamState,
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
    /// `(T, F)` each; gates alone in families without a product of two.
    gate_up: Option<(Array, Option<Array>)>,
    /// `(T, F)`
    hidden: Option<Array>,
    /// `(T, C)`
    delta: Array,
    /// `(T, C)`: output of a dense feed-forward that has parallel experts.
    aside: Option<Array>,
    /// `(T, layers held, P)`: what the layers' own embeddings give, where there are some.
    per_layer: Option<Array>,
    /// `(T, C)` each: captured rows so far, of earlier stages too.
    captured: Vec<Array>,
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
            Some(last) if self.weights.head.is_some() && is_alone && !model.captures_last() => {
                let has_keys = !model.config.layers[last].is_recurrent();
                let kind = has_keys.then(|| constants.span_kinds[constants.span_kind_of[last]]);
                OutputRows::new(self.stream, batch, (lanes, kind))
            }
            _ => Ok(None),
        }
    }

    /// Has the cache grow to the rows of `spans`, and fills the rings of decoding rows.
    fn make_room(
        &mut self,
        batch: &Batch<'_>,
        (spans, decoding): (&[Vec<Span>], Option<&Decoding>),
    ) -> Result<(), Error> {
        let (stream, constants) = (self.stream, self.constants);
        let kinds = &constants.span_kind_of[self.model.shard.layers.clone()];
        let kind = |layer| kinds.get(layer).unwrap_or(&constants.entries_kind);
        let end = |layer: usize| spans.iter().map(|of| of[*kind(layer)].end()).max();
        let growth = self.cache.growth(|layer| end(layer).unwrap_or(0));
        if !growth.is_empty() {
            let grow = || self.cache.grow(stream, &growth);
            self.watch.during(batch.rows(), grow)?;
        }
        let decoded = decoding.into_iter().flat_map(|it| it.ring_rows(batch));
        let decoded: Vec<RingRow<'_>> = decoded.collect();
        let fill = || self.cache.fill_rings(stream, &decoded);
        self.watch.during_part(batch.rows(), fill)
    }

    /// The residual of `n` rows from the stage before, the rows captured there, and what its
    /// streams need. They arrive when the step [settles](Step::settle). So this stage makes its
    /// graph while that one computes.
    fn residual_to_come(&mut self, links: &Links, n: usize) -> Result<Arriving, Error> {
        let (model, stream) = (self.model, self.stream);
        let captures = model.captures_before(model.shard.layers.start);
        let (width, sent) = (
            model.config.residual_width(),
            model.config.sent_width(captures),
        );
        let all = self.receive.residual((stream, links), [1, n * sent])?;
        let part = |first: usize, len: usize, shape: &[i32]| {
            let stop = [1, ((first + len) * n) as i32];
            let part = stream.slice(&all, &[0, (first * n) as i32], &stop)?;
            Ok::<_, Error>(stream.reshape(&part, shape)?)
        };
        let narrow = |part: Array| Ok::<_, Error>(stream.astype(&part, model.dtype)?);
        let rows = [n as i32, width as i32];
        let captured = (1..=captures).map(|nth| narrow(part(nth * width, width, &rows)?));
        let captured = captured.collect::<Result<_, _>>()?;
        let Some(of) = model.config.streams else {
            let (residual, streams) = (narrow(part(0, width, &rows)?)?, StreamState::default());
            return Ok((residual, captured, streams));
        };
        let (count, each) = (of.count as i32, model.config.width as i32);
        let residual = narrow(part(0, width, &[n as i32, count, each])?)?;
        let first = (1 + captures) * width;
        let late = (sent > first).then(|| part(first, of.count, &[n as i32, count, 1]));
        Ok((residual, captured, StreamState::of_stage(late.transpose()?)))
    }
}

/// The residual of a step, captured rows, and what residual streams need.
type Arriving = (Array, Vec<Array>, StreamState);

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
        let rows = rows_in_cache(batch);
        let place = || parts.cache.lanes_of(stream, &rows);
        let lanes = parts.watch.during_part(batch.rows(), place)?;
        let with_ring = |of: &SpanKind| (*of, parts.cache.ring_of(of.kind));
        let span_kinds: Vec<_> = constants.span_kinds.iter().map(with_ring).collect();
        let output_rows = parts.output_rows(batch, &lanes)?;
        let in_lanes = (&*lanes, parts.cache.lanes());
        let decoding = Decoding::new(stream, batch, in_lanes, span_kinds.iter().copied())?;
        let spans = |(i, s): (usize, &paceline_model::BatchSequence<'_>)| {
            let is_decoded = decoding.as_ref().is_some_and(|it| it.has(i));
            let span = |(of, ring): &(SpanKind, Option<Ring>)| {
                let rows = s.rows_of(of.kind);
                if ring.is_some() && is_decoded {
                    return Ok(Span::of_ring(&rows));
                }
                let lane = lanes[i].filter(|_| of.kind == 0);
                Span::new(stream, &rows, of.window, lane)
            };
            span_kinds.iter().map(span).collect()
        };
        let spans = batch.sequences.iter().enumerate().map(spans);
        let spans = spans.collect::<Result<Vec<Vec<Span>>, Error>>()?;
        parts.make_room(batch, (&spans, decoding.as_ref()))?;
        let (residual, captured, streams) = match &model.links {
            Some(links) if !model.shard.embeds() => parts.residual_to_come(links, batch.rows())?,
            _ => {
                let residual = embed(model, stream, weights, constants, &tokens)?;
                (residual, vec![], StreamState::default())
            }
        };
        let mut step = Self {
            x: residual.clone(),
            delta: residual.clone(),
            residual,
            streams,
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
            captured,
            index: 0,
            parts,
            batch,
            tokens,
            spans,
            decoding,
            output_rows,
        };
        if model.shard.embeds() {
            step.begin_streams(&step.residual.clone())?;
        }
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

    /// Arrays that a layer still adds: the output of a dense feed-forward that has parallel
    /// experts, and those of residual streams.
    pub(super) fn aside(&self) -> impl Iterator<Item = &Array> {
        self.aside.iter().chain(self.streams.arrays())
    }

    /// Captured rows so far.
    pub(super) fn captured(&self) -> &[Array] {
        &self.captured
    }

    /// Runs all layers.
    pub(super) fn layers(&mut self) -> Result<(), Error> {
        let (weights, shard) = (self.parts.weights, &self.parts.model.shard);
        for (index, layer) in shard.layers.clone().zip(&weights.layers) {
            self.index = index;
            if self.parts.model.captures.contains(&index) {
                self.captured.push(self.residual.clone());
            }
            let ring = weights.ring.as_ref().filter(|ring| ring.has(index));
            if let Some(ring) = ring {
                ring.fill(self.parts.stream, (index, layer))?;
            }
            self.parts.model.config.family.layer(self, layer, index)?;
            if let Some(ring) = ring {
                self.compute_streamed((ring, layer))?;
            }
        }
        if let Some((norm, _)) = &weights.head {
            if self.parts.model.captures_last() {
                self.captured.push(self.normed(&self.residual, norm)?);
            }
            let rows = self.residual.shape()[0] as u64;
            self.parts.model.counters.output_rows.add(rows);
        }
        Ok(())
    }

    /// Has the device compute a layer of the ring, and lets go of its weights. The next layers are
    /// read from disk meanwhile.
    fn compute_streamed(&mut self, (ring, layer): (&LayerRing, &Layer)) -> Result<(), Error> {
        let captured = self.captured.clone();
        let own = [self.residual.clone()]
            .into_iter()
            .chain(self.aside().cloned());
        let own: Vec<Array> = own.chain(captured).collect();
        self.eval(&own.iter().collect::<Vec<_>>())?;
        ring.empty(self.parts.stream, layer)
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
        match (x, &w.mine) {
            (Some(x), Some(mine)) => self.product(mine, x),
            _ => self.zero_rows(self.parts.model.dtype),
        }
    }

    /// Zeros (T, C).
    fn zero_rows(&self, dtype: Dtype) -> Result<Array, Error> {
        let shape = [
            self.residual.shape()[0],
            self.parts.model.config.width as i32,
        ];
        Ok(self.parts.stream.zeros(&shape, dtype)?)
    }

    /// Adds the parts (T, C) of all ranks of the stage, in their order, in f32. With one rank it is
    /// that part, in the type of activations.
    fn sum_parts(&mut self, mine: &Array) -> Result<Array, Error> {
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let links = self.parts.model.links.as_ref();
        let Some(links) = links.filter(|links| links.stage.size() > 1) else {
            return Ok(stream.astype(mine, dtype)?);
        };
        let columns = vec![mine.shape()[1] as usize; links.stage.size() as usize];
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
