//! The child's end of its control channel.
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use paceline_base::lock;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Signal, getpid, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::bridge;
use crate::channel::wait_for;
use crate::queue::Queue;
use crate::wire::{Assembler, BEAT, BEAT_LINE, decode, encode};
use crate::{Error, Garbage};

/// Exit code of a child whose parent closed the control channel or is gone.
///
/// The first code that the command line (0, 1, 2) does not use. Only a parent that closed the
/// channel on purpose can see it.
pub const EXIT_CODE_PARENT_GONE: i32 = 3;

/// Longest time of the hook of [`Control::on_end`] before the process is killed: an orphan must end
/// within one second.
const HOOK_LIMIT: Duration = Duration::from_millis(500);

/// Interval at which a reader with a full queue checks for room, and for the parent's end.
const FULL_PAUSE: Duration = Duration::from_millis(20);

/// Bytes per read: a quarter of what a Unix socket holds by default.
const READ_BYTES: usize = 64 << 10;

type Hook = Box<dyn FnOnce() + Send>;

/// The control channel of this process. `In` comes from the parent, `Out` goes to it.
///
/// Once it is taken, the process lives as long as its parent. A thread waits for the end of the
/// channel and exits with [`EXIT_CODE_PARENT_GONE`], even while other threads compute and after
/// this value is dropped. On Linux the kernel also kills the process when the parent dies, even a
/// stopped one. Elsewhere a stopped orphan ends when it is continued.
///
/// Another thread sends a heartbeat every [`BEAT`]. It shows that the process is scheduled and not
/// stopped, *not* that its computation makes progress: the computation has its own deadlines.
#[derive(derive_more::Debug)]
#[debug("Control(..)")]
pub struct Control<In, Out> {
    shared: Arc<ControlState>,
    types: PhantomData<fn(Out) -> In>,
}

struct ControlState {
    /// Used by the reader thread only.
    reading: UnixStream,
    /// Locked for one line at a time.
    writing: Mutex<UnixStream>,
    inbox: Queue<Result<Vec<u8>, Garbage>>,
    exit: OrphanExit,
}

/// Ends this process once its parent is gone, after its hook.
#[derive(Default)]
struct OrphanExit {
    /// Locked from the start of the hook to the exit, so that a second thread waits for the first.
    hook: Mutex<Option<Hook>>,
}

impl<In: DeserializeOwned, Out: Serialize> Control<In, Out> {
    /// Takes standard input as the control channel, and starts its two threads. Later reads of
    /// standard input find it empty; programs started later do not inherit the channel.
    ///
    /// # Errors
    /// [`Error::NoControl`] if standard input is no socket, as when a person runs the program; also
    /// for a second call. [`Error::Resource`] if a thread cannot be started.
    pub fn from_stdin() -> Result<Self, Error> {
        let socket = take_stdin().map_err(|source| Error::NoControl { source })?;
        Self::over(socket).map_err(|source| Error::Resource {
            what: "the threads of the control channel",
            source,
        })
    }

    /// Takes standard input and output as the control channel, for a worker started through
    /// [`bridge`](crate::bridge). Prints `greeting` as a line first. Later output is discarded.
    ///
    /// # Errors
    /// [`Error::NoControl`] if the greeting cannot be written; [`Error::Resource`].
    pub fn from_stdio(greeting: &str) -> Result<Self, Error> {
        let streams = take_stdio(greeting).map_err(|source| Error::NoControl { source })?;
        let resource = |source| Error::Resource {
            what: "the threads of the control channel",
            source,
        };
        let socket = bridge::over(streams.0, streams.1).map_err(resource)?;
        Self::over(socket).map_err(resource)
    }

    fn over(socket: UnixStream) -> std::io::Result<Self> {
        let shared = Arc::new(ControlState {
            reading: socket.try_clone()?,
            writing: Mutex::new(socket),
            inbox: Queue::new(1),
            exit: OrphanExit::default(),
        });
        let start = |name: &str, run: fn(&ControlState)| {
            let shared = Arc::clone(&shared);
            let builder = thread::Builder::new().name(name.to_owned());
            builder.spawn(move || run(&shared))
        };
        start("control", ControlState::read)?;
        start("beat", ControlState::beat)?;
        Ok(Self {
            shared,
            types: PhantomData,
        })
    }

