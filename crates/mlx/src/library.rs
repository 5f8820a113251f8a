//! The opened library.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::group::GroupTable;
use crate::library_paths::LIBRARY_NAME;
use crate::table::{ObjectHandle, Table, VERSION};
use crate::{DeviceKind, Error, LibraryPaths, Stream, exit, library_file};

/// File names of MLX itself, which `libmlxc` loads. A file in the same folder is checked too.
const BESIDE: [&str; 2] = ["libmlx.so", "libmlx.dylib"];

thread_local! {
    /// Message of the last call that failed on this thread. The handler is called by the call
    /// itself, before it returns.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the message instead of ending the process, which is mlx-c's default.
extern "C" fn keep(message: *const c_char, _: *mut c_void) {
    if message.is_null() {
        return;
    }
    // SAFETY: mlx-c passes a string that ends with 0 and lives during this call.
    let message = unsafe { CStr::from_ptr(message) };
    let message = message.to_string_lossy().into_owned();
    // No panic may leave this function; on a thread that is ending there is nobody to tell.
    let _ = SAID.try_with(|said| said.replace(Some(message)));
}

/// MLX, opened and checked. Clones share it; it stays loaded until the process ends, since its
/// threads do.
#[derive(Clone, derive_more::Debug)]
#[debug("mlx {} of {}", self.version, self.path.display())]
pub struct Library {
    table: Arc<Table>,
    group: Option<GroupTable>,
    path: PathBuf,
    version: String,
}

impl Library {
    /// Opens the first library of `library_paths` that can be used. Others are passed over: an MLX
    /// of another version may be on the machine for another program.
    ///
    /// # Errors
    /// - [`Error::NotFound`] with all places, where none has a library;
    /// - what [`load`](Self::load) says of the only library there is;
    /// - [`Error::NoneFits`] with what it says of each of several.
    pub fn open(places: &LibraryPaths) -> Result<Self, Error> {
        let mut refused = Vec::new();
        for path in places.found() {
            match Self::load(&path) {
                Ok(library) => return Ok(library),
                Err(error) => refused.push(error),
            }
        }
        Err(match refused.len() {
            0 => Error::NotFound {
                name: LIBRARY_NAME,
                looked: places.candidates(),
            },
            1 => refused.remove(0),
            _ => Error::NoneFits { refused },
        })
    }

    /// Opens the library at `path`. Environment variables of MLX, such as [`TF32`](crate::TF32),
    /// are set before that or have no effect.
    ///
    /// # Errors
    /// - [`Error::Read`], [`Error::Truncated`], [`Error::NotALibrary`], [`Error::Load`] for a file
    ///   that cannot be used;
    /// - [`Error::Version`] for one of another version;
    /// - [`Error::Symbol`] for one without a function that is needed.
    pub fn load(path: &Path) -> Result<Self, Error> {
        library_file::check(path)?;
        // The loader finds an MLX in the folder of the C layer, with symbolic links resolved.
        let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let beside = BESIDE.iter().map(|name| real.with_file_name(name));
        for other in beside.filter(|other| other.is_file()) {
            library_file::check(&other)?;
        }
        // SAFETY: runs the initialisers of a library that the user installed or named for this.
        let library = unsafe { libloading::Library::new(path) }.map_err(|source| Error::Load {
            path: path.to_path_buf(),
            source,
        })?;
        exit::note_loaded();
        let version = version(&library, path)?;
        check_version(&version, path)?;
        let table = Table::look_up(&library, path)?;
        let group = GroupTable::look_up(&library);
        // SAFETY: the handler never unwinds and needs no data.
        unsafe { (table.set_error_handler)(keep, std::ptr::null_mut(), None) };
        std::mem::forget(library);
        Ok(Self {
            table: Arc::new(table),
            group,
            path: path.to_path_buf(),
            version,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// MLX's version, such as `0.32.2`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The functions.
    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// The functions of [groups in the graph](crate::GraphGroup), if this layer has them.
    pub(crate) const fn group(&self) -> Option<&GroupTable> {
        self.group.as_ref()
    }

    /// The best device: a GPU where this build of MLX has one.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn best_device(&self) -> Result<DeviceKind, Error> {
        let gpu = self.has(DeviceKind::Gpu)?;
        Ok(if gpu {
            DeviceKind::Gpu
        } else {
            DeviceKind::Cpu
        })
    }

    /// Whether there is a device of this kind.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn has(&self, device: DeviceKind) -> Result<bool, Error> {
        let mut count = 0;
        // SAFETY: the number is written.
        let code = unsafe { (self.table.device_count)(&raw mut count, device.number()) };
        done("mlx_device_count", code)?;
        Ok(count > 0)
    }

    /// Name of the backend that computes on `device`: `metal`, `cuda` or `cpu`.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn backend(&self, device: DeviceKind) -> Result<&'static str, Error> {
        if device == DeviceKind::Cpu {
            return Ok("cpu");
        }
        let mut metal = false;
        // SAFETY: the truth value is written.
        let code = unsafe { (self.table.metal_is_available)(&raw mut metal) };
        done("mlx_metal_is_available", code)?;
        Ok(if metal { "metal" } else { "cuda" })
    }

    /// A new queue on `device`, of this thread.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Call`].
    pub fn stream(&self, device: DeviceKind) -> Result<Stream, Error> {
        Stream::new(self, device)
    }
}

/// MLX's version by itself, before the other functions are looked for.
fn version(library: &libloading::Library, path: &Path) -> Result<String, Error> {
    fn get<T: Copy>(
        library: &libloading::Library,
        path: &Path,
        symbol: &'static str,
    ) -> Result<T, Error> {
        // SAFETY: the callers give the types of the headers, the same in all versions so far.
        let found = unsafe { library.get::<T>(symbol.as_bytes()) };
        found.map(|found| *found).map_err(|_| Error::Symbol {
            path: path.to_path_buf(),
            symbol,
        })
    }
    let new: unsafe extern "C" fn() -> ObjectHandle = get(library, path, "mlx_string_new")?;
    let data: unsafe extern "C" fn(ObjectHandle) -> *const c_char =
        get(library, path, "mlx_string_data")?;
    let free: unsafe extern "C" fn(ObjectHandle) -> c_int = get(library, path, "mlx_string_free")?;
    let version: unsafe extern "C" fn(*mut ObjectHandle) -> c_int =
        get(library, path, "mlx_version")?;
    // SAFETY: the string is made, written, read and given back.
    unsafe {
        let mut string = new();
        let code = version(&raw mut string);
        let text = data(string);
        let version = if code == 0 && !text.is_null() {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        } else {
            "unknown".to_owned()
        };
        free(string);
        Ok(version)
    }
}

fn check_version(got: &str, path: &Path) -> Result<(), Error> {
    let rest = got.strip_prefix(VERSION);
    if rest.is_some_and(|rest| rest.starts_with('.')) {
        return Ok(());
    }
    Err(Error::Version {
        path: path.to_path_buf(),
        got: got.to_owned(),
        expected: VERSION,
    })
}

/// The return code of a call, as a result.
pub(crate) fn done(call: &'static str, code: c_int) -> Result<(), Error> {
    if code == 0 {
        return Ok(());
    }
    Err(failed(call))
}

pub(crate) fn failed(call: &'static str) -> Error {
    let message = SAID.take();
    // Behind it, mlx-c says where in its own sources it was.
    let message = message.unwrap_or_else(|| "no reason given".to_owned());
    let end = message.rfind(" at ").unwrap_or(message.len());
    Error::of_call(call, message[..end].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_of_the_table_are_taken() {
        let path = Path::new("lib");
        for good in ["0.32.0", "0.32.2", "0.32.9.dev20260101+abc"] {
            check_version(good, path).unwrap();
        }
        for bad in ["0.31.9", "0.33.0", "0.320.1", "0.32", "1.32.0", "unknown"] {
            let error = check_version(bad, path).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("mlx: lib is of version {bad}, expected 0.32.x")
            );
        }
    }

    /// Texts as people have reported them, and one that is no interruption.
    #[test]
    fn work_that_the_system_interrupted_is_told_apart() {
        for (text, interrupted) in [
            (
                "[METAL] Command buffer execution failed: Impacting Interactivity \
                 (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
                true,
            ),
            (
                "[METAL] Command buffer execution failed: Caused GPU Timeout Error \
                 (00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
                true,
            ),
            (
                "[METAL] Command buffer execution failed: Insufficient Memory \
                 (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
                false,
            ),
        ] {
            let said = std::ffi::CString::new(format!("{text} at /a/transforms.cpp:73")).unwrap();
            keep(said.as_ptr(), std::ptr::null_mut());
            let error = done("mlx_eval", 1).unwrap_err();
            assert_eq!(error.is_interrupted(), interrupted, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn messages_are_kept_for_the_call_that_failed() {
        keep(
            c"[reshape] Cannot at all at /a/b.cpp:12".as_ptr(),
            std::ptr::null_mut(),
        );
        let error = done("mlx_reshape", 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "mlx: mlx_reshape: [reshape] Cannot at all"
        );
        let error = done("mlx_add", 1).unwrap_err();
        assert_eq!(error.to_string(), "mlx: mlx_add: no reason given");
    }
}
