//! Lanes: the keys and values of a sequence as one run from row 0.
//!
//! ```text
//! pages    (1, K, rows, D)        of all sequences, in any order; shared, stored, sent
//! lanes    (lanes, K, rows, D)    of a sequence each, in order of position
//! ```
//!
//! Pages of several sequences interleave, and attention would gather each sequence's rows in every
//! step. A lane holds them as one run, and one call of attention reads the lanes of all decoding
//! rows. A sequence that is alone, on pages that follow one another, is read there in place.
//!
//! New rows go to the lane alone. They are copied to their pages before another sequence or a page
//! store reads these, and before the lane gets another sequence. A write to a page ends every other
//! lane in front of it.
//!
//! Layers with a window have [rings] instead.

use std::ops::Range;

use paceline_mlx::{Array, Stream};
use paceline_model::Error;
use paceline_tensor::{AttentionRows, PAGE};

use super::{Cache, put, put_rows, rows_of, runs};

mod rings;

pub(crate) use rings::{Ring, RingRow};

/// Rows by which lanes grow at least, as mlx-lm's caches do.
const GROWTH: usize = 256;

/// Steps without rows after which another sequence may take a lane while there may be new ones.
/// Batches of a pipeline take turns, and there are fewer of them.
const IDLE: u64 = 16;

/// Steps between two looks for lanes without rows, whose memory is given back.
const UNUSED: u64 = 256;

/// Stands for a page that the leader has not named yet; larger than any page's number.
pub(crate) const UNKNOWN_PAGE: u32 = u32::MAX;

/// Bounds of lanes.
#[derive(Clone, Debug, Default)]
pub(crate) struct LaneLimits {
    /// Whether each layer has lanes: those with the pages that keep all positions.
    pub(crate) layers: Vec<bool>,
    /// The rings of each layer, if it has some.
    pub(crate) rings: Vec<Option<Ring>>,
    pub(crate) lanes: usize,
    pub(crate) bytes: u64,
}

/// Lanes of a cache.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    limits: LaneLimits,
    /// Of each layer, `(lanes, heads, rows, D)` for each of its arrays of pages, or rings.
    arrays: Vec<Vec<Array>>,
    /// Rows of a lane. The last one is of no position.
    rows: usize,
    lanes: Vec<Lane>,
    /// The lane of each sequence of the last step.
    placed: Vec<Option<usize>>,
    /// Counts steps.
    clock: u64,
}

/// The contents of a lane.
#[derive(Clone, Debug, Default)]
struct Lane {
    /// Pages of its positions.
    pages: Vec<u32>,
    /// Positions in the lane, from 0.
    end: usize,
    /// Positions that are in the pages too, from 0.
    kept: usize,
    /// The last step with rows of it.
    used: u64,
    /// Positions of the sequence up to the last one in its rings; `None` where these are old.
    ring: Option<usize>,
}

impl Lane {
    /// Whether it has the positions in front of the new rows of `sequence`.
    fn has(&self, sequence: &AttentionRows<'_>) -> bool {
        let pages = sequence.position.div_ceil(PAGE);
        pages > 0
            && self.end >= sequence.position
            && self.pages.get(..pages) == sequence.pages.get(..pages)
    }

    /// Whether it has rows that are not of `sequence`.
    fn is_of_others(&self, sequence: &AttentionRows<'_>) -> bool {
        !sequence.pages.starts_with(&self.pages)
    }

    /// Ends it in front of `page`.
    fn end_before(&mut self, page: u32) {
        if let Some(at) = self.pages.iter().position(|own| *own == page) {
            self.pages.truncate(at);
            self.end = self.end.min(at * PAGE);
            self.kept = self.kept.min(self.end);
            self.ring = None;
        }
    }

    /// Positions whose pages are known, from 0.
    fn known(&self) -> usize {
        let unknown = self.pages.iter().position(|page| *page == UNKNOWN_PAGE);
        unknown.map_or(self.end, |at| self.end.min(at * PAGE))
    }

    const fn is_kept(&self) -> bool {
        self.kept == self.end
    }
}

