//! Matrices as MLX multiplies by them: floats or groups of integers, alone or in stacks.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Quantised, Stream};
use paceline_model::{Error, Role};

use super::stored::{Plane, Stored};

/// A matrix `(out, in)`, or a stack `(n, out, in)` of them.
#[derive(Clone, Debug)]
pub(super) enum Matrix {
    /// Its transpose, `(in, out)` or `(n, in, out)`: a view.
    Float(Array),
    Quantised(Quantised),
}

impl Matrix {
    /// The rows and columns of a stored matrix; floats and scales as `converted` makes them.
    ///
    /// # Errors
    /// [`Error::CutGroup`] for columns that cut a group; what `converted` says.
    pub(super) fn of(
        stream: &Stream,
        (stored, role): (&Stored, Role),
        (rows, cols): (Range<usize>, Range<usize>),
        converted: &dyn Fn(Array) -> Result<Array, Error>,
    ) -> Result<Self, Error> {
        match stored {
            Stored::Floats(plane) => {
                let whole = converted(plane.array(stream, rows, cols)?)?;
                Ok(Self::Float(stream.transpose(&whole, &[1, 0])?))
            }
            Stored::Groups {
                packed,
                scales,
                biases,
                group,
                bits,
                mode,
            } => {
                let in_groups = |n: usize| match n.is_multiple_of(*group) {
                    true => Ok(n / group),
                    false => Err(Error::CutGroup {
                        role,
                        column: n,
                        group: *group,
                    }),
                };
                let groups = in_groups(cols.start)?..in_groups(cols.end)?;
                let words = cols.start * bits / 32..cols.end * bits / 32;
                let factors = |plane: &Plane| {
                    let array = plane.array(stream, rows.clone(), groups.clone())?;
                    // Powers of two in bytes stay as they are.
                    if array.dtype() == Dtype::U8 {
                        return Ok(array);
                    }
                    converted(array)
                };
                Ok(Self::Quantised(Quantised {
                    packed: packed.array(stream, rows.clone(), words)?,
                    scales: factors(scales)?,
                    biases: biases.as_ref().map(factors).transpose()?,
                    group: *group as i32,
                    bits: *bits as i32,
                    mode: *mode,
                }))
            }
        }
    }

    /// Its rows `order`, in that order.
    pub(super) fn in_order(&self, stream: &Stream, order: &Array) -> Result<Self, Error> {
        match self {
            Self::Float(across) => Ok(Self::Float(stream.take(across, order, 1)?)),
            Self::Quantised(_) => self.each(|array| Ok(stream.take(array, order, 0)?)),
        }
    }

    /// x (.., T, in) -> (.., T, out); of a stack x (n, T, in) -> (n, T, out), each by its own.
    pub(super) fn apply(&self, stream: &Stream, x: &Array) -> Result<Array, paceline_mlx::Error> {
        match self {
            Self::Float(across) => stream.matmul(x, across),
            Self::Quantised(weights) => stream.quantised_matmul(x, weights),
        }
    }

    /// Of a stack: x (.., 1, in) times the matrices that `indices (..)` name -> (.., 1, out), in
    /// the type of x. `sorted`: whether the indices do not fall.
    pub(super) fn gather(
        &self,
        stream: &Stream,
        x: &Array,
        (indices, sorted): (&Array, bool),
    ) -> Result<Array, Error> {
        Ok(match self {
            Self::Float(across) => {
                // On MLX's CPU the stack is f32 for every type of activations.
                let wide = stream.astype(x, across.dtype())?;
                let product = stream.gathered_matmul(&wide, across, indices, sorted)?;
                stream.astype(&product, x.dtype())?
            }
            Self::Quantised(weights) => {
                stream.gathered_quantised_matmul(x, weights, indices, sorted)?
            }
        })
    }

    /// Its values `(out, in)`, in `dtype`.
    pub(super) fn plain(&self, stream: &Stream, dtype: Dtype) -> Result<Array, Error> {
        let values = match self {
            Self::Float(across) => stream.transpose(across, &[1, 0])?,
            Self::Quantised(weights) => stream.dequantise(weights, dtype)?,
        };
        Ok(stream.astype(&values, dtype)?)
    }

