//! Sandbox for chat templates, which are untrusted programs: a child process with limits.
//!
//! ```text
//!  ChatTemplate ── Interpreter ──▶ Apart ── Load, Render ──▶ child: child::run, limits::Limits
//!                                    ▲                          │
//!                                    └── text, Failure ─────────┘
//! ```
//!
//! A template is a program that comes with a model. Its interpreter counts steps, output, and the
//! bytes that filters read. But `x.replace(y, z)`, `x == y` or a deep value take memory, time or
//! stack within one step. So the template runs in its own process. It has 192 MiB of memory on top
//! of the program itself, and 0.9 to 1.9 s of CPU time per rendering. It has no core dumps, no
//! environment, and no right to open a file or a socket (`paceline_cluster::sandbox`).
//!
//! The process starts when the model is opened, and stays. If a template breaks it, the
//! conversation gets a [`Failure`] with the reason, and the next conversation gets a new process.
//!
//! Overhead of a rendering: the conversation as JSON in both directions and two thread switches,
//! 0.1 ms for 2 KB (docs/measurements.md).

mod child;
mod limits;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::Error::{TooLong, Unencodable};
use paceline_cluster::workers::{Event, WorkerLimits, WorkerSpec, Workers};
use paceline_process::{Ending, Signal};
use paceline_text::chat::{Interpreter, RenderInput, TemplateError};
use serde::{Deserialize, Serialize};

pub use child::run;

/// Longest wait for a rendering. The child ends after 1.9 s of CPU time; a busy machine gives it
/// less than a core.
const DEADLINE: Duration = Duration::from_secs(6);

/// Longest wait for other renderings of the same template.
const WAIT: Duration = Duration::from_secs(10);

/// Longest wait for the exit of a child that has closed its channel.
const END_LIMIT: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, Deserialize)]
enum ChildRequest {
    /// Compile this template; the answer is empty.
    Load(String),
    Render(RenderInput),
}

/// The child's response: the rendered text, empty after [`ChildRequest::Load`].
type ChildResponse = Result<String, TemplateError>;

/// The program that runs [`child::run`].
#[derive(Clone, Debug)]
pub struct ChildProgram {
    pub path: PathBuf,
    pub args: Vec<OsString>,
    /// Its complete environment: nothing of this process's is inherited.
    pub env: Vec<(OsString, OsString)>,
}

/// A template in a child process.
#[derive(derive_more::Debug)]
#[debug("Apart {{ program: {:?}, .. }}", self.program)]
pub struct SandboxedTemplate {
    program: ChildProgram,
    source: String,
    seat: ChildQueue,
}

impl SandboxedTemplate {
    /// Starts a child that compiles `source`.
    ///
    /// # Errors
    /// [`Failure::Ended`] if no child can be started, or it ends early; another [`Failure`] if the
    /// template does not compile within the limits.
    pub fn start(program: ChildProgram, source: &str) -> Result<Self, TemplateError> {
        let child = Child::start(&program, source)?;
        let room = ChildQueueState {
            child: Some(child),
            ..ChildQueueState::default()
        };
        Ok(Self {
            program,
            source: source.to_owned(),
            seat: ChildQueue {
                room: Mutex::new(room),
                changed: Condvar::new(),
            },
        })
    }

    /// Process id of the idle child, for reports.
    pub fn id(&self) -> Option<u32> {
        let room = lock(&self.seat.room);
        room.child.as_ref()?.workers.ids().first().copied()
    }
}

impl Interpreter for SandboxedTemplate {
    fn render(&self, job: RenderInput) -> Result<String, TemplateError> {
        let mut turn = self.seat.take(WAIT).ok_or(TemplateError::Busy)?;
        let ask = ChildRequest::Render(job);
        let answer = self.ask(&mut turn, &ask);
        if answer == Err(killed()) {
            return self.ask(&mut turn, &ask);
        }
        answer
    }
}

impl SandboxedTemplate {
    fn ask(&self, turn: &mut RenderTurn<'_>, ask: &ChildRequest) -> ChildResponse {
        let child = match turn.child.take().filter(Child::lives) {
            Some(child) => child,
            None => Child::start(&self.program, &self.source)?,
        };
        // A broken child is killed and reaped here, before another one can start.
        let answer = child.ask(ask)?;
        turn.child = Some(child);
        answer
    }
}

/// A queue for the child: one rendering at a time, in order of arrival.
struct ChildQueue {
    room: Mutex<ChildQueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct ChildQueueState {
    child: Option<Child>,
    is_taken: bool,
    /// Tickets of waiting renderings; bounded by the rendering threads.
    queue: VecDeque<u64>,
    tickets: u64,
}

/// Exclusive use of the child. Dropping it passes the child to the next in the queue.
struct RenderTurn<'a> {
    seat: &'a ChildQueue,
    child: Option<Child>,
}

