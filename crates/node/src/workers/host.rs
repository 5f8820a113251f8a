//! Host side of a remote worker: runs one worker process for an owner on another machine.
//!
//! ```text
//! owner -> Start                    host starts one worker, a child process
//! owner <- Started or Refused
//! owner -> Worker(message), Beat    passed on to the worker
//! owner <- Event(...), Beat         passed on from the worker
//! ```
//! The host fetches the byte ranges of the model file that the worker requests. The worker ends
//! when the connection closes or the owner misses its heartbeats.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use paceline_base::{CallbackError, Rank};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::discovery::listen_address;
use paceline_cluster::workers::Event;
use paceline_process::Ending;
use serde::{Deserialize, Serialize};

use super::connection::{
    ConnectionError, MessageConnection, SilenceTimer, receive_message, send_message,
};
use super::{InstanceWorkers, LocalInstanceWorkers, LocalSpec};
use paceline_worker::messages::{FromWorker, ToWorker};
use paceline_worker::partial_source::{self, ByteRange, RangeRequest};

/// Heartbeat interval of each side, as between workers and their parent.
pub(super) const BEAT: Duration = paceline_cluster::BEAT;

/// Silence after which a side counts as lost, as between workers and their parent.
pub(super) const SILENCE: Duration = Duration::from_millis(1500);

/// Longest wait for the first message of a new connection.
const START_LIMIT: Duration = Duration::from_secs(5);

/// Time for a worker to exit by itself when its owner is lost.
const GRACE: Duration = Duration::from_millis(300);

/// A model as all machines identify it: name and hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelName {
    /// The name in the store.
    pub name: String,
    /// SHA-256 of its file, or of its manifest, in hexadecimal digits.
    pub sha256: String,
    /// Whether it has several files, listed in a manifest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub manifest: bool,
}

/// From an owner to a host. Other builds may omit the fields with a default.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToHost<M = ToWorker> {
    /// The first message: start a worker.
    Start {
        model: ModelName,
        /// Threads to pin to dedicated cores.
        pin: Option<usize>,
        /// The draft model, if there is one.
        #[serde(default)]
        draft: Option<ModelName>,
        /// Adapters of the model.
        #[serde(default)]
        adapters: Vec<ModelName>,
    },
    Worker(M),
    /// Heartbeat.
    Beat,
}

/// From a host to an owner.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromHost {
    /// The answer to `Start`.
    Started {
        /// Address at which the owner reaches this machine; `None` on the owner's own machine.
        listen: Option<SocketAddr>,
        /// Listen address of the worker for the other ranks.
        bind: SocketAddr,
        /// The model's file here.
        model: PathBuf,
        /// The draft model's file here; without it the machine computes without drafts.
        #[serde(default)]
        draft: Option<PathBuf>,
        /// The files of adapters here, in the order of `Start`.
        #[serde(default)]
        adapters: Vec<PathBuf>,
        /// The first core of its threads.
        first_core: Option<usize>,
        pid: Option<u32>,
    },
    /// The other answer to `Start`.
    Refused {
        reason: String,
    },
    Message(FromWorker),
    /// The worker ended.
    Exited {
        ending: Ending,
        /// Its last lines.
        tail: Vec<String>,
    },
    /// The worker missed its heartbeats.
    Silent {
        silence: Duration,
    },
    /// The worker is lost.
    Gone {
        reason: String,
    },
    /// Heartbeat.
    Beat,
}

/// Reads `bytes` as messages between an owner and a host, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToHost>(bytes);
    let _ = serde_json::from_slice::<FromHost>(bytes);
}

/// Finds a model's file on this machine, or says why there is none.
pub type FindModel = dyn Fn(&ModelName) -> Result<PathBuf, CallbackError> + Send + Sync;

/// Byte ranges of a file: first bytes and ends.
pub type FileRanges = [(u64, u64)];

/// Whether to continue a fetch.
pub type FetchGuard<'a> = dyn Fn() -> bool + Sync + 'a;

/// The outcome of a fetch.
type Fetched = Result<(), CallbackError>;

