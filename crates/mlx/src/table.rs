//! The C functions that are used, with their types.
//!
//! Version 4 of the table: mlx-c 0.7.0, which is made for MLX 0.32 ([`VERSION`]). The API states no
//! version of its own, so MLX's is checked at load. All of mlx-c's handles are structures of one
//! pointer, passed by value. Functions return 0, or another number after the error handler was
//! called.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

use crate::Error;

/// Major and minor version of MLX that the table is for.
pub const VERSION: &str = "0.32";

/// A handle: `mlx_array`, `mlx_stream`, `mlx_device`, `mlx_string`, `mlx_vector_array`,
/// `mlx_closure`, `mlx_device_info` alike. Null is a handle of nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectHandle(pub(crate) *mut c_void);

impl ObjectHandle {
    pub(crate) const NONE: Self = Self(std::ptr::null_mut());
}

/// `mlx_optional_int`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptionalInt {
    pub(crate) value: c_int,
    pub(crate) has_value: bool,
}

/// `mlx_optional_float`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptionalFloat {
    pub(crate) value: f32,
    pub(crate) has_value: bool,
}

/// `mlx_optional_dtype`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptionalDtype {
    pub(crate) value: c_int,
    pub(crate) has_value: bool,
}

/// `mlx_error_handler_func`
pub(crate) type ErrorHandler = extern "C" fn(*const c_char, *mut c_void);

/// A function that frees the memory that an array was made of.
pub(crate) type Destructor = extern "C" fn(*mut c_void);

/// A function of arrays, for MLX to call: its results, its inputs, its payload.
pub(crate) type ClosureFunction =
    extern "C" fn(*mut ObjectHandle, ObjectHandle, *mut c_void) -> c_int;

type Out = *mut ObjectHandle;
type Ints = *const c_int;

/// Declares the table: every function with its types, all looked up by `look_up`.
macro_rules! table {
    ($($field:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions, by their names without the prefix `mlx_`.
        #[derive(Debug)]
        pub(crate) struct Table {
            /// `_mlx_array_is_available`, the only one with another prefix.
            pub(crate) is_available: unsafe extern "C" fn(*mut bool, ObjectHandle) -> c_int,
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Table {
            /// Looks all functions up.
            pub(crate) fn look_up(library: &Library, path: &Path) -> Result<Self, Error> {
                $(
                    // SAFETY: the type is that of the header of mlx-c, whose version is checked.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) $(-> $ret)?>(
                            concat!("mlx_", stringify!($field), "\0").as_bytes(),
                        )
                    };
                    let $field = *found.map_err(|_| Error::Symbol {
                        path: path.to_path_buf(),
                        symbol: concat!("mlx_", stringify!($field)),
                    })?;
                )*
                let symbol = "_mlx_array_is_available";
                // SAFETY: as above.
                let is_available = unsafe { library.get(symbol.as_bytes()) };
                let is_available = *is_available.map_err(|_| Error::Symbol {
                    path: path.to_path_buf(),
                    symbol,
                })?;
                Ok(Self { is_available, $($field),* })
            }
        }
    };
}

