//! Embeddings that each layer has of its own (Gemma 3n and 4), and their way to the residual.
//!
//! ```text
//! once      e (T, N, P) = (norm(project(embedding) / sqrt C) + own embedding * sqrt P) / sqrt 2
//! a layer   residual += norm(output(gelu(gate residual) * e[layer]))
//! ```
//!
//! Every rank computes all of it from the tokens for the N layers that it holds.

use paceline_mlx::{Array, Dtype};
use paceline_model::Error;

use super::weights::Layer;
use super::{Step, embed};

impl Step<'_> {
    /// Inputs of the layers that this rank holds, (T, N, P); none where a model has no such
    /// embeddings.
    pub(super) fn per_layer_inputs(&self) -> Result<Option<Array>, Error> {
        let parts = &self.parts;
        let (stream, config, dtype) = (parts.stream, &parts.model.config, parts.model.dtype);
        let Some(weights) = &parts.weights.per_layer else {
            return Ok(None);
        };
        let (p, held) = (config.per_layer as i32, &parts.model.shard.layers);
        let (first, end) = (held.start as i32 * p, held.end as i32 * p);
        let rows = self.batch.rows() as i32;
        let number = |value: f32| stream.scalar(value, dtype);
        let x = embed(
            parts.model,
            stream,
            parts.weights,
            parts.constants,
            &self.tokens,
        )?;
        let root = number(1.0 / (config.width as f32).sqrt())?;
        let projected = stream.multiply(&weights.projection.apply(stream, &x)?, &root)?;
        let projected = stream.reshape(&projected, &[rows, -1, p])?;
        let projected = stream.rms_norm(&projected, &weights.norm, config.norm_eps)?;
        // Tokens behind the table's have the row of token 0.
        let has_own = stream.scalar(config.per_layer_vocab as f32, Dtype::U32)?;
        let has_own = stream.astype(&stream.less(&self.tokens, &has_own)?, Dtype::U32)?;
        let tokens = stream.multiply(&self.tokens, &has_own)?;
        let own = weights.embedding.rows(stream, &tokens, dtype)?;
        let own = stream.slice(&own, &[0, first], &[rows, end])?;
        let own = stream.reshape(&own, &[rows, -1, p])?;
        let own = stream.multiply(&own, &number((p as f32).sqrt())?)?;
        let sum = stream.add(&projected, &own)?;
        let half = number(std::f32::consts::FRAC_1_SQRT_2)?;
        Ok(Some(stream.multiply(&sum, &half)?))
    }

    /// residual (T, C), or all streams but the first, += what the layer's own embeddings give.
    pub(super) fn add_own_embeddings(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let (Some(own), Some(inputs)) = (&w.per_layer, &self.per_layer) else {
            return Ok(());
        };
        let (stream, held) = (self.parts.stream, self.held(index) as i32);
        let sizes = inputs.shape();
        let (rows, p) = (sizes[0], sizes[2]);
        let input = stream.slice(inputs, &[0, held, 0], &[rows, held + 1, p])?;
        let input = stream.reshape(&input, &[rows, p])?;
        let gate = self.activated(&own.gate.apply(stream, &self.scaled_first(w)?)?)?;
        let hidden = stream.multiply(&gate, &input)?;
        let output = own.output.apply(stream, &hidden)?;
        let eps = self.parts.model.config.norm_eps;
        let output = stream.rms_norm(&output, &own.norm, eps)?;
        self.add_to_further(&output)
    }
}
