//! A child process with its group.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use rustix::process::{kill_process, kill_process_group, waitid};

use super::Ending;

/// How long dropping a killed process waits for the kernel. Processes end within milliseconds of
/// SIGKILL unless a device blocks them; then init reaps them.
const KILLED_LIMIT: Duration = Duration::from_secs(2);

/// Poll interval of that wait.
const KILLED_PAUSE: Duration = Duration::from_millis(2);

/// A child process in a process group of its own. Dropping it kills and reaps it.
///
/// **Why a group of its own.** Ctrl-C at a terminal reaches the whole foreground group. Children in
/// it would die before the parent can end them in order, each with its own error. The parent could
/// not distinguish that from a crash. So only the parent gets Ctrl-C, and ends the others.
///
/// Ctrl-Z likewise stops only the parent: children run until they wait for it. So no deadline
/// expires in mid-exchange while all are stopped. A hangup reaches the parent too; however the
/// parent ends, its children's control channels end with it. The group also includes the child's
/// own children, so that signals reach them as well.
#[derive(Debug)]
pub struct Process {
    child: Child,
    ending: Option<Ending>,
}

impl Process {
    /// Starts `command`.
    ///
    /// The calling thread should outlive the process. On Linux, a child with a parent-death signal
    /// is killed when the *thread* that started it ends.
    ///
    /// # Errors
    /// The system's error, such as a missing program.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let child = command.process_group(0).spawn()?;
        Ok(Self {
            child,
            ending: None,
        })
    }

    /// The process id, which is also the group's.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Takes the parent's end of standard input, if piped.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Takes the parent's end of standard output, if piped.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Takes the parent's end of standard error, if piped.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// Sends a signal to the process group. No effect once it is reaped: the id may be reused then.
    pub fn signal(&self, signal: Signal) {
        // The group id cannot be reused before the process is reaped.
        if self.ending.is_none() && kill_process_group(self.pid(), signal).is_err() {
            let _ = kill_process(self.pid(), signal);
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether it has ended. Does not block or reap.
    pub fn has_ended(&self) -> bool {
        if self.ending.is_some() {
            return true;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error means no such child: SIGCHLD is ignored.
        !matches!(waitid(WaitId::Pid(self.pid()), options), Ok(None))
    }

    /// Whether it is stopped by a signal. Does not block.
    pub fn is_stopped(&self) -> bool {
        if self.ending.is_some() {
            return false;
        }
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        matches!(waitid(WaitId::Pid(self.pid()), options), Ok(Some(status)) if status.stopped())
    }

    /// Kills the process group and reaps the process. Waits at most 2 s for the kernel; a process
    /// blocked in a device is left to init.
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

    /// Waits for the process and returns its exit state. Kills the rest of its group.
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
