//! Models over several processes, as a user calls them: the same answer from any split, what is
//! told about it, and what happens when a process dies, is stopped or cannot start.
//!
//! Most tests run random models of some hundred kilobytes ([`tiny`]); those with a real one need
//! SmolLM2 in the folder that `cargo xtask models` fills, and say so when it is not there.
//!
//! Processes are looked up in `/proc`, so the tests are for Linux.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod http;
#[path = "../../../comm/tests/rdma/library.rs"]
mod library;
mod lost;
mod processes;
mod same;
mod server;
mod shown;
mod steered;
mod terminal;
mod tiny;
mod tty;
mod usage;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tiny::Tiny;

/// No wait of these tests is longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A failure is reported within 2 s. This is what a machine that runs other tests too may add.
const REPORTED: Duration = Duration::from_millis(2500);

/// Tests that measure, and those with many processes, run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A world of its own for one paceline: an empty home and a folder for models.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["home", "tmp", "models"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a model; the answer is the MODEL of the command line.
    fn model(&self, tiny: Tiny) -> String {
        let path = self.path(&format!("models/{}.gguf", tiny.family));
        tiny.write(&path);
        path.to_str().unwrap().to_owned()
    }

    /// paceline, with nothing of the tester's environment and nothing on standard input.
    fn paceline<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        command
            .env_clear()
            .env("PACELINE_HOME", self.path("home"))
            .env("TMPDIR", self.path("tmp"))
            // Nobody listens on port 1, and there is no python3 in an empty PATH.
            .env("HF_ENDPOINT", "http://127.0.0.1:1")
            .env("PATH", self.path("home"))
            .current_dir(self.path("models"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs `paceline run MODEL ARGS` to its end.
    fn run(&self, model: &str, args: &[&str]) -> Output {
        let all = ["run", model].into_iter().chain(args.iter().copied());
        finish(&mut self.paceline(all))
    }

    /// The object that `paceline run MODEL ARGS --json` prints, and nothing else.
    fn json(&self, model: &str, args: &[&str]) -> Value {
        let output = self.run(model, &[args, &["--json"]].concat());
        assert!(
            output.status.success(),
            "{args:?}: {}",
            text(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Fails when a file was left behind, but for what was measured of this machine.
    fn assert_clean(&self) {
        for name in ["home", "tmp"] {
            let entries = std::fs::read_dir(self.path(name)).unwrap();
            let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            left.retain(|file| file != "measured.json");
            assert!(left.is_empty(), "in {name}: {left:?}");
        }
    }
}

/// Runs `command` to its end, which must come before [`PATIENCE`] does.
fn finish(command: &mut Command) -> Output {
    let child = command.spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = end.recv_timeout(PATIENCE) else {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        panic!("{command:?} hangs");
    };
    output.unwrap()
}

/// Waits until `done`, at most [`PATIENCE`]; how long that took.
fn until(what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        let waited = start.elapsed();
        assert!(waited < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// SmolLM2, or `None` with a line that says that `test` is skipped.
fn smollm2(test: &str) -> Option<String> {
    let folder = std::env::var_os("PACELINE_TEST_MODELS").map_or_else(
        || {
            std::env::home_dir()
                .unwrap_or_default()
                .join(".cache/paceline/test-models")
        },
        PathBuf::from,
    );
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    if !Path::exists(&path) {
        eprintln!("SKIPPED {test}: {} is not there", path.display());
        return None;
    }
    Some(path.to_str().unwrap().to_owned())
}
