//! The JSON-Schema test suite (MIT), out of the source package of pip's `jsonschema`, which is not
//! installed.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::process;

/// The package and the SHA-256 of its archive, as fetched on 2026-11-25.
const REQUIREMENT: &str = "jsonschema==4.26.0";
const ARCHIVE: &str = "jsonschema-4.26.0.tar.gz";
const SHA256: &str = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326";

/// The folder that tests look for.
const FOLDER: &str = "json-schema-suite";

/// 0.4 MB, and what pip builds the package's metadata with: 8 s on two cores.
const FETCH_LIMIT: Duration = Duration::from_secs(120);

/// Unpacks the suite to `folder/json-schema-suite`; what is there is kept.
pub(crate) fn fetch(folder: &Path) -> Result<()> {
    let target = folder.join(FOLDER);
    if target.join("draft2020-12").is_dir() {
        println!("present  {}", target.display());
        return Ok(());
    }
    let fresh = folder.join(".json-schema-suite");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", REQUIREMENT, "--no-deps", "--quiet"]);
    pip.args(["--no-binary", "jsonschema", "--dest"])
        .arg(&fresh);
    process::capture(pip, FETCH_LIMIT)?;
    let archive = fresh.join(ARCHIVE);
    let bytes = fs::read(&archive).with_context(|| format!("read {}", archive.display()))?;
    let got = format!("{:x}", Sha256::digest(&bytes));
    ensure!(
        got == SHA256,
        "{ARCHIVE}: SHA-256 is {got}, expected {SHA256}"
    );
    let mut unpack = Command::new("tar");
    unpack.arg("-xzf").arg(&archive).arg("-C").arg(&fresh);
    process::capture(unpack, FETCH_LIMIT)?;
    let suite = fresh.join("jsonschema-4.26.0/json/tests");
    fs::rename(&suite, &target).with_context(|| format!("move to {}", target.display()))?;
    fs::remove_dir_all(&fresh).with_context(|| format!("remove {}", fresh.display()))?;
    println!("fetched  {}", target.display());
    Ok(())
}
