//! `cargo xtask mlx --gpu`: the MLX engine on this machine's GPU. Runs its tests there, and an
//! 8B-shaped model against `mlx-lm` and against the limit of the device's memory bandwidth.
//!
//! ```text
//! paceline engines          a GPU that MLX computes on? else SKIPPED, by name
//! target/gpu-here/run.sh    the self-test and the tests of MLX, as in a pack (`gpu_pack.rs`)
//! scripts/models/synth_mlx  4.5 GB of random weights, 4 bits in groups of 64, kept
//! paceline bench model      --engine mlx --against mlx-lm
//! ```
//!
//! The results are in `target/xtask/mlx-gpu-report.md` at the end, to be pasted into an issue.
//!
//! MLX is the one that `PACELINE_MLXC` names, else one that `paceline engines install mlx` puts
//! next to the test models; `mlx-lm` that of `PACELINE_MLX_PYTHON`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::mlx_engine::LIBRARY;
use crate::tally::TestTally;
use crate::{gpu_pack, mlx, models, process, repo, sdk};

/// The bars: of mlx-lm's speed, and of the device's memory.
const OF_PEER: f64 = 1.0;
const OF_LIMIT: f64 = 0.5;

/// Checks that are skipped where there is no GPU.
const ALL: [&str; 3] = [
    "MLX's tests on a GPU",
    "an 8B-shaped model on a GPU beside mlx-lm",
    "an 8B-shaped model on a GPU and its memory's limit",
];

/// Runs all of it and writes the report.
pub(crate) fn run(see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let mut said = Vec::new();
    let tally = checks(&mut |line: &str| {
        said.push(line.to_owned());
        see(line);
    })?;
    let path = process::log_path("mlx-gpu").with_file_name("mlx-gpu-report.md");
    std::fs::write(&path, report(&said, &tally))?;
    see(&format!("report to paste: {}", path.display()));
    Ok(tally)
}

/// The text that an owner of a GPU pastes: the system, every line that was shown, and the counts.
fn report(said: &[String], tally: &TestTally) -> String {
    let (system, processor) = (std::env::consts::OS, std::env::consts::ARCH);
    let (passed, failed, skipped) = (tally.passed, tally.failed, tally.skips.len());
    let skips = tally.skips.iter();
    let skips = skips.map(|skip| format!("- skipped {}: {}\n", skip.name, skip.reason));
    let failures = tally.failures.iter();
    let failures = failures.map(|name| format!("- failed {name}\n"));
    let names: String = failures.chain(skips).collect();
    format!(
        "# MLX on a GPU\n\n{system} {processor}: {passed} passed, {failed} failed, {skipped} \
         skipped\n\n{names}\n```text\n{}\n```\n",
        said.join("\n")
    )
}

fn checks(see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let binary = sdk::build(see)?;
    let library = match gpu(&binary, see) {
        Ok(library) => library,
        Err(why) => return Ok(skipped(&ALL, &format!("{why:#}"))),
    };
    let mut tally = tests(&library, see)?;
    tally.add(match bench(&binary, &library, see) {
        Ok(tally) => tally,
        Err(why) => skipped(&ALL[1..], &format!("{why:#}")),
    });
    Ok(tally)
}

fn skipped(names: &[&str], why: &str) -> TestTally {
    let mut tally = TestTally::default();
    names
        .iter()
        .for_each(|name| tally.add(TestTally::skip(name, why)));
    tally
}

/// The library of an MLX with a GPU; installed if need be, where a GPU is to be seen.
fn gpu(binary: &Path, see: &mut impl FnMut(&str)) -> Result<PathBuf> {
    let home = models::folder()?.with_file_name("gpu");
    if let Some(library) = device(binary, &home, see)? {
        return Ok(library);
    }
    let seen = cfg!(all(target_os = "macos", target_arch = "aarch64"))
        || Command::new("nvidia-smi")
            .arg("-L")
            .output()
            .is_ok_and(|out| out.status.success());
    if !seen {
        bail!("no GPU: neither Apple silicon nor one that nvidia-smi lists");
    }
    let mut install = paceline(binary, &home);
    install.args(["engines", "install", "mlx"]);
    process::stream(install, &process::log_path("mlx-gpu-install"), |line| {
        see(line)
    })?;
    let found = device(binary, &home, see)?;
    found.context("the MLX that was installed finds no GPU, see `paceline engines`")
}

fn paceline(binary: &Path, home: &Path) -> Command {
    let mut command = Command::new(binary);
    command.env("PACELINE_HOME", home);
    command
}

