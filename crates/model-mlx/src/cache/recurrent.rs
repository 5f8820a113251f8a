//! Pages of recurrent layers: what the rows of a page leave for later ones.
//!
//! A short convolution keeps its inputs, a gated delta net what its rows took in besides, and the
//! state behind the page. A page has arrays of its own. The rows that a step reads of a page before
//! it writes to it may cost a copy of that page, and of no other. Rows that are taken back are
//! written again by the next step. The state behind a page is that of its last full set of rows.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;
use paceline_tensor::PAGE;

/// Sizes of a layer's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecurrentSizes {
    /// Inputs of the convolution: `2 K D + H E` of a delta net.
    pub(crate) channels: usize,
    /// `None` of a short convolution.
    pub(crate) state: Option<StateSizes>,
}

/// Sizes of a gated delta net: H value heads, K key heads, D and E elements of a key and of a
/// value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateSizes {
    /// H
    pub(crate) heads: usize,
    /// K
    pub(crate) key_heads: usize,
    /// D
    pub(crate) key: usize,
    /// E
    pub(crate) value: usize,
    /// Decays of a head: 1, or one for each element of a key.
    pub(crate) decays: usize,
}

impl RecurrentSizes {
    /// Bytes of a page: a state, and rows.
    pub(super) fn page_bytes(self) -> u64 {
        let of_state = |of: StateSizes| {
            let row = of.key_heads * of.key + of.heads * (of.value + of.decays);
            of.heads * of.key * of.value + PAGE * row
        };
        (4 * (PAGE * self.channels + self.state.map_or(0, of_state))) as u64
    }
}

/// All pages of a layer, and which of them the step under way has written.
#[derive(Debug)]
pub(crate) struct RecurrentPages {
    pages: Vec<Page>,
    written: Vec<usize>,
}

/// Contents of a page, in f32.
#[derive(Clone, Debug)]
struct Page {
    /// `(PAGE, channels)`: of the convolution.
    inputs: Array,
    state: Option<StatePage>,
}

/// Further contents of a page of a gated delta net. A head has G decays.
#[derive(Clone, Debug)]
struct StatePage {
    /// `(H, D, E)`: behind its last row.
    state: Array,
    /// `(PAGE, K, D)`
    keys: Array,
    /// `(PAGE, H, E)`: the differences that were taken in.
    deltas: Array,
    /// `(PAGE, H, G)`: logarithms.
    decays: Array,
}

impl Page {
    fn new(stream: &Stream, of: RecurrentSizes) -> Result<Self, Error> {
        let zeros = |shape: &[usize]| {
            let shape: Vec<i32> = shape.iter().map(|n| *n as i32).collect();
            stream.zeros(&shape, Dtype::F32)
        };
        let state = |of: StateSizes| {
            Ok::<_, Error>(StatePage {
                state: zeros(&[of.heads, of.key, of.value])?,
                keys: zeros(&[PAGE, of.key_heads, of.key])?,
                deltas: zeros(&[PAGE, of.heads, of.value])?,
                decays: zeros(&[PAGE, of.heads, of.decays])?,
            })
        };
        Ok(Self {
            inputs: zeros(&[PAGE, of.channels])?,
            state: of.state.map(state).transpose()?,
        })
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let state = self.state.iter().flat_map(StatePage::arrays);
        [&self.inputs].into_iter().chain(state)
    }
}

impl StatePage {
    const fn arrays(&self) -> [&Array; 4] {
        [&self.state, &self.keys, &self.deltas, &self.decays]
    }
}

impl RecurrentPages {
    /// Zeros in one page's memory. A page takes memory of its own when it is written: MLX copies
    /// an array that others share.
    pub(super) fn new(stream: &Stream, pages: usize, of: RecurrentSizes) -> Result<Self, Error> {
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

    /// The same of a gated delta net.
    fn state_page(&mut self, page: usize) -> &mut StatePage {
        let state = self.page(page).state.as_mut();
        state.expect("pages of a gated delta net")
    }

    fn held_state(&self, page: usize) -> &StatePage {
        let state = self.pages[page].state.as_ref();
        state.expect("pages of a gated delta net")
    }

    /// Writes inputs `(n, channels)` of rows from row `at` of a page on.
    pub(crate) fn put_inputs(
        &mut self,
        stream: &Stream,
        (page, at): (usize, usize),
        inputs: &Array,
    ) -> Result<(), Error> {
        put(stream, &mut self.page(page).inputs, at, inputs)
    }

    /// Writes keys `(n, K, D)` and decays `(n, H, G)`.
    pub(crate) fn put_keys(
        &mut self,
        stream: &Stream,
        (page, at): (usize, usize),
        [keys, decays]: [&Array; 2],
    ) -> Result<(), Error> {
        let page = self.state_page(page);
        put(stream, &mut page.keys, at, keys)?;
        put(stream, &mut page.decays, at, decays)
    }

    /// Writes what rows took in, `(H, n, E)`.
    pub(crate) fn put_deltas(
        &mut self,
        stream: &Stream,
        (page, at): (usize, usize),
        deltas: &Array,
    ) -> Result<(), Error> {
        let rows = stream.transpose(deltas, &[1, 0, 2])?;
        put(stream, &mut self.state_page(page).deltas, at, &rows)
    }

    /// Keeps the state behind a page, `(H, D, E)`.
    pub(crate) fn put_state(&mut self, page: usize, state: Array) {
        self.state_page(page).state = state;
    }

    /// Inputs of rows of a page, `(n, channels)`.
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
        part(stream, &self.held_state(page).keys, 0..n)
    }

    /// Of the first `n` rows of a page the running sums of decays, `(H, n, G)`.
    pub(crate) fn sums(&self, stream: &Stream, page: usize, n: usize) -> Result<Array, Error> {
        let decays = part(stream, &self.held_state(page).decays, 0..n)?;
        let sums = stream.running_sum(&decays, 0)?;
        Ok(stream.transpose(&sums, &[1, 0, 2])?)
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
        let rows = part(stream, &self.held_state(page).deltas, 0..n)?;
        Ok(Some(stream.transpose(&rows, &[1, 0, 2])?))
    }

    /// The state behind a page.
    pub(crate) fn state(&self, page: usize) -> Array {
        self.held_state(page).state.clone()
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
