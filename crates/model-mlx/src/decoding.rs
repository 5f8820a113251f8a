//! The decoding rows of a step that have lanes. All of them together take one rope, one update of
//! keys and of values, and one call of attention.
//!
//! The lanes of other sequences are computed too. Their keys and values go to the row of a lane
//! that is of no position, and their outputs are dropped. Layers with a window have rings of lanes,
//! and their pages get the rows too.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Mask, Stream};
use paceline_model::{Batch, Error};

use super::cache::{Ring, RingRow, SpanKind, row_of, seen};

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
    /// The lane and the sequence of the batch of each row, by lane.
    sequences: Vec<(usize, usize)>,
    /// `(B,)`: the lanes with rows; `None` for all.
    used: Option<Array>,
    /// Of each span kind; `None` where it has no lanes.
    views: Vec<Option<LanesView>>,
    /// `(T,)`: the rows of the batch among the outputs; `None` where they are the same. Outputs of
    /// lanes come first, then those of other sequences.
    order: Option<Array>,
}

/// Where the decoding rows of a layer are written, and the keys that they see.
#[derive(Debug)]
struct LanesView {
    /// `(lanes, 1, 1, 1)`: their places in the lanes.
    written: Array,
    /// `(1, 1, B, 1)`: their places in the pages, which have the rows of rings too.
    in_pages: Option<Array>,
    /// Rows of the lanes that are read.
    read: Range<usize>,
    /// `(lanes, 1, 1, keys)`; `None` where all rows see all keys.
    mask: Option<Array>,
}

/// A decoding row.
#[derive(Clone, Copy, Debug)]
struct Row {
    lane: usize,
    sequence: usize,
    row: usize,
    position: usize,
}

impl Decoding {
    /// Of a batch whose sequences are in `lanes`, of `(n, rows)` lanes and rows, for layers of
    /// these `kinds`, which may have rings. `None` where less than half of the lanes would have a
    /// row, or one alone.
    pub(super) fn new(
        stream: &Stream,
        batch: &Batch<'_>,
        (lanes, (n, rows)): (&[Option<usize>], (usize, usize)),
        kinds: impl Iterator<Item = (SpanKind, Option<Ring>)>,
    ) -> Result<Option<Self>, Error> {
        let (mut all, mut others, mut first) = (Vec::new(), Vec::new(), 0);
        for (i, (sequence, lane)) in batch.sequences.iter().zip(lanes).enumerate() {
            match lane {
                Some(lane) if sequence.tokens.len() == 1 => all.push(Row {
                    lane: *lane,
                    sequence: i,
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
        all.sort_by_key(|row| row.lane);
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
        let of = (batch, &*all, (n, rows));
        let views = kinds.map(|kind| LanesView::new(stream, of, kind));
        let used = all.iter().map(|row| row.lane as u32).collect();
        Ok(Some(Self {
            has: batch.sequences.iter().zip(lanes).map(has).collect(),
            rows: unless_all(computed, n)?,
            positions: array(positions)?,
            sequences: all.iter().map(|row| (row.lane, row.sequence)).collect(),
            used: (all.len() < n).then(|| array(used)).transpose()?,
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

    /// Whether layers of span kind `kind` have lanes.
    pub(super) fn has_lanes(&self, kind: usize) -> bool {
        self.views[kind].is_some()
    }

    fn view(&self, kind: usize) -> &LanesView {
        self.views[kind].as_ref().expect("layers that have lanes")
    }

    /// `(lanes, 1, 1, 1)`: rows of the lanes that are written in layers of span kind `kind`.
    pub(super) fn written(&self, kind: usize) -> &Array {
        &self.view(kind).written
    }

    /// Rows of the lanes that layers of span kind `kind` read.
    pub(super) fn read(&self, kind: usize) -> &Range<usize> {
        &self.view(kind).read
    }

    pub(super) fn mask(&self, kind: usize) -> Mask<'_> {
        let mask = self.view(kind).mask.as_ref();
        mask.map_or(Mask::None, Mask::Array)
    }

    /// Where layers of span kind `kind` write the rows of `x (lanes, K, 1, D)` in their pages, and
    /// these as `(1, K, B, D)`. `None` where the lanes alone have them.
    pub(super) fn in_pages<'a>(
        &'a self,
        stream: &Stream,
        kind: usize,
        new: [&Array; 2],
    ) -> Result<Option<(&'a Array, [Array; 2])>, Error> {
        let Some(places) = &self.view(kind).in_pages else {
            return Ok(None);
        };
        let turned = |x: &Array| {
            let rows = match &self.used {
                Some(used) => stream.take(x, used, 0)?,
                None => x.clone(),
            };
            stream.transpose(&rows, &[2, 1, 0, 3])
        };
        Ok(Some((places, [turned(new[0])?, turned(new[1])?])))
    }

    /// The decoding rows of `batch`.
    pub(super) fn ring_rows<'a>(&self, batch: &Batch<'a>) -> impl Iterator<Item = RingRow<'a>> {
        self.sequences.iter().map(|(lane, sequence)| RingRow {
            lane: *lane,
            sequence: batch.sequences[*sequence],
        })
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
    /// Of rows of a batch in lanes of `(n, rows)`. `None` for layers without lanes.
    fn new(
        stream: &Stream,
        (batch, all, (n, rows)): (&Batch<'_>, &[Row], (usize, usize)),
        (of, ring): (SpanKind, Option<Ring>),
    ) -> Result<Option<Self>, Error> {
        if of.kind > 0 && ring.is_none() {
            return Ok(None);
        }
        let rows = ring.map_or(rows - 1, Ring::rows); // without that of no position
        let seen = |row: &Row| seen(&(row.position..row.position + 1), of.window);
        let ends = all.iter().map(|row| row.position + 1);
        let first = match ring {
            Some(_) => 0,
            None => all.iter().map(|row| seen(row).start).min().unwrap_or(0),
        };
        let read = first..ends.max().unwrap_or(0).min(rows);
        let mut places = vec![rows as u32; n];
        let each = all.iter();
        each.for_each(|row| places[row.lane] = (row.position % rows) as u32);
        let in_page = |row: &Row| {
            let rows = batch.sequences[row.sequence].rows_of(of.kind);
            row_of(&rows, row.position) as u32
        };
        let in_pages = ring.map(|_| {
            let places: Vec<u32> = all.iter().map(in_page).collect();
            stream.array_u32(&places, &[1, 1, places.len() as i32, 1])
        });
        let is_whole = all.len() == n && all.iter().all(|row| seen(row) == read);
        let mask = (!is_whole).then(|| {
            let keys = read.len();
            let mut bytes = vec![0; n * keys];
            // Outputs of other lanes are dropped, but have to be numbers.
            bytes.chunks_mut(keys).for_each(|lane| lane[0] = 1);
            for row in all {
                let lane = &mut bytes[row.lane * keys..][..keys];
                lane[0] = 0;
                let seen = seen(row);
                let from = seen.start % rows - first;
                let tail = seen.len().min(rows - from);
                lane[from..from + tail].fill(1);
                lane[..seen.len() - tail].fill(1);
            }
            stream.array(&bytes, &[n as i32, 1, 1, keys as i32], Dtype::Bool)
        });
        Ok(Some(Self {
            written: stream.array_u32(&places, &[n as i32, 1, 1, 1])?,
            in_pages: in_pages.transpose()?,
            read,
            mask: mask.transpose()?,
        }))
    }
}
