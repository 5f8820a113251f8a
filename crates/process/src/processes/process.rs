//! A child process with its group.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use rustix::process::{kill_process, kill_process_group, waitid};

use super::Ending;

/// How long the drop of a killed process waits for the kernel. A process ends within milliseconds
/// of SIGKILL unless a device holds it; then it is left to the process that inherits it.
const KILLED_LIMIT: Duration = Duration::from_secs(2);

/// How often it looks.
const KILLED_PAUSE: Duration = Duration::from_millis(2);

/// A child process in a process group of its own. Dropping it kills and reaps it.
///
/// **Why a group of its own.** Ctrl-C at a terminal goes to the whole foreground group. Children in
/// it would die before the parent can end them in order, each with its own complaint. The parent
/// could not tell that from a crash. So the parent alone gets Ctrl-C, and ends the others.
///
/// Ctrl-Z likewise stops the parent alone: children go on until they wait for it. They never find,
/// on `fg`, that a deadline ran out on all of them while they were stopped in mid-exchange. A
/// hangup reaches the parent too; however the parent ends, its children's control channels end with
/// it. The group also holds whatever the child starts, so that ending reaches it as well.
#[derive(Debug)]
pub struct Process {
    child: Child,
    ending: Option<Ending>,
}

impl Process {
    /// Starts `command`.
    ///
    /// The thread that calls this should outlive the process. On Linux, a child that asked to be
    /// killed with its parent is killed with the *thread* that started it.
    ///
    /// # Errors
    /// What the system says, for instance that there is no such program.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let child = command.process_group(0).spawn()?;
        Ok(Self {
            child,
            ending: None,
        })
    }

    /// Its process id, which is its group's too.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Takes the parent's end of its standard input, if that was piped.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Takes the parent's end of its standard output, if that was piped.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Takes the parent's end of its standard error, if that was piped.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// Sends a signal to the process and to what it started. Nothing happens once it is reaped:
    /// its id may be another's by then.
    pub fn signal(&self, signal: Signal) {
        // The group cannot be another's: it exists at least until the process is reaped.
        if self.ending.is_none() && kill_process_group(self.pid(), signal).is_err() {
            let _ = kill_process(self.pid(), signal);
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether it has ended. Never waits; does not reap.
    pub fn has_ended(&self) -> bool {
        if self.ending.is_some() {
            return true;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error means that there is no such child: somebody ignores SIGCHLD.
        !matches!(waitid(WaitId::Pid(self.pid()), options), Ok(None))
    }

    /// Whether a signal has stopped it, and no other continued it. Never waits.
    pub fn is_stopped(&self) -> bool {
        if self.ending.is_some() {
            return false;
        }
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        matches!(waitid(WaitId::Pid(self.pid()), options), Ok(Some(status)) if status.stopped())
    }

    /// Kills it and what it started, and reaps it. Waits 2 s at most for the kernel; a process that
    /// a device holds longer is left to the process that inherits it.
    pub fn kill(&mut self) {
        if self.ending.is_some() {
            return;
        }
        self.signal(Signal::KILL);
        let mut waited = Duration::ZERO;
        while !self.has_ended() && waited < KILLED_LIMIT {
            thread::sleep(KILLED_PAUSE);
            waited += KILLED_PAUSE;
        }
        if self.has_ended() {
            self.reap();
        }
    }

    /// How it ended, waiting for it if it has not. Kills what it started and left behind.
    pub fn reap(&mut self) -> Ending {
        if let Some(ending) = self.ending {
            return ending;
        }
        if self.has_ended() {
            self.signal(Signal::KILL);
        }
        let ending = self.child.wait().map_or(Ending::Unknown, Ending::from);
        self.ending = Some(ending);
        ending
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
