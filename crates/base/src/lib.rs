//! Ids, units and storage types that every paceline crate shares.
//!
//! This crate stays small (under 3,000 lines): a type moves here with its second user.
//!
//! - [`BlockType`]: how weights are stored in a file, with block sizes.
//! - [`KernelClass`]: which definition of the numbers a result belongs to.
//! - [`Bytes`], [`Micros`]: units that print themselves.
//! - [`Rank`], [`LayerIdx`]: indices that cannot be mixed up.
//! - [`AwakeTime`]: elapsed time without the observer's own suspension.
//! - [`lock`]: locks a mutex, even if its last holder panicked.
//! - [`whole_pages`]: the part of a mapping that can be released to the system.
//! - [`SplitMix64`]: random numbers for choices that need no secrecy.
//! - [`printable`]: untrusted text without terminal control characters.
//! - [`hex`], [`unhex`]: bytes as hexadecimal digits.
//! - [`median`], [`upper_median`]: medians of measurements.
//! - [`named_enum!`]: enums whose variants have names.
//! - [`e4m3`], [`ue4m3`], [`e8m0`]: floats of 8 bits.
//! - [`exact`]: sums that are exact in any order.
//! - [`tree`]: the one order of additions that every split sum follows.
//!
//! [`testing::Stopwatch`] measures times of tests on busy machines: the one clock and the one
//! thread of this crate.

mod awake_time;
mod block_type;
mod callback_error;
pub mod exact;
mod float8;
mod hex;
mod kernel_class;
mod locks;
mod median;
mod named;
mod pages;
mod printable;
mod random;
pub mod testing;
pub mod tree;
mod units;

pub use awake_time::AwakeTime;
pub use block_type::{BlockType, UnknownBlockType};
pub use callback_error::CallbackError;
pub use float8::{e4m3, e8m0, ue4m3};
pub use hex::{hex, unhex};
pub use kernel_class::{KernelClass, UnknownKernelClass};
pub use locks::lock;
pub use median::{median, upper_median};
pub use pages::whole_pages;
pub use printable::{counted, printable};
pub use random::SplitMix64;
pub use units::{Bytes, BytesError, LayerIdx, Micros, Rank};
