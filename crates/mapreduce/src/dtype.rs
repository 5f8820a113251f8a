//! Types of the values of arrays.

use serde::{Deserialize, Serialize};

/// The type of an array's values, little-endian in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "their names say all")]
pub enum Dtype {
    F64,
    F32,
    F16,
    /// The upper half of an f32.
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

/// Type, name in options, name in `.npy` files, bytes of a value.
const TABLE: [(Dtype, &str, &str, usize); 13] = [
    (Dtype::F64, "f64", "<f8", 8),
    (Dtype::F32, "f32", "<f4", 4),
    (Dtype::F16, "f16", "<f2", 2),
    // NumPy has no such type: the name is that of the package ml_dtypes.
    (Dtype::BF16, "bf16", "bfloat16", 2),
    (Dtype::I64, "i64", "<i8", 8),
    (Dtype::I32, "i32", "<i4", 4),
    (Dtype::I16, "i16", "<i2", 2),
    (Dtype::I8, "i8", "|i1", 1),
    (Dtype::U64, "u64", "<u8", 8),
    (Dtype::U32, "u32", "<u4", 4),
    (Dtype::U16, "u16", "<u2", 2),
    (Dtype::U8, "u8", "|u1", 1),
    (Dtype::Bool, "bool", "|b1", 1),
];

/// Largest integer below which all integers are f64 values.
const EXACT_MAX: i64 = 1 << 53;

impl Dtype {
    fn row(self) -> (&'static str, &'static str, usize) {
        let row = TABLE.iter().find(|row| row.0 == self);
        let (_, name, descr, bytes) = row.expect("the table has every type");
        (name, descr, *bytes)
    }

    /// The name used in options.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// The name in `.npy` files.
    pub fn descr(self) -> &'static str {
        self.row().1
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        self.row().2
    }

    /// Whether the values are integers; those of `bool` are 0 and 1.
    pub const fn is_integer(self) -> bool {
        !matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16)
    }

    /// The type that a `.npy` file calls so.
    pub fn from_descr(descr: &str) -> Option<Self> {
        let same = |theirs: &str| theirs == descr || theirs.replace('|', "<") == descr;
        TABLE.iter().find(|row| same(row.2)).map(|row| row.0)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Not the name of a type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no type is called {0:?}, expected f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8 \
     or bool"
)]
pub struct UnknownDtype(pub String);

impl std::str::FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(text: &str) -> Result<Self, UnknownDtype> {
        let row = TABLE.iter().find(|row| row.1 == text);
        row.map(|row| row.0)
            .ok_or_else(|| UnknownDtype(text.to_owned()))
    }
}

