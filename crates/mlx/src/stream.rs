//! Devices, and the queues of work on them.

use std::ffi::{CString, c_int};
use std::time::{Duration, Instant};

use crate::library::{done, failed};
use crate::table::ObjectHandle;
use crate::{Array, Error, Library};

/// Longest polling for a GPU before [`Stream::wait`] blocks. A blocked thread wakes up some 150 us
/// late on Metal (mlx #4438). A segment between exchanges is half a layer, which two Macs compute
/// in 0.2 ms for a 70B model in 4 bits. MLX's CPU build is not polled: a
/// blocked wait takes 14 us and a polled one 26 us (2 cores, November 2026).
const POLLED: Duration = Duration::from_millis(1);

paceline_base::named_enum! {
    /// Where MLX computes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum DeviceKind {
        Cpu = "cpu",
        /// The GPU: Metal or CUDA.
        Gpu = "gpu",
    }
}

impl DeviceKind {
    /// `mlx_device_type`
    pub(crate) const fn number(self) -> c_int {
        match self {
            Self::Cpu => 0,
            Self::Gpu => 1,
        }
    }
}

/// A queue of work on a device, of the thread that made it. Operations on arrays are its methods;
/// they only note what is to be computed, until [`eval`](Self::eval).
#[derive(derive_more::Debug)]
#[debug("stream on {} of {:?}", self.device, self.library)]
pub struct Stream {
    pub(crate) library: Library,
    pub(crate) handle: ObjectHandle,
    device: DeviceKind,
}

/// A device's handle, given back at the end.
struct DeviceHandle<'a>(ObjectHandle, &'a Library);

impl<'a> DeviceHandle<'a> {
    fn new(library: &'a Library, device: DeviceKind) -> Self {
        // SAFETY: any number of device is taken.
        let handle = unsafe { (library.table().device_new_type)(device.number(), 0) };
        Self(handle, library)
    }
}

impl Drop for DeviceHandle<'_> {
    fn drop(&mut self) {
        // SAFETY: a live handle, used nowhere else.
        unsafe { (self.1.table().device_free)(self.0) };
    }
}

impl Stream {
    pub(crate) fn new(library: &Library, device: DeviceKind) -> Result<Self, Error> {
        if !library.has(device)? {
            let device = device.name();
            return Err(Error::NoDevice { device });
        }
        let (table, on) = (library.table(), DeviceHandle::new(library, device));
        // SAFETY: live handles. The default stream of the thread is set too, for what MLX
        // computes by itself.
        unsafe {
            done("mlx_set_default_device", (table.set_default_device)(on.0))?;
            let handle = (table.stream_new_device)(on.0);
            if handle.0.is_null() {
                return Err(failed("mlx_stream_new_device"));
            }
            let stream = Self {
                library: library.clone(),
                handle,
                device,
            };
            done("mlx_set_default_stream", (table.set_default_stream)(handle))?;
            Ok(stream)
        }
    }

    pub const fn library(&self) -> &Library {
        &self.library
    }

    pub const fn device(&self) -> DeviceKind {
        self.device
    }

