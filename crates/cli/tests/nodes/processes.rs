//! A paceline that runs, with its workers, and what is left of them.

use std::io::Read;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::testing::Stopwatch;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use super::{ENDED, text, until};

/// A command under way, its output gathered as it comes.
pub(crate) struct RunningCommand {
    pub(crate) child: Child,
    stdout: GatheredOutput,
    stderr: GatheredOutput,
}

/// The bytes that came over a pipe, and the thread that reads it.
struct GatheredOutput {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl GatheredOutput {
    fn start(mut pipe: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let own = Arc::clone(&bytes);
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                own.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        let reader = Some(reader);
        Self { bytes, reader }
    }

    fn so_far(&self) -> String {
        text(&self.bytes.lock().unwrap())
    }

    fn all(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        self.so_far()
    }
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl RunningCommand {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let stdout = GatheredOutput::start(child.stdout.take().unwrap());
        let stderr = GatheredOutput::start(child.stderr.take().unwrap());
        Self {
            child,
            stdout,
            stderr,
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, to: Signal) {
        kill_process(Pid::from_child(&self.child), to).unwrap();
    }

    pub(crate) fn said(&self) -> String {
        self.stderr.so_far()
    }

    pub(crate) fn answered(&self) -> String {
        self.stdout.so_far()
    }

    /// Waits until it has this many workers; their ids in rank order.
    pub(crate) fn workers(&self, count: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        until("all workers run", || {
            ids = children(self.id());
            ids.len() == count
        });
        ids
    }

    /// Waits until it has printed this many bytes of an answer.
    pub(crate) fn wait_for_answer(&mut self, bytes: usize) {
        until("an answer", || {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.stderr.so_far());
            self.stdout.so_far().len() >= bytes
        });
    }

    /// Waits for the end; how long that took.
    pub(crate) fn wait(&mut self) -> Duration {
        let watch = Stopwatch::start();
        until("the command ends", || {
            self.child.try_wait().unwrap().is_some()
        });
        watch.elapsed()
    }

    /// Waits for the end, and for all that was printed.
    pub(crate) fn end(mut self) -> CommandOutput {
        self.wait();
        CommandOutput {
            status: self.child.wait().unwrap(),
            stdout: self.stdout.all(),
            stderr: self.stderr.all(),
        }
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // A test that failed leaves nothing behind; its workers end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(worker: u32, signal: Signal) {
    let pid = Pid::from_raw(worker.try_into().unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Sends `signal` to a worker that may be gone.
pub(crate) fn signal_if_there(worker: u32, signal: Signal) {
    let pid = Pid::from_raw(worker.try_into().unwrap()).unwrap();
    let sent = kill_process(pid, signal);
    assert!(matches!(sent, Ok(()) | Err(Errno::SRCH)), "{sent:?}");
}

/// Parent and state of a process, while it is known to the system.
fn stat(id: u32) -> Option<(u32, String)> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name before may have blanks and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.to_owned();
    Some((fields.next()?.parse().ok()?, state))
}

/// Children of a process, oldest first, but for the interpreter of a chat template. Ids begin anew
/// after the highest one: an id below the parent's is younger than all above it.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let is_template = |id: &u32| command_line(*id).ends_with(b"\0template\0");
    let mut ids = all_children(parent);
    ids.retain(|id| !is_template(id));
    ids
}

/// The interpreters of chat templates that a process has started.
pub(crate) fn templates(parent: u32) -> Vec<u32> {
    let workers = children(parent);
    let mut ids = all_children(parent);
    ids.retain(|id| !workers.contains(id));
    ids
}

fn command_line(id: u32) -> Vec<u8> {
    std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default()
}

/// All children of a process, oldest first.
pub(crate) fn all_children(parent: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut ids: Vec<u32> = ids
        .filter(|id| stat(*id).is_some_and(|(of, _)| of == parent))
        .collect();
    ids.sort_unstable_by_key(|id| (*id < parent, *id));
    ids
}

/// Whether a process runs or is stopped; one that only waits to be reaped does not.
pub(crate) fn lives(id: u32) -> bool {
    stat(id).is_some_and(|(_, state)| state != "Z" && state != "X")
}

/// Fails when one of `ids` is still known, were it as a zombie.
pub(crate) fn assert_gone(ids: &[u32]) {
    for id in ids {
        assert_eq!(stat(*id), None, "process {id} was left behind");
    }
}

/// Waits until none of `ids` lives, which must come within [`ENDED`] of `start`; how long it took.
pub(crate) fn wait_gone(ids: &[u32], start: Stopwatch) -> Duration {
    while ids.iter().any(|id| lives(*id)) {
        let parent = |id: &u32| stat(*id).and_then(|(parent, _)| stat(parent));
        let left: Vec<_> = ids.iter().map(|id| (id, stat(*id), parent(id))).collect();
        assert!(start.elapsed() < ENDED, "still there: {left:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}
