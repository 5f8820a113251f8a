//! The rows that the last layer computes behind its keys and values: those with logits.
//!
//! ```text
//! other layers    x (T, C) -> q, k, v of T rows -> attended (T, H D) -> residual (T, C)
//! the last one    x (T, C) -> k, v of T rows; q of R rows -> attended (R, H D) -> residual (R, C)
//! ```
//!
//! Nothing reads its other rows. Ranks that share a layer compute all of them.

use paceline_mlx::{Array, Stream};
use paceline_model::{Batch, Error, LayerCache};

use super::Step;
use crate::cache::{SpanKind, View};

/// Rows with logits, where these are not all; the last row where none has.
#[derive(Debug)]
pub(super) struct OutputRows {
    /// `(R,)`: their places in the batch.
    rows: Array,
    /// Of each sequence, how many of its last rows.
    counts: Vec<usize>,
    /// Of each sequence with some of its rows, but not all: the keys that these see.
    views: Vec<Option<View>>,
}

impl OutputRows {
    /// Of a batch, whose sequences are in `lanes`, for a last layer with keys of `kind`, if it has
    /// keys.
    pub(super) fn new(
        stream: &Stream,
        batch: &Batch<'_>,
        (lanes, kind): (&[Option<usize>], Option<SpanKind>),
    ) -> Result<Option<Self>, Error> {
        let counts = batch
            .sequences
            .iter()
            .map(|s| s.logits.rows(s.tokens.len()));
        let mut counts: Vec<usize> = counts.collect();
        if counts.iter().all(|n| *n == 0) {
            counts.pop();
            counts.push(1);
        }
        let (mut rows, mut views, mut first) = (Vec::new(), Vec::new(), 0);
        for ((s, n), lane) in batch.sequences.iter().zip(&counts).zip(lanes) {
            let (end, position) = (first + s.tokens.len(), s.position + s.tokens.len());
            rows.extend((end - n..end).map(|row| row as u32));
            let kind = kind.filter(|_| (1..s.tokens.len()).contains(n));
            let view = |of: SpanKind| {
                let lane = lane.filter(|_| of.kind == 0);
                let new = position - n..position;
                View::new(stream, &s.rows_of(of.kind), (new, of.window), lane)
            };
            views.push(kind.map(view).transpose()?);
            first = end;
        }
        if rows.len() == first {
            return Ok(None);
        }
        Ok(Some(Self {
            rows: stream.array_u32(&rows, &[rows.len() as i32])?,
            counts,
            views,
        }))
    }
}

impl Step<'_> {
    /// The rows that the layer computes, where these are not all.
    fn output_rows(&self) -> Option<&OutputRows> {
        let is_last = self.index + 1 == self.parts.model.config.layers.len();
        self.output_rows.as_ref().filter(|_| is_last)
    }

    /// The rows that have queries in the layer, where these are not all. Decoding rows in lanes,
    /// latent attention and recurrent layers have all.
    fn query_rows(&self) -> Option<&OutputRows> {
        let shape = self.layer().0;
        let is_plain = shape.latent.is_none() && !shape.is_recurrent();
        let rows = self.output_rows().filter(|_| is_plain);
        let is_chosen = shape.pooled.is_some() || matches!(shape.cache, LayerCache::Compressed(_));
        rows.filter(|_| self.decoding().is_none() && !is_chosen)
    }

    /// The rows of x (T, C) that have queries in the layer.
    pub(super) fn query_input(&self) -> Result<Array, Error> {
        match self.query_rows() {
            Some(own) => Ok(self.parts.stream.take(&self.x, &own.rows, 0)?),
            None => Ok(self.x.clone()),
        }
    }

    /// Rows of sequence `i` of the batch that have queries in the layer: its last ones.
    pub(super) fn n_queries(&self, i: usize) -> usize {
        let all = self.batch.sequences[i].tokens.len();
        self.query_rows().map_or(all, |own| own.counts[i])
    }

    /// The keys that they see.
    pub(super) fn view(&self, i: usize) -> &View {
        let own = self.query_rows().and_then(|own| own.views[i].as_ref());
        let kind = self.parts.constants.span_kind_of[self.index];
        own.unwrap_or(&self.spans[i][kind].view)
    }

    /// Keeps the rows that the layer computes, behind its attention.
    pub(super) fn keep_output_rows(&mut self) -> Result<(), Error> {
        let Some(own) = self.output_rows() else {
            return Ok(());
        };
        let (stream, is_done) = (self.parts.stream, self.query_rows().is_some());
        let take = |x: &Array| stream.take(x, &own.rows, 0);
        let of_queries = |x: &Option<Array>| match x {
            Some(x) if !is_done => take(x).map(Some),
            x => Ok(x.clone()),
        };
        let (attended, gates) = (of_queries(&self.attended)?, of_queries(&self.gates)?);
        let per_layer = self.per_layer.as_ref().map(take).transpose()?;
        let residual = take(&self.residual)?;
        let rows = own.rows.clone();
        self.tokens = stream.take(&self.tokens, &rows, 0)?;
        self.residual = residual;
        self.streams.replace(|x| Ok(stream.take(x, &rows, 0)?))?;
        (self.attended, self.gates, self.per_layer) = (attended, gates, per_layer);
        Ok(())
    }
}
