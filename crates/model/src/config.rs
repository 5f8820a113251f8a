//! The checked shape of a model: sizes, layers, attention, experts and rotary embeddings.
//!
//! [`Config::read`] builds it from a GGUF file or a `config.json`; `families::fields` reads the
//! single fields. Every backend and the planner work from it. It holds no weights.

mod compressed;
mod experts;
mod latent;
mod layer;
mod ngrams;
mod streams;

use std::borrow::Cow;

use paceline_tensor::LayerStore;

use crate::families::{ConfigFields, ModelFamily, unknown_fields};
use crate::rope::Rope;
use crate::{Error, LayerRole, ModelSource, Role};

pub use compressed::{Compressed, KeyRuns};
pub use experts::{CLAMP_SLOPE, CompressedExperts, ExpertGroups, Experts, Gating, LEAST_SUM};
pub(crate) use experts::{MAX_GROUPS, MAX_USED};
pub use latent::{Indexer, Latent, PoolIndexer, PositionScaling, Selection};
pub(crate) use layer::MAX_TAPS;
pub(crate) use layer::entries;
pub use layer::{Activation, DeltaNet, HeadOrder, LayerCache, LayerShape, store};
pub(crate) use ngrams::{
    MAX_COLUMNS, MAX_LEAST_ROWS, MAX_LONGEST, MAX_NGRAM_HEADS, MAX_TABLES, pcg_factors,
    primes_from, split_mix_factors,
};
pub use ngrams::{NgramTable, Ngrams};
pub use streams::{Constraint, StreamRule, Streams};
pub(crate) use streams::{MAX_BLOCKS, MAX_STREAMS};

/// The shape of a model. Every number is checked to be computable.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Family: selects the layer code.
    pub family: ModelFamily,
    /// Length of the residual stream (C).
    pub width: usize,
    /// Several residual streams, mixed by hyper-connections; `None` for one.
    pub streams: Option<Streams>,
    /// Query heads of a layer, unless its [`LayerShape`] says otherwise.
    pub heads: usize,
    /// Key and value heads, as `heads`.
    pub kv_heads: usize,
    /// Size of a head, as `heads`; of a key that all heads share.
    pub head_dim: usize,
    /// Latent attention, as `heads`.
    pub latent: Option<Latent>,
    /// Longest context of a file that lacks the weights of its model's indexer, which would select
    /// this number of positions; `None` for other files.
    pub indexed: Option<usize>,
    /// Clamp of dense feed-forwards' gates, in place of the activation (MiniMax M3).
    pub dense_clamp: Option<f32>,
    /// Width of the feed-forward, as `heads`.
    pub ffn: usize,
    /// Columns of a leaf of the feed-forward's sum. They are at least 128 and whole blocks of every
    /// layer's down projection, doubled until there are at most 32 leaves. A tensor split cuts the
    /// feed-forward there. Smaller leaves split more evenly (SmolLM2's 1536 columns give 12),
    /// larger ones cost fewer additions.
    pub ffn_leaf: usize,
    /// Rows of the embedding (V).
    pub vocab: usize,
    /// Training context in positions.
    pub context: usize,
    /// Epsilon of norms: added to the mean square, or to the variance in norms that subtract the
    /// mean.
    pub norm_eps: f32,
    /// Added to every norm weight: 1 for gemma in the Hugging Face layout, otherwise 0.
    pub norm_offset: f32,
    /// Factor of embeddings.
    pub embedding_scale: f32,
    /// Factor of each half's output before the residual (Granite).
    pub residual_scale: f32,
    /// Factor of logits, in the weights of the output norm (Granite).
    pub logit_scale: f32,
    /// Growth of queries with their position, without latent attention (Ministral 3).
    pub query_growth: Option<PositionScaling>,
    /// Whether the output head is the embedding; `None` if that depends on the file having an
    /// output tensor.
    pub tied: Option<bool>,
    /// Whether heads have norms, in families that vary; `None` if that depends on the file having
    /// the weights.
    pub head_norms: Option<bool>,
    pub activation: Activation,
    /// Rotary embeddings in use.
    pub ropes: Vec<Rope>,
    pub layers: Vec<LayerShape>,
    /// Width of the per-layer embeddings (P); 0 for none.
    pub per_layer: usize,
    /// Rows of the per-layer embeddings; later tokens have those of token 0.
    pub per_layer_vocab: usize,
    /// Memory of n-grams; `None` without.
    pub ngrams: Option<Ngrams>,
    /// Soft cap of attention scores, as `softcap` (Gemma 2); `None` for no cap.
    pub attention_cap: Option<f32>,
    /// Soft cap of the logits: `cap * tanh(z / cap)`; `None` for no cap.
    pub softcap: Option<f32>,
    /// Clamp of queries, keys and values before rotation; `None` without.
    pub clamp_qkv: Option<f32>,
    /// Whether a position attends to later ones too, as in embedding models. A layer's window then
    /// counts positions to one side.
    pub bidirectional: bool,
    /// Fields of `config.json` that no reader knows and that may change the computation, for a
    /// warning. GGUF files with unknown keys are refused.
    pub unknown_fields: Vec<String>,
}

