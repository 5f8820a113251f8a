//! `cargo xtask instructions`: do the AVX2 kernels take more instructions than they did?
//!
//! Counts are the same on a busy machine and on an idle one, which times are not. The tool
//! callgrind of valgrind counts what `crates/tensor/examples/instructions.rs` does in one round and
//! in three. The difference, halved, is a round. It cannot run AVX-512 or AMX: those have paired
//! ratios in docs/measurements.md. The reference counts lie next to the example, with the version
//! of the compiler that they were counted with. Another compiler gives other code, and is a skip.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::tally::TestTally;
use crate::{process, repo};

/// Path of the recorded counts.
const RECORD: &str = "crates/tensor/examples/instructions.txt";

/// The works that are counted.
const WORKS: [&str; 11] = [
    "attention-decode",
    "attention-decode-q8",
    "attention-decode-q4",
    "attention-prompt",
    "rows",
    "Q4_0-decode",
    "Q4_1-decode",
    "Q4_K-decode",
    "Q6_K-decode",
    "Q8_0-decode",
    "Q4_K-prompt",
];

/// Growth that fails.
const GROWTH_MAX: f64 = 0.03;

/// Limit of a run under callgrind, which takes about a second.
const LIMIT: Duration = Duration::from_secs(60);

/// Counts, compares with the record and says so; with `record`, writes it anew.
pub(crate) fn run(record: bool, show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    const NAME: &str = "instructions of AVX2 kernels";
    if let Err(error) = process::capture(valgrind(&["--version"]), LIMIT) {
        return Ok(TestTally::skip(NAME, &format!("no valgrind: {error:#}")));
    }
    if !cfg!(target_arch = "x86_64") || !has_avx2() {
        return Ok(TestTally::skip(NAME, "this machine has no AVX2"));
    }
    let compiler = compiler()?;
    let path = repo::root().join(RECORD);
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    let made_by = before.lines().next().unwrap_or_default();
    if !record && made_by != compiler {
        let reason = format!("recorded with {made_by:?}, this is {compiler:?}");
        return Ok(TestTally::skip(NAME, &reason));
    }
    let program = build()?;
    let (mut tally, mut text) = (TestTally::default(), format!("{compiler}\n"));
    for work in WORKS {
        let now = count(&program, work)?;
        writeln!(text, "{work} {now}").expect("a string takes all");
        let old = recorded(&before, work);
        show(&format!("{work:24} {now:10} {}", change(now, old)));
        let grown = old.is_none_or(|old| now as f64 > old as f64 * (1.0 + GROWTH_MAX));
        let name = format!("instructions of {work}: {now}, recorded {old:?}");
        tally.add(TestTally::check(&name, record || !grown));
    }
    if record {
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(tally)
}

fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn valgrind(args: &[&str]) -> Command {
    let mut command = Command::new("valgrind");
    command.args(args);
    command
}

/// Version of the compiler, as it says it.
fn compiler() -> Result<String> {
    let mut command = Command::new("rustc");
    command.arg("--version").current_dir(repo::root());
    let text = process::capture(command, LIMIT)?;
    Ok(text.trim().to_owned())
}

/// Builds what is counted.
fn build() -> Result<PathBuf> {
    let mut command = repo::cargo();
    // The workspace, so that what others built is used again: features are those of all crates.
    command.args(["build", "--release", "--workspace"]);
    command.args(["--example", "instructions", "--message-format", "json"]);
    let output = command.output().context("run cargo build")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let executable = text.lines().rev().find_map(|line| {
        let json: serde_json::Value = serde_json::from_str(line).ok()?;
        let named = json["target"]["name"] == "instructions";
        named.then(|| json["executable"].as_str().map(PathBuf::from))?
    });
    if !output.status.success() {
        bail!(
            "cargo build: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    executable.context("cargo build named no executable")
}

/// Instructions of one round of `work`.
fn count(program: &std::path::Path, work: &str) -> Result<u64> {
    let of = |rounds: &str| -> Result<u64> {
        let mut command = valgrind(&["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
        command.arg(program).args([work, rounds]);
        let text = process::capture(command, LIMIT).with_context(|| format!("count {work}"))?;
        let total = text.lines().find_map(|line| line.split_once("refs:"));
        let (_, total) = total.with_context(|| format!("no count of {work} in {text:?}"))?;
        Ok(total.replace(',', "").trim().parse()?)
    };
    Ok((of("3")?.saturating_sub(of("1")?)) / 2)
}

fn recorded(text: &str, work: &str) -> Option<u64> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.find(|(name, _)| *name == work)?.1.parse().ok()
}

fn change(now: u64, old: Option<u64>) -> String {
    match old {
        Some(old) => format!("{:+.2} %", 100.0 * (now as f64 / old as f64 - 1.0)),
        None => "not recorded".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_by_name() {
        let text = "rustc 1.95.0\nrows 123\nQ4_K-decode 456\n";
        assert_eq!(recorded(text, "Q4_K-decode"), Some(456));
        assert_eq!(recorded(text, "Q4_K"), None);
        assert_eq!(change(103, Some(100)), "+3.00 %");
    }
}
