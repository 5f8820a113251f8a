//! A rank in its own process: this test binary, which gets its rank from the environment. It prints
//! a line `@WORD REST` for each event.
#![allow(dead_code, reason = "each program uses its own part")]

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paceline_base::testing::Stopwatch;
use rustix::process::{Pid, Signal, kill_process};

/// Killed when dropped.
pub(crate) struct WorkerProcess {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl WorkerProcess {
    /// Starts a process that runs the test called `test`.
    pub(crate) fn start<S: AsRef<OsStr>>(test: &str, env: &[(&str, S)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The rest of the next line that starts with `word`.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            let count = self.lines.read_line(&mut line).unwrap();
            assert!(count > 0, "the worker ended without saying {word}");
            // The test harness may have begun the line.
            if let Some((_, rest)) = line.split_once(&format!("@{word} ")) {
                return rest.trim().to_string();
            }
        }
    }

    pub(crate) fn tell(&self, text: &str) {
        let mut stdin = self.child.stdin.as_ref().unwrap();
        writeln!(stdin, "{text}").unwrap();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The contract: all other ranks learn of a dead or stopped rank within this time, less the time
/// that the machine withheld.
const BAR: Duration = Duration::from_secs(2);

/// A machine that withheld this much is starved; its ranks stretch the silence limit, four times at
/// most (`heartbeat/starvation.rs`).
const STARVED: Duration = Duration::from_millis(50);

/// Seconds since 1970, comparable between processes of a machine.
pub(crate) fn now() -> f64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.unwrap().as_secs_f64()
}

/// The time at which a rank was killed or stopped.
pub(crate) struct FailureClock {
    at: f64,
    watch: Stopwatch,
}

impl FailureClock {
    pub(crate) fn now() -> Self {
        let watch = Stopwatch::start();
        Self { at: now(), watch }
    }

    /// Checks that rank `who` learned of it in time: at `when`, by [`now`].
    pub(crate) fn known(&self, who: impl Display, when: f64) {
        let wall = Duration::from_secs_f64((when - self.at).max(0.0));
        let took = self.watch.without_withheld(wall);
        let bar = if wall - took < STARVED { BAR } else { BAR * 4 };
        assert!(took < bar, "{who} knew after {took:?}");
    }
}

/// Sends `signal` to one rank; all others must report an error that begins with `variant` and names
/// it in time.
pub(crate) fn harm(workers: &mut [WorkerProcess], victim: usize, signal: Signal, variant: &str) {
    // Some calls into the run.
    std::thread::sleep(Duration::from_millis(50));
    let harmed = FailureClock::now();
    workers[victim].signal(signal);
    for (rank, worker) in workers.iter_mut().enumerate() {
        if rank == victim {
            continue;
        }
        let report = worker.expect("error");
        let (when, error) = report.split_once(' ').unwrap();
        harmed.known(format_args!("rank {rank}"), when.parse().unwrap());
        assert!(error.starts_with(variant), "rank {rank}: {error}");
        let named = format!("rank: Rank({victim})");
        assert!(error.contains(&named), "rank {rank}: {error}");
    }
}
