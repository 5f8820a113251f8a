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
//! a position's key is in two runs, `(64, value_dim)` and `(64, head_dim - value_dim)`. So reading a
//! selected position touches no others. The indexer's own keys `(dim, 64)` follow.

mod pooled;

use std::ops::Range;
use std::str::FromStr;

use half::f16;
use half::slice::HalfFloatSliceExt;
use paceline_base::{Bytes, KernelClass};

use crate::attention::{PAGE, PageView};
use crate::error::Error;
use crate::memory::HugeMap;

/// Elements that share a scale in [`KvType::Q8`]; the last of a head may be fewer.
pub(crate) const Q8_RUN: usize = 32;

/// [`Q8_RUN`] in [`KvType::Q4`]. With 32 a position has a quarter bit more for each element, and
/// SmolLM2's text is no more likely.
pub(crate) const Q4_RUN: usize = 64;

/// Element type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Half precision, rounded to nearest even: the kernel class `cpu`.
    F16,
    /// Single precision: the kernel class `cpu-f32`.
    F32,
    /// A byte each and a scale for 32: 0.27 of the memory of `F32`.
    Q8,
    /// Keys of five bits and values of four, a scale for 64: 0.15 of the memory of `F32`. Layers of
    /// latent attention have bytes ([`of_latent`](Self::of_latent)).
    Q4,
}

impl KvType {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::F16, Self::F32, Self::Q8, Self::Q4];

    /// The name used in options and results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        }
    }

    /// The default of a kernel class.
    pub const fn of(class: KernelClass) -> Self {
        match class {
            KernelClass::CpuF32 => Self::F32,
            _ => Self::F16,
        }
    }

    /// The type that layers of latent attention have: their keys are their values too, so that they
    /// are few and have no bits to lose.
    #[must_use]
    pub const fn of_latent(self) -> Self {
        match self {
            Self::Q4 => Self::Q8,
            other => other,
        }
    }

    /// Whether elements are integers with scales.
    pub const fn is_quantised(self) -> bool {
        self.run().is_some()
    }

    /// Bits of an element on average, scales included, in heads of whole runs.
    pub fn stored_bits(self) -> f64 {
        let scale = self.run().map_or(0.0, |run| 16.0 / run as f64);
        (self.key_bits() + self.value_bits()) as f64 / 2.0 + scale
    }

    /// Elements that share a scale, if some do.
    const fn run(self) -> Option<usize> {
        match self {
            Self::F16 | Self::F32 => None,
            Self::Q8 => Some(Q8_RUN),
            Self::Q4 => Some(Q4_RUN),
        }
    }

    /// Bits of an element of a key, scales left out.
    pub(crate) const fn key_bits(self) -> usize {
        match self {
            Self::F16 => 16,
            Self::F32 => 32,
            Self::Q8 => 8,
            Self::Q4 => 5,
        }
    }

    /// Bits of an element of a value.
    const fn value_bits(self) -> usize {
        match self {
            Self::Q4 => 4,
            other => other.key_bits(),
        }
    }
}

/// Not the name of a storage type of keys and values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown type of keys and values {0:?}, expected f16, f32, q8 or q4")]
pub struct UnknownKvType(pub String);

impl FromStr for KvType {
    type Err = UnknownKvType;

    fn from_str(name: &str) -> Result<Self, UnknownKvType> {
        Self::ALL
            .into_iter()
            .find(|kv_type| kv_type.name() == name)
            .ok_or_else(|| UnknownKvType(name.to_owned()))
    }
}

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
/// head has the state `(head_dim, value_dim)`, differences `(64, value_dim)` and sums `(64,)`.
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
}

impl DeltaShape {
    /// Channels of the convolution.
    pub const fn channels(self) -> usize {
        2 * self.key_heads * self.head_dim + self.heads * self.value_dim
    }

