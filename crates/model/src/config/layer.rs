//! The shape of a layer: its cache, heads and feed-forward, and the layout of its cache.

use paceline_tensor::{
    DeltaShape, KvShape, KvType, LayerStore, PAGE, Recurrence, Runs, StateRule, StateShape,
    rows_store,
};

use super::{Compressed, Experts, Latent, PoolIndexer, Selection};
use crate::LayerRole;

/// Activation function of the feed-forward's gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `g / (1 + exp(-g))`
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
    /// The square of what is above 0, without a gate.
    ReluSquared,
    /// `sigmoid(g) gate tanh(g / gate)` times `up tanh(u / up)`, or times u without `up` (Kimi K3).
    Situ {
        /// Bound of the gate.
        gate: f32,
        /// Bound of what it multiplies.
        up: Option<f32>,
    },
}

/// Contents of a layer's cache.
#[derive(Clone, Copy, Debug)]
pub enum LayerCache {
    /// Keys and values of each position.
    Rows,
    /// Nothing: the layer attends to the keys and values of this earlier layer.
    Of(usize),
    /// A state of fixed size for each KV head.
    State(&'static dyn Recurrence),
    /// The states of a gated delta net.
    Delta(DeltaNet),
    /// The inputs of a short convolution over this many positions, its own included: 1 to
    /// [`MAX_TAPS`].
    Conv(usize),
    /// A vector of each position, and compressed vectors of runs of positions.
    Compressed(Compressed),
}

/// A gated delta net in place of attention. The layer's `heads` are its value heads, its `kv_heads`
/// the heads of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaNet {
    /// Taps of the convolution, the newest input included: 1 to [`MAX_TAPS`].
    pub taps: usize,
    /// Mapping of value heads to key heads.
    pub order: HeadOrder,
    /// The rule of the state: [`StateRule::Sum`] for Mamba 2.
    pub rule: StateRule,
    /// Smallest logarithm of a decay, below 0, where decays are this times a sigmoid.
    pub least_decay: Option<f32>,
    /// Whether the matrix of output gates is a product of two; with [`StateRule::Channels`] only.
    pub low_rank_gates: bool,
    /// Whether results are multiplied by the sigmoid of their gates, not by silu.
    pub sigmoid_gates: bool,
}

/// Mapping of H value heads to K key heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// Value head h uses key head h K / H: neighbours share one.
    Grouped,
    /// Value head h uses key head h mod K, as in GGUF files of Qwen 3.5.
    Interleaved,
}

/// Maximum taps of a convolution, four times those of published models. They are fewer than the
/// positions of a page, so that the inputs in the previous page are enough.
pub(crate) const MAX_TAPS: usize = 16;

impl PartialEq for LayerCache {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Rows, Self::Rows) => true,
            (Self::Of(a), Self::Of(b)) => a == b,
            (Self::State(a), Self::State(b)) => a.name() == b.name(),
            (Self::Delta(a), Self::Delta(b)) => a == b,
            (Self::Conv(a), Self::Conv(b)) => a == b,
            (Self::Compressed(a), Self::Compressed(b)) => a == b,
            _ => false,
        }
    }
}

/// The shape of a layer. H query heads, K KV heads, D and E elements of a cached key and value. F
/// is the width of the feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerShape {
    pub cache: LayerCache,
    /// Sliding window: positions a query attends to, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// Index into [`Config::ropes`](super::Config::ropes) for queries and keys.
    pub rope: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Key and value heads (K); divides `heads`.
    pub kv_heads: usize,
    /// Size of a query and of a key (D), a multiple of 16; need not be `width / heads`.
    pub head_dim: usize,
    /// Size of a value (E), a multiple of 16.
    pub value_dim: usize,
    /// Factor of queries.
    pub query_scale: f32,
    /// Whether each head has a gate after its query in the projection. The gate's sigmoid
    /// multiplies the attention output.
    pub gated: bool,
    /// Width of the feed-forward (F).
    pub ffn: usize,
    /// Gates up to their mean plus this many standard deviations become 0, and larger ones are
    /// reduced by that (Gemma 3n); `None` without.
    pub gate_cutoff: Option<f32>,
    /// Experts in place of the feed-forward.
    pub experts: Option<Experts>,
    /// Latent attention, where all heads share one key whose first elements are the value.
    pub latent: Option<Latent>,
    /// The indexer of a layer whose rows attend to pools of positions; not of latent attention.
    pub pooled: Option<PoolIndexer>,
    /// Whether a dense feed-forward runs in parallel to the experts.
    pub dense_beside: bool,
    /// Whether values have a norm without weights.
    pub value_norm: bool,
    /// Whether the keys, before norm and rotation, are also the values.
    pub keys_as_values: bool,
}

