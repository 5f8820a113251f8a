//! Chat templates of real models, out of the source package of pip's `llama-cpp-python`, which is
//! not installed.
//!
//! The templates are their models' and under many licences, so they are fetched and never
//! committed. `crates/text/tests/golden/README.md` names each that a test reads.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::process;

/// The package and the SHA-256 of its archive, as fetched on 2026-11-26.
const REQUIREMENT: &str = "llama-cpp-python==0.3.36";
const ARCHIVE: &str = "llama_cpp_python-0.3.36.tar.gz";
const SHA256: &str = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e";

const INSIDE: &str = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates";

/// The folder that tests look for.
const FOLDER: &str = "chat-templates";

/// 77 MB, and what pip builds the package's metadata with: 17 s on two cores.
const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// Unpacks the templates to `folder/chat-templates`; what is there is kept.
pub(crate) fn fetch(folder: &Path) -> Result<()> {
    let target = folder.join(FOLDER);
    if target.is_dir() {
        println!("present  {}", target.display());
        return Ok(());
    }
    let fresh = folder.join(".chat-templates");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", REQUIREMENT, "--no-deps", "--quiet"]);
    pip.args(["--no-binary", "llama-cpp-python", "--dest"])
        .arg(&fresh);
    process::capture(pip, FETCH_LIMIT)?;
    check(&fresh.join(ARCHIVE))?;
    let mut unpack = Command::new("tar");
    unpack.arg("-xzf").arg(fresh.join(ARCHIVE)).arg("-C");
    unpack.arg(&fresh).arg(INSIDE);
    process::capture(unpack, FETCH_LIMIT)?;
    fs::rename(fresh.join(INSIDE), &target)
        .with_context(|| format!("move to {}", target.display()))?;
    fs::remove_dir_all(&fresh).with_context(|| format!("remove {}", fresh.display()))?;
    println!("fetched  {}", target.display());
    Ok(())
}

fn check(archive: &Path) -> Result<()> {
    let bytes = fs::read(archive).with_context(|| format!("read {}", archive.display()))?;
    let got = format!("{:x}", Sha256::digest(&bytes));
    ensure!(
        got == SHA256,
        "{ARCHIVE}: SHA-256 is {got}, expected {SHA256}"
    );
    Ok(())
}
