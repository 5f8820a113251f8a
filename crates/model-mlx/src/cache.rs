//! Cache of all layers, in pages, as MLX's arrays.
//!
//! A layer's keys and values are one pair of arrays, `(1, K, rows, D)` ([`rows_of`]). Position `i`
//! of a page `p` is row `64 p + i`. Pages that follow one another are one run of rows. A sequence
//! that has such pages is read in place and written by one update. An engine's only sequence always
//! has such pages, at first. Other sequences have their rows in [lanes]; without lanes they are
//! gathered.
//!
//! Each kind of layers has pages of its own ([`Kinds`](paceline_model::Kinds)). Layers with a
//! sliding window have few, and reuse those that no later row reads. The arrays begin with
//! [`FIRST_PAGES`] and grow before the first step that writes to later pages.
//!
//! Whole pages move between sequences by their numbers alone, as everywhere. Latent attention keeps
//! one such array, a recurrent layer arrays for each page ([`RecurrentPages`]).

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;
use paceline_tensor::PAGE;

mod lanes;
mod pooled;
mod quantised;
mod recurrent;
mod spans;

use lanes::Lanes;
pub(super) use lanes::{LaneLimits, Ring, RingRow, UNKNOWN_PAGE};
pub(super) use pooled::{PooledRows, PooledSizes};
pub(super) use quantised::{bits_of, check as check_kv};
pub(super) use recurrent::{RecurrentPages, RecurrentSizes, StateSizes};
use spans::runs;
pub(super) use spans::{Span, SpanKind, View, row_of, seen};

/// mlx-lm's caches have a multiple of this many rows. By it MLX's attention on CUDA recognises
/// them. Source: `kv_cache_step` in MLX 0.32.2's `backend/cuda/scaled_dot_product_attention.cpp`.
const MLX_LM_STEP: usize = 256;
const _: () = assert!(!PAGE.is_multiple_of(MLX_LM_STEP));

/// Pages that arrays have at first: 8,192 positions, which are 1 GiB of an 8B model in 16 bits.
const FIRST_PAGES: usize = 128;

/// Caches of all layers of a rank.
#[derive(Debug)]
pub(super) struct Cache {
    layers: Vec<Kept>,
    /// Pages that each layer may have.
    pages: Vec<usize>,
    lanes: Lanes,
}

/// Cache of a layer.
#[derive(Debug)]
pub(super) enum Kept {
    /// Nothing: it looks at another's, or this rank has none of its heads.
    Nothing,
    /// `(1, K, rows, D)` and `(1, K, rows, E)`: keys and values.
    Rows([Array; 2]),
    /// Packed values, scales and biases of keys, then of values, and the bits of a value.
    Quantised(Box<[Array; 6]>, usize),
    /// `(1, 1, rows, R + P + X)`: keys, whose first R numbers are the value and whose last X are an
    /// index key; R and X.
    Latent(Array, [i32; 2]),
    Recurrent(RecurrentPages),
    Pooled(PooledRows),
    /// `(1, 1, rows, W)` in f32: rows or entries of attention to compressed keys.
    Wide(Array),
}

impl Kept {
    /// Arrays `(1, heads, rows, ..)`.
    const fn rows(&self) -> &[Array] {
        match self {
            Self::Nothing | Self::Recurrent(_) => &[],
            Self::Rows(both) => both,
            Self::Quantised(parts, _) => parts.as_slice(),
            Self::Latent(keys, _) | Self::Wide(keys) => std::slice::from_ref(keys),
            Self::Pooled(own) => own.arrays.as_slice(),
        }
    }

    /// As [`rows`](Self::rows).
    pub(super) const fn rows_mut(&mut self) -> &mut [Array] {
        match self {
            Self::Nothing | Self::Recurrent(_) => &mut [],
            Self::Rows(both) => both,
            Self::Quantised(parts, _) => parts.as_mut_slice(),
            Self::Latent(keys, _) | Self::Wide(keys) => std::slice::from_mut(keys),
            Self::Pooled(own) => own.arrays.as_mut_slice(),
        }
    }
}

/// Sizes of a cache.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Of each layer, with the number of its pages.
    pub(super) layers: Vec<(LayerSizes, usize)>,
    pub(super) dtype: Dtype,
    /// Bits of quantised keys and values.
    pub(super) bits: Option<usize>,
}

