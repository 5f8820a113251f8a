//! Keeps this machine from going to sleep by itself while workers run on it.
//!
//! The system's own program holds the assertion, for as long as the command runs that it is given.
//! That command is `cat`, whose input this process holds open. So the assertion ends with this
//! process, however that ends.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use tracing::debug;

/// The program of macOS that holds an assertion against idle sleep (IOKit's
/// `PreventUserIdleSystemSleep`) while a command runs.
const MACOS: [&str; 3] = ["/usr/bin/caffeinate", "-i", "/bin/cat"];

/// The same of systemd. Of the inhibitors only that of idle sleep needs no privilege.
const SYSTEMD: [&str; 6] = [
    "systemd-inhibit",
    "--what=idle",
    "--who=paceline",
    "--why=serves a model",
    "--mode=block",
    "cat",
];

/// Exists where systemd runs: see `sd_booted(3)`.
const SYSTEMD_RUNS: &str = "/run/systemd/system";

/// An assertion against idle sleep. Dropping it lets the machine sleep again.
#[derive(Debug)]
pub(super) struct Awake(Option<Child>);

impl Awake {
    /// Holds the assertion, where this system has a program for that. A program that fails is no
    /// reason to serve nothing.
    pub(super) fn hold() -> Self {
        let has_systemd = cfg!(target_os = "linux") && Path::new(SYSTEMD_RUNS).is_dir();
        match () {
            () if cfg!(target_os = "macos") => Self::by(&MACOS),
            () if has_systemd => Self::by(&SYSTEMD),
            () => Self(None),
        }
    }

    fn by(words: &[&str]) -> Self {
        let (program, arguments) = words.split_first().expect("a program");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        if let Err(error) = &child {
            debug!(program, %error, "the machine may go to sleep");
        }
        Self(child.ok())
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        let Some(child) = &mut self.0 else {
            return;
        };
        // Its command reads to the end; the program itself needs not wait for that.
        drop(child.stdin.take());
        let _ = child.kill(); // it may have ended
        let _ = child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_this_process_ends_it() {
        let mut awake = Awake::by(&["sh", "-c", "cat"]);
        let child = awake.0.as_mut().unwrap();
        assert!(child.try_wait().unwrap().is_none(), "it is held");
        drop(child.stdin.take()); // as the system does
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn dropping_it_leaves_no_process() {
        let awake = Awake::by(&["cat"]);
        let id = awake.0.as_ref().unwrap().id();
        drop(awake);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }

    #[test]
    fn a_system_without_the_program_serves_all_the_same() {
        assert!(Awake::by(&["/nonexistent/program"]).0.is_none());
    }
}
