//! The shape of a model: what has to be stored, read and multiplied for a token.
//!
//! Letters: C width, H query heads, K KV heads, D head size, F feed-forward width, E experts,
//! A active experts, V vocabulary. Parameters are counted without norms and biases, which are
//! below a thousandth of any model here.

use std::ops::Range;

use crate::Error;
use crate::check::{finite_in, whole_in};

/// Largest accepted sizes: several times the largest published models.
const MAX_LAYERS: u32 = 1024;
const MAX_WIDTH: u32 = 1 << 18;
const MAX_VOCAB: u32 = 1 << 22;
const MAX_EXPERTS: u32 = 1 << 14;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionKind {
    /// Grouped queries; `heads == kv_heads` is plain multi-head attention.
    Gqa {
        /// H
        heads: u32,
        /// K, a divisor of `heads`.
        kv_heads: u32,
        /// D
        head_dim: u32,
    },
    /// Queries and keys through low ranks, as in DeepSeek.
    Mla {
        /// H
        heads: u32,
        /// Rank of the queries; 0 when they are projected at once.
        q_rank: u32,
        /// Rank of keys and values.
        kv_rank: u32,
        /// Size of a head's part without rotation.
        nope_dim: u32,
        /// Size of a head's rotated part, shared by all heads in the cache.
        rope_dim: u32,
        /// Size of a value head.
        value_dim: u32,
    },
    /// A key per position, which is its value too, for all heads, as in DeepSeek V4. Each group
    /// of heads has an output of low rank. Weights that compress or select positions are not
    /// counted.
    OneKey {
        /// H
        heads: u32,
        /// D
        head_dim: u32,
        /// Rank of the queries.
        q_rank: u32,
        /// Groups of heads with an output rank of their own.
        groups: u32,
        /// Rank of a group's output.
        out_rank: u32,
    },
}

/// The mixture of experts in a model's feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moe {
    /// E, routed experts in a layer.
    pub experts: u32,
    /// A, routed experts that a token uses.
    pub active: u32,
    /// Experts that every token uses.
    pub shared: u32,
    /// Width of one expert.
    pub ffn: u32,
    /// Layers at the start that are dense.
    pub dense_layers: u32,
    /// Every `every`-th of the other layers is a mixture, counted from the first layer; 1 for all.
    pub every: u32,
    /// Groups of experts that are chosen first, as in DeepSeek V3; 1 for none.
    pub groups: u32,
}

/// Layers that look at the last positions only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sliding {
    /// Number of such layers.
    pub layers: u32,
    /// Positions in their window.
    pub window: u32,
}

/// A lightning indexer, as in DeepSeek V3.2: rows with more positions than it chooses attend to
/// those that it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexer {
    /// Layers with an indexer of their own; the others use the choice of a layer before.
    pub layers: u32,
    /// Positions that it chooses.
    pub top_k: u32,
    /// Index queries of a row.
    pub heads: u32,
    /// Size of an index query and of an index key.
    pub dim: u32,
}

impl Indexer {
    /// Weights for width `c` and queries from a rank of `q`: queries, keys, and their weights.
    fn params(&self, c: f64, q: f64) -> f64 {
        let [heads, dim] = [self.heads, self.dim].map(f64::from);
        q * heads * dim + c * (dim + heads)
    }
}

/// Caches of layers that keep no keys and values of their own for each position.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Caches {
    /// The last layers, which use the caches of layers before them.
    pub borrowed: u32,
    /// Layers that keep a state of fixed size for each request.
    pub states: u32,
    /// Bytes of one such state, in one layer.
    pub state_bytes: f64,
    /// Weights of such a layer in place of attention; 0 for as many as attention has.
    pub state_params: f64,
    /// The last layers that one stage has to hold together; 0 or 1 when a pipeline may be cut
    /// anywhere. Cuts among them would part layers from the caches that they use.
    pub together: u32,
    /// Share of the positions that the mean layer keeps, where positions are compressed; 0 for all.
    pub kept: f64,
}

