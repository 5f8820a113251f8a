//! `cargo xtask release`: programs, wheels, packages, images and install.sh for Linux on x86-64 and
//! AArch64.
//!
//! Zig links them against glibc 2.28, so that they run on every Linux from 2018 on.
//! `packaging/release.py` builds and checks; its lines are outcomes, as those of the clients'
//! scripts are. It compiles everything once for each processor and takes as many times README's
//! first build.

use std::process::Command;

use anyhow::Result;

use crate::tally::TestTally;
use crate::{models, process, repo, rust_target, sdk, venv};

const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// Number of builds to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Builds {
    /// Here.
    Once,
    /// In a clone elsewhere too, whose files must be the same.
    Twice,
}

/// Makes `target/publish` and checks it.
///
/// # Errors
/// When the script cannot be started. Missing tools are a skip.
pub(crate) fn run(builds: Builds, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let folder = models::folder()?.with_file_name("test-clients/release");
    let tools = TARGETS
        .iter()
        .try_for_each(|target| rust_target::install(target))
        .and_then(|()| venv::python_in(&folder, "package/requirements-release.txt"));
    let python = match tools {
        Ok(python) => python,
        Err(error) => return Ok(TestTally::skip("builds to publish", &format!("{error:#}"))),
    };
    let mut command = Command::new(python);
    command.arg(repo::root().join("packaging/release.py"));
    command.current_dir(repo::root());
    if builds == Builds::Twice {
        command.arg("--twice");
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    sdk::cases("release", &process::log_path("release"), command, see)
}
