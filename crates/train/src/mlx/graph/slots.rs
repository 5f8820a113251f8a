//! The trained tensors of a layer or the head, in the order that graphs take them.

use std::ops::Range;

use crate::weights::{LayerWeights, Matrix, MatrixStorage, VectorParameter};

/// A trained tensor.
#[derive(Clone, Debug)]
pub(crate) struct TensorSlot {
    /// Its place in all that is trained.
    pub(crate) range: Range<usize>,
    /// Sizes, outermost first.
    pub(crate) shape: Vec<i32>,
}

fn of_vector(vector: &VectorParameter) -> Option<TensorSlot> {
    match vector {
        VectorParameter::Fixed(_) => None,
        VectorParameter::Trained(range) => Some(TensorSlot {
            range: range.clone(),
            shape: vec![range.len() as i32],
        }),
    }
}

fn of_matrix(matrix: &Matrix, slots: &mut Vec<TensorSlot>) {
    let mut add = |range: &Range<usize>, cols: usize| {
        slots.push(TensorSlot {
            range: range.clone(),
            shape: vec![(range.len() / cols) as i32, cols as i32],
        });
    };
    if let MatrixStorage::Trained(range) = &matrix.kept {
        add(range, matrix.cols);
    }
    if let Some(pair) = &matrix.pair {
        add(&pair.a, matrix.cols);
        add(&pair.b, pair.b.len() / matrix.rows);
    }
    slots.extend(matrix.bias.as_ref().and_then(of_vector));
}

pub(crate) fn of_layer(layer: &LayerWeights) -> Vec<TensorSlot> {
    let norms = [
        Some(&layer.attention_norm),
        layer.query_norm.as_ref(),
        layer.key_norm.as_ref(),
        layer.post_attention_norm.as_ref(),
        Some(&layer.ffn_norm),
        layer.post_ffn_norm.as_ref(),
    ];
    let mut slots: Vec<TensorSlot> = norms.into_iter().flatten().filter_map(of_vector).collect();
    for matrix in &layer.matrices {
        of_matrix(matrix, &mut slots);
    }
    slots
}

pub(crate) fn of_head(norm: &VectorParameter, matrix: &Matrix) -> Vec<TensorSlot> {
    let mut slots: Vec<TensorSlot> = of_vector(norm).into_iter().collect();
    of_matrix(matrix, &mut slots);
    slots
}