table! {
    // error.h; version.h and string.h are looked up before: see `library::version`
    set_error_handler: fn(ErrorHandler, *mut c_void, Option<Destructor>);

    // device.h, metal.h
    device_new_type: fn(c_int, c_int) -> ObjectHandle;
    device_free: fn(ObjectHandle) -> c_int;
    set_default_device: fn(ObjectHandle) -> c_int;
    device_count: fn(*mut c_int, c_int) -> c_int;
    device_info_new: fn() -> ObjectHandle;
    device_info_get: fn(Out, ObjectHandle) -> c_int;
    device_info_free: fn(ObjectHandle) -> c_int;
    device_info_has_key: fn(*mut bool, ObjectHandle, *const c_char) -> c_int;
    device_info_is_string: fn(*mut bool, ObjectHandle, *const c_char) -> c_int;
    device_info_get_string: fn(*mut *const c_char, ObjectHandle, *const c_char) -> c_int;
    device_info_get_size: fn(*mut usize, ObjectHandle, *const c_char) -> c_int;
    metal_is_available: fn(*mut bool) -> c_int;

    // stream.h
    stream_new_device: fn(ObjectHandle) -> ObjectHandle;
    stream_free: fn(ObjectHandle) -> c_int;
    set_default_stream: fn(ObjectHandle) -> c_int;
    synchronize: fn(ObjectHandle) -> c_int;

    // memory.h
    clear_cache: fn() -> c_int;
    get_active_memory: fn(*mut usize) -> c_int;
    get_cache_memory: fn(*mut usize) -> c_int;
    get_peak_memory: fn(*mut usize) -> c_int;
    get_memory_limit: fn(*mut usize) -> c_int;
    set_memory_limit: fn(*mut usize, usize) -> c_int;
    set_cache_limit: fn(*mut usize, usize) -> c_int;
    set_wired_limit: fn(*mut usize, usize) -> c_int;

    // array.h, vector.h, transforms.h
    array_new: fn() -> ObjectHandle;
    array_free: fn(ObjectHandle) -> c_int;
    array_set: fn(Out, ObjectHandle) -> c_int;
    array_new_float32: fn(f32) -> ObjectHandle;
    array_new_data: fn(*const c_void, Ints, c_int, c_int) -> ObjectHandle;
    array_ndim: fn(ObjectHandle) -> usize;
    array_shape: fn(ObjectHandle) -> Ints;
    array_strides: fn(ObjectHandle) -> *const usize;
    array_dtype: fn(ObjectHandle) -> c_int;
    array_nbytes: fn(ObjectHandle) -> usize;
    array_data_uint8: fn(ObjectHandle) -> *const u8;
    vector_array_new_data: fn(*const ObjectHandle, usize) -> ObjectHandle;
    vector_array_free: fn(ObjectHandle) -> c_int;
    vector_array_get: fn(Out, ObjectHandle, usize) -> c_int;
    vector_array_set_data: fn(Out, *const ObjectHandle, usize) -> c_int;
    vector_array_size: fn(ObjectHandle) -> usize;
    async_eval: fn(ObjectHandle) -> c_int;
    eval: fn(ObjectHandle) -> c_int;
    vjp: fn(Out, Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;

    // closure.h, compile.h
    closure_apply: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    closure_free: fn(ObjectHandle) -> c_int;
    closure_new_func_payload: fn(ClosureFunction, *mut c_void, Option<Destructor>) -> ObjectHandle;
    compile: fn(Out, ObjectHandle, bool) -> c_int;

    // ops.h
    abs: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    add: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    argmax_axis: fn(Out, ObjectHandle, c_int, bool, ObjectHandle) -> c_int;
    argpartition_axis: fn(Out, ObjectHandle, c_int, c_int, ObjectHandle) -> c_int;
    argsort_axis: fn(Out, ObjectHandle, c_int, ObjectHandle) -> c_int;
    astype: fn(Out, ObjectHandle, c_int, ObjectHandle) -> c_int;
    ceil: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    concatenate_axis: fn(Out, ObjectHandle, c_int, ObjectHandle) -> c_int;
    contiguous: fn(Out, ObjectHandle, bool, ObjectHandle) -> c_int;
    cumsum_axis: fn(Out, ObjectHandle, c_int, bool, bool, OptionalDtype, ObjectHandle) -> c_int;
    dequantize: fn(
        Out, ObjectHandle, ObjectHandle, ObjectHandle, OptionalInt, OptionalInt, *const c_char,
        ObjectHandle,
        OptionalDtype, ObjectHandle
    ) -> c_int;
    divide: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    exp: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    floor: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    gather_mm: fn(
        Out, ObjectHandle, ObjectHandle, ObjectHandle, ObjectHandle, bool, ObjectHandle
    ) -> c_int;
    gather_qmm: fn(
        Out, ObjectHandle, ObjectHandle, ObjectHandle, ObjectHandle, ObjectHandle, ObjectHandle,
        bool, OptionalInt, OptionalInt,
        *const c_char, bool, ObjectHandle
    ) -> c_int;
    less: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    log2: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    logaddexp: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    logsumexp_axis: fn(Out, ObjectHandle, c_int, bool, ObjectHandle) -> c_int;
    matmul: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    max_axis: fn(Out, ObjectHandle, c_int, bool, ObjectHandle) -> c_int;
    maximum: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    minimum: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    multiply: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    negative: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    power: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    put_along_axis: fn(
        Out, ObjectHandle, ObjectHandle, ObjectHandle, c_int, ObjectHandle
    ) -> c_int;
    hadamard_transform: fn(Out, ObjectHandle, OptionalFloat, ObjectHandle) -> c_int;
    quantize: fn(
        Out, ObjectHandle, OptionalInt, OptionalInt, *const c_char, ObjectHandle, ObjectHandle
    ) -> c_int;
    quantized_matmul: fn(
        Out, ObjectHandle, ObjectHandle, ObjectHandle, ObjectHandle, bool, OptionalInt, OptionalInt,
        *const c_char, ObjectHandle
    ) -> c_int;
    reshape: fn(Out, ObjectHandle, Ints, usize, ObjectHandle) -> c_int;
    round: fn(Out, ObjectHandle, c_int, ObjectHandle) -> c_int;
    rsqrt: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    sigmoid: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    slice: fn(Out, ObjectHandle, Ints, usize, Ints, usize, Ints, usize, ObjectHandle) -> c_int;
    slice_update: fn(
        Out, ObjectHandle, ObjectHandle, Ints, usize, Ints, usize, Ints, usize, ObjectHandle
    ) -> c_int;
    softmax_axis: fn(Out, ObjectHandle, c_int, bool, ObjectHandle) -> c_int;
    subtract: fn(Out, ObjectHandle, ObjectHandle, ObjectHandle) -> c_int;
    sum: fn(Out, ObjectHandle, bool, ObjectHandle) -> c_int;
    sum_axis: fn(Out, ObjectHandle, c_int, bool, ObjectHandle) -> c_int;
    take_along_axis: fn(Out, ObjectHandle, ObjectHandle, c_int, ObjectHandle) -> c_int;
    take_axis: fn(Out, ObjectHandle, ObjectHandle, c_int, ObjectHandle) -> c_int;
    tanh: fn(Out, ObjectHandle, ObjectHandle) -> c_int;
    transpose_axes: fn(Out, ObjectHandle, Ints, usize, ObjectHandle) -> c_int;
    zeros: fn(Out, Ints, usize, c_int, ObjectHandle) -> c_int;

    // fast.h
    fast_rms_norm: fn(Out, ObjectHandle, ObjectHandle, f32, ObjectHandle) -> c_int;
    fast_rope: fn(
        Out, ObjectHandle, c_int, bool, OptionalFloat, f32, c_int, ObjectHandle, ObjectHandle
    ) -> c_int;
    fast_rope_dynamic: fn(
        Out, ObjectHandle, c_int, bool, OptionalFloat, f32, ObjectHandle, ObjectHandle, ObjectHandle
    ) -> c_int;
    fast_scaled_dot_product_attention: fn(
        Out, ObjectHandle, ObjectHandle, ObjectHandle, f32, *const c_char, ObjectHandle,
        ObjectHandle, bool, ObjectHandle
    ) -> c_int;
}
