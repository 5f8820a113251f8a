//! The integration tests of this crate: one program, so that they are linked once.

mod experts;
mod objectives;
mod published;
mod sane;
mod small;
mod solver;
