//! MLX on a slow device whose time is that of the weights it reads. It is slow while the file of
//! `PACELINE_SLOW` exists. The file has two numbers: nanoseconds for each KiB of weights in
//! products, and nanoseconds from the end of a submission until the host knows of it. Each wait for
//! a submission adds a byte to the file `PACELINE_SLOW_LOG`: `1` where the host had begun the graph
//! of the next one. All else is from the library that this one is linked with.

mod real;

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::io::Write;
use std::sync::OnceLock;
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
}

thread_local! {
    static DEVICE: RefCell<Device> = RefCell::default();
}

/// Times of a KiB and of a wait, while the device is slow.
fn times() -> Option<(f64, Duration)> {
    static TIMES: OnceLock<(f64, Duration)> = OnceLock::new();
    let path = std::env::var_os("PACELINE_SLOW")?;
    if !std::fs::exists(&path).ok()? {
        return None;
    }
    Some(*TIMES.get_or_init(|| {
        let text = std::fs::read_to_string(path).unwrap();
        let numbers: Vec<f64> = text
            .split_whitespace()
            .map(|it| it.parse().unwrap())
            .collect();
        (numbers[0], Duration::from_nanos(numbers[1] as u64))
    }))
}

impl Device {
    fn submit(&mut self, (kib_ns, crossing): (f64, Duration)) {
        let work = self.noted as f64 / 1024.0 * kib_ns;
        self.noted = 0;
        self.known = Some(Instant::now() + Duration::from_nanos(work as u64) + crossing);
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
    match times() {
        Some(times) => DEVICE.with_borrow_mut(|device| {
            device.submit(times);
            device.outstanding = true;
        }),
        None => DEVICE.set(Device::default()),
    }
    type Submit = extern "C" fn(Handle) -> c_int;
    let real: Submit = unsafe { std::mem::transmute(real::function(c"mlx_async_eval")) };
    real(arrays)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    let Some(times) = times() else {
        DEVICE.set(Device::default());
        return real::eval(arrays);
    };
    DEVICE.with_borrow_mut(|device| {
        if !device.outstanding {
            device.submit(times);
        } else if let Some(path) = std::env::var_os("PACELINE_SLOW_LOG") {
            let log = std::fs::File::options()
                .append(true)
                .create(true)
                .open(path);
            let byte = if device.noted > 0 { b"1" } else { b"0" };
            log.unwrap().write_all(byte).unwrap();
        }
        device.outstanding = false;
    });
    let evaluated = real::eval(arrays); // the device's own time has room for it
    DEVICE.with_borrow_mut(Device::wait);
    evaluated
}
