//! MLX with an Apple GPU. The system wakes a processor that waits for it 300 us late, unless
//! `MLX_METAL_FAST_SYNCH` is `1`. The GPU is then wedged once the file exists which `PACELINE_HANG`
//! names. Its operations run on the processor. All else is from the library that this one is linked
//! with.

mod real;

use std::ffi::{c_int, c_void};
use std::time::Duration;

use real::Handle;

const GPU: c_int = 1;

#[unsafe(no_mangle)]
pub extern "C" fn mlx_device_count(count: *mut c_int, _: c_int) -> c_int {
    unsafe { *count = 1 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_metal_is_available(is: *mut bool) -> c_int {
    unsafe { *is = true };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_device_new_type(_: c_int, index: c_int) -> *mut c_void {
    type New = extern "C" fn(c_int, c_int) -> *mut c_void;
    let new: New = unsafe { std::mem::transmute(real::function(c"mlx_device_new_type")) };
    new(GPU - 1, index)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    if std::env::var_os("MLX_METAL_FAST_SYNCH").is_none_or(|value| value != "1") {
        let evaluated = real::eval(arrays);
        std::thread::sleep(Duration::from_micros(300));
        return evaluated;
    }
    let hang = std::env::var_os("PACELINE_HANG");
    while hang.as_ref().is_some_and(|file| std::path::Path::new(file).exists()) {
        std::thread::park_timeout(Duration::from_secs(1));
    }
    real::eval(arrays)
}
