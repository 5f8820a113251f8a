//! Requests on one node for an instance that another node owns.
//!
//! ```text
//! entry -> Submit(ticket, request, tokens), Cancel(ticket)
//! owner <- Reply(ticket, reply), Split(how the model is cut), when that changes
//! ```
//! The entry keeps each request with the tokens of its answer. When the owner is gone it hands them
//! to the next owner, and the answer goes on.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::InstanceId;
use paceline_engine::{Failure, Reply, Request, Service, Sink, State, Status, Ticket};
use serde::{Deserialize, Serialize};

use super::Inner;
use crate::Instance;
use crate::crew::line::{Broken, Line, hear, pair, say};

/// Replies of an owner that wait for its channel. An entry that is behind by more is given up.
const REPLIES_MAX: usize = 16_384;

/// Open requests of one entry.
const OPEN_MAX: usize = 1024;

/// How often a thread looks whether it is still needed.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Longest time without an owner before answers are lost: detection, a new placement and the load
/// of a large model from disk.
const OWNERLESS_LIMIT: Duration = Duration::from_secs(120);

#[derive(Serialize, Deserialize)]
enum ToOwner {
    /// The first message.
    Instance(u64),
    Submit {
        ticket: Ticket,
        request: Box<Request>,
        tokens: Vec<u32>,
    },
    Cancel(Ticket),
}

#[derive(Serialize, Deserialize)]
enum ToEntry {
    /// The answer to `Instance`.
    Ready,
    Reply(Ticket, Reply),
    /// How the model is cut, in a word; after `Ready`, and before the first reply after a change.
    Split(String),
}

/// Answers an entry on its line until that closes.
pub(super) fn answer(inner: &Arc<Inner>, line: &Arc<dyn Line>) {
    let id = match hear(&**line, LOOK_EVERY * 10) {
        Ok(Some(ToOwner::Instance(id))) => InstanceId(id),
        _ => return line.close(),
    };
    if let Some(instance) = inner.ready_instance(id) {
        let answers = || inner.answers_with(id, &instance);
        // The entry sees that the line is closed.
        let _: Result<(), Broken> = serve(line, &instance, &answers);
    }
    line.close();
}

/// A line to this node's own instances.
pub(super) fn here(inner: &Arc<Inner>) -> Option<Arc<dyn Line>> {
    let (line, there) = pair();
    let (inner, there): (_, Arc<dyn Line>) = (Arc::clone(inner), Arc::new(there));
    let thread = std::thread::Builder::new().name("answers".to_owned());
    thread.spawn(move || answer(&inner, &there)).ok()?;
    Some(Arc::new(line))
}

/// `answers`: whether the instance is the one to ask, and not one that another has followed.
fn serve(
    line: &Arc<dyn Line>,
    instance: &Instance,
    answers: &dyn Fn() -> bool,
) -> Result<(), Broken> {
    say(&**line, &ToEntry::Ready)?;
    let mut split = String::new();
    say_split(&**line, instance, &mut split)?;
    let (replies, queue) = sync_channel::<(Ticket, Reply)>(REPLIES_MAX);
    let open: Mutex<BTreeMap<Ticket, Ticket>> = Mutex::default();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for (ticket, reply) in queue {
                let told = match reply {
                    Reply::PromptRead { .. } => say_split(&**line, instance, &mut split),
                    _ => Ok(()),
                };
                let reply = ToEntry::Reply(ticket, reply);
                if told.and_then(|()| say(&**line, &reply)).is_err() {
                    line.close();
                    break;
                }
            }
        });
        let ended = listen(line, (instance, answers), &open, &replies);
        for own in lock(&open).values() {
            instance.cancel(*own);
        }
        drop(replies);
        ended
    })
}

/// Says how the model is cut where that is not what was `told` last.
fn say_split(line: &dyn Line, instance: &Instance, told: &mut String) -> Result<(), Broken> {
    let split = instance.split().to_string();
    if *told == split {
        return Ok(());
    }
    told.clone_from(&split);
    say(line, &ToEntry::Split(split))
}