impl Lanes {
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.arrays.iter().flatten()
    }

    pub(super) fn of_layer(&self, layer: usize) -> &[Array] {
        &self.arrays[layer]
    }

    pub(super) fn of_layer_mut(&mut self, layer: usize) -> &mut [Array] {
        &mut self.arrays[layer]
    }

    /// The lane of each sequence that has one already, each of one sequence.
    fn found(&self, sequences: &[AttentionRows<'_>]) -> Vec<Option<usize>> {
        let mut found = vec![None; sequences.len()];
        let mut is_taken = vec![false; self.lanes.len()];
        // A lane may have the first rows of several sequences: its own comes first.
        for is_own in [true, false] {
            for (sequence, found) in sequences.iter().zip(&mut found) {
                let fits = |(i, lane): &(usize, &Lane)| {
                    !is_taken[*i] && lane.has(sequence) && !(is_own && lane.is_of_others(sequence))
                };
                if found.is_none() {
                    *found = self.lanes.iter().enumerate().find(fits).map(|(i, _)| i);
                    found.iter().for_each(|i| is_taken[*i] = true);
                }
            }
        }
        found
    }

    /// Lanes for `n` sequences besides the lanes `taken`: idle ones, then new ones, then those that
    /// are longest without rows.
    fn others(&self, n: usize, taken: &[usize]) -> Vec<usize> {
        let since = |i: &usize| {
            let lane = &self.lanes[*i];
            let is_idle = lane.end == 0 || lane.used + IDLE < self.clock;
            if is_idle { 0 } else { lane.used }
        };
        let mut all: Vec<usize> = (0..self.lanes.len()).collect();
        all.retain(|i| !taken.contains(i));
        all.sort_by_key(since);
        let idle = all.partition_point(|i| since(i) == 0);
        let new = self.lanes.len()..self.limits.lanes.max(self.lanes.len());
        let used = all.split_off(idle);
        all.into_iter().chain(new).chain(used).take(n).collect()
    }
}

impl Cache {
    /// Lets sequences have lanes.
    pub(crate) fn allow_lanes(&mut self, limits: LaneLimits) {
        self.lanes.limits = limits;
    }

    /// Lanes, and rows of each of them.
    pub(crate) const fn lanes(&self) -> (usize, usize) {
        (self.lanes.lanes.len(), self.lanes.rows)
    }

