//! The parent's side: starts, watches and ends child processes, which are the ranks of one group.
//!
//! Guarantees when a process dies:
//!
//! - **A child ends, is killed or crashes:** [`Event::Exited`] at once, after its last messages.
//!   Its end of the channel closes; a poll every 50 ms detects it if another process holds that
//!   open.
//! - **A child is stopped or starved:** [`Event::Silent`] after [`WorkerLimits::silence`] without a
//!   byte. Before its first byte, a child that is not found stopped has [`WorkerLimits::start`].
//! - **A child sends an invalid message:** [`Event::Garbled`], the last event of its channel.
//! - **A child does not read:** [`Error::Stuck`] from `send` after [`WorkerLimits::write`].
//! - **A child sends faster than the caller receives:** it waits, and does not count as silent.
//! - **The parent ends, for any reason:** all children end too, by the end of their channel, and on
//!   Linux by a signal.
//! - **The parent is suspended and resumed:** no event. Only the monitor's awake time counts as
//!   silence.
//!
//! After a failure the other children still run. The caller decides about them, usually by
//! [`Workers::stop`].
//!
//! **The terminal.** Children have no terminal among their standard streams: input is the channel,
//! output is `/dev/null`, errors are a pipe. They are not in its foreground group either
//! ([`Process`](paceline_process::Process) says why). They cannot change its state, so
//! there is nothing to restore when they are killed.
//!
//! One thread, the *monitor*, starts all children, reads from them, measures their silence and
//! reaps them. A second one calls the sink for their lines, so that a blocked terminal delays
//! nothing else.

mod clock;
mod monitor;
mod sink;

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::marker::PhantomData;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use paceline_base::{Rank, lock};
use paceline_process::Ending;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::channel::WorkerSocket;
use crate::queue::Queue;
use crate::sandbox::Sandbox;
use crate::wire::{decode, encode};
use crate::{Error, Garbage};
use monitor::Monitor;

/// Longest wait for the monitor to change a child: it waits at most 2 s for the old one to end. A
/// monitor that has ended never answers.
const ORDER_LIMIT: Duration = Duration::from_secs(5);

/// Receives whole lines of standard error, without their newline. May block.
pub type LineSink = Box<dyn FnMut(Rank, &str) + Send>;

/// Specification of the child processes.
pub struct WorkerSpec {
    /// The program, a path or a name to look up.
    pub program: PathBuf,
    /// The arguments of each rank: as many ranks as lists.
    pub args: Vec<Vec<OsString>>,
    /// Variables to set on top of this process's environment, for all ranks.
    pub env: Vec<(OsString, OsString)>,
    /// Whether children get only `env` and nothing of this process's environment.
    pub env_alone: bool,
    pub limits: WorkerLimits,
    /// Sandbox that all children share and none can leave; `None` by default.
    pub sandbox: Option<Sandbox>,
    /// Further folders below which children may write in their sandbox. Only folders that exist
    /// when children start count.
    pub writable: Vec<PathBuf>,
    /// Receives lines of standard error, if given. The last lines are kept for [`Event::Exited`] in
    /// any case.
    pub on_line: Option<LineSink>,
}

impl WorkerSpec {
    /// The program with these arguments for each rank, default limits, and no sink.
    pub fn new(program: impl Into<PathBuf>, args: Vec<Vec<OsString>>) -> Self {
        Self {
            program: program.into(),
            args,
            env: Vec::new(),
            env_alone: false,
            limits: WorkerLimits::default(),
            sandbox: None,
            writable: Vec::new(),
            on_line: None,
        }
    }
}

impl fmt::Debug for WorkerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spec")
            .field("program", &self.program)
            .field("args", &self.args)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Time limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerLimits {
    /// From the start of a process to its first byte. Default 10 s: a system may scan a new
    /// program, on a cold disk.
    pub start: Duration,
    /// Between two bytes of a process. Default 1.5 s, so that a failure is reported within 2 s;
    /// at least several times [`BEAT`](crate::BEAT).
    pub silence: Duration,
    /// For a process to read a message. Default 1.5 s, like silence: its reader does nothing else.
    pub write: Duration,
}

