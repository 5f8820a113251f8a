//! Code that the tests of the binary share. Every program of them has this as a module of its own.
//!
//! - [`home`]: a paceline with an empty home; [`hosts`]: one that has hosts to reach;
//! - [`namespaces`]: hosts with a network between them;
//! - [`terminal`]: a person at a terminal; [`vocabulary`]: tokens of models that tests write.
#![allow(dead_code, reason = "each program uses its own part")]

pub(crate) mod home;
pub(crate) mod hosts;
pub(crate) mod namespaces;
pub(crate) mod terminal;
pub(crate) mod vocabulary;

use std::fmt::Debug;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// No wait of these tests is longer, unless something hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// paceline with nothing of the tester's environment and nothing on standard input.
/// `PACELINE_TEST_BINARY` names another one than the one built here.
pub(crate) fn paceline(home: &Path) -> Command {
    let built = || env!("CARGO_BIN_EXE_paceline").into();
    let mut command = Command::new(std::env::var_os("PACELINE_TEST_BINARY").unwrap_or_else(built));
    command
        .env_clear()
        .env("PACELINE_HOME", home)
        // Nobody listens on port 1, and there is no python3 in a PATH without programs.
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .env("PATH", home)
        .stdin(Stdio::null());
    command
}

/// Runs `command` to its end, which must come before [`PATIENCE`] does.
pub(crate) fn finish(command: &mut Command) -> Output {
    collect(command.spawn().unwrap())
}

/// Waits for the end of `child`, which must come before [`PATIENCE`] does.
pub(crate) fn collect(child: Child) -> Output {
    let pid = Pid::from_child(&child);
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = end.recv_timeout(PATIENCE) else {
        let _ = kill_process(pid, Signal::KILL);
        panic!("process {pid:?} hangs");
    };
    output.unwrap()
}

/// Waits until `done`, at most [`PATIENCE`]; how long that took.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        let waited = start.elapsed();
        assert!(waited < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

/// Checks that `said`, by `who`, has all of `parts`, in this order.
pub(crate) fn assert_parts(who: &impl Debug, said: &str, parts: &[impl AsRef<str>]) {
    let mut rest = said;
    for part in parts {
        let part = part.as_ref();
        let at = rest.find(part);
        let at = at.unwrap_or_else(|| panic!("{who:?}: no {part:?} in {said}"));
        rest = &rest[at + part.len()..];
    }
}

/// The rows of a table of wrong command lines: arguments, and what stderr must say, in this order.
/// Columns are divided by ` | `, arguments by spaces; `\n` is the end of a line.
pub(crate) fn rows(table: &str) -> impl Iterator<Item = (Vec<&str>, Vec<String>)> {
    table.lines().map(|row| {
        let mut columns = row.split(" | ");
        let args = columns.next().unwrap().split_whitespace().collect();
        (
            args,
            columns.map(|part| part.replace("\\n", "\n")).collect(),
        )
    })
}

/// The words of a command line without quotes.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// The text that `child`, whose stderr is piped, writes there until it closes it.
pub(crate) fn complaints(child: &mut Child) -> String {
    let mut said = String::new();
    let mut stderr = child.stderr.take().unwrap();
    stderr.read_to_string(&mut said).unwrap();
    said
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// SmolLM2, or `None` with a line that says that `test` is skipped.
pub(crate) fn smollm2(test: &str) -> Option<String> {
    test_model(test, "SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// A file that `cargo xtask models` fetched, or `None` with a line that says that `test` is
/// skipped.
pub(crate) fn test_model(test: &str, file: &str) -> Option<String> {
    let folder = std::env::var_os("PACELINE_TEST_MODELS").map_or_else(
        || {
            std::env::home_dir()
                .unwrap_or_default()
                .join(".cache/paceline/test-models")
        },
        PathBuf::from,
    );
    let path = folder.join(file);
    if !Path::exists(&path) {
        eprintln!("SKIPPED {test}: {} is not there", path.display());
        return None;
    }
    Some(path.to_str().unwrap().to_owned())
}
