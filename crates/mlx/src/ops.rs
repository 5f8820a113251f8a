//! Operations: each notes what is to be computed and returns at once. Errors are of shapes and
//! types that do not fit; what fails later fails in [`Stream::eval`].

use std::ffi::{CStr, c_int};

use crate::closure::ArrayVector;
use crate::library::{done, failed};
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

const fn int(value: i32) -> OptionalInt {
    OptionalInt {
        value,
        has_value: true,
    }
}

fn handle(array: Option<&Array>) -> ObjectHandle {
    array.map_or(ObjectHandle::NONE, |array| array.handle)
}

/// Operations that are a call of the C function of that name in the table.
macro_rules! operations {
    ($(
        $(#[$doc:meta])*
        $name:ident($($x:ident: $type:ty),*) = $symbol:literal $function:ident($($value:expr),*);
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// [`Error::Call`], as of every operation.
        pub fn $name(&self, $($x: $type),*) -> Result<Array, Error> {
            let f = self.library.table().$function;
            // SAFETY: see below.
            self.op($symbol, |out| unsafe { f(out, $($value,)* self.handle) })
        }
    )*};
}

/// Values of a row that a rotation with these periods turns.
fn turned(periods: &Array) -> i32 {
    2 * periods.shape().first().copied().unwrap_or(0)
}

// SAFETY of the blocks in this file: handles are live for as long as the arrays, lists are as
// long as is said, and the result is written to a handle of nothing.
impl Stream {
    fn op(
        &self,
        name: &'static str,
        call: impl FnOnce(*mut ObjectHandle) -> c_int,
    ) -> Result<Array, Error> {
        Array::made_by(&self.library, name, call)
    }

    operations! {
        /// `a + b`, sizes of 1 repeated.
        add(a: &Array, b: &Array) = "mlx_add" add(a.handle, b.handle);
        /// `a * b`, sizes of 1 repeated.
        multiply(a: &Array, b: &Array) = "mlx_multiply" multiply(a.handle, b.handle);
        /// `a` to the power `b`.
        power(a: &Array, b: &Array) = "mlx_power" power(a.handle, b.handle);
        /// `1 / (1 + exp(-a))`
        sigmoid(a: &Array) = "mlx_sigmoid" sigmoid(a.handle);
        /// The sum of all values.
        sum(a: &Array) = "mlx_sum" sum(a.handle, false);
        /// Hyperbolic tangent.
        tanh(a: &Array) = "mlx_tanh" tanh(a.handle);
        /// The same values, rows one after the other.
        contiguous(a: &Array) = "mlx_contiguous" contiguous(a.handle, false);
        /// `a (.., n, k)` times `b (k, m)`.
        matmul(a: &Array, b: &Array) = "mlx_matmul" matmul(a.handle, b.handle);
        /// The same values in another shape; one size may be -1.
        reshape(a: &Array, shape: &[i32])
            = "mlx_reshape" reshape(a.handle, shape.as_ptr(), shape.len());
        /// The axes in another order.
        transpose(a: &Array, axes: &[i32])
            = "mlx_transpose_axes" transpose_axes(a.handle, axes.as_ptr(), axes.len());
        /// The entries of `a` along `axis` that `indices` name.
        take(a: &Array, indices: &Array, axis: i32)
            = "mlx_take_axis" take_axis(a.handle, indices.handle, axis);
        /// An array of zeros.
        zeros(shape: &[i32], dtype: Dtype)
            = "mlx_zeros" zeros(shape.as_ptr(), shape.len(), dtype.number());
        /// RMS norm over the last axis, times `weight`.
        rms_norm(x: &Array, weight: &Array, eps: f32)
            = "mlx_fast_rms_norm" fast_rms_norm(x.handle, weight.handle, eps);
        /// `x (n, in)` times the transpose of `w (out, in)`.
        quantised_matmul(x: &Array, w: &Quantised)
            = "mlx_quantized_matmul" quantized_matmul(
                x.handle, w.packed.handle, w.scales.handle, handle(w.biases.as_ref()), true,
                int(w.group), int(w.bits), w.mode.name().as_ptr()
            );
        /// The values of a quantised matrix, in the type of its scales; of `dtype` in mode `mxfp4`.
        dequantise(w: &Quantised, dtype: Dtype)
            = "mlx_dequantize" dequantize(
                w.packed.handle, w.scales.handle, handle(w.biases.as_ref()), int(w.group),
                int(w.bits), w.mode.name().as_ptr(), ObjectHandle::NONE,
                OptionalDtype { value: dtype.number(), has_value: true }
            );
        /// Turns the first `2 n` values of each row of `x (.., rows, head)` by the rows' positions
        /// from `position` on. `periods (n,)` are positions per radian. `neighbours`: values 2 i
        /// and 2 i + 1 turn together, else i and n + i.
        rope(x: &Array, periods: &Array, neighbours: bool, position: i32)
            = "mlx_fast_rope" fast_rope(
                x.handle, turned(periods), neighbours, NO_FLOAT, 1.0, position, periods.handle
            );
        /// As [`rope`](Self::rope), each part `i` of `x (n, .., rows, head)` from position
        /// `positions[i]` on.
        rope_each(x: &Array, periods: &Array, neighbours: bool, positions: &Array)
            = "mlx_fast_rope_dynamic" fast_rope_dynamic(
                x.handle, turned(periods), neighbours, NO_FLOAT, 1.0, positions.handle,
                periods.handle
            );
        /// `a - b`, sizes of 1 repeated; integers wrap around.
        subtract(a: &Array, b: &Array) = "mlx_subtract" subtract(a.handle, b.handle);
        /// `a / b`, sizes of 1 repeated.
        divide(a: &Array, b: &Array) = "mlx_divide" divide(a.handle, b.handle);
        /// The magnitude.
        abs(a: &Array) = "mlx_abs" abs(a.handle);
        /// The next whole number above.
        ceil(a: &Array) = "mlx_ceil" ceil(a.handle);
        /// The next whole number below.
        floor(a: &Array) = "mlx_floor" floor(a.handle);
        /// The logarithm of base 2.
        log2(a: &Array) = "mlx_log2" log2(a.handle);
        /// The nearest whole number, the even one of two.
        round(a: &Array) = "mlx_round" round(a.handle, 0);
        /// The larger of each two values, sizes of 1 repeated.
        maximum(a: &Array, b: &Array) = "mlx_maximum" maximum(a.handle, b.handle);
        /// The smaller of each two values, sizes of 1 repeated.
        minimum(a: &Array, b: &Array) = "mlx_minimum" minimum(a.handle, b.handle);
        /// Whether `a < b`, of type bool, sizes of 1 repeated.
        less(a: &Array, b: &Array) = "mlx_less" less(a.handle, b.handle);
        /// `ln(exp(a) + exp(b))` without overflow: with `b = 0` a softplus.
        log_add_exp(a: &Array, b: &Array) = "mlx_logaddexp" logaddexp(a.handle, b.handle);
        /// `e` to the power `a`.
        exp(a: &Array) = "mlx_exp" exp(a.handle);
        /// `-a`
        negative(a: &Array) = "mlx_negative" negative(a.handle);
        /// `1 / sqrt(a)`
        rsqrt(a: &Array) = "mlx_rsqrt" rsqrt(a.handle);
        /// Softmax along `axis`, computed in `f32` for every type.
        softmax(a: &Array, axis: i32) = "mlx_softmax_axis" softmax_axis(a.handle, axis, true);
        /// `ln` of the sum of `exp` along `axis`, which stays with size 1; without overflow.
        log_sum_exp(a: &Array, axis: i32)
            = "mlx_logsumexp_axis" logsumexp_axis(a.handle, axis, true);
        /// The sum along `axis`, which stays with size 1.
        sum_along(a: &Array, axis: i32) = "mlx_sum_axis" sum_axis(a.handle, axis, true);
        /// The largest value along `axis`, which stays with size 1.
        max_along(a: &Array, axis: i32) = "mlx_max_axis" max_axis(a.handle, axis, true);
        /// Sums of the values up to each along `axis`, itself included.
        running_sum(a: &Array, axis: i32)
            = "mlx_cumsum_axis" cumsum_axis(
                a.handle, axis, false, true, OptionalDtype { value: 0, has_value: false }
            );
        /// Along `axis` the places of the values from the smallest on, of type `uint32`. Equal
        /// values keep their order; those that are not numbers come last.
        argsort(a: &Array, axis: i32) = "mlx_argsort_axis" argsort_axis(a.handle, axis);
        /// Along `axis` the place of the largest value, the first among equals, of type `uint32`
        /// and size 1. Where a value is not a number, the place may be any.
        argmax(a: &Array, axis: i32) = "mlx_argmax_axis" argmax_axis(a.handle, axis, true);
        /// Along `axis` the places of all values, in an order in which no value before place `kth`
        /// is above those behind it. Of type `uint32`; values that are not numbers come last.
        argpartition(a: &Array, kth: i32, axis: i32)
            = "mlx_argpartition_axis" argpartition_axis(a.handle, kth, axis);
        /// The values at `indices` along `axis`: as many sizes as `a`, the others equal.
        take_along(a: &Array, indices: &Array, axis: i32)
            = "mlx_take_along_axis" take_along_axis(a.handle, indices.handle, axis);
        /// `a` with `values` at `indices` along `axis`, sizes of 1 repeated on the other axes. In
        /// place as [`slice_update`](Self::slice_update) is.
        put_along(a: &Array, indices: &Array, values: &Array, axis: i32)
            = "mlx_put_along_axis" put_along_axis(
                a.handle, indices.handle, values.handle, axis
            );
        /// `x (.., rows, in)` times the matrices `indices (..)` of `stack (matrices, in, out)`:
        /// `(.., rows, out)`, sizes of 1 in front repeated. `sorted`: whether the indices do not
        /// fall. MLX's CPU computes it of `f32` only.
        gathered_matmul(x: &Array, stack: &Array, indices: &Array, sorted: bool)
            = "mlx_gather_mm" gather_mm(
                x.handle, stack.handle, ObjectHandle::NONE, indices.handle, sorted
            );
        /// The last axis by the Hadamard matrix of its size, a power of two, over the square root
        /// of it: twice is the identity.
        hadamard(a: &Array) = "mlx_hadamard_transform" hadamard_transform(a.handle, NO_FLOAT);
        /// As [`gathered_matmul`](Self::gathered_matmul), of the transposes of a quantised stack.
        gathered_quantised_matmul(x: &Array, stack: &Quantised, indices: &Array, sorted: bool)
            = "mlx_gather_qmm" gather_qmm(
                x.handle, stack.packed.handle, stack.scales.handle, handle(stack.biases.as_ref()),
                ObjectHandle::NONE, indices.handle, true, int(stack.group), int(stack.bits),
                stack.mode.name().as_ptr(), sorted
            );
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

    /// The values `(.., n)` as `bits` bits each, in groups of `group` along the last axis. Packed
    /// values are `(.., n bits / 32)`, scales and biases `(.., n / group)` in the type of `a`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn quantise(&self, a: &Array, group: i32, bits: i32) -> Result<[Array; 3], Error> {
        let (f, mode) = (self.library.table().quantize, QuantisedMode::Affine.name());
        let mut all = ArrayVector::empty(&self.library);
        let (out, none) = (&raw mut all.0, ObjectHandle::NONE);
        // SAFETY: see above.
        let code = unsafe {
            let mode = mode.as_ptr();
            f(
                out,
                a.handle,
                int(group),
                int(bits),
                mode,
                none,
                self.handle,
            )
        };
        done("mlx_quantize", code)?;
        let parts = all.arrays()?;
        Ok(parts.try_into().expect("affine groups have three parts"))
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
