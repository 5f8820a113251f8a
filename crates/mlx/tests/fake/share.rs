//! MLX on a slow device whose time is that of the weights it reads. It is slow while the file of
//! `PACELINE_SLOW` exists. The file has three numbers. The first is nanoseconds for each KiB of
//! weights in products. The second is nanoseconds from the end of a submission until the host knows
//! of it. The third is this process's ranks, 1 if left out. A rank's wait for a submission ends
//! when all of them have submitted theirs: ranks that compute one after the other fail. All else is
//! from the library that this one is linked with.
//!
//! Each wait adds a line to the file `PACELINE_SLOW_LOG`. It begins with `1` where the host had
//! begun the graph of the next submission, with `0` where it had not, with `-` without an exchange.
//! Then it has the time of the device's own clock in ns, which counts submissions alone. So no load
//! of this machine changes it.

mod real;

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::io::Write;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use real::Handle;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct OptionalInt(c_int, bool);

unsafe extern "C" {
    fn prctl(option: c_int, value: c_ulong) -> c_int;
}

/// Work of a device's thread.
#[derive(Default)]
struct Device {
    /// Bytes of weights in products that were noted since the last submission.
    noted: usize,
    /// When the host knows of the end of the last submission.
    known: Option<Instant>,
    /// Whether a submission has no wait yet.
    outstanding: bool,
    /// The time of the end of the last submission, in ns.
    clock: f64,
}

/// The ranks of an exchange, which are threads of this process.
struct Exchange {
    /// When their parts are computed, by their clocks.
    ends: Vec<f64>,
    /// Ranks that wait no longer.
    left: usize,
}

static EXCHANGE: Mutex<Exchange> = Mutex::new(Exchange {
    ends: Vec::new(),
    left: 0,
});
static SUBMITTED: Condvar = Condvar::new();

/// Longest wait for another rank's submission: that of the tests for another rank's part.
const PATIENCE: Duration = Duration::from_secs(60);

thread_local! {
    static DEVICE: RefCell<Device> = RefCell::default();
}

/// How slow the device is.
#[derive(Clone, Copy)]
struct Slow {
    kib_ns: f64,
    crossing: Duration,
    ranks: usize,
}

fn slow() -> Option<Slow> {
    let text = std::fs::read_to_string(std::env::var_os("PACELINE_SLOW")?).ok()?;
    let numbers: Vec<f64> = text
        .split_whitespace()
        .map(|it| it.parse().unwrap())
        .collect();
    Some(Slow {
        kib_ns: numbers[0],
        crossing: Duration::from_nanos(numbers[1] as u64),
        ranks: numbers.get(2).map_or(1, |n| *n as usize),
    })
}

impl Device {
    fn submit(&mut self, slow: Slow) {
        let work = Duration::from_nanos((self.noted as f64 / 1024.0 * slow.kib_ns) as u64);
        let takes = work + slow.crossing;
        self.noted = 0;
        self.known = Some(Instant::now() + takes);
        self.clock += takes.as_nanos() as f64;
    }

    /// Waits until all ranks have submitted their parts.
    fn meet(&mut self, ranks: usize) {
        let exchange = EXCHANGE.lock().unwrap();
        let some_miss = |it: &mut Exchange| it.ends.len() < ranks;
        let waited = SUBMITTED.wait_timeout_while(exchange, PATIENCE, some_miss);
        let (mut exchange, waited) = waited.unwrap();
        assert!(!waited.timed_out(), "no rank computes beside this one");
        self.clock = exchange.ends.iter().copied().fold(0.0, f64::max);
        exchange.left += 1;
        if exchange.left == ranks {
            exchange.ends.clear();
            exchange.left = 0;
        }
    }

    fn wait(&mut self) {
        const PR_SET_TIMERSLACK: c_int = 29;
        unsafe { prctl(PR_SET_TIMERSLACK, 1) };
        if let Some(known) = self.known.take() {
            std::thread::sleep(known.saturating_duration_since(Instant::now()));
        }
    }
}

fn note(weights: &Handle) {
    type Bytes = extern "C" fn(*mut c_void) -> usize;
    let bytes: Bytes = unsafe { std::mem::transmute(real::function(c"mlx_array_nbytes")) };
    DEVICE.with_borrow_mut(|device| device.noted += bytes(weights.0));
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_matmul(out: *mut Handle, a: Handle, b: Handle, s: Handle) -> c_int {
    note(&b);
    type Product = extern "C" fn(*mut Handle, Handle, Handle, Handle) -> c_int;
    let real: Product = unsafe { std::mem::transmute(real::function(c"mlx_matmul")) };
    real(out, a, b, s)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_quantized_matmul(
    out: *mut Handle,
    x: Handle,
    weights: Handle,
    scales: Handle,
    biases: Handle,
    transpose: bool,
    group: OptionalInt,
    bits: OptionalInt,
    mode: *const c_char,
    s: Handle,
) -> c_int {
    note(&weights);
    type Product = extern "C" fn(
        *mut Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        bool,
        OptionalInt,
        OptionalInt,
        *const c_char,
        Handle,
    ) -> c_int;
    let real: Product = unsafe { std::mem::transmute(real::function(c"mlx_quantized_matmul")) };
    real(
        out, x, weights, scales, biases, transpose, group, bits, mode, s,
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_async_eval(arrays: Handle) -> c_int {
    match slow() {
        Some(slow) => DEVICE.with_borrow_mut(|device| {
            device.submit(slow);
            device.outstanding = true;
            EXCHANGE.lock().unwrap().ends.push(device.clock);
            SUBMITTED.notify_all();
        }),
        None => DEVICE.set(Device::default()),
    }
    type Submit = extern "C" fn(Handle) -> c_int;
    let real: Submit = unsafe { std::mem::transmute(real::function(c"mlx_async_eval")) };
    real(arrays)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    let Some(slow) = slow() else {
        DEVICE.set(Device::default());
        return real::eval(arrays);
    };
    DEVICE.with_borrow_mut(|device| {
        let mark = match (device.outstanding, device.noted) {
            (false, _) => '-',
            (true, 0) => '0',
            (true, _) => '1',
        };
        if device.outstanding {
            device.meet(slow.ranks);
        } else {
            device.submit(slow);
        }
        device.outstanding = false;
        log(mark, device.clock);
    });
    let evaluated = real::eval(arrays); // the device's own time has room for it
    DEVICE.with_borrow_mut(Device::wait);
    evaluated
}

fn log(mark: char, clock: f64) {
    let Some(path) = std::env::var_os("PACELINE_SLOW_LOG") else {
        return;
    };
    let file = std::fs::File::options()
        .append(true)
        .create(true)
        .open(path);
    let line = format!("{mark} {clock}\n");
    file.unwrap().write_all(line.as_bytes()).unwrap();
}
