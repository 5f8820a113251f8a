//! Orders, choices and products with chosen matrices of a stack: what mixtures of experts need.

use crate::ops::{handle, int};
use crate::table::ObjectHandle;
use crate::{Array, Error, Quantised, Stream};

// SAFETY of the blocks in this file: as in `ops.rs`.
impl Stream {
    /// Along `axis` the places of the values from the smallest on, of type `uint32`. Equal values
    /// keep their order; those that are not numbers come last.
    ///
    /// # Errors
    /// [`Error::Call`], as of every operation.
    pub fn argsort(&self, a: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().argsort_axis;
        // SAFETY: see above.
        self.op("mlx_argsort_axis", |out| unsafe {
            f(out, a.handle, axis, self.handle)
        })
    }

    /// Along `axis` the place of the largest value, the first among equals, of type `uint32` and
    /// size 1. Where a value is not a number, the place may be any.
    ///
    /// # Errors
    /// As [`argsort`](Self::argsort).
    pub fn argmax(&self, a: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().argmax_axis;
        // SAFETY: see above.
        self.op("mlx_argmax_axis", |out| unsafe {
            f(out, a.handle, axis, true, self.handle)
        })
    }

    /// Along `axis` the places of all values, in an order in which no value before place `kth` is
    /// above those behind it. Of type `uint32`; values that are not numbers come last.
    ///
    /// # Errors
    /// As [`argsort`](Self::argsort).
    pub fn argpartition(&self, a: &Array, kth: i32, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().argpartition_axis;
        // SAFETY: see above.
        self.op("mlx_argpartition_axis", |out| unsafe {
            f(out, a.handle, kth, axis, self.handle)
        })
    }

    /// The values at `indices` along `axis`: as many sizes as `a`, the others equal.
    ///
    /// # Errors
    /// As [`argsort`](Self::argsort).
    pub fn take_along(&self, a: &Array, indices: &Array, axis: i32) -> Result<Array, Error> {
        let f = self.library.table().take_along_axis;
        // SAFETY: see above.
        self.op("mlx_take_along_axis", |out| unsafe {
            f(out, a.handle, indices.handle, axis, self.handle)
        })
    }

    /// `a` with `values` at `indices` along `axis`, sizes of 1 repeated on the other axes. In place
    /// as [`slice_update`](Self::slice_update) is.
    ///
    /// # Errors
    /// As [`argsort`](Self::argsort).
    pub fn put_along(
        &self,
        a: &Array,
        indices: &Array,
        values: &Array,
        axis: i32,
    ) -> Result<Array, Error> {
        let f = self.library.table().put_along_axis;
        // SAFETY: see above.
        self.op("mlx_put_along_axis", |out| unsafe {
            f(
                out,
                a.handle,
                indices.handle,
                values.handle,
                axis,
                self.handle,
            )
        })
    }

    /// `x (.., rows, in)` times the matrices `indices (..)` of `stack (matrices, in, out)`: `(..,
    /// rows, out)`, sizes of 1 in front repeated. `sorted`: whether the indices do not fall.
    ///
    /// MLX's CPU computes it of `f32` only.
    ///
    /// # Errors
    /// As [`argsort`](Self::argsort).
    pub fn gathered_matmul(
        &self,
        x: &Array,
        stack: &Array,
        indices: &Array,
        sorted: bool,
    ) -> Result<Array, Error> {
        let f = self.library.table().gather_mm;
        // SAFETY: see above.
        self.op("mlx_gather_mm", |out| unsafe {
            f(
                out,
                x.handle,
                stack.handle,
                ObjectHandle::NONE,
                indices.handle,
                sorted,
                self.handle,
            )
        })
    }

    /// As [`gathered_matmul`](Self::gathered_matmul), of the transposes of a quantised stack.
    ///
    /// # Errors
    /// As [`argsort`](Self::argsort).
    pub fn gathered_quantised_matmul(
        &self,
        x: &Array,
        stack: &Quantised,
        indices: &Array,
        sorted: bool,
    ) -> Result<Array, Error> {
        let f = self.library.table().gather_qmm;
        // SAFETY: see above.
        self.op("mlx_gather_qmm", |out| unsafe {
            f(
                out,
                x.handle,
                stack.packed.handle,
                stack.scales.handle,
                handle(stack.biases.as_ref()),
                ObjectHandle::NONE,
                indices.handle,
                true,
                int(stack.group),
                int(stack.bits),
                stack.mode.name().as_ptr(),
                sorted,
                self.handle,
            )
        })
    }
}
