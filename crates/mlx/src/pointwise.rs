//! Operations on values and along axes for routers and recurrent layers. The basic ones are in
//! [`ops`](crate::Stream::add).

use std::ffi::c_int;

use crate::table::{ObjectHandle, OptionalDtype};
use crate::{Array, Error, Stream};

/// A function of one array.
type Unary = unsafe extern "C" fn(*mut ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;

/// A function of two arrays.
type Binary =
    unsafe extern "C" fn(*mut ObjectHandle, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;

// SAFETY of the blocks in this file: as in `ops.rs`.
impl Stream {
    fn unary(&self, name: &'static str, f: Unary, a: &Array) -> Result<Array, Error> {
        // SAFETY: see above.
        self.op(name, |out| unsafe { f(out, a.handle, self.handle) })
    }

    fn binary(&self, name: &'static str, f: Binary, a: &Array, b: &Array) -> Result<Array, Error> {
        // SAFETY: see above.
        self.op(name, |out| unsafe {
            f(out, a.handle, b.handle, self.handle)
        })
    }

    /// `a - b`, sizes of 1 repeated; integers wrap around.
    ///
    /// # Errors
    /// [`Error::Call`], as of every operation.
    pub fn subtract(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        self.binary("mlx_subtract", self.library.table().subtract, a, b)
    }

    /// `a / b`, sizes of 1 repeated.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn divide(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        self.binary("mlx_divide", self.library.table().divide, a, b)
    }

    /// The larger of each two values, sizes of 1 repeated.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn maximum(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        self.binary("mlx_maximum", self.library.table().maximum, a, b)
    }

    /// The smaller of each two values, sizes of 1 repeated.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn minimum(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        self.binary("mlx_minimum", self.library.table().minimum, a, b)
    }

    /// Whether `a < b`, of type bool, sizes of 1 repeated.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn less(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        self.binary("mlx_less", self.library.table().less, a, b)
    }

    /// `ln(exp(a) + exp(b))` without overflow: with `b = 0` a softplus.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn log_add_exp(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        self.binary("mlx_logaddexp", self.library.table().logaddexp, a, b)
    }

    /// `e` to the power `a`.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn exp(&self, a: &Array) -> Result<Array, Error> {
        self.unary("mlx_exp", self.library.table().exp, a)
    }

    /// `-a`
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn negative(&self, a: &Array) -> Result<Array, Error> {
        self.unary("mlx_negative", self.library.table().negative, a)
    }

    /// `1 / sqrt(a)`
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn rsqrt(&self, a: &Array) -> Result<Array, Error> {
        self.unary("mlx_rsqrt", self.library.table().rsqrt, a)
    }

    /// Softmax along `axis`, computed in `f32` for every type.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn softmax(&self, a: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().softmax_axis;
        // SAFETY: see above.
        self.op("mlx_softmax_axis", |out| unsafe {
            f(out, a.handle, axis, true, self.handle)
        })
    }

    /// `ln` of the sum of `exp` along `axis`, which stays with size 1; without overflow.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn log_sum_exp(&self, a: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().logsumexp_axis;
        // SAFETY: see above.
        self.op("mlx_logsumexp_axis", |out| unsafe {
            f(out, a.handle, axis, true, self.handle)
        })
    }

    /// The sum along `axis`, which stays with size 1.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn sum_along(&self, a: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().sum_axis;
        // SAFETY: see above.
        self.op("mlx_sum_axis", |out| unsafe {
            f(out, a.handle, axis, true, self.handle)
        })
    }

    /// Sums of the values up to each along `axis`, itself included.
    ///
    /// # Errors
    /// As [`subtract`](Self::subtract).
    pub fn running_sum(&self, a: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().cumsum_axis;
        let same = OptionalDtype {
            value: 0,
            has_value: false,
        };
        // SAFETY: see above.
        self.op("mlx_cumsum_axis", |out| unsafe {
            f(out, a.handle, axis, false, true, same, self.handle)
        })
    }
}
