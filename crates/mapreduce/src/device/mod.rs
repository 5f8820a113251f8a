//! Devices compute blocks of rows: the trait [`ComputeDevice`]. All implementations give the same
//! bits.
//!
//! [`Cpu`] is the definition; threads of a job use the same functions directly. A graphics
//! processor (`gpu`, a cargo feature) takes whole blocks: an expression and the reduction behind it
//! stay on the device. If a device does not support a block or fails, the calling thread computes
//! the block. So a job on a device that disappears ends with the same result.
//!
//! A user's WGSL function has no form on the CPU: a job with one ends with an error instead.

mod cpu;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use paceline_base::exact::ExactSum;
use serde::{Deserialize, Serialize};

pub use cpu::Cpu;

use crate::expr::ExprProgram;
use crate::hist::Bins;
use crate::kmeans::Centroids;
use crate::reduce::{Op, Reduced};
use crate::{Error, InputSource, JobSpec, Kind, PartialResult};

/// Operations of an expression from which on a block is worth sending to a device: below, reading
/// the rows takes the CPU longer than computing. A guess that real cards have to confirm.
const STEPS_WORTH: usize = 8;

/// Why a device computes no function of a user.
const NO_FUNCTIONS: &str = "only a graphics processor computes this";

paceline_base::named_enum! {
    /// The processors that are to compute a job.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub enum DeviceChoice {
        /// The CPU's threads, and a graphics processor in addition where the work is worth it.
        #[default]
        Auto = "auto",
        /// The CPU's threads.
        Cpu = "cpu",
        /// The graphics processor; software counts as one.
        Gpu = "gpu",
    }
}

impl DeviceChoice {
    /// Opens the device, if one is chosen and there is one.
    ///
    /// # Errors
    /// [`Error::Device`] when [`DeviceChoice::Gpu`] has none.
    pub fn open(self) -> Result<Option<Arc<dyn ComputeDevice>>, Error> {
        match self {
            Self::Cpu => Ok(None),
            Self::Auto => Ok(open(false).ok()),
            Self::Gpu => open(true).map(Some),
        }
    }

    /// The threads that compute, each with the device that it gives blocks to. These are `cpu`
    /// threads of the CPU and one for the device, or two that keep the device busy. Of the two, one
    /// reads while the other's block is computed.
    pub(crate) fn threads(
        self,
        cpu: usize,
        device: Option<&Arc<dyn ComputeDevice>>,
    ) -> Vec<Option<Arc<dyn ComputeDevice>>> {
        let of_device = |count| std::iter::repeat_n(device.cloned(), count);
        let of_cpu = std::iter::repeat_n(None, cpu.max(1));
        match (self, device) {
            (_, None) | (Self::Cpu, _) => of_cpu.collect(),
            (Self::Gpu, Some(_)) => of_device(2).collect(),
            (Self::Auto, Some(_)) => of_cpu.chain(of_device(1)).collect(),
        }
    }

    /// Whether a device gets blocks of a task.
    pub(crate) fn uses_device(self, task: &JobSpec, program: Option<&ExprProgram>) -> bool {
        let is_heavy = matches!(task.kind, Kind::KMeans(_))
            || matches!(task.origin, InputSource::Random { .. })
            || program.is_some_and(|program| program.steps().len() >= STEPS_WORTH);
        match self {
            Self::Cpu => false,
            Self::Gpu => true,
            // Not a user's function: the CPU's threads, which take parts too, cannot compute it.
            Self::Auto => is_heavy && task.wgsl.is_none(),
        }
    }
}

#[cfg(feature = "gpu")]
fn open(software: bool) -> Result<Arc<dyn ComputeDevice>, Error> {
    Ok(Arc::new(gpu::Graphics::open(software)?))
}

#[cfg(not(feature = "gpu"))]
fn open(_software: bool) -> Result<Arc<dyn ComputeDevice>, Error> {
    Err(without())
}

