//! Several residual streams, `(T, S, C)`: a half of a layer reads a mix of them, and its output
//! goes to all of them. The rules are those of the CPU (`model/src/step`): `streams.rs`,
//! `constrained.rs` and `attended.rs` there; alternating streams are in [`alternating`].
//!
//! Weights and mixes are f32 in every class. Every rank of a stage has all streams and computes all
//! of it.

use paceline_mlx::{Array, Dtype};
use paceline_model::backend::Half;
use paceline_model::{Constraint, Error, StreamRule};

use super::weights::{ConstrainedMix, HeadStreams, Layer, LayerStreams, StreamMix};
use super::{Step, alternating};

/// State of a layer's streams until the output of its half is added.
#[derive(Debug, Default)]
pub(super) struct StreamState {
    /// `(T, S, 1)`: weights of the half's output.
    after: Option<Array>,
    /// `(T, S, S)`, target and source: the mix of the streams themselves.
    mix: Option<Array>,
    /// `(T, S, 1)`: weights of what the next half reads, where these are late.
    late: Option<Array>,
    /// `(T, C)`: the alternating stream that a layer computes, and its path parallel to attention.
    pub(super) active: Option<Array>,
    pub(super) laurel: Option<Array>,
}

impl StreamState {
    /// With the late weights of the stage before.
    pub(super) fn of_stage(late: Option<Array>) -> Self {
        Self {
            late,
            ..Self::default()
        }
    }

    /// Weights for the next half, where these are late.
    pub(super) const fn late(&self) -> Option<&Array> {
        self.late.as_ref()
    }

    /// All of it.
    fn each(&mut self) -> impl Iterator<Item = &mut Option<Array>> {
        let own = [
            &mut self.after,
            &mut self.mix,
            &mut self.late,
            &mut self.active,
            &mut self.laurel,
        ];
        own.into_iter()
    }

    /// Replaces every array by what `make` gives.
    pub(super) fn replace(
        &mut self,
        make: impl Fn(&Array) -> Result<Array, Error>,
    ) -> Result<(), Error> {
        for array in self.each().filter_map(Option::as_mut) {
            *array = make(array)?;
        }
        Ok(())
    }

    /// Arrays to evaluate before memory of exchanges is written again.
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let own = [
            &self.after,
            &self.mix,
            &self.late,
            &self.active,
            &self.laurel,
        ];
        own.into_iter().flatten()
    }
}

