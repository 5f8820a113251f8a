//! Owners of MLX's arrays.

use std::ffi::c_int;

use crate::library::{done, failed};
use crate::table::ObjectHandle;
use crate::{Dtype, Error, Library, Stream};

/// An array of MLX: values, or how to compute them. Clones are the same array.
#[derive(derive_more::Debug)]
#[debug("{} {:?}", self.dtype(), self.shape())]
pub struct Array {
    library: Library,
    pub(crate) handle: ObjectHandle,
}

impl Clone for Array {
    fn clone(&self) -> Self {
        let mut copy = Self::empty(&self.library);
        // SAFETY: live handles. The call fails only if memory is exhausted. `copy` is then empty,
        // and its uses get an error from MLX.
        unsafe { (self.library.table().array_set)(&raw mut copy.handle, self.handle) };
        copy
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: a live handle, used nowhere else.
        unsafe { (self.library.table().array_free)(self.handle) };
    }
}

impl Array {
    /// A handle of nothing, for a call to write to.
    fn empty(library: &Library) -> Self {
        // SAFETY: makes a null handle.
        let handle = unsafe { (library.table().array_new)() };
        Self {
            library: library.clone(),
            handle,
        }
    }

    /// The array that `call` writes.
    pub(crate) fn made_by(
        library: &Library,
        name: &'static str,
        call: impl FnOnce(*mut ObjectHandle) -> c_int,
    ) -> Result<Self, Error> {
        let mut array = Self::empty(library);
        done(name, call(&raw mut array.handle))?;
        Ok(array)
    }

    fn of(library: &Library, name: &'static str, handle: ObjectHandle) -> Result<Self, Error> {
        if handle.0.is_null() {
            return Err(failed(name));
        }
        Ok(Self {
            library: library.clone(),
            handle,
        })
    }

    /// Has this handle stand for `other`, and lets go of what it was. Clones stay what they were.
    ///
    /// # Safety
    /// No borrow of its bytes is in use.
    pub unsafe fn become_array(&self, other: &Self) {
        let mut own = self.handle;
        // SAFETY: live handles. A handle that is not null keeps its place.
        unsafe { (self.library.table().array_set)(&raw mut own, other.handle) };
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> Vec<i32> {
        let table = self.library.table();
        // SAFETY: a live handle; the sizes are as many as it says, and are copied.
        unsafe {
            let n = (table.array_ndim)(self.handle);
            let shape = (table.array_shape)(self.handle);
            (0..n).map(|i| *shape.add(i)).collect()
        }
    }

    /// The type of its values.
    pub fn dtype(&self) -> Dtype {
        // SAFETY: a live handle.
        Dtype::from_number(unsafe { (self.library.table().array_dtype)(self.handle) })
    }

    /// Bytes of all values.
    pub fn n_bytes(&self) -> u64 {
        // SAFETY: a live handle.
        unsafe { (self.library.table().array_nbytes)(self.handle) as u64 }
    }

    /// Whether its rows lie one after the other; known when it was computed.
    pub fn is_rows(&self) -> bool {
        let (table, shape) = (self.library.table(), self.shape());
        let mut expected = 1;
        // SAFETY: as many strides as sizes.
        (0..shape.len()).rev().all(|i| unsafe {
            let stride = *(table.array_strides)(self.handle).add(i);
            let fits = shape[i] == 1 || stride == expected;
            expected *= shape[i].max(1) as usize;
            fits
        })
    }

    /// Whether its values are in memory: it was evaluated, or was made of values.
    pub(crate) fn is_computed(&self) -> Result<bool, Error> {
        let mut computed = false;
        // SAFETY: a live handle. No device writes to the memory of an available array.
        let code = unsafe { (self.library.table().is_available)(&raw mut computed, self.handle) };
        done("_mlx_array_is_available", code)?;
        Ok(computed)
    }

    /// The memory of a computed array, rows one after the other, in its own place. Nothing is
    /// copied where the device shares the machine's memory ([`Stream::shares_memory`]).
    ///
    /// MLX writes a result into the memory of an operand that has no other handle. That holds for
    /// operands made of values too (`array::is_donatable`, MLX 0.32.2). The slice borrows a handle,
    /// so its memory keeps its values.
    ///
    /// # Errors
    /// [`Error::NotComputed`] before [`Stream::eval`]; [`Error::Memory`] for another layout: see
    /// [`Stream::contiguous`].
    pub fn as_bytes(&self) -> Result<&[u8], Error> {
        if !self.is_computed()? {
            let (shape, dtype) = (self.shape(), self.dtype());
            return Err(Error::NotComputed { shape, dtype });
        }
        if !self.is_rows() {
            return Err(self.not_as(self.dtype(), false));
        }
        let n = self.n_bytes() as usize;
        if n == 0 {
            return Ok(&[]);
        }
        // SAFETY: the array is computed and reports `n` bytes there, and it outlives the slice. The
        // function only casts a pointer, for every type of values.
        unsafe {
            let start = (self.library.table().array_data_uint8)(self.handle);
            if start.is_null() {
                return Err(failed("mlx_array_data_uint8"));
            }
            Ok(std::slice::from_raw_parts(start, n))
        }
    }

    /// As [`as_bytes`](Self::as_bytes), to write to.
    ///
    /// # Errors
    /// As [`as_bytes`](Self::as_bytes).
    ///
    /// # Safety
    /// The array was computed, and so was everything that reads it. Nothing that is still to be
    /// computed looks at its memory, and no other array does.
    pub unsafe fn as_bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        let bytes = self.as_bytes()?;
        let (start, n) = (bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: the memory is the array's own, and the caller promises that nobody reads it.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, n) })
    }

    /// As [`as_bytes`](Self::as_bytes), of an array of `f32`.
    ///
    /// # Errors
    /// As [`as_bytes`](Self::as_bytes); [`Error::Memory`] also for another type: see
    /// [`Stream::rows_f32`].
    pub fn as_f32(&self) -> Result<&[f32], Error> {
        let bytes = self.of_f32()?.as_bytes()?;
        if bytes.is_empty() {
            return Ok(&[]); // no place at all, aligned or not
        }
        // SAFETY: as many values lie there; MLX aligns arrays to their type.
        Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 4) })
    }

    /// As [`as_f32`](Self::as_f32), to write to.
    ///
    /// # Errors
    /// As [`as_f32`](Self::as_f32).
    ///
    /// # Safety
    /// As [`as_bytes_mut`](Self::as_bytes_mut).
    pub unsafe fn as_f32_mut(&mut self) -> Result<&mut [f32], Error> {
        let values = self.as_f32()?;
        let (start, n) = (values.as_ptr().cast_mut(), values.len());
        // SAFETY: as in `as_bytes_mut`.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, n) })
    }

    /// As [`as_bytes`](Self::as_bytes), of an array of `u32`, copied.
    ///
    /// # Errors
    /// As [`as_f32`](Self::as_f32).
    pub fn to_u32(&self) -> Result<Vec<u32>, Error> {
        if self.dtype() != Dtype::U32 {
            return Err(self.not_as(Dtype::U32, self.is_rows()));
        }
        let (values, _) = self.as_bytes()?.as_chunks();
        Ok(values.iter().copied().map(u32::from_ne_bytes).collect())
    }

    fn of_f32(&self) -> Result<&Self, Error> {
        if self.dtype() == Dtype::F32 {
            return Ok(self);
        }
        Err(self.not_as(Dtype::F32, self.is_rows()))
    }

    fn not_as(&self, asked: Dtype, rows: bool) -> Error {
        let dtype = self.dtype();
        Error::Memory { asked, dtype, rows }
    }
}

