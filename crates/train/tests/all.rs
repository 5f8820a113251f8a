//! Training as its users see it.

mod gradients;
mod runs;
