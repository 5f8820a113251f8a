//! Models over several processes, as a user calls them. The tests check that any split gives the
//! same answer, and what the user reads about it. They also check what happens when a process
//! dies, is stopped or cannot start.
//!
//! Most tests run random models of some hundred kilobytes ([`tiny`]). Tests with a real one need
//! SmolLM2 in the folder that `cargo xtask models` fills, and say so when it is not there.
//!
//! Processes are looked up in `/proc`, so the tests are for Linux.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

pub(crate) mod adapted;
pub(crate) mod apart;
mod crowded;
mod drafted;
pub(crate) mod embeddings;
#[path = "../../../mlx/tests/fake/build.rs"]
pub(crate) mod fake;
mod hostile;
pub(crate) mod http;
mod kept;
mod load;
mod lost;
mod mlx;
pub(crate) mod processes;
mod same;
pub(crate) mod server;
mod shown;
mod steered;
pub(crate) mod tiny;
mod trace;
mod tty;
mod usage;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::common::home::TestHome;
use crate::common::{PATIENCE, finish, smollm2, text, until};
use paceline_base::lock;
use tiny::TinyModelSpec;

/// A failure is reported within 2 s. This is what a machine that runs other tests too may add to
/// that, on top of what a [`Stopwatch`](paceline_base::testing::Stopwatch) sees of it.
const REPORTED: Duration = Duration::from_millis(2500);

/// The limit for processes that have to end.
const ENDED: Duration = Duration::from_secs(1);

/// Tests that measure, and those with many processes, run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    lock(&ALONE)
}

impl TestHome {
    /// Writes a model; the answer is the MODEL of the command line.
    pub(crate) fn write_model(&self, tiny: TinyModelSpec) -> String {
        let path = self.path(&format!("models/{}.gguf", tiny.family));
        tiny.write(&path);
        path.to_str().unwrap().to_owned()
    }
}