/// MLX's library, if one is found and has a GPU.
fn device(binary: &Path, home: &Path, see: &mut impl FnMut(&str)) -> Result<Option<PathBuf>> {
    let mut list = paceline(binary, home);
    list.args(["engines", "--json"]);
    let listed = object(list, "mlx-gpu-engines")?;
    let engines = listed["engines"].as_array().map_or(&[][..], Vec::as_slice);
    let Some(mlx) = engines.iter().find(|engine| engine["name"] == "mlx") else {
        return Ok(None);
    };
    let devices = mlx["devices"].as_array().map_or(&[][..], Vec::as_slice);
    let gpu = devices.iter().find(|device| device["kind"] == "gpu");
    gpu.into_iter().for_each(|gpu| see(&gpu.to_string()));
    Ok(gpu.and(mlx["library"].as_str()).map(PathBuf::from))
}

/// The object that `command` prints.
fn object(command: Command, log: &str) -> Result<Value> {
    let mut found = None;
    let ended = process::stream(command, &process::log_path(log), |line| {
        found = serde_json::from_str(line).ok().or_else(|| found.take());
    })?;
    match found.filter(|_| ended) {
        Some(object) => Ok(object),
        None => bail!("see {}", process::log_path(log).display()),
    }
}

/// Time of the self-test and all tests: far more than a lent machine has.
const TESTS_SECONDS: &str = "3600";

/// The self-test and the tests of the engine, which compute on the best device there is.
fn tests(library: &Path, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let folder = repo::root().join("target/gpu-here");
    gpu_pack::assemble(&folder, see)?;
    let mut script = Command::new("sh");
    script.arg(folder.join("run.sh")).arg(TESTS_SECONDS);
    script.env(LIBRARY, library).env_remove("OUT");
    let mut tally = TestTally::default();
    let passed = process::stream(script, &process::log_path("mlx-gpu"), |line| {
        gpu_pack::outcome(line)
            .into_iter()
            .for_each(|of| tally.add(of));
        see(line);
    })?;
    if !passed && tally.failed == 0 {
        tally.add(TestTally::failure(ALL[0]));
    }
    Ok(tally)
}

/// Decoding of an 8B-shaped model against both bars.
fn bench(binary: &Path, library: &Path, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let python = std::env::var_os(mlx::PYTHON).context("PACELINE_MLX_PYTHON names no mlx-lm")?;
    let models = models::folder()?;
    let folder = models.join("synthetic-8B-mlx-4bit");
    let mut make = Command::new(&python);
    make.arg(repo::root().join("scripts/models/synth_mlx.py"));
    make.arg(models.join("SmolLM2-135M-Instruct-mlx-4bit"))
        .arg(&folder);
    if !process::stream(make, &process::log_path("mlx-gpu-model"), |line| see(line))? {
        bail!(
            "no 8B-shaped model: see {}",
            process::log_path("mlx-gpu-model").display()
        );
    }
    let mut command = Command::new(binary);
    command.args(["bench", "model"]).arg(&folder);
    command.args(["--engine", "mlx", "--against", "mlx-lm", "--json"]);
    command.args(["--prompt", "512", "--gen", "128", "--runs", "9"]);
    command.env(LIBRARY, library).env(mlx::PYTHON, &python);
    Ok(judge(&object(command, "mlx-gpu-bench")?, see))
}

/// Holds what was measured to the bars.
fn judge(measured: &Value, see: &mut impl FnMut(&str)) -> TestTally {
    let number = |pointer| measured.pointer(pointer).and_then(Value::as_f64);
    let of_peer = number("/ratio/decode/median").unwrap_or(0.0);
    let of_limit = number("/of_read_limit").unwrap_or(0.0);
    see(&format!(
        "decode {:.1} tokens/s, {of_peer:.2} of mlx-lm, {:.0} % of what the device reads",
        number("/paceline/decode_tok_s/median").unwrap_or(0.0),
        100.0 * of_limit,
    ));
    let mut tally = TestTally::check(ALL[1], of_peer >= OF_PEER);
    tally.add(TestTally::check(ALL[2], of_limit >= OF_LIMIT));
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_what_failed_and_what_was_skipped() {
        let mut tally = TestTally::check("one", true);
        tally.add(TestTally::failure("two"));
        tally.add(TestTally::skip("three", "no GPU"));
        let text = report(&["a line".to_owned()], &tally);
        for part in [
            "1 passed, 1 failed, 1 skipped",
            "- failed two\n- skipped three: no GPU\n",
            "```text\na line\n```",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn both_bars_count() {
        for (of_peer, of_limit, failed) in [(1.0, 0.5, 0), (0.99, 0.6, 1), (0.5, 0.4, 2)] {
            let measured = serde_json::json!({
                "ratio": {"decode": {"median": of_peer}}, "of_read_limit": of_limit,
            });
            let mut said = Vec::new();
            let tally = judge(&measured, &mut |line| said.push(line.to_owned()));
            assert_eq!(tally.failed, failed, "{said:?}");
        }
        assert_eq!(
            judge(&Value::Null, &mut |_| ()).failed,
            2,
            "nothing measured"
        );
    }
}
