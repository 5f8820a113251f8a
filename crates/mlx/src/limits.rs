//! How fast a device reads its memory: what decoding is held against. And the time of an
//! evaluation, which every step waits for.

use std::time::Instant;

use paceline_base::median;

use crate::{Array, DeviceKind, Dtype, Error, Library, Stream};

/// Loops that are timed after one that is not. The shortest time counts, since other load on the
/// machine only adds time.
const ROUNDS: usize = 3;

/// Bytes a second that `device` moves at best when MLX reads `bytes` of `f32` and sums them, or
/// reads and writes them. Done on a thread of its own; takes `2 * bytes` of memory for as long.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Call`], [`Error::Thread`].
pub fn read_rate(library: &Library, device: DeviceKind, bytes: usize) -> Result<f64, Error> {
    on_own_thread(|| measure(&library.stream(device)?, bytes))
}

/// Evaluations that are timed one by one after [`WARM_UP`] others.
const EVALUATIONS: usize = 200;

/// Evaluations before them: the first one compiles a kernel.
const WARM_UP: usize = 20;

/// Microseconds from the request for the sum of two numbers until the processor can read it: the
/// median of 200. Done on a thread of its own.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Call`], [`Error::Thread`].
pub fn evaluation_us(library: &Library, device: DeviceKind) -> Result<f64, Error> {
    on_own_thread(|| {
        let stream = library.stream(device)?;
        let one = stream.scalar(1.0, Dtype::F32)?;
        let mut sum = stream.zeros(&[1], Dtype::F32)?;
        let mut times = Vec::with_capacity(EVALUATIONS);
        for round in 0..WARM_UP + EVALUATIONS {
            let start = Instant::now();
            sum = stream.add(&sum, &one)?;
            stream.eval([&sum])?;
            sum.as_f32()?;
            if round >= WARM_UP {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok(median(times))
    })
}

/// Runs `work` on a new thread. Streams belong to the thread that made them, and theirs is no
/// caller's own stream.
fn on_own_thread<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("mlx-limit".to_owned());
        let started = thread.spawn_scoped(scope, work);
        let ended = started.map_err(Error::Thread)?.join();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn measure(stream: &Stream, bytes: usize) -> Result<f64, Error> {
    let n = i32::try_from(bytes / 4).unwrap_or(i32::MAX);
    let one = stream.scalar(1.0, Dtype::F32)?;
    let data = stream.add(&stream.zeros(&[n], Dtype::F32)?, &one)?;
    stream.eval([&data])?;
    let read = best(stream, data.n_bytes(), || stream.sum(&data))?;
    let copied = best(stream, 2 * data.n_bytes(), || stream.add(&data, &one))?;
    Ok(read.max(copied))
}

/// Bytes a second at which `make`'s array is computed, which moves `bytes`.
fn best(
    stream: &Stream,
    bytes: u64,
    make: impl Fn() -> Result<Array, Error>,
) -> Result<f64, Error> {
    let mut best = 0.0f64;
    for round in 0..=ROUNDS {
        let start = Instant::now();
        let array = make()?;
        stream.eval([&array])?;
        stream.synchronize()?;
        let rate = bytes as f64 / start.elapsed().as_secs_f64();
        best = if round == 0 { 0.0 } else { best.max(rate) };
    }
    Ok(best)
}
