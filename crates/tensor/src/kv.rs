//! The key/value cache: pages of [`PAGE`](crate::PAGE) positions, reserved once.
//!
//! ```text
//! page 0: layer 0 | layer 1 | ...     a layer: for each KV head  keys   (head_dim, 64)
//! page 1: layer 0 | layer 1 | ...                                values (64, head_dim)
//! ```
//!
//! A page holds its positions in all layers, so a short sequence touches little memory, all of it
//! together: in huge pages where the system has them, since attention at depth streams the cache
//! as products stream weights. Which sequence owns which page is the caller's business; memory is
//! touched (and so taken from the system) only when a page is first written.
//!
//! [`KvType::Q8_0`] keeps 32 elements of a position as one byte each with a scale in f16,
//! `scale = f16(max / 127)`, `q = round_ties_even(x / scale)`; keys and values are each followed by
//! their scales, `(ceil(head_dim / 32), 64)`. What attention computes with is `scale * q`, rounded
//! once to f32.

use std::str::FromStr;

use half::f16;
use half::slice::HalfFloatSliceExt;
use paceline_base::{Bytes, KernelClass};

use crate::attention::{PAGE, PageView};
use crate::memory::HugeMap;
use crate::packed::Error;

/// Elements that share a scale in [`KvType::Q8_0`]; the last of a head may be fewer.
pub(crate) const SCALED: usize = 32;

/// How keys and values are kept.
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

    /// The one that a class keeps unless told otherwise.
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

/// Not the name of a way to keep keys and values.
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

    /// Bytes of the keys (or values) of one head in a page, scales included.
    const fn head_bytes(self) -> usize {
        let scales = match self.kv_type {
            KvType::F16 | KvType::F32 => 0,
            KvType::Q8_0 => 2 * PAGE * self.head_dim.div_ceil(SCALED),
        };
        self.element_bytes() + scales
    }

    /// Bytes of the keys (or values) of one head in a page, where the scales begin.
    const fn element_bytes(self) -> usize {
        PAGE * self.head_dim * self.kv_type.bytes()
    }
}

/// Pages of keys and values for all layers.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    pages: usize,
    data: HugeMap,
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
        let data = HugeMap::zeroed(bytes.unwrap_or(usize::MAX))?;
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
        ((page * shape.layers + layer) * shape.heads + head) * 2 * shape.head_bytes()
    }

    /// One head of a page; `next` are the page and the head that will be read after it.
    pub(crate) fn page(
        &self,
        layer: usize,
        (page, head): (u32, usize),
        next: Option<(u32, usize)>,
    ) -> PageView {
        let start = self.offset(layer, page, head);
        let next = next.map_or(start, |(page, head)| self.offset(layer, page, head));
        let (shape, half) = (self.shape, self.shape.head_bytes());
        let bytes = &self.data[start..start + 2 * half];
        PageView {
            keys: bytes.as_ptr(),
            key_scales: bytes[shape.element_bytes()..].as_ptr().cast(),
            values: bytes[half..].as_ptr(),
            value_scales: bytes[half + shape.element_bytes()..].as_ptr().cast(),
            head_dim: shape.head_dim,
            to_next: next as isize - start as isize,
        }
    }

    /// Writes key and value of one position, `(heads, head_dim)` each, into slot `slot`
    /// (0..64) of a page.
    pub fn write(&mut self, layer: usize, page: u32, slot: usize, key: &[f32], value: &[f32]) {
        // SAFETY: one thread.
        unsafe { self.writer().write(layer, page, slot, key, value) }
    }

    /// For writing disjoint positions from several threads.
    pub(crate) fn writer(&mut self) -> Writer<'_> {
        let data: *mut u8 = self.data.as_mut_ptr();
        Writer { cache: self, data }
    }
}

/// Writes positions; see [`KvCache::writer`].
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    cache: &'a KvCache,
    data: *mut u8,
}

// SAFETY: `write`'s contract gives each position to one thread at a time, and nobody reads.
unsafe impl Sync for Writer<'_> {}

impl Writer<'_> {
    /// See [`KvCache::write`].
    ///
    /// # Safety
    /// No other thread writes this position.
    pub(crate) unsafe fn write(
        &self,
        layer: usize,
        page: u32,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) {
        assert!(slot < PAGE, "slot {slot}");
        let shape = self.cache.shape;
        let len = shape.heads * shape.head_dim;
        assert_eq!((key.len(), value.len()), (len, len));
        for head in 0..shape.heads {
            let start = self.cache.offset(layer, page, head);
            let part = head * shape.head_dim..(head + 1) * shape.head_dim;
            let column = Strides {
                first: slot,
                step: PAGE,
            };
            let row = Strides {
                first: slot * shape.head_dim,
                step: 1,
            };
            // SAFETY: one head of a page lies within the cache; elements and scales of other
            // positions are not touched.
            unsafe {
                let keys = self.data.add(start);
                write_head(shape, &key[part.clone()], keys, slot, column);
                write_head(shape, &value[part], keys.add(shape.head_bytes()), slot, row);
            }
        }
    }
}

/// Where the elements of one position lie: `first + d * step`.
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
                    let scales = out.add(shape.element_bytes()).cast::<f16>();
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
