//! The key/value cache: pages of [`PAGE`](crate::PAGE) positions, reserved once.
//!
//! ```text
//! layer 0: page 0 | page 1 | ...      a page: for each KV head  keys   (head_dim, 64)
//! layer 1: page 0 | page 1 | ...                                values (64, head_dim)
//! ```
//!
//! Page numbers are the same in every layer. Which sequence owns which page is the caller's
//! business; memory is touched (and so taken from the system) only when a page is first written.

use half::f16;
use memmap2::MmapMut;
use paceline_base::Bytes;

use crate::attention::{PAGE, PageView};
use crate::memory::reserve;
use crate::packed::Error;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Half precision, rounded to nearest even: the kernel class `cpu`.
    F16,
    /// Single precision: the kernel class `cpu-f32`.
    F32,
}

impl KvType {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Shape of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers held.
    pub layers: usize,
    /// KV heads held.
    pub heads: usize,
    /// Elements of a head, a multiple of 16.
    pub head_dim: usize,
    /// Element type.
    pub kv_type: KvType,
}

impl KvShape {
    /// Bytes of one page in one layer.
    pub const fn page_bytes(self) -> usize {
        2 * self.heads * self.head_bytes()
    }

    /// Bytes of the keys (or values) of one head in a page.
    const fn head_bytes(self) -> usize {
        PAGE * self.head_dim * self.kv_type.bytes()
    }
}

/// Pages of keys and values for all layers.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    pages: usize,
    data: MmapMut,
}

impl KvCache {
    /// A cache of `pages` pages per layer.
    ///
    /// # Errors
    /// [`Error::Memory`] when the address space cannot be reserved.
    ///
    /// # Panics
    /// If `head_dim` is not a multiple of 16.
    pub fn new(shape: KvShape, pages: usize) -> Result<Self, Error> {
        assert!(
            shape.head_dim.is_multiple_of(16),
            "head_dim {}",
            shape.head_dim
        );
        let bytes = shape
            .page_bytes()
            .checked_mul(shape.layers)
            .and_then(|b| b.checked_mul(pages));
        // More than the address space is refused by the system, with a reason.
        let data = reserve(bytes.unwrap_or(usize::MAX))?;
        Ok(Self { shape, pages, data })
    }

    /// Pages per layer.
    pub const fn pages(&self) -> usize {
        self.pages
    }

    /// The shape.
    pub const fn shape(&self) -> KvShape {
        self.shape
    }

    /// Bytes reserved; resident memory grows up to this as pages are used.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.data.len() as u64)
    }

    fn offset(&self, layer: usize, page: u32, head: usize) -> usize {
        let (page, shape) = (page as usize, self.shape);
        assert!(
            layer < shape.layers && page < self.pages && head < shape.heads,
            "layer {layer}, page {page}, head {head} of {shape:?} with {} pages",
            self.pages
        );
        (layer * self.pages + page) * shape.page_bytes() + 2 * head * shape.head_bytes()
    }

    pub(crate) fn page(&self, layer: usize, page: u32, head: usize) -> PageView {
        let start = self.offset(layer, page, head);
        let bytes = &self.data[start..start + 2 * self.shape.head_bytes()];
        PageView {
            keys: bytes.as_ptr(),
            values: bytes[self.shape.head_bytes()..].as_ptr(),
            head_dim: self.shape.head_dim,
        }
    }

    /// Writes key and value of one position, `(heads, head_dim)` each, into slot `slot`
    /// (0..64) of a page.
    pub fn write(&mut self, layer: usize, page: u32, slot: usize, key: &[f32], value: &[f32]) {
        assert!(slot < PAGE, "slot {slot}");
        let (shape, head_bytes) = (self.shape, self.shape.head_bytes());
        assert_eq!(
            (key.len(), value.len()),
            (shape.heads * shape.head_dim, key.len())
        );
        for head in 0..shape.heads {
            let start = self.offset(layer, page, head);
            let (keys, values) = self.data[start..start + 2 * head_bytes].split_at_mut(head_bytes);
            let part = head * shape.head_dim..(head + 1) * shape.head_dim;
            write_head(shape, &key[part.clone()], keys, |d| d * PAGE + slot);
            write_head(shape, &value[part], values, |d| slot * shape.head_dim + d);
        }
    }
}

/// Stores one head; `at` gives the element's place.
fn write_head(shape: KvShape, x: &[f32], out: &mut [u8], at: impl Fn(usize) -> usize) {
    for (d, &value) in x.iter().enumerate() {
        match shape.kv_type {
            KvType::F16 => {
                let bits = f16::from_f32(value).to_bits();
                out[2 * at(d)..][..2].copy_from_slice(&bits.to_ne_bytes());
            }
            KvType::F32 => out[4 * at(d)..][..4].copy_from_slice(&value.to_ne_bytes()),
        }
    }
}
