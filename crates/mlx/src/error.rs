//! Why MLX cannot be used.

use std::path::PathBuf;

use paceline_base::Bytes;

use crate::dtype::Dtype;

/// Codes that Metal puts behind its text where it has ended a command buffer that took too long.
/// MLX 0.32.2 passes the text on: `CommandEncoder::commit` in its `backend/metal/device.cpp`.
const INTERRUPTIONS: [&str; 3] = [
    "kIOGPUCommandBufferCallbackErrorImpactingInteractivity",
    "kIOGPUCommandBufferCallbackErrorTimeout",
    "kIOGPUCommandBufferCallbackErrorHang",
];

/// Why MLX cannot be opened, or a call of it failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("mlx: no {name} in {}", list(looked))]
    NotFound {
        name: &'static str,
        looked: Vec<PathBuf>,
    },
    #[error("mlx: read {}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "mlx: {} is truncated: its headers describe {expected} bytes, the file has {got}",
        path.display()
    )]
    Truncated {
        path: PathBuf,
        /// Bytes that there should be.
        expected: u64,
        /// Bytes that there are.
        got: u64,
    },
    /// The file is not a shared library of this system.
    #[error("mlx: {} is not a shared library of this system", path.display())]
    NotALibrary { path: PathBuf },
    /// The system cannot load the library, or one that it needs.
    #[error("mlx: load {}: {source}", path.display())]
    Load {
        path: PathBuf,
        source: libloading::Error,
    },
    #[error("mlx: {} has no function {symbol}", path.display())]
    Symbol { path: PathBuf, symbol: &'static str },
    /// The library is of another version than the table of functions.
    #[error("mlx: {} is of version {got}, expected {expected}.x", path.display())]
    Version {
        path: PathBuf,
        got: String,
        /// Major and minor version that the table is for.
        expected: &'static str,
    },
    #[error("mlx: none of {} libraries can be used: {}", refused.len(), each(refused))]
    NoneFits {
        /// Why not, each with its path, in the order of the places.
        refused: Vec<Error>,
    },
    #[error("mlx: no {device} device in this build of MLX")]
    NoDevice { device: &'static str },
    #[error("mlx: {call}: {message}")]
    Call { call: &'static str, message: String },
    /// The system ended work of the GPU that took too long. The arrays of that evaluation hold
    /// anything; the queue works afterwards.
    #[error("mlx: {call}: the system interrupted the GPU ({message})")]
    Interrupted { call: &'static str, message: String },
    /// The bytes of an array are not as many as its shape says.
    #[error("mlx: array of shape {shape:?} and type {dtype}: {got} bytes, expected {expected}")]
    Length {
        shape: Vec<i32>,
        dtype: Dtype,
        /// Bytes that it takes.
        expected: u64,
        /// Bytes given.
        got: u64,
    },
    #[error("mlx: memory of an array of shape {shape:?} and type {dtype} that was not evaluated")]
    NotComputed { shape: Vec<i32>, dtype: Dtype },
    /// An array's memory was asked for as another type, or is not one run of rows.
    #[error("mlx: memory of an array as {asked}: it is {dtype}, rows one after the other: {rows}")]
    Memory {
        asked: Dtype,
        dtype: Dtype,
        /// Whether its rows follow one another.
        rows: bool,
    },
    #[error("mlx: start a thread: {0}")]
    Thread(std::io::Error),
    #[error("mlx: {needed} are needed ({what}), the device has {available}")]
    OutOfMemory {
        what: String,
        needed: Bytes,
        available: Bytes,
    },
}

impl Error {
    /// Whether less work at a time may succeed.
    pub const fn is_interrupted(&self) -> bool {
        matches!(self, Self::Interrupted { .. })
    }

    /// Of a call that failed with MLX's `message`.
    pub(crate) fn of_call(call: &'static str, message: String) -> Self {
        match INTERRUPTIONS.iter().any(|code| message.contains(code)) {
            true => Self::Interrupted { call, message },
            false => Self::Call { call, message },
        }
    }
}

fn each(errors: &[Error]) -> String {
    let texts = errors.iter().map(ToString::to_string);
    let texts: Vec<String> = texts.map(|text| text.replacen("mlx: ", "", 1)).collect();
    texts.join("; ")
}

fn list(paths: &[PathBuf]) -> String {
    if paths.is_empty() {
        return "no place at all".to_owned();
    }
    let paths: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
    paths.join(", ")
}
