//! MLX on a slow device: an evaluation takes 100 ms more for each layer, while the file exists
//! which `PACELINE_SLOW` names. A layer's keys and values are two of the arrays that a step
//! evaluates. All else is from the library that this one is linked with.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::Duration;

const LAYER: Duration = Duration::from_millis(100);

#[repr(C)]
pub struct Handle(*mut c_void);

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

/// A function of the real library, which was loaded with this one.
fn real(name: &CStr) -> *mut c_void {
    const LOADED: c_int = 2 | 4; // RTLD_NOW, RTLD_NOLOAD
    unsafe { dlsym(dlopen(c"libmlxc.so".as_ptr(), LOADED), name.as_ptr()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    let is_slow = std::env::var_os("PACELINE_SLOW");
    if is_slow.is_some_and(|file| std::fs::exists(file).is_ok_and(|it| it)) {
        type Size = extern "C" fn(Handle) -> usize;
        let size: Size = unsafe { std::mem::transmute(real(c"mlx_vector_array_size")) };
        let layers = size(Handle(arrays.0)) / 2;
        std::thread::sleep(LAYER * layers as u32);
    }
    let eval: extern "C" fn(Handle) -> c_int = unsafe { std::mem::transmute(real(c"mlx_eval")) };
    eval(arrays)
}
