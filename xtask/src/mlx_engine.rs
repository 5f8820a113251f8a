//! `cargo xtask mlx`: MLX's libraries for the tests of the engine of that name.
//!
//! The same code installs them as `paceline engines install mlx`, into a folder next to the test
//! models, where they stay.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use paceline_store::{Cancel, MlxBuild, PullOptions, Toolchain, install_mlx};

use crate::models;
use crate::tally::TestTally;

/// The variable from which the tests read the C layer's path.
pub(crate) const LIBRARY: &str = "PACELINE_MLXC";

const NAME: &str = "the MLX engine";

/// The C layer of the build for this processor; installed if need be.
pub(crate) fn library() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os(LIBRARY) {
        return Ok(given.into());
    }
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    let builds = [MlxBuild::Cpu, MlxBuild::Metal];
    let build = builds.into_iter().find(|build| build.exists_for(os, arch));
    ensure!(build.is_some(), "no MLX is published for {os} on {arch}");
    let installed = install_mlx(
        &models::folder()?.with_file_name("engines").join("mlx"),
        build.unwrap_or(MlxBuild::Cpu),
        &Toolchain::default(),
        &PullOptions::default(),
        &Cancel::default(),
        &mut models::LineProgress,
    )?;
    Ok(installed.library)
}

/// Installs the libraries and says where they are.
pub(crate) fn run(see: &mut impl FnMut(&str)) -> TestTally {
    match library() {
        Ok(path) => {
            see(&format!("{LIBRARY}={}", path.display()));
            TestTally::check(NAME, true)
        }
        Err(error) => TestTally::skip(NAME, &format!("{error:#}")),
    }
}
