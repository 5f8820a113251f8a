//! One step on MLX: the operations of the families' layers, as a graph.
//!
//! Nothing is computed while the graph is made. It is cut where this rank must wait for others or
//! they for it: before each exchange of a tensor split, at the borders of stages, and at the end,
//! where the logits and the cache are evaluated together. Rows of all sequences go through the
//! products together; attention is by sequence.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_tensor::RopePairs;

use super::cache::{Cache, Span};
use super::exchange::{Receive, Way};
use super::host::Watch;
use super::weights::{Layer, Linear, Summed, Weights};
use super::{Constants, MlxModel};
use crate::config::Activation;
use crate::families::{Half, LayerStep};
use crate::split::LeafCut;
use crate::step::Batch;
use crate::{Error, Links};

/// Queries, keys and values of one sequence: `(1, heads, rows, D)` each.
type Turned = [Array; 3];

/// A step in progress.
pub(super) struct Step<'a> {
    pub(super) parts: Parts<'a>,
    pub(super) batch: &'a Batch<'a>,
    spans: Vec<Span>,
    /// `(T, C)`
    pub(super) residual: Array,
    /// `(T, C)`
    x: Array,
    /// `(T, H, D)`, `(T, K, D)`, `(T, K, D)`; none for a rank without heads.
    qkv: Option<[Array; 3]>,
    /// Of each sequence.
    turned: Vec<Turned>,
    /// `(T, H D)`
    attended: Option<Array>,
    /// `(T, F)` each
    gate_up: Option<[Array; 2]>,
    /// `(T, F)`
    hidden: Option<Array>,
    /// `(T, C)`
    delta: Array,
}

/// What a step works with.
pub(super) struct Parts<'a> {
    pub(super) model: &'a MlxModel,
    pub(super) stream: &'a Stream,
    pub(super) weights: &'a Weights,
    pub(super) constants: &'a Constants,
    pub(super) cache: &'a mut Cache,
    pub(super) receive: &'a mut Receive,
    pub(super) watch: &'a Watch,
}