impl Drop for RenderTurn<'_> {
    fn drop(&mut self) {
        let mut room = lock(&self.seat.room);
        room.child = self.child.take();
        room.is_taken = false;
        self.seat.changed.notify_all();
    }
}

impl ChildQueue {
    /// Waits for a turn; `None` after `limit`.
    fn take(&self, limit: Duration) -> Option<RenderTurn<'_>> {
        let mut room = lock(&self.room);
        let ticket = room.tickets;
        room.tickets += 1;
        room.queue.push_back(ticket);
        let is_later =
            |room: &mut ChildQueueState| room.is_taken || room.queue.front() != Some(&ticket);
        let waited = self.changed.wait_timeout_while(room, limit, is_later);
        let (mut room, result) = waited.unwrap_or_else(PoisonError::into_inner);
        room.queue.retain(|other| *other != ticket);
        self.changed.notify_all();
        if result.timed_out() {
            return None;
        }
        room.is_taken = true;
        let child = room.child.take();
        Some(RenderTurn { seat: self, child })
    }
}

/// A process that has compiled the template.
struct Child {
    workers: Workers<ChildRequest, ChildResponse>,
}

impl Child {
    fn start(program: &ChildProgram, source: &str) -> Result<Self, TemplateError> {
        let spec = WorkerSpec {
            env: program.env.clone(),
            env_alone: true,
            limits: WorkerLimits {
                start: DEADLINE,
                // Not used: a rendering has a deadline.
                silence: Duration::from_secs(3600),
                write: DEADLINE,
            },
            ..WorkerSpec::new(&program.path, vec![program.args.clone()])
        };
        let workers = Workers::spawn(spec).map_err(|error| TemplateError::Ended {
            reason: format!("cannot be started: {error}"),
        })?;
        let child = Self { workers };
        child.ask(&ChildRequest::Load(source.to_owned()))??;
        Ok(child)
    }

    /// Whether it still waits for a job.
    fn lives(&self) -> bool {
        matches!(
            self.workers.recv(Duration::ZERO),
            None | Some(Event::Silent { .. })
        )
    }

    /// The failure of a child that accepts no message; `reason` if its end is already known.
    fn ended(&self, reason: &str) -> TemplateError {
        match self.workers.recv(END_LIMIT) {
            Some(Event::Exited { ending, tail, .. }) => cause(ending, &tail),
            _ => TemplateError::Ended {
                reason: format!("is gone: {reason}"),
            },
        }
    }

    fn ask(&self, ask: &ChildRequest) -> Result<ChildResponse, TemplateError> {
        let start = Instant::now();
        match self.workers.send(Rank(0), ask) {
            Err(error @ (TooLong { .. } | Unencodable { .. })) => {
                let reason = format!("takes no such conversation: {error}");
                return Ok(Err(TemplateError::Ended { reason }));
            }
            Err(error) => return Err(self.ended(&error.to_string())),
            Ok(()) => {}
        }
        loop {
            let left = DEADLINE.saturating_sub(start.elapsed());
            match self.workers.recv(left) {
                Some(Event::Message { message, .. }) => return Ok(message),
                Some(Event::Silent { .. }) => {}
                Some(Event::Exited { ending, tail, .. }) => return Err(cause(ending, &tail)),
                Some(other) => {
                    let reason = other.to_string();
                    return Err(TemplateError::Ended { reason });
                }
                None if left.is_zero() => return Err(slow(DEADLINE)),
                None => {}
            }
        }
    }
}

fn slow(limit: Duration) -> TemplateError {
    let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    TemplateError::TooSlow { limit_ms }
}

/// The failure of a child killed from outside: by a person, or by the kernel when memory is short.
/// No template can cause it, since the limits end a child by other signals.
fn killed() -> TemplateError {
    cause(Ending::Signal(Signal::KILL.as_raw()), &[])
}

/// The limit that ended the child, from the messages of the kernel or of Rust's runtime.
fn cause(ending: Ending, tail: &[String]) -> TemplateError {
    let says = |words: &str| tail.iter().any(|line| line.contains(words));
    if ending == Ending::Signal(Signal::XCPU.as_raw()) {
        return slow(limits::COMPUTING);
    }
    if says("memory allocation of") || says("out of memory") {
        let limit = limits::MEMORY_BYTES;
        return TemplateError::TooLarge { limit };
    }
    if says("has overflowed its stack") {
        let reason = "overflowed its stack".to_owned();
        return TemplateError::Ended { reason };
    }
    // Rust's runtime prints a hint about backtraces after a panic.
    let is_note = |line: &&String| line.starts_with("note: ");
    let reason = match tail.iter().rev().find(|line| !is_note(line)) {
        Some(line) => format!("{ending}: {line}"),
        None => ending.to_string(),
    };
    TemplateError::Ended { reason }
}

#[cfg(test)]
mod tests;