/// Sizes of what a layer keeps of each position or page, of this rank's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerSizes {
    Nothing,
    /// Keys and values: heads, elements of a key and of a value.
    Rows {
        heads: usize,
        key: usize,
        value: usize,
    },
    /// A key that all heads share, and how much of it is the value and an index key.
    Latent {
        key: usize,
        value: usize,
        index: usize,
    },
    /// Inputs of a convolution, and the states of a gated delta net, in f32.
    Recurrent(RecurrentSizes),
    /// Rows or latent keys, with the rows of an indexer of pools or blocks.
    Pooled(PooledSizes),
    /// Elements in f32 of a position.
    Wide(usize),
}

/// Rows of an array of `pages` pages: with an unused page where these would be a multiple of
/// [`MLX_LM_STEP`].
///
/// On CUDA, MLX gives one query's keys to cuDNN where they are a slice of such an array. It takes
/// every such slice for one that begins at row 0, so others would be read from memory in front of
/// the array. Slices of any other array are read by MLX's own kernel, in place.
const fn rows_of(pages: usize) -> usize {
    let rows = pages * PAGE;
    match rows.is_multiple_of(MLX_LM_STEP) {
        true => rows + PAGE,
        false => rows,
    }
}

impl Shape {
    pub(super) fn bytes(&self) -> u64 {
        let rows = |pages| (rows_of(pages) * self.dtype.bytes()) as u64;
        let row = |dim: usize| match self.bits {
            Some(bits) => quantised::row_bytes(dim, bits, self.dtype),
            None => dim * self.dtype.bytes(),
        };
        let bytes = self.layers.iter().map(|&(layer, pages)| match layer {
            LayerSizes::Nothing => 0,
            LayerSizes::Rows { heads, key, value } => {
                (rows_of(pages) * heads * (row(key) + row(value))) as u64
            }
            LayerSizes::Latent { key, .. } => rows(pages) * key as u64,
            LayerSizes::Recurrent(of) => pages as u64 * of.page_bytes(),
            LayerSizes::Pooled(of) => rows_of(pages) as u64 * of.row_bytes(self.dtype),
            LayerSizes::Wide(width) => (4 * rows_of(pages) * width) as u64,
        });
        bytes.sum()
    }
}

impl Cache {
    /// Zeros, of at most [`FIRST_PAGES`] a layer; their memory is taken at once.
    pub(super) fn new(stream: &Stream, shape: &Shape) -> Result<Self, Error> {
        let layers = shape.layers.iter().map(|&(layer, pages)| {
            let rows = rows_of(pages.min(FIRST_PAGES)) as i32;
            let zeros = |heads: usize, dim: usize| {
                stream.zeros(&[1, heads as i32, rows, dim as i32], shape.dtype)
            };
            Ok(match layer {
                LayerSizes::Nothing => Kept::Nothing,
                LayerSizes::Rows { heads, key, value } => match shape.bits {
                    Some(bits) => {
                        let (rows, of) = (rows as usize, (bits, shape.dtype));
                        let [a, b, c] = quantised::zeros(stream, [heads, rows, key], of)?;
                        let [d, e, f] = quantised::zeros(stream, [heads, rows, value], of)?;
                        Kept::Quantised(Box::new([a, b, c, d, e, f]), bits)
                    }
                    None => Kept::Rows([zeros(heads, key)?, zeros(heads, value)?]),
                },
                LayerSizes::Latent { key, value, index } => {
                    Kept::Latent(zeros(1, key)?, [value as i32, index as i32])
                }
                LayerSizes::Recurrent(of) => {
                    Kept::Recurrent(RecurrentPages::new(stream, pages, of)?)
                }
                LayerSizes::Wide(width) => {
                    let sizes = [1, 1, rows, width as i32];
                    Kept::Wide(stream.zeros(&sizes, Dtype::F32)?)
                }
                LayerSizes::Pooled(of) => {
                    Kept::Pooled(PooledRows::new(stream, rows, (of, shape.dtype))?)
                }
            })
        });
        let cache = Self {
            layers: layers.collect::<Result<_, Error>>()?,
            pages: shape.layers.iter().map(|(_, pages)| *pages).collect(),
            lanes: Lanes::default(),
        };
        stream.eval(cache.arrays())?;
        Ok(cache)
    }

    pub(super) fn kept(&self, layer: usize) -> &Kept {
        &self.layers[layer]
    }

    pub(super) fn kept_mut(&mut self, layer: usize) -> &mut Kept {
        &mut self.layers[layer]
    }

    /// Layers with too few rows for a step that writes up to row `end(layer)` of each, and the
    /// pages that they should have.
    pub(super) fn growth(&self, end: impl Fn(usize) -> usize) -> Vec<(usize, usize)> {
        let layers = self.layers.iter().zip(&self.pages).enumerate();
        let growth = layers.filter_map(|(i, (layer, most))| {
            let rows = layer.rows().first()?.shape()[2];
            Some((i, grown(rows as usize, end(i), *most)?))
        });
        growth.collect()
    }

