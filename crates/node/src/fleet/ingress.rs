//! Ingress: requests on one node for an instance that another node owns, and the owner's side.
//!
//! ```text
//! entry -> Request(submission, or cancel)
//! owner -> Reply(ticket, reply), Stand(how its instance is), Split(how the model is cut): the last
//!          two when they change
//! ```
//! The ingress keeps each request with the tokens of its answer so far. If the owner is lost or its
//! instance does not answer, [`RequestFailover`] moves the requests to another replica. Without one
//! they go to the next owner. Either way the answer continues after those tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_engine::{
    Reply, RequestFailure, RequestMessage, Service, ServiceStatus, Sink, State, Submission, Ticket,
};
use paceline_fleet::InstanceId;
use serde::{Deserialize, Serialize};

use super::{Inner, Numbers};
use crate::Instance;
use crate::workers::connection::{
    ConnectionError, MessageConnection, pair, receive_message, send_message,
};
use paceline_fleet::report;

/// Queued replies of an owner. It drops an ingress that falls further behind.
const REPLIES_MAX: usize = 16_384;

/// Maximum open requests of one ingress.
const OPEN_MAX: usize = 1024;

/// Interval at which a thread checks whether it is still needed.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Longest time without an owner before answers are lost: detection, a new placement and the load
/// of a large model from disk.
const OWNERLESS_LIMIT: Duration = Duration::from_secs(120);

/// Longest time without a path to an owner that lives before new requests are refused. A cut path
/// is known, and another one found, within seconds.
const CUT_OFF_LIMIT: Duration = Duration::from_secs(10);

/// Time after which an owner that returned a request, and still answers, is not shutting down. A
/// departing owner returns its requests first; it checks every [`LOOK_EVERY`] whether it still owns
/// the instance and closes the connection if not.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Maximum resubmissions of a request to an owner that returns it while it answers others.
const AGAIN_MAX: u8 = 3;

#[derive(Serialize, Deserialize)]
pub(super) enum ToOwner {
    /// The first message.
    Instance(u64),
    /// The first message to a third node, which passes the others on to the owner.
    Through(u64),
    Request(RequestMessage),
}

#[derive(Serialize, Deserialize)]
enum ToIngress {
    /// The answer to `Instance`.
    Ready,
    Reply(Ticket, Reply),
    /// Status of the instance, with the requests of every ingress.
    Stand(ServiceStatus),
    /// Name of the split; sent after `Ready`, and before the first reply after a change.
    Split(String),
}

/// Reads `bytes` as messages between an ingress and an owner, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToOwner>(bytes);
    let _ = serde_json::from_slice::<ToIngress>(bytes);
}

/// Serves an ingress until its connection closes.
pub(super) fn answer(inner: &Arc<Inner>, line: &Arc<dyn MessageConnection>) {
    let id = match receive_message(&**line, LOOK_EVERY * 10) {
        Ok(Some(ToOwner::Instance(id))) => InstanceId(id),
        Ok(Some(ToOwner::Through(id))) => return inner.pass_on(line, InstanceId(id)),
        _ => return line.close(),
    };
    if let Some(instance) = inner.ready_instance(id) {
        let answers = || inner.answers_with(id, &instance);
        // The ingress sees the closed connection.
        let _: Result<(), ConnectionError> = serve(line, &instance, &answers);
    }
    line.close();
}

/// A connection to this node's own instances.
pub(super) fn here(inner: &Arc<Inner>) -> Option<Arc<dyn MessageConnection>> {
    let (line, there) = pair();
    let (inner, there): (_, Arc<dyn MessageConnection>) = (Arc::clone(inner), Arc::new(there));
    let thread = std::thread::Builder::new().name("answers".to_owned());
    thread.spawn(move || answer(&inner, &there)).ok()?;
    Some(Arc::new(line))
}

