//! Operations: each notes what is to be computed and returns at once. Errors are of shapes and
//! types that do not fit; what fails later fails in [`Stream::eval`].

use std::ffi::{CStr, c_int};

use crate::library::failed;
use crate::table::{ObjectHandle, OptionalDtype, OptionalFloat, OptionalInt};
use crate::{Array, Dtype, Error, Stream};

/// How quantised weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantisedMode {
    /// Groups of integers with a scale and a bias each: `q * scale + bias`.
    Affine,
    /// Groups of 32 four-bit floats with a power of two each (OCP microscaling).
    Mxfp4,
}

impl QuantisedMode {
    pub(crate) const fn name(self) -> &'static CStr {
        match self {
            Self::Affine => c"affine",
            Self::Mxfp4 => c"mxfp4",
        }
    }
}

/// A quantised matrix: rows of packed values with their scales. A stack of matrices has a size more
/// in front of each shape.
#[derive(Clone, Debug)]
pub struct Quantised {
    /// `(out, in * bits / 32)`, 32 bits each.
    pub packed: Array,
    /// `(out, in / group)`
    pub scales: Array,
    /// `(out, in / group)`; none in mode `mxfp4`.
    pub biases: Option<Array>,
    /// Values of a group.
    pub group: i32,
    /// Bits of a value.
    pub bits: i32,
    /// How they are stored.
    pub mode: QuantisedMode,
}

impl Quantised {
    /// Whether both are stored in the same way. Shapes are not compared.
    pub fn is_alike(&self, other: &Self) -> bool {
        let form = |w: &Self| (w.group, w.bits, w.mode, w.biases.is_some());
        form(self) == form(other)
    }
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    None,
    /// The last query sees all, each before it one less.
    Causal,
    /// Truth values, `(queries, keys)` or `(n, 1, queries, keys)`.
    Array(&'a Array),
}

const NO_FLOAT: OptionalFloat = OptionalFloat {
    value: 0.0,
    has_value: false,
};

pub(crate) const fn int(value: i32) -> OptionalInt {
    OptionalInt {
        value,
        has_value: true,
    }
}

pub(crate) fn handle(array: Option<&Array>) -> ObjectHandle {
    array.map_or(ObjectHandle::NONE, |array| array.handle)
}

// SAFETY of the blocks in this file: handles are live for as long as the arrays, lists are as
// long as is said, and the result is written to a handle of nothing.
impl Stream {
    pub(crate) fn op(
        &self,
        name: &'static str,
        call: impl FnOnce(*mut ObjectHandle) -> c_int,
    ) -> Result<Array, Error> {
        Array::made_by(&self.library, name, call)
    }

    /// `a + b`, sizes of 1 repeated.
    ///
    /// # Errors
    /// [`Error::Call`], as of every operation.
    pub fn add(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let f = self.library.table().add;
        // SAFETY: see above.
        self.op("mlx_add", |out| unsafe {
            f(out, a.handle, b.handle, self.handle)
        })
    }

    /// `a * b`, sizes of 1 repeated.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn multiply(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let f = self.library.table().multiply;
        // SAFETY: see above.
        self.op("mlx_multiply", |out| unsafe {
            f(out, a.handle, b.handle, self.handle)
        })
    }

