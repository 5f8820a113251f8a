//! The integration tests of this crate: one program, so that they are linked once.

mod every_id;
mod questions;
