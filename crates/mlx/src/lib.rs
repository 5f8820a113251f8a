//! MLX, Apple's array library, through its C API (`libmlxc`), opened at run time.
//!
//! ```text
//! Places --candidates--> Library::open --checked: whole file, version, functions--> Library
//! Library --device--> Stream --operations--> Array (lazy) --eval--> Array (its own memory)
//! ```
//!
//! - [`Library`]: the table of functions, checked when it is opened. The default build needs no
//!   MLX, and one binary serves machines with and without it.
//! - [`Stream`]: a queue of work on a device; operations are its methods.
//! - [`Array`]: an owner of one of MLX's arrays. Nothing is computed before [`Stream::eval`].
//! - [`Stream::vjp`]: gradients of a function of arrays. [`Compiled`]: such a function with its
//!   elementwise operations in one kernel.
//! - [`GraphGroup`]: gathers with other ranks as operations.
//!
//! **Threads.** MLX's streams belong to the thread that made them. Nothing here is `Send` but
//! [`Library`], so a program computes with MLX on one thread.
//!
//! **Errors.** The C API's default on an error is to end the process. [`Library::open`] replaces
//! that by one that keeps the message for the thread that failed; calls return [`Error::Call`].
//!
//! Signatures are those of mlx-c 0.7.0's headers, which is made for MLX 0.32: see [`table`].
//!
//! ```no_run
//! use paceline_mlx::{DeviceKind, Dtype, Library, LibraryPaths};
//!
//! let library = Library::open(&LibraryPaths::default())?;
//! let stream = library.stream(DeviceKind::Cpu)?;
//! let x = stream.array_f32(&[1.0, 2.0, 3.0], &[3])?;
//! let sum = stream.add(&x, &x)?;
//! stream.eval([&sum])?;
//! assert_eq!(sum.as_f32()?, [2.0, 4.0, 6.0]);
//! # Ok::<(), paceline_mlx::Error>(())
//! ```

/// Variable of the environment by which MLX chooses how GPUs compute products of f32. It is read
/// once, in the first product.
///
/// `0` means in f32. Else CUDA cards and Apple's M5 round factors to 10 bits of mantissa (TF32).
/// Source: `enable_tf32` in MLX 0.32.2's `utils.h`.
pub const TF32: &str = "MLX_ENABLE_TF32";

/// Variable of the environment by which MLX waits for Apple's GPUs without the system where it is
/// `1`. It is read once.
///
/// A wait then takes some 4 us instead of 150 (mlx #4438). GPUs have hung with it until a restart
/// of the machine (mlx #3142, #3830).
pub const FAST_SYNC: &str = "MLX_METAL_FAST_SYNCH";

mod array;
mod closure;
mod dtype;
mod error;
mod exit;
mod group;
mod library;
mod library_file;
mod library_paths;
mod limits;
mod memory;
mod ops;
mod stream;
pub mod table;

pub use array::Array;
pub use closure::{Compiled, Differentiable};
pub use dtype::Dtype;
pub use error::Error;
pub use exit::{end_process, exit};
pub use group::{Exchange, GraphGroup};
pub use library::Library;
pub use library_paths::{LIBRARY_NAME, LibraryPaths};
pub use limits::{
    EVALUATIONS, ProductRates, ProductSizes, WeightForm, evaluation_us, operation_s, product_rates,
    read_rate,
};
pub use memory::{MemoryLimits, MemoryUse};
pub use ops::{Mask, Quantised, QuantisedMode};
pub use stream::{DeviceKind, Stream};
