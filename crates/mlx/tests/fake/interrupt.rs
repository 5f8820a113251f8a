//! MLX on a Mac whose system interrupts work of the GPU: once for each time that the file exists
//! which `PACELINE_INTERRUPT` names. All else is from the library that this one is linked with.

mod real;

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use real::Handle;

type Handler = extern "C" fn(*const c_char, *mut c_void);

static HANDLER: OnceLock<Handler> = OnceLock::new();

#[unsafe(no_mangle)]
pub extern "C" fn mlx_set_error_handler(
    handler: Handler,
    data: *mut c_void,
    drop: Option<extern "C" fn(*mut c_void)>,
) {
    HANDLER.get_or_init(|| handler);
    type Set = extern "C" fn(Handler, *mut c_void, Option<extern "C" fn(*mut c_void)>);
    let set: Set = unsafe { std::mem::transmute(real::function(c"mlx_set_error_handler")) };
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
    real::eval(arrays)
}
