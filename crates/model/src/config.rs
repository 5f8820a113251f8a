//! What a model file says about its shape.

use std::borrow::Cow;

use paceline_tensor::{PAGE, Recurrence};

use crate::families::{Family, Fields};
use crate::rope::Rope;
use crate::{Error, Part, Role, Source};

/// The function on the gate of the feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `g / (1 + exp(-g))`
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

/// What a layer keeps of the positions before.
#[derive(Clone, Copy, Debug)]
pub enum LayerCache {
    /// Keys and values of each position.
    Rows,
    /// Nothing: its queries see the keys and values of this earlier layer, which keeps rows.
    Of(usize),
    /// A state of fixed size for each KV head.
    State(&'static dyn Recurrence),
    /// The states of a gated delta net.
    Delta(DeltaNet),
}

/// A gated delta net in place of attention: the layer's heads are those of its values, its KV heads
/// those of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNet {
    /// Inputs that the convolution looks at, the newest included: 1 to [`MAX_TAPS`].
    pub taps: usize,
    /// Which value heads share a key head.
    pub order: HeadOrder,
}

/// Which of H value heads belong to which of K key heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// Value head h has key head h K / H: neighbours share one.
    Grouped,
    /// Value head h has key head h mod K, as in GGUF files of Qwen 3.5.
    Interleaved,
}

/// Most inputs of a convolution, four times those of published models: fewer than a page has
/// positions, so that those of the page before are enough.
pub(crate) const MAX_TAPS: usize = 16;

impl PartialEq for LayerCache {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Rows, Self::Rows) => true,
            (Self::Of(a), Self::Of(b)) => a == b,
            (Self::State(a), Self::State(b)) => a.name() == b.name(),
            (Self::Delta(a), Self::Delta(b)) => a == b,
            _ => false,
        }
    }
}

/// Most experts that a row may use: several times those of published models (at most 10).
pub(crate) const MAX_USED: usize = 32;

/// How a router's scores become the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// A softmax over all.
    Softmax,
    /// A sigmoid of each.
    Sigmoid,
    /// A softmax over those chosen.
    OfChosen,
}

/// A mixture of experts in place of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Experts that the router chooses from.
    pub count: usize,
    /// Those that it chooses for each row.
    pub used: usize,
    /// Width of the feed-forward of each.
    pub width: usize,
    /// How scores become weights.
    pub gating: Gating,
    /// Whether the weights of those chosen are divided by their sum.
    pub normalised: bool,
    /// Multiplies the weights of those chosen.
    pub scale: f32,
    /// Whether the choice adds a bias of its own to each weight.
    pub corrected: bool,
    /// Width of the expert that every row has besides; 0 for none.
    pub shared: usize,
    /// Whether that has a gate of its own, or the weight 1.
    pub shared_gate: bool,
    /// The limit of gpt-oss's gate, in place of the model's activation.
    pub clamp: Option<f32>,
}

impl Experts {
    /// Leaves of the sum: the experts, and behind them the shared one.
    pub(crate) fn leaves(&self) -> usize {
        self.count + usize::from(self.shared > 0)
    }
}

/// The shape of a layer. Letters: H query heads, K KV heads, D and E elements of a key and of a
/// value, F the width of the feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerShape {
    /// What it keeps of the positions before.
    pub cache: LayerCache,
    /// How many positions a query sees, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// Which of [`Config::ropes`] turns its queries and keys.
    pub rope: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Key and value heads (K); divides `heads`.
    pub kv_heads: usize,
    /// Size of a query and of a key (D), a multiple of 16; need not be `width / heads`.
    pub head_dim: usize,
    /// Size of a value (E), a multiple of 16.
    pub value_dim: usize,
    /// Multiplies queries.
    pub query_scale: f32,
    /// Whether the query's projection has a gate of each head behind its query, and the sigmoid of
    /// that multiplies what attention gives.
    pub gated: bool,
    /// Width of the feed-forward (F).
    pub ffn: usize,
    /// The experts that it has instead of a feed-forward.
    pub experts: Option<Experts>,
}

impl LayerShape {
    /// Columns of a logical block of the attention output's sum: the fewest whole heads that are a
    /// multiple of 32. A tensor split cuts heads there.
    pub const fn attention_leaf(&self) -> usize {
        let mut leaf = self.value_dim;
        while !leaf.is_multiple_of(32) {
            leaf += self.value_dim;
        }
        leaf
    }

    /// The layer, of which this is number `index`, that keeps what it looks at.
    const fn keeps_in(&self, index: usize) -> usize {
        match self.cache {
            LayerCache::Of(of) => of,
            LayerCache::Rows | LayerCache::State(_) | LayerCache::Delta(_) => index,
        }
    }

