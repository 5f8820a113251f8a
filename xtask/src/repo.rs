//! The repository: its root, its tracked files, and facts from a file's path.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The repository's root folder, absolute: the parent of this crate's folder at build time.
pub(crate) fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent()
        .expect("xtask lies in the repository root")
        .to_path_buf()
}

/// The cargo that started this program, so that nested calls use the same toolchain.
pub(crate) fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root());
    forget_xtask(&mut command);
    command
}

/// The triple of this machine, as the compiler names it.
pub(crate) fn host() -> Result<String> {
    let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(program)
        .arg("-vV")
        .current_dir(root())
        .output()
        .context("run rustc -vV")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc names no host")?.to_owned())
}

/// Keeps variables from a program that `cargo run` set for xtask itself. With them build scripts
/// that look at them, ring's among them, would run again in the next build by hand. All crates
/// above them would be compiled again. Programs such as maturin start cargo too.
pub(crate) fn forget_xtask(command: &mut Command) {
    let told = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in told.filter(|name| is_of_a_package(name)) {
        command.env_remove(name);
    }
}

/// Whether cargo sets this variable for the package that it runs.
fn is_of_a_package(name: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_"]
        .iter()
        .any(|start| name.starts_with(start))
}

/// Paths relative to `root`, with `/`, of every file that is tracked or could be added.
///
/// A file that git still lists but that is gone from the work tree is left out.
pub(crate) fn files(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(root)
        .output()
        .context("run git ls-files")?;
    ensure!(output.status.success(), "git ls-files: {}", output.status);
    let listing = String::from_utf8(output.stdout).context("git ls-files: a path is not UTF-8")?;
    let mut files: Vec<String> = listing
        .split('\0')
        .filter(|path| !path.is_empty() && root.join(path).is_file())
        .map(String::from)
        .collect();
    files.sort_unstable();
    files.dedup();
    Ok(files)
}

/// The crate a path belongs to: `crates/<name>/...` gives `<name>`, otherwise the first folder.
pub(crate) fn crate_of(path: &str) -> &str {
    let mut parts = path.split('/');
    match parts.next() {
        Some("crates") => parts.next().unwrap_or(""),
        Some(first) => first,
        None => "",
    }
}

/// True for files that only tests, benches or fuzzers build, by the path alone.
pub(crate) fn is_test_path(path: &str) -> bool {
    const FOLDERS: [&str; 4] = ["tests", "benches", "fuzz", "testing"];
    let mut parts: Vec<&str> = path.split('/').collect();
    let file = parts.pop().unwrap_or("");
    file == "testing.rs" || parts.iter().any(|part| FOLDERS.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_its_crate() {
        let cases = [
            ("crates/base/src/lib.rs", "base"),
            ("xtask/src/main.rs", "xtask"),
            ("fuzz/fuzz_targets/gguf.rs", "fuzz"),
            ("README.md", "README.md"),
        ];
        for (path, expected) in cases {
            assert_eq!(crate_of(path), expected, "{path}");
        }
    }

    #[test]
    fn test_files_are_known_by_their_path() {
        let cases = [
            ("crates/base/src/lib.rs", false),
            ("crates/base/tests/edge.rs", true),
            ("crates/base/benches/tree.rs", true),
            ("crates/comm/src/testing.rs", true),
            ("crates/comm/src/testing/suite.rs", true),
            ("crates/comm/src/contesting.rs", false),
            ("fuzz/fuzz_targets/gguf.rs", true),
        ];
        for (path, expected) in cases {
            assert_eq!(is_test_path(path), expected, "{path}");
        }
    }

    #[test]
    fn the_repository_lists_this_file() {
        let files = files(&root()).expect("git works in the checkout");
        assert!(
            files.iter().any(|path| path == "xtask/src/repo.rs"),
            "{files:?}"
        );
    }
}