/// Fetches ranges of a model's file while the guard returns true; the error is the reason of a
/// failure. The string is the file's name in the model's folder, empty for a model of one file.
pub type RangeFetcher =
    dyn Fn(&ModelName, &str, &FileRanges, &FetchGuard<'_>) -> Fetched + Send + Sync;

/// Whether a machine trusts the cable from a device of its own to a node.
pub type TrustsCable = dyn Fn(&str, NodeId) -> bool + Send + Sync;

/// Maximum queued range requests of a worker. A worker waits for one request before it sends the
/// next, apart from announced prefetches. A range inside an earlier request is not queued again.
const WISHES_MAX: usize = partial_source::AHEAD_MAX + 64;

/// Remembered earlier requests: more than a worker announces.
const EARLIER_MAX: usize = 4096;

/// Settings with which a host starts workers for remote owners.
#[derive(derive_more::Debug)]
#[debug("workers by {}", self.program.display())]
pub struct HostSpec {
    /// The program whose `args` run [`worker::run`](paceline_worker::process::run).
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// The complete environment of every worker: see [`for_workers`](super::for_workers).
    pub env: Vec<(OsString, OsString)>,
    /// Folders below which workers may write.
    pub writable: Vec<PathBuf>,
    /// Finds a model's file on this machine, or says why there is none.
    pub find: Box<FindModel>,
    /// As `find`, with all bytes here and compared: adapters and draft models are read as they are.
    pub find_whole: Box<FindModel>,
    /// Fetches ranges of the model file that the worker waits for.
    pub bring: Box<RangeFetcher>,
    /// Fetches damaged ranges of the model file again.
    pub repair: Box<RangeFetcher>,
    /// Whether this machine trusts the RDMA cable from a device of its own to a node.
    pub trusts: Box<TrustsCable>,
    /// The only interface on which workers listen; `None` for all.
    pub interface: Option<String>,
    /// Receives the workers' standard error by lines.
    pub on_line: Arc<dyn Fn(&str) + Send + Sync>,
}

/// Runs one worker for the owner at the other end of `connection`. Returns after the worker has
/// ended, when the owner closes the connection or falls silent.
///
/// # Errors
/// [`ConnectionError`]: why the connection ended.
pub fn host(line: &dyn MessageConnection, spec: &HostSpec) -> Result<(), ConnectionError> {
    let (crew, model) = match receive_message(line, START_LIMIT)? {
        Some(ToHost::<ToWorker>::Start {
            model,
            pin,
            draft,
            adapters,
        }) => {
            let files = (&model, draft.as_ref(), &*adapters);
            (start(line, spec, files, pin)?, model)
        }
        _ => return Err(ConnectionError::new("the owner did not say what to start")),
    };
    let is_over = AtomicBool::new(false);
    let over = &is_over;
    let (wishes, wished) = sync_channel(WISHES_MAX);
    let ended = std::thread::scope(|scope| {
        scope.spawn(move || supply(line, spec, (&model, &wished), over));
        scope.spawn(|| report_to_owner(line, &crew, (wishes, over)));
        let ended = handle_owner(line, &crew, (&*spec.trusts, over));
        over.store(true, Ordering::SeqCst);
        crew.wake();
        line.close(); // a send to an owner that does not read returns
        ended
    });
    crew.end(GRACE);
    ended
}

/// A worker's model, its draft, and its adapters.
type WorkerFiles<'a> = (&'a ModelName, Option<&'a ModelName>, &'a [ModelName]);

/// Starts the worker and sends `Started`.
fn start(
    line: &dyn MessageConnection,
    spec: &HostSpec,
    files: WorkerFiles<'_>,
    pin: Option<usize>,
) -> Result<LocalInstanceWorkers, ConnectionError> {
    let bind = listen_address(spec.interface.as_deref()).map_err(CallbackError::from);
    let started = bind.and_then(|bind| Ok((bind, spawn(spec, files, pin)?)));
    let (bind, crew) = match started.map_err(ConnectionError::new) {
        Ok(started) => started,
        Err(error) => {
            let reason = error.reason.clone();
            send_message(line, &FromHost::Refused { reason })?;
            return Err(error);
        }
    };
    let post = crew.post(Rank(0));
    let listen = line.own_addr().map(|mut addr| {
        addr.set_port(0);
        addr
    });
    let started = FromHost::Started {
        listen,
        bind,
        model: post.model,
        draft: post.draft,
        adapters: post.adapters,
        first_core: post.first_core,
        pid: post.pid,
    };
    send_message(line, &started).map(|()| crew)
}

