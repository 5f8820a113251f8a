//! What a model file says about its shape.

use std::borrow::Cow;

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

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// How many positions a query sees, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// Which of [`Config::ropes`] turns its queries and keys.
    pub rope: usize,
}

/// The shape of a model. Every number was checked to be one that the engine can compute with.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family, which names the layer's code.
    pub family: Family,
    /// Length of the residual stream (C).
    pub width: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Key and value heads (K); divides `heads`.
    pub kv_heads: usize,
    /// Size of a head (D), a multiple of 16; need not be `width / heads`.
    pub head_dim: usize,
    /// Width of the feed-forward (F).
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
    /// Multiplies queries.
    pub query_scale: f32,
    /// Whether the output head is the embedding; `None` when it is where the file has no other.
    pub tied: Option<bool>,
    /// On the gate of the feed-forward.
    pub activation: Activation,
    /// Rotary embeddings in use.
    pub ropes: Vec<Rope>,
    /// One entry per layer.
    pub layers: Vec<LayerKind>,
}

/// Largest accepted sizes: several times the largest published models, small enough that their
/// products cannot overflow 64 bits.
const MAX_LAYERS: u64 = 1 << 10;
const MAX_WIDTH: u64 = 1 << 18;
const MAX_HEADS: u64 = 1 << 12;
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
        config.ffn_leaf = ffn_leaf(config.ffn, longest_down_block(source, &config));
        Ok(config)
    }

    /// The parts that all families share; `layers` and `ropes` are filled by the caller.
    pub(crate) fn base(family: Family, fields: &Fields<'_>) -> Result<Self, Error> {
        fields.refuse_experts()?;
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
        let config = Self {
            family,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn: fields.size("feed_forward_length", "intermediate_size", 1, MAX_WIDTH)?,
            ffn_leaf: 0, // known with the types of the weights: see `read`
            vocab: fields.vocab()?,
            context: fields.size("context_length", "max_position_embeddings", 1, MAX_CONTEXT)?,
            norm_eps: fields.float("attention.layer_norm_rms_epsilon", "rms_norm_eps")?,
            norm_offset: 0.0,
            embedding_scale: 1.0,
            query_scale: 1.0 / (head_dim as f32).sqrt(),
            activation: family.activation(),
            tied: fields.tied(family)?,
            ropes: Vec::new(),
            layers: vec![
                LayerKind {
                    window: None,
                    rope: 0
                };
                n_layers
            ],
        };
        config.check_heads(fields)?;
        Ok(config)
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

    /// Columns of a logical block of the attention output's sum: the fewest whole heads that are a
    /// multiple of 32. A tensor split cuts heads there.
    pub const fn attention_leaf(&self) -> usize {
        let mut leaf = self.head_dim;
        while !leaf.is_multiple_of(32) {
            leaf += self.head_dim;
        }
        leaf
    }

    /// Number of weights, norms left out.
    pub const fn parameters(&self, tied: bool) -> u64 {
        let tables = if tied { 1 } else { 2 };
        self.layer_parameters() * self.layers.len() as u64
            + tables * self.width as u64 * self.vocab as u64
    }

    /// Number of weights of a layer, norms left out.
    pub(crate) const fn layer_parameters(&self) -> u64 {
        let (c, d) = (self.width as u64, self.head_dim as u64);
        c * d * 2 * (self.heads + self.kv_heads) as u64 + 3 * c * self.ffn as u64
    }
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