impl Default for WorkerLimits {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(10),
            silence: Duration::from_millis(1500),
            write: Duration::from_millis(1500),
        }
    }
}

/// An event of a child. Prints as a sentence that names its rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<T> {
    Message {
        rank: Rank,
        message: T,
    },
    /// It ended and is reaped. Its last event.
    Exited {
        rank: Rank,
        ending: Ending,
        /// The last lines of its standard error, oldest first.
        tail: Vec<String>,
    },
    /// It was silent for longer than allowed. Repeated only after it sent something in between.
    Silent {
        rank: Rank,
        silence: Duration,
    },
    /// It sent an invalid message. Nothing more is read from it; its only later event is
    /// [`Event::Exited`].
    Garbled {
        rank: Rank,
        /// The received bytes.
        garbage: Garbage,
    },
    /// Its machine is unreachable. Never sent for a child: for workers on several machines.
    Gone {
        rank: Rank,
        /// The machine, and what happened.
        reason: String,
    },
}

impl<T> Event<T> {
    /// The rank that it is about.
    pub const fn rank(&self) -> Rank {
        match self {
            Self::Message { rank, .. }
            | Self::Exited { rank, .. }
            | Self::Silent { rank, .. }
            | Self::Garbled { rank, .. }
            | Self::Gone { rank, .. } => *rank,
        }
    }
}

impl<T> fmt::Display for Event<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message { rank, .. } => write!(f, "{rank} sent a message"),
            Self::Exited { rank, ending, tail } => {
                write!(f, "{rank} {ending}")?;
                match last_words(tail) {
                    Some(line) => write!(f, ", its last line: {line}"),
                    None => Ok(()),
                }
            }
            Self::Silent { rank, silence } => {
                write!(
                    f,
                    "{rank} has been silent for {:.1} s",
                    silence.as_secs_f64()
                )
            }
            Self::Garbled { rank, garbage } => write!(f, "from {rank}: {garbage}"),
            Self::Gone { rank, reason } => write!(f, "{rank} on {reason}"),
        }
    }
}

/// The line of a child's `tail` that best explains its end. A failed memory allocation has
/// priority: after it Rust's runtime prints a backtrace or a note about one. Else it is the last
/// line.
pub fn last_words(tail: &[String]) -> Option<&str> {
    let memory = |line: &&String| line.contains("memory allocation of");
    let line = tail.iter().find(memory).or_else(|| tail.last());
    line.map(String::as_str)
}

/// Running children, one per rank: `To` goes to them, `From` comes from them.
///
/// All methods may be called from any thread. Dropping it kills and reaps what still runs.
pub struct Workers<To, From> {
    count: u32,
    queue: Arc<Queue<Report>>,
    shared: Arc<WorkersShared>,
    limits: WorkerLimits,
    types: PhantomData<fn(To) -> From>,
}

