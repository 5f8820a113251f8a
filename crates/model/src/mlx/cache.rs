//! Cache of all layers, in pages, as MLX's arrays.
//!
//! A layer's keys and values are one pair of arrays, `(1, K, pages * 64, D)`. Position `i` of a
//! page `p` is row `64 p + i`. Pages that follow one another are one run of rows. A sequence that
//! has such pages is read in place and written by one update; of others the rows are gathered. An
//! engine's only sequence always has such pages, at first.
//!
//! Whole pages move between sequences by their numbers alone, as everywhere. Latent attention keeps
//! one such array, a gated delta net arrays for each page ([`DeltaPages`]).

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Mask, Stream};
use paceline_tensor::PAGE;

use crate::Error;

mod delta;

pub(super) use delta::{DeltaPages, DeltaSizes};

/// Caches of all layers of a rank.
#[derive(Debug)]
pub(super) struct Cache {
    layers: Vec<Kept>,
}

/// Cache of a layer.
#[derive(Debug)]
enum Kept {
    /// Nothing: it looks at another's, or this rank has none of its heads.
    Nothing,
    /// `(1, K, pages * PAGE, D)` and `(1, K, pages * PAGE, E)`: keys and values.
    Rows([Array; 2]),
    /// `(1, 1, pages * PAGE, R + P)`: keys, whose first R numbers are the value.
    Latent(Array, i32),
    Delta(DeltaPages),
}

/// Sizes of a cache.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) layers: Vec<LayerSizes>,
    pub(super) pages: usize,
    pub(super) dtype: Dtype,
}

/// Sizes of what a layer keeps of each position or page, of this rank's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerSizes {
    /// Nothing.
    Nothing,
    /// Keys and values: heads, elements of a key and of a value.
    Rows {
        heads: usize,
        key: usize,
        value: usize,
    },
    /// A key that all heads share, and how much of it is the value.
    Latent { key: usize, value: usize },
    /// The states of a gated delta net on so many pages, in f32.
    Delta { pages: usize, of: DeltaSizes },
}

impl Shape {
    /// Bytes of all of it.
    pub(super) fn bytes(&self) -> u64 {
        let rows = (self.pages * PAGE * self.dtype.bytes()) as u64;
        let bytes = self.layers.iter().map(|layer| match *layer {
            LayerSizes::Nothing => 0,
            LayerSizes::Rows { heads, key, value } => rows * (heads * (key + value)) as u64,
            LayerSizes::Latent { key, .. } => rows * key as u64,
            LayerSizes::Delta { pages, of } => pages as u64 * of.page_bytes(),
        });
        bytes.sum()
    }
}

impl Cache {
    /// Zeros; the memory is taken at once.
    pub(super) fn new(stream: &Stream, shape: &Shape) -> Result<Self, Error> {
        let rows = (shape.pages * PAGE) as i32;
        let zeros = |heads: usize, dim: usize| {
            stream.zeros(&[1, heads as i32, rows, dim as i32], shape.dtype)
        };
        let layers = shape.layers.iter().map(|layer| {
            Ok(match *layer {
                LayerSizes::Nothing => Kept::Nothing,
                LayerSizes::Rows { heads, key, value } => {
                    Kept::Rows([zeros(heads, key)?, zeros(heads, value)?])
                }
                LayerSizes::Latent { key, value } => Kept::Latent(zeros(1, key)?, value as i32),
                LayerSizes::Delta { pages, of } => Kept::Delta(DeltaPages::new(stream, pages, of)?),
            })
        });
        let cache = Self {
            layers: layers.collect::<Result<_, Error>>()?,
        };
        stream.eval(cache.arrays())?;
        Ok(cache)
    }

    /// Starts a step.
    pub(super) fn begin(&mut self) {
        for layer in &mut self.layers {
            if let Kept::Delta(pages) = layer {
                pages.begin();
            }
        }
    }

