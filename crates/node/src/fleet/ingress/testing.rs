//! An ingress without a thread, for tests of its callers.

use crate::workers::connection::pair;
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
    let (remote, _owner, ticket, failed) = asked();
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
