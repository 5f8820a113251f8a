//! A machine's side of a worker that another machine owns.
//!
//! ```text
//! owner -> Start                    host starts one worker, a child process
//! owner <- Started or Refused
//! owner -> Worker(message), Beat    passed on to the worker
//! owner <- Event(...), Beat         passed on from the worker
//! ```
//! The machine itself fetches the parts of the model's file that the worker wants. The worker ends
//! with the line, and when the owner is silent.

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_cluster::nodes::discovery::listen_address;
use paceline_cluster::workers::Event;
use paceline_process::processes::Ending;
use serde::{Deserialize, Serialize};

use super::line::{Broken, Line, Silence, hear, say};
use super::{Crew, LocalCrew, LocalSpec};
use crate::arriving::{self, Wish};
use crate::messages::{FromWorker, ToWorker};

/// How often each side says that it lives, as workers do to their parent.
pub(super) const BEAT: Duration = paceline_cluster::BEAT;

/// A side that says nothing for so long is given up, as a worker by its parent.
pub(super) const SILENCE: Duration = Duration::from_millis(1500);

/// Longest wait for the first message of a fresh line.
const START_LIMIT: Duration = Duration::from_secs(5);

/// How long a worker has to end by itself when its owner is gone.
const GRACE: Duration = Duration::from_millis(300);

/// The model of an instance, by what all machines know of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelName {
    /// The name in the store.
    pub name: String,
    /// SHA-256 of its file in hexadecimal digits.
    pub sha256: String,
}

/// From an owner to a host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToHost<M = ToWorker> {
    /// The first message: start a worker.
    Start {
        model: ModelName,
        /// Threads of it that stay on cores of their own.
        pin: Option<usize>,
        /// The model that guesses for it. Earlier versions name none.
        #[serde(default)]
        draft: Option<ModelName>,
        /// Adapters beside it. Earlier versions name none.
        #[serde(default)]
        adapters: Vec<ModelName>,
    },
    Worker(M),
    /// The owner lives.
    Beat,
}

/// From a host to an owner.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromHost {
    /// The answer to `Start`.
    Started {
        /// This end's address, at which the owner reaches this machine; `None` where this is the
        /// owner's machine.
        listen: Option<SocketAddr>,
        /// Where the worker is to listen for the other ranks.
        bind: SocketAddr,
        /// The model's file here.
        model: PathBuf,
        /// The draft model's file here; a machine without it computes without guesses.
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
        /// Why.
        reason: String,
    },
    Message(FromWorker),
    /// The worker ended.
    Exited {
        /// How.
        ending: Ending,
        /// Its last lines.
        tail: Vec<String>,
    },
    /// The worker gives no sign of life.
    Silent {
        /// For how long.
        silence: Duration,
    },
    /// The worker is of no use any more.
    Gone {
        /// Why.
        reason: String,
    },
    /// The host lives.
    Beat,
}

/// Reads `bytes` as messages between an owner and a host, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToHost>(bytes);
    let _ = serde_json::from_slice::<FromHost>(bytes);
}

/// Finds a model's file on this machine, or says why there is none.
pub type FindModel = dyn Fn(&ModelName) -> Result<PathBuf, String> + Send + Sync;

/// Parts of a file, as first bytes and ends.
pub type Parts = [(u64, u64)];

/// Fetches parts of a model's file as long as the function says, or says why it cannot.
pub type BringParts =
    dyn Fn(&ModelName, &Parts, &(dyn Fn() -> bool + Sync)) -> Result<(), String> + Send + Sync;

/// Wishes of a worker that wait to be fetched: it waits for one before it has the next, beside
/// those that it has announced. A range within an earlier wish is no new one.
const WISHES_MAX: usize = 64;

/// Earlier wishes that are remembered: more than a worker announces.
const EARLIER_MAX: usize = 4096;