/// `ingress`: whether the instance still answers, and no successor has replaced it.
fn serve(
    line: &Arc<dyn MessageConnection>,
    instance: &Instance,
    answers: &dyn Fn() -> bool,
) -> Result<(), ConnectionError> {
    send_message(&**line, &ToIngress::Ready)?;
    let mut split = String::new();
    send_split(&**line, instance, &mut split)?;
    let (replies, queue) = sync_channel::<ToIngress>(REPLIES_MAX);
    let open: Mutex<BTreeSet<Ticket>> = Mutex::default();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for message in queue {
                let told = match message {
                    ToIngress::Reply(_, Reply::PromptRead { .. }) => {
                        send_split(&**line, instance, &mut split)
                    }
                    _ => Ok(()),
                };
                if told.and_then(|()| send_message(&**line, &message)).is_err() {
                    line.close();
                    break;
                }
            }
        });
        let ended = listen(line, (instance, answers), &open, &replies);
        for ticket in &*lock(&open) {
            instance.cancel(*ticket);
        }
        drop(replies);
        ended
    })
}

/// Sends the name of the split if it differs from `told`, the last one sent.
fn send_split(
    line: &dyn MessageConnection,
    instance: &Instance,
    told: &mut String,
) -> Result<(), ConnectionError> {
    let split = instance.split().to_string();
    if *told == split {
        return Ok(());
    }
    told.clone_from(&split);
    send_message(line, &ToIngress::Split(split))
}

/// Receives an ingress's requests until its connection closes, and sends it status updates.
fn listen(
    line: &Arc<dyn MessageConnection>,
    (instance, answers): (&Instance, &dyn Fn() -> bool),
    open: &Mutex<BTreeSet<Ticket>>,
    replies: &SyncSender<ToIngress>,
) -> Result<(), ConnectionError> {
    let mut told = None;
    loop {
        let status = instance.status();
        if told.as_ref() != Some(&status) {
            // If the queue is full, replies have priority over the status.
            let sent = replies.try_send(ToIngress::Stand(status.clone()));
            told = sent.is_ok().then_some(status);
        }
        let heard = receive_message(&**line, LOOK_EVERY)?;
        if !answers() {
            return Err(ConnectionError::new("the instance is another one now"));
        }
        match heard {
            Some(ToOwner::Request(RequestMessage::Submit(submission))) => {
                submit(line, instance, open, replies, submission);
            }
            Some(ToOwner::Request(RequestMessage::Cancel(ticket))) => {
                if lock(open).remove(&ticket) {
                    instance.cancel(ticket);
                }
            }
            Some(ToOwner::Instance(_) | ToOwner::Through(_)) => {
                return Err(ConnectionError::new("the entry said it twice"));
            }
            None => {}
        }
    }
}

/// Submits a request of an ingress to the instance.
fn submit(
    line: &Arc<dyn MessageConnection>,
    instance: &Instance,
    open: &Mutex<BTreeSet<Ticket>>,
    replies: &SyncSender<ToIngress>,
    submission: Submission,
) {
    let ticket = submission.ticket;
    let refuse = |failure| {
        // A full queue has closed the connection.
        let _: Result<(), _> = replies.try_send(ToIngress::Reply(ticket, Reply::Failed(failure)));
    };
    if lock(open).len() >= OPEN_MAX {
        return refuse(RequestFailure::Busy { waiting: OPEN_MAX });
    }
    let (out, close) = (replies.clone(), Arc::clone(line));
    let sink: Sink = Box::new(move |reply| {
        if out.try_send(ToIngress::Reply(ticket, reply)).is_err() {
            close.close(); // too far behind, or gone
        }
    });
    lock(open).insert(ticket);
    if let Err(failure) = instance.accept(submission, sink) {
        lock(open).remove(&ticket);
        refuse(failure);
    }
}

/// Receives the owner's first two messages after `Ready`: split and status. The owner has both at
/// hand, so the wait is short.
fn introduction(
    line: &dyn MessageConnection,
) -> Result<(Option<String>, Option<ServiceStatus>), ConnectionError> {
    let mut cut = None;
    let begun = Instant::now();
    while begun.elapsed() < LOOK_EVERY {
        match receive_message(line, LOOK_EVERY)? {
            Some(ToIngress::Split(split)) => cut = Some(split),
            Some(ToIngress::Stand(status)) => return Ok((cut, Some(status))),
            _ => {}
        }
    }
    Ok((cut, None))
}

/// Failover to other instances of the same model.
pub(super) trait RequestFailover: Send + Sync {
    /// Moves the requests of an ingress whose instance does not answer to other instances. Returns
    /// whether any moved. The ingress's own thread calls this, so no reply to them is in flight.
    fn relieve(&self, from: &Ingress) -> bool;
}