    /// `a` to the power `b`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn power(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let f = self.library.table().power;
        // SAFETY: see above.
        self.op("mlx_power", |out| unsafe {
            f(out, a.handle, b.handle, self.handle)
        })
    }

    /// `1 / (1 + exp(-a))`
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn sigmoid(&self, a: &Array) -> Result<Array, Error> {
        let f = self.library.table().sigmoid;
        // SAFETY: see above.
        self.op("mlx_sigmoid", |out| unsafe {
            f(out, a.handle, self.handle)
        })
    }

    /// The sum of all values.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn sum(&self, a: &Array) -> Result<Array, Error> {
        let f = self.library.table().sum;
        // SAFETY: see above.
        self.op("mlx_sum", |out| unsafe {
            f(out, a.handle, false, self.handle)
        })
    }

    /// Hyperbolic tangent.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn tanh(&self, a: &Array) -> Result<Array, Error> {
        let f = self.library.table().tanh;
        // SAFETY: see above.
        self.op("mlx_tanh", |out| unsafe { f(out, a.handle, self.handle) })
    }

    /// The values as another type; the same array where it has that type.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn astype(&self, a: &Array, dtype: Dtype) -> Result<Array, Error> {
        if a.dtype() == dtype {
            return Ok(a.clone());
        }
        let f = self.library.table().astype;
        // SAFETY: see above.
        self.op("mlx_astype", |out| unsafe {
            f(out, a.handle, dtype.number(), self.handle)
        })
    }

    /// `arrays` one after the other along `axis`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn concatenate(&self, arrays: &[&Array], axis: i32) -> Result<Array, Error> {
        let table = self.library.table();
        let handles: Vec<ObjectHandle> = arrays.iter().map(|array| array.handle).collect();
        // SAFETY: see above; the vector copies the handles.
        self.op("mlx_concatenate_axis", |out| unsafe {
            let vector = (table.vector_array_new_data)(handles.as_ptr(), handles.len());
            let code = (table.concatenate_axis)(out, vector, axis, self.handle);
            (table.vector_array_free)(vector);
            code
        })
    }

    /// The values as `f32`, rows one after the other: what [`Array::as_f32`] reads, once computed.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn rows_f32(&self, a: &Array) -> Result<Array, Error> {
        self.contiguous(&self.astype(a, Dtype::F32)?)
    }

    /// The same values, rows one after the other.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn contiguous(&self, a: &Array) -> Result<Array, Error> {
        let f = self.library.table().contiguous;
        // SAFETY: see above.
        self.op("mlx_contiguous", |out| unsafe {
            f(out, a.handle, false, self.handle)
        })
    }

    /// `a (.., n, k)` times `b (k, m)`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn matmul(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let f = self.library.table().matmul;
        // SAFETY: see above.
        self.op("mlx_matmul", |out| unsafe {
            f(out, a.handle, b.handle, self.handle)
        })
    }

    /// `x (n, in)` times the transpose of `w (out, in)`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn quantised_matmul(&self, x: &Array, w: &Quantised) -> Result<Array, Error> {
        let f = self.library.table().quantized_matmul;
        // SAFETY: see above.
        self.op("mlx_quantized_matmul", |out| unsafe {
            f(
                out,
                x.handle,
                w.packed.handle,
                w.scales.handle,
                handle(w.biases.as_ref()),
                true,
                int(w.group),
                int(w.bits),
                w.mode.name().as_ptr(),
                self.handle,
            )
        })
    }

    /// The values of a quantised matrix, in the type of its scales; of `dtype` in mode `mxfp4`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn dequantise(&self, w: &Quantised, dtype: Dtype) -> Result<Array, Error> {
        let f = self.library.table().dequantize;
        let wanted = OptionalDtype {
            value: dtype.number(),
            has_value: true,
        };
        // SAFETY: see above.
        self.op("mlx_dequantize", |out| unsafe {
            f(
                out,
                w.packed.handle,
                w.scales.handle,
                handle(w.biases.as_ref()),
                int(w.group),
                int(w.bits),
                w.mode.name().as_ptr(),
                ObjectHandle::NONE,
                wanted,
                self.handle,
            )
        })
    }

    /// The same values in another shape; one size may be -1.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn reshape(&self, a: &Array, shape: &[i32]) -> Result<Array, Error> {
        let f = self.library.table().reshape;
        // SAFETY: see above.
        self.op("mlx_reshape", |out| unsafe {
            f(out, a.handle, shape.as_ptr(), shape.len(), self.handle)
        })
    }

    /// The axes in another order.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn transpose(&self, a: &Array, axes: &[i32]) -> Result<Array, Error> {
        let f = self.library.table().transpose_axes;
        // SAFETY: see above.
        self.op("mlx_transpose_axes", |out| unsafe {
            f(out, a.handle, axes.as_ptr(), axes.len(), self.handle)
        })
    }

    /// The part from `start` to before `stop`, an entry for each axis: nothing is copied.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    ///
    /// # Panics
    /// If there are not as many stops as starts.
    pub fn slice(&self, a: &Array, start: &[i32], stop: &[i32]) -> Result<Array, Error> {
        let (f, n, ones) = (self.library.table().slice, start.len(), ones(start, stop));
        let (start, stop, ones) = (start.as_ptr(), stop.as_ptr(), ones.as_ptr());
        // SAFETY: see above.
        self.op("mlx_slice", |out| unsafe {
            f(out, a.handle, start, n, stop, n, ones, n, self.handle)
        })
    }

    /// `a` with `part` in the place from `start` to before `stop`. In place when nothing else
    /// refers to `a` by the time it is computed: drop it before.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    ///
    /// # Panics
    /// As [`slice`](Self::slice).
    pub fn slice_update(
        &self,
        a: &Array,
        part: &Array,
        start: &[i32],
        stop: &[i32],
    ) -> Result<Array, Error> {
        let (f, n, ones) = (
            self.library.table().slice_update,
            start.len(),
            ones(start, stop),
        );
        let (start, stop, ones) = (start.as_ptr(), stop.as_ptr(), ones.as_ptr());
        // SAFETY: see above.
        self.op("mlx_slice_update", |out| unsafe {
            f(
                out,
                a.handle,
                part.handle,
                start,
                n,
                stop,
                n,
                ones,
                n,
                self.handle,
            )
        })
    }

    /// The entries of `a` along `axis` that `indices` name.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn take(&self, a: &Array, indices: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().take_axis;
        // SAFETY: see above.
        self.op("mlx_take_axis", |out| unsafe {
            f(out, a.handle, indices.handle, axis, self.handle)
        })
    }

    /// An array of zeros.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn zeros(&self, shape: &[i32], dtype: Dtype) -> Result<Array, Error> {
        let f = self.library.table().zeros;
        // SAFETY: see above.
        self.op("mlx_zeros", |out| unsafe {
            f(
                out,
                shape.as_ptr(),
                shape.len(),
                dtype.number(),
                self.handle,
            )
        })
    }

    /// RMS norm over the last axis, times `weight`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn rms_norm(&self, x: &Array, weight: &Array, eps: f32) -> Result<Array, Error> {
        let f = self.library.table().fast_rms_norm;
        // SAFETY: see above.
        self.op("mlx_fast_rms_norm", |out| unsafe {
            f(out, x.handle, weight.handle, eps, self.handle)
        })
    }

    /// Turns the first `2 n` values of each row of `x (.., rows, head)` by the rows' positions
    /// from `position` on. `periods (n,)` are positions per radian. `neighbours`: values 2 i and
    /// 2 i + 1 turn together, else i and n + i.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn rope(
        &self,
        x: &Array,
        periods: &Array,
        neighbours: bool,
        position: i32,
    ) -> Result<Array, Error> {
        let f = self.library.table().fast_rope;
        let dims = 2 * periods.shape().first().copied().unwrap_or(0);
        // SAFETY: see above.
        self.op("mlx_fast_rope", |out| unsafe {
            f(
                out,
                x.handle,
                dims,
                neighbours,
                NO_FLOAT,
                1.0,
                position,
                periods.handle,
                self.handle,
            )
        })
    }

    /// As [`rope`](Self::rope), each part `i` of `x (n, .., rows, head)` from position
    /// `positions[i]` on.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn rope_each(
        &self,
        x: &Array,
        periods: &Array,
        neighbours: bool,
        positions: &Array,
    ) -> Result<Array, Error> {
        let f = self.library.table().fast_rope_dynamic;
        let dims = 2 * periods.shape().first().copied().unwrap_or(0);
        // SAFETY: see above.
        self.op("mlx_fast_rope_dynamic", |out| unsafe {
            f(
                out,
                x.handle,
                dims,
                neighbours,
                NO_FLOAT,
                1.0,
                positions.handle,
                periods.handle,
                self.handle,
            )
        })
    }

    /// Softmax of scaled scores times values, `(n, heads, rows, value)`, of n sequences.
    ///
    /// - `q (n, heads, rows, head)`;
    /// - `k (n, kv heads, keys, head)`;
    /// - `v (n, kv heads, keys, value)`;
    /// - `sinks (heads,)`: a score of each head that has no value.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn attention(
        &self,
        [q, k, v]: [&Array; 3],
        scale: f32,
        mask: Mask<'_>,
        sinks: Option<&Array>,
    ) -> Result<Array, Error> {
        let f = self.library.table().fast_scaled_dot_product_attention;
        let (mode, array) = match mask {
            Mask::None => (c"", None),
            Mask::Causal => (c"causal", None),
            Mask::Array(array) => (c"array", Some(array)),
        };
        // SAFETY: see above.
        self.op("mlx_fast_scaled_dot_product_attention", |out| unsafe {
            f(
                out,
                q.handle,
                k.handle,
                v.handle,
                scale,
                mode.as_ptr(),
                handle(array),
                handle(sinks),
                false,
                self.handle,
            )
        })
    }

    /// Whether calls work at all: an empty handle is refused by MLX, and the error arrives here
    /// instead of ending the process.
    ///
    /// # Errors
    /// Always.
    #[doc(hidden)]
    pub fn refused(&self) -> Error {
        let f = self.library.table().sigmoid;
        let mut out = ObjectHandle::NONE;
        // SAFETY: a null handle is what MLX checks for.
        let code = unsafe { f(&raw mut out, ObjectHandle::NONE, self.handle) };
        assert_ne!(code, 0, "mlx takes a handle of nothing");
        failed("mlx_sigmoid")
    }
}

fn ones(start: &[i32], stop: &[i32]) -> Vec<i32> {
    assert_eq!(start.len(), stop.len(), "{start:?} to {stop:?}");
    vec![1; start.len()]
}
