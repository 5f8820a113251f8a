//! Running other programs: their output line by line, in order, and into a log file.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::repo;

pub(crate) fn log_path(name: &str) -> PathBuf {
    repo::root()
        .join("target/xtask")
        .join(format!("{name}.log"))
}

/// Runs `command` without input to its end. `see` gets every line of its stdout and stderr, in the
/// order written. So does the file `log`, which is made new. True when it exits with 0.
pub(crate) fn stream(mut command: Command, log: &Path, mut see: impl FnMut(&str)) -> Result<bool> {
    let name = describe(&command);
    if let Some(folder) = log.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let mut log = File::create(log).with_context(|| format!("write {}", log.display()))?;
    let (reader, writer) = std::io::pipe().context("make a pipe")?;
    repo::forget_xtask(&mut command);
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = command.spawn().with_context(|| format!("start {name}"))?;
    drop(command); // closes our ends of the pipe, so that reading ends with the child
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        log.write_all(&line)?;
        see(String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']));
        line.clear();
    }
    Ok(child
        .wait()
        .with_context(|| format!("wait for {name}"))?
        .success())
}

/// Runs `command` quietly to its end and gives what it printed to stdout and stderr.
///
/// # Errors
/// When it cannot be started, runs longer than `limit` (it is then stopped), or fails; the
/// message holds the last line of what it said.
pub(crate) fn capture(mut command: Command, limit: Duration) -> Result<String> {
    let name = describe(&command);
    let (reader, writer) = std::io::pipe().context("make a pipe")?;
    repo::forget_xtask(&mut command);
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = command.spawn().with_context(|| format!("start {name}"))?;
    drop(command);
    let output = std::thread::spawn(move || std::io::read_to_string(reader));
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            bail!("{name}: no end after {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let text = output.join().expect("the reader thread does not panic")?;
    if !status.success() {
        let last = text
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())
            .unwrap_or("no output");
        bail!("{name}: {}: {}", status, last.trim());
    }
    Ok(text)
}

/// The program and its first two arguments, for error messages.
fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut text = program
        .file_name()
        .unwrap_or(program.as_os_str())
        .to_string_lossy()
        .into_owned();
    for argument in command.get_args().take(2) {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// Whether cargo says no more than what it is at.
pub(crate) fn is_progress(line: &str) -> bool {
    const WORDS: [&str; 6] = [
        "Compiling ",
        "Checking ",
        "Downloading ",
        "Downloaded ",
        "Updating ",
        "Blocking ",
    ];
    let line = line.trim_start();
    WORDS.iter().any(|word| line.starts_with(word))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn progress_is_told_from_diagnostics() {
        assert!(is_progress("   Compiling serde v1.0.0"));
        assert!(is_progress(
            "    Blocking waiting for file lock on build directory"
        ));
        assert!(!is_progress("warning: unused variable"));
        assert!(!is_progress("    Finished `release` profile"));
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn lines_of_both_streams_come_in_order_and_into_the_log() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let log = folder.path().join("logs/x.log");
        let mut seen = Vec::new();
        let script = "echo one; echo two >&2; echo three; exit 3";
        let ok = stream(shell(script), &log, |line| seen.push(line.to_string())).expect("runs");
        assert!(!ok, "exit status 3 is a failure");
        assert_eq!(seen, ["one", "two", "three"]);
        assert_eq!(
            std::fs::read_to_string(&log).expect("written"),
            "one\ntwo\nthree\n"
        );
    }

    #[test]
    fn capture_gives_the_output_or_the_last_words() {
        let limit = Duration::from_secs(20);
        assert_eq!(
            capture(shell("echo hello"), limit).expect("runs"),
            "hello\n"
        );
        let error = capture(shell("echo first; echo why >&2; exit 1"), limit).expect_err("fails");
        assert!(error.to_string().ends_with(": why"), "{error}");
        let missing = Command::new("no-such-program-anywhere");
        assert!(capture(missing, limit).is_err());
    }

    #[test]
    fn capture_stops_what_does_not_end() {
        let mut sleep = Command::new("sleep");
        sleep.arg("60");
        let error = capture(sleep, Duration::from_millis(100)).expect_err("is stopped");
        assert!(error.to_string().contains("no end after"), "{error}");
    }
}