/// Name of the split before an owner has sent one.
pub(super) const UNKNOWN: &str = "unknown";

/// A remote instance as a local service. Dropping it moves open requests to the failover target and
/// loses the rest.
pub(super) struct IngressService {
    pub(super) entry: Arc<Ingress>,
}

/// This node's requests for one instance, and the connection to its owner.
pub(super) struct Ingress {
    id: InstanceId,
    relief: Option<Weak<dyn RequestFailover>>,
    state: Mutex<IngressState>,
    over: AtomicBool,
}

#[derive(Default)]
struct IngressState {
    /// By the tickets of their first submissions.
    requests: BTreeMap<Ticket, IngressRequest>,
    /// To the owner, while there is one.
    line: Option<Arc<dyn MessageConnection>>,
    /// State of the instance by the owner's last status.
    stand: Option<State>,
    /// Running requests of other nodes, by the owner's last status.
    others: usize,
    /// Revision of the numerics and kernel classes of the instance.
    numbers: Option<Numbers>,
    /// Set once no further request is accepted.
    is_over: bool,
    /// Name of the split, as last sent by an owner.
    split: Option<String>,
}

impl IngressState {
    /// Sends a message to the owner. If there is none or it is lost, `connect` sends all state to
    /// the next one.
    fn send_to_owner(&self, message: &ToOwner) {
        if let Some(line) = &self.line {
            let _: Result<(), _> = send_message(&**line, message);
        }
    }

    /// Whether the instance answers, by the owner's last status.
    fn answers(&self) -> bool {
        self.stand == Some(State::Ready)
    }

    /// Decides about a request that the owner returned.
    fn settle(&mut self, ticket: Ticket) -> Option<IngressOutcome> {
        let answers = self.answers();
        let asked = self.requests.get_mut(&ticket)?;
        let (_, failure) = asked.given_back.take()?;
        let is_refused = matches!(failure, RequestFailure::Unavailable { .. });
        if is_refused && answers && asked.again < AGAIN_MAX {
            asked.again += 1;
            return Some(IngressOutcome::Again(asked.submit()));
        }
        let asked = self.requests.remove(&ticket)?;
        Some(IngressOutcome::Over(asked, failure))
    }
}

/// A request and its answer so far.
pub(super) struct IngressRequest {
    /// The last one.
    submission: Submission,
    prompt_read: bool,
    sink: Option<Sink>,
    /// When the owner returned it, and its reason.
    given_back: Option<(Instant, RequestFailure)>,
    /// Resubmissions since then.
    again: u8,
}

/// Decision about a returned request.
enum IngressOutcome {
    /// Submit it again.
    Again(ToOwner),
    /// Report the failure to its caller.
    Over(IngressRequest, RequestFailure),
}

impl IngressRequest {
    pub(super) fn new(submission: Submission, sink: Sink) -> Self {
        Self {
            prompt_read: !submission.tokens.is_empty(),
            submission,
            sink: Some(sink),
            given_back: None,
            again: 0,
        }
    }

    /// Whether it was returned long enough ago that its owner is not shutting down.
    fn is_settled(&self, answers: bool) -> bool {
        let limit = match answers {
            true => SETTLED_AFTER,
            false => OWNERLESS_LIMIT,
        };
        let given_back = self.given_back.as_ref();
        given_back.is_some_and(|(at, _)| at.elapsed() >= limit)
    }

    /// Tokens of the prompt.
    pub(super) fn prompt(&self) -> &[u32] {
        &self.submission.request.prompt
    }

    /// Whether its answer has begun: then only an instance with the same numerics can continue it.
    pub(super) const fn has_begun(&self) -> bool {
        !self.submission.tokens.is_empty()
    }

    /// The next submission. No reply to an earlier one is for it.
    fn submit(&mut self) -> ToOwner {
        self.submission.ticket = self.submission.ticket.again();
        ToOwner::Request(RequestMessage::Submit(self.submission.clone()))
    }

    const fn cancel(&self) -> ToOwner {
        ToOwner::Request(RequestMessage::Cancel(self.submission.ticket))
    }
}

