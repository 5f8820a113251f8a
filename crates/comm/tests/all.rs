//! The integration tests of this crate in one program, so that they are linked once. `loom` is
//! separate because it compiles the ring with the model checker's atomics.

#![allow(clippy::unwrap_used, reason = "helpers outside of test functions")]

mod deaths;
mod faults;
mod worker;