    /// Gives layers these pages. One array at a time is held twice, and a failure leaves all
    /// contents as they were.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn grow(&mut self, stream: &Stream, growth: &[(usize, usize)]) -> Result<(), Error> {
        for (layer, pages) in growth {
            for held in self.layers[*layer].rows_mut() {
                *held = copied(stream, held, *pages)?;
            }
        }
        Ok(())
    }

    /// Starts a step.
    pub(super) fn begin(&mut self) {
        for layer in &mut self.layers {
            if let Kept::Recurrent(pages) = layer {
                pages.begin();
            }
        }
    }

    /// Arrays that a step must have evaluated at its end: all, but those of recurrent layers'
    /// pages that it did not write.
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let mut all: Vec<&Array> = self.lanes.arrays().collect();
        for layer in &self.layers {
            match layer {
                Kept::Recurrent(pages) => all.extend(pages.written()),
                layer => all.extend(layer.rows()),
            }
        }
        all
    }

    /// Writes keys and values, `(1, K, rows, D)` and `(1, K, rows, E)`, to the rows of `span` in
    /// `layer`.
    pub(super) fn write(
        &mut self,
        stream: &Stream,
        layer: usize,
        span: &Span,
        new: [&Array; 2],
    ) -> Result<(), Error> {
        let new = self.as_kept(stream, layer, new)?;
        let held = self.arrays_mut(layer, span.view.lane);
        for (held, new) in held.iter_mut().zip(&new) {
            put(stream, held, span.place(), new)?;
        }
        Ok(())
    }

    /// Keys and values as a layer keeps them.
    fn as_kept(
        &self,
        stream: &Stream,
        layer: usize,
        [keys, values]: [&Array; 2],
    ) -> Result<Vec<Array>, Error> {
        let Kept::Quantised(_, bits) = &self.layers[layer] else {
            return Ok(vec![keys.clone(), values.clone()]);
        };
        let of = |new| quantised::quantised(stream, new, *bits);
        Ok(of(keys)?.into_iter().chain(of(values)?).collect())
    }

    /// Queries as the keys of a layer are [rotated](quantised::rotated), or outputs of such values
    /// as they are without it.
    pub(super) fn rotated(&self, stream: &Stream, layer: usize, x: &Array) -> Result<Array, Error> {
        match &self.layers[layer] {
            Kept::Quantised(..) => quantised::rotated(stream, x),
            _ => Ok(x.clone()),
        }
    }

    /// Writes a row of each decoding sequence, `(1, K, B, D)` and `(1, K, B, E)`, to the pages of
    /// `layer`. `rows` are their places, `(1, 1, B, 1)`.
    pub(super) fn write_rows(
        &mut self,
        stream: &Stream,
        layer: usize,
        rows: &Array,
        new: [&Array; 2],
    ) -> Result<(), Error> {
        let new = self.as_kept(stream, layer, new)?;
        put_rows(stream, self.layers[layer].rows_mut(), rows, &new)
    }

    /// Arrays of a layer, `(1, heads, rows, ..)`, or those of its lanes.
    fn arrays_mut(&mut self, layer: usize, lane: Option<usize>) -> &mut [Array] {
        match lane {
            Some(_) => self.lanes.of_layer_mut(layer),
            None => self.layers[layer].rows_mut(),
        }
    }

    /// Writes keys of latent attention, `(1, 1, rows, R + P)`.
    pub(super) fn write_latent(
        &mut self,
        stream: &Stream,
        layer: usize,
        span: &Span,
        new: &Array,
    ) -> Result<(), Error> {
        let ([held] | [held, _]) = self.arrays_mut(layer, span.view.lane) else {
            unreachable!("layer {layer} keeps no latent rows");
        };
        put(stream, held, span.place(), new)
    }

    /// Keys and values that a view shows, `(1, K, keys, D)` and `(1, K, keys, E)`.
    pub(super) fn read(
        &self,
        stream: &Stream,
        layer: usize,
        view: &View,
    ) -> Result<[Array; 2], Error> {
        let arrays = match view.lane {
            Some(_) => self.lanes.of_layer(layer),
            None => self.layers[layer].rows(),
        };
        self.values(stream, (layer, arrays), |held| view.of(stream, held))
    }

    /// Keys and values in the rows that `seen` takes of `arrays`, the pages or lanes of a layer.
    fn values(
        &self,
        stream: &Stream,
        (layer, arrays): (usize, &[Array]),
        seen: impl Fn(&Array) -> Result<Array, Error>,
    ) -> Result<[Array; 2], Error> {
        match (&self.layers[layer], arrays) {
            (Kept::Rows(_), [keys, values]) | (Kept::Pooled(_), [keys, values, _]) => {
                Ok([seen(keys)?, seen(values)?])
            }
            (Kept::Quantised(_, bits), [a, b, c, d, e, f]) => {
                let of = |[a, b, c]: [&Array; 3]| {
                    quantised::values(stream, [seen(a)?, seen(b)?, seen(c)?], *bits)
                };
                Ok([of([a, b, c])?, of([d, e, f])?])
            }
            (Kept::Latent(_, [value, _]), [held])
            | (Kept::Pooled(PooledRows { value, .. }), [held, _]) => {
                let keys = seen(held)?;
                let mut stop = keys.shape();
                stop[3] = *value;
                let values = stream.slice(&keys, &[0; 4], &stop)?;
                Ok([keys, values])
            }
            _ => unreachable!("layer {layer} keeps no rows"),
        }
    }

    /// Elements of a layer's index keys, which are the last of its keys; 0 without.
    pub(super) fn index_len(&self, layer: usize) -> i32 {
        match &self.layers[layer] {
            Kept::Latent(_, [_, index]) => *index,
            _ => 0,
        }
    }

    /// Index keys of `dim` elements that a view shows, `(1, 1, keys, dim)`.
    pub(super) fn read_index(
        &self,
        stream: &Stream,
        layer: usize,
        (view, dim): (&View, usize),
    ) -> Result<Array, Error> {
        let [keys, _] = self.read(stream, layer, view)?;
        let stop = keys.shape();
        Ok(stream.slice(&keys, &[0, 0, 0, stop[3] - dim as i32], &stop)?)
    }

    /// The pages of a recurrent layer, to be written.
    pub(super) fn recurrent_mut(&mut self, layer: usize) -> &mut RecurrentPages {
        match &mut self.layers[layer] {
            Kept::Recurrent(pages) => pages,
            _ => unreachable!("layer {layer} is not recurrent"),
        }
    }

    /// The same, to be read.
    pub(super) fn recurrent(&self, layer: usize) -> &RecurrentPages {
        match &self.layers[layer] {
            Kept::Recurrent(pages) => pages,
            _ => unreachable!("layer {layer} is not recurrent"),
        }
    }
}

