//! Parts of tensors that hold several weights: one expert of a stack, a half, or some rows.

use std::ops::Range;

use paceline_weights::gguf::Gguf;
use paceline_weights::mlx::Quantised;
use paceline_weights::tensor::Tensor;

use crate::Error;
use crate::role::{LayerRole, Nth, Role};

/// An expert's matrix in a GGUF file with an unusual layout. That is one tensor per expert, as in
/// early files of Mixtral, or gate and up joined in one tensor.
pub(super) fn other_expert(
    file: &Gguf,
    layer: usize,
    part: LayerRole,
) -> Result<Option<Tensor>, Error> {
    let (name, half) = match part {
        LayerRole::ExpertGate(_) => ("gate", Some(0)),
        LayerRole::ExpertUp(_) => ("up", Some(1)),
        LayerRole::ExpertDown(_) => ("down", None),
        _ => return Ok(None),
    };
    if file.has(&format!("blk.{layer}.ffn_{name}_exps.weight")) {
        return Ok(None);
    }
    let nth = part.expert().expect("it is of an expert");
    let own = format!("blk.{layer}.ffn_{name}.{}.weight", nth.index);
    let both = format!("blk.{layer}.ffn_gate_up_exps.weight");
    match half {
        _ if file.has(&own) => Ok(Some(file.tensor(&own)?)),
        Some(half) if file.has(&both) => {
            half_of(of_expert(file.tensor(&both)?, nth)?, half).map(Some)
        }
        _ => Ok(None),
    }
}

/// Place of a short convolution's projection among the three that files store as one.
pub(super) const fn conv_part(role: Role) -> Option<usize> {
    match role {
        Role::Layer(_, LayerRole::ConvKey) => Some(0),
        Role::Layer(_, LayerRole::ConvQuery) => Some(1),
        Role::Layer(_, LayerRole::ConvValue) => Some(2),
        _ => None,
    }
}

/// Rows of the parts `own` of a matrix with `parts` parts of equal height.
pub(super) fn rows_among(
    mut tensor: Tensor,
    parts: usize,
    own: Range<usize>,
) -> Result<Tensor, Error> {
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let each = rows.checked_div(parts).unwrap_or(0);
    if rows == 0 || each * parts != rows || own.end > parts {
        let mut expected = tensor.shape.clone();
        if let Some(first) = expected.first_mut() {
            *first = (each * parts).max(parts);
        }
        return Err(Error::Shape {
            name: tensor.name,
            got: tensor.shape,
            expected,
        });
    }
    let bytes = tensor.bytes.len() / rows * each;
    let part = tensor.bytes.slice(own.start * bytes..own.end * bytes);
    tensor.bytes = part.expect("rows of it");
    tensor.shape[0] = own.len() * each;
    Ok(tensor)
}

/// As [`rows_among`], for a matrix quantised by MLX.
pub(super) fn quantised_rows(
    matrix: &Quantised,
    parts: usize,
    own: Range<usize>,
) -> Result<Quantised, Error> {
    let each = matrix.rows.checked_div(parts).unwrap_or(0);
    let rows = own.start * each..own.end * each;
    let part = matrix.row_range(rows);
    let part = part.filter(|_| each > 0 && each * parts == matrix.rows);
    part.ok_or_else(|| Error::Shape {
        name: matrix.name.clone(),
        got: vec![matrix.rows, matrix.cols],
        expected: vec![(each * parts).max(parts), matrix.cols],
    })
}

/// First or second half of a matrix's rows.
pub(super) fn half_of(mut tensor: Tensor, half: usize) -> Result<Tensor, Error> {
    let rows = tensor.shape[0];
    if !rows.is_multiple_of(2) {
        return Err(Error::Shape {
            expected: vec![rows + 1, tensor.shape[1]],
            got: tensor.shape,
            name: tensor.name,
        });
    }
    let bytes = tensor.bytes.len() / 2;
    let part = tensor.bytes.slice(half * bytes..(half + 1) * bytes);
    tensor.bytes = part.expect("a half of it");
    tensor.shape[0] = rows / 2;
    Ok(tensor)
}

/// An expert's part of a tensor `(experts, rows, columns)`.
pub(super) fn of_expert(mut tensor: Tensor, Nth { index, of }: Nth) -> Result<Tensor, Error> {
    let got = tensor.shape.clone();
    if got.len() != 3 || got[0] != of {
        let sizes = got.iter().skip(1).copied().chain([0, 0]);
        return Err(Error::Shape {
            name: tensor.name,
            expected: [of].into_iter().chain(sizes.take(2)).collect(),
            got,
        });
    }
    let bytes = tensor.bytes.len() / of;
    let part = tensor.bytes.slice(index * bytes..(index + 1) * bytes);
    tensor.bytes = part.expect("a part of it");
    tensor.shape.remove(0);
    Ok(tensor)
}