fn spawn(
    spec: &HostSpec,
    (model, draft, adapters): WorkerFiles<'_>,
    pin: Option<usize>,
) -> Result<LocalInstanceWorkers, CallbackError> {
    let path = (spec.find)(model)?;
    let on_line = Arc::clone(&spec.on_line);
    let crew = LocalInstanceWorkers::spawn(LocalSpec {
        program: spec.program.clone(),
        args: spec.args.clone(),
        env: spec.env.clone(),
        writable: spec.writable.clone(),
        model: path,
        draft: draft.and_then(|draft| (spec.find_whole)(draft).ok()),
        adapters: adapters
            .iter()
            .map(|it| (spec.find_whole)(it))
            .collect::<Result<_, _>>()?,
        ranks: 1,
        pin,
        on_line: Some(Box::new(move |_, line| on_line(line))),
    });
    Ok(crew?)
}

/// Forwards the owner's messages to the worker until the connection ends.
fn handle_owner(
    line: &dyn MessageConnection,
    crew: &LocalInstanceWorkers,
    (trusts, over): (&TrustsCable, &AtomicBool),
) -> Result<(), ConnectionError> {
    let mut quiet = SilenceTimer::new(Instant::now(), BEAT);
    while !over.load(Ordering::SeqCst) {
        match receive_message(line, BEAT)? {
            Some(ToHost::Worker(mut message)) => {
                // This machine's own trust decides, not the owner.
                if let ToWorker::Assign(job) = &mut message
                    && let Some(cables) = &mut job.cables
                {
                    cables.refuse(job.rank, trusts);
                }
                // An unreachable worker is detected by its silence or exit.
                let _: Result<(), _> = crew.send(Rank(0), &message);
            }
            Some(ToHost::Beat) => {}
            Some(ToHost::Start { .. }) => {
                return Err(ConnectionError::new("the owner said start twice"));
            }
            None if quiet.exceeds(SILENCE, Instant::now()).is_some() => {
                return Err(ConnectionError::new("the owner is silent"));
            }
            None => continue,
        }
        quiet.heard(Instant::now());
    }
    Ok(())
}

