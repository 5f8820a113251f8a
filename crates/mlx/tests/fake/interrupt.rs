//! MLX on a Mac whose system interrupts work of the GPU: once for each time that the file exists
//! which `PACELINE_INTERRUPT` names. All else is from the library that this one is linked with.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

#[repr(C)]
pub struct Handle(*mut c_void);

type Handler = extern "C" fn(*const c_char, *mut c_void);

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

static HANDLER: OnceLock<Handler> = OnceLock::new();

/// A function of the real library, which was loaded with this one.
fn real(name: &CStr) -> *mut c_void {
    const LOADED: c_int = 2 | 4; // RTLD_NOW, RTLD_NOLOAD
    unsafe { dlsym(dlopen(c"libmlxc.so".as_ptr(), LOADED), name.as_ptr()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_set_error_handler(
    handler: Handler,
    data: *mut c_void,
    drop: Option<extern "C" fn(*mut c_void)>,
) {
    HANDLER.get_or_init(|| handler);
    type Set = extern "C" fn(Handler, *mut c_void, Option<extern "C" fn(*mut c_void)>);
    let set: Set = unsafe { std::mem::transmute(real(c"mlx_set_error_handler")) };
    set(handler, data, drop);
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    let file = std::env::var_os("PACELINE_INTERRUPT");
    if file.is_some_and(|file| std::fs::remove_file(file).is_ok()) {
        let said = c"[METAL] Command buffer execution failed: Impacting Interactivity \
            (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity). at /t.cpp:73";
        HANDLER.get().unwrap()(said.as_ptr(), std::ptr::null_mut());
        return 1;
    }
    let eval: extern "C" fn(Handle) -> c_int = unsafe { std::mem::transmute(real(c"mlx_eval")) };
    eval(arrays)
}
