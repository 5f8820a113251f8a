//! The decoding rows of a step that have lanes. All of them together take one rope, one update of
//! keys and of values, and one call of attention.
//!
//! The lanes of other sequences are computed too. Their keys and values go to the row of a lane
//! that is of no position, and their outputs are dropped.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Mask, Stream};
use paceline_model::{Batch, Error};

use super::cache::seen;

/// Decoding rows of a step, one of a lane each.
#[derive(Debug)]
pub(super) struct Decoding {
    /// Whether each sequence of the batch is among them.
    has: Vec<bool>,
    /// `(lanes,)`: the row of the batch that each lane computes; `None` where these are all rows
    /// in their order.
    rows: Option<Array>,
    /// `(lanes,)`: the position of each row.
    pub(super) positions: Array,
    /// The same, `(lanes, 1, 1, 1)`.
    pub(super) written: Array,
    /// Of each span kind.
    views: Vec<LanesView>,
    /// `(T,)`: the rows of the batch among the outputs; `None` where they are the same. Outputs of
    /// lanes come first, then those of other sequences.
    order: Option<Array>,
}

/// Keys that the decoding rows see in a layer.
#[derive(Debug)]
struct LanesView {
    positions: Range<usize>,
    /// `(lanes, 1, 1, keys)`; `None` where all rows see all keys.
    mask: Option<Array>,
}

/// A decoding row.
#[derive(Clone, Copy, Debug)]
struct Row {
    lane: usize,
    row: usize,
    position: usize,
}

impl Decoding {
    /// Of a batch whose sequences are in `lanes`, of `(n, rows)` lanes and rows, for layers with
    /// these `windows`. `None` where less than half of the lanes would have a row, or one alone.
    pub(super) fn new(
        stream: &Stream,
        batch: &Batch<'_>,
        (lanes, (n, rows)): (&[Option<usize>], (usize, usize)),
        windows: impl Iterator<Item = Option<usize>>,
    ) -> Result<Option<Self>, Error> {
        let (mut all, mut others, mut first) = (Vec::new(), Vec::new(), 0);
        for (sequence, lane) in batch.sequences.iter().zip(lanes) {
            match lane {
                Some(lane) if sequence.tokens.len() == 1 => all.push(Row {
                    lane: *lane,
                    row: first,
                    position: sequence.position,
                }),
                _ => others.extend(first..first + sequence.tokens.len()),
            }
            first += sequence.tokens.len();
        }
        if all.len() < 2 || 2 * all.len() < n {
            return Ok(None);
        }
        let of_lane = |lane: usize| all.iter().find(|row| row.lane == lane);
        let numbers =
            |of: &dyn Fn(usize) -> usize, n: usize| (0..n).map(|i| of(i) as u32).collect();
        let array = |all: Vec<u32>| stream.array_u32(&all, &[all.len() as i32]);
        let is_all = |all: &[u32], n: usize| n == first && all.iter().copied().eq(0..n as u32);
        let unless_all = |all: Vec<u32>, n| (!is_all(&all, n)).then(|| array(all)).transpose();

        let computed: Vec<u32> = numbers(&|lane| of_lane(lane).map_or(0, |row| row.row), n);
        let positions = numbers(
            &|lane| of_lane(lane).map_or(rows - 1, |row| row.position),
            n,
        );
        let mut order = vec![0; first];
        all.iter().for_each(|row| order[row.row] = row.lane as u32);
        let behind = others.iter().zip(n as u32..);
        behind.for_each(|(row, place)| order[*row] = place);
        let has = |(s, lane): (&paceline_model::BatchSequence<'_>, &Option<usize>)| {
            lane.is_some() && s.tokens.len() == 1
        };
        let views = windows.map(|window| LanesView::new(stream, &all, n, window));
        let positions = array(positions)?;
        Ok(Some(Self {
            has: batch.sequences.iter().zip(lanes).map(has).collect(),
            rows: unless_all(computed, n)?,
            written: stream.reshape(&positions, &[n as i32, 1, 1, 1])?,
            positions,
            views: views.collect::<Result<_, _>>()?,
            order: unless_all(order, n + others.len())?,
        }))
    }

    /// Whether sequence `i` of the batch is among them.
    pub(super) fn has(&self, i: usize) -> bool {
        self.has[i]
    }

    /// The rows of x (T, heads, D) as (lanes, heads, 1, D).
    pub(super) fn turned(&self, stream: &Stream, x: &Array) -> Result<Array, Error> {
        let rows = match &self.rows {
            Some(rows) => stream.take(x, rows, 0)?,
            None => x.clone(),
        };
        let shape = rows.shape();
        Ok(stream.reshape(&rows, &[shape[0], shape[1], 1, shape[2]])?)
    }

    /// Positions that layers of span kind `kind` see.
    pub(super) fn seen(&self, kind: usize) -> &Range<usize> {
        &self.views[kind].positions
    }

    pub(super) fn mask(&self, kind: usize) -> Mask<'_> {
        let mask = self.views[kind].mask.as_ref();
        mask.map_or(Mask::None, Mask::Array)
    }

    /// Outputs (rows, n), of lanes and then of other sequences, as rows of the batch.
    pub(super) fn in_order(&self, stream: &Stream, outputs: Array) -> Result<Array, Error> {
        match &self.order {
            Some(order) => Ok(stream.take(&outputs, order, 0)?),
            None => Ok(outputs),
        }
    }
}

impl LanesView {
    fn new(stream: &Stream, all: &[Row], n: usize, window: Option<usize>) -> Result<Self, Error> {
        let of = |row: &Row| seen(&(row.position..row.position + 1), window);
        let starts = all.iter().map(|row| of(row).start);
        let ends = all.iter().map(|row| of(row).end);
        let positions = starts.min().unwrap_or(0)..ends.max().unwrap_or(0);
        if all.len() == n && all.iter().all(|row| of(row) == positions) {
            let mask = None;
            return Ok(Self { positions, mask });
        }
        let keys = positions.len();
        let mut bytes = vec![0; n * keys];
        for lane in 0..n {
            let row = all.iter().find(|row| row.lane == lane);
            // Outputs of other lanes are dropped, but have to be numbers.
            let seen = row.map_or(0..1, |row| {
                let seen = of(row);
                seen.start - positions.start..seen.end - positions.start
            });
            bytes[lane * keys..][seen].fill(1);
        }
        let mask = stream.array(&bytes, &[n as i32, 1, 1, keys as i32], Dtype::Bool)?;
        let mask = Some(mask);
        Ok(Self { positions, mask })
    }
}
