//! MLX whose exit handlers abort, as those of its CUDA build do. A process that comes to them
//! appends a line to the file that `PACELINE_ABORTS` names. All else is from the library that this
//! one is linked with.

mod real;

use std::ffi::c_int;
use std::io::Write;

unsafe extern "C" {
    fn atexit(run: extern "C" fn()) -> c_int;
}

/// Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = register;

extern "C" fn register() {
    unsafe { atexit(abort) };
}

extern "C" fn abort() {
    let file = std::env::var_os("PACELINE_ABORTS").unwrap();
    let file = std::fs::File::options()
        .append(true)
        .create(true)
        .open(file);
    writeln!(file.unwrap(), "{}", std::process::id()).unwrap();
    std::process::abort();
}
