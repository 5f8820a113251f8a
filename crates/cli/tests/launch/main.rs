//! `paceline launch` as a user calls it: what ranks are given, what comes back, and what is left
//! when something dies.
//!
//! Other machines are this one: a stand-in for `ssh` on PATH (`tests-data/topology/ssh`) runs
//! commands in a fresh session and environment. With PACELINE_TEST_SSHD=1 a real server on a free
//! port is used besides ([`sshd`]).
//!
//! Processes are looked up in `/proc`, so the tests are for Linux.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod endings;
mod given;
#[path = "../../../comm/tests/rdma/library.rs"]
mod library;
mod mpi;
mod sshd;
mod streams;
mod usage;
mod wires;

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// No wait of these tests is longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A world of its own: temporary files, hosts `a` and `b`, and a stand-in for `ssh`.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = Self { dir };
        for name in ["bin", "tmp", "here", "hosts/a", "hosts/b"] {
            fs::create_dir_all(world.path(name)).unwrap();
        }
        let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/topology/ssh");
        symlink(fake.canonicalize().unwrap(), world.path("bin/ssh")).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `paceline launch` with `args`, its streams piped.
    fn launch(&self, args: &[&str]) -> Command {
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        command
            .env_clear()
            .env("PATH", path)
            .env("HOME", self.path("here"))
            .env("TMPDIR", self.path("tmp"))
            .env("FAKE_SSH_HOSTS", self.path("hosts"))
            .env("FAKE_SSH_LOG", self.path("log"))
            .current_dir(self.path("here"))
            .arg("launch")
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs it to its end.
    fn run(&self, args: &[&str]) -> Ended {
        finish(self.launch(args).spawn().unwrap())
    }

    /// Hosts `a` and `b` by ssh, in this order, `ranks` of them.
    fn hostfile(&self, ranks: usize) -> String {
        let hosts = ["a", "b"].iter().cycle().take(ranks).enumerate();
        let hosts: Vec<String> = hosts
            .map(|(rank, host)| format!(r#"{{"ssh": "{host}", "ips": ["10.0.0.{rank}"]}}"#))
            .collect();
        let path = self.path("hosts.json");
        fs::write(&path, format!("[{}]", hosts.join(","))).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Calls of `ssh`.
    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Waits until no temporary file is left.
    fn assert_clean(&self) {
        let left = || -> Vec<_> {
            let entries = fs::read_dir(self.path("tmp")).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect()
        };
        until("temporary files are removed", || left().is_empty());
    }
}

/// How a command ended.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    took: Duration,
}

impl Ended {
    /// Lines of standard output, sorted: ranks run side by side.
    fn lines(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }

    /// Fails unless it went well.
    fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }
}

/// Waits for the end of a command, which must come before [`PATIENCE`] does.
fn finish(child: Child) -> Ended {
    let start = Instant::now();
    let pid = Pid::from_child(&child);
    let (done, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = end.recv_timeout(PATIENCE) else {
        let _ = kill_process(pid, Signal::KILL);
        panic!("it hangs");
    };
    let Output {
        status,
        stdout,
        stderr,
    } = output.unwrap();
    Ended {
        code: status.code(),
        stdout: String::from_utf8(stdout).unwrap(),
        stderr: String::from_utf8(stderr).unwrap(),
        took: start.elapsed(),
    }
}

/// Waits until `done`, at most [`PATIENCE`].
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < PATIENCE,
            "{what}: not within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes to a command's standard input, and closes it.
fn feed(child: &mut Child, bytes: &[u8]) {
    child.stdin.take().unwrap().write_all(bytes).unwrap();
}

/// Waits until none of the processes whose ids are in `files` lives.
fn assert_gone(files: &[PathBuf]) {
    for file in files {
        let id = fs::read_to_string(file).unwrap();
        let id = id.trim();
        until(&format!("process {id} of {} ends", file.display()), || {
            !lives(id)
        });
    }
}

/// Whether a process runs; one that only waits to be reaped does not.
fn lives(id: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .map(|(_, rest)| rest.starts_with('Z'));
    state == Some(false)
}
