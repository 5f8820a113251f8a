//! `cargo xtask fuzz`: the parsers of untrusted input, on bytes that libFuzzer makes.
//!
//! Targets are the files in `fuzz/fuzz_targets`, in a workspace of their own. The sources of
//! libFuzzer come with the crate `libfuzzer-sys`, so this needs a C++ compiler and no nightly one.
//! The counters by which it finds new paths are a pass of LLVM that any compiler has.
//! AddressSanitizer is another matter ([`asan`](crate::asan), and `cargo +nightly fuzz` for a
//! target).
//!
//! ```text
//! fuzz/fuzz_targets/T.rs --> target/fuzz/HOST/fuzz/T --> fuzz/corpus/T       inputs of new paths
//!                                                        fuzz/artifacts/T/   findings
//! ```

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::tally::TestTally;
use crate::{process, repo};

/// The pass that counts paths and comparisons, as cargo-fuzz sets it.
const COVERAGE: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// An input that takes longer is a finding, and so is a process with more memory.
const INPUT_S: u32 = 10;
const MEMORY_MIB: u32 = 2048;

/// Settings of a run.
#[derive(Debug)]
pub(crate) struct Options {
    /// Names of targets; all if there are none.
    pub(crate) only: Vec<String>,
    /// For each target.
    pub(crate) seconds: u32,
}

/// Checks that all targets compile, but those that need feature `peers`.
pub(crate) fn check(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let mut command = cargo("check");
    // Shares what clippy has checked of the dependencies.
    command.args(["--release", "--target-dir", "target"]);
    let passed = process::stream(command, &process::log_path("fuzz-check"), |line| {
        if line.starts_with("error") || line.starts_with("warning: unused") {
            show(line);
        }
    })?;
    let name = "fuzz targets compile: see target/xtask/fuzz-check.log";
    Ok(TestTally::check(name, passed))
}

/// Builds all targets and runs them, one per core at a time. A line for each has runs, paths,
/// memory and findings; `target/xtask/fuzz-T.log` has the rest.
pub(crate) fn run(options: &Options, show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let wanted = selected_targets(&options.only)?;
    let programs = build(show)?;
    let folder = repo::root().join("fuzz");
    let mut seeds = Command::new(programs.join("seeds"));
    seeds.current_dir(&folder);
    process::capture(seeds, Duration::from_secs(60))?;
    let queue = Mutex::new(VecDeque::from(wanted));
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    };
    let work = || -> Result<Vec<Report>> {
        std::iter::from_fn(next)
            .map(|target| search(&programs, &folder, &target, options.seconds))
            .collect()
    };
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    let done: Vec<Result<Vec<Report>>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|end| end.expect("no search panics")).collect()
    });
    let done: Result<Vec<Vec<Report>>> = done.into_iter().collect();
    let mut reports: Vec<Report> = done?.into_iter().flatten().collect();
    reports.sort_by(|a, b| a.target.cmp(&b.target));
    show("| target | seconds | runs | paths | peak MiB | findings |");
    let mut tally = TestTally::default();
    for report in reports {
        show(&report.row(options.seconds));
        let name = format!("fuzz {}: see target/xtask/fuzz-{0}.log", report.target);
        tally.add(TestTally::check(&name, report.passed));
    }
    Ok(tally)
}

/// The selected targets; all if `only` is empty.
fn selected_targets(only: &[String]) -> Result<Vec<String>> {
    let all = targets()?;
    if let Some(unknown) = only.iter().find(|name| !all.contains(name)) {
        bail!("no target {unknown}: expected one of {}", all.join(", "));
    }
    Ok(if only.is_empty() { all } else { only.to_vec() })
}

/// Names of all targets.
fn targets() -> Result<Vec<String>> {
    let folder = repo::root().join("fuzz/fuzz_targets");
    let entries = std::fs::read_dir(&folder);
    let entries = entries.with_context(|| format!("list {}", folder.display()))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let stem = |path: PathBuf| path.file_stem()?.to_str().map(str::to_owned);
    let mut names: Vec<String> = paths.filter_map(stem).collect();
    names.sort();
    Ok(names)
}

fn cargo(what: &str) -> Command {
    let mut command = repo::cargo();
    command.args([what, "--manifest-path", "fuzz/Cargo.toml", "--bins"]);
    command
}

