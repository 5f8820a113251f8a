//! The cache of all layers: pages of [`PAGE`](crate::PAGE) positions, reserved once.
//!
//! ```text
//! pool 0, page 0: layer 0 | layer 3 | ...    a layer of keys and values, for each KV head:
//!         page 1: layer 0 | layer 3 | ...      keys   (head_dim, 64), then values (64, value_dim)
//! pool 1, page 0: layer 1 | layer 2 | ...    a layer of states, for each head:
//!         page 1: layer 1 | layer 2 | ...      state, keys (64, head_dim), values (64, value_dim)
//! ```
//!
//! Layers may differ: each has a [`LayerStore`] of its own. Layers that need the same pages of a
//! sequence share a *pool*. Windowed ones need few pages of a long sequence, so their pool may be
//! small.
//!
//! A page holds its positions in all layers of its pool, so a short sequence touches little memory,
//! all of it together. Pages are in huge pages where the system has them, since attention at depth
//! streams the cache as products stream weights. The caller decides which sequence owns which page.
//! Memory is touched (and so taken from the system) only when a page is first written.
//!
//! Quantised types keep runs of a position's elements as integers with a scale in f16. Keys and
//! values are each followed by their scales, `(ceil(head_dim / run), 64)`:
//!
//! | type | bits of keys, values | run | attention computes with, rounded once to f32 |
//! |---|---|---|---|
//! | [`KvType::Q8`] | 8, 8 | 32 | `scale * q`, `scale = f16(max / 127)` |
//! | [`KvType::Q4`] | 5, 4 | 64 | `scale * (q - 15.5)` and `scale * (q - 7.5)` |
//!
//! A key's five bits are a nibble, `(head_dim / 2, 64)` bytes, and a bit, `(head_dim / 8, 64)`
//! bytes behind these. No byte belongs to two positions, since threads write positions of their
//! own. Callers rotate what they write and read ([`Kernels::rotate_heads`]), so that no element of
//! a run is much larger than the others.
//!
//! [`Kernels::rotate_heads`]: crate::Kernels::rotate_heads
//!
//! Layers of latent attention ([`LayerStore::Latent`]) keep keys alone; their first `value_dim`
//! elements are the values. Where a lightning indexer selects positions ([`LayerStore::Indexed`]),
//! a position's key is in two runs, `(64, value_dim)` and `(64, head_dim - value_dim)`. So reading
//! a selected position touches no others. The indexer's own keys `(dim, 64)` follow.

mod elements;
mod history;
mod kv_type;
mod pooled;
mod writer;

use std::ops::Range;

use paceline_base::Bytes;

use crate::attention::{PAGE, PageView};
use crate::error::Error;
use crate::memory::HugeMap;

pub(crate) use elements::CUTS;
#[cfg(test)]
pub(crate) use elements::{KEY_LEVELS, VALUE_LEVELS};
pub use history::NO_TOKEN;
pub use kv_type::{KvType, UnknownKvType};
pub(crate) use kv_type::{Q4_RUN, Q8_RUN};
pub(crate) use writer::KvWriter;

/// Shape of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads held.
    pub heads: usize,
    /// Elements of a key, a multiple of 16.
    pub head_dim: usize,
    /// Elements of a value, a multiple of 16.
    pub value_dim: usize,
    /// Element type.
    pub kv_type: KvType,
}

impl KvShape {
    pub const fn page_bytes(self) -> usize {
        self.heads * self.head_bytes()
    }

    /// Elements of keys, values and queries that callers rotate together: those of quantised types.
    pub fn rotated(self) -> Option<usize> {
        let part = 1 << (self.head_dim | self.value_dim).trailing_zeros();
        self.kv_type.is_quantised().then_some(part)
    }

    /// Bytes of one head in a page.
    const fn head_bytes(self) -> usize {
        self.key_bytes(self.head_dim) + self.value_bytes()
    }

    /// Bytes of the keys of `dim` elements of one head in a page, scales included.
    const fn key_bytes(self, dim: usize) -> usize {
        key_elements(self.kv_type, dim) + self.scale_bytes(dim)
    }

    /// Bytes of the values of one head in a page, scales included.
    const fn value_bytes(self) -> usize {
        self.value_elements() + self.scale_bytes(self.value_dim)
    }