/// How a machine starts workers for owners.
pub struct HostSpec {
    /// The program whose `args` run [`worker::run`](crate::worker::run).
    pub program: PathBuf,
    /// Arguments of every worker.
    pub args: Vec<OsString>,
    /// All of every worker's environment: see [`for_workers`](super::for_workers).
    pub env: Vec<(OsString, OsString)>,
    /// Folders below which workers may write.
    pub writable: Vec<PathBuf>,
    /// Finds a model's file on this machine, or says why there is none.
    pub find: Box<FindModel>,
    /// Fetches parts of a model's file that the worker waits for.
    pub bring: Box<BringParts>,
    /// Fetches again parts of a model's file that the worker has found damaged.
    pub repair: Box<BringParts>,
    /// The only interface that workers listen at; all without.
    pub interface: Option<String>,
    /// Gets what workers write to standard error.
    pub on_line: Arc<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for HostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "workers by {}", self.program.display())
    }
}

/// Runs one worker for the owner at the other end of `line`. Returns when the owner closes the
/// line or is silent, with the worker ended.
///
/// # Errors
/// [`Broken`]: how the line ended.
pub fn host(line: &dyn Line, spec: &HostSpec) -> Result<(), Broken> {
    let (crew, model) = match hear(line, START_LIMIT)? {
        Some(ToHost::<ToWorker>::Start {
            model,
            pin,
            draft,
            adapters,
        }) => {
            let files = (&model, draft.as_ref(), &*adapters);
            (start(line, spec, files, pin)?, model)
        }
        _ => return Err(Broken::new("the owner did not say what to start")),
    };
    let is_over = AtomicBool::new(false);
    let over = &is_over;
    let (wishes, wished) = sync_channel(WISHES_MAX);
    let ended = std::thread::scope(|scope| {
        scope.spawn(move || supply(line, spec, (&model, &wished), over));
        scope.spawn(|| tell_owner(line, &crew, (wishes, over)));
        let ended = obey_owner(line, &crew, over);
        over.store(true, Ordering::SeqCst);
        crew.wake();
        line.close(); // a send to an owner that does not read returns
        ended
    });
    crew.end(GRACE);
    ended
}

/// A worker's model, its draft, and its adapters.
type Files<'a> = (&'a ModelName, Option<&'a ModelName>, &'a [ModelName]);