/// Builds all targets with counters; gives the folder that has them.
fn build(show: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    let host = repo::host()?;
    let mut command = cargo("build");
    // With a target, flags are for what runs there, and not for build scripts.
    command.args(["--profile", "fuzz", "--target", &host]);
    command.args(["--features", "peers"]);
    command.args(["--target-dir", "target/fuzz"]);
    command.env("RUSTFLAGS", COVERAGE);
    let built = process::stream(command, &process::log_path("fuzz-build"), |line| {
        if line.starts_with("error") {
            show(line);
        }
    })?;
    ensure!(
        built,
        "the fuzz targets do not build: see target/xtask/fuzz-build.log"
    );
    Ok(repo::root().join("target/fuzz").join(host).join("fuzz"))
}

/// libFuzzer's report at the end of a search.
#[derive(Debug, Default)]
struct Report {
    target: String,
    passed: bool,
    runs: u64,
    paths: u64,
    peak_mib: u64,
}

impl Report {
    /// Parses a line of libFuzzer's.
    fn read(&mut self, line: &str) {
        let number = |text: &str| text.trim().parse::<u64>().ok();
        if let Some(runs) = line.strip_prefix("stat::number_of_executed_units:") {
            self.runs = number(runs).unwrap_or(0);
        }
        if let Some(peak) = line.strip_prefix("stat::peak_rss_mb:") {
            self.peak_mib = number(peak).unwrap_or(0);
        }
        if let Some((_, rest)) = line.split_once(" cov: ") {
            let paths = rest.split(' ').next().and_then(number);
            self.paths = paths.unwrap_or(self.paths);
        }
    }

    fn row(&self, seconds: u32) -> String {
        let Self {
            target,
            runs,
            paths,
            peak_mib,
            ..
        } = self;
        let verdict = if self.passed { "none" } else { "SEE LOG" };
        format!("| {target} | {seconds} | {runs} | {paths} | {peak_mib} | {verdict} |")
    }
}

/// Runs a target for so long.
fn search(programs: &Path, folder: &Path, target: &str, seconds: u32) -> Result<Report> {
    let [corpus, artifacts] = ["corpus", "artifacts"].map(|name| folder.join(name).join(target));
    for made in [&corpus, &artifacts] {
        std::fs::create_dir_all(made).with_context(|| format!("make {}", made.display()))?;
    }
    let mut command = Command::new(programs.join(target));
    command.arg(corpus).current_dir(folder);
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.arg(format!("-max_total_time={seconds}"));
    command.args([
        format!("-timeout={INPUT_S}"),
        format!("-rss_limit_mb={MEMORY_MIB}"),
        "-print_final_stats=1".to_owned(),
    ]);
    let mut report = Report {
        target: target.to_owned(),
        ..Report::default()
    };
    let log = process::log_path(&format!("fuzz-{target}"));
    report.passed = process::stream(command, &log, |line| report.read(line))?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libfuzzer_says_is_read() {
        let mut report = Report {
            target: "gguf".to_owned(),
            passed: true,
            ..Report::default()
        };
        for line in [
            "INFO: Running with entropic power schedule (0xFF, 100).",
            "#2\tINITED cov: 210 ft: 211 corp: 1/1b exec/s: 0 rss: 40Mb",
            "#52\tNEW    cov: 233 ft: 260 corp: 2/5b lim: 4 exec/s: 0 rss: 41Mb L: 4/4",
            "stat::number_of_executed_units: 123456",
            "stat::peak_rss_mb:              97",
        ] {
            report.read(line);
        }
        assert_eq!(report.row(600), "| gguf | 600 | 123456 | 233 | 97 | none |");
    }

    #[test]
    fn every_target_is_in_the_manifest_and_found() {
        let names = targets().expect("the folder is in the checkout");
        let manifest = repo::root().join("fuzz/Cargo.toml");
        let manifest = std::fs::read_to_string(manifest).expect("it is in the checkout");
        for name in &names {
            let entry = format!("path = \"fuzz_targets/{name}.rs\"");
            assert!(manifest.contains(&entry), "{name}");
        }
        assert!(names.len() > 20, "{names:?}");
        assert!(selected_targets(&["no-such".to_owned()]).is_err());
    }
}