    const fn scale_bytes(self, dim: usize) -> usize {
        match self.kv_type.run() {
            None => 0,
            Some(run) => 2 * PAGE * dim.div_ceil(run),
        }
    }

    /// Bytes of the values of one head in a page, where the scales begin.
    const fn value_elements(self) -> usize {
        PAGE * self.value_dim * self.kv_type.value_bits() / 8
    }
}

/// Bytes of the keys of `dim` elements of one head in a page, where the scales begin.
const fn key_elements(kv_type: KvType, dim: usize) -> usize {
    PAGE * dim * kv_type.key_bits() / 8
}

/// Shape of a layer's states, all in f32. For each head and page it has the state before the page's
/// first position, and the rows since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Heads held.
    pub heads: usize,
    /// Elements of a head's state.
    pub len: usize,
    /// Elements of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

impl StateShape {
    /// Elements of a state with what fills its last cache line.
    pub(crate) const fn padded(self) -> usize {
        self.len.next_multiple_of(16)
    }

    /// Elements of a head in a page.
    pub(crate) const fn head_len(self) -> usize {
        self.padded() + PAGE * (self.head_dim + self.value_dim)
    }

    pub const fn page_bytes(self) -> usize {
        4 * self.heads * self.head_len()
    }
}

/// Shape of a layer that is a gated delta net. Each page has the state before its first position,
/// and the facts of its own positions that later rows need. All are in f32 but for sums of decays
/// in f64. Inputs of the convolution are `(64, channels)`, keys `(key_heads, head_dim, 64)`. Each
/// head has the state `(head_dim, value_dim)`, differences `(64, value_dim)` and sums
/// `(decays, 64)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Value heads held.
    pub heads: usize,
    /// Key heads held.
    pub key_heads: usize,
    /// Elements of a key, a multiple of 16.
    pub head_dim: usize,
    /// Elements of a value, a multiple of 16.
    pub value_dim: usize,
    /// Inputs that the convolution looks at, the newest included.
    pub taps: usize,
    /// Decays of a head: see [`StateRule::decays`](crate::StateRule::decays).
    pub decays: usize,
}

impl DeltaShape {
    /// Channels of the convolution.
    pub const fn channels(self) -> usize {
        2 * self.key_heads * self.head_dim + self.heads * self.value_dim
    }

    /// Elements of a value head in a page.
    const fn head_len(self) -> usize {
        (self.head_dim + PAGE) * self.value_dim + 2 * PAGE * self.decays
    }

    /// Elements before the value heads of a page.
    const fn shared_len(self) -> usize {
        PAGE * (self.channels() + self.key_heads * self.head_dim)
    }

    pub const fn page_bytes(self) -> usize {
        4 * (self.shared_len() + self.heads * self.head_len())
    }
}

/// A value head of a page, as [`DeltaShape`] says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaHead {
    pub(crate) state: *mut f32,
    pub(crate) deltas: *mut f32,
    pub(crate) sums: *mut f64,
}

/// Contents of a layer in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerStore {
    /// Keys and values of each position.
    Rows(KvShape),
    /// Keys of each position, whose first `value_dim` elements are the values too: latent
    /// attention, which so keeps each number once.
    Latent(KvShape),
    /// As `Latent`, for positions that an indexer selects. Index keys of this many elements are
    /// behind the keys; 0 in layers that use the selection of a layer before.
    Indexed(KvShape, usize),
    /// As `Rows`, where an indexer selects pools of positions. Index keys of this many elements, in
    /// f32, are behind the heads.
    Pooled(KvShape, usize),
    /// As `Indexed`, where an indexer selects pools of positions. Index rows are in f32: a key of
    /// this many elements, or its input, and as many gates.
    IndexedPools(KvShape, usize),
    /// A state of fixed size.
    State(StateShape),
    /// The state of a gated delta net.
    Delta(DeltaShape),
    /// Nothing: it reads another layer's cache.
    Nothing,
}

