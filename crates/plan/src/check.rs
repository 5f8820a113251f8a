//! Range checks that name the number they refuse.

use crate::Error;

/// Whether `got` is a number from `low` to `high`, both included; NaN is not.
pub(crate) fn finite_in(
    what: &str,
    field: &'static str,
    got: f64,
    low: f64,
    high: f64,
    expected: &'static str,
) -> Result<(), Error> {
    if got >= low && got <= high {
        return Ok(());
    }
    Err(Error::Value {
        what: what.to_owned(),
        field,
        got: got.to_string(),
        expected,
    })
}

/// Whether `got` is from `low` to `high`, both included.
pub(crate) fn whole_in(
    what: &str,
    field: &'static str,
    got: u32,
    low: u32,
    high: u32,
) -> Result<(), Error> {
    if got >= low && got <= high {
        return Ok(());
    }
    let expected = if got < low { "more" } else { "less" };
    Err(Error::Value {
        what: what.to_owned(),
        field,
        got: got.to_string(),
        expected,
    })
}
