//! Types of keys and values.

use std::str::FromStr;

use paceline_base::KernelClass;

/// Elements that share a scale in [`KvType::Q8`]; the last of a head may be fewer.
pub(crate) const Q8_RUN: usize = 32;

/// [`Q8_RUN`] in [`KvType::Q4`]. With 32 a position has a quarter bit more for each element, and
/// SmolLM2's text is no more likely.
pub(crate) const Q4_RUN: usize = 64;

paceline_base::named_enum! {
    /// Element type of keys and values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum KvType {
        /// Half precision, rounded to nearest even: the kernel class `cpu`.
        F16 = "f16",
        /// Single precision: the kernel class `cpu-f32`.
        F32 = "f32",
        /// A byte each and a scale for 32: 0.27 of the memory of `F32`.
        Q8 = "q8",
        /// Keys of five bits and values of four, a scale for 64: 0.15 of the memory of `F32`.
        /// Layers of latent attention have bytes ([`of_latent`](Self::of_latent)).
        Q4 = "q4",
    }
}

impl KvType {
    /// The default of a kernel class.
    pub const fn of(class: KernelClass) -> Self {
        match class {
            KernelClass::CpuF32 => Self::F32,
            _ => Self::F16,
        }
    }

    /// The type that layers of latent attention have: their keys are their values too, so that they
    /// are few and have no bits to lose.
    #[must_use]
    pub const fn of_latent(self) -> Self {
        match self {
            Self::Q4 => Self::Q8,
            other => other,
        }
    }

    /// Whether elements are integers with scales.
    pub const fn is_quantised(self) -> bool {
        self.run().is_some()
    }

    /// Bits of an element on average, scales included, in heads of whole runs.
    pub fn stored_bits(self) -> f64 {
        let scale = self.run().map_or(0.0, |run| 16.0 / run as f64);
        (self.key_bits() + self.value_bits()) as f64 / 2.0 + scale
    }

    /// Elements that share a scale, if some do.
    pub(super) const fn run(self) -> Option<usize> {
        match self {
            Self::F16 | Self::F32 => None,
            Self::Q8 => Some(Q8_RUN),
            Self::Q4 => Some(Q4_RUN),
        }
    }

    /// Bits of an element of a key, scales left out.
    pub(crate) const fn key_bits(self) -> usize {
        match self {
            Self::F16 => 16,
            Self::F32 => 32,
            Self::Q8 => 8,
            Self::Q4 => 5,
        }
    }

    /// Bits of an element of a value.
    pub(super) const fn value_bits(self) -> usize {
        match self {
            Self::Q4 => 4,
            other => other.key_bits(),
        }
    }
}

/// Not the name of a storage type of keys and values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown type of keys and values {0:?}, expected f16, f32, q8 or q4")]
pub struct UnknownKvType(pub String);

impl FromStr for KvType {
    type Err = UnknownKvType;

    fn from_str(name: &str) -> Result<Self, UnknownKvType> {
        Self::from_name(name).ok_or_else(|| UnknownKvType(name.to_owned()))
    }
}
