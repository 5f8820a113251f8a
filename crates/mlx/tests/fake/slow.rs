//! MLX on the devices of two stages that compute at the same time or not at all, while the file of
//! `PACELINE_SLOW` exists. The file has the chunks of a prompt. The first stage computes a chunk
//! while the second one computes the chunk before: each waits in its evaluation until the other one
//! has begun. All else is from the library that this one is linked with.

mod real;

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use real::Handle;

/// Longest wait for the other stage: that of the tests for another rank's part.
const PATIENCE: Duration = Duration::from_secs(60);

/// Chunks that each stage has begun. The first stage begins first.
static BEGUN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

thread_local! {
    static STAGE: Cell<Option<usize>> = const { Cell::new(None) };
}

fn begin(chunks: usize) {
    let mut begun = BEGUN.lock().unwrap();
    let stage = STAGE.get().unwrap_or_else(|| {
        begun.push(0);
        begun.len() - 1
    });
    STAGE.set(Some(stage));
    let chunk = begun[stage];
    begun[stage] += 1;
    CHANGED.notify_all();
    let (other, beside) = match stage {
        0 => (1, chunk.checked_sub(1)),
        _ => (0, Some(chunk + 1).filter(|next| *next < chunks)),
    };
    let Some(beside) = beside else {
        return;
    };
    let misses = |begun: &mut Vec<usize>| begun.get(other).is_none_or(|n| *n <= beside);
    let waited = CHANGED.wait_timeout_while(begun, PATIENCE, misses);
    let is_late = waited.unwrap().1.timed_out();
    assert!(!is_late, "stage {stage} computes chunk {chunk} alone");
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    type Size = extern "C" fn(Handle) -> usize;
    let size: Size = unsafe { std::mem::transmute(real::function(c"mlx_vector_array_size")) };
    let file = std::env::var_os("PACELINE_SLOW");
    let chunks = file.and_then(|file| std::fs::read_to_string(file).ok());
    // A layer's keys and values are two of the arrays that a step evaluates.
    if let (Some(chunks), 2..) = (chunks, size(Handle(arrays.0))) {
        begin(chunks.parse().unwrap());
    }
    real::eval(arrays)
}