    /// Arrays that a step must have evaluated at its end: all, but those of delta nets' pages that
    /// it did not write.
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let mut all = Vec::new();
        for layer in &self.layers {
            match layer {
                Kept::Nothing => {}
                Kept::Rows(both) => all.extend(both),
                Kept::Latent(keys, _) => all.push(keys),
                Kept::Delta(pages) => all.extend(pages.written()),
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
        let Kept::Rows(both) = &mut self.layers[layer] else {
            unreachable!("layer {layer} keeps no rows");
        };
        for (held, new) in both.iter_mut().zip(new) {
            put(stream, held, span, new)?;
        }
        Ok(())
    }

    /// Writes keys of latent attention, `(1, 1, rows, R + P)`.
    pub(super) fn write_latent(
        &mut self,
        stream: &Stream,
        layer: usize,
        span: &Span,
        new: &Array,
    ) -> Result<(), Error> {
        let Kept::Latent(held, _) = &mut self.layers[layer] else {
            unreachable!("layer {layer} keeps no latent rows");
        };
        put(stream, held, span, new)
    }

    /// Keys and values that a view shows, `(1, K, keys, D)` and `(1, K, keys, E)`.
    pub(super) fn read(
        &self,
        stream: &Stream,
        layer: usize,
        view: &View,
    ) -> Result<[Array; 2], Error> {
        match &self.layers[layer] {
            Kept::Rows([keys, values]) => Ok([view.of(stream, keys)?, view.of(stream, values)?]),
            Kept::Latent(held, value) => {
                let keys = view.of(stream, held)?;
                let mut stop = keys.shape();
                stop[3] = *value;
                let values = stream.slice(&keys, &[0; 4], &stop)?;
                Ok([keys, values])
            }
            Kept::Nothing | Kept::Delta(_) => unreachable!("layer {layer} keeps no rows"),
        }
    }

    /// The pages of a layer that is a gated delta net, to be written.
    pub(super) fn delta(&mut self, layer: usize) -> &mut DeltaPages {
        match &mut self.layers[layer] {
            Kept::Delta(pages) => pages,
            _ => unreachable!("layer {layer} is no delta net"),
        }
    }

    /// The same, to be read.
    pub(super) fn delta_read(&self, layer: usize) -> &DeltaPages {
        match &self.layers[layer] {
            Kept::Delta(pages) => pages,
            _ => unreachable!("layer {layer} is no delta net"),
        }
    }
}

/// Writes `new (1, heads, rows, D)` to the rows of `span` in `held`.
fn put(stream: &Stream, held: &mut Array, span: &Span, new: &Array) -> Result<(), Error> {
    let sizes = new.shape();
    let (heads, dim) = (sizes[1], sizes[3]);
    let mut first = 0;
    for run in &span.written {
        let n = (run.end - run.start) as i32;
        let part = if span.written.len() == 1 {
            new.clone()
        } else {
            stream.slice(new, &[0, 0, first, 0], &[1, heads, first + n, dim])?
        };
        let (start, stop) = (run.start as i32, run.end as i32);
        let (start, stop) = ([0, 0, start, 0], [1, heads, stop, dim]);
        // The old handle goes away here, so that the update is done in place.
        *held = stream.slice_update(held, &part, &start, &stop)?;
        first += n;
    }
    Ok(())
}

/// Where one sequence of a step is in the cache.
#[derive(Debug)]
pub(super) struct Span {
    /// Rows of the cache that are written, in order of position.
    written: Vec<Range<usize>>,
    /// Keys that queries see, for each window of the model.
    pub(super) views: Vec<View>,
}

/// Keys that the queries of a sequence see, all but those that no query does.
#[derive(Debug)]
pub(super) struct View {
    rows: Rows,
    mask: Seen,
}

#[derive(Debug)]
enum Rows {
    Run(Range<usize>),
    /// Numbers of rows.
    Gathered(Array),
}

#[derive(Debug)]
enum Seen {
    All,
    Causal,
    /// `(queries, keys)`
    Window(Array),
}

impl View {
    /// The rows `(1, heads, keys, D)` of what a layer keeps.
    fn of(&self, stream: &Stream, held: &Array) -> Result<Array, Error> {
        Ok(match &self.rows {
            Rows::Run(rows) => {
                let mut stop = held.shape();
                stop[2] = rows.end as i32;
                stream.slice(held, &[0, 0, rows.start as i32, 0], &stop)?
            }
            Rows::Gathered(indices) => stream.take(held, indices, 2)?,
        })
    }