/// Largest accepted sizes: several times the largest published models, small enough that their
/// products cannot overflow 64 bits.
pub(crate) const MAX_LAYERS: u64 = 1 << 10;
pub(crate) const MAX_WIDTH: u64 = 1 << 18;
pub(crate) const MAX_HEADS: u64 = 1 << 12;
pub(crate) const MAX_CONTEXT: u64 = 1 << 27;

impl Config {
    /// `layers` without those that the model lacks, in ascending order. As many as it has stands
    /// for the residual stream after the output norm.
    pub fn captures(&self, layers: &[usize]) -> Vec<usize> {
        let last = self.layers.len();
        let mut layers: Vec<usize> = layers.iter().copied().filter(|it| *it <= last).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Reads the configuration of an opened model.
    ///
    /// # Errors
    /// [`Error::Architecture`] for a family that is not supported. Other variants name the field
    /// that is missing, of another type, or out of range.
    pub fn read(source: &ModelSource) -> Result<Self, Error> {
        let fields = ConfigFields::of(source)?;
        let family = fields.family()?;
        let mut config = family.config(&fields)?;
        fields.check_unread(&config)?;
        if let Some(tied) = outer_tied(source) {
            config.tied = Some(tied);
        }
        if family.may_correct_choices() {
            config.find_corrections(source)?;
        }
        if family.has_delta_nets() {
            config.find_norm_form(source)?;
        }
        config.unknown_fields = unknown_fields(source);
        config.find_indexer(source);
        let widest = config.layers.iter().map(|layer| layer.ffn).max();
        let widest = widest.unwrap_or(config.ffn);
        config.ffn_leaf = ffn_leaf(widest, longest_down_block(source, &config));
        Ok(config)
    }

    /// Whether `source` is a decoder whose positions attend to later ones too.
    pub(crate) fn is_bidirectional(source: &ModelSource) -> bool {
        let fields = ConfigFields::of(source);
        fields.is_ok_and(|fields| fields.is_bidirectional().is_ok_and(|is| is))
    }

    /// Fields shared by all families; the caller fills `layers` and `ropes`.
    pub(crate) fn base(family: ModelFamily, fields: &ConfigFields<'_>) -> Result<Self, Error> {
        if !family.has_experts() {
            fields.refuse_experts()?;
        }
        fields.check_activation(family.activation())?;
        let width = fields.size("embedding_length", "hidden_size", 1, MAX_WIDTH)?;
        let heads = fields.size("attention.head_count", "num_attention_heads", 1, MAX_HEADS)?;
        let has_latent = family.has_latent_attention();
        let latent = has_latent.then(|| fields.latent()).transpose()?;
        let n_layers = match family {
            ModelFamily::NemotronH => fields.nemotron_layers()?.len(),
            _ => fields.size("block_count", "num_hidden_layers", 1, MAX_LAYERS)?,
        };
        let (kv_heads, head_dim) = match latent {
            Some(latent) => (vec![1; n_layers], latent.key_dim()),
            None => Self::kv_heads(family, fields, n_layers, (heads, width))?,
        };
        let ffns = fields.ffns(family, n_layers)?;
        let context = fields.size("context_length", "max_position_embeddings", 1, MAX_CONTEXT)?;
        let most = |list: &[usize]| list.iter().copied().max().unwrap_or(0);
        let mut config = Self {
            family,
            width,
            streams: None,
            heads,
            kv_heads: most(&kv_heads),
            head_dim,
            latent,
            indexed: None,
            dense_clamp: None,
            ffn: most(&ffns),
            ffn_leaf: 0, // set by `read`, from the types of the weights
            vocab: fields.vocab()?,
            context: fields.scaled_context(context)?,
            norm_eps: fields.norm_eps(family)?,
            norm_offset: 0.0,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            query_growth: None,
            activation: family.activation(),
            tied: fields.tied(family)?,
            head_norms: Some(family.norms_heads()),
            ropes: Vec::new(),
            layers: Vec::new(),
            per_layer: 0,
            per_layer_vocab: fields.vocab()?,
            ngrams: None,
            attention_cap: None,
            softcap: None,
            clamp_qkv: None,
            bidirectional: false,
            unknown_fields: Vec::new(),
        };
        config.layers = vec![config.usual_layer(); n_layers];
        for (i, layer) in config.layers.iter_mut().enumerate() {
            layer.ffn = ffns[i];
            layer.kv_heads = kv_heads[i];
        }
        config.check_heads(fields)?;
        Ok(config)
    }

    /// KV heads of each layer and the head size, for attention without latent keys.
    fn kv_heads(
        family: ModelFamily,
        fields: &ConfigFields<'_>,
        n_layers: usize,
        (heads, width): (usize, usize),
    ) -> Result<(Vec<usize>, usize), Error> {
        let names = ("attention.head_count_kv", "num_key_value_heads");
        // GGUF files have 0 for layers without attention.
        let few_attend = family.has_short_convs() || family == ModelFamily::NemotronH;
        let sizes = (u64::from(!few_attend), MAX_HEADS);
        let kv_heads = match family {
            ModelFamily::NemotronH => fields.opt_largest(names, sizes)?.map(|n| vec![n; n_layers]),
            _ => fields.opt_sizes(names, n_layers, sizes)?,
        };
        let head_dim = fields.opt_size("attention.key_length", "head_dim", 1, MAX_WIDTH)?;
        let kv_heads = kv_heads.unwrap_or_else(|| vec![heads; n_layers]);
        Ok((kv_heads, head_dim.unwrap_or(width / heads)))
    }

    /// Sets whether routers have choice biases, by whether the file has the tensors.
    fn find_corrections(&mut self, source: &ModelSource) -> Result<(), Error> {
        let family = self.family;
        for (i, layer) in self.layers.iter_mut().enumerate() {
            if let Some(experts) = &mut layer.experts {
                let role = Role::Layer(i, LayerRole::RouterChoice);
                experts.corrected = source.opt_weight(family, role)?.is_some();
            }
        }
        Ok(())
    }

    /// Limits the context of a file without an indexer's weights to what it would select.
    fn find_indexer(&mut self, source: &ModelSource) {
        let Some(Selection::Own(indexer)) = self.latent.map(|latent| latent.selection) else {
            return;
        };
        let own = |layer: &LayerShape| layer.latent.is_some_and(|of| of.selection.is_own());
        let layer = self.layers.iter().position(own).unwrap_or(0);
        let role = Role::Layer(layer, LayerRole::IndexerKey);
        if source.has_any(self.family, role) {
            return;
        }
        self.indexed = Some(indexer.top_k);
        self.context = self.context.min(indexer.top_k);
        let layers = self.layers.iter_mut().map(|layer| &mut layer.latent);
        for latent in layers.chain([&mut self.latent]).flatten() {
            *latent = latent.without_selection();
        }
    }

    /// MLX folders of delta nets store norm weights as they are, not as offsets from 1. The shape
    /// of the convolution identifies these folders: the taps precede the dimension 1.
    fn find_norm_form(&mut self, source: &ModelSource) -> Result<(), Error> {
        let is_net = |layer: &LayerShape| matches!(layer.cache, LayerCache::Delta(_));
        let Some(layer) = self.layers.iter().position(is_net) else {
            return Ok(());
        };
        let conv = source.opt_weight(self.family, Role::Layer(layer, LayerRole::DeltaConv))?;
        let turned = |shape: &[usize]| matches!(shape, [_, taps, 1] if *taps > 1);
        if conv.is_some_and(|conv| turned(&conv.shape)) {
            self.norm_offset = 0.0;
        }
        Ok(())
    }

    /// A full-attention layer of the model's sizes.
    pub(crate) fn usual_layer(&self) -> LayerShape {
        LayerShape {
            cache: LayerCache::Rows,
            window: None,
            rope: 0,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.latent.map_or(self.head_dim, |latent| latent.rank),
            query_scale: 1.0 / self.head_dim_root(),
            gated: false,
            ffn: self.ffn,
            gate_cutoff: None,
            experts: None,
            latent: self.latent,
            pooled: None,
            dense_beside: false,
            value_norm: false,
            keys_as_values: false,
        }
    }

    fn check_heads(&self, fields: &ConfigFields<'_>) -> Result<(), Error> {
        let value = |field, got: usize, expected| {
            Err(Error::Value {
                field,
                got: got.to_string(),
                expected: Cow::Borrowed(expected),
            })
        };
        if !self.heads.is_multiple_of(self.kv_heads) {
            return value(
                "number of KV heads",
                self.kv_heads,
                "a divisor of the number of heads",
            );
        }
        if !self.head_dim.is_multiple_of(16) || self.head_dim == 0 {
            return value("head size", self.head_dim, "a multiple of 16");
        }
        let value_dim = fields.opt_size("attention.value_length", "v_head_dim", 1, MAX_WIDTH)?;
        let value_dim = value_dim.filter(|_| self.latent.is_none());
        if value_dim.is_some_and(|dim| dim != self.head_dim) {
            return value(
                "size of a value head",
                value_dim.unwrap_or(0),
                "the size of a key head",
            );
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps.is_finite()) {
            let got = self.norm_eps.to_string();
            return Err(Error::Value {
                field: "norm epsilon",
                got,
                expected: Cow::Borrowed("0 or more"),
            });
        }
        Ok(())
    }

    /// Elements of the residual of a position: all of its streams.
    pub const fn residual_width(&self) -> usize {
        match self.streams {
            Some(streams) => streams.count * self.width,
            None => self.width,
        }
    }

    /// Values of a position that a stage sends the next one. They are its streams, `captures`
    /// captured inputs of layers, and weights of streams for the next half.
    pub const fn sent_width(&self, captures: usize) -> usize {
        let late = match self.streams {
            Some(Streams {
                rule: StreamRule::Constrained(Constraint { is_late: true, .. }),
                count,
                ..
            }) => count,
            _ => 0,
        };
        self.residual_width() * (1 + captures) + late
    }

    /// Number of weights, without norms.
    pub fn parameters(&self, tied: bool) -> u64 {
        let tables = if tied { 1 } else { 2 };
        let layers: u64 = self.layers.iter().map(|l| l.parameters(self.width)).sum();
        let (width, n) = (self.per_layer as u64, self.layers.len() as u64);
        let per_layer = n * width * (3 * self.width + self.per_layer_vocab) as u64;
        let streams = self.streams.map_or(0, |of| self.stream_parameters(of));
        let ngrams = self.ngrams.iter().flat_map(|of| {
            let matrices = (self.residual_width() + self.width) * of.width();
            let each = move |table: &NgramTable| matrices + table.rows * of.dim;
            of.tables.iter().map(each)
        });
        let ngrams = ngrams.sum::<usize>() as u64;
        let ends = tables * self.width as u64 * self.vocab as u64;
        layers + streams as u64 + per_layer + ngrams + ends
    }

    /// Weights of the residual streams, without norms.
    const fn stream_parameters(&self, of: Streams) -> usize {
        let (each, all, layers) = (2 * of.rank, of.count * self.width, self.layers.len());
        match of.rule {
            StreamRule::Gated => (2 * layers * (each + of.count) + each) * all,
            StreamRule::Alternating => {
                let mixes = (of.count + 1) * of.count * of.count;
                let ends = 2 * (of.count - 1) * self.width * self.width;
                layers * ((each + of.count) * self.width + mixes) + ends
            }
            StreamRule::Constrained(constraint) => {
                let head = if constraint.weighs_head { of.count } else { 0 };
                (2 * layers * (2 + of.count) * of.count + head) * all
            }
            StreamRule::Attended { .. } => (2 * layers + 1) * self.width,
        }
    }

    /// As [`LayerShape::looks_back`], for the furthest reader of the layer's cache.
    pub(crate) fn looks_back(&self, layer: usize) -> Option<usize> {
        let of = self.layers[layer].keeps_in(layer);
        let users = self.layers.iter().enumerate();
        let users = users.filter(|(i, shape)| shape.keeps_in(*i) == of);
        let mut backs = users.map(|(_, shape)| shape.looks_back());
        let ngrams = self.ngrams.as_ref().filter(|of| of.table(layer).is_some());
        let first = backs.next().flatten();
        let first = first.map(|back| ngrams.map_or(back, |of| back.max(of.looks_back())));
        backs.fold(first, |a, b| Some(a?.max(b?)))
    }

    /// Cache of a layer's memory of n-grams, in pages of the layer's kind, behind all layers and
    /// their compressed keys.
    pub(crate) fn ngram_store(&self, layer: usize) -> LayerStore {
        let of = self.ngrams.as_ref().filter(|of| of.table(layer).is_some());
        let streams = self.residual_width() / self.width;
        of.map_or(LayerStore::Nothing, |of| of.store(streams, self.width))
    }

    /// Whether a pipeline may be cut before a layer: no later layer uses the cache or the selection
    /// of an earlier one.
    pub fn can_cut(&self, before: usize) -> bool {
        let latent = self.layers.get(before).and_then(|layer| layer.latent);
        if latent.is_some_and(|latent| latent.selection == Selection::Before) {
            return false;
        }
        let behind = || self.layers.iter().enumerate().skip(before);
        let mut runs = behind().filter_map(|(_, shape)| match shape.cache {
            LayerCache::Compressed(of) => of.runs,
            _ => None,
        });
        let chooses = runs.clone().find(|runs| runs.index_dim > 0);
        chooses.is_none_or(|runs| runs.indexer.is_some())
            && runs.all(|runs| runs.of.is_none_or(|of| of >= before))
            && behind().all(|(i, shape)| shape.keeps_in(i) >= before)
    }

    /// Whether all layers have the model's sizes and caches of their own.
    pub fn is_uniform(&self) -> bool {
        self.latent.is_none()
            && !self.family.norms_projections()
            && (0..self.layers.len())
                .all(|layer| self.is_usual(layer) && !self.layers[layer].value_norm)
    }

    /// Whether a layer has the model's sizes and matrices, and its own KV cache.
    pub fn is_usual(&self, layer: usize) -> bool {
        let layer = self.layers[layer];
        let usual = LayerShape {
            window: layer.window,
            rope: layer.rope,
            query_scale: layer.query_scale,
            value_norm: layer.value_norm,
            gate_cutoff: layer.gate_cutoff,
            ..self.usual_layer()
        };
        layer == usual
    }

    /// Checks that every layer can be computed.
    ///
    /// # Errors
    /// [`Error::Layer`].
    pub(crate) fn check_layers(&self) -> Result<(), Error> {
        for (layer, shape) in self.layers.iter().enumerate() {
            let bad = |what| Err(Error::Layer { layer, what });
            let sizes = [shape.head_dim, shape.value_dim];
            if sizes.iter().any(|n| *n == 0 || !n.is_multiple_of(16)) {
                return bad("the size of a head is not a multiple of 16");
            }
            if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
                return bad("the KV heads do not divide the heads");
            }
            let [own, all] = [shape.latent, self.latent].map(|l| l.map(Latent::without_selection));
            let attends = shape.cache == LayerCache::Rows;
            if attends && own != all || own.is_some() && !self.fits_latent(shape) {
                return bad("its latent attention is not the model's");
            }
            let taps = match shape.cache {
                LayerCache::Delta(net) => net.taps,
                LayerCache::Conv(taps) => taps,
                _ => 1,
            };
            if !(1..=MAX_TAPS).contains(&taps) {
                return bad("its convolution looks at no input, or at more than 16");
            }
            let needs_ffn = self.family != ModelFamily::NemotronH;
            if needs_ffn && shape.ffn == 0 || shape.rope >= self.ropes.len() {
                return bad("it has no feed-forward or no rotation");
            }
            let fits = |e: Experts| {
                let chosen = e.used >= 1 && e.used <= e.count.min(MAX_USED) && e.width > 0;
                chosen && e.groups.is_none_or(|groups| groups.fit(e))
            };
            if shape.keys_as_values && shape.head_dim != shape.value_dim {
                return bad("its keys are its values, which are of another size");
            }
            if !shape.experts.is_none_or(fits) {
                return bad("it uses no expert, or more than there are or than its groups have");
            }
            if let LayerCache::Of(of) = shape.cache {
                let of = self.layers[..layer].get(of);
                let heads = |s: &LayerShape| (s.heads, s.kv_heads, s.head_dim, s.value_dim);
                let same = |s: &LayerShape| s.cache == LayerCache::Rows && heads(s) == heads(shape);
                if !of.is_some_and(same) {
                    return bad(
                        "it uses the cache of a layer of other heads, or that is not before",
                    );
                }
            }
        }
        Ok(())
    }

