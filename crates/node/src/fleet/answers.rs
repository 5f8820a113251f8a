//! Requests on one node for an instance that another node owns.
//!
//! ```text
//! entry -> Submit(ticket, request, tokens), Cancel(ticket)
//! owner -> Reply(ticket, reply), Stand(how its instance is), Split(how the model is cut): the last
//!          two when they change
//! ```
//! The entry keeps each request with the tokens of its answer. When the owner is gone, or its
//! instance does not answer, the entry's [`Relief`] hands them to another replica of the model.
//! Without one the entry hands them to the next owner. The answer goes on either way.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, lock};
use paceline_cluster::nodes::InstanceId;
use paceline_cluster::nodes::agent::Kind;
use paceline_engine::{Failure, Reply, Request, Service, Sink, State, Status, Ticket};
use serde::{Deserialize, Serialize};

use super::{Inner, report};
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

/// Time after which an owner that gave a request back, and still answers, does not go. An owner
/// that goes gives its requests back first. It looks every [`LOOK_EVERY`] whether it is still the
/// one to ask, and closes the line if not.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// How often a request is asked again of an owner that gives it back, and answers others.
const AGAIN_MAX: u8 = 3;

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
    /// How the instance is, with the requests of all entries.
    Stand(Status),
    /// How the model is cut, in a word; after `Ready`, and before the first reply after a change.
    Split(String),
}

