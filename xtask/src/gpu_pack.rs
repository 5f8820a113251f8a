//! `cargo xtask gpu pack`: a folder that proves the MLX engine on a machine with a card and little
//! else. `cargo xtask mlx --gpu` runs the same on this machine.
//!
//! ```text
//! target/gpu-pack/run.sh       unpacks the parts, and runs the self-test, MLX's tests and `gpu`'s
//! target/gpu-pack/part.aa ...  at most 60 MiB each, one archive together:
//!   bin/paceline  tests/*      programs, stripped
//!   mlx/VERSION                MLX's wheel with its C layer, as `engines install mlx` puts it
//!   models  tests-data/golden  what the tests read
//! ```

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::tally::{Skip, TestTally};
use crate::{mlx_engine, models, process, repo, sdk};

/// The script that runs on the other machine.
const SCRIPT: &str = include_str!("gpu_pack/run.sh");

/// Largest part: 64 MiB travel to a lent machine at once, with a tree of few files.
const PART_BYTES: u64 = 60 << 20;

/// Test programs: name in the pack, arguments of cargo that build it, name of its target.
const PROGRAMS: [(&str, &[&str], &str); 4] = [
    (
        "gpu",
        &["-p", "paceline-gpu", "--features", "wgpu", "--lib"],
        "paceline_gpu",
    ),
    (
        "mlx",
        &["-p", "paceline-mlx", "--test", "library"],
        "library",
    ),
    (
        "model",
        &["-p", "paceline-model-mlx", "--test", "all"],
        "all",
    ),
    (
        "train",
        &["-p", "paceline-train", "--lib"],
        "paceline_train",
    ),
];

/// Models that the tests read, as far as they are there.
const MODELS: [&str; 3] = [
    "SmolLM2-135M-Instruct-mlx-4bit",
    "SmolLM2-135M-Instruct-mlx-4bit.golden.json",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
];

#[derive(Debug)]
pub(crate) struct PackOptions<'a> {
    /// The build of MLX, as `paceline engines install mlx --build` names it; `None` for that of
    /// this machine's tests.
    pub(crate) build: Option<&'a str>,
    /// Leaves out NVIDIA's packages: the other machine's Python has them.
    pub(crate) without_nvidia: bool,
}

/// Makes the pack; gives its folder.
pub(crate) fn run(options: &PackOptions<'_>, see: &mut impl FnMut(&str)) -> Result<PathBuf> {
    let folder = repo::root().join("target/gpu-pack");
    let mlx = installed(options.build, see)?;
    assemble(&folder, see)?;
    let tree = folder.join("tree");
    copy(
        &mlx,
        &tree.join("mlx").join(mlx.file_name().context("a folder")?),
    )?;
    if options.without_nvidia {
        fs::write(tree.join("nvidia-of-machine"), "")?;
    }
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(&tree).args(["-czf", "-"]);
    if options.without_nvidia {
        tar.arg("--exclude=./mlx/*/nvidia");
    }
    tar.arg(".").stdout(std::process::Stdio::piped());
    let mut tar = tar.spawn().context("start tar")?;
    let archive = tar.stdout.take().context("tar has an output")?;
    let parts = split(archive, &folder, PART_BYTES)?;
    ensure!(tar.wait()?.success(), "tar failed, its message is above");
    fs::remove_dir_all(&tree)?;
    see(&format!(
        "{} parts and run.sh in {}",
        parts,
        folder.display()
    ));
    Ok(folder)
}

/// Makes `folder` with `run.sh`, and in `tree` all but MLX: what `run.sh` needs without parts.
pub(crate) fn assemble(folder: &Path, see: &mut impl FnMut(&str)) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", folder.display()));
        }
        _ => {}
    }
    let tree = folder.join("tree");
    for name in ["bin", "tests", "models", "crates/any", "tests-data", "mlx"] {
        fs::create_dir_all(tree.join(name))?;
    }
    fs::write(folder.join("run.sh"), SCRIPT)?;
    strip(&sdk::build(see)?, &tree.join("bin/paceline"))?;
    for (name, arguments, target) in PROGRAMS {
        strip(
            &test_program(arguments, target, see)?,
            &tree.join("tests").join(name),
        )?;
    }
    copy(
        &repo::root().join("tests-data/golden"),
        &tree.join("tests-data/golden"),
    )?;
    for name in MODELS {
        let model = models::folder()?.join(name);
        match model.exists() {
            true => copy(&model, &tree.join("models").join(name))?,
            false => see(&format!("without {name}: `cargo xtask models` makes it")),
        }
    }
    Ok(())
}

