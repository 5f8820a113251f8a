//! NCCL and the CUDA driver as tables of functions, opened at run time.
//!
//! Only the functions that this backend calls. The signatures are those of `nccl.h` 2.10 to 2.28
//! and of `cuda.h` 11 and 12, which are unchanged in between. Libraries of other versions are
//! refused.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;

use libloading::Library;

/// 2.10, the first with bfloat16. As `NCCL_VERSION_CODE` counts since 2.9: X * 10000 + Y * 100 + Z.
const VERSION_MIN: c_int = 21_000;

/// The next major version may change anything.
const VERSION_END: c_int = 30_000;

/// The name in NVIDIA's runtime packages, then the development link.
const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The driver's own name on Linux.
const CUDA_NAMES: [&str; 1] = ["libcuda.so.1"];

/// Paths of the libraries, if they are not on the system's search path.
#[derive(Clone, Debug, Default)]
pub struct Libraries {
    pub nccl: Option<PathBuf>,
    pub cuda: Option<PathBuf>,
}

/// Why the libraries cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The library is missing or invalid.
    #[error("open {name}: {source}")]
    Missing {
        name: String,
        source: libloading::Error,
    },
    #[error("{library} has no {symbol}: {source}")]
    Symbol {
        library: &'static str,
        symbol: &'static str,
        source: libloading::Error,
    },
    #[error("nccl version {got}, expected {min} or later and before {end}")]
    Version {
        got: i32,
        /// The first supported version.
        min: i32,
        /// The first unsupported version after it.
        end: i32,
    },
    #[error("{call} failed with code {code}")]
    Call { call: &'static str, code: i32 },
    #[error("no cuda device")]
    NoDevice,
}

/// NCCL's id of a new group: `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// An address in a GPU's memory: `CUdeviceptr`.
pub(super) type DevicePtr = u64;

/// `ncclComm_t`, `CUcontext` and `CUstream`: opaque addresses.
pub(super) type Opaque = *mut c_void;

/// Declares a table: fields with their symbols and types, all resolved by `open`.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident, $library:literal;
     $($field:ident = $symbol:literal: fn($($arg:ty),*);)*) => {
        $(#[$doc])*
        pub(super) struct $name {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            /// Keeps the functions in memory.
            _library: Library,
        }

        impl $name {
            /// Resolves all functions.
            fn of(library: Library) -> Result<Self, OpenError> {
                $(
                    // SAFETY: the type is that of the library's header, as the module says.
                    let $field = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> c_int>($symbol)
                    };
                    let $field = *$field.map_err(|source| OpenError::Symbol {
                        library: $library,
                        symbol: $symbol,
                        source,
                    })?;
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

table! {
    /// NCCL. Codes: 0 is success, 7 in progress.
    Nccl, "nccl";
    get_version = "ncclGetVersion": fn(*mut c_int);
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId);
    comm_init_rank = "ncclCommInitRank": fn(*mut Opaque, c_int, UniqueId, c_int);
    comm_destroy = "ncclCommDestroy": fn(Opaque);
    comm_abort = "ncclCommAbort": fn(Opaque);
    async_error = "ncclCommGetAsyncError": fn(Opaque, *mut c_int);
    all_reduce = "ncclAllReduce":
        fn(DevicePtr, DevicePtr, usize, c_int, c_int, Opaque, Opaque);
    all_gather = "ncclAllGather": fn(DevicePtr, DevicePtr, usize, c_int, Opaque, Opaque);
    reduce_scatter = "ncclReduceScatter":
        fn(DevicePtr, DevicePtr, usize, c_int, c_int, Opaque, Opaque);
    broadcast = "ncclBroadcast":
        fn(DevicePtr, DevicePtr, usize, c_int, c_int, Opaque, Opaque);
    send = "ncclSend": fn(DevicePtr, usize, c_int, c_int, Opaque, Opaque);
    recv = "ncclRecv": fn(DevicePtr, usize, c_int, c_int, Opaque, Opaque);
    group_start = "ncclGroupStart": fn();
    group_end = "ncclGroupEnd": fn();
}

table! {
    /// The CUDA driver. Codes: 0 is success, 600 not ready.
    Cuda, "cuda";
    init = "cuInit": fn(u32);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device = "cuDeviceGet": fn(*mut c_int, c_int);
    retain_context = "cuDevicePrimaryCtxRetain": fn(*mut Opaque, c_int);
    set_context = "cuCtxSetCurrent": fn(Opaque);
    alloc = "cuMemAlloc_v2": fn(*mut DevicePtr, usize);
    free = "cuMemFree_v2": fn(DevicePtr);
    to_device = "cuMemcpyHtoD_v2": fn(DevicePtr, *const c_void, usize);
    to_host = "cuMemcpyDtoH_v2": fn(*mut c_void, DevicePtr, usize);
    stream_create = "cuStreamCreate": fn(*mut Opaque, u32);
    stream_query = "cuStreamQuery": fn(Opaque);
    stream_destroy = "cuStreamDestroy_v2": fn(Opaque);
}

/// The result of call `call` with return code `code`.
pub(super) const fn done(call: &'static str, code: c_int) -> Result<(), OpenError> {
    match code {
        0 => Ok(()),
        code => Err(OpenError::Call { call, code }),
    }
}

fn open(path: Option<&PathBuf>, names: &[&str]) -> Result<Library, OpenError> {
    let given: Vec<String> = match path {
        Some(path) => vec![path.to_string_lossy().into_owned()],
        None => names.iter().map(ToString::to_string).collect(),
    };
    let mut first = None;
    for name in given {
        // SAFETY: the user who installed a library of this name, or passed its path, trusts its
        // initialisers.
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok(library),
            Err(source) => {
                first.get_or_insert(OpenError::Missing { name, source });
            }
        }
    }
    Err(first.expect("there is at least one name"))
}

/// Opens both, NCCL first.
pub(super) fn open_all(libraries: &Libraries) -> Result<(Nccl, Cuda), OpenError> {
    let nccl = Nccl::of(open(libraries.nccl.as_ref(), &NCCL_NAMES)?)?;
    let mut got = 0;
    // SAFETY: the number is written.
    done("ncclGetVersion", unsafe {
        (nccl.get_version)(&raw mut got)
    })?;
    if !(VERSION_MIN..VERSION_END).contains(&got) {
        let (min, end) = (VERSION_MIN, VERSION_END);
        return Err(OpenError::Version { got, min, end });
    }
    let cuda = Cuda::of(open(libraries.cuda.as_ref(), &CUDA_NAMES)?)?;
    Ok((nccl, cuda))
}