    /// Elements of a value head in a page.
    const fn head_len(self) -> usize {
        (self.head_dim + PAGE) * self.value_dim + 2 * PAGE
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
            | Self::Pooled(shape, _) => shape.heads,
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
            | LayerStore::Pooled(shape, _) = store
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
            | LayerStore::Pooled(shape, _) => shape,
            other => panic!("layer {layer} keeps {other:?}"),
        }
    }

    /// Elements of a layer's index keys.
    ///
    /// # Panics
    /// If it keeps none.
    pub(crate) fn index_dim(&self, layer: usize) -> usize {
        match self.layers[layer].store {
            LayerStore::Indexed(_, dim) | LayerStore::Pooled(_, dim) => dim,
            other => panic!("layer {layer} keeps {other:?}"),
        }
    }

    /// Whether a layer's values are the first elements of its keys.
    pub(crate) fn is_latent(&self, layer: usize) -> bool {
        matches!(
            self.layers[layer].store,
            LayerStore::Latent(_) | LayerStore::Indexed(..)
        )
    }

    /// Whether a layer's keys lie position by position, as [`LayerStore::Indexed`] says.
    pub(crate) fn is_selected(&self, layer: usize) -> bool {
        matches!(self.layers[layer].store, LayerStore::Indexed(..))
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
            head_dim: dim,
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

/// Writes positions; see [`KvCache::writer`].
#[derive(Debug)]
pub(crate) struct KvWriter<'a> {
    cache: &'a KvCache,
    layer: usize,
    /// Memory of the layer's pool.
    data: *mut u8,
}

// SAFETY: the contracts of `write` and `state` give each position, or head of a page, to one thread
// at a time, and no other thread reads it.
unsafe impl Sync for KvWriter<'_> {}

