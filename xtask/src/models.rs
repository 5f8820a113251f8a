//! `cargo xtask models`: the models that tests read, fetched and made once.
//!
//! Two are real. Without SmolLM2 most tests have nothing to run and the step fails. Gemma 3's tests
//! are skipped by name when it is missing. SmolLM2 is also there in MLX's form
//! (`scripts/models/mlx_folder.py`). MiniLM, an encoder, comes by `minilm.rs` or is skipped. Chat
//! templates of real models come by `templates.rs`, without the models. The rest are small
//! synthetic models, one for every storage type of GGUF, made by `scripts/models/quant_models.py`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use paceline_store::{
    Cancel, Catalogue, CatalogueModel, Home, PullOptions, PullProgress, Resolution, pull, resolve,
};
use sha2::{Digest, Sha256};

use crate::tally::TestTally;
use crate::{minilm, process, repo, schemas, templates, tokenizers, venv};

/// Fifteen models at 3 to 5 s each on two cores, with room for a machine four times slower.
const SYNTHESIS_LIMIT: Duration = Duration::from_secs(300);

/// The tests' folder of models: `PACELINE_TEST_MODELS`, or a folder in the user's cache.
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
pub(crate) fn run(into: Option<PathBuf>) -> Result<TestTally> {
    let folder = into.map_or_else(folder, Ok)?;
    let smollm2 = fetch(&folder, "smollm2").context("fetch SmolLM2, which the tests need")?;
    let mut tally = TestTally::check("smollm2", true);
    tally.add(optional("gemma3 tests", || {
        fetch(&folder, "gemma3-270m").map(|_| ())
    }));
    tally.add(optional("storage type tests", || {
        synthesise(&smollm2, &folder)
    }));
    tally.add(optional("tests of SmolLM2 in MLX's form", || {
        in_mlx_form(&smollm2, &folder)
    }));
    tally.add(optional("tests of large vocabularies", || {
        tokenizers::fetch(&folder)
    }));
    tally.add(optional("tests of MiniLM", || minilm::fetch(&folder)));
    tally.add(optional("the JSON-Schema test suite", || {
        schemas::fetch(&folder)
    }));
    tally.add(optional("tests of real chat templates", || {
        templates::fetch(&folder)
    }));
    Ok(tally)
}

/// The file of SmolLM2, fetched if need be.
pub(crate) fn smollm2() -> Result<PathBuf> {
    fetch(&folder()?, "smollm2").context("fetch SmolLM2, which the tests need")
}

/// Passed, or a skip that carries the error.
fn optional(name: &str, make: impl FnOnce() -> Result<()>) -> TestTally {
    match make() {
        Ok(()) => TestTally::check(name, true),
        Err(error) => TestTally::skip(name, &format!("{error:#}")),
    }
}

/// The catalogue's model `alias` as a file directly in `folder`; gives its path.
///
/// The store fetches it into a home of its own below `folder`, where an interrupted download stays
/// to be resumed. The complete file is moved out.
fn fetch(folder: &Path, alias: &str) -> Result<PathBuf> {
    let model = Catalogue::BUILTIN.find(alias);
    let model = model.with_context(|| format!("{alias} is not in the catalogue"))?;
    let target = folder.join(model.file);
    if is_whole(&target, model)? {
        println!("present  {}", target.display());
        return Ok(target);
    }
    let home = Home::new(folder.join(".store"));
    let found = match resolve(&home, alias)? {
        Resolution::Path(found) => found,
        Resolution::NeedsDownload(plan) => {
            let options = PullOptions::default();
            pull(
                &home,
                &plan,
                &options,
                &Cancel::default(),
                &mut LineProgress,
                SystemTime::now(),
            )?
            .found
        }
    };
    let entry = found
        .path
        .parent()
        .filter(|entry| entry.starts_with(home.root()));
    let entry = entry.with_context(|| format!("{} is not the store's", found.path.display()))?;
    fs::rename(&found.path, &target).with_context(|| format!("move to {}", target.display()))?;
    fs::remove_dir_all(entry).with_context(|| format!("remove {}", entry.display()))?;
    println!("fetched  {}", target.display());
    Ok(target)
}

/// True when the file is there with the catalogue's size and hash.
fn is_whole(path: &Path, model: &CatalogueModel) -> Result<bool> {
    if !fs::metadata(path).is_ok_and(|data| data.len() == model.bytes.0) {
        return Ok(false);
    }
    let mut hash = Sha256::new();
    let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    io::copy(&mut file, &mut hash).with_context(|| format!("read {}", path.display()))?;
    Ok(format!("{:x}", hash.finalize()) == model.sha256)
}

/// Prints a line per download: a progress bar is of no use in a test run's log.
pub(crate) struct LineProgress;

impl PullProgress for LineProgress {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        let total = total.map_or("?".into(), |bytes| (bytes / 1_000_000).to_string());
        println!(
            "fetching {label}: {} of {total} MB are here",
            done / 1_000_000
        );
    }

    fn advance(&mut self, _bytes: u64) {}

    fn message(&mut self, text: &str) {
        println!("{text}");
    }

    fn finish(&mut self) {}
}

/// Makes a small model for every storage type, with the tokenizer of the SmolLM2 file at `base`.
fn synthesise(base: &Path, folder: &Path) -> Result<()> {
    let mut command = Command::new(venv::python_with("requirements.txt")?);
    command
        .arg(repo::root().join("scripts/models/quant_models.py"))
        .args([base, folder]);
    let output = process::capture(command, SYNTHESIS_LIMIT)?;
    ensure!(!output.trim().is_empty(), "quant_models.py named no model");
    output.lines().for_each(|line| println!("{line}"));
    Ok(())
}

/// SmolLM2 as `mlx_lm.convert` writes it, from the GGUF file at `base`.
fn in_mlx_form(base: &Path, folder: &Path) -> Result<()> {
    let environment = folder.with_file_name("test-clients/mlx-lm");
    let mut command = Command::new(venv::python_in(&environment, "mlx/requirements-lm.txt")?);
    command
        .arg(repo::root().join("scripts/models/mlx_folder.py"))
        .args([base, folder])
        .env("HF_HUB_OFFLINE", "1");
    let output = process::capture(command, SYNTHESIS_LIMIT)?;
    let made = output
        .lines()
        .last()
        .context("mlx_folder.py named no model")?;
    println!("{made}");
    Ok(())
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

    #[test]
    fn a_file_is_whole_by_size_and_hash() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model");
        let model = CatalogueModel {
            bytes: paceline_base::Bytes(3),
            // SHA-256 of "abc", FIPS 180-2 appendix B.1.
            sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            ..Catalogue::BUILTIN
                .find("smollm2")
                .expect("is built in")
                .clone()
        };
        assert!(!is_whole(&path, &model).expect("absent is not whole"));
        for (text, whole) in [("abc", true), ("abd", false), ("abcd", false), ("", false)] {
            fs::write(&path, text).expect("written");
            assert_eq!(
                is_whole(&path, &model).expect("readable"),
                whole,
                "{text:?}"
            );
        }
    }
}
