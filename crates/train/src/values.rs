//! The values of what is trained, part by part, wherever they are.

use crate::error::Error;
use crate::weights::Parts;

/// Gives the values of one part at a time: see [`Parts`].
pub(crate) trait PartValues {
    /// The values of a part, until the next call. Where ranks share the values, all of them ask for
    /// the same parts in the same order.
    ///
    /// # Errors
    /// [`Error::Comm`] of the ranks that have them; none where all values are here.
    fn part(&mut self, part: usize) -> Result<&[f32], Error>;
}

/// All values, in this process.
pub(crate) struct WholeValues<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) parts: &'a Parts,
}

impl PartValues for WholeValues<'_> {
    fn part(&mut self, part: usize) -> Result<&[f32], Error> {
        Ok(&self.values[self.parts.values[part].clone()])
    }
}