impl LayerStore {
    const fn heads(self) -> usize {
        match self {
            Self::Rows(shape)
            | Self::Latent(shape)
            | Self::Indexed(shape, _)
            | Self::Pooled(shape, _)
            | Self::IndexedPools(shape, _) => shape.heads,
            Self::State(shape) => shape.heads,
            Self::Delta(_) => 1, // in one piece
            Self::Nothing => 0,
        }
    }

    pub const fn page_bytes(self) -> usize {
        match self {
            Self::Rows(shape) => shape.page_bytes(),
            Self::Latent(shape) => shape.heads * shape.key_bytes(shape.head_dim),
            Self::Indexed(shape, dim) => {
                shape.heads * (shape.key_bytes(shape.head_dim) + shape.key_bytes(dim))
            }
            Self::Pooled(shape, dim) => shape.page_bytes() + 4 * PAGE * dim,
            Self::IndexedPools(shape, dim) => {
                shape.heads * shape.key_bytes(shape.head_dim) + 8 * PAGE * dim
            }
            Self::State(shape) => shape.page_bytes(),
            Self::Delta(shape) => shape.page_bytes(),
            Self::Nothing => 0,
        }
    }
}

/// A layer's place in the cache.
#[derive(Clone, Copy, Debug)]
struct CacheLayer {
    pool: usize,
    store: LayerStore,
    /// Byte offset in a page of its pool.
    start: usize,
    heads: usize,
    head_bytes: usize,
}

/// Pages that are numbered together.
#[derive(Debug)]
struct Pool {
    pages: usize,
    page_bytes: usize,
    data: HugeMap,
}

impl Pool {
    /// Byte range of a page.
    fn place(&self, page: u32) -> Range<usize> {
        let page = page as usize;
        assert!(page < self.pages, "page {page} of {}", self.pages);
        page * self.page_bytes..(page + 1) * self.page_bytes
    }
}

/// Pages of all layers.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<CacheLayer>,
    pools: Vec<Pool>,
}

impl KvCache {
    /// A cache of `layers`, each with the index of its pool. Pool `i` has `pages[i]` pages.
    ///
    /// # Errors
    /// [`Error::Memory`] when the address space cannot be reserved.
    ///
    /// # Panics
    /// If the size of a key or value is not a multiple of 16, or there is no such pool. Also if a
    /// value that is part of its key is longer than the key, or of a type that latent layers have
    /// not.
    pub fn new(layers: &[(usize, LayerStore)], pages: &[usize]) -> Result<Self, Error> {
        let mut page_bytes = vec![0; pages.len()];
        let place = |&(pool, store): &(usize, LayerStore)| {
            if let LayerStore::Rows(shape)
            | LayerStore::Latent(shape)
            | LayerStore::Indexed(shape, _)
            | LayerStore::Pooled(shape, _)
            | LayerStore::IndexedPools(shape, _) = store
            {
                let (head_dim, value_dim) = (shape.head_dim, shape.value_dim);
                let within = match store {
                    LayerStore::Rows(_) | LayerStore::Pooled(..) => true,
                    _ => value_dim <= head_dim && shape.kv_type.of_latent() == shape.kv_type,
                };
                let fits = head_dim.is_multiple_of(16) && value_dim.is_multiple_of(16) && within;
                assert!(fits, "{shape:?}");
            }
            let start = page_bytes[pool];
            page_bytes[pool] += store.page_bytes();
            CacheLayer {
                pool,
                store,
                start,
                heads: store.heads(),
                head_bytes: match store {
                    LayerStore::Pooled(shape, _) => shape.head_bytes(),
                    LayerStore::IndexedPools(shape, _) => shape.key_bytes(shape.head_dim),
                    _ => store.page_bytes() / store.heads().max(1),
                },
            }
        };
        let layers = layers.iter().map(place).collect();
        let pool = |(&page_bytes, &pages): (&usize, &usize)| {
            // More than the address space is refused by the system, with a reason.
            let bytes = page_bytes.saturating_mul(pages);
            Ok(Pool {
                pages,
                page_bytes,
                data: HugeMap::zeroed(bytes)?,
            })
        };
        let pools = page_bytes.iter().zip(pages).map(pool);
        Ok(Self {
            layers,
            pools: pools.collect::<Result<_, Error>>()?,
        })
    }

