//! Kinds of layers by what they need of a sequence's pages, and how many pages each kind gets.
//!
//! A layer that looks at all positions before a row needs all pages. A layer with a window, or with
//! a state, lets pages go that its next row does not look at. Layers that look equally far back are
//! one kind. They share the pages of a sequence, which have numbers of their own in each kind.

use paceline_base::Bytes;
use paceline_tensor::{KvType, PAGE};

use crate::config::store;
use crate::step::BatchSize;
use crate::{Config, LayerCache};

/// Of the pages for all positions, each kind that lets pages go keeps one in so many, beyond those
/// that its sequences need. They are for sequences that begin as others did. Gemma 3 270M at 32768
/// positions keeps 64 pages more than the 18 it needs, the ends of some seven answers. Its cache is
/// 0.30 of that of full layers.
const KEPT: usize = 8;

/// Pages with states of delta nets that a sequence lets go, of which one is kept, besides those at
/// the ends of prompts. A page is as large as the keys and values of thousands of positions (some
/// 170 MB of Qwen3.5-35B-A3B). So one is kept in 2048 positions: a prefix that another sequence
/// shares in part loses at most that.
const SAVED_EVERY: usize = 32;

/// States kept for each sequence besides: of the end of its prompt, and of the one before.
const SAVED_EACH: usize = 2;

/// The kinds of a model's layers. The first looks at all positions; it may have no layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kinds {
    /// How many positions each kind looks at, the row's own included; the first at all. And of
    /// how many pages let go one is kept.
    backs: Vec<(Option<usize>, usize)>,
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
    /// Of the pages that a sequence lets go, one in so many is kept for others; 1 where all are.
    /// The pages at the end of its prompt are kept besides.
    pub every: usize,
}

impl WindowPool {
    /// The first page that a row at `position` looks at.
    pub const fn first_page(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.back) / PAGE
    }
}

impl Kinds {
    /// The kinds of `config`'s layers.
    pub fn new(config: &Config) -> Self {
        let mut backs = vec![(None, 1)];
        let of = (0..config.layers.len()).map(|layer| {
            let every = match config.layers[layer].cache {
                LayerCache::Delta(_) => SAVED_EVERY,
                _ => 1,
            };
            let back = (config.looks_back(layer), every);
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

    pub fn of(&self, layer: usize) -> usize {
        self.of[layer]
    }

    /// Pages of each kind for steps of up to `size` and `positions` positions in all.
    pub fn pages(&self, size: BatchSize, positions: usize) -> Vec<usize> {
        let all = positions.div_ceil(PAGE);
        let pages = |&(back, every): &(Option<usize>, usize)| {
            back.map_or(all, |back| few((back, every), size, all).min(all))
        };
        self.backs.iter().map(pages).collect()
    }

    /// The kinds that let pages go, of a cache with so many `pages` of each kind.
    pub fn windows(&self, pages: impl IntoIterator<Item = usize>) -> Vec<WindowPool> {
        let pools = self.backs.iter().zip(pages);
        let window = |(&(back, every), pages): (&(Option<usize>, usize), usize)| {
            back.map(|back| WindowPool { back, pages, every })
        };
        pools.filter_map(window).collect()
    }
}

impl Config {
    /// Bytes of the cache of all layers, for steps of up to `size` and `positions` positions.
    pub fn cache_bytes(&self, kv_type: KvType, size: BatchSize, positions: usize) -> Bytes {
        let kinds = Kinds::new(self);
        let pages = kinds.pages(size, positions);
        let layers = self.layers.iter().enumerate();
        let bytes = layers.map(|(i, shape)| {
            let page = store(shape, (shape.heads, shape.kv_heads), kv_type).page_bytes();
            page as u64 * pages[kinds.of(i)] as u64
        });
        Bytes(bytes.sum())
    }
}

/// Pages that the sequences of a step touch at most, and those kept besides. A run of n positions
/// touches at most n / 64 + 2 pages.
const fn few((back, every): (usize, usize), size: BatchSize, all: usize) -> usize {
    let (kept, saved) = match every {
        1 => (KEPT, 0),
        every => (every, SAVED_EACH),
    };
    let each = back.div_ceil(PAGE) + 2 + saved;
    let touched = size.sequences.saturating_mul(each);
    touched
        .saturating_add(size.rows.div_ceil(PAGE))
        .saturating_add(all / kept)
}