/// The outcome in a line of `run.sh`, if it has one.
pub(crate) fn outcome(line: &str) -> Option<TestTally> {
    // Rows of the self-test's table have more than one blank.
    let name = |start: &str| {
        line.strip_prefix(start)
            .filter(|name| !name.starts_with(' '))
    };
    if let Some(skip) = Skip::find(line) {
        return Some(TestTally::skip(&skip.name, &skip.reason));
    }
    let failed = name("FAILED ")
        .or_else(|| name("NOT RUN "))
        .map(TestTally::failure);
    failed.or_else(|| name("passed ").map(|name| TestTally::check(name, true)))
}

/// The folder of MLX, of the version that its name says.
fn installed(build: Option<&str>, see: &mut impl FnMut(&str)) -> Result<PathBuf> {
    let Some(build) = build else {
        return installation(&mlx_engine::library()?);
    };
    let home = repo::root().join("target/gpu-pack-mlx").join(build);
    let mut install = Command::new(sdk::build(see)?);
    install.env("PACELINE_HOME", &home);
    install.args(["engines", "install", "mlx", "--json", "--build", build]);
    let mut library = None;
    let log = process::log_path("gpu-pack-install");
    process::stream(install, &log, |line| {
        let report: Value = serde_json::from_str(line).unwrap_or_default();
        library = report["library"]
            .as_str()
            .map(PathBuf::from)
            .or(library.take());
    })?;
    // Without the driver, a build for CUDA is complete and cannot be opened here.
    let found = library.or_else(|| layer(&home.join("engines/mlx")));
    installation(&found.with_context(|| format!("no MLX: see {}", log.display()))?)
}

/// The folder of an installation, by its `mlx/lib/libmlxc.so`.
fn installation(library: &Path) -> Result<PathBuf> {
    let library = library.canonicalize().context("find the library of MLX")?;
    let folder = library.ancestors().nth(3).map(Path::to_path_buf);
    folder.context("the library lies in no installation")
}

/// The C layer in a folder of installations.
fn layer(root: &Path) -> Option<PathBuf> {
    let versions = fs::read_dir(root).ok()?.flatten();
    let mut layers = versions.map(|entry| entry.path().join("mlx/lib/libmlxc.so"));
    layers.find(|layer| layer.is_file())
}

fn test_program(arguments: &[&str], target: &str, see: &mut impl FnMut(&str)) -> Result<PathBuf> {
    let mut command = repo::cargo();
    command
        .args(["test", "--release", "--no-run"])
        .args(arguments);
    command.arg("--message-format=json-render-diagnostics");
    let mut program = None;
    let log = process::log_path("gpu-pack-build");
    let built = process::stream(command, &log, |line| match of_test(line, target) {
        Some(path) => program = Some(path),
        None if line.starts_with('{') || process::is_progress(line) => {}
        None => see(line),
    })?;
    ensure!(built, "{target} does not build: see {}", log.display());
    program.with_context(|| format!("cargo named no program of {target}"))
}

/// The path in one of cargo's messages, if it is about the test program of a target.
fn of_test(line: &str, target: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let is_it = message["profile"]["test"] == true && message["target"]["name"] == target;
    let path = message["executable"].as_str().filter(|_| is_it)?;
    Some(path.into())
}

/// Copies a program without its symbols.
fn strip(program: &Path, to: &Path) -> Result<()> {
    let stripped = Command::new("strip").arg("-o").args([to, program]).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(program, to).with_context(|| format!("copy {}", program.display()))?;
    }
    Ok(())
}

/// Copies a file or a folder with its links.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").arg("-a").args([from, to]).status();
    match status.context("start cp")?.success() {
        true => Ok(()),
        false => bail!("cannot copy {}", from.display()),
    }
}

