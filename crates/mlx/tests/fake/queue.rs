//! MLX on a slow device with a queue, while the file exists which `PACELINE_SLOW` names. Each
//! submission takes the device 100 ms after the one before, and an evaluation of submitted arrays
//! waits for the oldest submission. All else is from the library that this one is linked with.

mod real;

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use real::Handle;

const STEP: Duration = Duration::from_millis(100);

/// When the device ends each submission that nobody waited for, and the last one.
static QUEUE: Mutex<(VecDeque<Instant>, Option<Instant>)> = Mutex::new((VecDeque::new(), None));

fn is_slow() -> bool {
    std::env::var_os("PACELINE_SLOW").is_some_and(|file| std::fs::exists(file).is_ok_and(|it| it))
}

fn submit() {
    let mut queue = QUEUE.lock().unwrap();
    let now = Instant::now();
    let end = queue.1.map_or(now, |last| last.max(now)) + STEP;
    queue.0.push_back(end);
    queue.1 = Some(end);
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_async_eval(arrays: Handle) -> c_int {
    if is_slow() {
        submit();
    }
    type Submit = extern "C" fn(Handle) -> c_int;
    let real: Submit = unsafe { std::mem::transmute(real::function(c"mlx_async_eval")) };
    real(arrays)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    if is_slow() {
        if QUEUE.lock().unwrap().0.is_empty() {
            submit();
        }
        let end = QUEUE.lock().unwrap().0.pop_front().unwrap();
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
    }
    real::eval(arrays)
}