/// Fetches the ranges that the worker requests until the connection ends. A failed fetch ends the
/// worker.
fn supply(
    line: &dyn MessageConnection,
    spec: &HostSpec,
    (model, wished): (&ModelName, &Receiver<RangeRequest>),
    over: &AtomicBool,
) {
    let goes_on = || !over.load(Ordering::SeqCst);
    while goes_on() {
        let brought = match wished.recv_timeout(BEAT) {
            Ok(RangeRequest::Fetch { file, parts }) => (spec.bring)(model, &file, &parts, &goes_on),
            Ok(RangeRequest::Repair { file, parts }) => {
                (spec.repair)(model, &file, &parts, &goes_on)
            }
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Err(reason) = brought {
            // A lost owner does not receive the reason.
            let reason = reason.to_string();
            let _: Result<(), _> = send_message(line, &FromHost::Gone { reason });
            over.store(true, Ordering::SeqCst);
        }
    }
}

/// Forwards the worker's messages and events to the owner until the connection ends. Its range
/// requests go to `wishes`.
fn report_to_owner(
    line: &dyn MessageConnection,
    crew: &LocalInstanceWorkers,
    (wishes, over): (SyncSender<RangeRequest>, &AtomicBool),
) {
    let (mut told, mut earlier) = (Instant::now(), Vec::new());
    while !over.load(Ordering::SeqCst) {
        let news = match crew.receive(BEAT) {
            Some(Event::Message {
                message: FromWorker::Wants { file, parts },
                ..
            }) => match request_ranges(&wishes, (file, parts), &mut earlier) {
                true if told.elapsed() >= BEAT => FromHost::Beat,
                true => continue,
                false => FromHost::Gone {
                    reason: format!("the worker has over {WISHES_MAX} wishes at once"),
                },
            },
            Some(Event::Message {
                message: FromWorker::Damaged { file, parts },
                ..
            }) => match wishes.try_send(RangeRequest::Repair { file, parts }) {
                Ok(()) => FromHost::Beat,
                Err(_) => FromHost::Gone {
                    reason: format!("the worker has over {WISHES_MAX} wishes at once"),
                },
            },
            Some(event) => FromHost::from(event),
            None if told.elapsed() >= BEAT => FromHost::Beat,
            None => continue,
        };
        if send_message(line, &news).is_err() {
            over.store(true, Ordering::SeqCst);
        }
        told = Instant::now();
    }
}

/// Queues those of `parts` that no earlier request covers. Returns false if the queue is full.
fn request_ranges(
    wishes: &SyncSender<RangeRequest>,
    (file, mut parts): (String, Vec<ByteRange>),
    earlier: &mut Vec<(String, ByteRange)>,
) -> bool {
    let covers = |(of, all): &(String, ByteRange), part: &ByteRange| {
        *of == file && all.0 <= part.0 && part.1 <= all.1
    };
    parts.retain(|part| !earlier.iter().any(|all| covers(all, part)));
    if parts.is_empty() {
        return true;
    }
    let room = EARLIER_MAX.saturating_sub(earlier.len());
    earlier.extend(parts.iter().take(room).map(|part| (file.clone(), *part)));
    wishes.try_send(RangeRequest::Fetch { file, parts }).is_ok()
}

impl From<Event<FromWorker>> for FromHost {
    fn from(event: Event<FromWorker>) -> Self {
        match event {
            Event::Message { message, .. } => Self::Message(message),
            Event::Exited { ending, tail, .. } => Self::Exited { ending, tail },
            Event::Silent { silence, .. } => Self::Silent { silence },
            Event::Garbled { garbage, .. } => Self::Gone {
                reason: garbage.to_string(),
            },
            Event::Gone { reason, .. } => Self::Gone { reason },
        }
    }
}

impl FromHost {
    /// This message as an event of `rank`; `None` for a heartbeat.
    pub(super) fn event(self, rank: Rank, place: &str) -> Option<Event<FromWorker>> {
        Some(match self {
            Self::Message(message) => Event::Message { rank, message },
            Self::Exited { ending, tail } => Event::Exited { rank, ending, tail },
            Self::Silent { silence } => Event::Silent { rank, silence },
            Self::Gone { reason } | Self::Refused { reason } => {
                let reason = format!("{place}: {reason}");
                Event::Gone { rank, reason }
            }
            Self::Started { .. } | Self::Beat => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The announced range is still being fetched while the worker reads it.
    #[test]
    fn what_was_announced_is_no_new_wish() {
        let (wishes, wished) = sync_channel(WISHES_MAX);
        let mut earlier = Vec::new();
        let mut request = |file: &str, parts: &[ByteRange]| {
            request_ranges(&wishes, (file.to_owned(), parts.to_vec()), &mut earlier)
        };
        assert!(request("a", &[(0, 1000)]));
        for start in 0..500 {
            assert!(request("a", &[(start, start + 9)]));
        }
        assert!(request("a", &[(2000, 2001), (5, 6)]));
        assert!(request("b", &[(5, 6)]), "the range of another file");
        let fetched: Vec<_> = wished.try_iter().collect();
        let expected = [("a", (0, 1000)), ("a", (2000, 2001)), ("b", (5, 6))];
        let fetch = |(file, part): (&str, ByteRange)| RangeRequest::Fetch {
            file: file.to_owned(),
            parts: vec![part],
        };
        assert_eq!(fetched, expected.map(fetch));
        for start in 0..WISHES_MAX as u64 {
            assert!(request("a", &[(3000 + start, 3001 + start)]));
        }
        assert!(!request("a", &[(9000, 9001)]));
    }
}