    pub(super) fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Float(across) => vec![across],
            Self::Quantised(w) => {
                let biases = w.biases.iter();
                [&w.packed, &w.scales].into_iter().chain(biases).collect()
            }
        }
    }

    /// Matrices of one form, the rows of each behind those of the one before.
    pub(super) fn behind(stream: &Stream, parts: Vec<Self>) -> Result<Self, Error> {
        Self::joined(stream, parts, |form| match form {
            Form::Across => 1,
            Form::Rows => 0,
        })
    }

    /// The `n` matrices that `make` gives, of one form and shape, `(out, in)` each, as a stack.
    /// `evaluate` computes the arrays that it is given. Each matrix is copied before the next is
    /// made, so that the stack and one matrix are the most that is held.
    pub(super) fn gathered(
        stream: &Stream,
        n: usize,
        make: impl Fn(usize) -> Result<Self, Error>,
        evaluate: impl Fn(Vec<&Array>) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let first = make(0)?;
        let room = |array: &Array| {
            let shape: Vec<i32> = std::iter::once(n as i32).chain(array.shape()).collect();
            Ok::<_, Error>(stream.zeros(&shape, array.dtype())?)
        };
        let mut stack = first.each(room)?;
        let mut next = Some(first);
        for place in 0..n {
            let matrix = next.take().map_or_else(|| make(place), Ok)?;
            stack = stack.with(stream, place as i32, &matrix)?;
            evaluate(stack.arrays())?;
        }
        Ok(stack)
    }

    /// Puts `matrix` in its `place`, as [`with`](Self::with).
    pub(super) fn put(&mut self, stream: &Stream, place: i32, matrix: &Self) -> Result<(), Error> {
        // Nothing else may hold the stack, this neither: a number stands in for it.
        let number = Self::Float(stream.scalar(0.0, Dtype::F32)?);
        *self = std::mem::replace(self, number).with(stream, place, matrix)?;
        Ok(())
    }

    /// This stack with `matrix` in its `place`: in the same memory, as nothing else holds it.
    fn with(self, stream: &Stream, place: i32, matrix: &Self) -> Result<Self, Error> {
        let put = |stack: Array, array: &Array| {
            let mut stop = stack.shape();
            let mut start = vec![0; stop.len()];
            (start[0], stop[0]) = (place, place + 1);
            let lifted: Vec<i32> = std::iter::once(1).chain(array.shape()).collect();
            let lifted = stream.reshape(array, &lifted)?;
            Ok::<_, Error>(stream.slice_update(&stack, &lifted, &start, &stop)?)
        };
        Ok(match (self, matrix) {
            (Self::Float(stack), Self::Float(across)) => Self::Float(put(stack, across)?),
            (Self::Quantised(stack), Self::Quantised(w)) if stack.is_alike(w) => {
                let biases = stack.biases.zip(w.biases.as_ref());
                Self::Quantised(Quantised {
                    packed: put(stack.packed, &w.packed)?,
                    scales: put(stack.scales, &w.scales)?,
                    biases: biases.map(|(stack, own)| put(stack, own)).transpose()?,
                    ..*w
                })
            }
            _ => return Err(Error::MixedForms { engine: "mlx" }),
        })
    }

    /// Matrices of one form and shape, `(out, in)` each, as a stack.
    pub(super) fn stack(stream: &Stream, parts: &[Self]) -> Result<Self, Error> {
        let lifted = |array: &Array| {
            let shape: Vec<i32> = std::iter::once(1).chain(array.shape()).collect();
            Ok::<_, Error>(stream.reshape(array, &shape)?)
        };
        let parts = parts.iter().map(|part| part.each(lifted));
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        Self::joined(stream, parts, |_| 0)
    }

    /// The same matrix, its arrays as `f` makes them.
    fn each(&self, f: impl Fn(&Array) -> Result<Array, Error>) -> Result<Self, Error> {
        Ok(match self {
            Self::Float(across) => Self::Float(f(across)?),
            Self::Quantised(w) => Self::Quantised(Quantised {
                packed: f(&w.packed)?,
                scales: f(&w.scales)?,
                biases: w.biases.as_ref().map(f).transpose()?,
                ..*w
            }),
        })
    }

    /// Matrices of one form, joined along the axis that `axis` says.
    fn joined(
        stream: &Stream,
        mut parts: Vec<Self>,
        axis: impl Fn(Form) -> i32,
    ) -> Result<Self, Error> {
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let floats: Vec<&Array> = parts.iter().filter_map(Self::float).collect();
        if floats.len() == parts.len() {
            let joined = stream.concatenate(&floats, axis(Form::Across))?;
            return Ok(Self::Float(joined));
        }
        let groups: Vec<&Quantised> = parts.iter().filter_map(Self::quantised).collect();
        let first = groups[0];
        if groups.len() != parts.len() || groups.iter().any(|w| !w.is_alike(first)) {
            return Err(Error::MixedForms { engine: "mlx" });
        }
        let join = |of: fn(&Quantised) -> Option<&Array>| {
            let arrays: Vec<&Array> = groups.iter().filter_map(|w| of(w)).collect();
            stream.concatenate(&arrays, axis(Form::Rows))
        };
        let has_biases = first.biases.is_some();
        Ok(Self::Quantised(Quantised {
            packed: join(|w| Some(&w.packed))?,
            scales: join(|w| Some(&w.scales))?,
            biases: has_biases
                .then(|| join(|w| w.biases.as_ref()))
                .transpose()?,
            ..*first
        }))
    }

    const fn float(&self) -> Option<&Array> {
        match self {
            Self::Float(across) => Some(across),
            Self::Quantised(_) => None,
        }
    }

    const fn quantised(&self) -> Option<&Quantised> {
        match self {
            Self::Float(_) => None,
            Self::Quantised(weights) => Some(weights),
        }
    }
}