impl Step<'_> {
    /// The streams of a model that has several, all as the first one of `embedding` (T, C).
    pub(super) fn begin_streams(&mut self, embedding: &Array) -> Result<(), Error> {
        let Some(of) = self.parts.model.config.streams else {
            return Ok(());
        };
        let stream = self.parts.stream;
        let sizes = embedding.shape();
        let first = stream.reshape(embedding, &[sizes[0], 1, sizes[1]])?;
        let others = match of.rule {
            StreamRule::Gated | StreamRule::Constrained(_) => vec![first.clone(); of.count - 1],
            StreamRule::Attended { .. } => {
                let zeros = stream.zeros(&first.shape(), first.dtype())?;
                vec![zeros; of.count - 1]
            }
            StreamRule::Alternating => {
                let ends = &self.parts.weights.first_streams;
                let end = |end| alternating::end(stream, (end, embedding), embedding);
                let ends = ends.iter().map(end);
                let ends = ends.map(|end| Ok::<_, Error>(stream.reshape(&end?, &first.shape())?));
                ends.collect::<Result<_, _>>()?
            }
        };
        let all: Vec<&Array> = [&first].into_iter().chain(&others).collect();
        self.residual = stream.concatenate(&all, 1)?;
        Ok(())
    }

    /// residual (T, S, C) -> x (T, C), the input of a half
    pub(super) fn mixed(&mut self, w: &Layer, half: Half) -> Result<Array, Error> {
        let which = usize::from(half != Half::Attention);
        let norm = [&w.attention_norm, &w.ffn_norm][which].as_ref();
        let norm = || norm.expect("loaded for this family");
        match w.streams.as_ref().expect("loaded for this family") {
            LayerStreams::Gated(mixes) => {
                let (x, after) = self.gated(&mixes[which], &self.residual)?;
                self.streams.after = after;
                Ok(x)
            }
            LayerStreams::Constrained(mixes) => {
                let x = self.constrained(&mixes[which])?;
                self.normed(&x, norm())
            }
            LayerStreams::Attended(scores) => {
                let x = self.attended_sum(&scores[which], self.begun(half), &self.residual)?;
                if half == Half::Attention {
                    self.begin_block()?;
                }
                self.normed(&x, norm())
            }
            LayerStreams::Alternating(_) => unreachable!("a layer computes one of them"),
        }
    }

    /// residual (T, S, C) += what a half gave, delta (T, C), with weights, after the mix if there
    /// is one
    pub(super) fn add_to_mixed(&mut self) -> Result<(), Error> {
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let sizes = self.residual.shape();
        let delta = stream.reshape(&self.delta, &[sizes[0], 1, sizes[2]])?;
        let Some(after) = self.streams.after.take() else {
            return self.add_to_first(&delta); // attended streams
        };
        let wide = |x: &Array| stream.astype(x, Dtype::F32);
        let own = stream.multiply(&after, &wide(&delta)?)?;
        let residual = wide(&self.residual)?;
        let residual = match self.streams.mix.take() {
            Some(mix) => stream.matmul(&mix, &residual)?,
            None => residual,
        };
        self.residual = stream.astype(&stream.add(&residual, &own)?, dtype)?;
        Ok(())
    }

    /// The input of the output head (R, C) of `residual (R, S, C)`, which are the rows `wanted` of
    /// the step, or all of them.
    pub(super) fn head_input(
        &self,
        (residual, wanted): (&Array, Option<&Array>),
        norm: &Array,
    ) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let Some(own) = &self.parts.weights.head_streams else {
            return self.normed(residual, norm);
        };
        let x = match own {
            HeadStreams::Gated(mix) => return Ok(self.gated(mix, residual)?.0),
            HeadStreams::Attended(scores) => self.attended_sum(scores, usize::MAX, residual)?,
            HeadStreams::Alternating(ends) => self.collapsed(ends, residual)?,
            HeadStreams::Constrained(mix) => {
                let weights = match (mix, &self.streams.late) {
                    (_, Some(late)) => match wanted {
                        Some(wanted) => stream.take(late, wanted, 0)?,
                        None => late.clone(),
                    },
                    (Some(mix), None) => self.weights_before(&self.weighed(mix, residual)?)?,
                    (None, None) => {
                        let of = self.parts.model.config.streams;
                        let count = of.map_or(1, |of| of.count) as f32;
                        stream.scalar(1.0 / count, Dtype::F32)?
                    }
                };
                self.stream_sum(&weights, residual)?
            }
        };
        self.normed(&x, norm)
    }

    /// Streams (T, S, C) -> their gated mix x (T, C), and weights (T, S, 1) of the half's output
    fn gated(&self, w: &StreamMix, residual: &Array) -> Result<(Array, Option<Array>), Error> {
        let (stream, dtype) = (self.parts.stream, self.parts.model.dtype);
        let sizes = residual.shape();
        let (rows, count) = (sizes[0], sizes[1]);
        let wide = stream.astype(residual, Dtype::F32)?;
        let normed = stream.multiply(&self.unit(&wide, 2)?, &w.norm)?;
        let flat = stream.reshape(&normed, &[rows, -1])?;
        let part = stream.scalar(1.0 / count as f32, Dtype::F32)?;
        let low = w.down.apply(stream, &stream.astype(&flat, dtype)?)?;
        let low = stream.multiply(&stream.astype(&low, Dtype::F32)?, &part)?;
        let low = stream.astype(&self.silu(&low)?, dtype)?;
        let mix = stream.astype(&w.up.apply(stream, &low)?, Dtype::F32)?;
        let mix = stream.reshape(&stream.sigmoid(&mix)?, &sizes)?;
        let sum = stream.sum_along(&stream.multiply(&mix, &normed)?, 1)?;
        let x = stream.reshape(&stream.multiply(&sum, &part)?, &[rows, -1])?;
        let weights = w.inject.as_ref().map(|inject| {
            let weights = stream.multiply(&stream.matmul(&flat, inject)?, &part)?;
            let two = stream.scalar(2.0, Dtype::F32)?;
            let weights = stream.multiply(&stream.sigmoid(&weights)?, &two)?;
            Ok::<_, Error>(stream.reshape(&weights, &[rows, count, 1])?)
        });
        Ok((stream.astype(&x, dtype)?, weights.transpose()?))
    }

    /// residual (T, S, C) -> the constrained sum (T, C) that a half reads; sets the weights of its
    /// output and the mix.
    fn constrained(&mut self, w: &ConstrainedMix) -> Result<Array, Error> {
        let (stream, of) = (self.parts.stream, self.constraint());
        let sizes = self.residual.shape();
        let (rows, count) = (sizes[0], sizes[1]);
        let z = self.weighed(w, &self.residual)?;
        let before = self.weights_before(&z)?;
        let after = stream.slice(&z, &[0, count], &[rows, 2 * count])?;
        let two = stream.scalar(2.0, Dtype::F32)?;
        let after = stream.multiply(&stream.sigmoid(&after)?, &two)?;
        let mix = stream.slice(&z, &[0, 2 * count], &[rows, (2 + count) * count])?;
        let mix = stream.softmax(&stream.reshape(&mix, &[rows, count, count])?, 2)?;
        let eps = stream.scalar(of.eps, Dtype::F32)?;
        let divided = |mix: &Array, axis| {
            let sums = stream.add(&stream.sum_along(mix, axis)?, &eps)?;
            stream.divide(mix, &sums)
        };
        let mut mix = divided(&stream.add(&mix, &eps)?, 1)?;
        for _ in 1..of.rounds {
            mix = divided(&divided(&mix, 2)?, 1)?;
        }
        let x = match (of.is_late, &self.streams.late) {
            (false, _) => self.stream_sum(&before, &self.residual)?,
            (true, Some(late)) => self.stream_sum(late, &self.residual)?,
            (true, None) => {
                let first = stream.slice(&self.residual, &[0; 3], &[rows, 1, sizes[2]])?;
                stream.reshape(&first, &[rows, -1])?
            }
        };
        self.streams.late = of.is_late.then_some(before);
        self.streams.after = Some(stream.reshape(&after, &[rows, count, 1])?);
        self.streams.mix = Some(stream.transpose(&mix, &[0, 2, 1])?);
        Ok(x)
    }

    fn constraint(&self) -> Constraint {
        match self.parts.model.config.streams.map(|of| of.rule) {
            Some(StreamRule::Constrained(of)) => of,
            other => unreachable!("streams of {other:?}"),
        }
    }

    /// Streams (T, S, C) -> their products (T, n) with the matrix, scaled and with the bias, in f32
    fn weighed(&self, w: &ConstrainedMix, residual: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let flat = stream.reshape(residual, &[residual.shape()[0], -1])?;
        let normed = self.unit(&stream.astype(&flat, Dtype::F32)?, 1)?;
        let z = stream.multiply(&stream.matmul(&normed, &w.matrix)?, &w.scale)?;
        Ok(stream.add(&z, &w.base)?)
    }

    /// The weights (T, S, 1) of the sum that a half or the head reads, from products (T, n).
    fn weights_before(&self, z: &Array) -> Result<Array, Error> {
        let (stream, rows) = (self.parts.stream, z.shape()[0]);
        let of = self.parts.model.config.streams;
        let count = of.map_or(1, |of| of.count) as i32;
        let before = stream.slice(z, &[0, 0], &[rows, count])?;
        let eps = stream.scalar(self.constraint().eps, Dtype::F32)?;
        let before = stream.add(&stream.sigmoid(&before)?, &eps)?;
        Ok(stream.reshape(&before, &[rows, count, 1])?)
    }

    /// Streams (T, S, C) -> their sum (T, C) with weights (T, S, 1)
    fn stream_sum(&self, weights: &Array, residual: &Array) -> Result<Array, Error> {
        let (stream, rows) = (self.parts.stream, residual.shape()[0]);
        let wide = stream.astype(residual, Dtype::F32)?;
        let sum = stream.sum_along(&stream.multiply(&wide, weights)?, 1)?;
        let sum = stream.reshape(&sum, &[rows, -1])?;
        Ok(stream.astype(&sum, self.parts.model.dtype)?)
    }

    /// `x / sqrt(mean of squares along axis + eps)`, in f32
    fn unit(&self, x: &Array, axis: i32) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let n = stream.scalar(x.shape()[axis as usize] as f32, Dtype::F32)?;
        let mean = stream.divide(&stream.sum_along(&stream.multiply(x, x)?, axis)?, &n)?;
        let eps = stream.scalar(self.parts.model.config.norm_eps, Dtype::F32)?;
        Ok(stream.multiply(x, &stream.rsqrt(&stream.add(&mean, &eps)?)?)?)
    }

    /// Blocks that began before a half of the layer.
    fn begun(&self, half: Half) -> usize {
        (self.index + usize::from(half != Half::Attention)).div_ceil(self.block())
    }

    /// Layers of a block of attended streams.
    fn block(&self) -> usize {
        match self.parts.model.config.streams.map(|of| of.rule) {
            Some(StreamRule::Attended { block }) => block,
            other => unreachable!("streams of {other:?}"),
        }
    }

    /// Streams (T, S, C) -> the mean (T, C) of the sum and the first `begun` blocks, weighted by
    /// the softmax of their scores
    fn attended_sum(&self, scores: &Array, begun: usize, streams: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let mut stop = streams.shape();
        stop[1] = (stop[1] - 1).min(i32::try_from(begun).unwrap_or(i32::MAX)) + 1;
        let streams = stream.slice(streams, &[0; 3], &stop)?;
        let wide = stream.astype(&streams, Dtype::F32)?;
        let scores = stream.matmul(&self.unit(&wide, 2)?, scores)?;
        self.stream_sum(&stream.softmax(&scores, 1)?, &streams)
    }

    /// Stores the sum of each row as a block, if the layer is the first of one, and begins another.
    fn begin_block(&mut self) -> Result<(), Error> {
        let block = self.block();
        if !self.index.is_multiple_of(block) {
            return Ok(());
        }
        let (stream, nth) = (self.parts.stream, 1 + (self.index / block) as i32);
        let sizes = self.residual.shape();
        let part =
            |first, end| stream.slice(&self.residual, &[0, first, 0], &[sizes[0], end, sizes[2]]);
        let sum = part(0, 1)?;
        let mut all = vec![stream.zeros(&sum.shape(), sum.dtype())?];
        all.extend((nth > 1).then(|| part(1, nth)).transpose()?);
        all.push(sum);
        let behind = nth + 1 < sizes[1];
        all.extend(behind.then(|| part(nth + 1, sizes[1])).transpose()?);
        self.residual = stream.concatenate(&all.iter().collect::<Vec<_>>(), 1)?;
        Ok(())
    }

    /// The first of the streams (T, S, C) += delta (T, 1, C)
    fn add_to_first(&mut self, delta: &Array) -> Result<(), Error> {
        let (stream, sizes) = (self.parts.stream, self.residual.shape());
        let part =
            |first, end| stream.slice(&self.residual, &[0, first, 0], &[sizes[0], end, sizes[2]]);
        let sum = stream.add(&part(0, 1)?, delta)?;
        self.residual = stream.concatenate(&[&sum, &part(1, sizes[1])?], 1)?;
        Ok(())
    }
}