/// Sizes of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaNet {
    /// Size of a key.
    pub key: f64,
    pub key_heads: f64,
    /// Size of a value.
    pub value: f64,
    /// Heads of the values.
    pub heads: f64,
}

impl DeltaNet {
    /// Bytes of the state in one layer: two pages per sequence. Each page has its initial state,
    /// the inputs of the convolution, keys and the differences.
    pub fn state_bytes(&self) -> f64 {
        const PAGE: f64 = 64.0;
        let channels = 2.0 * self.key_heads * self.key + self.heads * self.value;
        let rows = PAGE * (channels + self.key_heads * self.key + 2.0 * self.heads);
        2.0 * 4.0 * (rows + self.heads * (self.key + PAGE) * self.value)
    }

    /// Weights for width `c`: queries, keys, values, gates, output, and two numbers per head.
    pub fn params(&self, c: f64) -> f64 {
        c * (2.0 * self.key_heads * self.key + self.heads * (3.0 * self.value + 2.0))
    }
}

/// Stored bits per weight, with scales; averages over the tensors of a part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bits {
    /// Routed experts.
    pub experts: f64,
    /// Everything else.
    pub rest: f64,
    /// A cached key or value.
    pub kv: f64,
}

impl Bits {
    /// The same for all weights, and a cache of 16 bits.
    pub const fn uniform(bits: f64) -> Self {
        Self {
            experts: bits,
            rest: bits,
            kv: 16.0,
        }
    }
}

/// Sizes of a model, as far as the planner needs them.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Usual name.
    pub name: String,
    pub layers: u32,
    /// C
    pub width: u32,
    /// V
    pub vocab: u32,
    /// Whether the output head is the embedding, so that it is stored once.
    pub tied: bool,
    /// Attention of every layer.
    pub attention: AttentionKind,
    /// Layers with a window, if there are any; the others look at everything.
    pub sliding: Option<Sliding>,
    /// The indexer of sparse attention, if it has one.
    pub indexer: Option<Indexer>,
    /// Layers that keep something else than keys and values of their own.
    pub caches: Caches,
    /// F of dense layers; 0 when there are none.
    pub ffn: u32,
    /// The mixture, if it is one.
    pub moe: Option<Moe>,
    /// Storage of weights.
    pub bits: Bits,
}

impl AttentionKind {
    /// H
    pub const fn heads(&self) -> u32 {
        match *self {
            Self::Gqa { heads, .. } | Self::Mla { heads, .. } | Self::OneKey { heads, .. } => heads,
        }
    }

    /// The largest number of ranks that can share a layer's attention, each with whole heads.
    /// Ranks beyond the KV heads hold copies of them.
    pub const fn units(&self) -> u32 {
        self.heads()
    }

    /// Weights of one layer's attention, for width `c`.
    pub fn params(&self, c: f64) -> f64 {
        match *self {
            Self::Gqa {
                heads,
                kv_heads,
                head_dim,
            } => c * f64::from(head_dim) * 2.0 * f64::from(heads + kv_heads),
            Self::Mla {
                heads,
                q_rank,
                kv_rank,
                nope_dim,
                rope_dim,
                value_dim,
            } => {
                let (h, q, r) = (f64::from(heads), f64::from(q_rank), f64::from(kv_rank));
                let (n, p, v) = (
                    f64::from(nope_dim),
                    f64::from(rope_dim),
                    f64::from(value_dim),
                );
                let queries = if q > 0.0 {
                    c * q + q * h * (n + p)
                } else {
                    c * h * (n + p)
                };
                queries + c * (r + p) + r * h * (n + v) + h * v * c
            }
            Self::OneKey {
                heads,
                head_dim,
                q_rank,
                groups,
                out_rank,
            } => {
                let [h, d, q] = [heads, head_dim, q_rank].map(f64::from);
                let [g, o] = [groups, out_rank].map(f64::from);
                c * (q + d) + q * h * d + h * d * o + g * o * c
            }
        }
    }