    /// Refuses a `context` beyond the positions that a sparse-attention indexer selects, and models
    /// that generate no text.
    ///
    /// # Errors
    /// [`Error::Indexer`], [`Error::Value`].
    pub fn check_context(&self, context: usize) -> Result<(), Error> {
        if self.bidirectional {
            return Err(Error::Value {
                field: "use_bidirectional_attention",
                got: true.to_string(),
                expected: Cow::Borrowed("false (the model makes embeddings, not text)"),
            });
        }
        match self.indexed.filter(|top_k| context > *top_k) {
            None => Ok(()),
            Some(top_k) => Err(Error::Indexer { context, top_k }),
        }
    }

    /// Whether a layer of latent attention has the cache sizes that the model's heads need.
    fn fits_latent(&self, shape: &LayerShape) -> bool {
        self.latent.is_none_or(|latent| {
            let heads = (shape.heads, shape.kv_heads) == (self.heads, 1);
            let sizes = (shape.head_dim, shape.value_dim) == (latent.key_dim(), latent.rank);
            heads && sizes && shape.cache == LayerCache::Rows
        })
    }

    /// Experts of the first layer that has some.
    pub fn experts(&self) -> Option<Experts> {
        self.layers.iter().find_map(|layer| layer.experts)
    }

    fn head_dim_root(&self) -> f32 {
        (self.head_dim as f32).sqrt()
    }
}

/// Tied embeddings by the `tie_word_embeddings` next to a folder's text part. `None` for a source
/// without such a part or field.
fn outer_tied(source: &ModelSource) -> Option<bool> {
    let ModelSource::Hf(folder) = source else {
        return None;
    };
    folder.config().get("text_config")?;
    folder.config().get("tie_word_embeddings")?.as_bool()
}

/// See [`Config::ffn_leaf`].
const fn ffn_leaf(ffn: usize, block_len: usize) -> usize {
    let mut leaf = if block_len > 128 { block_len } else { 128 };
    while ffn.div_ceil(leaf) > 32 {
        leaf *= 2;
    }
    leaf
}

/// Weights in the longest block of the down projections. A missing weight is reported when it is
/// loaded.
fn longest_down_block(source: &ModelSource, config: &Config) -> usize {
    let len = |layer| {
        let shape: &LayerShape = &config.layers[layer];
        let [.., role] = shape.dense_roles();
        let down = source.block_len(config.family, Role::Layer(layer, role));
        down.unwrap_or(1)
    };
    (0..config.layers.len()).map(len).max().unwrap_or(1)
}
