//! A GPU of this process: its context, a stream, and buffers that calls copy through.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use super::table::{Cuda, DevicePtr, Libraries, Nccl, Opaque, OpenError, done, open_all};

/// Not ready: `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;

/// `CU_STREAM_NON_BLOCKING`: does not wait for the default stream.
const NON_BLOCKING: u32 = 1;

/// A GPU with NCCL.
pub(super) struct CudaDevice {
    pub(super) nccl: Nccl,
    cuda: Cuda,
    context: Opaque,
}

// SAFETY: handles are values that the libraries look up, from any thread.
unsafe impl Send for CudaDevice {}
// SAFETY: as for `Send`.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Opens the libraries and selects GPU `rank` modulo the number of GPUs, as MLX does.
    pub(super) fn open(libraries: &Libraries, rank: u32) -> Result<Self, OpenError> {
        let (nccl, cuda) = open_all(libraries)?;
        let (mut count, mut device, mut context) = (0, 0, ptr::null_mut());
        // SAFETY: the table's signatures; all outputs are written.
        unsafe {
            done("cuInit", (cuda.init)(0))?;
            done("cuDeviceGetCount", (cuda.device_count)(&raw mut count))?;
            let count = u32::try_from(count).unwrap_or(0);
            let index = rank.checked_rem(count).ok_or(OpenError::NoDevice)?;
            let index = c_int::try_from(index).unwrap_or(0);
            done("cuDeviceGet", (cuda.device)(&raw mut device, index))?;
            let code = (cuda.retain_context)(&raw mut context, device);
            done("cuDevicePrimaryCtxRetain", code)?;
        }
        Ok(Self {
            nccl,
            cuda,
            context,
        })
    }

    /// Makes this GPU current on the calling thread; needed before every other call.
    pub(super) fn enter(&self) -> Result<(), OpenError> {
        // SAFETY: a context that was retained and never released.
        done("cuCtxSetCurrent", unsafe {
            (self.cuda.set_context)(self.context)
        })
    }

    /// Copies `bytes` to `to`, which has room for them.
    pub(super) fn upload(&self, to: &Buffer, bytes: &[u8]) -> Result<(), OpenError> {
        assert!(
            bytes.len() <= to.bytes,
            "{} bytes into {}",
            bytes.len(),
            to.bytes
        );
        // SAFETY: as just checked.
        let code = unsafe { (self.cuda.to_device)(to.start, bytes.as_ptr().cast(), bytes.len()) };
        done("cuMemcpyHtoD", code)
    }

    /// Copies what is at `offset` of `from` into `bytes`.
    pub(super) fn download(
        &self,
        bytes: &mut [u8],
        from: &Buffer,
        offset: usize,
    ) -> Result<(), OpenError> {
        assert!(
            offset + bytes.len() <= from.bytes,
            "past {} bytes",
            from.bytes
        );
        let (to, start) = (bytes.as_mut_ptr().cast(), from.start + offset as u64);
        // SAFETY: as just checked.
        done("cuMemcpyDtoH", unsafe {
            (self.cuda.to_host)(to, start, bytes.len())
        })
    }

    /// Whether all work on `stream` has completed.
    pub(super) fn is_over(&self, stream: &CudaStream) -> Result<bool, OpenError> {
        // SAFETY: a live stream.
        match unsafe { (self.cuda.stream_query)(stream.handle) } {
            NOT_READY => Ok(false),
            code => done("cuStreamQuery", code).map(|()| true),
        }
    }
}

/// A CUDA stream: an ordered queue of work.
pub(super) struct CudaStream {
    pub(super) handle: Opaque,
    device: Arc<CudaDevice>,
}

// SAFETY: as for `CudaDevice`.
unsafe impl Send for CudaStream {}

impl CudaStream {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, OpenError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the handle is written.
        let code = unsafe { (device.cuda.stream_create)(&raw mut handle, NON_BLOCKING) };
        done("cuStreamCreate", code)?;
        let device = Arc::clone(device);
        Ok(Self { handle, device })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        let _ = self.device.enter();
        // SAFETY: a live stream, used nowhere else.
        unsafe { (self.device.cuda.stream_destroy)(self.handle) };
    }
}

/// A buffer on the GPU, which only grows.
pub(super) struct Buffer {
    pub(super) start: DevicePtr,
    bytes: usize,
    device: Arc<CudaDevice>,
}

impl Buffer {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Self {
        Self {
            start: 0,
            bytes: 0,
            device: Arc::clone(device),
        }
    }

    /// Makes the buffer at least `bytes` long; its contents are lost.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<(), OpenError> {
        if bytes <= self.bytes {
            return Ok(());
        }
        self.release();
        let bytes = bytes.next_power_of_two();
        // SAFETY: the address is written.
        let code = unsafe { (self.device.cuda.alloc)(&raw mut self.start, bytes) };
        done("cuMemAlloc", code)?;
        self.bytes = bytes;
        Ok(())
    }

    fn release(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated by `hold`, and no work on the stream uses it: calls complete
            // before.
            unsafe { (self.device.cuda.free)(self.start) };
            (self.start, self.bytes) = (0, 0);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.device.enter();
        self.release();
    }
}
