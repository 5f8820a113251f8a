//! The integration tests of this crate, linked as one program.

mod common;
mod engine;
mod hub;
mod store;
mod wheel;
