//! Matrices on MLX for programs that compute something else with a model's weights than a step
//! does: training.

use std::cell::RefCell;

use paceline_base::KernelClass;
use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::backend::{StoredTensor, WeightReader};
use paceline_model::{Config, Error, ModelSource, Role};

use super::matrix::Matrix;
use super::stored::{Stored, float, nearest};
use super::weights::activations;

/// How a matrix is held.
#[derive(Clone, Copy, Debug)]
pub struct MlxForm<'a> {
    /// Type of its floats, or of its scales.
    pub dtype: Dtype,
    /// Whether quantised values become floats.
    pub unpacked: bool,
    /// Rows of the file in the order that they are wanted in; `None` for the file's own order.
    pub order: Option<&'a [u32]>,
}

/// A matrix `(out, in)` of a model on MLX.
#[derive(Debug)]
pub struct MlxMatrix(Matrix);

impl MlxMatrix {
    /// Bytes that [`load`](Self::load) will take. Nothing is read but the file's header.
    ///
    /// # Errors
    /// As of [`load`](Self::load).
    pub fn planned(
        (source, config): (&ModelSource, &Config),
        (role, shape): (Role, [usize; 2]),
        form: MlxForm<'_>,
    ) -> Result<u64, Error> {
        let matrix = WeightReader { source, config }.located(role, shape)?;
        let values = (shape[0] * shape[1]) as u64;
        Ok(match form.unpacked {
            true => values * form.dtype.bytes() as u64,
            false => Stored::bytes_of(check(&matrix, role)?, values, form.dtype),
        })
    }

    /// Loads the matrix of `role`, whose shape must be `(out, in)`, and waits for it.
    ///
    /// # Errors
    /// - [`Error::NoForm`] for a quantised type that MLX has no form for, unless it is unpacked.
    /// - When the file lacks the matrix or has another shape.
    /// - [`Error::Mlx`].
    pub fn load(
        stream: &Stream,
        (source, config): (&ModelSource, &Config),
        (role, shape): (Role, [usize; 2]),
        form: MlxForm<'_>,
    ) -> Result<Self, Error> {
        let stored = WeightReader { source, config }.as_stored(role, shape)?;
        // MLX may write results to the memory of arrays that nobody else has, and that is the
        // file's: they are kept until all is computed.
        let kept = RefCell::new(Vec::new());
        let converted = |array: Array| {
            let converted = stream.astype(&array, form.dtype)?;
            kept.borrow_mut().push(array);
            Ok(converted)
        };
        let mut matrix = if form.unpacked && !is_float(&stored) {
            Matrix::Float(unpacked(stream, &stored, shape, form.dtype)?)
        } else {
            let (planes, rows) = Stored::new(check(&stored, role)?, 0..shape[0]);
            Matrix::of(stream, (&planes, role), (rows, 0..shape[1]), &converted)?
        };
        if let Some(order) = form.order {
            let order = stream.array_u32(order, &[order.len() as i32])?;
            let in_file = matrix;
            matrix = in_file.in_order(stream, &order)?;
            kept.borrow_mut()
                .extend(in_file.arrays().into_iter().cloned());
        }
        stream.eval(matrix.arrays())?;
        Ok(Self(matrix))
    }

    /// x (T, in) -> (T, out)
    ///
    /// # Errors
    /// [`paceline_mlx::Error::Call`].
    pub fn apply(&self, stream: &Stream, x: &Array) -> Result<Array, paceline_mlx::Error> {
        self.0.apply(stream, x)
    }
}

/// The type that class `mlx` computes a model in.
///
/// # Errors
/// When the file lacks its first matrix.
pub fn mlx_dtype(source: &ModelSource, config: &Config) -> Result<Dtype, Error> {
    activations(
        &WeightReader { source, config },
        config.family,
        KernelClass::Mlx,
    )
}

const fn is_float(matrix: &StoredTensor) -> bool {
    match matrix {
        StoredTensor::Whole(tensor) => float(tensor.block_type).is_some(),
        StoredTensor::Mlx(_) => false,
    }
}

/// Refuses what MLX would hold with other values.
fn check(matrix: &StoredTensor, role: Role) -> Result<&StoredTensor, Error> {
    let changed = match matrix {
        StoredTensor::Whole(tensor) => nearest(tensor.block_type).map(|_| tensor.block_type),
        StoredTensor::Mlx(parts) => (!parts.scheme.mode.is_mlx()).then_some(parts.block_type),
    };
    match changed {
        None => Ok(matrix),
        Some(block_type) => Err(Error::NoForm {
            role,
            block_type: block_type.name(),
            engine: "mlx",
        }),
    }
}

/// All values, across: (in, out).
fn unpacked(
    stream: &Stream,
    stored: &StoredTensor,
    [rows, cols]: [usize; 2],
    dtype: Dtype,
) -> Result<Array, Error> {
    let mut values = vec![0.0; rows * cols];
    for (row, out) in values.chunks_exact_mut(cols).enumerate() {
        stored.row(row as u32, out);
    }
    let whole = stream.array_f32(&values, &[rows as i32, cols as i32])?;
    let whole = stream.astype(&whole, dtype)?;
    stream.eval([&whole])?;
    Ok(stream.transpose(&whole, &[1, 0])?)
}
