//! Exit states of processes.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use paceline_base::Rank;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

/// Exit state of a process. Prints as the rest of a sentence: `was ended by SIGKILL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Ending {
    /// It exited with this code, 0 to 255.
    Code(i32),
    /// The signal of this number ended it.
    Signal(i32),
    /// Not available, because this process ignores SIGCHLD.
    Unknown,
}

impl Ending {
    /// Whether it exited with code 0.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// The exit code to pass on: 128 + the signal's number, as shells do; 1 if unknown.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(number) => 128 + number,
            Self::Unknown => 1,
        }
    }
}

impl From<ExitStatus> for Ending {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(number)) => Self::Signal(number),
            (None, None) => Self::Unknown,
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(number) => match signal_name(*number) {
                Some(name) => write!(f, "was ended by {name}"),
                None => write!(f, "was ended by signal {number}"),
            },
            Self::Unknown => write!(f, "ended, the system does not say how"),
        }
    }
}

/// Name of a fatal signal; numbers differ between systems.
fn signal_name(number: i32) -> Option<&'static str> {
    let names = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::QUIT, "SIGQUIT"),
        (Signal::ILL, "SIGILL"),
        (Signal::TRAP, "SIGTRAP"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL"),
        (Signal::USR1, "SIGUSR1"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::USR2, "SIGUSR2"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::TERM, "SIGTERM"),
        (Signal::XCPU, "SIGXCPU"),
        (Signal::XFSZ, "SIGXFSZ"),
        (Signal::VTALARM, "SIGVTALRM"),
        (Signal::PROF, "SIGPROF"),
        (Signal::SYS, "SIGSYS"),
    ];
    let found = names.iter().find(|(signal, _)| signal.as_raw() == number);
    found.map(|(_, name)| *name)
}

/// The exit states of a set of processes, in order.
///
/// The first failure is the cause for the whole set: the others fail because of it, or are
/// terminated.
#[derive(Clone, Debug, Default)]
pub struct ExitLog {
    ended: Vec<(Rank, Ending)>,
}

impl ExitLog {
    pub fn note(&mut self, rank: Rank, ending: Ending) {
        self.ended.push((rank, ending));
    }

    /// Number of ended processes.
    pub fn count(&self) -> usize {
        self.ended.len()
    }

    /// The first process that did not exit with code 0.
    pub fn first_failure(&self) -> Option<(Rank, Ending)> {
        self.ended.iter().copied().find(|(_, e)| !e.is_success())
    }

    /// The exit code for the whole set: that of the first failure, or 0.
    pub fn exit_code(&self) -> i32 {
        self.first_failure().map_or(0, |(_, e)| e.exit_code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_have_words_and_codes() {
        for (ending, text, code) in [
            (Ending::Code(0), "exited with code 0", 0),
            (Ending::Code(255), "exited with code 255", 255),
            (Ending::Signal(9), "was ended by SIGKILL", 137),
            (Ending::Signal(11), "was ended by SIGSEGV", 139),
            (Ending::Signal(61), "was ended by signal 61", 189),
            (Ending::Unknown, "ended, the system does not say how", 1),
        ] {
            assert_eq!(ending.to_string(), text);
            assert_eq!(ending.exit_code(), code);
            assert_eq!(ending.is_success(), code == 0);
        }
        assert_eq!(Ending::from(ExitStatus::from_raw(3 << 8)), Ending::Code(3));
        assert_eq!(Ending::from(ExitStatus::from_raw(6)), Ending::Signal(6));
    }

    #[test]
    fn the_first_failure_counts() {
        let mut endings = ExitLog::default();
        assert_eq!((endings.first_failure(), endings.exit_code()), (None, 0));
        endings.note(Rank(2), Ending::Code(0));
        assert_eq!((endings.first_failure(), endings.exit_code()), (None, 0));
        endings.note(Rank(1), Ending::Signal(9));
        endings.note(Rank(0), Ending::Code(7));
        assert_eq!(endings.first_failure(), Some((Rank(1), Ending::Signal(9))));
        assert_eq!((endings.count(), endings.exit_code()), (3, 137));
    }
}
