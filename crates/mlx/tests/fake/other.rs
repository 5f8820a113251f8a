//! A library with MLX's version functions and nothing else, for tests of versions and of the
//! environment, which it states as its version.

#[repr(C)]
pub struct Handle(*mut u8);

#[unsafe(no_mangle)]
pub extern "C" fn mlx_string_new() -> Handle {
    Handle(std::ptr::null_mut())
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_string_data(string: Handle) -> *const u8 {
    string.0
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_string_free(_: Handle) -> i32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_version(out: &mut Handle) -> i32 {
    out.0 = if cfg!(right_version) {
        c"0.32.7".as_ptr().cast_mut().cast()
    } else if cfg!(states_tf32) {
        match std::env::var("MLX_ENABLE_TF32").as_deref() {
            Ok("0") => c"without TF32".as_ptr().cast_mut().cast(),
            _ => c"with TF32".as_ptr().cast_mut().cast(),
        }
    } else {
        c"0.31.1".as_ptr().cast_mut().cast()
    };
    0
}
