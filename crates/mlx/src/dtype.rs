//! Types of values.

use std::ffi::c_int;
use std::fmt;

/// The type of an array's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// Truth values, a byte each.
    Bool,
    /// Bytes.
    U8,
    /// What quantised weights are packed into.
    U32,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// The upper half of a single.
    BF16,
    /// One that is not used here.
    Other(c_int),
}

impl Dtype {
    /// `mlx_dtype`
    pub(crate) const fn number(self) -> c_int {
        match self {
            Self::Bool => 0,
            Self::U8 => 1,
            Self::U32 => 3,
            Self::F16 => 9,
            Self::F32 => 10,
            Self::BF16 => 12,
            Self::Other(number) => number,
        }
    }

    pub(crate) const fn from_number(number: c_int) -> Self {
        match number {
            0 => Self::Bool,
            1 => Self::U8,
            3 => Self::U32,
            9 => Self::F16,
            10 => Self::F32,
            12 => Self::BF16,
            other => Self::Other(other),
        }
    }

    /// Bytes of a value; 0 for one that is not used here.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::F32 => 4,
            Self::Other(_) => 0,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("bool"),
            Self::U8 => f.write_str("uint8"),
            Self::U32 => f.write_str("uint32"),
            Self::F16 => f.write_str("float16"),
            Self::F32 => f.write_str("float32"),
            Self::BF16 => f.write_str("bfloat16"),
            Self::Other(number) => write!(f, "type number {number}"),
        }
    }
}
