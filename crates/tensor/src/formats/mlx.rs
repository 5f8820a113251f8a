//! The packed forms of MLX's types: the planes of the others, and a table of their own.

use super::Codebook;
use crate::storage::E2M1_DOUBLED;

/// The table of e2m1 codes, as twice their values.
#[derive(Debug)]
pub(crate) struct Floats4;

impl Codebook for Floats4 {
    const VALUES: [i8; 16] = E2M1_DOUBLED;
}