impl LayerShape {
    /// Elements of a head's attention output.
    pub const fn output_dim(&self) -> usize {
        match (self.cache, self.latent) {
            (LayerCache::Compressed(of), _) => of.group_rank * of.groups / self.heads,
            (_, Some(latent)) => latent.value_dim,
            (_, None) => self.value_dim,
        }
    }

    /// Roles of the matrices that give queries, keys and values.
    pub const fn input_roles(&self) -> [LayerRole; 3] {
        match self.cache {
            LayerCache::Conv(_) => [
                LayerRole::ConvQuery,
                LayerRole::ConvKey,
                LayerRole::ConvValue,
            ],
            _ => [LayerRole::Query, LayerRole::Key, LayerRole::Value],
        }
    }

    /// Roles of gate, up and down of the dense feed-forward, which may be the shared expert.
    pub const fn dense_roles(&self) -> [LayerRole; 3] {
        match self.experts {
            Some(Experts {
                compressed: Some(_),
                ..
            }) => [
                LayerRole::SharedGate,
                LayerRole::SharedUp,
                LayerRole::SharedDown,
            ],
            _ => [LayerRole::Gate, LayerRole::Up, LayerRole::Down],
        }
    }

    /// Role of the matrix that projects the attention output, or what the layer has instead.
    pub const fn output_role(&self) -> LayerRole {
        match self.cache {
            LayerCache::Delta(_) => LayerRole::DeltaOutput,
            LayerCache::Conv(_) => LayerRole::ConvOutput,
            _ => LayerRole::AttentionOutput,
        }
    }

    /// Columns of a leaf of the attention output's sum: the fewest whole heads that are a multiple
    /// of 32. A tensor split cuts heads there.
    ///
    /// In Mamba 2 they are those of whole groups, since norms are over the heads of a group. The
    /// same holds where the outputs of a group are compressed together.
    pub const fn attention_leaf(&self) -> usize {
        let each = match self.cache {
            LayerCache::Delta(net) if matches!(net.rule, StateRule::Sum) => {
                self.output_dim() * (self.heads / self.kv_heads)
            }
            LayerCache::Compressed(of) => of.group_rank,
            _ => self.output_dim(),
        };
        let mut leaf = each;
        while !leaf.is_multiple_of(32) {
            leaf += each;
        }
        leaf
    }

    /// Whether it keeps a state in place of keys and values: of any rule, or a convolution's.
    pub const fn is_recurrent(&self) -> bool {
        matches!(
            self.cache,
            LayerCache::State(_) | LayerCache::Delta(_) | LayerCache::Conv(_)
        )
    }

    /// The layer with the cache that layer `index`, this one, attends to.
    pub(super) const fn keeps_in(&self, index: usize) -> usize {
        match self.cache {
            LayerCache::Of(of) => of,
            _ => index,
        }
    }

    /// Whether it has a KV cache of its own, instead of reading an earlier layer's.
    pub const fn has_kv(&self) -> bool {
        !matches!(self.cache, LayerCache::Of(_))
    }

    /// Cached positions that a row reads, its own included; `None` for all. A recurrent state reads
    /// the previous page when a page begins. A delta net reads the previous page in every row. So
    /// the state of a sequence's last full page remains available to the next sequence.
    pub(crate) const fn looks_back(&self) -> Option<usize> {
        match self.cache {
            LayerCache::State(_) => Some(2),
            LayerCache::Delta(_) => Some(PAGE + 1),
            LayerCache::Conv(taps) => Some(taps),
            LayerCache::Compressed(of) => Some(of.looks_back()),
            LayerCache::Rows | LayerCache::Of(_) => self.window,
        }
    }

    /// Number of weights of a model of this width, without norms.
    pub(crate) fn parameters(&self, width: usize) -> u64 {
        let heads = |there: bool| if there { self.kv_heads } else { 0 };
        let (keys, values) = (heads(self.has_kv()), heads(self.has_values()));
        let attention = match (self.cache, self.latent) {
            (LayerCache::Delta(_), _) => {
                // With gates and outputs, a step and a decay of each head.
                let values = self.heads * (3 * self.value_dim + 2);
                width * (2 * self.kv_heads * self.head_dim + values)
            }
            (LayerCache::Compressed(of), _) => of.parameters((self.heads, self.head_dim), width),
            (_, Some(latent)) => self.latent_parameters(latent, width),
            _ => {
                let queries = (1 + usize::from(self.gated)) * self.heads;
                let values = (self.heads + values) * self.value_dim;
                let index = self.pooled.map_or(0, |of| (of.heads + 1) * of.dim);
                width * ((queries + keys) * self.head_dim + values + index)
            }
        };
        let experts = self.experts.map_or(0, |experts| {
            let row = experts.row_width(width);
            let ends = if row == width { 0 } else { 2 * row };
            let gate = usize::from(experts.shared > 0 && experts.shared_gate);
            let outside = 3 * experts.shared + experts.count + gate + ends;
            outside * width + 3 * experts.count * experts.width * row
        });
        let ffn = if self.has_dense() { 3 * self.ffn } else { 0 };
        attention as u64 + (width * ffn + experts) as u64
    }

