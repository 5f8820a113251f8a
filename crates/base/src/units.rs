//! Newtypes for units and indices at public borders.

use std::fmt;

/// A number of bytes. Prints with binary prefixes: `93.8 MiB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Parses a text such as `500M` or `2G`, in powers of 1024.
    pub fn parse(text: &str) -> Result<Self, BytesError> {
        let (digits, shift) = match text.strip_suffix(['K', 'M', 'G', 'T']) {
            Some(digits) => (
                digits,
                10 * (1 + "KMGT".find(&text[digits.len()..]).unwrap_or(0)),
            ),
            None => (text, 0),
        };
        let number: Option<u64> = digits.parse().ok();
        let bytes = number.and_then(|number| number.checked_mul(1 << shift));
        bytes.map(Self).ok_or(BytesError)
    }
}

/// A text that is no number of bytes. Its caller has the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BytesError;

impl fmt::Display for BytesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected a number of bytes, as 500M or 2G")
    }
}

impl std::error::Error for BytesError {}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.1} {}", UNITS[unit])
    }
}

/// A duration in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub u64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} µs", self.0)
    }
}

/// A member of a group, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// A transformer layer, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub u32);

impl fmt::Display for LayerIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_with_binary_prefixes() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (98_362_432, "93.8 MiB"),
            (3 << 30, "3.0 GiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn texts_of_bytes_have_units() {
        for (text, bytes) in [
            ("17", Some(17)),
            ("3K", Some(3 << 10)),
            ("500M", Some(500 << 20)),
            ("1T", Some(1 << 40)),
            ("", None),
            ("G", None),
            ("-1M", None),
            ("99999999999T", None),
        ] {
            assert_eq!(Bytes::parse(text).ok(), bytes.map(Bytes), "{text}");
        }
    }
}