impl<'a> Step<'a> {
    /// Starts a step: embeds the tokens or takes the residual from the stage before.
    pub(super) fn new(parts: Parts<'a>, batch: &'a Batch<'a>) -> Result<Self, Error> {
        let Parts {
            model,
            stream,
            weights,
            constants,
            ..
        } = parts;
        let span = |s: &crate::BatchSequence<'_>| {
            let new = s.position..s.position + s.tokens.len();
            Span::new(stream, s.pages, new, &constants.windows)
        };
        let spans = batch.sequences.iter().map(span).collect::<Result<_, _>>()?;
        let residual = match &model.links {
            Some(links) if !model.shard.embeds() => {
                let shape = [batch.rows() as i32, model.config.width as i32];
                let rows = parts.receive.array(stream, &shape, Dtype::F32)?;
                // SAFETY: what read it was evaluated at the end of the step before.
                links.receive_residual(&model.shard, unsafe { rows.as_f32_mut()? })?;
                let way = Way::of_residual(stream, model.dtype)?;
                model.exchanged.add(way, rows.n_bytes() as usize);
                stream.astype(rows, model.dtype)?
            }
            _ => embed(model, stream, weights, constants, batch)?,
        };
        Ok(Self {
            x: residual.clone(),
            delta: residual.clone(),
            residual,
            qkv: None,
            turned: Vec::new(),
            attended: None,
            gate_up: None,
            hidden: None,
            parts,
            batch,
            spans,
        })
    }

    /// Runs all layers.
    pub(super) fn layers(&mut self) -> Result<(), Error> {
        let (weights, shard) = (self.parts.weights, &self.parts.model.shard);
        for (index, layer) in shard.layers.clone().zip(&weights.layers) {
            self.parts.model.config.family.layer(self, layer, index)?;
        }
        Ok(())
    }

    /// Evaluates `arrays` and the cache, watched.
    fn eval(&self, arrays: &[&Array]) -> Result<(), Error> {
        let all = arrays.iter().copied().chain(self.parts.cache.arrays());
        let rows = self.batch.rows();
        Ok(self
            .parts
            .watch
            .during(rows, || self.parts.stream.eval(all))?)
    }

    /// Sends the residual stream (T, C) to the next stage, or turns its wanted rows into logits
    /// (R, V) in `logits` at the leader; returns R there.
    pub(super) fn finish(self, logits: &mut Vec<f32>) -> Result<usize, Error> {
        let Some((norm, head)) = &self.parts.weights.head else {
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
        };
        let mut wanted = Vec::new();
        self.batch.wanted(&mut wanted);
        let (n, all) = (wanted.len(), self.batch.rows());
        if n == 0 {
            self.eval(&[&self.residual])?;
            return Ok(0);
        }
        let rows = if n == all {
            self.residual.clone()
        } else {
            let wanted: Vec<u32> = wanted.iter().map(|row| *row as u32).collect();
            let wanted = self.parts.stream.array_u32(&wanted, &[n as i32])?;
            self.parts.stream.take(&self.residual, &wanted, 0)?
        };
        let normed = self
            .parts
            .stream
            .rms_norm(&rows, norm, self.parts.model.config.norm_eps)?;
        let own = self.parts.stream.rows_f32(&self.product(head, &normed)?)?;
        // The residual too: others may still read what ranks exchanged.
        self.eval(&[&own, &self.residual])?;
        self.gather(n, own.as_f32()?, logits)
    }

    /// Brings the ranks' logits together at the leader.
    fn gather(&self, rows: usize, own: &[f32], logits: &mut Vec<f32>) -> Result<usize, Error> {
        let (shard, vocab) = (&self.parts.model.shard, self.parts.model.config.vocab);
        let Some(links) = self
            .parts
            .model
            .links
            .as_ref()
            .filter(|_| shard.vocab().len() < vocab)
        else {
            logits.clear();
            logits.extend_from_slice(own);
            return Ok(rows);
        };
        logits.resize(if shard.leads() { rows * vocab } else { 0 }, 0.0);
        let mut scratch = vec![0.0; Links::logits_room(shard, rows)];
        links.gather_logits(shard, &self.batch.best(), own, logits, &mut scratch)?;
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
            Some(links) => self.sum_parts(links, x, w)?,
            None => self.part(x, w)?,
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

    /// Adds the parts of all ranks of the stage, in their order, in f32.
    fn sum_parts(&mut self, links: &Links, x: Option<&Array>, w: &Summed) -> Result<Array, Error> {
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let mine = self.part(x, w)?;
        let columns = vec![self.parts.model.config.width; links.stage.size() as usize];
        let parts = self.gather_columns(links, Some(&mine), &columns)?;
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
        let stream = self.parts.stream;
        let columns: Vec<usize> = cut.columns_by_rank().map(|c| c.len()).collect();
        let x = joined(stream, &self.gather_columns(links, x, &columns)?)?;
        let mine = w.mine.as_ref().map(|mine| self.product(mine, &x));
        let mine = mine.transpose()?;
        let outputs = &self.parts.model.shard.outputs;
        let outputs: Vec<usize> = outputs.iter().map(|rows| rows.len()).collect();
        joined(
            stream,
            &self.gather_columns(links, mine.as_ref(), &outputs)?,
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

    /// Attention of one sequence: `(1, H, n, D)`.
    fn attention(&self, sequence: usize, layer: usize, q: &Array) -> Result<Array, Error> {
        let shard = &self.parts.model.shard;
        let window = self.parts.constants.window_of[layer];
        let view = &self.spans[sequence].views[window];
        let [k, v] = self
            .parts
            .cache
            .read(self.parts.stream, layer - shard.layers.start, view)?;
        let scale = self.parts.model.config.layers[layer].query_scale;
        if self.parts.constants.groups.is_empty() {
            return Ok(self
                .parts
                .stream
                .attention([q, &k, &v], scale, view.mask())?);
        }
        // Cut within the query heads of a KV head: each KV head apart.
        let heads = |x: &Array, heads: std::ops::Range<i32>| {
            let shape = x.shape();
            let stop = [1, heads.end, shape[2], shape[3]];
            self.parts.stream.slice(x, &[0, heads.start, 0, 0], &stop)
        };
        let group = |(kv, queries): (usize, &std::ops::Range<i32>)| {
            let kv = kv as i32..kv as i32 + 1;
            let (k, v) = (heads(&k, kv.clone())?, heads(&v, kv)?);
            let q = heads(q, queries.clone())?;
            Ok(self
                .parts
                .stream
                .attention([&q, &k, &v], scale, view.mask())?)
        };
        let groups = self.parts.constants.groups.iter().enumerate();
        let parts = groups.map(group).collect::<Result<Vec<_>, Error>>()?;
        let parts: Vec<&Array> = parts.iter().collect();
        Ok(self.parts.stream.concatenate(&parts, 1)?)
    }
}

/// Parts `(T, n)` side by side.
fn joined(stream: &Stream, parts: &[Array]) -> Result<Array, Error> {
    let parts: Vec<&Array> = parts.iter().collect();
    Ok(stream.concatenate(&parts, 1)?)
}

/// tokens -> residual (T, C)
fn embed(
    model: &MlxModel,
    stream: &Stream,
    weights: &Weights,
    constants: &Constants,
    batch: &Batch<'_>,
) -> Result<Array, Error> {
    let tokens = batch.sequences.iter().flat_map(|s| s.tokens).copied();
    let tokens: Vec<u32> = tokens.collect();
    let tokens = stream.array_u32(&tokens, &[tokens.len() as i32])?;
    let table = weights.embedding.as_ref();
    let table = table.expect("the first stage embeds");
    let rows = table.rows(stream, &tokens, model.dtype)?;
    if model.config.embedding_scale == 1.0 {
        return Ok(rows);
    }
    Ok(stream.multiply(&rows, &constants.embedding_scale)?)
}

impl LayerStep for Step<'_> {
    type Layer = Layer;

    fn norm(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => &w.attention_norm,
            Half::FeedForward => &w.ffn_norm,
            Half::Beside => unreachable!("refused when the model was loaded"),
        };
        let eps = self.parts.model.config.norm_eps;
        self.x = self.parts.stream.rms_norm(&self.residual, weight, eps)?;
        Ok(())
    }

    fn project_qkv(&mut self, w: &Layer) -> Result<(), Error> {
        let (rows, dim) = (
            self.batch.rows() as i32,
            self.parts.model.config.head_dim as i32,
        );
        let project = |linear| {
            let product = self.product(linear, &self.x)?;
            Ok::<_, Error>(self.parts.stream.reshape(&product, &[rows, -1, dim])?)
        };
        self.qkv = match &w.qkv {
            Some([q, k, v]) => Some([project(q)?, project(k)?, project(v)?]),
            None => None,
        };
        Ok(())
    }

    fn norm_heads(&mut self, w: &Layer) -> Result<(), Error> {
        let eps = self.parts.model.config.norm_eps;
        if let Some([q, k, _]) = &mut self.qkv {
            for (x, weight) in [(q, &w.query_norm), (k, &w.key_norm)] {
                let weight = weight.as_ref().expect("loaded for this family");
                *x = self.parts.stream.rms_norm(x, weight, eps)?;
            }
        }
        Ok(())
    }

    fn rotate(&mut self, index: usize) -> Result<(), Error> {
        self.turned.clear();
        let Some([q, k, v]) = self.qkv.take() else {
            return Ok(());
        };
        let rope = self.parts.model.config.layers[index].rope;
        let neighbours = self.parts.model.config.ropes[rope].pairs == RopePairs::Adjacent;
        let periods = &self.parts.weights.periods[rope];
        let mut first = 0;
        for s in self.batch.sequences {
            let (n, at) = (s.tokens.len() as i32, s.position as i32);
            let [q, k, v] = [&q, &k, &v].map(|x| self.turned(x, first, n));
            self.turned.push([
                self.parts.stream.rope(&q?, periods, neighbours, at)?,
                self.parts.stream.rope(&k?, periods, neighbours, at)?,
                v?,
            ]);
            first += n;
        }
        Ok(())
    }

    fn attend(&mut self, _: &Layer, index: usize) -> Result<(), Error> {
        let turned = std::mem::take(&mut self.turned);
        let held = index - self.parts.model.shard.layers.start;
        for ([_, k, v], span) in turned.iter().zip(&self.spans) {
            self.parts
                .cache
                .write(self.parts.stream, held, span, [k, v])?;
        }
        let mut parts = Vec::with_capacity(turned.len());
        for (i, [q, ..]) in turned.iter().enumerate() {
            let attended = self.attention(i, index, q)?;
            let n = attended.shape()[2];
            let rows = self.parts.stream.transpose(&attended, &[0, 2, 1, 3])?;
            parts.push(self.parts.stream.reshape(&rows, &[n, -1])?);
        }
        let parts: Vec<&Array> = parts.iter().collect();
        self.attended = match &parts[..] {
            [] => None,
            [one] => Some((*one).clone()),
            more => Some(self.parts.stream.concatenate(more, 0)?),
        };
        Ok(())
    }

    fn project_attention(&mut self, w: &Layer) -> Result<(), Error> {
        let attended = self.attended.take();
        let cut = &self.parts.model.shard.usual.attention;
        self.sum(attended.as_ref(), &w.attention_output, cut)
    }

    fn norm_delta(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.post_attention_norm.as_ref(),
            Half::FeedForward => w.post_ffn_norm.as_ref(),
            Half::Beside => unreachable!("refused when the model was loaded"),
        };
        let weight = weight.expect("loaded for this family");
        self.delta =
            self.parts
                .stream
                .rms_norm(&self.delta, weight, self.parts.model.config.norm_eps)?;
        Ok(())
    }

    fn add_delta(&mut self) -> Result<(), Error> {
        self.residual = self.parts.stream.add(&self.residual, &self.delta)?;
        Ok(())
    }

    fn norms_heads(&self, _: &Self::Layer) -> bool {
        unreachable!("asked by families with experts")
    }

    fn norm_projections(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("asked by families with experts")
    }

    fn project_latent(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn attend_latent(&mut self, _: &Self::Layer, _: usize) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn gate_attention(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("layers that differ were refused")
    }

    fn is_delta_net(&self, _: &Self::Layer) -> bool {
        false
    }

    fn project_delta_net(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("layers that differ were refused")
    }

    fn delta_net(&mut self, _: &Self::Layer, _: usize) -> Result<(), Error> {
        unreachable!("layers that differ were refused")
    }

    fn has_experts(&self, _: &Self::Layer) -> bool {
        false
    }

    fn experts(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn norm_values(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn set_aside(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn add_aside(&mut self) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn add_per_layer(&mut self, _: &Self::Layer, _: usize) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn scale_residual(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("refused when the model was loaded")
    }

    fn project_gate_up(&mut self, w: &Layer) -> Result<(), Error> {
        self.gate_up = match &w.gate_up {
            Some([gate, up]) => Some([self.product(gate, &self.x)?, self.product(up, &self.x)?]),
            None => None,
        };
        Ok(())
    }

    fn activate(&mut self) -> Result<(), Error> {
        let stream = self.parts.stream;
        let Some([gate, up]) = self.gate_up.take() else {
            return Ok(());
        };
        let gate = match self.parts.model.config.activation {
            Activation::Silu => stream.multiply(&gate, &stream.sigmoid(&gate)?)?,
            Activation::GeluTanh => self.parts.constants.gelu.apply(stream, &gate)?,
        };
        self.hidden = Some(stream.multiply(&gate, &up)?);
        Ok(())
    }

    fn project_down(&mut self, w: &Layer) -> Result<(), Error> {
        let hidden = self.hidden.take();
        let cut = &self.parts.model.shard.usual.feed_forward;
        self.sum(hidden.as_ref(), &w.down, cut)
    }
}

/// The tanh form of GELU, in the order of operations of MLX's `nn.gelu_approx`.
#[derive(Debug)]
pub(super) struct Gelu {
    cubed: Array,
    half: Array,
    one: Array,
    three: Array,
    root: Array,
}

impl Gelu {
    pub(super) fn new(stream: &Stream, dtype: Dtype) -> Result<Self, Error> {
        let scalar = |value: f64| stream.scalar(value as f32, dtype);
        Ok(Self {
            cubed: scalar(0.044_715)?,
            half: scalar(0.5)?,
            one: scalar(1.0)?,
            three: scalar(3.0)?,
            root: scalar(std::f64::consts::FRAC_2_PI.sqrt())?,
        })
    }

    fn apply(&self, stream: &Stream, x: &Array) -> Result<Array, Error> {
        let cubed = stream.multiply(&self.cubed, &stream.power(x, &self.three)?)?;
        let inner = stream.multiply(&self.root, &stream.add(x, &cubed)?)?;
        let outer = stream.add(&self.one, &stream.tanh(&inner)?)?;
        let half = stream.multiply(&self.half, x)?;
        Ok(stream.multiply(&half, &outer)?)
    }
}