impl Stream {
    fn check(shape: &[i32], dtype: Dtype, got: usize) -> Result<(), Error> {
        let sizes = shape.iter().map(|size| u64::try_from(*size).ok());
        let mut all = sizes.chain([Some(dtype.bytes() as u64)]);
        let expected = all.try_fold(1u64, |a, b| a.checked_mul(b?));
        if expected == Some(got as u64) {
            return Ok(());
        }
        Err(Error::Length {
            shape: shape.to_vec(),
            dtype,
            expected: expected.unwrap_or(u64::MAX),
            got: got as u64,
        })
    }

    /// An array of a copy of `bytes`.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Call`].
    pub fn array(&self, bytes: &[u8], shape: &[i32], dtype: Dtype) -> Result<Array, Error> {
        Self::check(shape, dtype, bytes.len())?;
        let (table, n) = (self.library.table(), shape.len() as c_int);
        // SAFETY: as many bytes as the shape says, as just checked; they are copied.
        let handle = unsafe {
            let (data, shape) = (bytes.as_ptr().cast(), shape.as_ptr());
            (table.array_new_data)(data, shape, n, dtype.number())
        };
        Array::of(&self.library, "mlx_array_new_data", handle)
    }

    /// An array of a copy of `values`.
    ///
    /// # Errors
    /// As [`array`](Self::array).
    pub fn array_f32(&self, values: &[f32], shape: &[i32]) -> Result<Array, Error> {
        // SAFETY: every value is four bytes, and a byte may have any value.
        let bytes =
            unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        self.array(bytes, shape, Dtype::F32)
    }

    /// An array of a copy of `values`.
    ///
    /// # Errors
    /// As [`array`](Self::array).
    pub fn array_u32(&self, values: &[u32], shape: &[i32]) -> Result<Array, Error> {
        // SAFETY: as for `array_f32`.
        let bytes =
            unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        self.array(bytes, shape, Dtype::U32)
    }

    /// A single value of type `dtype`.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn scalar(&self, value: f32, dtype: Dtype) -> Result<Array, Error> {
        // SAFETY: takes any number.
        let handle = unsafe { (self.library.table().array_new_float32)(value) };
        let value = Array::of(&self.library, "mlx_array_new_float32", handle)?;
        self.astype(&value, dtype)
    }
}
