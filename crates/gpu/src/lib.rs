//! Array kernels on graphics processors, by wgpu: Metal, Vulkan and DX12.
//!
//! Every result has the bits of the definition on the CPU. No promise depends on a shader compiler:
//! f64 is computed by integers (`wgsl/float.wgsl`), exact sums are integer bins, values are
//! compared as integers. Software adapters (lavapipe) count as devices and are labelled as such.
//!
//! - `Gpu`: a device; opens the best adapter, cuts buffers to its limits.
//! - `RowRange`, `Column`: the input of a kernel; an expression may be computed of each row first.
//! - `ScalarFunction`, `BlockFunction`: checked WGSL functions of a user, of a row's values or of
//!   rows nearby. The only part without promised bits.
//!
//! All of it is behind the feature `wgpu`; without it the crate is empty.
//!
//! A device may be lost at any moment: its driver is reset, or the card is removed. Then every call
//! returns `Error::Lost`, now and later, and the caller computes elsewhere. A result is valid only
//! if each workgroup has signed that it ended.

#[cfg(feature = "wgpu")]
mod block;
#[cfg(feature = "wgpu")]
mod device;
#[cfg(feature = "wgpu")]
mod error;
#[cfg(feature = "wgpu")]
mod function;
#[cfg(feature = "wgpu")]
mod kernels;
#[cfg(feature = "wgpu")]
mod sort;
#[cfg(all(test, feature = "wgpu"))]
mod tests;

#[cfg(feature = "wgpu")]
pub use block::{BlockFunction, BlockRange};
#[cfg(feature = "wgpu")]
pub use device::{Gpu, Software};
#[cfg(feature = "wgpu")]
pub use error::Error;
#[cfg(feature = "wgpu")]
pub use function::{Scalar, ScalarFunction};
#[cfg(feature = "wgpu")]
pub use kernels::{Column, Extremes, RowRange};
#[cfg(feature = "wgpu")]
pub use sort::KeyWidth;
