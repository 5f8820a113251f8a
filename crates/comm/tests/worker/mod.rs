//! A rank in a process of its own: this test binary again, told by its environment which rank it
//! is. It prints a line `@WORD REST` for each thing that happens to it.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

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

    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([name, &id]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