    /// Values cached per token and layer.
    pub fn cached(&self) -> f64 {
        match *self {
            Self::Gqa {
                kv_heads, head_dim, ..
            } => 2.0 * f64::from(kv_heads) * f64::from(head_dim),
            Self::Mla {
                kv_rank, rope_dim, ..
            } => f64::from(kv_rank + rope_dim),
            Self::OneKey { head_dim, .. } => f64::from(head_dim),
        }
    }

    /// Multiply-adds times two for one query against one key and its value, all heads of a layer.
    /// With low ranks this is the expanded form, which prefill uses.
    pub fn pair_flops(&self) -> f64 {
        match *self {
            Self::Gqa {
                heads, head_dim, ..
            }
            | Self::OneKey {
                heads, head_dim, ..
            } => 4.0 * f64::from(heads) * f64::from(head_dim),
            Self::Mla {
                heads,
                nope_dim,
                rope_dim,
                value_dim,
                ..
            } => 2.0 * f64::from(heads) * f64::from(nope_dim + rope_dim + value_dim),
        }
    }

    /// Like [`pair_flops`](Self::pair_flops) in decode, where low ranks are absorbed into the
    /// queries and each head works on the whole latent vector.
    pub fn decode_pair_flops(&self) -> f64 {
        match *self {
            Self::Gqa { .. } | Self::OneKey { .. } => self.pair_flops(),
            Self::Mla {
                heads,
                kv_rank,
                rope_dim,
                ..
            } => 2.0 * f64::from(heads) * f64::from(2 * kv_rank + rope_dim),
        }
    }
}

impl ModelShape {
    /// Whether layer `index` is a mixture.
    pub fn is_moe(&self, index: u32) -> bool {
        self.moe.is_some_and(|moe| {
            index >= moe.dense_layers && (index + 1).is_multiple_of(moe.every.max(1))
        })
    }

    /// Mixtures among `layers`.
    pub fn mixtures(&self, layers: &Range<u32>) -> u32 {
        self.moe.map_or(0, |moe| {
            let before = |end: u32| end / moe.every.max(1);
            let first = layers.start.max(moe.dense_layers);
            before(layers.end).saturating_sub(before(first))
        })
    }

    /// Keys that a row looks at in the mean layer, of `keys` that there are. Layers with a window
    /// lie between the others in a short period, so that any stage has about the model's mix.
    pub fn keys_seen(&self, keys: f64) -> f64 {
        let chosen = self.indexer.map_or(keys, |own| f64::from(own.top_k));
        let keys = keys.min(chosen);
        let Some(sliding) = self.sliding else {
            return keys;
        };
        let share = f64::from(sliding.layers) / f64::from(self.layers);
        (1.0 - share) * keys + share * keys.min(f64::from(sliding.window))
    }

    /// Index keys that the mean layer scores for a row with `keys` keys: none where all are
    /// attended to.
    pub fn index_keys_scored(&self, keys: f64) -> f64 {
        let own = self.indexer.filter(|own| keys > f64::from(own.top_k));
        own.map_or(0.0, |_| keys * self.indexer_share())
    }

    /// Multiply-adds times two for one index key and all index queries of a row.
    pub fn index_flops(&self) -> f64 {
        let flops = |own: Indexer| 2.0 * f64::from(own.heads) * f64::from(own.dim);
        self.indexer.map_or(0.0, flops)
    }

    /// Keys whose attention takes the mean layer as long as a row with `keys` keys does. They are
    /// the keys that it attends to, and the scores of its indexer at the rate of attention.
    pub fn equivalent_keys(&self, keys: f64) -> f64 {
        let scores = self.index_keys_scored(keys) * self.index_flops();
        self.keys_seen(keys) + scores / self.attention.decode_pair_flops()
    }

    /// Layers with an indexer of their own among all layers.
    fn indexer_share(&self) -> f64 {
        let layers = self.indexer.map_or(0, |own| own.layers);
        f64::from(layers) / f64::from(self.layers)
    }

    /// Values cached per token in a layer that keeps rows: keys and values, and in the mean layer
    /// index keys.
    pub fn cached(&self) -> f64 {
        let dim = self.indexer.map_or(0, |own| own.dim);
        self.attention.cached() + self.indexer_share() * f64::from(dim)
    }

