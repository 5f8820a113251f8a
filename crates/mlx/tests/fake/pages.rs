//! MLX with a device that takes memory of its caller in place, and only as whole pages, as Metal
//! does. It never gives that memory back, so that a test sees what was taken. All else is from the
//! library that `PACELINE_MLXC` names, which this one is linked with.

use std::ffi::{c_int, c_void};

#[repr(C)]
pub struct Handle(*mut c_void);

/// `MLX_UINT8`, the only type that is taken.
const U8: c_int = 1;

#[link(name = "mlxc")]
unsafe extern "C" {
    fn mlx_array_new_data(
        data: *const c_void,
        shape: *const c_int,
        dim: c_int,
        dtype: c_int,
    ) -> Handle;
    safe fn getpagesize() -> c_int;
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_array_new_data_managed_payload(
    data: *mut c_void,
    shape: *const c_int,
    dim: c_int,
    dtype: c_int,
    _payload: *mut c_void,
    _dtor: extern "C" fn(*mut c_void),
) -> Handle {
    let page = getpagesize() as usize;
    let sizes = unsafe { std::slice::from_raw_parts(shape, dim as usize) };
    let bytes: c_int = sizes.iter().product();
    if dtype != U8 || data as usize % page != 0 || bytes as usize % page != 0 {
        return Handle(std::ptr::null_mut());
    }
    unsafe { mlx_array_new_data(data, shape, dim, dtype) }
}
