//! Figures that the caller adds to `/metrics`.

use std::fmt;
use std::sync::Arc;

/// Figures of the process that the caller knows, such as memory and bytes on the wire.
#[derive(Clone)]
pub struct Facts(pub Arc<dyn Fn() -> Vec<Fact> + Send + Sync>);

impl Default for Facts {
    fn default() -> Self {
        Self(Arc::new(Vec::new))
    }
}

impl fmt::Debug for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Facts(..)")
    }
}

/// A figure, shown by `/metrics` as a gauge `paceline_<name>`. Both texts go out as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// Lower-case letters, digits and `_`, the unit last.
    pub name: &'static str,
    /// A line without a full stop at its end.
    pub help: &'static str,
    /// Labels that tell values of one name apart, as `layer="3",expert="7"`; empty for one value.
    /// Values of one name follow one another.
    pub labels: String,
    /// The value now.
    pub value: f64,
}
