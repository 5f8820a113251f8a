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
//! [`KvType::Q8_0`] keeps 32 elements of a position as one byte each with a scale in f16. There
//! `scale = f16(max / 127)` and `q = round_ties_even(x / scale)`. Keys and values are each followed
//! by their scales, `(ceil(head_dim / 32), 64)`. Attention computes with `scale * q`, rounded once
//! to f32.
//!
//! Layers of latent attention ([`LayerStore::Latent`]) keep keys alone; their first `value_dim`
//! elements are the values. With a lightning indexer ([`LayerStore::Indexed`]) the index keys
//! `(dim, 64)` follow the keys.

use std::ops::Range;
use std::str::FromStr;

use half::f16;
use half::slice::HalfFloatSliceExt;
use paceline_base::{Bytes, KernelClass};

use crate::attention::{PAGE, PageView};
use crate::error::Error;
use crate::memory::HugeMap;

/// Elements that share a scale in [`KvType::Q8_0`]; the last of a head may be fewer.
pub(crate) const SCALED: usize = 32;

/// Element type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Half precision, rounded to nearest even: the kernel class `cpu`.
    F16,
    /// Single precision: the kernel class `cpu-f32`.
    F32,
    /// A byte each and a scale for 32: about half the memory of `F16`, and less exact.
    Q8_0,
}

impl KvType {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F16, Self::F32, Self::Q8_0];

    /// The name used in options and results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Q8_0 => "q8_0",
        }
    }

    /// The default of a kernel class.
    pub const fn of(class: KernelClass) -> Self {
        match class {
            KernelClass::CpuF32 => Self::F32,
            _ => Self::F16,
        }
    }

    /// Bytes of an element, scales left out.
    const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
            Self::Q8_0 => 1,
        }
    }
}