    /// Weights of one routed expert.
    pub fn expert_params(&self) -> f64 {
        self.moe
            .map_or(0.0, |moe| 3.0 * f64::from(self.width) * f64::from(moe.ffn))
    }

    /// Weights that every token passes in layer `index`: attention, and the dense feed-forward or
    /// the router and shared experts.
    pub fn common_params(&self, index: u32) -> f64 {
        let beside = self.shared_params(index) + self.router_params(index);
        self.mixer_params() + self.dense_params(index) + beside
    }

    /// Weights of attention, or of what layers with states have instead, in the mean layer.
    fn mixer_params(&self) -> f64 {
        let c = f64::from(self.width);
        let q = match self.attention {
            AttentionKind::Mla { q_rank, .. } => f64::from(q_rank),
            _ => c,
        };
        let index = self.indexer.map_or(0.0, |own| own.params(c, q));
        let own = self.attention.params(c) + self.indexer_share() * index;
        if self.caches.state_params > 0.0 {
            let share = self.states_among_all();
            (1.0 - share) * own + share * self.caches.state_params
        } else {
            own
        }
    }

    /// Weights of the feed-forward of layer `index`, 0 for a mixture.
    pub fn dense_params(&self, index: u32) -> f64 {
        if self.is_moe(index) {
            0.0
        } else {
            3.0 * f64::from(self.width) * f64::from(self.ffn)
        }
    }

    /// Weights of the router of layer `index`.
    pub fn router_params(&self, index: u32) -> f64 {
        let moe = self.moe.filter(|_| self.is_moe(index));
        moe.map_or(0.0, |moe| f64::from(self.width) * f64::from(moe.experts))
    }

    /// Weights of the experts that every row has in layer `index`.
    pub fn shared_params(&self, index: u32) -> f64 {
        let moe = self.moe.filter(|_| self.is_moe(index));
        moe.map_or(0.0, |moe| f64::from(moe.shared) * self.expert_params())
    }

    /// Weights of all routed experts in layer `index`.
    pub fn routed_params(&self, index: u32) -> f64 {
        match self.moe {
            Some(moe) if self.is_moe(index) => f64::from(moe.experts) * self.expert_params(),
            _ => 0.0,
        }
    }

    /// Weights of the output head.
    pub fn head_params(&self) -> f64 {
        f64::from(self.width) * f64::from(self.vocab)
    }

    /// Bytes of layer `index` as stored.
    pub fn layer_bytes(&self, index: u32) -> f64 {
        (self.common_params(index) * self.bits.rest + self.routed_params(index) * self.bits.experts)
            / 8.0
    }

    /// Bytes of layer `index` that one row reads: of routed experts those that it uses.
    pub fn read_bytes(&self, index: u32) -> f64 {
        let moe = self.moe.filter(|_| self.is_moe(index));
        let used = moe.map_or(0.0, |moe| f64::from(moe.active) * self.expert_params());
        (self.common_params(index) * self.bits.rest + used * self.bits.experts) / 8.0
    }

    /// Bytes of the output head as stored.
    pub fn head_bytes(&self) -> f64 {
        self.head_params() * self.bits.rest / 8.0
    }

    pub fn weight_bytes(&self) -> f64 {
        let layers: f64 = (0..self.layers).map(|layer| self.layer_bytes(layer)).sum();
        layers + self.head_bytes() * if self.tied { 1.0 } else { 2.0 }
    }

    /// Bytes cached per token, all layers.
    pub fn kv_bytes_per_token(&self) -> f64 {
        self.row_layers(0..self.layers) * self.cached() * self.bits.kv / 8.0
    }

    /// Layers among `layers` that keep keys and values of each position. A layer that compresses
    /// positions counts as the share that it keeps. Layers with states lie between the others in a
    /// short period, so that any stage has about the model's mix.
    pub fn row_layers(&self, layers: Range<u32>) -> f64 {
        let kept = Some(self.caches.kept).filter(|share| *share > 0.0);
        self.own_layers(layers) * (1.0 - self.state_share()) * kept.unwrap_or(1.0)
    }

