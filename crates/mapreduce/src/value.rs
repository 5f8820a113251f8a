//! Numbers as results have them and as messages carry them.

use std::fmt;

use paceline_base::exact::ExactSum;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A result: a float, or an integer without rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ResultValue {
    /// Printed as the shortest text that gives the f64 back.
    Float(f64),
    /// Printed with all digits.
    Int(i128),
}

impl ResultValue {
    /// The nearest f64.
    pub const fn as_f64(self) -> f64 {
        match self {
            Self::Float(value) => value,
            Self::Int(value) => value as f64,
        }
    }
}

impl fmt::Display for ResultValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Int(value) => write!(f, "{value}"),
        }
    }
}

impl Serialize for ResultValue {
    /// A JSON number; NaN and infinities, which JSON lacks, as `"NaN"`, `"inf"` and `"-inf"`, which
    /// Python's `float()` accepts.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Float(value) if value.is_finite() => serializer.serialize_f64(*value),
            Self::Float(value) => serializer.collect_str(value),
            Self::Int(value) => serializer.serialize_i128(*value),
        }
    }
}

/// An f64 in messages: its bits, since JSON has no NaN and readers round.
pub(crate) mod bits {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(value.to_bits())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(of: D) -> Result<f64, D::Error> {
        u64::deserialize(of).map(f64::from_bits)
    }
}

/// Many f64 in messages: their bits.
pub(crate) mod all_bits {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(values: &[f64], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(values.iter().map(|value| value.to_bits()))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(of: D) -> Result<Vec<f64>, D::Error> {
        let bits = Vec::<u64>::deserialize(of)?;
        Ok(bits.into_iter().map(f64::from_bits).collect())
    }
}

/// An integer in messages: its digits, since JSON's numbers end at 64 bits in some readers.
pub(crate) mod digits {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(value: &i128, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(of: D) -> Result<i128, D::Error> {
        String::deserialize(of)?.parse().map_err(D::Error::custom)
    }
}

/// An exact sum in messages: its bytes in hexadecimal.
pub(crate) mod exact {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(sum: &ExactSum, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&text_of(sum))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(of: D) -> Result<ExactSum, D::Error> {
        sum_of(&String::deserialize(of)?).map_err(D::Error::custom)
    }
}

/// Many exact sums in messages.
pub(crate) mod all_exact {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(sums: &[ExactSum], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(sums.iter().map(text_of))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(of: D) -> Result<Vec<ExactSum>, D::Error> {
        let texts = Vec::<String>::deserialize(of)?;
        let sums = texts
            .iter()
            .map(|text| sum_of(text).map_err(D::Error::custom));
        sums.collect()
    }
}

/// An exact sum's bytes in hexadecimal.
pub(crate) fn text_of(sum: &ExactSum) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |value: u8| char::from(DIGITS[usize::from(value)]);
    let bytes = sum.to_bytes().into_iter();
    bytes
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

pub(crate) fn sum_of(text: &str) -> Result<ExactSum, String> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pair = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?);
    let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(pair).collect();
    let bytes = bytes.ok_or("no hexadecimal text")?;
    ExactSum::from_bytes(&bytes).map_err(|error| error.to_string())
}
