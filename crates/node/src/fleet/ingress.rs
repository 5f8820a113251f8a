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

mod owner_side;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_engine::{
    Reply, RequestFailure, RequestMessage, Service, ServiceStatus, Sink, State, Submission, Ticket,
};
use paceline_fleet::InstanceId;
use serde::{Deserialize, Serialize};

use super::{Inner, Numbers};
use crate::workers::connection::{
    ConnectionError, MessageConnection, receive_message, send_message,
};
pub(super) use owner_side::{answer, here};
use paceline_fleet::report;

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
#[derive(derive_more::Debug)]
#[debug("instance {} of another node", self.entry.id)]
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
                Some(IngressOutcome::Over(asked, failure)) => over.push((asked, failure)),
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
                let asked = state.requests.remove(&ticket.first());
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

/// An ingress without a thread, for tests of its callers.
#[cfg(test)]
pub(super) mod testing;