    pub(super) const fn mask(&self) -> Mask<'_> {
        match &self.mask {
            Seen::All => Mask::None,
            Seen::Causal => Mask::Causal,
            Seen::Window(array) => Mask::Array(array),
        }
    }
}

impl Span {
    /// Of the positions `new` of a sequence with `pages`, seen through each of `windows`.
    pub(super) fn new(
        stream: &Stream,
        pages: &[u32],
        new: Range<usize>,
        windows: &[Option<usize>],
    ) -> Result<Self, Error> {
        let view = |window: &Option<usize>| View::new(stream, pages, new.clone(), *window);
        Ok(Self {
            written: runs(pages, new.clone()),
            views: windows.iter().map(view).collect::<Result<_, _>>()?,
        })
    }
}

impl View {
    fn new(
        stream: &Stream,
        pages: &[u32],
        new: Range<usize>,
        window: Option<usize>,
    ) -> Result<Self, Error> {
        let first = window.map_or(0, |window| (new.start + 1).saturating_sub(window));
        let seen = first..new.end;
        let runs = runs(pages, seen.clone());
        let rows = match &runs[..] {
            [run] => Rows::Run(run.clone()),
            _ => {
                let rows = runs.into_iter().flatten().map(|row| row as u32);
                let rows: Vec<u32> = rows.collect();
                Rows::Gathered(stream.array_u32(&rows, &[rows.len() as i32])?)
            }
        };
        let cut = window.filter(|window| seen.len() > *window);
        let mask = match cut {
            _ if new.len() == 1 => Seen::All,
            None => Seen::Causal,
            Some(window) => {
                let sees = |query: usize, key: usize| key <= query && query < key + window;
                let bytes = new.clone().flat_map(|query| {
                    let keys = seen.clone();
                    keys.map(move |key| u8::from(sees(query, key)))
                });
                let bytes: Vec<u8> = bytes.collect();
                let shape = [new.len() as i32, seen.len() as i32];
                Seen::Window(stream.array(&bytes, &shape, Dtype::Bool)?)
            }
        };
        Ok(Self { rows, mask })
    }
}

/// Rows of the cache that hold `positions` of a sequence with `pages`, as few ranges as possible.
fn runs(pages: &[u32], positions: Range<usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut position = positions.start;
    while position < positions.end {
        let end = positions.end.min((position / PAGE + 1) * PAGE);
        let first = pages[position / PAGE] as usize * PAGE + position % PAGE;
        let rows = first..first + (end - position);
        match runs.last_mut() {
            Some(last) if last.end == rows.start => last.end = rows.end,
            _ => runs.push(rows),
        }
        position = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_follow_one_another_are_one_run() {
        let whole = |range: Range<usize>| vec![range];
        assert_eq!(runs(&[0, 1, 2], 0..192), whole(0..192));
        assert_eq!(runs(&[5, 6], 63..65), whole(383..385));
        assert_eq!(runs(&[3], 7..8), whole(199..200));
        assert!(runs(&[3], 7..7).is_empty());
        assert_eq!(runs(&[1, 0, 3], 60..130), [124..128, 0..64, 192..194]);
    }

    #[test]
    fn a_cache_counts_its_bytes() {
        let rows = LayerSizes::Rows {
            heads: 2,
            key: 16,
            value: 32,
        };
        let latent = LayerSizes::Latent { key: 48, value: 32 };
        let of = DeltaSizes {
            heads: 4,
            key_heads: 2,
            key: 16,
            value: 32,
            channels: 192,
        };
        let shape = Shape {
            layers: vec![
                rows,
                LayerSizes::Nothing,
                latent,
                LayerSizes::Delta { pages: 3, of },
            ],
            pages: 5,
            dtype: Dtype::BF16,
        };
        let positions = 5 * 64 * 2 * (2 * (16 + 32) + 48);
        let net = 3 * 4 * (4 * 16 * 32 + 64 * (192 + 2 * 16 + 4 * 32 + 4));
        assert_eq!(shape.bytes(), positions + net);
    }
}
