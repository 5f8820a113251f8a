//! The inputs of a step: rows of the cache, tokens and their embeddings.

use paceline_mlx::{Array, Stream};
use paceline_model::{Batch, Error};
use paceline_tensor::AttentionRows;

use crate::MlxModel;
use crate::constants::Constants;
use crate::weights::Weights;

/// Rows of a step in the pages that keep all positions.
pub(crate) fn rows_in_cache<'a>(batch: &Batch<'a>) -> Vec<AttentionRows<'a>> {
    batch.sequences.iter().map(|s| s.rows_of(0)).collect()
}

/// The row after those of each sequence of a step, in the pages that it has.
pub(crate) fn rows_after<'a>(batch: &Batch<'a>) -> Vec<AttentionRows<'a>> {
    let mut after = rows_in_cache(batch);
    for sequence in &mut after {
        (sequence.position, sequence.rows) = (sequence.position + sequence.rows, 1);
    }
    after
}

/// The tokens of a batch, `(T,)`.
pub(super) fn tokens_of(stream: &Stream, batch: &Batch<'_>) -> Result<Array, Error> {
    let tokens = batch.sequences.iter().flat_map(|s| s.tokens).copied();
    let tokens: Vec<u32> = tokens.collect();
    Ok(stream.array_u32(&tokens, &[tokens.len() as i32])?)
}

/// tokens -> residual (T, C)
pub(super) fn embed(
    model: &MlxModel,
    stream: &Stream,
    weights: &Weights,
    constants: &Constants,
    tokens: &Array,
) -> Result<Array, Error> {
    let table = weights.embedding.as_ref();
    let table = table.expect("the first stage embeds");
    let rows = table.rows(stream, tokens, model.dtype)?;
    if model.config.embedding_scale == 1.0 {
        return Ok(rows);
    }
    Ok(stream.multiply(&rows, &constants.embedding_scale)?)
}