/// Pages to which an array of `rows` rows grows for a step that needs `needed` rows; `None` where
/// it has them. The pages are doubled, so that growth costs few copies, up to `most`.
fn grown(rows: usize, needed: usize, most: usize) -> Option<usize> {
    let pages = needed.div_ceil(PAGE).max(2 * rows / PAGE);
    (needed > rows).then(|| pages.min(most))
}

/// `held (1, heads, rows, D)` in an array of `pages` pages, evaluated.
fn copied(stream: &Stream, held: &Array, pages: usize) -> Result<Array, Error> {
    let (mut shape, stop) = (held.shape(), held.shape());
    shape[2] = rows_of(pages) as i32;
    let zeros = stream.zeros(&shape, held.dtype())?;
    let copy = stream.slice_update(&zeros, held, &[0; 4], &stop)?;
    drop(zeros); // the copy is made in its memory
    stream.eval([&copy])?;
    Ok(copy)
}

/// Writes a row of each of B sequences, `(1, heads, B, D)` of each array, to its place in `rows`.
fn put_rows(stream: &Stream, held: &mut [Array], rows: &Array, new: &[Array]) -> Result<(), Error> {
    for (held, new) in held.iter_mut().zip(new) {
        // The old handle goes away here, so that the update is done in place.
        *held = stream.put_along(held, rows, new, 2)?;
    }
    Ok(())
}

/// Writes `new (1, heads, rows, D)` to the rows `runs` of lane `lane` in `held`. A page has one
/// lane.
fn put(
    stream: &Stream,
    held: &mut Array,
    (lane, runs): (usize, &[Range<usize>]),
    new: &Array,
) -> Result<(), Error> {
    let (sizes, lane) = (new.shape(), lane as i32);
    let (heads, dim) = (sizes[1], sizes[3]);
    let mut first = 0;
    for run in runs {
        let n = (run.end - run.start) as i32;
        let part = if runs.len() == 1 {
            new.clone()
        } else {
            stream.slice(new, &[0, 0, first, 0], &[1, heads, first + n, dim])?
        };
        let (start, stop) = (run.start as i32, run.end as i32);
        let (start, stop) = ([lane, 0, start, 0], [lane + 1, heads, stop, dim]);
        // The old handle goes away here, so that the update is done in place.
        *held = stream.slice_update(held, &part, &start, &stop)?;
        first += n;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
