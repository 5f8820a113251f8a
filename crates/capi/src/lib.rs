//! `libpaceline_c`: groups and inference for C, and for any language that calls C.
//!
//! ```text
//! a program in C --paceline.h--> this crate: checks pointers, keeps the last error
//!                                    |                      |
//!                          paceline_comm::Group   paceline_engine::Runner (one process)
//! ```
//!
//! Every function returns a [`PacelineStatus`], 0 for success; [`paceline_last_error`] has the text
//! of this thread's last failure. Functions that wait take a deadline in seconds. A panic becomes
//! [`PacelineStatus::Failed`] and never unwinds into C. Several threads may use a handle, but not
//! free it while another thread uses it.
//!
//! - `group`: ranks that compute together; `model`: text generation with a model on this machine.
//! - `status`: failures. cbindgen generates `include/paceline.h` from all three (the first line of
//!   `cbindgen.toml`).

#![allow(
    unsafe_code,
    reason = "pointers of C callers: each function says what it asks of them"
)]

mod group;
mod model;
mod status;

pub use group::*;
pub use model::*;
pub use status::*;
