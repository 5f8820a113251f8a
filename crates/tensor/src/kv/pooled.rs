//! Index keys of pools of positions, behind the keys and values of a layer
//! ([`LayerStore::Pooled`], [`LayerStore::IndexedPools`]).
//!
//! A position has a row of `dim` elements in f32, `(dim, 64)` in a page. The last position of a
//! pool has the pool's key, the others have what that key is made of.

use std::ops::Range;

use half::f16;

use super::{KvCache, KvShape, KvType, KvWriter, LayerStore, key_elements};
use crate::attention::PAGE;

impl KvShape {
    /// Lines of the keys of one head in a page, an item of each position in each, and the bytes of
    /// an item.
    const fn key_lines(self) -> (usize, usize) {
        let dim = self.head_dim;
        match self.kv_type {
            KvType::F16 => (dim, 2),
            KvType::F32 => (dim, 4),
            KvType::Q8 => (dim, 1),
            KvType::Q4 => (dim / 2 + dim / 8, 1),
        }
    }

    /// Lines of scales of vectors of `dim` elements.
    const fn scale_lines(self, dim: usize) -> usize {
        self.scale_bytes(dim) / (2 * PAGE)
    }
}

impl KvCache {
    /// Byte offset of the index keys of a page.
    pub(super) fn pooled_offset(&self, layer: usize, page: u32) -> usize {
        let place = &self.layers[layer];
        self.offset(layer, page, 0) + place.heads * place.head_bytes
    }

    /// Element type of a layer's index keys.
    pub(crate) fn index_type(&self, layer: usize) -> KvType {
        match self.is_pooled(layer) {
            true => KvType::F32,
            false => self.rows(layer).kv_type,
        }
    }

    pub(super) fn is_pooled(&self, layer: usize) -> bool {
        matches!(
            self.layers[layer].store,
            LayerStore::Pooled(..) | LayerStore::IndexedPools(..)
        )
    }
}

impl KvWriter<'_> {
    /// Adds the index row of a position to `sum`.
    ///
    /// # Safety
    /// No other thread writes this position.
    pub(crate) unsafe fn add_index(&self, page: u32, slot: usize, sum: &mut [f32]) {
        assert!(slot < PAGE && sum.len() == self.cache.index_dim(self.layer));
        let start = self.cache.pooled_offset(self.layer, page);
        for (d, sum) in sum.iter_mut().enumerate() {
            // SAFETY: the index keys of a page lie within the cache.
            *sum += unsafe {
                self.data
                    .add(start)
                    .cast::<f32>()
                    .add(d * PAGE + slot)
                    .read()
            };
        }
    }

    /// Element `d` of the index rows of `out.len()` consecutive positions of a page.
    ///
    /// # Safety
    /// No other thread writes these positions.
    pub(crate) unsafe fn index_line(&self, page: u32, slot: usize, d: usize, out: &mut [f32]) {
        assert!(slot + out.len() <= PAGE && d < self.cache.index_dim(self.layer));
        let start = self.cache.pooled_offset(self.layer, page);
        // SAFETY: the index keys of a page lie within the cache.
        unsafe {
            let line = self.data.add(start).cast::<f32>().add(d * PAGE + slot);
            line.copy_to_nonoverlapping(out.as_mut_ptr(), out.len());
        }
    }

    /// Copies keys and values of positions, each a page and a slot of `layer` of `from`, into the
    /// first slots of a page. They are of the KV heads `heads`, which are all that this page has.
    /// Both layers keep rows of one shape otherwise.
    ///
    /// # Safety
    /// No other thread reads or writes the page.
    pub(crate) unsafe fn copy_heads(
        &self,
        page: u32,
        (from, layer): (&KvCache, usize),
        heads: Range<usize>,
        positions: &[(u32, usize)],
    ) {
        let (shape, mut source) = (self.cache.rows(self.layer), from.rows(layer));
        let fits = heads.len() == shape.heads && heads.end <= source.heads;
        source.heads = shape.heads;
        assert!(
            shape == source && fits && positions.len() <= PAGE,
            "{heads:?} of {shape:?}"
        );
        let data = from.pools[from.layers[layer].pool].data.as_ptr();
        let row = shape.value_elements() / PAGE;
        let keys = shape.key_bytes(shape.head_dim);
        let scale = size_of::<f16>();
        let lines = [
            (0, shape.key_lines()),
            (
                key_elements(shape.kv_type, shape.head_dim),
                (shape.scale_lines(shape.head_dim), scale),
            ),
            (
                keys + shape.value_elements(),
                (shape.scale_lines(shape.value_dim), scale),
            ),
        ];
        for (own, head) in heads.enumerate() {
            let to = self.cache.offset(self.layer, page, own);
            for (slot, &(page, at)) in positions.iter().enumerate() {
                let start = from.offset(layer, page, head);
                // SAFETY: items of a position lie within a head of a page of either cache.
                unsafe {
                    let (from, to) = (data.add(start), self.data.add(to));
                    for (first, (lines, item)) in lines {
                        for line in (0..lines).map(|line| first + line * PAGE * item) {
                            let from = from.add(line + at * item);
                            from.copy_to_nonoverlapping(to.add(line + slot * item), item);
                        }
                    }
                    let from = from.add(keys + at * row);
                    from.copy_to_nonoverlapping(to.add(keys + slot * row), row);
                }
            }
        }
    }
}
