//! Rings: the last keys and values of each lane's sequence, in layers with a window.
//!
//! ```text
//! pages    (1, K, rows, D)         what a row may still see; shared, stored, sent
//! rings    (lanes, K, R + 1, D)    position p of a lane's sequence at row p mod R; row R of none
//! ```
//!
//! A decoding row goes to its ring and to its page. So one call of attention reads the rings of all
//! lanes, and no page lacks rows. Prompts are read by their pages. A ring is filled from these
//! before the first decoding row behind a prompt.
//!
//! A ring has [`PAGE`] rows more than a row sees. So rows that were computed in vain, and are
//! computed again, have written over none that a row sees.

use paceline_mlx::Stream;
use paceline_model::{BatchSequence, Error};
use paceline_tensor::PAGE;

use super::super::{Cache, put, runs, seen};
use super::lane_rows;

/// The rings of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    /// Kind of the layer's pages.
    pub(crate) kind: usize,
    /// Positions that a row sees, itself included.
    pub(crate) back: usize,
}

impl Ring {
    /// Rows of a ring, without the one of no position.
    pub(crate) const fn rows(self) -> usize {
        self.back + PAGE
    }
}

/// The decoding row of a lane.
#[derive(Debug)]
pub(crate) struct RingRow<'a> {
    pub(crate) lane: usize,
    pub(crate) sequence: BatchSequence<'a>,
}

impl Cache {
    pub(crate) fn ring_of(&self, kind: usize) -> Option<Ring> {
        let mut rings = self.lanes.limits.rings.iter().flatten();
        rings.find(|ring| ring.kind == kind).copied()
    }

    /// Layers with rings.
    fn with_rings(&self) -> impl Iterator<Item = (usize, Ring)> + use<> {
        let rings = self.lanes.limits.rings.clone().into_iter().enumerate();
        rings.filter_map(|(layer, ring)| Some((layer, ring?)))
    }

    pub(super) fn ring_bytes(&self) -> u64 {
        let bytes = self.with_rings().map(|(layer, ring)| {
            let arrays = self.layers[layer].rows().iter();
            let row = arrays.map(|array| array.n_bytes() / array.shape()[2].max(1) as u64);
            row.sum::<u64>() * (ring.rows() + 1) as u64
        });
        bytes.sum()
    }

    /// Makes rings for all lanes, without contents.
    pub(super) fn make_rings(&mut self, stream: &Stream) -> Result<(), Error> {
        let n = self.lanes.lanes.len();
        let lanes = self.lanes.lanes.iter_mut();
        lanes.for_each(|lane| lane.ring = None);
        for (layer, ring) in self.with_rings() {
            self.lanes.arrays[layer].clear(); // their memory serves the new ones
            for held in self.layers[layer].rows().iter().filter(|_| n > 0) {
                let mut shape = held.shape();
                (shape[0], shape[2]) = (n as i32, (ring.rows() + 1) as i32);
                let new = stream.zeros(&shape, held.dtype())?;
                stream.eval([&new])?;
                self.lanes.arrays[layer].push(new);
            }
        }
        Ok(())
    }

    /// Has the rings ready for the decoding rows of a step, which those lanes take and no others.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn fill_rings(
        &mut self,
        stream: &Stream,
        decoding: &[RingRow<'_>],
    ) -> Result<(), Error> {
        let mut is_filled = false;
        for row in decoding {
            let position = row.sequence.position;
            let has_all = |end: &usize| (position..=position + PAGE).contains(end);
            let has_all = self.lanes.lanes[row.lane]
                .ring
                .as_ref()
                .is_some_and(has_all);
            if !has_all && position > 0 {
                self.fill_ring(stream, row)?;
                is_filled = true;
            }
        }
        for lane in self.lanes.placed.iter().flatten() {
            let row = decoding.iter().find(|row| row.lane == *lane);
            self.lanes.lanes[*lane].ring = row.map(|row| row.sequence.position + 1);
        }
        // The next writes to pages are done in place only if nothing waits for them.
        match is_filled {
            true => Ok(stream.eval(self.lanes.arrays())?),
            false => Ok(()),
        }
    }

    /// Copies what a row sees of earlier ones from the pages to its ring.
    fn fill_ring(&mut self, stream: &Stream, row: &RingRow<'_>) -> Result<(), Error> {
        let position = row.sequence.position;
        for (layer, ring) in self.with_rings() {
            let of = row.sequence.rows_of(ring.kind);
            let mut at = seen(&(position..position + 1), Some(ring.back)).start;
            for run in runs(&of, at..position) {
                let mut first = run.start;
                while first < run.end {
                    let to = at % ring.rows();
                    let n = (run.end - first).min(ring.rows() - to);
                    let arrays = self.lanes.arrays[layer].iter_mut();
                    for (held, pages) in arrays.zip(self.layers[layer].rows()) {
                        let rows = lane_rows(stream, pages, 0, first..first + n)?;
                        let to = to..to + n;
                        put(stream, held, (row.lane, std::slice::from_ref(&to)), &rows)?;
                    }
                    (first, at) = (first + n, at + n);
                }
            }
        }
        Ok(())
    }
}
