//! The real library, which each imitation of MLX is linked with.

use std::ffi::{CStr, c_char, c_int, c_void};

#[repr(C)]
pub struct Handle(pub *mut c_void);

#[link(name = "mlxc")]
unsafe extern "C" {
    fn mlx_version(out: *mut Handle) -> c_int;
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Keeps the linker from leaving the library out.
#[used]
static NEEDED: unsafe extern "C" fn(*mut Handle) -> c_int = mlx_version;

/// A function of the real library, which the loader loaded with the imitation.
pub fn function(name: &CStr) -> *mut c_void {
    const LOADED: c_int = 2 | 4; // RTLD_NOW, RTLD_NOLOAD
    unsafe { dlsym(dlopen(c"libmlxc.so".as_ptr(), LOADED), name.as_ptr()) }
}

/// Evaluates `arrays` by the real library.
pub fn eval(arrays: Handle) -> c_int {
    type Eval = extern "C" fn(Handle) -> c_int;
    let eval: Eval = unsafe { std::mem::transmute(function(c"mlx_eval")) };
    eval(arrays)
}
