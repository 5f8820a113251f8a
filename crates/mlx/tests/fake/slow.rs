//! MLX on the devices of two stages that compute at the same time or not at all, while the file of
//! `PACELINE_SLOW` exists. The file has the chunks of a prompt. The first stage computes a chunk
//! while the second one computes the chunk before: each waits in its evaluation until the other one
//! has begun. The first stage waits for the second one's graph of the same chunk, too. All else is
//! from the library that this one is linked with.

mod real;

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::{Condvar, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use real::Handle;

/// Longest wait for the other stage: that of the tests for another rank's part.
const PATIENCE: Duration = Duration::from_secs(60);

/// Chunks that each stage has begun. The first stage begins first.
static BEGUN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

/// Chunks whose graph each thread has begun.
static GRAPHS: Mutex<Vec<(ThreadId, usize)>> = Mutex::new(Vec::new());

thread_local! {
    static STAGE: Cell<Option<usize>> = const { Cell::new(None) };
    /// Whether the graph of the next evaluation is begun.
    static BEGAN: Cell<bool> = const { Cell::new(false) };
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
    if stage == 0 {
        drop(begun);
        await_graph(chunk);
        begun = BEGUN.lock().unwrap();
    }
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

/// Waits until the other thread has begun the graph of a chunk.
fn await_graph(chunk: usize) {
    let own = std::thread::current().id();
    let start = Instant::now();
    let is_made = || {
        let graphs = GRAPHS.lock().unwrap();
        graphs
            .iter()
            .any(|(thread, n)| *thread != own && *n > chunk)
    };
    while !is_made() {
        assert!(start.elapsed() < PATIENCE, "no graph of chunk {chunk}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn chunks() -> Option<usize> {
    let file = std::env::var_os("PACELINE_SLOW");
    let chunks = file.and_then(|file| std::fs::read_to_string(file).ok());
    chunks.map(|chunks| chunks.parse().unwrap())
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    type Size = extern "C" fn(Handle) -> usize;
    let size: Size = unsafe { std::mem::transmute(real::function(c"mlx_vector_array_size")) };
    // A layer's keys and values are two of the arrays that a step evaluates.
    if let (Some(chunks), 2..) = (chunks(), size(Handle(arrays.0))) {
        BEGAN.set(false);
        begin(chunks);
    }
    real::eval(arrays)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_fast_rms_norm(
    result: Handle,
    x: Handle,
    weight: Handle,
    eps: f32,
    stream: Handle,
) -> c_int {
    if chunks().is_some() && !BEGAN.replace(true) {
        let (own, mut graphs) = (std::thread::current().id(), GRAPHS.lock().unwrap());
        match graphs.iter_mut().find(|(thread, _)| *thread == own) {
            Some((_, n)) => *n += 1,
            None => graphs.push((own, 1)),
        }
    }
    type Norm = extern "C" fn(Handle, Handle, Handle, f32, Handle) -> c_int;
    let norm: Norm = unsafe { std::mem::transmute(real::function(c"mlx_fast_rms_norm")) };
    norm(result, x, weight, eps, stream)
}
