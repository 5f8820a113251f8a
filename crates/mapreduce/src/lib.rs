//! Array jobs: reductions over files larger than memory, by threads and processes.
//!
//! A job is a [`JobSpec`]: inputs and the computation over them. It is cut into *parts*, ranges of
//! rows, which are leased to the threads or processes of a [`JobWorkers`].
//!
//! A part gives a [`PartialResult`]. Partials merge by operations without rounding: integer
//! addition, minimum, exact sums ([`paceline_base::exact`]). So a result has the same bits for any
//! number of threads and processes, and for any cut into parts. The bits are also the same after
//! any worker was lost and its parts were computed again.
//!
//! ```
//! use paceline_base::exact::ExactSum;
//! use paceline_mapreduce::sum;
//!
//! let mut total = ExactSum::new();
//! sum::add(&mut total, &[1e16, 1.0, -1e16]);
//! assert_eq!(total.value(), 1.0);
//! ```
//!
//! In reading order:
//! - [`sum`]: exact sums of columns at the speed of memory.
//! - [`RowSource`], [`Sink`], [`InputFile`], [`Dtype`], [`npy`]: input and output of rows.
//! - [`JobSpec`]: a computation. [`reduce`], [`hist`], [`topk`], [`kmeans`], [`groupby`], [`sort`]:
//!   the kinds of it. [`expr`]: expressions of users. [`philox`]: random numbers by counter.
//! - [`device`]: processors that compute blocks of rows, and graphics processors. [`BlockMap`]:
//!   functions of users that read rows nearby.
//! - [`jobs`]: jobs for programs, with results, texts and figures.
//! - [`Leases`]: assignment of parts to workers. [`JobWorkers`]: jobs from start to end.
//!   [`Journal`]: finished parts, to resume a killed job. [`worker`]: the other side of the control
//!   channel; [`parent`]: that of a worker which shares no folder with its parent.
//!
//! The crate knows nothing of models. It never holds more of a file than a block a thread.

#[cfg(test)]
mod bars;
mod block;
pub mod clusters;
pub mod device;
mod dtype;
mod error;
pub mod expr;
pub mod groupby;
mod halo;
pub mod hist;
pub mod jobs;
mod join;
mod journal;
pub mod kmeans;
mod leases;
mod matmul;
mod messages;
pub mod npy;
mod order;
pub mod parent;
mod part;
pub mod philox;
pub mod reduce;
mod sink;
pub mod sort;
mod source;
pub mod sum;
mod task;
#[cfg(test)]
mod tests;
pub mod topk;
mod value;
pub mod worker;
mod workers;

pub use device::{ComputeDevice, DeviceChoice};
pub use dtype::{Decoded, Dtype, UnknownDtype, Values};
pub use error::Error;
pub use halo::BlockMap;
pub use journal::Journal;
pub use leases::{Leases, RowPartition};
pub use part::{PartComputer, Scratch};
pub use sink::{FileSink, Sink};
pub use source::{FileSource, InputFile, MemorySource, RowSource};
pub use task::{InputSource, JobSpec, Kind, PartialResult};
pub use value::ResultValue;
pub use workers::{JobProgress, JobWorkers, ProcessOptions};