    /// A cache of `layers` layers of one shape, in one pool of `pages` pages.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    ///
    /// # Panics
    /// The errors of [`new`](Self::new).
    pub fn uniform(shape: KvShape, layers: usize, pages: usize) -> Result<Self, Error> {
        Self::new(&vec![(0, LayerStore::Rows(shape)); layers], &[pages])
    }

    /// Pages of the first pool.
    pub fn pages(&self) -> usize {
        self.pools[0].pages
    }

    pub fn pool_pages(&self) -> impl Iterator<Item = usize> {
        self.pools.iter().map(|pool| pool.pages)
    }

    /// All layers of a page of a pool, as they lie in memory; empty where no layer is in the pool.
    ///
    /// # Panics
    /// If there is no such pool or page.
    pub fn page_data(&self, pool: usize, page: u32) -> &[u8] {
        let pool = &self.pools[pool];
        &pool.data[pool.place(page)]
    }

    /// Like [`page_data`](Self::page_data), to be overwritten with bytes of such a page.
    ///
    /// # Panics
    /// If there is no such pool or page.
    pub fn page_data_mut(&mut self, pool: usize, page: u32) -> &mut [u8] {
        let pool = &mut self.pools[pool];
        let place = pool.place(page);
        &mut pool.data[place]
    }

    /// Pool and store of each layer.
    pub fn layers(&self) -> impl Iterator<Item = (usize, LayerStore)> {
        self.layers.iter().map(|layer| (layer.pool, layer.store))
    }

    /// The shape of a layer's keys and values.
    ///
    /// # Panics
    /// If it keeps none.
    pub fn rows(&self, layer: usize) -> KvShape {
        match self.layers[layer].store {
            LayerStore::Rows(shape)
            | LayerStore::Latent(shape)
            | LayerStore::Indexed(shape, _)
            | LayerStore::Pooled(shape, _)
            | LayerStore::IndexedPools(shape, _) => shape,
            other => panic!("layer {layer} keeps {other:?}"),
        }
    }

    /// Elements of a layer's index rows, which are its keys where these have no gates.
    ///
    /// # Panics
    /// If it keeps none.
    pub(crate) fn index_dim(&self, layer: usize) -> usize {
        match self.layers[layer].store {
            LayerStore::Indexed(_, dim) | LayerStore::Pooled(_, dim) => dim,
            LayerStore::IndexedPools(_, dim) => 2 * dim,
            other => panic!("layer {layer} keeps {other:?}"),
        }
    }

    /// Elements of these that queries multiply: the first.
    pub(crate) fn index_key_dim(&self, layer: usize) -> usize {
        match self.layers[layer].store {
            LayerStore::IndexedPools(_, dim) => dim,
            _ => self.index_dim(layer),
        }
    }

    /// Whether a layer's values are the first elements of its keys.
    pub(crate) fn is_latent(&self, layer: usize) -> bool {
        matches!(
            self.layers[layer].store,
            LayerStore::Latent(_) | LayerStore::Indexed(..) | LayerStore::IndexedPools(..)
        )
    }

    /// Whether a layer's keys lie position by position, as [`LayerStore::Indexed`] says.
    pub(crate) fn is_selected(&self, layer: usize) -> bool {
        matches!(
            self.layers[layer].store,
            LayerStore::Indexed(..) | LayerStore::IndexedPools(..)
        )
    }

    /// The shape of a layer's states.
    ///
    /// # Panics
    /// If it keeps none.
    pub(crate) fn states(&self, layer: usize) -> StateShape {
        match self.layers[layer].store {
            LayerStore::State(shape) => shape,
            other => panic!("layer {layer} keeps {other:?}"),
        }
    }

    /// Elements `part` of a page of states of one head.
    ///
    /// # Panics
    /// If there are no such states or elements.
    pub(crate) fn state_part(&self, layer: usize, page: u32, part: Range<usize>) -> &[f32] {
        assert!(part.end <= self.states(layer).head_len(), "{part:?}");
        let start = self.offset(layer, page, 0) + 4 * part.start;
        let data = &self.pools[self.layers[layer].pool].data;
        let bytes = &data[start..start + 4 * part.len()];
        // SAFETY: layers start at multiples of 64 bytes, and all bits are numbers.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), part.len()) }
    }

