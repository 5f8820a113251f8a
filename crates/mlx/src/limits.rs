//! How fast a device reads its memory: what decoding is held against. And the time of an
//! evaluation, which every step waits for. Rates of products, by the form of their weights, predict
//! the speed of a model.

use std::time::Instant;

use paceline_base::median;

use crate::{Array, DeviceKind, Dtype, Error, Library, Quantised, QuantisedMode, Stream};

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

/// Evaluations that give a median, after [`WARM_UP`] others.
pub const EVALUATIONS: usize = 200;

/// Evaluations before them: the first one compiles a kernel.
const WARM_UP: usize = 20;

/// Microseconds from the request for the sum of two numbers until the processor can read it: the
/// median of `evaluations`. It waits as before exchanges with other ranks, on a thread of its own.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Call`], [`Error::Thread`].
pub fn evaluation_us(
    library: &Library,
    device: DeviceKind,
    evaluations: usize,
) -> Result<f64, Error> {
    on_own_thread(|| {
        let stream = library.stream(device)?;
        let one = stream.scalar(1.0, Dtype::F32)?;
        let mut sum = stream.zeros(&[1], Dtype::F32)?;
        let mut times = Vec::with_capacity(evaluations);
        for round in 0..WARM_UP + evaluations {
            let start = Instant::now();
            sum = stream.add(&sum, &one)?;
            stream.submit([&sum])?;
            stream.wait([&sum])?;
            sum.as_f32()?;
            if round >= WARM_UP {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok(median(times))
    })
}

/// Values of a group of quantised weights, as this project packs them.
const GROUP: i32 = 32;

/// Pairs of operations of the chain whose length gives the time of one.
const PAIRS: usize = 128;

/// How the weights of a measured product are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightForm {
    /// Integers of these bits, in groups of 32 with a scale and a bias of 16 bits each.
    Groups(i32),
    Floats,
}

/// Rates of a device in a model's products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductRates {
    /// Bytes of weights a second in products with one row.
    pub reads: f64,
    /// Operations a second in products with many rows.
    pub computes: f64,
}

/// Sizes of a measurement of products.
#[derive(Clone, Copy, Debug)]
pub struct ProductSizes {
    /// Rows and columns of a matrix.
    pub width: i32,
    /// Matrices that follow each other: more than the device's caches hold.
    pub matrices: u32,
    /// Rows of the products with many of them.
    pub rows: i32,
}

/// The rates of products of inputs in `dtype` with weights of this `form`. Done on a thread of its
/// own.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Call`], [`Error::Thread`].
pub fn product_rates(
    library: &Library,
    device: DeviceKind,
    (form, dtype): (WeightForm, Dtype),
    sizes: ProductSizes,
) -> Result<ProductRates, Error> {
    on_own_thread(|| {
        let stream = library.stream(device)?;
        let matrices = (0..sizes.matrices.max(1)).map(|_| form.zeros(&stream, sizes.width, dtype));
        let matrices = matrices.collect::<Result<Vec<_>, _>>()?;
        let seconds = |rows: i32, matrices: &[Weights]| {
            let x = stream.zeros(&[rows, sizes.width], dtype)?;
            stream.eval([&x])?;
            shortest(&stream, || {
                matrices
                    .iter()
                    .try_fold(x.clone(), |x, w| w.apply(&stream, &x))
            })
        };
        let bytes: u64 = matrices.iter().map(Weights::bytes).sum();
        let width = f64::from(sizes.width);
        let operations = 2.0 * f64::from(sizes.rows) * width * width;
        Ok(ProductRates {
            reads: bytes as f64 / seconds(1, &matrices)?,
            computes: operations / seconds(sizes.rows, &matrices[..1])?,
        })
    })
}

/// Seconds that a small operation adds to an evaluation: its part of the graph and its kernel. The
/// mean of an addition and a norm of a row. Done on a thread of its own.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Call`], [`Error::Thread`].
pub fn operation_s(library: &Library, device: DeviceKind) -> Result<f64, Error> {
    const ROW: i32 = 2048; // as of a model with a billion weights
    on_own_thread(|| {
        let stream = library.stream(device)?;
        let x = stream.zeros(&[1, ROW], Dtype::F32)?;
        let weight = stream.zeros(&[ROW], Dtype::F32)?;
        stream.eval([&x, &weight])?;
        let chain = |pairs: usize| {
            shortest(&stream, || {
                (0..pairs).try_fold(x.clone(), |x, _| {
                    stream.add(&stream.rms_norm(&x, &weight, 1e-5)?, &x)
                })
            })
        };
        let operations = 2 * (PAIRS - 1);
        Ok(((chain(PAIRS)? - chain(1)?) / operations as f64).max(0.0))
    })
}

/// A matrix of zeros.
enum Weights {
    Groups(Quantised),
    /// `(in, out)`
    Floats(Array),
}

impl WeightForm {
    fn zeros(self, stream: &Stream, width: i32, dtype: Dtype) -> Result<Weights, Error> {
        let Self::Groups(bits) = self else {
            let whole = stream.zeros(&[width, width], dtype)?;
            stream.eval([&whole])?;
            return Ok(Weights::Floats(stream.transpose(&whole, &[1, 0])?));
        };
        let factors = || stream.zeros(&[width, width / GROUP], dtype);
        let weights = Quantised {
            packed: stream.zeros(&[width, width * bits / 32], Dtype::U32)?,
            scales: factors()?,
            biases: Some(factors()?),
            group: GROUP,
            bits,
            mode: QuantisedMode::Affine,
        };
        let all = [&weights.packed, &weights.scales].into_iter();
        stream.eval(all.chain(&weights.biases))?;
        Ok(Weights::Groups(weights))
    }
}

impl Weights {
    fn apply(&self, stream: &Stream, x: &Array) -> Result<Array, Error> {
        match self {
            Self::Groups(weights) => stream.quantised_matmul(x, weights),
            Self::Floats(across) => stream.matmul(x, across),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Groups(w) => {
                let biases = w.biases.as_ref().map_or(0, Array::n_bytes);
                w.packed.n_bytes() + w.scales.n_bytes() + biases
            }
            Self::Floats(across) => across.n_bytes(),
        }
    }
}

/// The shortest time until `make`'s array is computed.
fn shortest(stream: &Stream, make: impl Fn() -> Result<Array, Error>) -> Result<f64, Error> {
    let mut least = f64::INFINITY;
    for round in 0..=ROUNDS {
        let start = Instant::now();
        stream.eval([&make()?])?;
        if round > 0 {
            least = least.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(least.max(1e-9))
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
