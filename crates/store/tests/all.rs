//! The integration tests of this crate, linked as one program.

mod common;
mod engine;
mod hub;
mod several_files;
mod store;
mod wheel;
