//! A GPU whose operations run on the processor, for imitations of MLX with one.

use std::ffi::{c_int, c_void};

use crate::real;

const GPU: c_int = 1;

#[unsafe(no_mangle)]
pub extern "C" fn mlx_device_count(count: *mut c_int, _: c_int) -> c_int {
    unsafe { *count = 1 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_device_new_type(_: c_int, index: c_int) -> *mut c_void {
    type New = extern "C" fn(c_int, c_int) -> *mut c_void;
    let new: New = unsafe { std::mem::transmute(real::function(c"mlx_device_new_type")) };
    new(GPU - 1, index)
}