/// How an array of a matrix lies: its outputs as columns, or as rows.
#[derive(Clone, Copy, Debug)]
enum Form {
    Across,
    Rows,
}

/// A matrix with an optional bias `(out,)`.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    pub(super) matrix: Matrix,
    pub(super) bias: Option<Array>,
}

impl Linear {
    /// x (T, in) -> (T, out)
    pub(super) fn apply(&self, stream: &Stream, x: &Array) -> Result<Array, Error> {
        let product = self.matrix.apply(stream, x)?;
        Ok(match &self.bias {
            Some(bias) => stream.add(&product, bias)?,
            None => product,
        })
    }

    /// The rows that `indices (T,)` name: (T, in).
    pub(super) fn rows(
        &self,
        stream: &Stream,
        indices: &Array,
        dtype: Dtype,
    ) -> Result<Array, Error> {
        let rows = match &self.matrix {
            Matrix::Float(across) => {
                let whole = stream.transpose(across, &[1, 0])?;
                stream.take(&whole, indices, 0)?
            }
            Matrix::Quantised(w) => {
                let take = |array: &Array| stream.take(array, indices, 0);
                let rows = Quantised {
                    packed: take(&w.packed)?,
                    scales: take(&w.scales)?,
                    biases: w.biases.as_ref().map(take).transpose()?,
                    ..*w
                };
                stream.dequantise(&rows, dtype)?
            }
        };
        Ok(stream.astype(&rows, dtype)?)
    }

    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.matrix.arrays().into_iter().chain(&self.bias)
    }
}

#[cfg(test)]
mod tests {
    use paceline_mlx::QuantisedMode;

    use super::*;

    /// A stack takes its own memory and that of one matrix, and has the values of all. Matrices of
    /// other forms are refused.
    #[test]
    fn a_stack_is_held_once() {
        let Some(stream) = crate::test_stream("a stack is held once") else {
            return;
        };
        let library = stream.library();
        const EACH: i32 = 1 << 18; // values: a MiB
        let make = |place: usize| {
            let value = stream.scalar(place as f32, Dtype::F32)?;
            let zeros = stream.zeros(&[EACH / 512, 512], Dtype::F32)?;
            Ok(Matrix::Float(stream.add(&zeros, &value)?))
        };
        let evaluate = |all: Vec<&Array>| Ok(stream.eval(all)?);
        let before = library.memory_use().unwrap();
        let stack = Matrix::gathered(&stream, 32, make, evaluate).unwrap();
        let peak = library.memory_use().unwrap().peak.0 - before.active.0;
        assert!(peak < 40 << 20, "{peak} bytes for 32 matrices of a MiB");
        let Matrix::Float(stack) = stack else {
            unreachable!("made of floats");
        };
        let values = stack.as_f32().unwrap();
        let each = values.chunks(EACH as usize).enumerate();
        assert!({ each }.all(|(place, values)| values.iter().all(|value| *value == place as f32)));

        let of_bits = |bits| {
            let zeros = |n, dtype| stream.zeros(&[32, n], dtype).unwrap();
            Matrix::Quantised(Quantised {
                packed: zeros(bits, Dtype::U32),
                scales: zeros(1, Dtype::F32),
                biases: Some(zeros(1, Dtype::F32)),
                group: 32,
                bits,
                mode: QuantisedMode::Affine,
            })
        };
        let floats = || Matrix::Float(stream.zeros(&[32, 32], Dtype::F32).unwrap());
        for parts in [[of_bits(4), of_bits(8)], [of_bits(4), floats()]] {
            let error = Matrix::stack(&stream, &parts).unwrap_err().to_string();
            let told = "engine mlx needs the experts or heads of a layer in one storage type";
            assert_eq!(error, told);
        }
    }
}