/// Takes in an entry's requests until its channel closes.
fn listen(
    line: &Arc<dyn Line>,
    (instance, answers): (&Instance, &dyn Fn() -> bool),
    open: &Mutex<BTreeMap<Ticket, Ticket>>,
    replies: &SyncSender<(Ticket, Reply)>,
) -> Result<(), Broken> {
    loop {
        let heard = hear(&**line, LOOK_EVERY)?;
        if !answers() {
            return Err(Broken::new("the instance is another one now"));
        }
        match heard {
            Some(ToOwner::Submit {
                ticket,
                request,
                tokens,
            }) => {
                if lock(open).len() >= OPEN_MAX {
                    let failure = Failure::Busy { waiting: OPEN_MAX };
                    let _: Result<(), _> = replies.try_send((ticket, Reply::Failed(failure)));
                    continue;
                }
                let out = replies.clone();
                let close = Arc::clone(line);
                let sink: Sink = Box::new(move |reply| {
                    if out.try_send((ticket, reply)).is_err() {
                        close.close(); // too far behind, or gone
                    }
                });
                match instance.submit_after(*request, tokens, sink) {
                    Ok(own) => drop(lock(open).insert(ticket, own)),
                    Err(failure) => {
                        let _: Result<(), _> = replies.try_send((ticket, Reply::Failed(failure)));
                    }
                }
            }
            Some(ToOwner::Cancel(ticket)) => {
                if let Some(own) = lock(open).remove(&ticket) {
                    instance.cancel(own);
                }
            }
            Some(ToOwner::Instance(_)) => return Err(Broken::new("the entry said it twice")),
            None => {}
        }
    }
}

/// An instance of another node, as a service of this one. Dropping it loses what is open.
pub(super) struct Remote {
    shared: Arc<Shared>,
}

struct Shared {
    id: InstanceId,
    last_ticket: AtomicU64,
    state: Mutex<Open>,
    over: AtomicBool,
}

#[derive(Default)]
struct Open {
    requests: BTreeMap<Ticket, Asked>,
    /// To the owner, while there is one.
    line: Option<Arc<dyn Line>>,
    /// How the model is cut, as an owner told it last.
    split: Option<String>,
}

impl Open {
    /// Without an owner, or with one that is gone, the next one is told what it needs.
    fn tell(&self, message: &ToOwner) {
        if let Some(line) = &self.line {
            let _: Result<(), _> = say(&**line, message);
        }
    }
}

struct Asked {
    request: Box<Request>,
    tokens: Vec<u32>,
    prompt_read: bool,
    sink: Option<Sink>,
}

impl Remote {
    /// Starts a thread that keeps a channel to the owner, whichever node that is.
    ///
    /// # Errors
    /// What the system says when it refuses the thread.
    pub(super) fn start(inner: &Arc<Inner>, id: InstanceId) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            id,
            last_ticket: AtomicU64::new(0),
            state: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let (inner, own) = (Arc::downgrade(inner), Arc::clone(&shared));
        let run = move || {
            let mut lost_at = None;
            while !own.over.load(Ordering::SeqCst) {
                let Some(inner) = inner.upgrade() else { break };
                match own.connect(&inner) {
                    Some(line) => {
                        drop(inner);
                        lost_at = None;
                        own.converse(&*line);
                    }
                    None => {
                        let since = *lost_at.get_or_insert_with(Instant::now);
                        if !inner.is_wanted(own.id) {
                            own.lose("the model was unloaded");
                        } else if since.elapsed() > OWNERLESS_LIMIT {
                            own.lose("no node owns the model any more");
                        }
                        drop(inner);
                        std::thread::sleep(LOOK_EVERY);
                    }
                }
            }
            own.lose("the model was unloaded");
        };
        std::thread::Builder::new()
            .name("entry".to_owned())
            .spawn(run)?;
        Ok(Self { shared })
    }
}

