//! Call sites, for the lockstep guard.

use std::fmt;
use std::panic::Location;

/// The site of a call in its program: a source line, or a number set by the caller.
///
/// A rank that omits a call and then makes the same one from another site is detected at once. By
/// operation, type and length alone its data would be taken for the omitted call's.
///
/// A file is identified by the end of its path, so ranks must run the same source, built anywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Site(u64);

/// Distinguishes lines from marks.
const LINE: u64 = 1 << 63;

impl Site {
    /// No site; compared like any other.
    pub const NONE: Self = Self(0);

    /// The line of the caller.
    #[track_caller]
    pub fn here() -> Self {
        let place = Location::caller();
        let end = place.file().as_bytes().last_chunk::<8>();
        let end = u64::from_le_bytes(end.copied().unwrap_or_default());
        // Fibonacci hashing (Knuth, TAOCP 3, 6.4): the high bits are the well-mixed ones.
        let mixed = (end ^ u64::from(place.column())).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(LINE | mixed >> 33 << 32 | u64::from(place.line()))
    }

    /// A number set by the caller; its highest bit is unused.
    pub const fn mark(number: u64) -> Self {
        Self(number & !LINE)
    }

    pub(crate) const fn code(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_code(code: u64) -> Self {
        Self(code)
    }
}

impl fmt::Display for Site {
    /// `line 12 of file #0123abcd` or `mark 7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 & LINE {
            0 => write!(f, "mark {}", self.0),
            _ => {
                let file = (self.0 & !LINE) >> 32;
                write!(f, "line {} of file #{file:08x}", self.0 & 0xffff_ffff)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_differ_by_line_column_and_mark() {
        let same: Vec<Site> = (0..2).map(|_| Site::here()).collect();
        assert_eq!(same[0], same[1]);
        let line = line!() + 1;
        let (one, other) = (Site::here(), Site::here());
        assert_ne!(one, other);
        assert!(
            one.to_string()
                .starts_with(&format!("line {line} of file #")),
            "{one}"
        );
        assert_eq!(Site::from_code(one.code()), one);
        assert_ne!(Site::mark(u64::from(line)), one);
        assert_eq!(Site::mark(7).to_string(), "mark 7");
        assert_eq!(Site::mark(u64::MAX), Site::mark(u64::MAX >> 1));
    }
}