    /// Weights of latent attention, without norms.
    const fn latent_parameters(&self, latent: Latent, width: usize) -> usize {
        let queries = self.heads * latent.query_dim();
        let queries = match latent.query_rank {
            Some(rank) => rank * (width + queries),
            None => width * queries,
        };
        let expanded = self.heads * latent.rank * (latent.plain + latent.value_dim);
        let output = self.heads * latent.value_dim * width;
        queries + width * latent.key_dim() + expanded + output
    }

    /// The indexer of blocks, if it has one.
    pub(crate) fn block_indexer(&self) -> Option<PoolIndexer> {
        self.pooled.filter(|own| own.choice.local > 0)
    }

    /// Bytes of a sequence's states, with the rows since their last update; `None` without states.
    /// A delta net and a convolution take two pages per sequence: the last full page and the
    /// current one.
    pub fn state_bytes(&self) -> Option<u64> {
        let pages = match self.cache {
            LayerCache::State(_) => 1,
            LayerCache::Delta(_) | LayerCache::Conv(_) => 2,
            LayerCache::Compressed(of) => of.looks_back().div_ceil(PAGE) as u64 + 1,
            LayerCache::Rows | LayerCache::Of(_) => return None,
        };
        let store = store(self, (self.heads, self.kv_heads), KvType::F32);
        Some(pages * store.page_bytes() as u64)
    }

    /// Whether it computes keys of heads, not latent ones.
    pub const fn has_keys(&self) -> bool {
        let shares_one = self.latent.is_some() || matches!(self.cache, LayerCache::Compressed(_));
        self.has_kv() && !shares_one
    }

    /// Whether it computes values besides its keys.
    pub const fn has_values(&self) -> bool {
        self.has_keys() && !self.keys_as_values
    }

    /// Whether it has a dense feed-forward, alone or in parallel to experts.
    pub const fn has_dense(&self) -> bool {
        (self.experts.is_none() || self.dense_beside) && self.ffn > 0
    }

    /// Whether it has a dense feed-forward or experts; only some families have layers without.
    pub const fn has_feed_forward(&self) -> bool {
        self.experts.is_some() || self.ffn > 0
    }
}

/// Cache layout of a layer with the given numbers of query heads and KV heads.
pub fn store(
    layer: &LayerShape,
    (query_heads, heads): (usize, usize),
    kv_type: KvType,
) -> LayerStore {
    let (head_dim, value_dim) = (layer.head_dim, layer.value_dim);
    match layer.cache {
        LayerCache::Of(_) => LayerStore::Nothing,
        LayerCache::Rows => {
            let shape = KvShape {
                heads,
                head_dim,
                value_dim,
                kv_type: match layer.latent {
                    Some(_) => kv_type.of_latent(),
                    None => kv_type,
                },
            };
            match layer.latent.map(|latent| latent.selection) {
                Some(Selection::Own(indexer)) if indexer.pool > 1 => {
                    LayerStore::IndexedPools(shape, indexer.dim)
                }
                Some(Selection::Own(indexer)) => LayerStore::Indexed(shape, indexer.dim),
                Some(Selection::Before) => LayerStore::Indexed(shape, 0),
                Some(Selection::All) => LayerStore::Latent(shape),
                None => match layer.pooled {
                    Some(indexer) => LayerStore::Pooled(shape, indexer.dim),
                    None => LayerStore::Rows(shape),
                },
            }
        }
        LayerCache::Delta(net) => LayerStore::Delta(DeltaShape {
            heads: query_heads,
            key_heads: heads,
            head_dim,
            value_dim,
            taps: net.taps,
            decays: net.rule.decays(head_dim),
        }),
        LayerCache::State(recurrence) => LayerStore::State(StateShape {
            heads,
            len: recurrence.state_len(head_dim, value_dim),
            head_dim,
            value_dim,
        }),
        LayerCache::Conv(_) => LayerStore::State(StateShape {
            heads,
            len: 0,
            head_dim: 0,
            value_dim,
        }),
        LayerCache::Compressed(_) if heads == 0 => LayerStore::Nothing,
        LayerCache::Compressed(of) => rows_store(of.row(head_dim)),
    }
}

/// Layout of a layer's compressed keys on a rank with `heads` of its KV heads. They are in pages of
/// the first kind, behind all layers.
pub(crate) fn entries(layer: &LayerShape, heads: usize) -> LayerStore {
    let runs = match layer.cache {
        LayerCache::Compressed(of) if heads > 0 && !of.uses_earlier() => of.runs(layer.head_dim),
        _ => None,
    };
    runs.map_or(LayerStore::Nothing, Runs::entries)
}