    /// Bytes of the states of one request in `layers`.
    pub fn state_bytes(&self, layers: Range<u32>) -> f64 {
        self.own_layers(layers) * self.state_share() * self.caches.state_bytes
    }

    /// Layers among `layers` that keep something of their own.
    fn own_layers(&self, layers: Range<u32>) -> f64 {
        let end = layers.end.min(self.layers - self.caches.borrowed);
        f64::from(end.saturating_sub(layers.start))
    }

    /// Layers with states among all layers.
    pub fn states_among_all(&self) -> f64 {
        f64::from(self.caches.states) / f64::from(self.layers)
    }

    /// Bytes that a step of one sequence reads of the state in one layer: it has two pages, and
    /// looks at one.
    pub fn state_read(&self) -> f64 {
        self.caches.state_bytes / 2.0
    }

    fn state_share(&self) -> f64 {
        let own = self.layers - self.caches.borrowed;
        f64::from(self.caches.states) / f64::from(own.max(1))
    }

    /// Whether a stage may begin with layer `index`.
    pub const fn can_cut(&self, index: u32) -> bool {
        index == 0 || index + self.caches.together <= self.layers
    }

    /// All weights.
    pub fn params(&self) -> f64 {
        let layers: f64 = (0..self.layers)
            .map(|layer| self.common_params(layer) + self.routed_params(layer))
            .sum();
        layers + self.head_params() * if self.tied { 1.0 } else { 2.0 }
    }

    /// Weights that a token passes, without the embedding's look-up.
    pub fn active_params(&self) -> f64 {
        let active = self.moe.map_or(0.0, |moe| f64::from(moe.active));
        let layers: f64 = (0..self.layers)
            .map(|layer| {
                let routed = if self.is_moe(layer) {
                    active * self.expert_params()
                } else {
                    0.0
                };
                self.common_params(layer) + routed
            })
            .sum();
        layers + self.head_params()
    }

    /// Whether weights are stored in fewer than 16 bits, for which engines have other kernels.
    pub fn is_quantised(&self) -> bool {
        self.bits.rest < 16.0 || self.moe.is_some() && self.bits.experts < 16.0
    }

    /// The same model with routed experts at fewer bits than the rest, which has `rest` bits, so
    /// that the average stays as it is. Models published "natively" in 4 bits are stored so (Kimi
    /// K2 Thinking, gpt-oss): only the experts were trained for it. Their own files have the rest
    /// in 16 bits. Left alone where the average leaves the experts less than 2 bits, or without
    /// experts.
    pub fn with_native_experts(mut self, rest: f64) -> Self {
        let routed: f64 = (0..self.layers)
            .map(|layer| self.routed_params(layer))
            .sum();
        if routed > 0.0 {
            let total = self.params();
            let experts = (self.bits.rest * total - rest * (total - routed)) / routed;
            if experts >= 2.0 {
                self.bits.experts = experts;
                self.bits.rest = rest;
            }
        }
        self
    }

    /// Refuses shapes that no model has.
    ///
    /// # Errors
    /// [`Error::Value`] with the field and its range.
    pub fn check(&self) -> Result<(), Error> {
        let name = self.name.as_str();
        whole_in(name, "layers", self.layers, 1, MAX_LAYERS)?;
        whole_in(name, "width", self.width, 1, MAX_WIDTH)?;
        whole_in(name, "vocabulary", self.vocab, 1, MAX_VOCAB)?;
        whole_in(name, "feed-forward width", self.ffn, 0, MAX_WIDTH * 8)?;
        for (field, bits) in [
            ("bits per expert weight", self.bits.experts),
            ("bits per weight", self.bits.rest),
            ("bits per cached value", self.bits.kv),
        ] {
            finite_in(name, field, bits, 0.5, 64.0, "0.5 to 64")?;
        }
        if let Some(sliding) = self.sliding {
            whole_in(name, "layers with a window", sliding.layers, 1, self.layers)?;
            whole_in(name, "positions of a window", sliding.window, 1, u32::MAX)?;
        }
        if let Some(own) = self.indexer {
            whole_in(name, "layers with an indexer", own.layers, 1, self.layers)?;
            whole_in(name, "positions of an indexer", own.top_k, 1, u32::MAX)?;
            whole_in(name, "index queries", own.heads, 1, MAX_WIDTH)?;
            whole_in(name, "size of an index key", own.dim, 1, MAX_WIDTH)?;
        }
        self.check_attention()?;
        self.check_caches()?;
        self.check_moe()
    }

