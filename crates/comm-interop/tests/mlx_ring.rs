//! Rings of Rust and real MLX ranks.
//!
//! Needs a Python with `mlx`. `cargo xtask mlx-ring` and `cargo xtask test` make one and pass its
//! path in `PACELINE_MLX_PYTHON`. Without it the tests are reported as skipped. Rust ranks are
//! threads of this process, Python ranks are processes that run `mlx_ring/*.py`.
//!
//! - `mixed`: every call, type, length and position in the ring;
//! - `deaths`: a Rust rank whose MLX peer dies or stops;
//! - `cases`: the cases of MLX's own suite, half of the ranks with MLX's ring and half with ours.
//!
//! All thirteen cases of MLX's ring suite (eight of them common to its suites) are in `cases.py` by
//! their own names, and `cases::mlxs_own_cases_pass_in_a_mixed_ring` demands each. The types and
//! lengths that MLX leaves out are in `mixed`.

#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    reason = "a test, with helpers outside of test functions"
)]

mod cases;
mod deaths;
mod mixed;
mod python;
mod serve;
