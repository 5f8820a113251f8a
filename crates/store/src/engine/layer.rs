//! The C layer: sources through cargo, one call of the C++ compiler.
//!
//! All of `mlx-c`'s files are compiled as one. They are thin wrappers over the same large headers,
//! which are then read once: 7 s on one core, where CMake's one process a file takes 80 s. The only
//! build setting that matters is C++20.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::pins::{MLX_C_VERSION, MLX_SYS_SHA256};
use crate::options::Toolchain;
use crate::progress::Cancel;
use crate::{Error, child, disk};

/// Cargo fetches some fifty small crates; a mirror that is slower is taken for absent.
const FETCH_LIMIT: Duration = Duration::from_secs(300);
/// The compiler takes 7 s on one core of 2023, and 2 GB.
const COMPILE_LIMIT: Duration = Duration::from_secs(600);
/// A tool says its version at once.
const ASK_LIMIT: Duration = Duration::from_secs(30);

/// GCC 12 has no `<format>`, which `mlx-c` uses in the texts of a few errors.
const SHIM: &str = "#pragma once
#include <string>
#if __has_include(<format>)
#include <format>
#else
namespace std {
template <class... A> inline string format(const char* f, A&&...) { return f; }
}
#endif
";

/// A package whose only use is that cargo fetches what it depends on.
const MANIFEST: &str = "[package]
name = \"paceline-mlx-sources\"
version = \"0.0.0\"
edition = \"2021\"

[lib]
path = \"lib.rs\"

[workspace]

[dependencies]
mlx-sys = { version = \"=VERSION\", default-features = false }
";

/// Refuses before anything is fetched when a tool is missing.
pub(super) fn check_tools(tools: &Toolchain, root: &Path, cancel: &Cancel) -> Result<(), Error> {
    let work = disk::temp_dir(root)?;
    let mut programs = vec![tools.compiler.as_os_str()];
    if tools.sources.is_none() {
        programs.push(&tools.cargo);
    }
    for program in programs {
        let mut command = Command::new(program);
        command.arg("--version");
        run(command, work.path(), ASK_LIMIT, cancel)?;
    }
    Ok(())
}

/// Builds the C layer against the MLX in `folder` as `target`.
pub(super) fn build(
    folder: &Path,
    target: &Path,
    tools: &Toolchain,
    work: &Path,
    cancel: &Cancel,
) -> Result<(), Error> {
    let work = work.join("layer");
    disk::create_dir(&work)?;
    let sources = match &tools.sources {
        Some(folder) => folder.clone(),
        None => fetch(&tools.cargo, &work, cancel)?,
    };
    let unity = work.join("mlxc.cpp");
    write(&unity, &one_file(&sources)?)?;
    write(&work.join("shim.h"), SHIM)?;
    let compile = command(&tools.compiler, &sources, folder, &work, target);
    run(compile, &work, COMPILE_LIMIT, cancel)
}

fn command(compiler: &OsStr, sources: &Path, folder: &Path, work: &Path, target: &Path) -> Command {
    let mut command = Command::new(compiler);
    command.args(["-std=c++20", "-O1", "-fPIC", "-include"]);
    command.arg(work.join("shim.h"));
    command.arg("-I").arg(sources);
    command.arg("-I").arg(folder.join("mlx/include"));
    command.arg(work.join("mlxc.cpp"));
    command.arg("-L").arg(folder.join("mlx/lib")).arg("-lmlx");
    // MLX is looked for beside the C layer, wherever both are moved to.
    command.args(if cfg!(target_os = "macos") {
        [
            "-dynamiclib",
            "-Wl,-rpath,@loader_path",
            "-Wl,-install_name,@rpath/libmlxc.dylib",
        ]
    } else {
        ["-shared", "-Wl,-rpath,$ORIGIN", "-Wl,-soname,libmlxc.so"]
    });
    command.arg("-o").arg(target);
    command
}

/// The text that includes every source file.
fn one_file(sources: &Path) -> Result<String, Error> {
    let dir = sources.join("mlx/c");
    let entries = fs::read_dir(&dir).map_err(|error| Error::io("list", &dir, error))?;
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".cpp"))
        .collect();
    names.sort();
    if names.is_empty() {
        return Err(Error::NotSources { path: dir });
    }
    let mut text = String::new();
    for name in names {
        writeln!(text, "#include \"mlx/c/{name}\"").expect("text takes all");
    }
    Ok(text)
}

