//! MLX on a slow device: an evaluation takes 100 ms more for each layer, while the file exists
//! which `PACELINE_SLOW` names. A layer's keys and values are two of the arrays that a step
//! evaluates. All else is from the library that this one is linked with.

mod real;

use std::ffi::c_int;
use std::time::Duration;

use real::Handle;

const LAYER: Duration = Duration::from_millis(100);

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    let is_slow = std::env::var_os("PACELINE_SLOW");
    if is_slow.is_some_and(|file| std::fs::exists(file).is_ok_and(|it| it)) {
        type Size = extern "C" fn(Handle) -> usize;
        let size: Size = unsafe { std::mem::transmute(real::function(c"mlx_vector_array_size")) };
        let layers = size(Handle(arrays.0)) / 2;
        std::thread::sleep(LAYER * layers as u32);
    }
    real::eval(arrays)
}