    /// Whether it projects keys and values.
    pub(crate) const fn has_kv(&self) -> bool {
        !matches!(self.cache, LayerCache::Of(_))
    }

    /// How many positions before a row's own, itself included, it looks at in the cache; `None` for
    /// all. A state looks at the page before its own, when that begins; that of a delta net keeps it
    /// all along, so that a sequence leaves the state of its last full page to the next one.
    pub(crate) const fn looks_back(&self) -> Option<usize> {
        match self.cache {
            LayerCache::State(_) => Some(2),
            LayerCache::Delta(_) => Some(PAGE + 1),
            LayerCache::Rows | LayerCache::Of(_) => self.window,
        }
    }

    /// Number of weights, norms left out, of a model of this width.
    pub(crate) fn parameters(&self, width: usize) -> u64 {
        let (keys, values) = if self.has_kv() {
            (self.kv_heads, self.kv_heads)
        } else {
            (0, 0)
        };
        let (keys, values) = match self.cache {
            LayerCache::Delta(_) => (
                2 * self.kv_heads * self.head_dim,
                self.heads * (3 * self.value_dim + 2), // of values, their gates, outputs; two gates
            ),
            _ => (
                ((1 + usize::from(self.gated)) * self.heads + keys) * self.head_dim,
                (self.heads + values) * self.value_dim,
            ),
        };
        let ffn = self.experts.map_or(3 * self.ffn, |experts| {
            let gate = usize::from(experts.shared > 0 && experts.shared_gate);
            3 * (experts.count * experts.width + experts.shared) + experts.count + gate
        });
        width as u64 * (keys + values + ffn) as u64
    }
}

/// The shape of a model. Every number was checked to be one that the engine can compute with.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family, which names the layer's code.
    pub family: Family,
    /// Length of the residual stream (C).
    pub width: usize,
    /// Query heads of a layer, unless its [`LayerShape`] says otherwise.
    pub heads: usize,
    /// Key and value heads, as `heads`.
    pub kv_heads: usize,
    /// Size of a head, as `heads`.
    pub head_dim: usize,
    /// Width of the feed-forward, as `heads`.
    pub ffn: usize,
    /// Columns of a logical block of the feed-forward's sum: at least 128 and whole blocks of
    /// every layer's down projection, doubled until there are at most 32. A tensor split cuts the
    /// feed-forward there. Smaller leaves split more evenly (SmolLM2's 1536 columns give 12),
    /// larger ones cost fewer additions.
    pub ffn_leaf: usize,
    /// Rows of the embedding (V).
    pub vocab: usize,
    /// Positions that the model was trained for.
    pub context: usize,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Added to every norm weight: 1 for gemma in the Hugging Face layout, otherwise 0.
    pub norm_offset: f32,
    /// Multiplies embeddings.
    pub embedding_scale: f32,
    /// Whether the output head is the embedding; `None` when it is where the file has no other.
    pub tied: Option<bool>,
    /// Whether heads have norms, where the family does not decide it; `None` when they have where
    /// the file has the weights.
    pub head_norms: Option<bool>,
    /// On the gate of the feed-forward.
    pub activation: Activation,
    /// Rotary embeddings in use.
    pub ropes: Vec<Rope>,
    /// One entry per layer.
    pub layers: Vec<LayerShape>,
}

/// Largest accepted sizes: several times the largest published models, small enough that their
/// products cannot overflow 64 bits.
const MAX_LAYERS: u64 = 1 << 10;
pub(crate) const MAX_WIDTH: u64 = 1 << 18;
pub(crate) const MAX_HEADS: u64 = 1 << 12;
const MAX_CONTEXT: u64 = 1 << 27;

impl Config {
    /// Reads the configuration of an opened model.
    ///
    /// # Errors
    /// [`Error::Architecture`] for a family that is not supported; the other variants name the
    /// field that is missing, of another type, or out of range.
    pub fn read(source: &Source) -> Result<Self, Error> {
        let fields = Fields::of(source)?;
        let family = fields.family()?;
        let mut config = family.config(&fields)?;
        if let Some(tied) = outer_tied(source) {
            config.tied = Some(tied);
        }
        config.ffn_leaf = ffn_leaf(config.ffn, longest_down_block(source, &config));
        Ok(config)
    }