/// Checks a user's WGSL function of `columns` columns.
///
/// # Errors
/// [`Error::Device`]: the function is invalid, or this program has no graphics processors.
#[cfg(feature = "gpu")]
pub(crate) fn check_function(text: &str, columns: usize) -> Result<(), Error> {
    gpu::function(text, columns).map(drop)
}

/// The same function without the feature.
#[cfg(not(feature = "gpu"))]
pub(crate) fn check_function(_text: &str, _columns: usize) -> Result<(), Error> {
    Err(without())
}

/// Checks a user's WGSL function over blocks of inputs with these columns; columns of its result.
#[cfg(feature = "gpu")]
pub(crate) fn check_block(text: &str, columns: &[u64]) -> Result<u64, Error> {
    gpu::block_function(text, columns).map(|function| u64::from(function.result_columns()))
}

/// The same function without the feature.
#[cfg(not(feature = "gpu"))]
pub(crate) fn check_block(_text: &str, _columns: &[u64]) -> Result<u64, Error> {
    Err(without())
}

#[cfg(not(feature = "gpu"))]
fn without() -> Error {
    Error::Device {
        reason: "this program was built without graphics processors (cargo feature gpu)".to_owned(),
    }
}

/// A device gives no result for a block: it is lost, or the block is too much for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Lost(pub String);

/// A column of a block.
#[derive(Clone, Copy, Debug)]
pub enum Column<'a> {
    /// `(n,)` values.
    Values(&'a [f64]),
    /// Random numbers of the rows' numbers.
    Random { seed: u64, dimension: u32 },
}

#[derive(Clone, Copy, Debug)]
pub struct BlockRows<'a> {
    /// Number of rows, at least one and at most [`ComputeDevice::rows_max`].
    pub count: u64,
    pub first: u64,
    pub columns: &'a [Column<'a>],
    pub program: Option<&'a ExprProgram>,
}

/// Rows of a block for a function that reads rows nearby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First row that is computed.
    pub first: u64,
    /// Number of rows that are computed.
    pub count: u64,
    /// First row of the inputs' values; not above `first`.
    pub loaded_first: u64,
    /// Number of rows of the inputs' values.
    pub loaded: u64,
    /// Rows of the whole inputs.
    pub rows: u64,
}

/// A processor that computes blocks. *Values* are those of the expression, or the first column.
/// Every call gives the bits of [`Cpu`], or [`Lost`], after which the caller computes the block
/// itself. Calls block; threads may call at the same time.
pub trait ComputeDevice: Send + Sync + fmt::Debug {
    /// The name for people.
    fn label(&self) -> &str;

    /// Most rows of a call, for rows of `row_bytes` bytes.
    fn rows_max(&self, row_bytes: u64) -> u64;

    /// Whether it computes this expression. Asked before any call with it.
    fn maps(&self, program: &ExprProgram) -> bool;

    /// Whether it sorts `bytes` bytes of keys of `width` bytes each. Called before
    /// [`sort`](Self::sort).
    fn sorts(&self, bytes: u64, width: usize) -> bool;

