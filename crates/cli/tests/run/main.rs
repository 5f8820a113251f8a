//! `paceline run` and `paceline bench` as a user, a script or a terminal calls them.
//!
//! Most tests run a model of some hundred kilobytes that they write themselves ([`tiny`]); those
//! in [`real`] need SmolLM2 in the folder that `cargo xtask models` fills, and say so when it is
//! not there.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod answer;
mod bench;
mod chat;
mod errors;
mod real;
mod signals;
mod terminal;
mod tiny;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tiny::Tiny;

/// No run of these tests takes longer, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A world of its own for one paceline: an empty home, an empty folder for temporary files, and a
/// folder for models.
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
        let path = self.path("models/tiny.gguf");
        tiny.write(&path);
        path.to_str().unwrap().to_owned()
    }

    /// The arguments of an answer that would take hours.
    fn endless(&self) -> Vec<String> {
        let model = self.model(Tiny {
            ends: false,
            context: 1 << 24,
            ..Tiny::default()
        });
        let args = ["run", &model, "go", "--context", "16000000"];
        args.map(str::to_owned).to_vec()
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
            .stdin(Stdio::null());
        command
    }

    /// Runs `paceline run MODEL ARGS` to its end.
    fn run(&self, model: &str, args: &[&str]) -> Output {
        let all = ["run", model].into_iter().chain(args.iter().copied());
        finish(
            self.paceline(all)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        )
    }

    /// The object that `paceline run MODEL ARGS --json` prints, and nothing else.
    fn json(&self, model: &str, args: &[&str]) -> Value {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        object(&self.run(model, &args))
    }

    /// Fails when something was left behind.
    fn assert_clean(&self) {
        for name in ["home", "tmp"] {
            let entries = std::fs::read_dir(self.path(name)).unwrap();
            let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            left.retain(|name| name != "measured.json"); // what a run taught the planner
            assert!(left.is_empty(), "in {name}: {left:?}");
        }
    }
}

/// Runs `command` to its end, which must come before [`PATIENCE`] does.
fn finish(command: &mut Command) -> Output {
    let child = command.spawn().unwrap();
    let pid = pid(&child);
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = end.recv_timeout(PATIENCE) else {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        panic!("{command:?} hangs");
    };
    output.unwrap()
}

/// The one JSON object on stdout.
fn object(output: &Output) -> Value {
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let json: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)));
    assert!(json.is_object(), "{json}");
    json
}

/// Waits for the end of `child`, at most [`PATIENCE`].
fn wait(child: &mut Child) -> ExitStatus {
    let mut status = None;
    until("the process ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// Waits until `done`, at most [`PATIENCE`].
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < PATIENCE,
            "{what}: not within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pid(child: &Child) -> rustix::process::Pid {
    rustix::process::Pid::from_child(child)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The list of numbers called `key`.
fn numbers(json: &Value, key: &str) -> Vec<u64> {
    let list = json[key].as_array().unwrap();
    list.iter().map(|n| n.as_u64().unwrap()).collect()
}

/// SmolLM2, or `None` with a line that says that `test` is skipped.
fn smollm2(test: &str) -> Option<String> {
    test_model(test, "SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// A file that `cargo xtask models` fetched, or `None` with a line that says that `test` is
/// skipped.
fn test_model(test: &str, file: &str) -> Option<String> {
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
