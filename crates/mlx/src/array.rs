//! Owners of MLX's arrays.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;

use crate::library::{done, failed};
use crate::table::ObjectHandle;
use crate::{Dtype, Error, Library, Stream};

/// An array of MLX: values, or how to compute them. Clones are the same array.
pub struct Array {
    library: Library,
    pub(crate) handle: ObjectHandle,
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype(), self.shape())
    }
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

/// Drops what an array was made of.
extern "C" fn drop_owner(payload: *mut c_void) {
    // SAFETY: `Stream::array_owned` made it of such a box, and MLX calls this once.
    drop(unsafe { Box::from_raw(payload.cast::<Box<dyn Any + Send>>()) });
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

    /// The memory of a computed array, rows one after the other, in its own place. Nothing is
    /// copied where the device shares the machine's memory ([`Stream::shares_memory`]).
    ///
    /// # Errors
    /// [`Error::Memory`] for another layout: see [`Stream::contiguous`].
    pub fn as_bytes(&self) -> Result<&[u8], Error> {
        if !self.is_rows() {
            return Err(self.not_as(self.dtype(), false));
        }
        let n = self.n_bytes() as usize;
        if n == 0 {
            return Ok(&[]);
        }
        // SAFETY: the array reports `n` bytes there, and it outlives the slice. The function only
        // casts a pointer, for every type of values.
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
    /// [`Error::Memory`] for another type or layout: see [`Stream::rows_f32`].
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

    /// An array of the bytes of `owner`.
    ///
    /// Whole pages are used in place where the device can do so, and `owner` is dropped with the
    /// last use of them. Metal requires whole pages, and tensors in files are not. All other
    /// memory is copied, and `owner` is dropped at once. A CUDA card and MLX's CPU build copy all.
    ///
    /// # Errors
    /// As [`array`](Self::array).
    pub fn array_owned<T>(&self, owner: T, shape: &[i32], dtype: Dtype) -> Result<Array, Error>
    where
        T: AsRef<[u8]> + Send + 'static,
    {
        // Boxed first, so that bytes that lie in the owner itself do not move any more.
        let owner = Box::new(owner);
        let bytes = (*owner).as_ref();
        if !is_whole_pages(bytes.as_ptr().addr(), bytes.len(), page_bytes()) {
            return self.array(bytes, shape, dtype);
        }
        Self::check(shape, dtype, bytes.len())?;
        let data = bytes.as_ptr().cast_mut().cast();
        let payload: Box<Box<dyn Any + Send>> = Box::new(owner);
        let payload = Box::into_raw(payload).cast();
        let (table, n) = (self.library.table(), shape.len() as c_int);
        // SAFETY: as many bytes as the shape says; they stay until `drop_owner` is called. MLX
        // does not write to them: it writes in place only to arrays of its own operations.
        let handle = unsafe {
            (table.array_new_data_managed_payload)(
                data,
                shape.as_ptr(),
                n,
                dtype.number(),
                payload,
                drop_owner,
            )
        };
        Array::of(&self.library, "mlx_array_new_data_managed_payload", handle)
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

unsafe extern "C" {
    /// Bytes of a page of this system: 4 KiB, or 16 KiB on Apple silicon.
    safe fn getpagesize() -> c_int;
}

/// Bytes of a page, or 0 where the system gives a number below 0. No address is a multiple of 0.
fn page_bytes() -> usize {
    usize::try_from(getpagesize()).unwrap_or(0)
}

/// Whether `bytes` from `address` on are whole pages. Source: Apple's documentation of
/// `makeBuffer(bytesNoCopy:length:options:deallocator:)`, which requires it.
const fn is_whole_pages(address: usize, bytes: usize, page_bytes: usize) -> bool {
    bytes > 0 && address.is_multiple_of(page_bytes) && bytes.is_multiple_of(page_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_in_place_by_whole_pages_alone() {
        const PAGE: usize = 16 << 10;
        for (address, bytes, expected) in [
            (3 * PAGE, PAGE, true),
            (3 * PAGE, 4 * PAGE, true),
            (3 * PAGE + 64, PAGE, false),
            (3 * PAGE + (4 << 10), PAGE, false),
            (3 * PAGE, PAGE - 1, false),
            (3 * PAGE, PAGE + (4 << 10), false),
            (3 * PAGE, 64, false),
            (3 * PAGE, 0, false),
        ] {
            let got = is_whole_pages(address, bytes, PAGE);
            assert_eq!(got, expected, "{bytes} bytes at {address}");
        }
        assert!(!is_whole_pages(3 * PAGE, PAGE, 0));
        assert!(page_bytes().is_power_of_two() && page_bytes() >= 4 << 10);
    }
}
