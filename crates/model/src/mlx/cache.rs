//! Keys and values of all pages, as MLX's arrays.
//!
//! One pair of arrays per layer, `(1, K, pages * 64, D)`: position `i` of a page `p` is row
//! `64 p + i`. Pages that follow one another are one run of rows, so a sequence that has such
//! pages (the only one of an engine always does, at first) is read in place and written by one
//! update; of others the rows are gathered. Whole pages move between sequences by their numbers
//! alone, as everywhere.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Mask, Stream};
use paceline_tensor::PAGE;

use crate::Error;

/// Keys and values.
#[derive(Debug)]
pub(super) struct Cache {
    /// `(1, K, pages * PAGE, D)` for each layer: keys, then values.
    layers: Vec<[Array; 2]>,
    heads: i32,
    head_dim: i32,
}

/// What a cache is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) pages: usize,
    pub(super) dtype: Dtype,
}

impl Shape {
    /// Bytes of all of it.
    pub(super) const fn bytes(&self) -> u64 {
        let values = self.heads * self.head_dim * self.pages * PAGE;
        (2 * self.layers * values * self.dtype.bytes()) as u64
    }
}

impl Cache {
    /// Zeros; the memory is taken at once.
    pub(super) fn new(stream: &Stream, shape: Shape) -> Result<Self, Error> {
        let rows = shape.pages * PAGE;
        let sizes = [1, shape.heads as i32, rows as i32, shape.head_dim as i32];
        let zeros = || stream.zeros(&sizes, shape.dtype);
        let layers = if shape.heads == 0 { 0 } else { shape.layers };
        let layers: Result<Vec<_>, Error> = (0..layers).map(|_| Ok([zeros()?, zeros()?])).collect();
        let cache = Self {
            layers: layers?,
            heads: shape.heads as i32,
            head_dim: shape.head_dim as i32,
        };
        stream.eval(cache.arrays())?;
        Ok(cache)
    }

    /// All arrays: what a step must have evaluated at its end.
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flatten()
    }

    /// Writes keys and values, `(1, K, rows, D)` each, to the rows of `span` in `layer`.
    pub(super) fn write(
        &mut self,
        stream: &Stream,
        layer: usize,
        span: &Span,
        new: [&Array; 2],
    ) -> Result<(), Error> {
        let (heads, dim) = (self.heads, self.head_dim);
        for (held, new) in self.layers[layer].iter_mut().zip(new) {
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
        }
        Ok(())
    }

    /// Keys and values that a view shows, `(1, K, keys, D)` each.
    pub(super) fn read(
        &self,
        stream: &Stream,
        layer: usize,
        view: &View,
    ) -> Result<[Array; 2], Error> {
        let (heads, dim) = (self.heads, self.head_dim);
        let read = |held: &Array| match &view.rows {
            Rows::Run(rows) => {
                let (start, stop) = (rows.start as i32, rows.end as i32);
                stream.slice(held, &[0, 0, start, 0], &[1, heads, stop, dim])
            }
            Rows::Gathered(indices) => stream.take(held, indices, 2),
        };
        let [keys, values] = &self.layers[layer];
        Ok([read(keys)?, read(values)?])
    }
}

/// Where one sequence of a step is in the cache.
#[derive(Debug)]
pub(super) struct Span {
    /// Rows of the cache that are written, in order of position.
    written: Vec<Range<usize>>,
    /// What queries see, for each window of the model.
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
        let shape = Shape {
            layers: 3,
            heads: 2,
            head_dim: 16,
            pages: 4,
            dtype: Dtype::BF16,
        };
        assert_eq!(shape.bytes(), 2 * 3 * 2 * 16 * 4 * 64 * 2);
    }
}
