//! MLX with a device that hangs. Once the file that `PACELINE_HANG` names is there, no evaluation
//! ends, and the process does not end in order either. All else is from the library that
//! `PACELINE_MLXC` names, which this one is linked with.

use std::ffi::{CString, c_char, c_int, c_void};

#[repr(C)]
pub struct Handle(*mut c_void);

#[link(name = "mlxc")]
unsafe extern "C" {
    fn mlx_version(out: *mut Handle) -> c_int;
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn atexit(run: extern "C" fn()) -> c_int;
}

/// Keeps the linker from leaving the library out.
#[used]
static NEEDED: unsafe extern "C" fn(*mut Handle) -> c_int = mlx_version;

extern "C" fn forever() {
    loop {
        std::thread::park();
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    const NOW: c_int = 2;
    if std::env::var_os("PACELINE_HANG").is_some_and(|file| std::path::Path::new(&file).exists()) {
        unsafe { atexit(forever) };
        forever();
    }
    let path = CString::new(std::env::var("PACELINE_MLXC").unwrap()).unwrap();
    unsafe {
        let eval = dlsym(dlopen(path.as_ptr(), NOW), c"mlx_eval".as_ptr());
        let eval: extern "C" fn(Handle) -> c_int = std::mem::transmute(eval);
        eval(arrays)
    }
}