/// Writes `archive` into files `part.aa`, `part.ab` and so on below `folder`, of at most `most`
/// bytes; gives their number.
fn split(mut archive: impl Read, folder: &Path, most: u64) -> Result<usize> {
    for (number, name) in names().enumerate() {
        let mut part = Vec::new();
        archive.by_ref().take(most).read_to_end(&mut part)?;
        if part.is_empty() {
            return Ok(number);
        }
        let path = folder.join(name);
        let written = File::create(&path).and_then(|mut file| file.write_all(&part));
        written.with_context(|| format!("write {}", path.display()))?;
    }
    bail!("more than 676 parts");
}

/// `part.aa` to `part.zz`, in the order of their names.
fn names() -> impl Iterator<Item = String> {
    let letters = || 'a'..='z';
    letters().flat_map(move |first| letters().map(move |second| format!("part.{first}{second}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_small_and_join_to_the_archive() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let archive: Vec<u8> = (0..=255).cycle().take(1000).collect();
        let parts = split(&archive[..], folder.path(), 300).expect("written");
        assert_eq!(parts, 4);
        let read = |name: &String| fs::read(folder.path().join(name)).expect("a part");
        let all: Vec<Vec<u8>> = names()
            .take(parts)
            .collect::<Vec<_>>()
            .iter()
            .map(read)
            .collect();
        assert!(all.iter().all(|part| part.len() <= 300));
        assert_eq!(all.concat(), archive);
        let mut sorted: Vec<String> = names().collect();
        sorted.sort_unstable();
        assert!(names().eq(sorted), "`cat part.*` joins them in this order");
    }

    #[test]
    fn test_programs_are_found_by_their_target() {
        let line = |test: bool, name: &str| {
            let message = serde_json::json!({
                "profile": {"test": test}, "target": {"name": name}, "executable": "/x",
            });
            message.to_string()
        };
        assert_eq!(of_test(&line(true, "mlx"), "mlx"), Some("/x".into()));
        assert_eq!(of_test(&line(false, "mlx"), "mlx"), None);
        assert_eq!(of_test(&line(true, "library"), "mlx"), None);
        assert_eq!(of_test("warning: x", "mlx"), None);
    }

    #[test]
    fn lines_of_the_script_are_counted_and_rows_of_the_self_test_are_not() {
        let mut tally = TestTally::default();
        for line in [
            "passed   mlx: library",
            "passed selftest",
            "FAILED a (exit code 101)",
            "NOT RUN b",
            "SKIPPED c: no GPU",
            "1 passed, 1 failed, 1 skipped, 1 not run in 3 s",
        ] {
            outcome(line).into_iter().for_each(|of| tally.add(of));
        }
        assert_eq!(tally.to_string(), "1 passed, 2 failed, 1 skipped");
    }

    /// The script with programs that stand for the pack's: a test that passes, one that fails, one
    /// that skips itself.
    #[test]
    fn the_script_counts_tests_and_shows_all_of_a_failure() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tree = folder.path().join("tree");
        let program = |path: &str, text: &str| {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(&path, format!("#!/bin/sh\n{text}")).expect("written");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(&path, mode).expect("a program");
        };
        program("bin/paceline", "exit 0");
        program(
            "tests/mlx",
            "[ \"$2\" = --list ] && echo good: test; exit 0",
        );
        program("tests/model", BAD);
        program(
            "tests/train",
            "[ \"$2\" = --list ] && echo s: test; echo 'SKIPPED s: no GPU'",
        );
        program(
            "tests/gpu",
            "[ \"$2\" = --list ] && echo layer: test; exit 0",
        );
        fs::write(folder.path().join("run.sh"), SCRIPT).expect("written");
        let mut script = Command::new("sh");
        script
            .arg("run.sh")
            .current_dir(folder.path())
            .env_remove("OUT");
        let output = script.output().expect("runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        for part in [
            "passed selftest\n",
            "passed good\n",
            "FAILED bad (exit code 101)\nthread 'bad' panicked\nall of it\n",
            "SKIPPED s: no GPU\n",
            "3 passed, 1 failed, 1 skipped, 0 not run in ",
        ] {
            assert!(said.contains(part), "{said}");
        }
    }

    const BAD: &str = "[ \"$2\" = --list ] && { echo bad: test; exit 0; }\n\
                       echo \"thread 'bad' panicked\"; echo 'all of it' >&2; exit 101";
}
