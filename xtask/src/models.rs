//! `cargo xtask models`: the models that tests read, fetched and made once.
//!
//! Two are real: SmolLM2, without which most tests have nothing to run and the step fails, and
//! Gemma 3, whose tests are skipped by name when it cannot be had. The rest are small synthetic
//! models, one for every storage type, made by `scripts/models/quant_models.py`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::tally::Tally;
use crate::{process, repo, venv};

/// Gemma is 253 MB; a line slower than 2 Mbit/s counts as none.
const FETCH_LIMIT: Duration = Duration::from_secs(1200);

/// Fifteen models at 3 to 5 s each on two cores, with room for a machine four times slower.
const SYNTHESIS_LIMIT: Duration = Duration::from_secs(300);

/// File name of SmolLM2-135M-Instruct, as `scripts/models/fetch_models.sh` leaves it.
const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Where tests look for models: `PACELINE_TEST_MODELS`, or a folder in the user's cache.
///
/// # Errors
/// When neither that variable nor `HOME` is set.
pub(crate) fn folder() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("PACELINE_TEST_MODELS") {
        return Ok(folder.into());
    }
    let home = std::env::var_os("HOME").context("PACELINE_TEST_MODELS and HOME are not set")?;
    Ok(Path::new(&home).join(".cache/paceline/test-models"))
}

/// Brings all test models into `into`, or into [`folder`]. What is there and whole is kept.
///
/// # Errors
/// When SmolLM2 cannot be fetched.
pub(crate) fn run(into: Option<PathBuf>) -> Result<Tally> {
    let folder = into.map_or_else(folder, Ok)?;
    let mut tally = Tally::default();
    fetch(&folder, &["--smollm2-only"]).context("fetch SmolLM2, which the tests need")?;
    tally.add(Tally::check("smollm2", true));
    tally.add(optional("gemma3 tests", || fetch(&folder, &[])));
    tally.add(optional("storage type tests", || synthesise(&folder)));
    Ok(tally)
}

/// Passed, or a skip that carries the error.
fn optional(name: &str, make: impl FnOnce() -> Result<()>) -> Tally {
    match make() {
        Ok(()) => Tally::check(name, true),
        Err(error) => Tally::skip(name, &format!("{error:#}")),
    }
}

fn fetch(folder: &Path, options: &[&str]) -> Result<()> {
    let mut command = Command::new("sh");
    command
        .arg(repo::root().join("scripts/models/fetch_models.sh"))
        .args(options)
        .arg(folder);
    print_lines(&process::capture(command, FETCH_LIMIT)?);
    Ok(())
}

fn synthesise(folder: &Path) -> Result<()> {
    let mut command = Command::new(venv::python_with("requirements.txt")?);
    command.arg(repo::root().join("scripts/models/quant_models.py"));
    command.arg(folder.join(SMOLLM2)).arg(folder);
    print_lines(&process::capture(command, SYNTHESIS_LIMIT)?);
    Ok(())
}

fn print_lines(text: &str) {
    text.lines().for_each(|line| println!("{line}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_optional_model_is_skipped_with_the_whole_reason() {
        let fails = || Err(anyhow::anyhow!("no answer").context("fetch the wheel"));
        let tally = optional("gemma3 tests", fails);
        assert_eq!(tally.to_string(), "0 passed, 0 failed, 1 skipped");
        assert_eq!(tally.skips[0].reason, "fetch the wheel: no answer");
        assert_eq!(optional("x", || Ok(())).passed, 1);
    }
}
