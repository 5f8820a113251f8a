//! Alternating residual streams (Gemma 3n), as on the CPU (`model/src/step/alternating.rs`): a
//! layer computes the first stream and updates the others by small maps.
//!
//! ```text
//! m (T, S) = tanh(router(norm(stream 0)))        stream[q] += sum of predict(m)[q, p] stream[p]
//! active (T, C) = stream 0, through the layer    m = tanh(router(norm(active)))
//! stream[s] += (1 + correct(m)[s]) * (active - stream 0)
//! laurel (T, C) = x + norm(up down x)            active = (active + laurel) / sqrt 2
//! ```

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;

use super::Step;
use super::weights::{Alternation, Layer};
use crate::matrix::Linear;

/// Lower bound of the mean square that a further stream is scaled from: of transformers.
const LEAST_SQUARE: f32 = 1e-5;

impl Step<'_> {
    /// The rows (T, C) that norms and additions of a layer are of.
    pub(super) fn active(&self) -> &Array {
        self.streams.active.as_ref().unwrap_or(&self.residual)
    }

    /// residual (T, S, C) -> predicted streams; the first of them to `active`
    pub(super) fn predicted(&mut self, w: &Layer) -> Result<(), Error> {
        let (own, stream) = (alternation(w), self.parts.stream);
        let sizes = self.residual.shape();
        let maps = stream.matmul(
            &self.routed_streams(own, &self.first_stream()?)?,
            &own.predict,
        )?;
        let maps = stream.reshape(&maps, &[sizes[0], sizes[1], sizes[1]])?;
        let wide = stream.astype(&self.residual, Dtype::F32)?;
        let new = stream.add(&stream.matmul(&maps, &wide)?, &wide)?;
        self.residual = stream.astype(&new, self.parts.model.dtype)?;
        self.streams.active = Some(self.first_stream()?);
        Ok(())
    }

    /// residual (T, S, C) += (1 + correct(m)) * (active - stream 0)
    pub(super) fn corrected(&mut self, w: &Layer) -> Result<(), Error> {
        let (own, stream) = (alternation(w), self.parts.stream);
        let active = self.streams.active.take().expect("the layer computed it");
        let sizes = self.residual.shape();
        let factors = stream.matmul(&self.routed_streams(own, &active)?, &own.correct)?;
        let factors = stream.add(&factors, &stream.scalar(1.0, Dtype::F32)?)?;
        let factors = stream.reshape(&factors, &[sizes[0], sizes[1], 1])?;
        let wide = |x: &Array| stream.astype(x, Dtype::F32);
        let difference = stream.subtract(&wide(&active)?, &wide(&self.first_stream()?)?)?;
        let difference = stream.reshape(&difference, &[sizes[0], 1, sizes[2]])?;
        let own = stream.multiply(&factors, &difference)?;
        let sum = stream.add(&wide(&self.residual)?, &own)?;
        self.residual = stream.astype(&sum, self.parts.model.dtype)?;
        Ok(())
    }

    /// x (T, C) -> laurel (T, C)
    pub(super) fn laurel_rows(&mut self, w: &Layer) -> Result<(), Error> {
        let (own, stream) = (alternation(w), self.parts.stream);
        let low = own.laurel[0].apply(stream, &self.x)?;
        let rows = own.laurel[1].apply(stream, &low)?;
        let eps = self.parts.model.config.norm_eps;
        let rows = stream.rms_norm(&rows, &own.laurel_norm, eps)?;
        self.streams.laurel = Some(stream.add(&self.x, &rows)?);
        Ok(())
    }

    /// active (T, C) = (active + laurel) / sqrt 2
    pub(super) fn with_laurel(&mut self) -> Result<(), Error> {
        let stream = self.parts.stream;
        let laurel = self.streams.laurel.take().expect("it was projected");
        let sum = stream.add(self.active(), &laurel)?;
        let half = stream.scalar(std::f32::consts::FRAC_1_SQRT_2, sum.dtype())?;
        self.streams.active = Some(stream.multiply(&sum, &half)?);
        Ok(())
    }

    /// The first stream (T, C) times its factors: input of the layer's own embeddings.
    pub(super) fn scaled_first(&self, w: &Layer) -> Result<Array, Error> {
        match &w.streams {
            None => Ok(self.residual.clone()),
            Some(own) => {
                let scale = &own.alternation().scale;
                Ok(self.parts.stream.multiply(&self.first_stream()?, scale)?)
            }
        }
    }

    /// further streams (T, S - 1, C) += `output (T, C)`; the residual of one stream as it is
    pub(super) fn add_to_further(&mut self, output: &Array) -> Result<(), Error> {
        let stream = self.parts.stream;
        let [rows, count, width] = self.residual.shape()[..] else {
            self.residual = stream.add(&self.residual, output)?;
            return Ok(());
        };
        let first = stream.slice(&self.residual, &[0; 3], &[rows, 1, width])?;
        let further = stream.slice(&self.residual, &[0, 1, 0], &[rows, count, width])?;
        let further = stream.add(&further, &stream.reshape(output, &[rows, 1, width])?)?;
        self.residual = stream.concatenate(&[&first, &further], 1)?;
        Ok(())
    }

    /// Streams (R, S, C) -> the mean (R, C) of the first and of the others after `ends`
    pub(super) fn collapsed(&self, ends: &[Linear], residual: &Array) -> Result<Array, Error> {
        let (stream, sizes) = (self.parts.stream, residual.shape());
        let nth = |i: i32| {
            let part = stream.slice(residual, &[0, i, 0], &[sizes[0], i + 1, sizes[2]])?;
            Ok::<_, Error>(stream.reshape(&part, &[sizes[0], sizes[2]])?)
        };
        let first = nth(0)?;
        let mut sum = stream.astype(&first, Dtype::F32)?;
        for (i, matrix) in (1..).zip(ends) {
            let own = end(stream, (matrix, &nth(i)?), &first)?;
            sum = stream.add(&sum, &stream.astype(&own, Dtype::F32)?)?;
        }
        let count = stream.scalar(sizes[1] as f32, Dtype::F32)?;
        Ok(stream.astype(&stream.divide(&sum, &count)?, self.parts.model.dtype)?)
    }

    /// The first stream, (T, C).
    fn first_stream(&self) -> Result<Array, Error> {
        let (stream, sizes) = (self.parts.stream, self.residual.shape());
        let first = stream.slice(&self.residual, &[0; 3], &[sizes[0], 1, sizes[2]])?;
        Ok(stream.reshape(&first, &[sizes[0], sizes[2]])?)
    }

    /// tanh(router(norm(rows))) of rows (T, C), (T, S) in f32
    fn routed_streams(&self, own: &Alternation, rows: &Array) -> Result<Array, Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let rows = stream.astype(rows, Dtype::F32)?;
        let normed = stream.rms_norm(&rows, &own.router_norm, eps)?;
        Ok(stream.tanh(&stream.matmul(&normed, &own.router)?)?)
    }
}

/// x (T, C) by a matrix between streams, scaled to the root mean square of `like` (T, C)
pub(super) fn end(
    stream: &Stream,
    (matrix, x): (&Linear, &Array),
    like: &Array,
) -> Result<Array, Error> {
    let product = stream.astype(&matrix.apply(stream, x)?, Dtype::F32)?;
    let n = stream.scalar(like.shape()[1] as f32, Dtype::F32)?;
    let mean = |x: &Array| {
        let wide = stream.astype(x, Dtype::F32)?;
        stream.divide(&stream.sum_along(&stream.multiply(&wide, &wide)?, 1)?, &n)
    };
    let least = stream.scalar(LEAST_SQUARE, Dtype::F32)?;
    let squares = stream.maximum(&mean(&product)?, &least)?;
    let half = stream.scalar(0.5, Dtype::F32)?;
    let factor = stream.multiply(
        &stream.power(&mean(like)?, &half)?,
        &stream.rsqrt(&squares)?,
    )?;
    Ok(stream.astype(&stream.multiply(&product, &factor)?, x.dtype())?)
}

/// # Panics
/// If the layer has other streams.
fn alternation(w: &Layer) -> &Alternation {
    let own = w.streams.as_ref().expect("loaded for this family");
    own.alternation()
}