impl KvWriter<'_> {
    /// See [`KvCache::write`].
    ///
    /// # Safety
    /// No other thread writes this position.
    pub(crate) unsafe fn write(&self, page: u32, slot: usize, key: &[f32], value: &[f32]) {
        assert!(slot < PAGE, "slot {slot}");
        let shape = self.cache.rows(self.layer);
        let latent = self.cache.is_latent(self.layer);
        let (k, v) = (shape.head_dim, if latent { 0 } else { shape.value_dim });
        assert_eq!((key.len(), value.len()), (shape.heads * k, shape.heads * v));
        for head in 0..shape.heads {
            let start = self.cache.offset(self.layer, page, head);
            let (key, value) = (&key[head * k..][..k], &value[head * v..][..v]);
            // SAFETY: one head of a page lies within the cache; elements and scales of other
            // positions are not touched.
            unsafe {
                let keys = self.data.add(start);
                match self.cache.is_selected(self.layer) {
                    true => write_runs(shape, key, keys, slot),
                    false => write_key(shape.kv_type, key, keys, slot),
                }
                if !latent {
                    write_value(shape, value, keys.add(shape.key_bytes(k)), slot);
                }
            }
        }
    }

    /// Writes the index key of a position.
    ///
    /// # Safety
    /// No other thread writes this position.
    pub(crate) unsafe fn write_index(&self, page: u32, slot: usize, key: &[f32]) {
        assert!(slot < PAGE, "slot {slot}");
        let (shape, dim) = (
            self.cache.rows(self.layer),
            self.cache.index_dim(self.layer),
        );
        assert_eq!(key.len(), dim);
        let (start, kv_type) = match self.cache.is_pooled(self.layer) {
            true => (self.cache.pooled_offset(self.layer, page), KvType::F32),
            false => {
                let start = self.cache.offset(self.layer, page, 0);
                (start + shape.key_bytes(shape.head_dim), shape.kv_type)
            }
        };
        // SAFETY: the index keys of a page lie within the cache; elements and scales of other
        // positions are not touched.
        unsafe { write_key(kv_type, key, self.data.add(start), slot) }
    }

    /// Copies the keys of positions, each a page and a slot of `layer` of `from`, into the first
    /// slots of a page. Both layers keep keys of one KV head as [`LayerStore::Indexed`] says.
    ///
    /// # Safety
    /// No other thread reads or writes the page.
    pub(crate) unsafe fn copy(
        &self,
        page: u32,
        (from, layer): (&KvCache, usize),
        positions: &[(u32, usize)],
    ) {
        let shape = self.cache.rows(self.layer);
        let alike = shape == from.rows(layer)
            && from.is_selected(layer)
            && self.cache.is_selected(self.layer);
        assert!(alike && positions.len() <= PAGE, "{shape:?}");
        let bytes = |elements: usize| elements * shape.kv_type.key_bits() / 8;
        let (first, second) = (
            bytes(shape.value_dim),
            bytes(shape.head_dim - shape.value_dim),
        );
        let scales = key_elements(shape.kv_type, shape.head_dim);
        let runs = shape.scale_bytes(shape.head_dim) / (2 * PAGE);
        let data = from.pools[from.layers[layer].pool].data.as_ptr();
        // SAFETY: both runs and the scales of a position lie within a page of either cache.
        unsafe {
            let to = self.data.add(self.cache.offset(self.layer, page, 0));
            for (slot, &(page, at)) in positions.iter().enumerate() {
                let from = data.add(from.offset(layer, page, 0));
                let run = |start: usize, len: usize| {
                    let (from, to) = (from.add(start + at * len), to.add(start + slot * len));
                    from.copy_to_nonoverlapping(to, len);
                };
                run(0, first);
                run(PAGE * first, second);
                (0..runs).for_each(|row| run(scales + 2 * PAGE * row, 2));
            }
        }
    }

    /// A head of a page of states: the state, then keys and values of the positions.
    ///
    /// # Safety
    /// While it is in use, no other thread writes this head of the page, and none reads it that
    /// this one writes.
    #[allow(clippy::mut_from_ref, reason = "the contract gives it to one thread")]
    pub(crate) unsafe fn state(&self, page: u32, head: usize) -> &mut [f32] {
        let (start, len) = (
            self.cache.offset(self.layer, page, head),
            self.states().head_len(),
        );
        // SAFETY: one head of a page lies within the cache, at a multiple of 64 bytes.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start).cast(), len) }
    }

    /// Like [`state`](Self::state), for a page that is only read.
    ///
    /// # Safety
    /// While it is in use, no thread writes this head of the page.
    pub(crate) unsafe fn state_before(&self, page: u32, head: usize) -> &[f32] {
        let (start, len) = (
            self.cache.offset(self.layer, page, head),
            self.states().head_len(),
        );
        // SAFETY: as for `state`.
        unsafe { std::slice::from_raw_parts(self.data.add(start).cast(), len) }
    }

    /// The shape of the layer's gated delta net.
    pub(crate) fn delta(&self) -> DeltaShape {
        self.cache.delta(self.layer)
    }

    /// A page of a gated delta net, from element `first` on, which lies within it.
    fn delta_at(&self, page: u32, first: usize) -> *mut f32 {
        let start = self.cache.offset(self.layer, page, 0);
        // SAFETY: within the page, at a multiple of 64 bytes.
        unsafe { self.data.add(start).cast::<f32>().add(first) }
    }

    /// Inputs of a position.
    ///
    /// # Safety
    /// While they are in use, no thread writes them.
    pub(crate) unsafe fn delta_inputs(&self, page: u32, slot: usize) -> &[f32] {
        let n = self.delta().channels();
        // SAFETY: `slot` is below 64.
        unsafe { std::slice::from_raw_parts(self.delta_at(page, slot % PAGE * n), n) }
    }

    /// Like [`delta_inputs`](Self::delta_inputs), for writing.
    ///
    /// # Safety
    /// While they are in use, no other thread reads or writes them.
    #[allow(clippy::mut_from_ref, reason = "the contract gives it to one thread")]
    pub(crate) unsafe fn delta_inputs_mut(&self, page: u32, slot: usize) -> &mut [f32] {
        let n = self.delta().channels();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.delta_at(page, slot % PAGE * n), n) }
    }

    /// Keys of a head, `(head_dim, 64)`.
    pub(crate) fn delta_keys(&self, page: u32, head: usize) -> *mut f32 {
        let shape = self.delta();
        assert!(head < shape.key_heads, "key head {head} of {shape:?}");
        self.delta_at(page, PAGE * (shape.channels() + head * shape.head_dim))
    }

    /// Stores the keys `(key_heads, head_dim)` of a position.
    ///
    /// # Safety
    /// No other thread reads or writes this position.
    pub(crate) unsafe fn write_delta_keys(&self, page: u32, slot: usize, keys: &[f32]) {
        let shape = self.delta();
        assert!(slot < PAGE && keys.len() == shape.key_heads * shape.head_dim);
        let to = self.delta_at(page, PAGE * shape.channels());
        for (i, key) in keys.iter().enumerate() {
            // SAFETY: keys of all heads lie behind each other.
            unsafe { to.add(i * PAGE + slot).write(*key) };
        }
    }

    /// A value head.
    pub(crate) fn delta_head(&self, page: u32, head: usize) -> DeltaHead {
        let shape = self.delta();
        assert!(head < shape.heads, "value head {head} of {shape:?}");
        let state = self.delta_at(page, shape.shared_len() + head * shape.head_len());
        // SAFETY: within the head.
        unsafe {
            let deltas = state.add(shape.head_dim * shape.value_dim);
            DeltaHead {
                state,
                deltas,
                sums: deltas.add(PAGE * shape.value_dim).cast(),
            }
        }
    }

    /// The shape of the layer's states.
    pub(crate) fn states(&self) -> StateShape {
        self.cache.states(self.layer)
    }
}