    /// The lanes of the sequences of a step, which have the rows in front of the step's. `None` for
    /// a sequence that is to be read and written in its pages, which have those rows then.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn lanes_of(
        &mut self,
        stream: &Stream,
        sequences: &[AttentionRows<'_>],
    ) -> Result<Vec<Option<usize>>, Error> {
        if self.lanes.limits.lanes == 0 {
            return Ok(vec![None; sequences.len()]);
        }
        self.lanes.clock += 1;
        self.give_back_unused(stream)?;
        let mut placed = self.lanes.found(sequences);
        let has_lane = |s: &AttentionRows<'_>| {
            sequences.len() > 1 || runs(s, 0..s.position + s.rows).len() > 1
        };
        let is_new = |i: &usize| placed[*i].is_none() && has_lane(&sequences[*i]);
        let new: Vec<usize> = (0..sequences.len()).filter(is_new).collect();
        let taken: Vec<usize> = placed.iter().copied().flatten().collect();
        let lanes = self.lanes.others(new.len(), &taken);
        new.iter()
            .zip(&lanes)
            .for_each(|(i, lane)| placed[*i] = Some(*lane));
        if !self.make_room(stream, sequences, &placed)? {
            self.rebuild(stream, &[], (0, 0))?;
            placed.fill(None);
        }
        for (sequence, lane) in sequences.iter().zip(&placed) {
            match lane {
                None => self.settle(stream, sequence.pages)?,
                Some(lane) if lanes.contains(lane) => self.fill(stream, *lane, sequence)?,
                // It takes the lane of another sequence, whose other rows are in that alone.
                Some(lane) if self.lanes.lanes[*lane].is_of_others(sequence) => {
                    self.keep(stream, &[*lane])?;
                }
                Some(_) => {}
            }
        }
        self.note(sequences, &placed);
        self.lanes.placed.clone_from(&placed);
        Ok(placed)
    }

    /// Whether a step of these sequences needs no page and no more memory. All keys and values are
    /// in lanes then, and each sequence has a lane with room.
    pub(crate) fn is_in_lanes(&self, sequences: &[AttentionRows<'_>]) -> bool {
        let layers = self.layers.iter().zip(&self.lanes.limits.layers);
        let mut layers = layers.filter(|(kept, _)| !matches!(kept, super::Kept::Nothing));
        let ends = sequences.iter().map(|s| s.position + s.rows);
        layers.all(|(_, has_lanes)| *has_lanes)
            && ends.max().unwrap_or(0) < self.lanes.rows
            && self.lanes.found(sequences).iter().all(Option::is_some)
    }

    /// Names the pages that the last step of these sequences began.
    pub(crate) fn name_pages(&mut self, sequences: &[AttentionRows<'_>]) {
        for (sequence, own) in sequences.iter().zip(self.lanes.placed.clone()) {
            let end = (sequence.position + sequence.rows).div_ceil(PAGE);
            let (Some(own), Some(page)) = (own, sequence.pages.get(end - 1)) else {
                continue;
            };
            if self.lanes.lanes[own].pages.last() != Some(&UNKNOWN_PAGE) {
                continue;
            }
            self.end_lanes_before(*page);
            self.lanes.lanes[own].pages[end - 1] = *page;
        }
    }

    /// Notes what the step writes.
    fn note(&mut self, sequences: &[AttentionRows<'_>], placed: &[Option<usize>]) {
        for (sequence, own) in sequences.iter().zip(placed) {
            let (position, end) = (sequence.position, sequence.position + sequence.rows);
            let pages = &sequence.pages[..end.div_ceil(PAGE)];
            let others = self.lanes.lanes.iter_mut().enumerate();
            for (_, lane) in others.filter(|(i, _)| Some(*i) != *own) {
                let written = pages[position / PAGE..].iter();
                let written = written.filter(|page| **page != UNKNOWN_PAGE);
                written.for_each(|page| lane.end_before(*page));
            }
            if let Some(own) = own {
                let lane = &mut self.lanes.lanes[*own];
                lane.pages = pages.to_vec();
                (lane.end, lane.kept) = (end, lane.kept.min(position));
                lane.used = self.lanes.clock;
            }
        }
    }

    /// Has as many lanes and rows as the step needs; `false` if they may not take that much memory.
    fn make_room(
        &mut self,
        stream: &Stream,
        sequences: &[AttentionRows<'_>],
        placed: &[Option<usize>],
    ) -> Result<bool, Error> {
        let with_lanes = sequences
            .iter()
            .zip(placed)
            .filter(|(_, lane)| lane.is_some());
        let ends = with_lanes.map(|(s, _)| s.position + s.rows);
        let needed = ends.max().map_or(0, |end| end + 1);
        let (old, rows) = self.lanes();
        let n = placed
            .iter()
            .flatten()
            .map(|lane| lane + 1)
            .fold(old, usize::max);
        if n == old && needed <= rows {
            return Ok(true);
        }
        let ample = needed.max(if needed > rows { rows + rows / 2 } else { rows });
        let sizes = [ample.next_multiple_of(GROWTH), needed.max(rows)];
        let sizes = sizes.map(|rows| rows_of(rows.div_ceil(PAGE)));
        let bytes = |rows: usize| (self.lane_bytes() * rows as u64 + self.ring_bytes()) * n as u64;
        let fits = |rows: &usize| bytes(*rows) <= self.lanes.limits.bytes;
        let Some(rows) = sizes.into_iter().find(fits) else {
            return Ok(false);
        };
        let all: Vec<usize> = (0..old).collect();
        self.rebuild(stream, &all, (n, rows)).map(|()| true)
    }

    fn lane_bytes(&self) -> u64 {
        let arrays = self
            .with_lanes()
            .flat_map(|layer| self.layers[layer].rows());
        let bytes = arrays.map(|array| array.n_bytes() / array.shape()[2].max(1) as u64);
        bytes.sum()
    }

    /// Layers with lanes.
    fn with_lanes(&self) -> impl Iterator<Item = usize> + use<> {
        let layers = self.lanes.limits.layers.clone().into_iter().enumerate();
        layers.filter_map(|(layer, has_lanes)| has_lanes.then_some(layer))
    }

    /// Makes lanes of `(n, rows)`, the first ones with the contents of `from`. Others' rows go to
    /// the pages.
    fn rebuild(
        &mut self,
        stream: &Stream,
        from: &[usize],
        (n, rows): (usize, usize),
    ) -> Result<(), Error> {
        let dropped = (0..self.lanes.lanes.len()).filter(|lane| !from.contains(lane));
        self.keep(stream, &dropped.collect::<Vec<_>>())?;
        self.lanes.arrays.resize_with(self.layers.len(), Vec::new);
        for layer in self.with_lanes() {
            let pages = self.layers[layer].rows();
            let mut old = std::mem::take(&mut self.lanes.arrays[layer]).into_iter();
            for held in pages.iter().filter(|_| n > 0) {
                let mut shape = held.shape();
                (shape[0], shape[2]) = (n as i32, rows as i32);
                let mut new = stream.zeros(&shape, held.dtype())?;
                if let Some(old) = old.next() {
                    for (to, from) in from.iter().enumerate() {
                        let end = self.lanes.lanes[*from].end;
                        let part = lane_rows(stream, &old, *from, 0..end)?;
                        put(
                            stream,
                            &mut new,
                            (to, std::slice::from_ref(&(0..end))),
                            &part,
                        )?;
                    }
                }
                stream.eval([&new])?; // one array at a time is held twice
                self.lanes.arrays[layer].push(new);
            }
        }
        let is_same = n == self.lanes.lanes.len() && from.iter().copied().eq(0..n);
        let lanes = from.iter().map(|lane| self.lanes.lanes[*lane].clone());
        let mut lanes: Vec<Lane> = lanes.collect();
        lanes.resize_with(n, Lane::default);
        (self.lanes.lanes, self.lanes.rows) = (lanes, rows);
        match is_same {
            true => Ok(()),
            false => self.make_rings(stream),
        }
    }

    /// Gives memory back where at most half of the lanes had rows lately.
    fn give_back_unused(&mut self, stream: &Stream) -> Result<(), Error> {
        let lanes = &self.lanes;
        let is_used = |i: &usize| lanes.lanes[*i].used + UNUSED > lanes.clock;
        let used: Vec<usize> = (0..lanes.lanes.len()).filter(is_used).collect();
        let is_due = lanes.clock.is_multiple_of(UNUSED) && 2 * used.len() <= lanes.lanes.len();
        if !is_due || lanes.lanes.is_empty() {
            return Ok(());
        }
        let rows = if used.is_empty() { 0 } else { lanes.rows };
        self.rebuild(stream, &used, (used.len(), rows))
    }

    /// Copies the rows of a sequence in front of the step's from its pages to a lane. The lane's
    /// former rows go to theirs before.
    fn fill(
        &mut self,
        stream: &Stream,
        lane: usize,
        sequence: &AttentionRows<'_>,
    ) -> Result<(), Error> {
        self.keep(stream, &[lane])?;
        let end = sequence.position;
        self.lanes.lanes[lane] = Lane {
            end,
            kept: end,
            ..Lane::default()
        };
        if end == 0 {
            return Ok(());
        }
        let pages = &sequence.pages[..end.div_ceil(PAGE)];
        self.settle(stream, pages)?;
        for layer in self.with_lanes() {
            let arrays = self.lanes.arrays[layer].iter_mut();
            for (to, from) in arrays.zip(self.layers[layer].rows()) {
                let mut position = 0;
                for run in runs(sequence, 0..end) {
                    let rows = position..position + run.len();
                    position = rows.end;
                    put(
                        stream,
                        to,
                        (lane, &[rows]),
                        &lane_rows(stream, from, 0, run)?,
                    )?;
                }
            }
        }
        Ok(stream.eval(self.lanes.arrays())?)
    }

    /// Has the rows of `pages` in the pages, where lanes alone had them.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn settle(&mut self, stream: &Stream, pages: &[u32]) -> Result<(), Error> {
        let has_some = |lane: &Lane| lane.pages.iter().any(|page| pages.contains(page));
        let lanes = self.lanes.lanes.iter().enumerate();
        let lanes = lanes.filter(|(_, lane)| !lane.is_kept() && has_some(lane));
        let lanes: Vec<usize> = lanes.map(|(i, _)| i).collect();
        self.keep(stream, &lanes)
    }

    /// Copies the rows of `lanes` that are in these alone to their pages.
    fn keep(&mut self, stream: &Stream, lanes: &[usize]) -> Result<(), Error> {
        for lane in lanes {
            let own = self.lanes.lanes[*lane].clone();
            let Lane { pages, kept, .. } = &own;
            let (kept, end) = (*kept, own.known());
            if kept == end {
                continue;
            }
            let of = AttentionRows {
                rows: end - kept,
                position: kept,
                pages,
                first_page: 0,
            };
            let written = runs(&of, kept..end);
            let last = written.iter().map(|run| run.end).max().unwrap_or(0);
            let layers: Vec<usize> = self.with_lanes().collect();
            let growth = self.growth(|layer| if layers.contains(&layer) { last } else { 0 });
            self.grow(stream, &growth)?;
            for layer in &layers {
                let arrays = &self.lanes.arrays[*layer];
                for (to, from) in self.layers[*layer].rows_mut().iter_mut().zip(arrays) {
                    let rows = lane_rows(stream, from, *lane, kept..end)?;
                    put(stream, to, (0, &written), &rows)?;
                }
                // The next writes to the lanes are done in place only if nothing waits for them.
                stream.eval(self.layers[*layer].rows())?;
            }
            self.lanes.lanes[*lane].kept = end;
        }
        Ok(())
    }

    /// Ends lanes in front of a page that gets other contents.
    pub(crate) fn end_lanes_before(&mut self, page: u32) {
        let lanes = self.lanes.lanes.iter_mut();
        lanes.for_each(|lane| lane.end_before(page));
    }

    /// Writes a row of each lane, `(lanes, K, 1, D)` and `(lanes, K, 1, E)`. `rows` are their
    /// places, `(lanes, 1, 1, 1)`.
    pub(crate) fn write_lanes(
        &mut self,
        stream: &Stream,
        layer: usize,
        rows: &Array,
        new: [&Array; 2],
    ) -> Result<(), Error> {
        let new = self.as_kept(stream, layer, new)?;
        put_rows(stream, self.lanes.of_layer_mut(layer), rows, &new)
    }

    /// Keys and values of all lanes at `positions`: `(lanes, K, keys, D)`, `(lanes, K, keys, E)`.
    pub(crate) fn read_lanes(
        &self,
        stream: &Stream,
        layer: usize,
        positions: &Range<usize>,
    ) -> Result<[Array; 2], Error> {
        let rows = |held: &Array| {
            let (mut start, mut stop) = ([0; 4], held.shape());
            (start[2], stop[2]) = (positions.start as i32, positions.end as i32);
            Ok(stream.slice(held, &start, &stop)?)
        };
        self.values(stream, (layer, self.lanes.of_layer(layer)), rows)
    }
}

/// Rows of a lane, `(1, heads, rows, D)`.
fn lane_rows(
    stream: &Stream,
    held: &Array,
    lane: usize,
    rows: Range<usize>,
) -> Result<Array, Error> {
    let (lane, mut stop) = (lane as i32, held.shape());
    (stop[0], stop[2]) = (lane + 1, rows.end as i32);
    Ok(stream.slice(held, &[lane, 0, rows.start as i32, 0], &stop)?)
}

#[cfg(test)]
mod tests;