impl IngressService {
    /// Starts a thread that keeps a connection to the current owner.
    ///
    /// # Errors
    /// What the system says when it refuses the thread.
    pub(super) fn start(
        inner: &Arc<Inner>,
        id: InstanceId,
        relief: Option<Weak<dyn RequestFailover>>,
    ) -> std::io::Result<Self> {
        let entry = Arc::new(Ingress {
            id,
            relief,
            state: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let (inner, own) = (Arc::downgrade(inner), Arc::clone(&entry));
        let thread = std::thread::Builder::new().name("entry".to_owned());
        thread.spawn(move || own.run(&inner))?;
        Ok(Self { entry })
    }
}

impl Ingress {
    pub(super) const fn id(&self) -> InstanceId {
        self.id
    }

    /// Whether the instance answers now, as far as this node knows.
    pub(super) fn is_ready(&self) -> bool {
        let state = lock(&self.state);
        state.line.is_some() && state.answers()
    }

    /// Running requests of the instance: those of this ingress, and those of others by the owner's
    /// last status.
    pub(super) fn load(&self) -> usize {
        let state = lock(&self.state);
        state.requests.len() + state.others
    }

    /// Revision of the numerics and kernel classes of the instance, as of the last known owner.
    pub(super) fn numbers(&self) -> Option<Numbers> {
        lock(&self.state).numbers.clone()
    }

    /// Accepts a request of a client or of another ingress. Returns it at [`OPEN_MAX`] open
    /// requests, or after the end.
    pub(super) fn take(&self, mut asked: IngressRequest) -> Result<(), IngressRequest> {
        let mut state = lock(&self.state);
        if state.is_over || state.requests.len() >= OPEN_MAX {
            return Err(asked);
        }
        (asked.given_back, asked.again) = (None, 0);
        let submit = asked.submit();
        state
            .requests
            .insert(asked.submission.ticket.first(), asked);
        state.send_to_owner(&submit);
        Ok(())
    }

    /// Why [`take`](Self::take) returns a request.
    pub(super) fn refusal(&self) -> RequestFailure {
        let state = lock(&self.state);
        match state.is_over {
            true => RequestFailure::Unavailable {
                reason: "the model was unloaded".to_owned(),
            },
            false => RequestFailure::Busy {
                waiting: state.requests.len(),
            },
        }
    }

    /// Drops a request; ignores one that is not open here.
    pub(super) fn cancel(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        if let Some(asked) = state.requests.remove(&ticket.first()) {
            state.send_to_owner(&asked.cancel());
        }
    }

    /// Removes and returns all open requests, for a [`RequestFailover`]. It returns unplaced ones
    /// by [`keep`](Self::keep).
    pub(super) fn give_up(&self) -> impl Iterator<Item = IngressRequest> + use<> {
        std::mem::take(&mut lock(&self.state).requests).into_values()
    }

    /// Puts a request back that [`give_up`](Self::give_up) removed.
    pub(super) fn keep(&self, asked: IngressRequest) {
        let ticket = asked.submission.ticket.first();
        lock(&self.state).requests.insert(ticket, asked);
    }

    /// Closes the connection, so that the owner stops this ingress's requests. The next connection
    /// starts fresh: no late reply can reach a request that moved away and returned.
    pub(super) fn hang_up(&self) {
        if let Some(line) = lock(&self.state).line.take() {
            line.close();
        }
    }

    /// Keeps a connection to the owner until the end.
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
            } else if since.elapsed() > CUT_OFF_LIMIT
                && let Some(reason) = inner.why_cut_off(self.id)
            {
                self.refuse(&reason);
            }
            drop(inner);
            std::thread::sleep(LOOK_EVERY);
        }
        lock(&self.state).is_over = true;
        self.relieve();
        self.lose("the model was unloaded");
    }

    /// Connects to the owner, if it has the instance, and submits all open requests.
    fn connect(&self, inner: &Arc<Inner>) -> Option<Arc<dyn MessageConnection>> {
        let line = inner.reach_owner(self.id)?;
        let Ok(Some(ToIngress::Ready)) = receive_message(&*line, LOOK_EVERY * 10) else {
            return None;
        };
        let (split, stand) = introduction(&*line).ok()?;
        let numbers = inner.numbers_of(self.id);
        let mut state = lock(&self.state);
        if split.is_some() {
            state.split = split;
        }
        (state.stand, state.others, state.numbers) = (Some(State::Ready), 0, numbers);
        for asked in state.requests.values_mut() {
            (asked.given_back, asked.again) = (None, 0);
            send_message(&*line, &asked.submit()).ok()?;
        }
        state.line = Some(Arc::clone(&line));
        drop(state);
        if let Some(status) = stand {
            self.learn(&status);
        }
        Some(line)
    }

    /// Delivers replies until the connection breaks or the requests have moved.
    fn converse(&self, line: &dyn MessageConnection) {
        while !self.over.load(Ordering::SeqCst) {
            match receive_message(line, LOOK_EVERY) {
                Ok(Some(ToIngress::Reply(ticket, reply))) => self.deliver(ticket, reply),
                Ok(Some(ToIngress::Stand(status))) => self.learn(&status),
                Ok(Some(ToIngress::Split(split))) => lock(&self.state).split = Some(split),
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

    /// Stores the owner's status.
    fn learn(&self, status: &ServiceStatus) {
        let mut state = lock(&self.state);
        state.stand = Some(status.state.clone());
        let all = status.running + status.waiting;
        state.others = all.saturating_sub(state.requests.len());
    }

    /// Moves the open requests to other instances; returns whether any moved.
    fn relieve(&self) -> bool {
        let relief = self.relief.as_ref().and_then(Weak::upgrade);
        let has_open = !lock(&self.state).requests.is_empty();
        has_open && relief.is_some_and(|relief| relief.relieve(self))
    }

    /// Resubmits or fails the requests that the owner has returned.
    fn settle(&self) {
        let mut state = lock(&self.state);
        let answers = state.answers();
        let settled = state.requests.iter();
        let settled = settled.filter(|(_, asked)| asked.is_settled(answers));
        let tickets: Vec<Ticket> = settled.map(|(ticket, _)| *ticket).collect();
        let mut over = Vec::new();
        for ticket in tickets {
            // Sent under the lock, so that a concurrent cancel cannot overtake it.
            match state.settle(ticket) {
                Some(IngressOutcome::Again(submit)) => state.send_to_owner(&submit),
                Some(IngressOutcome::Over(asked, failure)) => {
                    state.send_to_owner(&asked.cancel()); // the owner forgets it
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
        let of_it = |asked: &&mut IngressRequest| asked.submission.ticket == ticket;
        let Some(asked) = state.requests.get_mut(&ticket.first()).filter(of_it) else {
            return;
        };
        match &reply {
            Reply::PromptRead { .. } if std::mem::replace(&mut asked.prompt_read, true) => return,
            Reply::Token { token, .. } => {
                asked.submission.tokens.push(*token);
                asked.again = 0;
            }
            // A departing owner sends the same failure; then the next owner continues.
            Reply::Failed(
                failure @ (RequestFailure::Lost { .. } | RequestFailure::Unavailable { .. }),
            ) => {
                asked.given_back = Some((Instant::now(), failure.clone()));
                return;
            }
            Reply::Finished { .. } | Reply::Failed(_) => {
                let forget = asked.cancel();
                let asked = state.requests.remove(&ticket.first());
                state.send_to_owner(&forget);
                drop(state);
                if let Some(mut sink) = asked.and_then(|asked| asked.sink) {
                    sink(reply);
                }
                return;
            }
            Reply::PromptRead { .. } | Reply::Continued => {}
        }
        // A sink may cancel, so it must not be called under the lock.
        let Some(mut sink) = asked.sink.take() else {
            return;
        };
        drop(state);
        sink(reply);
        if let Some(asked) = lock(&self.state).requests.get_mut(&ticket.first()) {
            asked.sink = Some(sink);
        }
    }

    /// Fails the requests whose answers have not begun; the others wait for the owner.
    fn refuse(&self, reason: &str) {
        let mut state = lock(&self.state);
        let all = std::mem::take(&mut state.requests).into_iter();
        let (begun, new): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.partition(|(_, asked)| asked.has_begun());
        state.requests = begun;
        drop(state);
        for mut sink in new.into_values().filter_map(|asked| asked.sink) {
            let reason = reason.to_owned();
            sink(Reply::Failed(RequestFailure::Unavailable { reason }));
        }
    }

    fn lose(&self, reason: &str) {
        let all = std::mem::take(&mut lock(&self.state).requests);
        for mut sink in all.into_values().filter_map(|asked| asked.sink) {
            let reason = reason.to_owned();
            sink(Reply::Failed(RequestFailure::Lost { reason }));
        }
    }

    /// Name of the split, once an owner has sent it.
    pub(super) fn cut(&self) -> Option<String> {
        lock(&self.state).split.clone()
    }

    /// Status of the instance as this node sees it. It takes requests also while the owner does not
    /// answer, so it is never [`State::Failed`].
    pub(super) fn status(&self) -> ServiceStatus {
        let state = lock(&self.state);
        let stand = state.line.as_ref().and(state.stand.as_ref());
        let started = state.requests.values().filter(|asked| asked.prompt_read);
        let running = started.count();
        ServiceStatus {
            state: match stand {
                Some(State::Ready) => State::Ready,
                Some(State::Recovering(reason) | State::Failed(reason)) => {
                    State::Recovering(reason.clone())
                }
                Some(State::Loading) => State::Recovering("its owner loads it".to_owned()),
                None => State::Recovering("no node owns the model at the moment".to_owned()),
            },
            running,
            waiting: state.requests.len() - running,
        }
    }
}

impl Service for IngressService {
    fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        let taken = self.entry.take(IngressRequest::new(submission, sink));
        taken.map_err(|_| self.entry.refusal())
    }

    fn cancel(&self, ticket: Ticket) {
        self.entry.cancel(ticket);
    }

    fn cut(&self) -> String {
        self.entry.cut().unwrap_or_else(|| UNKNOWN.to_owned())
    }

    fn status(&self) -> ServiceStatus {
        self.entry.status()
    }
}

impl Drop for IngressService {
    fn drop(&mut self) {
        self.entry.over.store(true, Ordering::SeqCst);
    }
}

impl fmt::Debug for IngressService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "instance {} of another node", self.entry.id)
    }
}

/// An ingress without a thread, for tests of its callers.
#[cfg(test)]
pub(super) mod testing {
    use paceline_engine::GenerationRequest;

    use super::*;
    use crate::workers::connection::MemoryConnection;

    /// The owner's end of an ingress's connection.
    pub(in crate::fleet) struct FakeOwner(MemoryConnection);

    impl FakeOwner {
        /// The ingress's next message, such as `submit 1 after [7]`, if there is one.
        pub(in crate::fleet) fn heard(&self) -> Option<String> {
            match receive_message(&self.0, Duration::ZERO) {
                Ok(Some(ToOwner::Request(RequestMessage::Submit(it)))) => Some(format!(
                    "submit {} after {:?}",
                    number(it.ticket),
                    it.tokens
                )),
                Ok(Some(ToOwner::Request(RequestMessage::Cancel(ticket)))) => {
                    Some(format!("cancel {}", number(ticket)))
                }
                Ok(Some(ToOwner::Instance(_) | ToOwner::Through(_))) => Some("instance".to_owned()),
                Ok(None) => None,
                Err(_) => Some("closed".to_owned()),
            }
        }
    }

    /// An ingress connected to an owner of this kernel class.
    pub(in crate::fleet) fn connected(id: u64, class: &str) -> (IngressService, FakeOwner) {
        let (line, there) = pair();
        let entry = Ingress {
            id: InstanceId(id),
            relief: None,
            state: Mutex::new(IngressState {
                line: Some(Arc::new(line)),
                stand: Some(State::Ready),
                numbers: Some((1, class.to_owned())),
                ..IngressState::default()
            }),
            over: AtomicBool::new(false),
        };
        let entry = Arc::new(entry);
        (IngressService { entry }, FakeOwner(there))
    }

    /// The request with this number, which is not 0.
    pub(in crate::fleet) fn numbered(number: u64, request: GenerationRequest) -> Submission {
        Submission {
            ticket: Ticket(number << 8),
            ..Submission::new(request, Vec::new())
        }
    }

    const fn number(ticket: Ticket) -> u64 {
        ticket.0 >> 8
    }

    /// The owner replies to the last submission of a request.
    fn reply(entry: &Ingress, ticket: Ticket, reply: Reply) {
        let ticket = lock(&entry.state).requests[&ticket].submission.ticket;
        entry.deliver(ticket, reply);
    }

    /// The owner generates a token.
    pub(in crate::fleet) fn generate(entry: &Ingress, ticket: Ticket, token: u32) {
        let text = String::new();
        let generated = Reply::Token {
            token,
            text,
            logprobs: None,
        };
        reply(entry, ticket, generated);
    }

    fn lost() -> RequestFailure {
        RequestFailure::Lost {
            reason: "rank 1 died three times".to_owned(),
        }
    }

    fn refused() -> RequestFailure {
        RequestFailure::Unavailable {
            reason: "it starts".to_owned(),
        }
    }

    /// Ages the returned requests, so that an owner that answers settles them.
    fn let_time_go_by(entry: &Ingress) {
        for asked in lock(&entry.state).requests.values_mut() {
            if let Some((at, _)) = &mut asked.given_back {
                *at = at.checked_sub(SETTLED_AFTER).unwrap();
            }
        }
    }

    /// A remote instance with one request, whose failure is recorded.
    fn asked() -> (
        IngressService,
        FakeOwner,
        Ticket,
        Arc<Mutex<Option<RequestFailure>>>,
    ) {
        let (remote, owner) = connected(1, "cpu");
        let failed: Arc<Mutex<Option<RequestFailure>>> = Arc::default();
        let told = Arc::clone(&failed);
        let sink: Sink = Box::new(move |reply| {
            if let Reply::Failed(failure) = reply {
                *lock(&told) = Some(failure);
            }
        });
        let submission = numbered(1, GenerationRequest::default());
        let ticket = submission.ticket;
        remote.accept(submission, sink).unwrap();
        assert_eq!(owner.heard().as_deref(), Some("submit 1 after []"));
        (remote, owner, ticket, failed)
    }

    /// If a worker dies repeatedly, the live owner loses the answer: the caller must get the
    /// failure.
    #[test]
    fn what_a_living_owner_loses_is_told() {
        let (remote, owner, ticket, failed) = asked();
        reply(&remote.entry, ticket, Reply::Failed(lost()));
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

    #[test]
    fn what_a_living_owner_refuses_is_asked_again_some_times() {
        let (remote, owner, ticket, failed) = asked();
        for _ in 0..AGAIN_MAX {
            reply(&remote.entry, ticket, Reply::Failed(refused()));
            let_time_go_by(&remote.entry);
            let before = lock(&remote.entry.state).requests[&ticket]
                .submission
                .ticket;
            remote.entry.settle();
            assert_eq!(owner.heard().as_deref(), Some("submit 1 after []"));
            remote.entry.deliver(before, Reply::Failed(lost())); // late, and ignored
        }
        assert_eq!(*lock(&failed), None);
        reply(&remote.entry, ticket, Reply::Failed(refused()));
        let_time_go_by(&remote.entry);
        remote.entry.settle();
        assert_eq!(*lock(&failed), Some(refused()));
    }

    #[test]
    fn only_requests_that_have_not_begun_are_refused_without_a_path() {
        let (remote, _owner, ticket, failed) = asked();
        generate(&remote.entry, ticket, 7);
        remote.entry.refuse("no path answers");
        assert_eq!(*lock(&failed), None, "its client has a token");
        let (remote, _owner, _, failed) = asked();
        remote.entry.refuse("no path answers");
        let reason = "no path answers".to_owned();
        assert_eq!(*lock(&failed), Some(RequestFailure::Unavailable { reason }));
    }

    #[test]
    fn an_instance_that_recovers_is_not_ready_elsewhere() {
        let (remote, _owner) = connected(1, "cpu");
        assert_eq!(remote.status().state, State::Ready);
        let reason = || "rank 1 died".to_owned();
        for state in [State::Recovering(reason()), State::Failed(reason())] {
            say_stand(&remote.entry, state, 0);
            assert_eq!(remote.status().state, State::Recovering(reason()));
        }
        say_stand(&remote.entry, State::Ready, 0);
        assert_eq!(remote.status().state, State::Ready);
    }

    /// The owner sends a status.
    pub(in crate::fleet) fn say_stand(entry: &Ingress, state: State, running: usize) {
        entry.learn(&ServiceStatus {
            state,
            running,
            waiting: 0,
        });
    }
}