/// Stores a key, `x`, in the column of its position.
///
/// # Safety
/// `out` is good for the keys of one head of a page.
unsafe fn write_key(kv_type: KvType, x: &[f32], out: *mut u8, slot: usize) {
    let column = |d: usize| slot + d * PAGE;
    // SAFETY: elements and scales lie within the head.
    unsafe {
        let scales = out.add(key_elements(kv_type, x.len())).cast::<f16>();
        if kv_type != KvType::Q4 {
            return write_elements(kv_type, x, out, (column, scales.add(slot)));
        }
        let bits = out.add(PAGE * x.len() / 2);
        for (run, x) in x.chunks(Q4_RUN).enumerate() {
            let (scale, q) = quantise::<KEY_LEVELS>(x);
            for (i, pair) in q[..x.len()].chunks_exact(2).enumerate() {
                let row = run * Q4_RUN / 2 + i;
                out.add(row * PAGE + slot)
                    .write(pair[0] & 15 | pair[1] << 4);
            }
            for (i, eight) in q[..x.len()].chunks_exact(8).enumerate() {
                let row = run * Q4_RUN / 8 + i;
                let byte = eight.iter().rev().fold(0, |byte, q| byte << 1 | q >> 4);
                bits.add(row * PAGE + slot).write(byte);
            }
            scales.add(run * PAGE + slot).write_unaligned(scale);
        }
    }
}

/// Stores a key, `x`, in the two runs of its position; see [`LayerStore::Indexed`].
///
/// # Safety
/// `out` is good for the keys of one head of a page.
unsafe fn write_runs(shape: KvShape, x: &[f32], out: *mut u8, slot: usize) {
    let (first, second) = (shape.value_dim, x.len() - shape.value_dim);
    let runs = |d: usize| match d.checked_sub(first) {
        None => slot * first + d,
        Some(d) => PAGE * first + slot * second + d,
    };
    // SAFETY: elements and scales lie within the head.
    unsafe {
        let scales = out.add(key_elements(shape.kv_type, x.len())).cast::<f16>();
        write_elements(shape.kv_type, x, out, (runs, scales.add(slot)));
    }
}

/// Stores a value, `x`, in the row of its position.
///
/// # Safety
/// `out` is good for the values of one head of a page.
unsafe fn write_value(shape: KvShape, x: &[f32], out: *mut u8, slot: usize) {
    let row = |d: usize| slot * x.len() + d;
    // SAFETY: elements and scales lie within the head.
    unsafe {
        let scales = out.add(shape.value_elements()).cast::<f16>();
        if shape.kv_type != KvType::Q4 {
            let scales = scales.add(slot);
            return write_elements(shape.kv_type, x, out, (row, scales));
        }
        for (run, x) in x.chunks(Q4_RUN).enumerate() {
            let (scale, q) = quantise::<VALUE_LEVELS>(x);
            let to = out.add((slot * shape.value_dim + run * Q4_RUN) / 2);
            for (i, pair) in q[..x.len()].chunks_exact(2).enumerate() {
                to.add(i).write(pair[0] | pair[1] << 4);
            }
            scales.add(run * PAGE + slot).write_unaligned(scale);
        }
    }
}