    /// Whether the device computes in the machine's own memory, so that the processor reads and
    /// writes arrays in place. A CUDA card does not: its driver moves them.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn shares_memory(&self) -> Result<bool, Error> {
        Ok(self.library.backend(self.device)? != "cuda")
    }

    /// A number that the device states of itself under one of `keys`: the first that it knows.
    pub(crate) fn fact(&self, keys: &[&str]) -> Option<u64> {
        let table = self.library.table();
        let on = DeviceHandle::new(&self.library, self.device);
        // SAFETY: live handles; numbers are written before they are read.
        unsafe {
            let mut info = (table.device_info_new)();
            let mut found = None;
            if (table.device_info_get)(&raw mut info, on.0) == 0 {
                found = keys.iter().find_map(|key| {
                    let key = CString::new(*key).ok()?;
                    let (mut there, mut text, mut size) = (false, false, 0);
                    let asked = (table.device_info_has_key)(&raw mut there, info, key.as_ptr());
                    if asked != 0 || !there {
                        return None;
                    }
                    (table.device_info_is_string)(&raw mut text, info, key.as_ptr());
                    let got = (table.device_info_get_size)(&raw mut size, info, key.as_ptr());
                    (!text && got == 0).then_some(size as u64)
                });
            }
            (table.device_info_free)(info);
            found
        }
    }

    /// The device's name for people, such as `Apple M4 Max`.
    pub fn device_name(&self) -> Option<String> {
        let table = self.library.table();
        let on = DeviceHandle::new(&self.library, self.device);
        // SAFETY: live handles; the string is copied before the handle is given back.
        unsafe {
            let mut info = (table.device_info_new)();
            let mut text = std::ptr::null();
            let (mut there, key) = (false, c"device_name");
            let known = (table.device_info_get)(&raw mut info, on.0) == 0
                && (table.device_info_has_key)(&raw mut there, info, key.as_ptr()) == 0
                && there
                && (table.device_info_get_string)(&raw mut text, info, key.as_ptr()) == 0
                && !text.is_null();
            let name = known.then(|| {
                std::ffi::CStr::from_ptr(text)
                    .to_string_lossy()
                    .into_owned()
            });
            (table.device_info_free)(info);
            name
        }
    }

    /// Computes `arrays` and what they depend on, and waits for it. Blocks as long as that takes:
    /// a device that hangs never returns, so callers have somebody watch them.
    ///
    /// # Errors
    /// [`Error::Call`] for failures that MLX detects only here, such as exhausted memory.
    pub fn eval<'a>(&self, arrays: impl IntoIterator<Item = &'a Array>) -> Result<(), Error> {
        done("mlx_eval", self.with_all(arrays, self.library.table().eval))
    }

    /// Submits `arrays` and what they depend on to the device, and returns while it computes. An
    /// [`eval`](Self::eval) of one of them waits for it.
    ///
    /// # Errors
    /// As [`eval`](Self::eval), for failures that MLX detects before the device computes.
    pub fn submit<'a>(&self, arrays: impl IntoIterator<Item = &'a Array>) -> Result<(), Error> {
        let f = self.library.table().async_eval;
        done("mlx_async_eval", self.with_all(arrays, f))
    }

    /// As [`eval`](Self::eval), of arrays that were submitted. It polls a GPU for a bounded time
    /// before it blocks, since a blocked thread wakes up late.
    ///
    /// # Errors
    /// As [`eval`](Self::eval).
    pub fn wait<'a>(
        &self,
        arrays: impl IntoIterator<Item = &'a Array> + Clone,
    ) -> Result<(), Error> {
        let start = Instant::now();
        while self.device == DeviceKind::Gpu && start.elapsed() < POLLED {
            let mut all = arrays.clone().into_iter().map(Array::is_computed);
            // An array that fails says why when it is evaluated.
            if all.all(|computed| computed.unwrap_or(true)) {
                break;
            }
            std::hint::spin_loop();
        }
        self.eval(arrays)
    }

    /// Calls `f` with a vector of `arrays`.
    fn with_all<'a>(
        &self,
        arrays: impl IntoIterator<Item = &'a Array>,
        f: unsafe extern "C" fn(ObjectHandle) -> c_int,
    ) -> c_int {
        let handles: Vec<ObjectHandle> = arrays.into_iter().map(|array| array.handle).collect();
        let table = self.library.table();
        // SAFETY: live handles; the vector copies them.
        unsafe {
            let vector = (table.vector_array_new_data)(handles.as_ptr(), handles.len());
            let code = f(vector);
            (table.vector_array_free)(vector);
            code
        }
    }

    /// Waits until all of this queue's work is over.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: a live handle.
        done("mlx_synchronize", unsafe {
            (self.library.table().synchronize)(self.handle)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: a live handle, used nowhere else.
        unsafe { (self.library.table().stream_free)(self.handle) };
    }
}
