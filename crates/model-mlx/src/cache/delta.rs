//! Pages of a gated delta net: what the rows of a page leave for later ones.
//!
//! A page has arrays of its own. The rows that a step reads of a page before it writes to it may
//! cost a copy of that page, and of no other. Rows that are taken back are written again by the
//! next step. The state behind a page is that of its last full set of rows.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;
use paceline_tensor::PAGE;

/// Sizes of a layer: H value heads, K key heads, D and E elements of a key and of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeltaSizes {
    /// H
    pub(crate) heads: usize,
    /// K
    pub(crate) key_heads: usize,
    /// D
    pub(crate) key: usize,
    /// E
    pub(crate) value: usize,
    /// `2 K D + H E`
    pub(crate) channels: usize,
}

impl DeltaSizes {
    /// Bytes of a page: a state, and rows.
    pub(super) const fn page_bytes(self) -> u64 {
        let state = self.heads * self.key * self.value;
        let row = self.channels + self.key_heads * self.key + self.heads * (self.value + 1);
        (4 * (state + PAGE * row)) as u64
    }
}

/// All pages of a layer, and which of them the step under way has written.
#[derive(Debug)]
pub(crate) struct DeltaPages {
    pages: Vec<Page>,
    written: Vec<usize>,
}

/// Contents of a page, in f32.
#[derive(Clone, Debug)]
struct Page {
    /// `(H, D, E)`: behind its last row.
    state: Array,
    /// `(PAGE, 2 K D + H E)`: of the convolution.
    inputs: Array,
    /// `(PAGE, K, D)`
    keys: Array,
    /// `(PAGE, H, E)`: the differences that were taken in.
    deltas: Array,
    /// `(PAGE, H)`: logarithms.
    decays: Array,
}

impl Page {
    fn new(stream: &Stream, of: DeltaSizes) -> Result<Self, Error> {
        let zeros = |shape: &[usize]| {
            let shape: Vec<i32> = shape.iter().map(|n| *n as i32).collect();
            stream.zeros(&shape, Dtype::F32)
        };
        Ok(Self {
            state: zeros(&[of.heads, of.key, of.value])?,
            inputs: zeros(&[PAGE, of.channels])?,
            keys: zeros(&[PAGE, of.key_heads, of.key])?,
            deltas: zeros(&[PAGE, of.heads, of.value])?,
            decays: zeros(&[PAGE, of.heads])?,
        })
    }

    const fn arrays(&self) -> [&Array; 5] {
        let Self {
            state,
            inputs,
            keys,
            deltas,
            decays,
        } = self;
        [state, inputs, keys, deltas, decays]
    }
}

impl DeltaPages {
    /// Zeros in one page's memory. A page takes memory of its own when it is written: MLX copies
    /// an array that others share.
    pub(super) fn new(stream: &Stream, pages: usize, of: DeltaSizes) -> Result<Self, Error> {
        Ok(Self {
            pages: vec![Page::new(stream, of)?; pages],
            written: (0..pages.min(1)).collect(),
        })
    }

    pub(super) fn begin(&mut self) {
        self.written.clear();
    }

    /// The arrays of the pages that were written since the step began.
    pub(super) fn written(&self) -> impl Iterator<Item = &Array> {
        let pages = self.written.iter();
        pages.flat_map(|page| self.pages[*page].arrays())
    }

    /// A page that is written.
    fn page(&mut self, page: usize) -> &mut Page {
        if !self.written.contains(&page) {
            self.written.push(page);
        }
        &mut self.pages[page]
    }

    /// Writes inputs `(n, 2 K D + H E)` and decays `(n, H)` of rows from row `at` of a page on.
    pub(crate) fn put(
        &mut self,
        stream: &Stream,
        page: usize,
        at: usize,
        [inputs, decays]: [&Array; 2],
    ) -> Result<(), Error> {
        let page = self.page(page);
        put(stream, &mut page.inputs, at, inputs)?;
        put(stream, &mut page.decays, at, decays)
    }

    /// Writes keys `(n, K, D)`.
    pub(crate) fn put_keys(
        &mut self,
        stream: &Stream,
        page: usize,
        at: usize,
        keys: &Array,
    ) -> Result<(), Error> {
        put(stream, &mut self.page(page).keys, at, keys)
    }

    /// Writes what rows took in, `(H, n, E)`.
    pub(crate) fn put_deltas(
        &mut self,
        stream: &Stream,
        page: usize,
        at: usize,
        deltas: &Array,
    ) -> Result<(), Error> {
        let rows = stream.transpose(deltas, &[1, 0, 2])?;
        put(stream, &mut self.page(page).deltas, at, &rows)
    }

    /// Keeps the state behind a page, `(H, D, E)`.
    pub(crate) fn put_state(&mut self, page: usize, state: Array) {
        self.page(page).state = state;
    }

    /// Inputs of rows of a page, `(n, 2 K D + H E)`.
    pub(crate) fn inputs(
        &self,
        stream: &Stream,
        page: usize,
        rows: Range<usize>,
    ) -> Result<Array, Error> {
        part(stream, &self.pages[page].inputs, rows)
    }

    /// Keys of the first `n` rows of a page, `(n, K, D)`.
    pub(crate) fn keys(&self, stream: &Stream, page: usize, n: usize) -> Result<Array, Error> {
        part(stream, &self.pages[page].keys, 0..n)
    }

    /// Of the first `n` rows of a page the running sums of decays, `(H, n, 1)`.
    pub(crate) fn sums(&self, stream: &Stream, page: usize, n: usize) -> Result<Array, Error> {
        let decays = part(stream, &self.pages[page].decays, 0..n)?;
        let sums = stream.running_sum(&decays, 0)?;
        let sums = stream.transpose(&sums, &[1, 0])?;
        let heads = sums.shape()[0];
        Ok(stream.reshape(&sums, &[heads, n as i32, 1])?)
    }

    /// The differences that the first `n` rows of a page took in, `(H, n, E)`; `None` of no rows.
    pub(crate) fn deltas(
        &self,
        stream: &Stream,
        page: usize,
        n: usize,
    ) -> Result<Option<Array>, Error> {
        if n == 0 {
            return Ok(None);
        }
        let rows = part(stream, &self.pages[page].deltas, 0..n)?;
        Ok(Some(stream.transpose(&rows, &[1, 0, 2])?))
    }

    /// The state behind a page.
    pub(crate) fn state(&self, page: usize) -> Array {
        self.pages[page].state.clone()
    }
}

/// Writes `rows` to `held` from row `at` on.
fn put(stream: &Stream, held: &mut Array, at: usize, rows: &Array) -> Result<(), Error> {
    let mut stop = rows.shape();
    let mut start = vec![0; stop.len()];
    (start[0], stop[0]) = (at as i32, at as i32 + stop[0]);
    *held = stream.slice_update(held, rows, &start, &stop)?;
    Ok(())
}

/// Rows of `held`.
fn part(stream: &Stream, held: &Array, rows: Range<usize>) -> Result<Array, Error> {
    let mut stop = held.shape();
    let mut start = vec![0; stop.len()];
    (start[0], stop[0]) = (rows.start as i32, rows.end as i32);
    Ok(stream.slice(held, &start, &stop)?)
}