impl Shared {
    /// A channel to the owner, if it is ready, with all open requests handed to it.
    fn connect(&self, inner: &Arc<Inner>) -> Option<Arc<dyn Line>> {
        let line = inner.reach_owner(self.id)?;
        say(&*line, &ToOwner::Instance(self.id.0)).ok()?;
        let Ok(Some(ToEntry::Ready)) = hear(&*line, LOOK_EVERY * 10) else {
            return None;
        };
        let mut state = lock(&self.state);
        for (ticket, asked) in &state.requests {
            let submit = ToOwner::Submit {
                ticket: *ticket,
                request: asked.request.clone(),
                tokens: asked.tokens.clone(),
            };
            say(&*line, &submit).ok()?;
        }
        state.line = Some(Arc::clone(&line));
        Some(line)
    }

    /// Passes replies on until the channel breaks.
    fn converse(&self, line: &dyn Line) {
        while !self.over.load(Ordering::SeqCst) {
            match hear(line, LOOK_EVERY) {
                Ok(Some(ToEntry::Reply(ticket, reply))) => self.deliver(ticket, reply),
                Ok(Some(ToEntry::Split(split))) => lock(&self.state).split = Some(split),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        lock(&self.state).line = None;
        line.close();
    }

    fn deliver(&self, ticket: Ticket, reply: Reply) {
        let mut state = lock(&self.state);
        let Some(asked) = state.requests.get_mut(&ticket) else {
            return;
        };
        match &reply {
            Reply::PromptRead { .. } if std::mem::replace(&mut asked.prompt_read, true) => return,
            Reply::Token { token, .. } => asked.tokens.push(*token),
            // The owner is about to go: the next one goes on.
            Reply::Failed(Failure::Lost { .. } | Failure::Unavailable { .. }) => return,
            Reply::Finished { .. } | Reply::Failed(_) => {
                let asked = state.requests.remove(&ticket);
                state.tell(&ToOwner::Cancel(ticket)); // the owner forgets it
                drop(state);
                if let Some(mut sink) = asked.and_then(|asked| asked.sink) {
                    sink(reply);
                }
                return;
            }
            Reply::PromptRead { .. } => {}
        }
        // A sink may cancel: it must not be called under the lock.
        let Some(mut sink) = asked.sink.take() else {
            return;
        };
        drop(state);
        sink(reply);
        if let Some(asked) = lock(&self.state).requests.get_mut(&ticket) {
            asked.sink = Some(sink);
        }
    }

    fn lose(&self, reason: &str) {
        let all = std::mem::take(&mut lock(&self.state).requests);
        for mut sink in all.into_values().filter_map(|asked| asked.sink) {
            let reason = reason.to_owned();
            sink(Reply::Failed(Failure::Lost { reason }));
        }
    }
}

impl Service for Remote {
    fn submit_after(
        &self,
        request: Request,
        tokens: Vec<u32>,
        sink: Sink,
    ) -> Result<Ticket, Failure> {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        let waiting = state.requests.len();
        if waiting >= OPEN_MAX {
            return Err(Failure::Busy { waiting });
        }
        let ticket = Ticket(shared.last_ticket.fetch_add(1, Ordering::Relaxed) + 1);
        let request = Box::new(request);
        let submit = ToOwner::Submit {
            ticket,
            request: request.clone(),
            tokens: tokens.clone(),
        };
        let asked = Asked {
            request,
            prompt_read: !tokens.is_empty(),
            tokens,
            sink: Some(sink),
        };
        state.requests.insert(ticket, asked);
        state.tell(&submit);
        Ok(ticket)
    }

    fn cancel(&self, ticket: Ticket) {
        let mut state = lock(&self.shared.state);
        state.requests.remove(&ticket);
        state.tell(&ToOwner::Cancel(ticket));
    }

    fn cut(&self) -> String {
        let split = lock(&self.shared.state).split.clone();
        split.unwrap_or_else(|| "unknown".to_owned())
    }

    fn status(&self) -> Status {
        let state = lock(&self.shared.state);
        let started = state.requests.values().filter(|asked| asked.prompt_read);
        let running = started.count();
        Status {
            state: match &state.line {
                Some(_) => State::Ready,
                None => State::Recovering("no node owns the model at the moment".to_owned()),
            },
            running,
            waiting: state.requests.len() - running,
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "instance {} of another node", self.shared.id)
    }
}
