//! Kinds of layers by the positions they attend to, and the number of cache pages for each kind.
//!
//! A layer with full attention needs all pages of a sequence. A layer with a sliding window, or
//! with a state, releases pages that its next row does not read. Layers with equal windows are one
//! kind. They share the pages of a sequence; each kind numbers its pages separately.

use paceline_base::Bytes;
use paceline_tensor::{KvType, PAGE};

use crate::config::{entries, store};
use crate::step::BatchSize;
use crate::{Config, LayerCache};

/// Divisor of the pages that a window kind retains for prefix reuse, beyond those its running
/// sequences need: 1/8 of the full-attention pages. Gemma 3 270M at 32768 positions retains 64
/// pages besides the 18 it needs, the ends of some seven sequences. Its cache is 0.30 of that of
/// full layers.
const KEPT: usize = 8;

/// One in 32 released pages with delta-net states is retained, besides those at the ends of
/// prompts. A page is as large as the keys and values of thousands of positions (some 170 MB of
/// Qwen3.5-35B-A3B). So one is retained in 2048 positions: a partly shared prefix loses at most
/// that.
const SAVED_EVERY: usize = 32;

/// States retained per sequence besides: the end of its prompt, and the page before.
const SAVED_EACH: usize = 2;

/// The kinds of a model's layers. The first has full attention; it may have no layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kinds {
    /// Per kind: positions each row attends to, itself included, `None` for all; and the retained
    /// fraction of released pages, one in `n`.
    backs: Vec<(Option<usize>, usize)>,
    /// Kind of each layer.
    of: Vec<usize>,
}

/// Page pool of a kind that releases pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPool {
    /// Positions that a row attends to, itself included.
    pub back: usize,
    /// Pages in the pool.
    pub pages: usize,
    /// One in `every` released pages is retained for other sequences; 1 retains all. Pages at the
    /// end of a prompt are retained besides.
    pub every: usize,
}

impl WindowPool {
    /// First page that a row at `position` reads.
    pub const fn first_page(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.back) / PAGE
    }
}

impl Kinds {
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

    /// Window pools of a cache with `pages` pages per kind.
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
            let entries = entries(shape, shape.kv_heads).page_bytes();
            let ngrams = self.ngram_store(i).page_bytes();
            (page + ngrams) as u64 * pages[kinds.of(i)] as u64 + entries as u64 * pages[0] as u64
        });
        Bytes(bytes.sum())
    }
}

/// Maximum pages that the sequences of a step touch, plus the retained ones. A run of n positions
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