impl<To: Serialize, From: DeserializeOwned> Workers<To, From> {
    /// Starts all children. Returns when all programs run, not when they are ready.
    ///
    /// # Errors
    /// [`Error::Start`], [`Error::Resource`]. Children that were started before are killed and
    /// reaped.
    pub fn spawn(spec: WorkerSpec) -> Result<Self, Error> {
        let resource = |what| move |source| Error::Resource { what, source };
        let limits = spec.limits;
        let queue = Arc::new(Queue::new(spec.args.len()));
        let (wake, waker) = UnixStream::pair().map_err(resource("a socket pair"))?;
        let both = wake
            .set_nonblocking(true)
            .and_then(|()| waker.set_nonblocking(true));
        both.map_err(resource("a socket pair"))?;
        let shared = Arc::new(WorkersShared {
            waker,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let (started, start) = sync_channel(1);
        let (reports, orders) = (Arc::clone(&queue), Arc::clone(&shared));
        // The thread that starts children must live as long as they do: see `Process::start`.
        let run = move || {
            // Dropped last: a panic of the monitor kills and reaps all children first.
            let _over = MonitorEnd(Arc::clone(&orders));
            match Monitor::start(spec, reports, orders, wake) {
                Ok(mut monitor) => {
                    let _ = started.send(Ok(monitor.children()));
                    monitor.run();
                }
                Err(error) => drop(started.send(Err(error))),
            }
        };
        let monitor = Builder::new().name("workers".to_owned()).spawn(run);
        monitor.map_err(resource("a thread"))?;
        let children = start.recv().expect("the monitor sends before it ends")?;
        let count = u32::try_from(children.len()).unwrap_or(u32::MAX);
        lock(&shared.state).children = children;
        Ok(Self {
            count,
            queue,
            shared,
            limits,
            types: PhantomData,
        })
    }

    /// Sends a message. Waits at most [`WorkerLimits::write`] for the child to read it.
    ///
    /// # Errors
    /// [`Error::Stuck`] and [`Error::Closed`]: the child is lost. After `Closed` an event with its
    /// end and reason follows within seconds, so a caller should wait for that. [`Error::TooLong`],
    /// [`Error::Unencodable`], [`Error::NoSuchRank`]: nothing was sent.
    pub fn send(&self, rank: Rank, message: &To) -> Result<(), Error> {
        let channel = lock(&self.shared.state)
            .children
            .get(rank.0 as usize)
            .map(|(channel, _)| Arc::clone(channel));
        let size = self.count;
        let channel = channel.ok_or(Error::NoSuchRank { rank, size })?;
        channel.write_line(&encode(message)?, self.limits.write)
    }

    /// The next event, or `None` when there is none within `timeout` or [`wake`](Self::wake) was
    /// called. Events of one rank are in order; after the last rank's [`Event::Exited`] there are
    /// none.
    pub fn recv(&self, timeout: Duration) -> Option<Event<From>> {
        loop {
            let (report, room) = self.queue.pop(timeout)?;
            if room {
                self.shared.wake();
            }
            return Some(match report {
                Report::Line { rank, line } => {
                    if self.queue.is_muted(rank.0 as usize) {
                        continue; // read before its rank was garbled
                    }
                    match decode(&line) {
                        Ok(message) => Event::Message { rank, message },
                        Err(garbage) => {
                            self.queue.mute(rank.0 as usize);
                            Event::Garbled { rank, garbage }
                        }
                    }
                }
                Report::Garbled { rank, garbage } => Event::Garbled { rank, garbage },
                Report::Silent { rank, silence } => Event::Silent { rank, silence },
                Report::Exited { rank, ending, tail } => Event::Exited { rank, ending, tail },
            });
        }
    }
}

impl<To, From> Workers<To, From> {
    /// Number of ranks.
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Process ids by rank, for reports; the id of an exited child may be reused.
    pub fn ids(&self) -> Vec<u32> {
        let state = lock(&self.shared.state);
        state.children.iter().map(|(_, id)| *id).collect()
    }

    /// Kills a rank's child and starts another one in its place. After it returns, every event of
    /// the rank is the new child's; unread events of the old one are dropped. Blocks until the old
    /// child is reaped, at most 2 s.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Start`] and [`Error::Resource`]: the rank has no child then;
    /// [`Error::Closed`] after [`stop`](Self::stop).
    pub fn replace(&self, rank: Rank) -> Result<(), Error> {
        self.order(rank, ChildChange::Replace)
    }

    /// Kills a rank's child, without an event; drops unread events. Blocks until it is reaped, at
    /// most 2 s. Does nothing for an unknown rank.
    pub fn kill(&self, rank: Rank) {
        let _ = self.order(rank, ChildChange::Kill); // an error means that it is gone
    }

    /// Makes the monitor change a rank's child, and waits for it and for earlier changes.
    fn order(&self, rank: Rank, change: ChildChange) -> Result<(), Error> {
        let size = self.count;
        if rank.0 >= size {
            return Err(Error::NoSuchRank { rank, size });
        }
        let shared = &self.shared;
        let mut state = shared.wait(lock(&shared.state), |state| state.is_changing);
        if state.stop.is_some() {
            return Err(Error::Closed { rank });
        }
        let (answer, done) = sync_channel(1);
        state.is_changing = true;
        state.change = Some(ChangeOrder {
            rank,
            change,
            answer,
        });
        drop(state);
        shared.wake();
        let done = done.recv_timeout(ORDER_LIMIT);
        let mut state = lock(&shared.state);
        state.is_changing = false;
        shared.changed.notify_all();
        if let Some(child) = done.map_err(|_| Error::Closed { rank })?? {
            state.children[rank.0 as usize] = child;
        }
        Ok(())
    }

    /// Makes a waiting [`recv`](Self::recv), or the next one, return without an event.
    pub fn wake(&self) {
        self.queue.wake();
    }

    /// Ends all children and reaps them.
    ///
    /// First it closes their channels, after which a child with a [`Control`](crate::Control) exits
    /// at once. SIGTERM follows after half of `grace`, and SIGKILL after `grace`. Silent children
    /// get SIGKILL at once.
    ///
    /// Returns when none is left, after `grace` and the few milliseconds that the kernel takes. It
    /// abandons a process that the kernel cannot end after 5 s. Unread events stay, exits are
    /// added. A second call waits for the first.
    pub fn stop(&self, grace: Duration) {
        let shared = &self.shared;
        lock(&shared.state).stop.get_or_insert(grace);
        shared.wake();
        drop(shared.wait(lock(&shared.state), |state| !state.is_over));
    }
}

impl<To, From> Drop for Workers<To, From> {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

impl<To, From> fmt::Debug for Workers<To, From> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers")
            .field("ids", &self.ids())
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Report {
    Line {
        rank: Rank,
        line: Vec<u8>,
    },
    Exited {
        rank: Rank,
        ending: Ending,
        tail: Vec<String>,
    },
    Silent {
        rank: Rank,
        silence: Duration,
    },
    Garbled {
        rank: Rank,
        garbage: Garbage,
    },
}

/// A child's channel and process id.
type Child = (Arc<WorkerSocket>, u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChildChange {
    Kill,
    Replace,
}

/// A change of one rank's child, and the channel on which the caller waits.
#[derive(Debug)]
struct ChangeOrder {
    rank: Rank,
    change: ChildChange,
    answer: SyncSender<Result<Option<Child>, Error>>,
}

/// State that callers share with the monitor.
#[derive(Debug)]
struct WorkersShared {
    waker: UnixStream,
    state: Mutex<WorkersState>,
    /// Signals the end of a change, and of the monitor.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WorkersState {
    /// Channel and process id of each rank's current child.
    children: Vec<Child>,
    /// The grace period, once all must end.
    stop: Option<Duration>,
    /// The order that the monitor has not taken yet.
    change: Option<ChangeOrder>,
    /// A caller waits for its change: further ones wait for it.
    is_changing: bool,
    /// The monitor has ended, and no child is left.
    is_over: bool,
}

impl WorkersShared {
    fn wake(&self) {
        // A full socket wakes the monitor anyway.
        let _ = (&self.waker).write(&[0]);
    }

    fn stop(&self) -> Option<Duration> {
        lock(&self.state).stop
    }

    /// Waits while `is_early`. Changes and the monitor's end have limits of their own.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, WorkersState>,
        is_early: fn(&WorkersState) -> bool,
    ) -> MutexGuard<'a, WorkersState> {
        let waited = self.changed.wait_while(state, |state| is_early(state));
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reports the end of the monitor's thread when it is dropped.
struct MonitorEnd(Arc<WorkersShared>);

impl Drop for MonitorEnd {
    fn drop(&mut self) {
        lock(&self.0.state).is_over = true;
        self.0.changed.notify_all();
    }
}
