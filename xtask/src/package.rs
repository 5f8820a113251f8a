//! `cargo xtask package`: packages for Linux distributions, the C library, service units, samples.
//!
//! `packaging/make.py` makes the packages. `packaging/check.py` checks them and the other
//! artifacts; its lines are outcomes, as those of the clients' scripts are.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::extent::TestExtent;
use crate::tally::TestTally;
use crate::{models, process, repo, sdk, venv};

/// Builds the program and the C library, and checks all that is made of them.
pub(crate) fn run(extent: TestExtent, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let binary = sdk::build(see)?;
    library(see)?;
    check(
        &binary,
        (extent == TestExtent::Long).then_some("--long"),
        see,
    )
}

/// Checks what takes seconds: completions, manual, units, and samples for schedulers.
pub(crate) fn samples(binary: &Path, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    check(binary, Some("--samples"), see)
}

fn check(binary: &Path, option: Option<&str>, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let mut tally = TestTally::default();
    let mut command = Command::new(python(&mut tally)?);
    command.arg(repo::root().join("packaging/check.py"));
    command.arg(binary).env("PYTHONDONTWRITEBYTECODE", "1");
    if let Ok(model) = models::smollm2() {
        command.arg("--model").arg(model);
    }
    command.args(option);
    tally.add(sdk::cases(
        "package",
        &process::log_path("package"),
        command,
        see,
    )?);
    Ok(tally)
}

/// A Python with what the checks import, or the system's, which checks less.
fn python(tally: &mut TestTally) -> Result<PathBuf> {
    let folder = models::folder()?.with_file_name("test-clients/package");
    Ok(match venv::python_in(&folder, "package/requirements.txt") {
        Ok(python) => python,
        Err(error) => {
            tally.add(TestTally::skip(
                "schemas of manifests",
                &format!("{error:#}"),
            ));
            "python3".into()
        }
    })
}

/// Builds `libpaceline_c` next to the program. Builds all libraries, since the features of one
/// package alone differ from the workspace's, and everything would be compiled again.
fn library(see: &mut impl FnMut(&str)) -> Result<()> {
    let mut command = repo::cargo();
    command.args(["build", "--release", "--lib"]);
    let built = process::stream(command, &process::log_path("package-build"), |line| {
        if !process::is_progress(line) {
            see(line);
        }
    });
    ensure!(
        built.context("cargo cannot be run")?,
        "the C library does not build"
    );
    Ok(())
}
