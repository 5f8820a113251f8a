//! Builds the C layer: sources from cargo, one call of the C++ compiler.
//!
//! All files of `mlx-c` are compiled as one. They are thin wrappers over the same large headers,
//! which are then parsed once. That takes 7 s on one core, where CMake with one process per file
//! takes 80 s. The only relevant build setting is C++20.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::pins::{MLX_C_SOURCES_SHA256, MLX_C_VERSION, MLX_SYS_SHA256};
use crate::hash::Hasher;
use crate::options::Toolchain;
use crate::progress::Cancel;
use crate::{Error, child, disk};

/// Cargo downloads some fifty small crates; a slower mirror counts as absent.
const FETCH_LIMIT: Duration = Duration::from_secs(300);
/// The compiler takes 7 s on one core of 2023, and 2 GB.
const COMPILE_LIMIT: Duration = Duration::from_secs(600);
/// Timeout of `--version`.
const ASK_LIMIT: Duration = Duration::from_secs(30);

/// Maximum depth of folders in `mlx-c`; it has one level.
const TREE_DEPTH: u32 = 8;

/// Included before all: GCC 12 lacks `<format>`, which `mlx-c` uses in a few error texts.
/// `packaging/layer.py` reads the same file.
const SHIM: &str = include_str!("../../data/mlxc-shim.h");

/// Our group for MLX's graphs, a part of the layer. `packaging/layer.py` reads the same file.
const GROUP: &str = include_str!("../../data/mlx-group.cpp");

/// A package that only makes cargo download its dependencies.
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

/// Fails before any download if a tool is missing.
pub(super) fn check_tools(tools: &Toolchain, root: &Path, cancel: &Cancel) -> Result<(), Error> {
    let work = disk::temp_dir(root)?;
    let mut programs = vec![tools.compiler.as_os_str()];
    if tools.sources.is_none() {
        programs.push(&tools.cargo);
    }
    for program in programs {
        let mut command = Command::new(program);
        command.arg("--version");
        child::confine(&mut command, work.path());
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
        Some(folder) => {
            std::path::absolute(folder).map_err(|error| Error::io("find", folder, error))?
        }
        None => fetch(&tools.cargo, &work, cancel)?,
    };
    let unity = work.join("mlxc.cpp");
    write(
        &unity,
        &(one_file(&sources)? + "#include \"mlx-group.cpp\"\n"),
    )?;
    write(&work.join("mlx-group.cpp"), GROUP)?;
    write(&work.join("shim.h"), SHIM)?;
    let mut compile = command(&tools.compiler, &sources, folder, &work, target);
    child::confine(&mut compile, &work);
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
    // The C layer searches MLX in its own folder, so both can be moved.
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

/// A source file that includes all others.
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

/// Downloads the sources of `mlx-c`; returns their folder in cargo's registry.
fn fetch(cargo: &OsStr, work: &Path, cancel: &Cancel) -> Result<PathBuf, Error> {
    let package = work.join("sources");
    disk::create_dir(&package)?;
    write(&package.join("lib.rs"), "")?;
    let manifest = MANIFEST.replace("VERSION", MLX_C_VERSION);
    write(&package.join("Cargo.toml"), &manifest)?;
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version", "1"]);
    command
        .arg("--manifest-path")
        .arg(package.join("Cargo.toml"));
    // Cargo reads a `.cargo/config.toml` of its working folder and all parents. The root folder has
    // only the administrator's; the user's settings come from cargo's home.
    command.current_dir("/");
    // When cargo runs this program, it has set toolchain and target folder for its own package.
    command.env_remove("CARGO_TARGET_DIR");
    run(command, work, FETCH_LIMIT, cancel)?;
    check_lock(&package.join("Cargo.lock"))?;
    let out = work.join("out");
    let text = fs::read(&out).map_err(|error| Error::io("read", &out, error))?;
    let listed: CargoMetadata =
        serde_json::from_slice(&text).map_err(|error| no_sources(&error))?;
    let mut packages = listed.packages.into_iter();
    let found = packages.find(|package| package.name == "mlx-sys");
    let found = found.ok_or_else(|| no_sources(&"it does not name mlx-sys"))?;
    let sources = found.manifest_path.with_file_name("src").join("mlx-c");
    if !sources.join("mlx/c/mlx.h").is_file() {
        return Err(Error::NotSources { path: sources });
    }
    // Cargo verifies downloads once, and then trusts its folder.
    let got = tree_hash(&sources.join("mlx/c"))?;
    crate::hash::expect_sha256("mlx-c's sources", MLX_C_SOURCES_SHA256, &got)?;
    Ok(sources)
}

/// SHA-256 over all files below `dir` in the order of their paths: path, length, bytes of each.
fn tree_hash(dir: &Path) -> Result<String, Error> {
    let mut hasher = Hasher::default();
    for path in files_below(dir, TREE_DEPTH)? {
        let bytes = fs::read(&path).map_err(|error| Error::io("read", &path, error))?;
        let name = path.strip_prefix(dir).unwrap_or(&path);
        hasher.update(name.as_os_str().as_encoded_bytes());
        hasher.update(&[0]);
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(&bytes);
    }
    Ok(hasher.hex())
}

fn files_below(dir: &Path, depth: u32) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(|error| Error::io("list", dir, error))?;
    let mut files = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() && depth > 0 {
            files.extend(files_below(&path, depth - 1)?);
        } else if path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[derive(Debug, Deserialize)]
struct CargoMetadata {
    packages: Vec<CargoPackage>,
}

#[derive(Debug, Deserialize)]
struct CargoPackage {
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

/// Compares the crate's hash in `Cargo.lock`, which cargo enforces, with ours.
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
    fn cargo_works_where_nobody_else_can_put_settings() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (log, cargo) = (dir.path().join("log"), dir.path().join("cargo"));
        let script = "#!/bin/sh\n{ pwd; echo \"$*\"; } >";
        fs::write(&cargo, format!("{script} {}\nexit 9\n", log.display())).unwrap();
        fs::set_permissions(&cargo, PermissionsExt::from_mode(0o755)).unwrap();
        let error = fetch(cargo.as_os_str(), dir.path(), &Cancel::default()).unwrap_err();
        assert!(matches!(error, Error::ToolFailed { .. }), "{error}");
        let said = fs::read_to_string(log).unwrap();
        let manifest = dir.path().join("sources/Cargo.toml");
        assert!(said.starts_with("/\n"), "{said}");
        assert!(
            said.contains(&format!("--manifest-path {}", manifest.display())),
            "{said}"
        );
    }

    #[test]
    fn the_hash_of_a_folder_sees_every_byte_and_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("private")).unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("a.h", "1");
        write("private/b.h", "2");
        let whole = tree_hash(dir.path()).unwrap();
        assert_eq!(tree_hash(dir.path()).unwrap(), whole);
        write("private/b.h", "3");
        assert_ne!(tree_hash(dir.path()).unwrap(), whole);
        write("private/b.h", "2");
        assert_eq!(tree_hash(dir.path()).unwrap(), whole);
        write("c.h", "");
        assert_ne!(tree_hash(dir.path()).unwrap(), whole);
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