/// Stores one position of a head in whole bytes, element `d` at `to(d)`; `scales` points to the
/// position's first.
///
/// # Safety
/// `out` is good for the keys or the values of one head of a page.
unsafe fn write_elements(
    kv_type: KvType,
    x: &[f32],
    out: *mut u8,
    (to, scales): (impl Fn(usize) -> usize, *mut f16),
) {
    for (run, x) in x.chunks(Q8_RUN).enumerate() {
        let at = |d: usize| to(run * Q8_RUN + d);
        // SAFETY: element and scale lie within the head.
        unsafe {
            match kv_type {
                KvType::F16 => {
                    let mut halves = [f16::ZERO; Q8_RUN];
                    halves[..x.len()].convert_from_f32_slice(x);
                    for (d, half) in halves[..x.len()].iter().enumerate() {
                        out.cast::<f16>().add(at(d)).write_unaligned(*half);
                    }
                }
                KvType::F32 => {
                    for (d, value) in x.iter().enumerate() {
                        out.cast::<f32>().add(at(d)).write_unaligned(*value);
                    }
                }
                KvType::Q8 => {
                    let (scale, q) = quantise_bytes(x);
                    for (d, q) in q[..x.len()].iter().enumerate() {
                        out.cast::<i8>().add(at(d)).write(*q);
                    }
                    scales.add(run * PAGE).write_unaligned(scale);
                }
                KvType::Q4 => unreachable!("no whole bytes"),
            }
        }
    }
}

/// Its addition to a float rounds that to the nearest integer: 1.5 * 2^23.
const ROUND: f32 = 12_582_912.0;

fn largest(x: &[f32]) -> f32 {
    x.iter()
        .fold(0.0f32, |m, x| if x.abs() > m { x.abs() } else { m })
}

/// Up to 32 elements as bytes and their scale.
fn quantise_bytes(x: &[f32]) -> (f16, [i8; Q8_RUN]) {
    let scale = f16::from_f32(largest(x) / 127.0);
    let step = scale.to_f32();
    let mut q = [0i8; Q8_RUN];
    if step > 0.0 && step.is_finite() {
        for (q, x) in q.iter_mut().zip(x) {
            // A scale that was rounded down may leave the largest element above 127.
            *q = ((x / step).clamp(-127.0, 127.0) + ROUND - ROUND) as i8;
        }
    }
    (scale, q)
}

/// Levels of a key of [`KvType::Q4`]: `scale * (q - 15.5)`.
pub(crate) const KEY_LEVELS: u8 = 32;

/// Levels of its values: `scale * (q - 7.5)`.
pub(crate) const VALUE_LEVELS: u8 = 16;

/// Parts of a run's largest element that the outermost level is tried at. Of 64 rotated elements
/// few are near the largest one, so that finer steps are worth what they cut off.
pub(crate) const CUTS: [f32; 5] = [1.0, 0.94, 0.88, 0.82, 0.76];

/// Up to 64 elements as integers below `LEVELS` and their scale: of [`CUTS`] the first with the
/// least sum of squared errors.
fn quantise<const LEVELS: u8>(x: &[f32]) -> (f16, [u8; Q4_RUN]) {
    let (most, middle) = (f32::from(LEVELS - 1), f32::from(LEVELS - 1) / 2.0);
    let largest = largest(x);
    let mut best = (f16::from_f32(largest / middle), [0u8; Q4_RUN]);
    let mut least = f32::INFINITY;
    for cut in CUTS {
        let scale = f16::from_f32(largest * cut / middle);
        let step = scale.to_f32();
        if !(step > 0.0 && step.is_finite()) {
            continue;
        }
        let (mut q, mut error) = ([0u8; Q4_RUN], 0.0f32);
        for (q, x) in q.iter_mut().zip(x) {
            let level = (x / step + middle).clamp(0.0, most) + ROUND - ROUND;
            let off = (level - middle) * step - x;
            error += off * off;
            *q = level as u8;
        }
        if error < least {
            (best, least) = ((scale, q), error);
        }
    }
    best
}