    /// The parts that all families share; `layers` and `ropes` are filled by the caller.
    pub(crate) fn base(family: Family, fields: &Fields<'_>) -> Result<Self, Error> {
        if !family.has_experts() {
            fields.refuse_experts()?;
        }
        fields.check_activation(family.activation())?;
        let width = fields.size("embedding_length", "hidden_size", 1, MAX_WIDTH)?;
        let heads = fields.size("attention.head_count", "num_attention_heads", 1, MAX_HEADS)?;
        let kv_heads = fields
            .opt_size(
                "attention.head_count_kv",
                "num_key_value_heads",
                1,
                MAX_HEADS,
            )?
            .unwrap_or(heads);
        let head_dim = fields
            .opt_size("attention.key_length", "head_dim", 1, MAX_WIDTH)?
            .unwrap_or(width / heads);
        let n_layers = fields.size("block_count", "num_hidden_layers", 1, MAX_LAYERS)?;
        let mut config = Self {
            family,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn: fields.ffn(family)?,
            ffn_leaf: 0, // known with the types of the weights: see `read`
            vocab: fields.vocab()?,
            context: fields.size("context_length", "max_position_embeddings", 1, MAX_CONTEXT)?,
            norm_eps: fields.float("attention.layer_norm_rms_epsilon", "rms_norm_eps")?,
            norm_offset: 0.0,
            embedding_scale: 1.0,
            activation: family.activation(),
            tied: fields.tied(family)?,
            head_norms: Some(family.norms_heads()),
            ropes: Vec::new(),
            layers: Vec::new(),
        };
        config.layers = vec![config.usual_layer(); n_layers];
        config.check_heads(fields)?;
        Ok(config)
    }

    /// A layer of full attention of the model's sizes.
    pub(crate) fn usual_layer(&self) -> LayerShape {
        LayerShape {
            cache: LayerCache::Rows,
            window: None,
            rope: 0,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.head_dim,
            query_scale: 1.0 / self.head_dim_root(),
            gated: false,
            ffn: self.ffn,
            experts: None,
        }
    }

    fn check_heads(&self, fields: &Fields<'_>) -> Result<(), Error> {
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

    /// Number of weights, norms left out.
    pub fn parameters(&self, tied: bool) -> u64 {
        let tables = if tied { 1 } else { 2 };
        let layers: u64 = self.layers.iter().map(|l| l.parameters(self.width)).sum();
        layers + tables * self.width as u64 * self.vocab as u64
    }

    /// As [`LayerShape::looks_back`], as far as any layer looks at what this one looks at.
    pub(crate) fn looks_back(&self, layer: usize) -> Option<usize> {
        let of = self.layers[layer].keeps_in(layer);
        let users = self.layers.iter().enumerate();
        let users = users.filter(|(i, shape)| shape.keeps_in(*i) == of);
        let mut backs = users.map(|(_, shape)| shape.looks_back());
        let first = backs.next().flatten();
        backs.fold(first, |a, b| Some(a?.max(b?)))
    }

    /// Whether a pipeline may be cut before a layer: none behind uses the cache of one before it.
    pub(crate) fn can_cut(&self, before: usize) -> bool {
        let behind = self.layers.iter().enumerate().skip(before);
        behind.fold(true, |can, (i, shape)| can && shape.keeps_in(i) >= before)
    }

    /// Whether all layers have the model's sizes and keep rows of their own.
    pub(crate) fn is_uniform(&self) -> bool {
        let usual = self.usual_layer();
        self.layers.iter().all(|layer| {
            let (window, rope, query_scale) = (layer.window, layer.rope, layer.query_scale);
            *layer
                == LayerShape {
                    window,
                    rope,
                    query_scale,
                    ..usual
                }
        })
    }

    /// Whether layers can be computed as they say.
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
            let taps = |net: DeltaNet| (1..=MAX_TAPS).contains(&net.taps);
            if matches!(shape.cache, LayerCache::Delta(net) if !taps(net)) {
                return bad("its convolution looks at no input, or at more than 16");
            }
            if shape.ffn == 0 || shape.rope >= self.ropes.len() {
                return bad("it has no feed-forward or no rotation");
            }
            let fits = |e: Experts| e.used >= 1 && e.used <= e.count.min(MAX_USED) && e.width > 0;
            if !shape.experts.is_none_or(fits) {
                return bad("it uses no expert, or more than there are");
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

    /// The experts of its layers, where any have them.
    pub(crate) fn experts(&self) -> Option<Experts> {
        self.layers.iter().find_map(|layer| layer.experts)
    }

    fn head_dim_root(&self) -> f32 {
        (self.head_dim as f32).sqrt()
    }
}

/// What a folder says outside of its text part of whether the output head is the embedding.
fn outer_tied(source: &Source) -> Option<bool> {
    let Source::Hf(folder) = source else {
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

/// Weights of the longest block of the down projections. What is missing is reported when it is
/// loaded.
fn longest_down_block(source: &Source, config: &Config) -> usize {
    let len = |layer| {
        let down = source.block_len(config.family, Role::Layer(layer, Part::Down));
        down.unwrap_or(1)
    };
    (0..config.layers.len()).map(len).max().unwrap_or(1)
}