/// Values of a block: as f64 where that is exact, else as wide integers.
#[derive(Debug)]
pub enum Values<'a> {
    /// Every value is exactly an f64.
    Floats(&'a [f64]),
    /// Integers of 64 bits, some of them beyond 2^53.
    Wide(&'a [i128]),
}

impl Values<'_> {
    /// The values as f64, wide integers as the nearest ones, for which `room` is used.
    pub fn nearest<'b>(&'b self, room: &'b mut Vec<f64>) -> &'b [f64] {
        match self {
            Self::Floats(values) => values,
            Self::Wide(values) => {
                room.clear();
                room.extend(values.iter().map(|value| *value as f64));
                room
            }
        }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::Floats(values) => values.len(),
            Self::Wide(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Room for the values of a block, used again for the next.
#[derive(Debug, Default)]
pub struct Decoded {
    floats: Vec<f64>,
    wide: Vec<i128>,
}

impl Decoded {
    /// The values of `bytes`, whole values of type `dtype`. Costs a pass in the cache.
    pub fn decode(&mut self, dtype: Dtype, bytes: &[u8]) -> Values<'_> {
        match dtype {
            Dtype::F64 => self.fill(bytes, f64::from_le_bytes),
            Dtype::F32 => self.fill(bytes, |b| f32::from_le_bytes(b).into()),
            Dtype::F16 => self.fill(bytes, |b| f16(u16::from_le_bytes(b))),
            Dtype::BF16 => self.fill(bytes, |[low, high]| {
                f32::from_le_bytes([0, 0, low, high]).into()
            }),
            Dtype::I32 => self.fill(bytes, |b| i32::from_le_bytes(b).into()),
            Dtype::I16 => self.fill(bytes, |b| i16::from_le_bytes(b).into()),
            Dtype::I8 => self.fill(bytes, |b| i8::from_le_bytes(b).into()),
            Dtype::U32 => self.fill(bytes, |b| u32::from_le_bytes(b).into()),
            Dtype::U16 => self.fill(bytes, |b| u16::from_le_bytes(b).into()),
            Dtype::U8 => self.fill(bytes, |b| u8::from_le_bytes(b).into()),
            Dtype::Bool => self.fill(bytes, |[b]| f64::from(b != 0)),
            Dtype::I64 => {
                let range = -EXACT_MAX..=EXACT_MAX;
                return self.fill_wide(
                    bytes,
                    i64::from_le_bytes,
                    |v| range.contains(v),
                    |v| v as f64,
                );
            }
            Dtype::U64 => {
                let max = EXACT_MAX as u64;
                return self.fill_wide(bytes, u64::from_le_bytes, |v| *v <= max, |v| v as f64);
            }
        }
        Values::Floats(&self.floats)
    }

    /// The values of rows in this order.
    pub(crate) fn ordered(&mut self, values: &Values<'_>, order: &[u32]) -> Values<'_> {
        match values {
            Values::Floats(values) => {
                self.floats = order.iter().map(|row| values[*row as usize]).collect();
                Values::Floats(&self.floats)
            }
            Values::Wide(values) => {
                self.wide = order.iter().map(|row| values[*row as usize]).collect();
                Values::Wide(&self.wide)
            }
        }
    }

    fn fill<const N: usize>(&mut self, bytes: &[u8], value: impl Fn([u8; N]) -> f64) {
        self.floats.clear();
        self.floats
            .extend(bytes.as_chunks().0.iter().map(|chunk| value(*chunk)));
    }

    fn fill_wide<T: Copy + Into<i128>>(
        &mut self,
        bytes: &[u8],
        value: impl Fn([u8; 8]) -> T,
        fits: impl Fn(&T) -> bool,
        float: impl Fn(T) -> f64,
    ) -> Values<'_> {
        let values = || bytes.as_chunks().0.iter().map(|chunk| value(*chunk));
        if values().all(|value| fits(&value)) {
            self.floats.clear();
            self.floats.extend(values().map(float));
            return Values::Floats(&self.floats);
        }
        self.wide.clear();
        self.wide.extend(values().map(Into::into));
        Values::Wide(&self.wide)
    }
}

/// The value of a float of IEEE 754 with 16 bits: 5 of exponent, 10 of fraction.
fn f16(bits: u16) -> f64 {
    let (exponent, fraction) = (u64::from(bits >> 10 & 31), u64::from(bits & 0x3ff));
    let size = match exponent {
        // Fractions of the smallest normal number, 2^-14.
        0 => fraction as f64 / f64::from(1 << 24),
        31 if fraction == 0 => f64::INFINITY,
        31 => f64::NAN,
        _ => f64::from_bits((exponent + 1023 - 15) << 52 | fraction << 42),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for (dtype, name, descr, bytes) in TABLE {
            assert_eq!(name.parse(), Ok(dtype));
            assert_eq!(Dtype::from_descr(descr), Some(dtype));
            assert_eq!(
                (dtype.name(), dtype.descr(), dtype.bytes()),
                (name, descr, bytes)
            );
        }
        assert_eq!(Dtype::from_descr(">f8"), None);
        assert!("float".parse::<Dtype>().is_err());
    }

    /// Values of IEEE 754-2019, table of binary16.
    #[test]
    fn halves_are_exact() {
        let mut decoded = Decoded::default();
        for (bits, expected) in [
            (0x3c00u16, 1.0),
            (0xc000, -2.0),
            (0x2e66, 0.099_975_585_937_5),
            (0x7bff, 65504.0),
            (0x0001, 2f64.powi(-24)),
            (0x03ff, 1023.0 / 2f64.powi(24)),
            (0x0400, 2f64.powi(-14)),
            (0x7c00, f64::INFINITY),
            (0x8000, -0.0),
        ] {
            let Values::Floats([got]) = decoded.decode(Dtype::F16, &bits.to_le_bytes()) else {
                panic!("{bits:x} is one value");
            };
            assert_eq!(got.to_bits(), expected.to_bits(), "{bits:x}");
        }
        let bytes = [0x3f80u16, 0xc040].map(u16::to_le_bytes).concat();
        let values = decoded.decode(Dtype::BF16, &bytes);
        assert!(matches!(values, Values::Floats([1.0, -3.0])));
    }

    #[test]
    fn integers_beyond_f64_stay_exact() {
        let mut decoded = Decoded::default();
        let big = (1u64 << 53) + 1;
        let bytes = [big.to_le_bytes(), 3u64.to_le_bytes()].concat();
        let Values::Wide(wide) = decoded.decode(Dtype::U64, &bytes) else {
            panic!("{big} is no f64");
        };
        assert_eq!(wide, [i128::from(big), 3]);
        let bytes = (-7i64).to_le_bytes();
        assert!(matches!(
            decoded.decode(Dtype::I64, &bytes),
            Values::Floats([-7.0])
        ));
        assert!(matches!(
            decoded.decode(Dtype::Bool, &[0, 1, 2]),
            Values::Floats([0.0, 1.0, 1.0])
        ));
        assert!(matches!(
            decoded.decode(Dtype::I8, &[0xff]),
            Values::Floats([-1.0])
        ));
    }
}
