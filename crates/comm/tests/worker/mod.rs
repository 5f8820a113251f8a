//! A rank in a process of its own: this test binary again, told by its environment which rank it
//! is. It prints a line `@WORD REST` for each thing that happens to it.
#![allow(dead_code, reason = "each program uses its own part")]

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};

/// Killed when dropped.
pub(crate) struct Worker {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts one that runs the test called `test`.
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

    /// The rest of the next line that says `word`.
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

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What DESIGN.md asks for: a rank that dies or stops is known by all others within this time.
const BAR: Duration = Duration::from_secs(2);

/// No rank needs longer, however busy the machine is; without a notice it would be an hour.
const LIMIT: Duration = Duration::from_secs(30);

/// A silence that no rank reaches for want of a core: who is named then is known to have ended.
pub(crate) const NEVER_SILENT: Duration = Duration::from_secs(3600);

/// Seconds since 1970, which two processes of a machine can compare.
pub(crate) fn now() -> f64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.unwrap().as_secs_f64()
}

/// Times from a harm to its being known, over several harms.
///
/// The bar is kept by their median, and a limit far beyond it by all: another program may have the
/// cores when a rank would have noticed, but not half of the time.
#[derive(Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    /// Rank `who` knew at `when` of what was done at `harmed`, both by [`now`].
    pub(crate) fn add(&mut self, who: impl Display, harmed: f64, when: f64) {
        let took = Duration::from_secs_f64((when - harmed).max(0.0));
        assert!(took < LIMIT, "{who} knew after {took:?}");
        self.0.push(took);
    }

    pub(crate) fn join(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    pub(crate) fn keep_the_bar(mut self) {
        self.0.sort_unstable();
        let median = self.0[self.0.len() / 2];
        assert!(median < BAR, "median {median:?} of {:?}", self.0);
        eprintln!("known after {median:?} (median of {})", self.0.len());
    }
}

/// Sends `signal` to one rank; all others must report an error that begins with `variant` and names
/// it. How long each took.
pub(crate) fn harm(workers: &mut [Worker], victim: usize, signal: Signal, variant: &str) -> Times {
    let mut times = Times::default();
    // Some calls into the work.
    std::thread::sleep(Duration::from_millis(50));
    let harmed = now();
    workers[victim].signal(signal);
    for (rank, worker) in workers.iter_mut().enumerate() {
        if rank == victim {
            continue;
        }
        let report = worker.expect("error");
        let (when, error) = report.split_once(' ').unwrap();
        assert!(error.starts_with(variant), "rank {rank}: {error}");
        let named = format!("rank: Rank({victim})");
        assert!(error.contains(&named), "rank {rank}: {error}");
        times.add(format_args!("rank {rank}"), harmed, when.parse().unwrap());
    }
    times
}
