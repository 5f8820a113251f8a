//! The integration tests of this crate: one program, so that they are linked once.

mod common;
mod engine;
mod hub;
mod store;
mod wheel;
