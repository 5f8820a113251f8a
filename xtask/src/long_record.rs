//! The record of the last long run: a row for each step, in `benches/results/long-run.tsv`.
//!
//! `cargo xtask test --long` rewrites the rows of the steps that it ran; commit the file then.
//! `cargo xtask test` prints the age of the oldest row, so that a stale record is seen.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::repo;
use crate::tally::TestTally;

const HEADER: &str = "step\tcommit\tdate\tseconds\tpassed\tfailed\tskipped\tmachine";

/// Columns of a row by the step's name, without that name.
type StepRecords = BTreeMap<String, Vec<String>>;

fn path() -> PathBuf {
    repo::root().join("benches/results/long-run.tsv")
}

/// Writes a row for each of `steps`: name, time, counts. Other rows stay.
pub(crate) fn write(steps: &[(&str, Duration, &TestTally)]) -> Result<()> {
    let mut rows = read()?;
    let (commit, date) = (git(&["rev-parse", "--short=8", "HEAD"])?, today()?);
    for (step, time, tally) in steps {
        let counts = [tally.passed, tally.failed, tally.skips.len()].map(|n| n.to_string());
        let mut row = vec![commit.clone(), date.clone(), time.as_secs().to_string()];
        row.extend(counts);
        row.push(machine());
        rows.insert((*step).to_owned(), row);
    }
    let lines = rows
        .iter()
        .map(|(step, row)| format!("{step}\t{}\n", row.join("\t")));
    let text = format!("{HEADER}\n{}", lines.collect::<String>());
    fs::write(path(), text).with_context(|| format!("write {}", path().display()))
}

/// The record as text: which long steps ran last, when, at which commit, with which counts.
pub(crate) fn describe() -> String {
    match read() {
        Ok(rows) if rows.is_empty() => "last long run: none is on record".to_owned(),
        Ok(rows) => {
            let lines = rows.iter().map(|(step, row)| line(step, row));
            format!(
                "last long run, by step:\n{}",
                lines.collect::<Vec<_>>().join("\n")
            )
        }
        Err(error) => format!("last long run: {error:#}"),
    }
}

/// A row as a sentence. A clone without the history cannot count the commits since.
fn line(step: &str, row: &[String]) -> String {
    let [commit, date, seconds, passed, failed, skipped, machine] = row else {
        return format!("  {step}: a row of {} columns, expected 7", row.len());
    };
    let since = git(&["rev-list", "--count", &format!("{commit}..HEAD")]);
    let since = since.map_or_else(|_| String::new(), |n| format!(", {n} commits ago"));
    format!(
        "  {step}: {date} at {commit}{since}: {passed} passed, {failed} failed, {skipped} skipped \
         in {seconds} s on {machine}"
    )
}

fn read() -> Result<StepRecords> {
    match fs::read_to_string(path()) {
        Ok(text) => parse(&text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(StepRecords::new()),
        Err(error) => Err(error).with_context(|| format!("read {}", path().display())),
    }
}

fn parse(text: &str) -> Result<StepRecords> {
    let mut lines = text.lines();
    let header = lines.next().unwrap_or_default();
    ensure!(
        header == HEADER,
        "long-run.tsv begins with {header:?}, expected {HEADER:?}"
    );
    let row = |line: &str| {
        let mut columns = line.split('\t').map(str::to_owned);
        let step = columns.next().unwrap_or_default();
        (step, columns.collect())
    };
    Ok(lines.map(row).collect())
}

fn git(arguments: &[&str]) -> Result<String> {
    output("git", arguments)
}

fn today() -> Result<String> {
    output("date", &["-u", "+%Y-%m-%d"])
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    let output = command.args(arguments).current_dir(repo::root()).output();
    let output = output.with_context(|| format!("run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The processor's name as Linux tells it, else the target's, and the number of cores.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|line| line.starts_with("model name"));
    let model = model
        .and_then(|line| line.split_once(": "))
        .map(|(_, name)| name);
    format!("{}, {cores} cores", model.unwrap_or(std::env::consts::ARCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_told_with_their_counts() {
        let text =
            format!("{HEADER}\nunit\tdeadbeef\t2026-11-28\t900\t2700\t0\t12\tEPYC, 2 cores\n");
        let rows = parse(&text).unwrap();
        let said = line("unit", &rows["unit"]);
        assert!(said.starts_with("  unit: 2026-11-28 at deadbeef"), "{said}");
        assert!(
            said.ends_with("2700 passed, 0 failed, 12 skipped in 900 s on EPYC, 2 cores"),
            "{said}"
        );
        assert!(line("unit", &rows["unit"][1..]).contains("6 columns"));
        assert!(parse("another file\n").is_err());
    }
}
