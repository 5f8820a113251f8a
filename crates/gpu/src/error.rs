//! Why a device gives no result.

use std::time::Duration;

/// Why a device gives no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("no graphics processor is found{}", but(seen))]
    NoAdapter {
        /// Labels of rejected adapters, and the reasons.
        seen: Vec<String>,
    },
    #[error("{label} gives no device: {reason}")]
    Refused { label: String, reason: String },
    /// The device is gone, or its driver failed: compute elsewhere.
    #[error("{label} is lost: {reason}")]
    Lost { label: String, reason: String },
    /// The device did not finish in time, and is not used again.
    #[error("{label} has not ended within {limit:?}")]
    Late { label: String, limit: Duration },
    /// More bytes than the device accepts in one buffer.
    #[error("{bytes} bytes are too many for {label}, which takes {most} at a time")]
    Bytes {
        label: String,
        bytes: u64,
        most: u64,
    },
    #[error("{label} does not take the kernel {kernel}: {reason}")]
    Kernel {
        label: String,
        kernel: String,
        reason: String,
    },
    #[error("the WGSL function is refused: {reason}")]
    Function { reason: String },
    /// A user's function read a row that was not loaded.
    #[error("the WGSL function reads row {row}, beyond its halo: rows {first} to {end} are there")]
    Halo {
        row: u64,
        first: u64,
        /// The row behind the last one.
        end: u64,
    },
    #[error("a call of the WGSL function took over {most} iterations of loops")]
    Iterations { most: u32 },
}

/// Names of the adapters found, as the end of a sentence.
fn but(seen: &[String]) -> String {
    match seen {
        [] => String::new(),
        seen => format!(", only {}", seen.join(", ")),
    }
}
