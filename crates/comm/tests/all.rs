//! The integration tests of this crate: one program, so that they are linked once. `loom` stands
//! apart because it compiles the ring with the model checker's atomics.

#![allow(clippy::unwrap_used, reason = "helpers outside of test functions")]

mod faults;
mod tcp;
mod worker;