    fn check_caches(&self) -> Result<(), Error> {
        let (name, caches) = (self.name.as_str(), &self.caches);
        let own = self.layers.saturating_sub(caches.borrowed);
        whole_in(
            name,
            "layers without a cache",
            caches.borrowed,
            0,
            self.layers - 1,
        )?;
        whole_in(name, "layers with a state", caches.states, 0, own)?;
        whole_in(
            name,
            "layers that stay together",
            caches.together,
            0,
            self.layers,
        )?;
        for (field, value) in [
            ("bytes of a state", caches.state_bytes),
            ("weights of a layer with a state", caches.state_params),
        ] {
            finite_in(name, field, value, 0.0, 1e12, "0 to 1e12")?;
        }
        finite_in(
            name,
            "share of positions kept",
            caches.kept,
            0.0,
            1.0,
            "0 to 1",
        )
    }

    fn check_attention(&self) -> Result<(), Error> {
        let name = self.name.as_str();
        match self.attention {
            AttentionKind::Gqa {
                heads,
                kv_heads,
                head_dim,
            } => {
                whole_in(name, "heads", heads, 1, MAX_WIDTH)?;
                whole_in(name, "KV heads", kv_heads, 1, heads)?;
                whole_in(name, "head size", head_dim, 1, MAX_WIDTH)
            }
            AttentionKind::Mla {
                heads,
                q_rank,
                kv_rank,
                nope_dim,
                rope_dim,
                value_dim,
            } => {
                whole_in(name, "heads", heads, 1, MAX_WIDTH)?;
                whole_in(name, "query rank", q_rank, 0, MAX_WIDTH)?;
                whole_in(name, "KV rank", kv_rank, 1, MAX_WIDTH)?;
                whole_in(name, "head size without rotation", nope_dim, 0, MAX_WIDTH)?;
                whole_in(name, "rotated head size", rope_dim, 0, MAX_WIDTH)?;
                whole_in(name, "value head size", value_dim, 1, MAX_WIDTH)
            }
            AttentionKind::OneKey {
                heads,
                head_dim,
                q_rank,
                groups,
                out_rank,
            } => {
                whole_in(name, "heads", heads, 1, MAX_WIDTH)?;
                whole_in(name, "head size", head_dim, 1, MAX_WIDTH)?;
                whole_in(name, "query rank", q_rank, 1, MAX_WIDTH)?;
                whole_in(name, "groups of heads", groups, 1, heads)?;
                whole_in(name, "output rank", out_rank, 1, MAX_WIDTH)
            }
        }
    }

    fn check_moe(&self) -> Result<(), Error> {
        let name = self.name.as_str();
        let Some(moe) = self.moe else {
            return whole_in(name, "feed-forward width", self.ffn, 1, MAX_WIDTH * 8);
        };
        whole_in(name, "experts", moe.experts, 1, MAX_EXPERTS)?;
        whole_in(name, "active experts", moe.active, 1, moe.experts)?;
        whole_in(name, "shared experts", moe.shared, 0, MAX_EXPERTS)?;
        whole_in(name, "expert width", moe.ffn, 1, MAX_WIDTH)?;
        whole_in(name, "dense layers", moe.dense_layers, 0, self.layers)?;
        whole_in(name, "layers to a mixture", moe.every, 1, self.layers)?;
        whole_in(name, "groups of experts", moe.groups, 1, moe.experts)?;
        if moe.dense_layers > 0 || moe.every > 1 {
            whole_in(name, "feed-forward width", self.ffn, 1, MAX_WIDTH * 8)?;
        }
        Ok(())
    }
}