    /// The rows' values.
    fn values(&self, rows: &BlockRows<'_>) -> Result<Vec<f64>, Lost>;

    /// The exact sum of the values.
    fn sum(&self, rows: &BlockRows<'_>) -> Result<ExactSum, Lost>;

    /// The exact sum of the products of two columns without an expression, else of the squares of
    /// the values.
    fn products(&self, rows: &BlockRows<'_>) -> Result<ExactSum, Lost>;

    /// The least and the greatest key of all values but NaN, and whether there is a NaN. Without
    /// any such value the least key is greater than the greatest.
    fn extremes(&self, rows: &BlockRows<'_>) -> Result<(i64, i64, bool), Lost>;

    /// Values in each bin, then those below, above and NaN.
    fn hist(&self, rows: &BlockRows<'_>, bins: &Bins) -> Result<Vec<u32>, Lost>;

    /// Counts values of u32, little-endian, in `bins` bins over their whole range: a power of two
    /// from 2 to 4096.
    fn hist_raw(&self, words: &[u8], bins: u32) -> Result<Vec<u32>, Lost>;

    /// The nearest centroid of each row and its squared distance; infinity where none is finite.
    fn nearest(&self, values: &[f64], centroids: &Centroids) -> Result<Vec<(u32, f64)>, Lost>;

    /// Sorts unsigned integers of `width` bytes, little-endian, in ascending order. After an error
    /// they are as they were.
    fn sort(&self, keys: &mut [u8], width: usize) -> Result<(), Lost>;

    /// A user's WGSL function of each row, with one argument per column.
    ///
    /// # Errors
    /// [`Lost`]: nothing else can compute it.
    fn function(&self, text: &str, columns: &[&[f64]]) -> Result<Vec<f64>, Lost> {
        let _ = (text, columns);
        Err(Lost(NO_FUNCTIONS.to_owned()))
    }

    /// Numbers of rows in the order of their partitions; rows of a partition stay in order.
    /// Partitions have numbers of `bits` bits, a multiple of 8.
    fn partition(&self, partitions: &[u32], bits: u32) -> Result<Vec<u32>, Lost> {
        let _ = bits;
        let mut rows: Vec<u32> = (0..partitions.len() as u32).collect();
        rows.sort_by_key(|row| partitions[*row as usize]);
        Ok(rows)
    }

    /// The product of matrices `left`, `(m, depth)`, and `right`, `(depth, n)`, in f32 without
    /// promised bits. The CPU has another definition, in f64.
    fn matmul(&self, left: &[f32], right: &[f32], depth: usize) -> Result<Vec<f32>, Lost> {
        let _ = (left, right, depth);
        Err(Lost(NO_FUNCTIONS.to_owned()))
    }

    /// A user's WGSL function of rows that reads rows nearby: the loaded rows of each input, and
    /// their columns. Gives the rows of `range`.
    ///
    /// # Errors
    /// [`Lost`]: nothing else can compute it.
    fn block(
        &self,
        text: &str,
        inputs: &[Vec<f32>],
        columns: &[u64],
        range: BlockRange,
    ) -> Result<Vec<f32>, Lost> {
        let _ = (text, inputs, columns, range);
        Err(Lost(NO_FUNCTIONS.to_owned()))
    }
}

/// Adds a block by a device; returns whether it supports such blocks. An error adds nothing.
pub(crate) fn take(
    device: &dyn ComputeDevice,
    rows: &BlockRows<'_>,
    task: &JobSpec,
    partial: &mut PartialResult,
) -> Result<bool, Lost> {
    match (partial, &task.kind) {
        // A second column that is random has no products on a device.
        (PartialResult::Reduce(_), Kind::Reduce(Op::Dot))
            if matches!(rows.columns, [_, Column::Random { .. }, ..]) =>
        {
            return Ok(false);
        }
        (PartialResult::Reduce(state), Kind::Reduce(op)) if *op != Op::Count => {
            state.take_reduced(&reduced(device, rows, *op)?, task.dtype());
        }
        (PartialResult::Hist(counts), Kind::Hist(bins)) => {
            counts.take_counted(&device.hist(rows, bins)?);
        }
        (PartialResult::KMeans(assigned), Kind::KMeans(centroids)) if rows.program.is_none() => {
            let [Column::Values(values)] = rows.columns else {
                return Ok(false);
            };
            assigned.add_nearest(values, &device.nearest(values, centroids)?);
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn reduced(device: &dyn ComputeDevice, rows: &BlockRows<'_>, op: Op) -> Result<Reduced, Lost> {
    let mut reduced = Reduced {
        rows: rows.count,
        ..Reduced::default()
    };
    if op.sums() {
        reduced.sum = Some(device.sum(rows)?);
    }
    if op == Op::Dot {
        reduced.sum = Some(device.products(rows)?);
    }
    if op.squares() {
        reduced.squares = Some(device.products(rows)?);
    }
    if op.extremes() {
        reduced.extremes = Some(device.extremes(rows)?);
    }
    Ok(reduced)
}
