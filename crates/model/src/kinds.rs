//! Kinds of layers by what they need of a sequence's pages, and how many pages each kind gets.
//!
//! A layer that looks at all positions before a row needs all pages; one with a window, or with a
//! state, lets pages go that its next row does not look at. Layers that look equally far back are
//! one kind: they share the pages of a sequence, which have numbers of their own in each kind.

use paceline_base::Bytes;
use paceline_tensor::{KvShape, KvType, LayerStore, PAGE, StateShape};

use crate::step::BatchSize;
use crate::{Config, LayerCache, LayerShape};

/// Of the pages for all positions, one in so many is kept by each kind that lets pages go, beyond
/// those that its sequences need: for sequences that begin as others did. Gemma 3 270M at 32768
/// positions keeps 64 pages more than the 18 it needs, the ends of some seven answers, and has
/// 0.30 of the cache of full layers.
const KEPT: usize = 8;

/// The kinds of a model's layers. The first looks at all positions; it may have no layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kinds {
    /// How many positions each kind looks at, the row's own included; the first at all.
    backs: Vec<Option<usize>>,
    /// The kind of each layer.
    of: Vec<usize>,
}

/// Pages of a kind that lets pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPool {
    /// How many positions a row looks at, itself included.
    pub back: usize,
    /// Pages there are.
    pub pages: usize,
}

impl WindowPool {
    /// The first page that a row at `position` looks at.
    pub const fn first_page(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.back) / PAGE
    }
}

impl Kinds {
    /// The kinds of `config`'s layers.
    pub(crate) fn new(config: &Config) -> Self {
        let mut backs = vec![None];
        let of = (0..config.layers.len()).map(|layer| {
            let back = config.looks_back(layer);
            let known = backs.iter().position(|known| *known == back);
            known.unwrap_or_else(|| {
                backs.push(back);
                backs.len() - 1
            })
        });
        Self {
            of: of.collect(),
            backs,
        }
    }

    /// How many kinds there are.
    pub(crate) const fn len(&self) -> usize {
        self.backs.len()
    }

    /// The kind of a layer.
    pub fn of(&self, layer: usize) -> usize {
        self.of[layer]
    }

    /// Pages of each kind for steps of up to `size` and `positions` positions in all.
    pub fn pages(&self, size: BatchSize, positions: usize) -> Vec<usize> {
        let all = positions.div_ceil(PAGE);
        let pages = |back: &Option<usize>| back.map_or(all, |back| few(back, size, all).min(all));
        self.backs.iter().map(pages).collect()
    }

    /// The kinds that let pages go, of a cache with so many `pages` of each kind.
    pub fn windows(&self, pages: impl IntoIterator<Item = usize>) -> Vec<WindowPool> {
        let pools = self.backs.iter().zip(pages);
        let window =
            |(back, pages): (&Option<usize>, usize)| back.map(|back| WindowPool { back, pages });
        pools.filter_map(window).collect()
    }
}

/// What a layer keeps of so many KV heads.
pub(crate) fn store(layer: &LayerShape, heads: usize, kv_type: KvType) -> LayerStore {
    let (head_dim, value_dim) = (layer.head_dim, layer.value_dim);
    match layer.cache {
        LayerCache::Of(_) => LayerStore::Nothing,
        LayerCache::Rows => {
            let shape = KvShape {
                heads,
                head_dim,
                value_dim,
                kv_type,
            };
            match layer.latent {
                Some(_) => LayerStore::Latent(shape),
                None => LayerStore::Rows(shape),
            }
        }
        LayerCache::State(recurrence) => LayerStore::State(StateShape {
            heads,
            len: recurrence.state_len(head_dim, value_dim),
            head_dim,
            value_dim,
        }),
    }
}

impl Config {
    /// Bytes of the cache of all layers, for steps of up to `size` and `positions` positions.
    pub fn cache_bytes(&self, kv_type: KvType, size: BatchSize, positions: usize) -> Bytes {
        let kinds = Kinds::new(self);
        let pages = kinds.pages(size, positions);
        let layers = self.layers.iter().enumerate();
        let bytes = layers.map(|(i, shape)| {
            let page = store(shape, shape.kv_heads, kv_type).page_bytes();
            page as u64 * pages[kinds.of(i)] as u64
        });
        Bytes(bytes.sum())
    }
}

/// Pages that the sequences of a step touch at most, and those kept besides. A run of n positions
/// touches at most n / 64 + 2 pages.
const fn few(back: usize, size: BatchSize, all: usize) -> usize {
    let each = back.div_ceil(PAGE) + 2;
    let touched = size.sequences.saturating_mul(each);
    touched
        .saturating_add(size.rows.div_ceil(PAGE))
        .saturating_add(all / KEPT)
}
