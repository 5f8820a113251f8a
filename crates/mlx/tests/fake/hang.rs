//! MLX with a device that hangs. Once the file that `PACELINE_HANG` names is there, no evaluation
//! ends, and the process does not end in order either. All else is from the library that this one
//! is linked with.

mod real;

use std::ffi::c_int;

use real::Handle;

unsafe extern "C" {
    fn atexit(run: extern "C" fn()) -> c_int;
}

extern "C" fn forever() {
    loop {
        std::thread::park();
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    if std::env::var_os("PACELINE_HANG").is_some_and(|file| std::path::Path::new(&file).exists()) {
        unsafe { atexit(forever) };
        forever();
    }
    real::eval(arrays)
}
