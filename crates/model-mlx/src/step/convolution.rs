//! Convolutions over the last positions of a sequence: those of delta nets, and layers that are
//! short convolutions.
//!
//! ```text
//! short convolution   x (T, C) -> q, k, v (T, H D)   k v -> cache   attended = q * sum of tap k v
//! ```
//!
//! Inputs are in the cache in f32, so that an output does not depend on how a prompt was cut.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;
use paceline_tensor::{AttentionRows, PAGE};

use super::Step;
use super::weights::{Layer, Mixer, Taps};

impl Step<'_> {
    /// x (T, C) -> attended (T, H D), by a layer that is a short convolution.
    pub(super) fn short_convolution(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.attended = None;
        let Mixer::Conv(own) = &w.mixer else {
            return Ok(());
        };
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let project = |linear| {
            let product = self.product(linear, &self.x)?;
            Ok::<_, Error>(stream.astype(&product, Dtype::F32)?)
        };
        let [query, key, value] = own.inputs.each_ref().map(project);
        let inputs = stream.multiply(&key?, &value?)?;
        let mixed = self.by_sequence(index, |step, rows, of| {
            let inputs = rows_from(stream, &inputs, of)?;
            step.convolved(&own.taps, rows, &inputs)
        })?;
        let attended = stream.multiply(&query?, &mixed)?;
        self.attended = Some(stream.astype(&attended, dtype)?);
        Ok(())
    }

    /// Calls `of` for each sequence's rows in layer `index`, with their pages and their places in
    /// the batch. Joins the results, `(T, ..)`.
    pub(super) fn by_sequence(
        &mut self,
        index: usize,
        mut of: impl FnMut(&mut Self, &AttentionRows<'_>, Range<usize>) -> Result<Array, Error>,
    ) -> Result<Array, Error> {
        let (stream, kind) = (self.parts.stream, self.parts.constants.kinds.of(index));
        let (mut first, mut parts) = (0, Vec::new());
        for s in self.batch.sequences {
            let rows = s.rows_of(kind);
            parts.push(of(self, &rows, first..first + rows.rows)?);
            first += rows.rows;
        }
        Ok(stream.concatenate(&parts.iter().collect::<Vec<_>>(), 0)?)
    }

    /// Writes a sequence's `inputs (n, channels)` to the cache. Their convolution `(n, channels)`.
    pub(super) fn convolved(
        &mut self,
        Taps { taps, bias }: &Taps,
        rows: &AttentionRows<'_>,
        inputs: &Array,
    ) -> Result<Array, Error> {
        let (stream, held) = (self.parts.stream, self.held(self.index));
        let pages = self.parts.cache.recurrent_mut(held);
        for (page, at, new) in by_page(rows) {
            pages.put_inputs(stream, (page, at), &rows_from(stream, inputs, new)?)?;
        }
        let back = (taps.len() - 1).min(rows.position);
        let seen = AttentionRows {
            position: rows.position - back,
            rows: rows.rows + back,
            ..*rows
        };
        let pages = self.parts.cache.recurrent(held);
        let inputs = by_page(&seen).map(|(page, at, new)| {
            let end = at + new.len();
            pages.inputs(stream, page, at..end)
        });
        let mut inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let missing = (taps.len() - 1 - back) as i32;
        if missing > 0 {
            let channels = inputs[0].shape()[1];
            inputs.insert(0, stream.zeros(&[missing, channels], Dtype::F32)?);
        }
        let inputs = stream.concatenate(&inputs.iter().collect::<Vec<_>>(), 0)?;
        let mut sum = bias.clone();
        for (i, tap) in taps.iter().enumerate() {
            let part = rows_from(stream, &inputs, i..i + rows.rows)?;
            let part = stream.multiply(&part, tap)?;
            sum = Some(match sum {
                Some(sum) => stream.add(&sum, &part)?,
                None => part,
            });
        }
        Ok(sum.expect("a convolution looks at an input at least"))
    }
}

/// The rows of a sequence page by page: the page, the first row's place in it, and which rows.
pub(super) fn by_page<'a>(
    rows: &AttentionRows<'a>,
) -> impl Iterator<Item = (usize, usize, Range<usize>)> + use<'a> {
    let AttentionRows {
        rows,
        position,
        pages,
        first_page,
    } = *rows;
    let end = position + rows;
    (position / PAGE..end.div_ceil(PAGE)).map(move |page| {
        let first = position.max(page * PAGE);
        let last = end.min((page + 1) * PAGE);
        let held = pages[page - first_page] as usize;
        (held, first % PAGE, first - position..last - position)
    })
}

/// The rows `of` along the first axis.
pub(super) fn rows_from(stream: &Stream, x: &Array, of: Range<usize>) -> Result<Array, Error> {
    let mut stop = x.shape();
    let mut start = vec![0; stop.len()];
    (start[0], stop[0]) = (of.start as i32, of.end as i32);
    Ok(stream.slice(x, &start, &stop)?)
}