    /// Runs `hook` before the process exits because the parent closed the channel.
    ///
    /// The hook has half a second. It does not run when a signal ends the process, as a parent's
    /// death does on Linux, so correctness must not depend on it. Replaces an earlier hook.
    pub fn on_end(&self, hook: impl FnOnce() + Send + 'static) {
        *lock(&self.shared.exit.hook) = Some(Box::new(hook));
    }

    /// Sends a message. Blocks while the parent does not read, as when it is suspended; exits the
    /// process if the parent is gone.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Unencodable`]: nothing was sent.
    pub fn send(&self, message: &Out) -> Result<(), Error> {
        let line = encode(message)?;
        self.shared.write(&line);
        Ok(())
    }

    /// The next message, or `None` when none comes within `timeout`.
    ///
    /// # Errors
    /// [`Error::Garbled`] if the parent sent something else, once for each such line.
    pub fn recv(&self, timeout: Duration) -> Result<Option<In>, Error> {
        match self.shared.inbox.pop(timeout) {
            Some((line, _)) => Ok(Some(decode(&line?)?)),
            None => Ok(None),
        }
    }
}

impl ControlState {
    /// The reader thread: ends with the process.
    fn read(&self) {
        end_with_parent();
        let mut buffer = vec![0; READ_BYTES];
        let mut lines = Assembler::new();
        loop {
            while self.inbox.is_full(0) {
                self.end_if_hung_up();
            }
            match (&self.reading).read(&mut buffer) {
                Ok(0) => self.end(),
                Ok(count) => {
                    let push = |line: Vec<u8>| self.inbox.push(0, line.len(), Ok(line));
                    if let Err(garbage) = lines.feed(&buffer[..count], push) {
                        self.inbox.push_verdict(0, Err(garbage));
                        // Line boundaries are lost: it only waits for the end.
                        self.inbox.mute(0);
                        lines = Assembler::new();
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.end(),
            }
        }
    }

    /// Waits a little, and ends the process when the parent has closed its side meanwhile.
    fn end_if_hung_up(&self) {
        // A hang-up is always reported; Linux reports a half-close only on request.
        #[cfg(target_os = "linux")]
        let asked = PollFlags::RDHUP;
        #[cfg(not(target_os = "linux"))]
        let asked = PollFlags::empty();
        let mut fds = [PollFd::new(&self.reading, asked)];
        wait_for(&mut fds, Some(FULL_PAUSE));
        if !fds[0].revents().is_empty() {
            self.end();
        }
    }

    fn beat(&self) {
        loop {
            self.write(BEAT_LINE);
            thread::sleep(BEAT);
        }
    }

    fn write(&self, line: &[u8]) {
        if lock(&self.writing).write_all(line).is_err() {
            self.end();
        }
    }

    fn end(&self) -> ! {
        self.exit.run()
    }
}

impl OrphanExit {
    fn run(&self) -> ! {
        let mut hook = lock(&self.hook);
        let _ = thread::Builder::new().spawn(|| {
            thread::sleep(HOOK_LIMIT);
            let _ = kill_process(getpid(), Signal::KILL);
        });
        if let Some(hook) = hook.take() {
            let _ = catch_unwind(AssertUnwindSafe(hook));
        }
        std::process::exit(EXIT_CODE_PARENT_GONE)
    }
}

/// The socket at standard input, which becomes `/dev/null`.
pub(crate) fn take_stdin() -> std::io::Result<UnixStream> {
    let socket = UnixStream::from(rustix::stdio::stdin().try_clone_to_owned()?);
    socket.peer_addr()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?.as_fd())?;
    Ok(socket)
}

/// Standard input and output, which become `/dev/null`; the greeting is printed.
fn take_stdio(greeting: &str) -> std::io::Result<(File, File)> {
    let input = File::from(rustix::stdio::stdin().try_clone_to_owned()?);
    let mut output = File::from(rustix::stdio::stdout().try_clone_to_owned()?);
    output.write_all(format!("{greeting}\n").as_bytes())?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?.as_fd())?;
    let nowhere = File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(nowhere.as_fd())?;
    Ok((input, output))
}

/// Makes the kernel kill this process when the parent dies, even if it is stopped by then.
///
/// An earlier death is not missed: the channel has ended, which is detected next. The setting
/// belongs to the calling thread, so a long-lived thread makes it.
fn end_with_parent() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
}
