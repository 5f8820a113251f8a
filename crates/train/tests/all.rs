//! Training as its users see it.

#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod gradients;
mod ranks;
mod rows_of_data;
mod runs;
