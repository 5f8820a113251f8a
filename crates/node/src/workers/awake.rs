//! Keeps this machine from going to sleep by itself while workers run on it.
//!
//! The system's own program holds the assertion, for as long as the command runs that it is given.
//! That command is `cat`, whose input this process holds open. So the assertion ends with this
//! process, however that ends.

use std::path::Path;
use std::process::{Command, Stdio};

use paceline_process::Process;
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
pub(super) struct Awake {
    _holder: Option<Process>,
}

impl Awake {
    /// Holds the assertion, where this system has a program for that. A program that fails is no
    /// reason to serve nothing.
    pub(super) fn hold() -> Self {
        let has_systemd = cfg!(target_os = "linux") && Path::new(SYSTEMD_RUNS).is_dir();
        match () {
            () if cfg!(target_os = "macos") => Self::by(&MACOS),
            () if has_systemd => Self::by(&SYSTEMD),
            () => Self { _holder: None },
        }
    }

    fn by(words: &[&str]) -> Self {
        let (program, arguments) = words.split_first().expect("a program");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped());
        let holder = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
        if let Err(error) = &holder {
            debug!(program, %error, "the machine may go to sleep");
        }
        Self {
            _holder: holder.ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use paceline_process::Ending;

    use super::*;

    #[test]
    fn the_end_of_this_process_ends_it() {
        let mut awake = Awake::by(&["sh", "-c", "cat"]);
        let holder = awake._holder.as_mut().unwrap();
        drop(holder.take_stdin()); // as the system does
        assert_eq!(holder.reap(), Ending::Code(0));
    }

    #[test]
    fn dropping_it_leaves_no_process() {
        let awake = Awake::by(&["cat"]);
        let id = awake._holder.as_ref().unwrap().id();
        drop(awake);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }

    #[test]
    fn a_system_without_the_program_serves_all_the_same() {
        assert!(Awake::by(&["/nonexistent/program"])._holder.is_none());
    }
}