/// Not the name of a storage type of keys and values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown type of keys and values {0:?}, expected f16, f32 or q8_0")]
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

    /// Bytes of one head in a page.
    const fn head_bytes(self) -> usize {
        self.part_bytes(self.head_dim) + self.part_bytes(self.value_dim)
    }

    /// Bytes of the keys (or values) of one head in a page, scales included.
    const fn part_bytes(self, dim: usize) -> usize {
        let scales = match self.kv_type {
            KvType::F16 | KvType::F32 => 0,
            KvType::Q8_0 => 2 * PAGE * dim.div_ceil(SCALED),
        };
        self.element_bytes(dim) + scales
    }

    /// Bytes of the keys (or values) of one head in a page, where the scales begin.
    const fn element_bytes(self, dim: usize) -> usize {
        PAGE * dim * self.kv_type.bytes()
    }
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
    /// As `Latent`, with index keys of this many elements behind the keys.
    Indexed(KvShape, usize),
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
            Self::Rows(shape) | Self::Latent(shape) | Self::Indexed(shape, _) => shape.heads,
            Self::State(shape) => shape.heads,
            Self::Delta(_) => 1, // in one piece
            Self::Nothing => 0,
        }
    }

    pub const fn page_bytes(self) -> usize {
        match self {
            Self::Rows(shape) => shape.page_bytes(),
            Self::Latent(shape) => shape.heads * shape.part_bytes(shape.head_dim),
            Self::Indexed(shape, dim) => {
                shape.heads * (shape.part_bytes(shape.head_dim) + shape.part_bytes(dim))
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
    /// value that is part of its key is longer than the key.
    pub fn new(layers: &[(usize, LayerStore)], pages: &[usize]) -> Result<Self, Error> {
        let mut page_bytes = vec![0; pages.len()];
        let place = |&(pool, store): &(usize, LayerStore)| {
            if let LayerStore::Rows(shape)
            | LayerStore::Latent(shape)
            | LayerStore::Indexed(shape, _) = store
            {
                let (head_dim, value_dim) = (shape.head_dim, shape.value_dim);
                let within = matches!(store, LayerStore::Rows(_)) || value_dim <= head_dim;
                let fits = head_dim.is_multiple_of(16) && value_dim.is_multiple_of(16) && within;
                assert!(fits, "head_dim {head_dim}, value_dim {value_dim}");
            }
            let start = page_bytes[pool];
            page_bytes[pool] += store.page_bytes();
            CacheLayer {
                pool,
                store,
                start,
                heads: store.heads(),
                head_bytes: store.page_bytes() / store.heads().max(1),
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
            LayerStore::Rows(shape) | LayerStore::Latent(shape) | LayerStore::Indexed(shape, _) => {
                shape
            }
            other => panic!("layer {layer} keeps {other:?}"),
        }
    }

    /// Elements of a layer's index keys.
    ///
    /// # Panics
    /// If it keeps none.
    pub(crate) fn index_dim(&self, layer: usize) -> usize {
        match self.layers[layer].store {
            LayerStore::Indexed(_, dim) => dim,
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
    /// are part of the keys lie as these do, `(value_dim, 64)`.
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
        let (keys, values) = bytes.split_at(shape.part_bytes(shape.head_dim));
        let (values, scales) = match self.is_latent(layer) {
            true => (keys, &keys[shape.element_bytes(shape.head_dim)..]),
            false => (values, &values[shape.element_bytes(shape.value_dim)..]),
        };
        PageView {
            keys: keys.as_ptr(),
            key_scales: keys[shape.element_bytes(shape.head_dim)..].as_ptr().cast(),
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
        let start = self.offset(layer, page, 0);
        let place = &self.layers[layer];
        let bytes = &self.pools[place.pool].data[start..start + place.head_bytes];
        let keys = &bytes[shape.part_bytes(shape.head_dim)..];
        let scales = &keys[shape.element_bytes(dim)..];
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
            let column = Strides {
                first: slot,
                step: PAGE,
            };
            let row = Strides {
                first: slot * v,
                step: 1,
            };
            let (key, value) = (&key[head * k..][..k], &value[head * v..][..v]);
            // SAFETY: one head of a page lies within the cache; elements and scales of other
            // positions are not touched.
            unsafe {
                let keys = self.data.add(start);
                write_head(shape, key, keys, slot, column);
                if latent {
                    continue;
                }
                write_head(shape, value, keys.add(shape.part_bytes(k)), slot, row);
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
        let start = self.cache.offset(self.layer, page, 0) + shape.part_bytes(shape.head_dim);
        let column = Strides {
            first: slot,
            step: PAGE,
        };
        // SAFETY: the index keys of a page lie within the cache; elements and scales of other
        // positions are not touched.
        unsafe { write_head(shape, key, self.data.add(start), slot, column) }
    }

    /// Copies the keys of positions, each a page and a slot of `layer` of `from`, into the first
    /// slots of a page. Both layers keep keys of one KV head in the same form.
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
        assert!(
            shape == from.rows(layer) && positions.len() <= PAGE,
            "{shape:?}"
        );
        let data = from.pools[from.layers[layer].pool].data.as_ptr();
        let mut keys = [std::ptr::null(); PAGE];
        for (key, &(page, slot)) in keys.iter_mut().zip(positions) {
            let start = from.offset(layer, page, 0);
            let element = slot * shape.kv_type.bytes();
            // SAFETY: a position of a page, which lies within the cache.
            *key = unsafe { data.add(start + element) };
        }
        let (keys, dim) = (&keys[..positions.len()], shape.head_dim);
        let elements = shape.element_bytes(dim);
        // SAFETY: keys of one head lie within a page of either cache; rows of 64 elements.
        unsafe {
            let to = self.data.add(self.cache.offset(self.layer, page, 0));
            match shape.kv_type {
                KvType::F16 => copy_columns::<u16>(keys, dim, to),
                KvType::F32 => copy_columns::<u32>(keys, dim, to),
                KvType::Q8_0 => {
                    copy_columns::<u8>(keys, dim, to);
                    let mut scales = [std::ptr::null(); PAGE];
                    for ((scale, key), (_, slot)) in scales.iter_mut().zip(keys).zip(positions) {
                        *scale = key.sub(*slot).add(elements + 2 * slot);
                    }
                    let rows = dim.div_ceil(SCALED);
                    copy_columns::<u16>(&scales[..keys.len()], rows, to.add(elements));
                }
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

/// Copies columns of matrices `(rows, 64)` of elements `E` into the first columns of another. Each
/// of `from` points to the first element of a column.
///
/// # Safety
/// All columns are valid for `rows` rows, `to` for such a matrix, and nothing overlaps.
unsafe fn copy_columns<E: Copy>(from: &[*const u8], rows: usize, to: *mut u8) {
    let to = to.cast::<E>();
    for row in 0..rows {
        for (column, from) in from.iter().enumerate() {
            // SAFETY: within the matrices.
            unsafe {
                let element = from.cast::<E>().add(row * PAGE).read_unaligned();
                to.add(row * PAGE + column).write_unaligned(element);
            }
        }
    }
}

/// Addresses of one position's elements: `first + d * step`.
#[derive(Clone, Copy)]
struct Strides {
    first: usize,
    step: usize,
}

/// Stores one position of a head.
///
/// # Safety
/// `out` is good for the keys or the values of one head of a page.
unsafe fn write_head(shape: KvShape, x: &[f32], out: *mut u8, slot: usize, at: Strides) {
    let elements = shape.element_bytes(x.len());
    for (block, x) in x.chunks(SCALED).enumerate() {
        let at = |d: usize| at.first + (block * SCALED + d) * at.step;
        // SAFETY: element and scale lie within the head.
        unsafe {
            match shape.kv_type {
                KvType::F16 => {
                    let mut halves = [f16::ZERO; SCALED];
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
                KvType::Q8_0 => {
                    let (scale, q) = quantise(x);
                    for (d, q) in q[..x.len()].iter().enumerate() {
                        out.cast::<i8>().add(at(d)).write(*q);
                    }
                    let scales = out.add(elements).cast::<f16>();
                    scales.add(block * PAGE + slot).write_unaligned(scale);
                }
            }
        }
    }
}

/// Up to 32 elements as bytes and their scale.
fn quantise(x: &[f32]) -> (f16, [i8; SCALED]) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: its addition rounds to the nearest integer
    let largest = x
        .iter()
        .fold(0.0f32, |m, x| if x.abs() > m { x.abs() } else { m });
    let scale = f16::from_f32(largest / 127.0);
    let step = scale.to_f32();
    let mut q = [0i8; SCALED];
    if step > 0.0 && step.is_finite() {
        for (q, x) in q.iter_mut().zip(x) {
            // A scale that was rounded down may leave the largest element above 127.
            *q = ((x / step).clamp(-127.0, 127.0) + ROUND - ROUND) as i8;
        }
    }
    (scale, q)
}
