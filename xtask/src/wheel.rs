//! `cargo xtask wheel`: the package for Python, built, installed into a fresh environment, tested.
//!
//! ```text
//! maturin build ──▶ wheel of crates/python ──▶ wheel unpack, the program paceline, wheel pack
//!                                                   │ target/wheels/
//! tests in crates/python/tests ◀── pip install ◀────┘ into target/xtask/wheel/venv
//! ```
//!
//! The tests print a line for each case, as those of `cargo xtask sdk` do; they also run by hand.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::extent::TestExtent;
use crate::tally::TestTally;
use crate::{minilm, mlx, models, process, repo, sdk, venv};

/// Each program besides the compiler: pip may fetch NumPy.
const LIMIT: Duration = Duration::from_secs(300);

/// Builds the wheel with `binary`, or what is built here, and runs the package's tests.
///
/// # Errors
/// When a program cannot be started or fails. Missing tools are a skip.
pub(crate) fn run(
    binary: Option<PathBuf>,
    extent: TestExtent,
    see: &mut impl FnMut(&str),
) -> Result<TestTally> {
    let folder = models::folder()?.with_file_name("test-clients/python");
    let tools = match venv::python_in(&folder, "python/requirements.txt") {
        Ok(python) => python,
        Err(error) => return Ok(TestTally::skip("the wheel", &format!("{error:#}"))),
    };
    let binary = binary.map_or_else(|| sdk::build(see), Ok)?;
    let wheel = build(&tools, &binary, see)?;
    see(&format!(
        "{}: {} bytes",
        wheel.display(),
        fs::metadata(&wheel)?.len()
    ));
    let python = install(&wheel)?;
    let mut tally = TestTally::check("the wheel installs into a fresh environment", true);
    tally.add(test(&python, "distributed_test.py", &[], see)?);
    tally.add(with_models(&python, see)?);
    tally.add(beside_mlx(see)?);
    if extent == TestExtent::Long {
        tally.add(beside_gloo(see)?);
    }
    Ok(tally)
}

/// Cases that need models: answers, vectors, array jobs with a short training.
fn with_models(python: &Path, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let model = match models::smollm2() {
        Ok(model) => model,
        Err(error) => return Ok(TestTally::skip("answers in Python", &format!("{error:#}"))),
    };
    let encoder = models::folder()?.join(minilm::FOLDER);
    let mut given: Vec<&OsStr> = vec![model.as_ref()];
    let mut tally = TestTally::default();
    match encoder.is_dir() {
        true => given.push(encoder.as_ref()),
        false => tally.add(TestTally::skip("vectors in Python", "MiniLM is not there")),
    }
    tally.add(test(python, "llm_test.py", &given, see)?);
    tally.add(test(python, "compute_test.py", &given[..1], see)?);
    Ok(tally)
}

/// The Python of an environment that has the package as it is in the tree, if there is one.
pub(crate) fn installed() -> Option<PathBuf> {
    let theirs = site().ok()?.join("paceline");
    let ours = repo::root().join("crates/python/python/paceline");
    let mut sources = fs::read_dir(ours).ok()?.filter_map(Result::ok);
    let is_same = |path: &Path| {
        let name = path.file_name().unwrap_or_default();
        fs::read(path).ok() == fs::read(theirs.join(name)).ok()
    };
    let is_source = |path: &Path| path.extension().is_some_and(|kind| kind == "py");
    let is_fresh = sources.all(|file| !is_source(&file.path()) || is_same(&file.path()));
    is_fresh.then(|| scratch_path("venv").join("bin/python"))
}

/// Makes `target/wheels/paceline-*.whl`, the only one there.
fn build(tools: &Path, binary: &Path, see: &mut impl FnMut(&str)) -> Result<PathBuf> {
    let (made, wheels) = (scratch("made")?, repo::root().join("target/wheels"));
    let mut command = Command::new(tools.with_file_name("maturin"));
    command
        .args(["build", "--release", "--interpreter"])
        .arg(tools);
    command
        .arg("--manifest-path")
        .arg(repo::root().join("crates/python/Cargo.toml"));
    command.arg("--out").arg(&made);
    let log = process::log_path("wheel-build");
    let built = process::stream(command, &log, |line| {
        if !process::is_progress(line) {
            see(line);
        }
    })?;
    ensure!(built, "maturin fails: see {}", log.display());
    let unpacked = scratch("unpacked")?;
    wheel_tool(
        tools,
        &[
            "unpack".as_ref(),
            only(&made)?.as_ref(),
            "-d".as_ref(),
            unpacked.as_ref(),
        ],
    )?;
    let package = only(&unpacked)?;
    add_program(&package, binary)?;
    // A wheel of an earlier version would be a second one.
    let _ = fs::remove_dir_all(&wheels);
    fs::create_dir_all(&wheels)?;
    wheel_tool(
        tools,
        &[
            "pack".as_ref(),
            package.as_ref(),
            "-d".as_ref(),
            wheels.as_ref(),
        ],
    )?;
    only(&wheels)
}

