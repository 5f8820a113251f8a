//! Memory of Python objects, through the buffer protocol.

use std::slice;

use paceline_comm::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

/// The element type with this index in `DTYPES`.
///
/// # Errors
/// `ValueError` if there is none.
pub(crate) fn dtype(index: usize) -> PyResult<Dtype> {
    let found = Dtype::ALL.get(index).copied();
    found.ok_or_else(|| PyValueError::new_err(format!("no element type has the number {index}")))
}

/// An object's memory, contiguous in C order, held until this is dropped.
///
/// The bytes are read and written without the GIL. The caller promises, as for every extension
/// that computes on arrays, that no other thread changes the object meanwhile.
pub(crate) struct BufferView(Box<ffi::Py_buffer>);

impl BufferView {
    /// The memory of `object`, as elements of `dtype`.
    ///
    /// # Errors
    /// `TypeError`, `ValueError` or `BufferError` of the object itself if it has no buffer, or one
    /// with gaps. `ValueError` if the buffer is not a whole number of elements.
    pub(crate) fn of(object: &Bound<'_, PyAny>, dtype: Dtype) -> PyResult<Self> {
        Self::get(object, dtype, ffi::PyBUF_SIMPLE)
    }

    /// [`of`](Self::of) an object that is written to.
    pub(crate) fn writable(object: &Bound<'_, PyAny>, dtype: Dtype) -> PyResult<Self> {
        Self::get(object, dtype, ffi::PyBUF_WRITABLE)
    }

    fn get(object: &Bound<'_, PyAny>, dtype: Dtype, flags: i32) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive, the GIL is held, and the view does not move: exporters may
        // keep its address. It counts as filled only after success.
        let status = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *view, flags) };
        if status != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let memory = Self(view);
        let bytes = memory.len();
        if !bytes.is_multiple_of(dtype.bytes()) {
            let text = format!("a buffer of {bytes} bytes is no whole number of {dtype}");
            return Err(PyValueError::new_err(text));
        }
        Ok(memory)
    }

    fn len(&self) -> usize {
        usize::try_from(self.0.len).unwrap_or(0)
    }

    /// All bytes, for reading.
    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, len) = (self.0.buf, self.len());
        if len == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps this memory in place while the buffer is held, and guarantees
        // that it is contiguous and has this length. The caller promises that nobody writes
        // meanwhile.
        unsafe { slice::from_raw_parts(start.cast::<u8>(), len) }
    }

    /// All bytes, for writing.
    ///
    /// # Errors
    /// `ValueError` if it shares memory with one of `others`.
    pub(crate) fn bytes_mut<'a>(&'a mut self, others: &[&BufferView]) -> PyResult<&'a mut [u8]> {
        if others.iter().any(|other| self.overlaps(other)) {
            return Err(PyValueError::new_err("input and output share memory"));
        }
        let (start, len) = (self.0.buf, self.len());
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as in `bytes`; the exporter allows writing (`writable` has requested it), and no
        // other slice of this call overlaps.
        Ok(unsafe { slice::from_raw_parts_mut(start.cast::<u8>(), len) })
    }

    fn overlaps(&self, other: &Self) -> bool {
        let range = |memory: &Self| {
            let start = memory.0.buf as usize;
            (start, start + memory.len())
        };
        let ((start, end), (first, last)) = (range(self), range(other));
        start < last && first < end
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        // SAFETY: `get` has filled it. It holds raw pointers, so it is not `Send` and cannot have
        // moved to a thread without the GIL.
        unsafe { ffi::PyBuffer_Release(&mut *self.0) };
    }
}