    /// The shape of a layer that is a gated delta net.
    ///
    /// # Panics
    /// If it is another.
    pub(crate) fn delta(&self, layer: usize) -> DeltaShape {
        match self.layers[layer].store {
            LayerStore::Delta(shape) => shape,
            other => panic!("layer {layer} keeps {other:?}"),
        }
    }

    /// Bytes reserved; resident memory grows up to this as pages are used.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.pools.iter().map(|pool| pool.data.len() as u64).sum())
    }

    /// Byte offset in its pool of one of a layer's heads in a page.
    fn offset(&self, layer: usize, page: u32, head: usize) -> usize {
        let place = &self.layers[layer];
        let (page, pool) = (page as usize, &self.pools[place.pool]);
        assert!(
            page < pool.pages && head < place.heads,
            "layer {layer}, page {page}, head {head} of {:?} with {} pages",
            place.store,
            pool.pages
        );
        page * pool.page_bytes + place.start + head * place.head_bytes
    }

    /// A head of a page; `next` are the page and the head that will be read after it. Values that
    /// are part of the keys lie as these do: `(value_dim, 64)`, or, where positions are
    /// [selected](Self::is_selected), in rows.
    pub(crate) fn page(
        &self,
        layer: usize,
        (page, head): (u32, usize),
        next: Option<(u32, usize)>,
    ) -> PageView {
        let shape = self.rows(layer);
        let start = self.offset(layer, page, head);
        let next = next.map_or(start, |(page, head)| self.offset(layer, page, head));
        let place = &self.layers[layer];
        let bytes = &self.pools[place.pool].data[start..start + place.head_bytes];
        let (keys, values) = bytes.split_at(shape.key_bytes(shape.head_dim));
        let key_scales = &keys[key_elements(shape.kv_type, shape.head_dim)..];
        let (values, scales) = match self.is_latent(layer) {
            true => (keys, key_scales),
            false => (values, &values[shape.value_elements()..]),
        };
        PageView {
            keys: keys.as_ptr(),
            key_scales: key_scales.as_ptr().cast(),
            values: values.as_ptr(),
            value_scales: scales.as_ptr().cast(),
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            to_next: next as isize - start as isize,
            values_to_next: next as isize - start as isize,
            cap: 0.0,
        }
    }

    /// The index keys of a page, without values.
    pub(crate) fn index_page(&self, layer: usize, page: u32) -> PageView {
        let (shape, dim) = (self.rows(layer), self.index_dim(layer));
        let (start, len, kv_type) = match self.is_pooled(layer) {
            true => (self.pooled_offset(layer, page), 4 * PAGE * dim, KvType::F32),
            false => {
                let start = self.offset(layer, page, 0) + shape.key_bytes(shape.head_dim);
                (start, shape.key_bytes(dim), shape.kv_type)
            }
        };
        let keys = &self.pools[self.layers[layer].pool].data[start..start + len];
        let scales = &keys[key_elements(kv_type, dim)..];
        PageView {
            keys: keys.as_ptr(),
            key_scales: scales.as_ptr().cast(),
            values: keys.as_ptr(),
            value_scales: scales.as_ptr().cast(),
            head_dim: self.index_key_dim(layer),
            value_dim: 0,
            to_next: 0,
            values_to_next: 0,
            cap: 0.0,
        }
    }

    /// Writes key and value of one position, `(heads, head_dim)` and `(heads, value_dim)`, into
    /// slot `slot` (0..64) of a page. Where values are part of the keys `value` is empty.
    pub fn write(&mut self, layer: usize, page: u32, slot: usize, key: &[f32], value: &[f32]) {
        // SAFETY: one thread.
        unsafe { self.writer(layer).write(page, slot, key, value) }
    }

    /// For writing disjoint positions of a layer from several threads.
    pub(crate) fn writer(&mut self, layer: usize) -> KvWriter<'_> {
        let data: *mut u8 = self.pools[self.layers[layer].pool].data.as_mut_ptr();
        KvWriter {
            cache: self,
            layer,
            data,
        }
    }

    /// Fills every page with NaN: for tests that what was there before must not matter.
    pub fn soil(&mut self) {
        for pool in &mut self.pools {
            pool.data.fill(0xff);
        }
    }
}
