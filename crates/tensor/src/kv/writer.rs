//! Writes of a position, or of a head's states, by one thread each.

use std::ops::Range;

use super::elements::{write_key, write_runs, write_value};
use super::{DeltaHead, DeltaShape, KvCache, KvType, StateShape, key_elements};
use crate::attention::PAGE;

/// Writes positions; see [`KvCache::writer`].
#[derive(Debug)]
pub(crate) struct KvWriter<'a> {
    pub(super) cache: &'a KvCache,
    pub(super) layer: usize,
    /// Memory of the layer's pool.
    pub(super) data: *mut u8,
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

    /// Elements `part` of a page of states of one head.
    ///
    /// # Safety
    /// While they are in use, no other thread reads or writes them.
    #[allow(clippy::mut_from_ref, reason = "the contract gives it to one thread")]
    pub(crate) unsafe fn state_part(&self, page: u32, part: Range<usize>) -> &mut [f32] {
        assert!(part.end <= self.states().head_len(), "{part:?}");
        let start = self.cache.offset(self.layer, page, 0);
        // SAFETY: within the page, at a multiple of 4 bytes.
        unsafe {
            let first = self.data.add(start).cast::<f32>().add(part.start);
            std::slice::from_raw_parts_mut(first, part.len())
        }
    }

    pub(crate) const fn cache(&self) -> &KvCache {
        self.cache
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
