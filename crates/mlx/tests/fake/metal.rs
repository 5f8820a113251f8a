//! MLX with an Apple GPU. The system wakes a processor that waits for it 300 us late, unless
//! `MLX_METAL_FAST_SYNCH` is `1`. The GPU is then wedged once the file exists which `PACELINE_HANG`
//! names. All else is from the library that this one is linked with.

mod gpu;
mod real;

use std::ffi::c_int;
use std::time::Duration;

use real::Handle;

#[unsafe(no_mangle)]
pub extern "C" fn mlx_metal_is_available(is: *mut bool) -> c_int {
    unsafe { *is = true };
    0
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