/// Puts the program into the unpacked wheel, without its symbols where `strip` is there.
fn add_program(package: &Path, binary: &Path) -> Result<()> {
    let name = package
        .file_name()
        .context("the wheel has no name")?
        .to_string_lossy();
    let scripts = package.join(format!("{name}.data/scripts"));
    fs::create_dir_all(&scripts)?;
    let program = scripts.join("paceline");
    fs::copy(binary, &program).with_context(|| format!("copy {}", binary.display()))?;
    let mut strip = Command::new("strip");
    strip.arg(&program);
    // Symbols cost space and nothing else.
    let _ = process::capture(strip, LIMIT);
    Ok(())
}

/// Makes an environment of its own and installs the wheel; gives its Python.
fn install(wheel: &Path) -> Result<PathBuf> {
    let folder = scratch("venv")?;
    let mut command = Command::new("python3");
    command.args(["-m", "venv"]).arg(&folder);
    process::capture(command, LIMIT)?;
    let python = folder.join("bin/python");
    let mut command = Command::new(&python);
    command.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    let mut all = wheel.as_os_str().to_owned();
    all.push("[functions]");
    command.args(["--only-binary", ":all:"]).arg(all);
    process::capture(command, LIMIT)?;
    Ok(python)
}

/// The same programs with MLX's module and ours, where MLX is available.
fn beside_mlx(see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let python = match mlx::python() {
        Ok(python) => python,
        Err(error) => return Ok(TestTally::skip("programs for MLX", &format!("{error:#}"))),
    };
    test(&python, "mlx_test.py", &[], see)
}

/// The backend of `torch.distributed`, where torch is available.
fn beside_gloo(see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let folder = models::folder()?.with_file_name("test-clients/torch");
    match venv::python_in(&folder, "python/requirements-torch.txt") {
        Ok(python) => test(&python, "torch_test.py", &[], see),
        Err(error) => Ok(TestTally::skip("torch.distributed", &format!("{error:#}"))),
    }
}

/// The installed package, for an interpreter of another environment.
fn site() -> Result<PathBuf> {
    Ok(only(&scratch_path("venv").join("lib"))?.join("site-packages"))
}

/// Runs one script of the package's tests to its end and counts its cases.
fn test(
    python: &Path,
    script: &str,
    arguments: &[&OsStr],
    see: &mut impl FnMut(&str),
) -> Result<TestTally> {
    let mut command = Command::new(python);
    command.arg(repo::root().join("crates/python/tests").join(script));
    command.args(arguments).env("PYTHONDONTWRITEBYTECODE", "1");
    // The package's own program is meant, and no source tree.
    command
        .env_remove("PACELINE_BINARY")
        .env("PYTHONPATH", site()?);
    let log = process::log_path(&format!("wheel-{script}"));
    sdk::cases("python", &log, command, see)
}

fn wheel_tool(python: &Path, arguments: &[&OsStr]) -> Result<()> {
    let mut command = Command::new(python);
    command.args(["-m", "wheel"]).args(arguments);
    process::capture(command, LIMIT).map(drop)
}

fn scratch_path(name: &str) -> PathBuf {
    repo::root().join("target/xtask/wheel").join(name)
}

/// An empty folder.
fn scratch(name: &str) -> Result<PathBuf> {
    let folder = scratch_path(name);
    // Left from an earlier run, if at all.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder)
}

fn only(folder: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    let paths: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    ensure!(
        paths.len() == 1,
        "{}: {} entries, expected 1",
        folder.display(),
        paths.len()
    );
    paths.into_iter().next().context("there is one")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_wants_one_entry() {
        let folder = tempfile::tempdir().unwrap();
        assert!(
            only(folder.path())
                .unwrap_err()
                .to_string()
                .ends_with("0 entries, expected 1")
        );
        let file = folder.path().join("one");
        fs::write(&file, "").unwrap();
        assert_eq!(only(folder.path()).unwrap(), file);
        fs::write(folder.path().join("two"), "").unwrap();
        assert!(
            only(folder.path())
                .unwrap_err()
                .to_string()
                .contains("2 entries")
        );
    }
}