/// Starts the worker and tells where it is.
fn start(
    line: &dyn Line,
    spec: &HostSpec,
    files: Files<'_>,
    pin: Option<usize>,
) -> Result<LocalCrew, Broken> {
    let bind = listen_address(spec.interface.as_deref()).map_err(|error| error.to_string());
    let started = bind.and_then(|bind| Ok((bind, spawn(spec, files, pin)?)));
    let (bind, crew) = match started {
        Ok(started) => started,
        Err(reason) => {
            let refused = FromHost::Refused {
                reason: reason.clone(),
            };
            say(line, &refused)?;
            return Err(Broken::new(reason));
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
    say(line, &started).map(|()| crew)
}

fn spawn(
    spec: &HostSpec,
    (model, draft, adapters): Files<'_>,
    pin: Option<usize>,
) -> Result<LocalCrew, String> {
    let path = (spec.find)(model)?;
    // A draft is read without asking which parts of it are here.
    let whole = |draft| {
        let found = (spec.find)(draft).ok();
        found.filter(|path| !arriving::is_partial(path))
    };
    let on_line = Arc::clone(&spec.on_line);
    let crew = LocalCrew::spawn(LocalSpec {
        program: spec.program.clone(),
        args: spec.args.clone(),
        env: spec.env.clone(),
        writable: spec.writable.clone(),
        model: path,
        draft: draft.and_then(whole),
        adapters: adapters
            .iter()
            .map(|it| (spec.find)(it))
            .collect::<Result<_, _>>()?,
        ranks: 1,
        pin,
        on_line: Some(Box::new(move |_, line| on_line(line))),
    });
    crew.map_err(|error| error.to_string())
}

/// Passes on what the owner says, until the line ends.
fn obey_owner(line: &dyn Line, crew: &LocalCrew, over: &AtomicBool) -> Result<(), Broken> {
    let mut quiet = Silence::new(Instant::now(), BEAT);
    while !over.load(Ordering::SeqCst) {
        match hear(line, BEAT)? {
            Some(ToHost::Worker(message)) => {
                // A worker that cannot be reached is found by its own silence, or has ended.
                let _: Result<(), _> = crew.send(Rank(0), &message);
            }
            Some(ToHost::Beat) => {}
            Some(ToHost::Start { .. }) => return Err(Broken::new("the owner said start twice")),
            None if quiet.pass(Instant::now()) > SILENCE => {
                return Err(Broken::new("the owner is silent"));
            }
            None => continue,
        }
        quiet.heard(Instant::now());
    }
    Ok(())
}

/// Fetches what the worker wants, until the line ends. A part that cannot be had ends the worker.
fn supply(
    line: &dyn Line,
    spec: &HostSpec,
    (model, wished): (&ModelName, &Receiver<Wish>),
    over: &AtomicBool,
) {
    let goes_on = || !over.load(Ordering::SeqCst);
    while goes_on() {
        let brought = match wished.recv_timeout(BEAT) {
            Ok(Wish::Fetch(parts)) => (spec.bring)(model, &parts, &goes_on),
            Ok(Wish::Repair(parts)) => (spec.repair)(model, &parts, &goes_on),
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Err(reason) = brought {
            // An owner that is gone needs no reason.
            let _: Result<(), _> = say(line, &FromHost::Gone { reason });
            over.store(true, Ordering::SeqCst);
        }
    }
}

/// Passes on what the worker says and does, until the line ends. Its wishes for the model's file go
/// to `wishes`.
fn tell_owner(line: &dyn Line, crew: &LocalCrew, (wishes, over): (SyncSender<Wish>, &AtomicBool)) {
    let (mut told, mut earlier) = (Instant::now(), Vec::new());
    while !over.load(Ordering::SeqCst) {
        let news = match crew.receive(BEAT) {
            Some(Event::Message {
                message: FromWorker::Wants { parts },
                ..
            }) => match wish(&wishes, parts, &mut earlier) {
                true if told.elapsed() >= BEAT => FromHost::Beat,
                true => continue,
                false => FromHost::Gone {
                    reason: format!("the worker has over {WISHES_MAX} wishes at once"),
                },
            },
            Some(Event::Message {
                message: FromWorker::Damaged { parts },
                ..
            }) => match wishes.try_send(Wish::Repair(parts)) {
                Ok(()) => FromHost::Beat,
                Err(_) => FromHost::Gone {
                    reason: format!("the worker has over {WISHES_MAX} wishes at once"),
                },
            },
            Some(event) => FromHost::from(event),
            None if told.elapsed() >= BEAT => FromHost::Beat,
            None => continue,
        };
        if say(line, &news).is_err() {
            over.store(true, Ordering::SeqCst);
        }
        told = Instant::now();
    }
}

/// Has those of `parts` fetched that no earlier wish has, which is fetched already, or about to be;
/// false where too many wait.
fn wish(
    wishes: &SyncSender<Wish>,
    mut parts: Vec<(u64, u64)>,
    earlier: &mut Vec<(u64, u64)>,
) -> bool {
    let is_in = |part: &(u64, u64), all: &(u64, u64)| all.0 <= part.0 && part.1 <= all.1;
    parts.retain(|part| !earlier.iter().any(|all| is_in(part, all)));
    if parts.is_empty() {
        return true;
    }
    let room = EARLIER_MAX.saturating_sub(earlier.len());
    earlier.extend(parts.iter().take(room));
    wishes.try_send(Wish::Fetch(parts)).is_ok()
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
    /// The event that it is for a rank; nothing for a beat.
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

    /// The announcement is fetched for as long as the worker reads what it has announced.
    #[test]
    fn what_was_announced_is_no_new_wish() {
        let (wishes, wished) = sync_channel(WISHES_MAX);
        let mut earlier = Vec::new();
        assert!(wish(&wishes, vec![(0, 1000)], &mut earlier));
        for start in 0..500 {
            assert!(wish(&wishes, vec![(start, start + 9)], &mut earlier));
        }
        assert!(wish(&wishes, vec![(2000, 2001), (5, 6)], &mut earlier));
        let fetched: Vec<_> = wished.try_iter().collect();
        let expected = [vec![(0, 1000)], vec![(2000, 2001)]];
        assert_eq!(fetched, expected.map(Wish::Fetch));
        for start in 0..WISHES_MAX as u64 {
            assert!(wish(
                &wishes,
                vec![(3000 + start, 3001 + start)],
                &mut earlier
            ));
        }
        assert!(!wish(&wishes, vec![(9000, 9001)], &mut earlier));
    }
}