/// Reads `bytes` as messages between an entry and an owner, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToOwner>(bytes);
    let _ = serde_json::from_slice::<ToEntry>(bytes);
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
    let (replies, queue) = sync_channel::<ToEntry>(REPLIES_MAX);
    let open: Mutex<BTreeMap<Ticket, Ticket>> = Mutex::default();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for message in queue {
                let told = match message {
                    ToEntry::Reply(_, Reply::PromptRead { .. }) => {
                        say_split(&**line, instance, &mut split)
                    }
                    _ => Ok(()),
                };
                if told.and_then(|()| say(&**line, &message)).is_err() {
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

/// Takes in an entry's requests until its channel closes, and tells it how the instance is.
fn listen(
    line: &Arc<dyn Line>,
    (instance, answers): (&Instance, &dyn Fn() -> bool),
    open: &Mutex<BTreeMap<Ticket, Ticket>>,
    replies: &SyncSender<ToEntry>,
) -> Result<(), Broken> {
    let mut told = None;
    loop {
        let status = instance.status();
        if told.as_ref() != Some(&status) {
            // A queue without room is full of replies, which come first.
            let sent = replies.try_send(ToEntry::Stand(status.clone()));
            told = sent.is_ok().then_some(status);
        }
        let heard = hear(&**line, LOOK_EVERY)?;
        if !answers() {
            return Err(Broken::new("the instance is another one now"));
        }
        match heard {
            Some(ToOwner::Submit {
                ticket,
                request,
                tokens,
            }) => submit(line, instance, open, replies, (ticket, *request, tokens)),
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

/// Has the instance answer a request of an entry.
fn submit(
    line: &Arc<dyn Line>,
    instance: &Instance,
    open: &Mutex<BTreeMap<Ticket, Ticket>>,
    replies: &SyncSender<ToEntry>,
    (ticket, request, tokens): (Ticket, Request, Vec<u32>),
) {
    let refuse = |failure| {
        // A queue that is full has closed the line.
        let _: Result<(), _> = replies.try_send(ToEntry::Reply(ticket, Reply::Failed(failure)));
    };
    if lock(open).len() >= OPEN_MAX {
        return refuse(Failure::Busy { waiting: OPEN_MAX });
    }
    let (out, close) = (replies.clone(), Arc::clone(line));
    let sink: Sink = Box::new(move |reply| {
        if out.try_send(ToEntry::Reply(ticket, reply)).is_err() {
            close.close(); // too far behind, or gone
        }
    });
    match instance.submit_after(request, tokens, sink) {
        Ok(own) => drop(lock(open).insert(ticket, own)),
        Err(failure) => refuse(failure),
    }
}

/// Receives the owner's first two messages after `Ready`: the split, and the state of its
/// instance. The owner knows both, so that the wait for them is short.
fn introduction(line: &dyn Line) -> Result<(Option<String>, Option<Status>), Broken> {
    let mut cut = None;
    let begun = Instant::now();
    while begun.elapsed() < LOOK_EVERY {
        match hear(line, LOOK_EVERY)? {
            Some(ToEntry::Split(split)) => cut = Some(split),
            Some(ToEntry::Stand(status)) => return Ok((cut, Some(status))),
            _ => {}
        }
    }
    Ok((cut, None))
}

/// Other instances of a model, which can go on with requests.
pub(super) trait Relief: Send + Sync {
    /// Hands the requests of an entry whose instance does not answer to other instances; whether
    /// any moved. The entry's own thread calls this, so that no reply to them is under way.
    fn relieve(&self, from: &Entry) -> bool;
}

/// How a model is cut of which no owner has told it yet.
pub(super) const UNKNOWN: &str = "unknown";

/// An instance of another node, as a service of this one. Dropping it hands what is open to the
/// relief, and loses the rest.
pub(super) struct Remote {
    pub(super) entry: Arc<Entry>,
}

/// Requests of this node for one instance, and the line to its owner.
pub(super) struct Entry {
    id: InstanceId,
    relief: Option<Weak<dyn Relief>>,
    last_ticket: AtomicU64,
    state: Mutex<Open>,
    over: AtomicBool,
}

#[derive(Default)]
struct Open {
    requests: BTreeMap<Ticket, Asked>,
    /// To the owner, while there is one.
    line: Option<Arc<dyn Line>>,
    /// Whether the instance answers, as the owner last said.
    answers: bool,
    /// Requests of other entries that the instance has in work, as the owner last said.
    others: usize,
    /// Of the owner.
    kind: Option<Kind>,
    /// Nothing more is taken.
    is_over: bool,
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

    /// Whether answers of the owner's kernel class can go on elsewhere.
    fn goes_on(&self) -> bool {
        let class = self
            .kind
            .as_ref()
            .map(|kind| kind.class.parse::<KernelClass>());
        class.is_none_or(|class| class.is_ok_and(KernelClass::is_exact))
    }

    /// Decides about a request that the owner gave back.
    fn settle(&mut self, ticket: Ticket) -> Option<Settled> {
        let asked = self.requests.get_mut(&ticket)?;
        let (_, failure) = asked.given_back.take()?;
        let is_refused = matches!(failure, Failure::Unavailable { .. });
        if is_refused && self.answers && asked.again < AGAIN_MAX {
            asked.again += 1;
            return Some(Settled::Again(asked.submit(ticket)));
        }
        let asked = self.requests.remove(&ticket)?;
        Some(Settled::Over(asked, failure))
    }
}

/// A request with what came of it so far.
pub(super) struct Asked {
    request: Box<Request>,
    tokens: Vec<u32>,
    prompt_read: bool,
    sink: Option<Sink>,
    /// When the owner said that it does not answer this, and why.
    given_back: Option<(Instant, Failure)>,
    /// How often it was asked again then.
    again: u8,
}

/// Decision about a request that its owner has given back.
enum Settled {
    /// It is asked again.
    Again(ToOwner),
    /// Its caller is told.
    Over(Asked, Failure),
}

impl Asked {
    /// A request of whose answer its caller has `tokens` already.
    pub(super) fn new(request: Request, tokens: Vec<u32>, sink: Sink) -> Self {
        Self {
            request: Box::new(request),
            prompt_read: !tokens.is_empty(),
            tokens,
            sink: Some(sink),
            given_back: None,
            again: 0,
        }
    }

    /// Whether it was given back so long ago that the owner which did so does not go. An answer
    /// that has begun and cannot go on elsewhere does not wait for another owner.
    fn is_settled(&self, answers: bool, goes_on: bool) -> bool {
        let limit = match answers || (self.has_begun() && !goes_on) {
            true => SETTLED_AFTER,
            false => OWNERLESS_LIMIT,
        };
        let given_back = self.given_back.as_ref();
        given_back.is_some_and(|(at, _)| at.elapsed() >= limit)
    }

    /// Tokens of the prompt.
    pub(super) fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }

    /// Whether its answer has begun: it goes on with the same numbers only.
    pub(super) const fn has_begun(&self) -> bool {
        !self.tokens.is_empty()
    }

    fn submit(&self, ticket: Ticket) -> ToOwner {
        ToOwner::Submit {
            ticket,
            request: self.request.clone(),
            tokens: self.tokens.clone(),
        }
    }
}

impl Remote {
    /// Starts a thread that keeps a channel to the owner, whichever node that is.
    ///
    /// # Errors
    /// What the system says when it refuses the thread.
    pub(super) fn start(
        inner: &Arc<Inner>,
        id: InstanceId,
        relief: Option<Weak<dyn Relief>>,
    ) -> std::io::Result<Self> {
        let entry = Arc::new(Entry {
            id,
            relief,
            last_ticket: AtomicU64::new(0),
            state: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let (inner, own) = (Arc::downgrade(inner), Arc::clone(&entry));
        let thread = std::thread::Builder::new().name("entry".to_owned());
        thread.spawn(move || own.run(&inner))?;
        Ok(Self { entry })
    }
}

impl Entry {
    pub(super) const fn id(&self) -> InstanceId {
        self.id
    }

    /// Whether the instance answers now, as far as this node knows.
    pub(super) fn is_ready(&self) -> bool {
        let state = lock(&self.state);
        state.line.is_some() && state.answers
    }

    /// Requests that the instance has in work: those of this entry, and those of others as the
    /// owner last said.
    pub(super) fn load(&self) -> usize {
        let state = lock(&self.state);
        state.requests.len() + state.others
    }

    /// Of the last known owner.
    pub(super) fn kind(&self) -> Option<Kind> {
        lock(&self.state).kind.clone()
    }

    /// Takes a request, of a client or of another entry. Gives it back when it has [`OPEN_MAX`], or
    /// when it is over.
    pub(super) fn take(&self, ticket: Ticket, asked: Asked) -> Result<(), Asked> {
        let mut state = lock(&self.state);
        if state.is_over || state.requests.len() >= OPEN_MAX {
            return Err(asked);
        }
        let mut asked = asked;
        (asked.given_back, asked.again) = (None, 0);
        let submit = asked.submit(ticket);
        state.requests.insert(ticket, asked);
        state.tell(&submit);
        Ok(())
    }

    /// Why [`take`](Self::take) gives a request back.
    pub(super) fn refusal(&self) -> Failure {
        let state = lock(&self.state);
        match state.is_over {
            true => Failure::Unavailable {
                reason: "the model was unloaded".to_owned(),
            },
            false => Failure::Busy {
                waiting: state.requests.len(),
            },
        }
    }

    /// Forgets a request; nothing happens where it is none of this entry.
    pub(super) fn cancel(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        if state.requests.remove(&ticket).is_some() {
            state.tell(&ToOwner::Cancel(ticket));
        }
    }

    /// All open requests, for a [`Relief`]. The relief returns requests that it cannot place by
    /// [`keep`](Self::keep).
    pub(super) fn give_up(&self) -> BTreeMap<Ticket, Asked> {
        std::mem::take(&mut lock(&self.state).requests)
    }

    /// Takes a request back that was given up.
    pub(super) fn keep(&self, ticket: Ticket, asked: Asked) {
        lock(&self.state).requests.insert(ticket, asked);
    }

    /// Leaves the owner, which stops what this entry asked. The next line starts afresh, so that no
    /// late reply meets a request that has moved on and come back.
    pub(super) fn hang_up(&self) {
        if let Some(line) = lock(&self.state).line.take() {
            line.close();
        }
    }

    /// Keeps a channel to the owner until this is over.
    fn run(&self, inner: &Weak<Inner>) {
        let mut lost_at = None;
        while !self.over.load(Ordering::SeqCst) {
            let Some(inner) = inner.upgrade() else { break };
            if let Some(line) = self.connect(&inner) {
                drop(inner);
                lost_at = None;
                self.converse(&*line);
                self.relieve();
                continue;
            }
            self.relieve();
            let since: Instant = *lost_at.get_or_insert_with(Instant::now);
            if !inner.is_wanted(self.id) {
                self.lose("the model was unloaded");
            } else if since.elapsed() > OWNERLESS_LIMIT {
                let said = report(&inner.agent.map(), self.id).and_then(|it| it.reason);
                self.lose(&said.unwrap_or_else(|| "no node owns the model any more".to_owned()));
            }
            drop(inner);
            std::thread::sleep(LOOK_EVERY);
        }
        lock(&self.state).is_over = true;
        self.relieve();
        self.lose("the model was unloaded");
    }

    /// A channel to the owner, if it has the instance, with all open requests handed to it.
    fn connect(&self, inner: &Arc<Inner>) -> Option<Arc<dyn Line>> {
        let line = inner.reach_owner(self.id)?;
        say(&*line, &ToOwner::Instance(self.id.0)).ok()?;
        let Ok(Some(ToEntry::Ready)) = hear(&*line, LOOK_EVERY * 10) else {
            return None;
        };
        let (split, stand) = introduction(&*line).ok()?;
        let kind = inner.kind_of_owner(self.id);
        let mut state = lock(&self.state);
        if split.is_some() {
            state.split = split;
        }
        (state.answers, state.others, state.kind) = (true, 0, kind);
        for (ticket, asked) in &mut state.requests {
            (asked.given_back, asked.again) = (None, 0);
            say(&*line, &asked.submit(*ticket)).ok()?;
        }
        state.line = Some(Arc::clone(&line));
        drop(state);
        if let Some(status) = stand {
            self.learn(&status);
        }
        Some(line)
    }

    /// Passes replies on until the channel breaks, or until the requests went elsewhere.
    fn converse(&self, line: &dyn Line) {
        while !self.over.load(Ordering::SeqCst) {
            match hear(line, LOOK_EVERY) {
                Ok(Some(ToEntry::Reply(ticket, reply))) => self.deliver(ticket, reply),
                Ok(Some(ToEntry::Stand(status))) => self.learn(&status),
                Ok(Some(ToEntry::Split(split))) => lock(&self.state).split = Some(split),
                Ok(_) => {}
                Err(_) => break,
            }
            if !self.is_ready() && self.relieve() {
                break;
            }
            self.settle();
        }
        lock(&self.state).line = None;
        line.close();
    }

    /// Takes in how the owner's instance is.
    fn learn(&self, status: &Status) {
        let mut state = lock(&self.state);
        state.answers = status.state == State::Ready;
        let all = status.running + status.waiting;
        state.others = all.saturating_sub(state.requests.len());
    }

    /// Has other instances go on with the open requests; whether any moved.
    fn relieve(&self) -> bool {
        let relief = self.relief.as_ref().and_then(Weak::upgrade);
        let has_open = !lock(&self.state).requests.is_empty();
        has_open && relief.is_some_and(|relief| relief.relieve(self))
    }

    /// Ends what the owner has given back and goes on without, or asks for it again.
    fn settle(&self) {
        let mut state = lock(&self.state);
        let (answers, goes_on) = (state.answers, state.goes_on());
        let settled = state.requests.iter();
        let settled = settled.filter(|(_, asked)| asked.is_settled(answers, goes_on));
        let tickets: Vec<Ticket> = settled.map(|(ticket, _)| *ticket).collect();
        let mut over = Vec::new();
        for ticket in tickets {
            // Told under the lock: a cancel that came between would be told first.
            match state.settle(ticket) {
                Some(Settled::Again(submit)) => state.tell(&submit),
                Some(Settled::Over(asked, failure)) => {
                    state.tell(&ToOwner::Cancel(ticket)); // the owner forgets it
                    over.push((asked, failure));
                }
                None => {}
            }
        }
        drop(state);
        for (asked, failure) in over {
            if let Some(mut sink) = asked.sink {
                sink(Reply::Failed(failure));
            }
        }
    }

    fn deliver(&self, ticket: Ticket, reply: Reply) {
        let mut state = lock(&self.state);
        let Some(asked) = state.requests.get_mut(&ticket) else {
            return;
        };
        match &reply {
            Reply::PromptRead { .. } if std::mem::replace(&mut asked.prompt_read, true) => return,
            Reply::Token { token, .. } => {
                asked.tokens.push(*token);
                asked.again = 0;
            }
            // An owner that is about to go says so too: then the next one goes on.
            Reply::Failed(failure @ (Failure::Lost { .. } | Failure::Unavailable { .. })) => {
                asked.given_back = Some((Instant::now(), failure.clone()));
                return;
            }
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

    /// How the model is cut, once an owner has told it.
    pub(super) fn cut(&self) -> Option<String> {
        lock(&self.state).split.clone()
    }

    /// How this entry is.
    pub(super) fn status(&self) -> Status {
        let state = lock(&self.state);
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

impl Service for Remote {
    fn submit_after(
        &self,
        request: Request,
        tokens: Vec<u32>,
        sink: Sink,
    ) -> Result<Ticket, Failure> {
        let entry = &self.entry;
        let ticket = Ticket(entry.last_ticket.fetch_add(1, Ordering::Relaxed) + 1);
        let taken = entry.take(ticket, Asked::new(request, tokens, sink));
        taken.map(|()| ticket).map_err(|_| entry.refusal())
    }

    fn cancel(&self, ticket: Ticket) {
        self.entry.cancel(ticket);
    }

    fn cut(&self) -> String {
        self.entry.cut().unwrap_or_else(|| UNKNOWN.to_owned())
    }

    fn status(&self) -> Status {
        self.entry.status()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.entry.over.store(true, Ordering::SeqCst);
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "instance {} of another node", self.entry.id)
    }
}

/// Entries without threads, for tests of what gives requests to them.
#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use crate::crew::line::MemoryLine;

    /// The owner's end of an entry's line.
    pub(in crate::fleet) struct Owner(MemoryLine);

    impl Owner {
        /// The entry's next message, such as `submit 1 after [7]`; nothing where it says nothing.
        pub(in crate::fleet) fn heard(&self) -> Option<String> {
            match hear(&self.0, Duration::ZERO) {
                Ok(Some(ToOwner::Submit { ticket, tokens, .. })) => {
                    Some(format!("submit {} after {tokens:?}", ticket.0))
                }
                Ok(Some(ToOwner::Cancel(ticket))) => Some(format!("cancel {}", ticket.0)),
                Ok(Some(ToOwner::Instance(_))) => Some("instance".to_owned()),
                Ok(None) => None,
                Err(_) => Some("closed".to_owned()),
            }
        }
    }

    /// An entry with a line to an owner that computes by this kernel class.
    pub(in crate::fleet) fn connected(id: u64, class: &str) -> (Remote, Owner) {
        let (line, there) = pair();
        let entry = Entry {
            id: InstanceId(id),
            relief: None,
            last_ticket: AtomicU64::new(0),
            state: Mutex::new(Open {
                line: Some(Arc::new(line)),
                answers: true,
                kind: Some(Kind {
                    protocol: 1,
                    numerics: 1,
                    class: class.to_owned(),
                }),
                ..Open::default()
            }),
            over: AtomicBool::new(false),
        };
        let entry = Arc::new(entry);
        (Remote { entry }, Owner(there))
    }

    /// The owner generates a token.
    pub(in crate::fleet) fn generate(entry: &Entry, ticket: Ticket, token: u32) {
        let text = String::new();
        let reply = Reply::Token {
            token,
            text,
            logprobs: None,
        };
        entry.deliver(ticket, reply);
    }

    fn lost() -> Failure {
        Failure::Lost {
            reason: "rank 1 died three times".to_owned(),
        }
    }

    fn refused() -> Failure {
        Failure::Unavailable {
            reason: "it starts".to_owned(),
        }
    }

    /// Makes what was given back old enough to be settled by an owner that answers.
    fn let_time_go_by(entry: &Entry) {
        for asked in lock(&entry.state).requests.values_mut() {
            if let Some((at, _)) = &mut asked.given_back {
                *at = at.checked_sub(SETTLED_AFTER).unwrap();
            }
        }
    }

    /// A remote with one request, whose failure is kept.
    fn asked(class: &str) -> (Remote, Owner, Ticket, Arc<Mutex<Option<Failure>>>) {
        let (remote, owner) = connected(1, class);
        let failed: Arc<Mutex<Option<Failure>>> = Arc::default();
        let told = Arc::clone(&failed);
        let sink: Sink = Box::new(move |reply| {
            if let Reply::Failed(failure) = reply {
                *lock(&told) = Some(failure);
            }
        });
        let ticket = remote.submit(Request::default(), sink).unwrap();
        assert_eq!(owner.heard().as_deref(), Some("submit 1 after []"));
        (remote, owner, ticket, failed)
    }

    /// A worker that dies again and again loses the answer, and the owner lives on: its caller must
    /// not wait for ever.
    #[test]
    fn what_a_living_owner_loses_is_told() {
        let (remote, owner, ticket, failed) = asked("cpu");
        remote.entry.deliver(ticket, Reply::Failed(lost()));
        remote.entry.settle();
        assert_eq!(*lock(&failed), None, "the owner may be about to go");
        let_time_go_by(&remote.entry);
        say_stand(&remote.entry, State::Loading, 0);
        remote.entry.settle();
        assert_eq!(*lock(&failed), None, "it may go yet");
        say_stand(&remote.entry, State::Ready, 0);
        remote.entry.settle();
        assert_eq!(*lock(&failed), Some(lost()));
        assert_eq!(owner.heard().as_deref(), Some("cancel 1"));
        assert_eq!(remote.entry.load(), 0);
    }

    /// On a class that is not exact an answer that has begun has no other owner to wait for.
    #[test]
    fn an_answer_that_cannot_go_on_ends_while_its_owner_starts_again() {
        for (class, begun, is_over) in [
            ("mlx", true, true),
            ("mlx", false, false),
            ("cpu", true, false),
        ] {
            let (remote, _owner, ticket, failed) = asked(class);
            if begun {
                generate(&remote.entry, ticket, 7);
            }
            remote.entry.deliver(ticket, Reply::Failed(lost()));
            say_stand(&remote.entry, State::Loading, 0);
            remote.entry.settle();
            assert_eq!(*lock(&failed), None, "its owner may hand it on");
            let_time_go_by(&remote.entry);
            remote.entry.settle();
            assert_eq!(lock(&failed).is_some(), is_over, "{class}, begun: {begun}");
        }
    }

    #[test]
    fn what_a_living_owner_refuses_is_asked_again_some_times() {
        let (remote, owner, ticket, failed) = asked("cpu");
        for _ in 0..AGAIN_MAX {
            remote.entry.deliver(ticket, Reply::Failed(refused()));
            let_time_go_by(&remote.entry);
            remote.entry.settle();
            assert_eq!(owner.heard().as_deref(), Some("submit 1 after []"));
        }
        assert_eq!(*lock(&failed), None);
        remote.entry.deliver(ticket, Reply::Failed(refused()));
        let_time_go_by(&remote.entry);
        remote.entry.settle();
        assert_eq!(*lock(&failed), Some(refused()));
    }

    /// The owner says how its instance is.
    pub(in crate::fleet) fn say_stand(entry: &Entry, state: State, running: usize) {
        entry.learn(&Status {
            state,
            running,
            waiting: 0,
        });
    }
}