/// `mlx-c`'s sources, in cargo's own folder of sources.
fn fetch(cargo: &OsStr, work: &Path, cancel: &Cancel) -> Result<PathBuf, Error> {
    let package = work.join("sources");
    disk::create_dir(&package)?;
    write(&package.join("lib.rs"), "")?;
    let manifest = MANIFEST.replace("VERSION", MLX_C_VERSION);
    write(&package.join("Cargo.toml"), &manifest)?;
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version", "1"]);
    command.current_dir(&package);
    // A cargo that runs us has set its toolchain and target folder for its own package.
    command.env_remove("CARGO_TARGET_DIR");
    run(command, work, FETCH_LIMIT, cancel)?;
    check_lock(&package.join("Cargo.lock"))?;
    let out = work.join("out");
    let text = fs::read(&out).map_err(|error| Error::io("read", &out, error))?;
    let listed: Listed = serde_json::from_slice(&text).map_err(|error| no_sources(&error))?;
    let mut packages = listed.packages.into_iter();
    let found = packages.find(|package| package.name == "mlx-sys");
    let found = found.ok_or_else(|| no_sources(&"it does not name mlx-sys"))?;
    let sources = found.manifest_path.with_file_name("src").join("mlx-c");
    if !sources.join("mlx/c/mlx.h").is_file() {
        return Err(Error::NotSources { path: sources });
    }
    Ok(sources)
}

/// What is read of `cargo metadata`.
#[derive(Debug, Deserialize)]
struct Listed {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
}

fn no_sources(why: &dyn std::fmt::Display) -> Error {
    Error::ToolFailed {
        program: "cargo metadata".into(),
        status: "0".into(),
        log: why.to_string(),
    }
}

/// Compares the crate's hash, which cargo holds what it fetches to, with ours.
fn check_lock(path: &Path) -> Result<(), Error> {
    let text = fs::read_to_string(path).map_err(|error| Error::io("read", path, error))?;
    let got = checksum(&text).unwrap_or("none");
    crate::hash::expect_sha256("mlx-sys, as cargo fetches it", MLX_SYS_SHA256, got)
}

/// The checksum of `mlx-sys` in a `Cargo.lock`.
fn checksum(lock: &str) -> Option<&str> {
    let (_, entry) = lock.split_once("name = \"mlx-sys\"\n")?;
    let entry = entry.split("[[package]]").next()?;
    let (_, rest) = entry.split_once("checksum = \"")?;
    rest.split('"').next()
}

/// Runs a tool with its files in `work`.
fn run(command: Command, work: &Path, limit: Duration, cancel: &Cancel) -> Result<(), Error> {
    child::run(
        command,
        (&work.join("out"), &work.join("log")),
        limit,
        cancel,
    )
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(|error| Error::io("write", path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_crate() {
        let lock = "[[package]]\nname = \"a\"\nchecksum = \"1\"\n\n[[package]]\n\
                    name = \"mlx-sys\"\nversion = \"0.7.0\"\nchecksum = \"2\"\n\n\
                    [[package]]\nname = \"z\"\nchecksum = \"3\"\n";
        assert_eq!(checksum(lock), Some("2"));
        let without = lock.replace("checksum = \"2\"\n", "");
        assert_eq!(checksum(&without), None);
        assert_eq!(checksum(""), None);
    }

    #[test]
    fn all_sources_are_one_file_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let sources = dir.path().join("mlx/c");
        fs::create_dir_all(&sources).unwrap();
        assert!(matches!(
            one_file(dir.path()),
            Err(Error::NotSources { .. })
        ));
        for name in ["b.cpp", "a.cpp", "a.h"] {
            fs::write(sources.join(name), "").unwrap();
        }
        let text = one_file(dir.path()).unwrap();
        assert_eq!(text, "#include \"mlx/c/a.cpp\"\n#include \"mlx/c/b.cpp\"\n");
    }
}
