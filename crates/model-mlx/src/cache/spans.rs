//! Rows of a sequence in the cache: those that a step writes, and the keys that its queries see.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Mask, Stream};
use paceline_model::Error;
use paceline_tensor::{AttentionRows, PAGE};

/// Layers with the same pages and the same window, which have their [`Span`]s in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpanKind {
    /// Kind of the pages, by [`Kinds`](paceline_model::Kinds).
    pub(crate) kind: usize,
    pub(crate) window: Option<usize>,
}

/// Place of one sequence of a step in the cache of layers of a [`SpanKind`].
#[derive(Debug)]
pub(crate) struct Span {
    /// Rows of the cache, or of the lane, that are written, in order of position.
    pub(super) written: Vec<Range<usize>>,
    /// Keys that queries see.
    pub(crate) view: View,
}

/// Keys that the queries of a sequence see, all but those that no query does.
#[derive(Debug)]
pub(crate) struct View {
    /// The sequence's lane, if it has one in these layers.
    pub(super) lane: Option<usize>,
    rows: Rows,
    mask: Seen,
}

#[derive(Debug)]
enum Rows {
    Run(Range<usize>),
    /// Numbers of rows.
    Gathered(Array),
}

impl Rows {
    fn of(stream: &Stream, runs: &[Range<usize>]) -> Result<Self, Error> {
        if let [run] = runs {
            return Ok(Self::Run(run.clone()));
        }
        let rows = runs.iter().cloned().flatten().map(|row| row as u32);
        let rows: Vec<u32> = rows.collect();
        let rows = stream.array_u32(&rows, &[rows.len() as i32])?;
        Ok(Self::Gathered(rows))
    }
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
    pub(super) fn of(&self, stream: &Stream, held: &Array) -> Result<Array, Error> {
        let lane = self.lane.unwrap_or(0) as i32;
        Ok(match &self.rows {
            Rows::Run(rows) => {
                let mut stop = held.shape();
                (stop[0], stop[2]) = (lane + 1, rows.end as i32);
                stream.slice(held, &[lane, 0, rows.start as i32, 0], &stop)?
            }
            Rows::Gathered(indices) => stream.take(held, indices, 2)?,
        })
    }

    /// Whether its rows are gathered.
    pub(crate) const fn is_gathered(&self) -> bool {
        matches!(self.rows, Rows::Gathered(_))
    }

    pub(crate) const fn mask(&self) -> Mask<'_> {
        match &self.mask {
            Seen::All => Mask::None,
            Seen::Causal => Mask::Causal,
            Seen::Window(array) => Mask::Array(array),
        }
    }
}

impl Span {
    /// Rows of the pages up to the last that is written.
    pub(crate) fn end(&self) -> usize {
        let written = self.written.iter().filter(|_| self.view.lane.is_none());
        written.map(|run| run.end).max().unwrap_or(0)
    }

    /// Of the rows of a sequence, which attend through `window`.
    pub(crate) fn new(
        stream: &Stream,
        rows: &AttentionRows<'_>,
        window: Option<usize>,
        lane: Option<usize>,
    ) -> Result<Self, Error> {
        let new = rows.position..rows.position + rows.rows;
        Ok(Self {
            written: runs_in(rows, new.clone(), lane),
            view: View::new(stream, rows, (new, window), lane)?,
        })
    }

    /// Of a decoding row that reads a ring: only where it is written in the pages.
    pub(crate) fn of_ring(rows: &AttentionRows<'_>) -> Self {
        let view = View {
            lane: None,
            rows: Rows::Run(0..0),
            mask: Seen::All,
        };
        Self {
            written: runs(rows, rows.position..rows.position + rows.rows),
            view,
        }
    }

    /// The rows of `positions` of the same sequence, to be read and written.
    pub(crate) fn part(
        &self,
        stream: &Stream,
        rows: &AttentionRows<'_>,
        positions: Range<usize>,
    ) -> Result<Self, Error> {
        let lane = self.view.lane;
        let written = runs_in(rows, positions, lane);
        let rows = Rows::of(stream, &written)?;
        let mask = Seen::All;
        Ok(Self {
            written,
            view: View { lane, rows, mask },
        })
    }

    /// Places of the rows to write.
    pub(super) fn place(&self) -> (usize, &[Range<usize>]) {
        (self.view.lane.unwrap_or(0), &self.written)
    }
}

impl View {
    /// Keys that the queries `new` of a sequence see through `window`.
    pub(crate) fn new(
        stream: &Stream,
        rows: &AttentionRows<'_>,
        (new, window): (Range<usize>, Option<usize>),
        lane: Option<usize>,
    ) -> Result<Self, Error> {
        let seen = seen(&new, window);
        let runs = runs_in(rows, seen.clone(), lane);
        let rows = Rows::of(stream, &runs)?;
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
        Ok(Self { lane, rows, mask })
    }
}

/// Positions that the queries of the positions `new` see through `window`.
pub(crate) fn seen(new: &Range<usize>, window: Option<usize>) -> Range<usize> {
    let first = window.map_or(0, |window| (new.start + 1).saturating_sub(window));
    first..new.end
}

/// The row of the cache that holds a position of a sequence.
pub(crate) fn row_of(sequence: &AttentionRows<'_>, position: usize) -> usize {
    let page = sequence.pages[position / PAGE - sequence.first_page] as usize;
    page * PAGE + position % PAGE
}

/// As [`runs`], or the rows of a lane.
fn runs_in(
    sequence: &AttentionRows<'_>,
    positions: Range<usize>,
    lane: Option<usize>,
) -> Vec<Range<usize>> {
    match lane {
        Some(_) => vec![positions],
        None => runs(sequence, positions),
    }
}

/// Rows of the cache that hold `positions` of a sequence, as few ranges as possible.
pub(super) fn runs(sequence: &AttentionRows<'_>, positions: Range<usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut position = positions.start;
    while position < positions.end {
        let end = positions.end.min((position / PAGE + 1) * PAGE);
        let first = row_of(sequence, position);
        let rows = first..first + (end - position);
        match runs.last_mut() {
            Some(last) if last.end == rows.start => last.end = rows.end,
            _ => runs.push(rows),
        }
        position = end;
    }
    runs
}
