//! The owner's side of an ingress: its requests to the instance, and the replies.

use std::collections::BTreeSet;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use paceline_base::lock;
use paceline_engine::{Reply, RequestFailure, RequestMessage, Service, Sink, Submission, Ticket};
use paceline_fleet::InstanceId;

use super::super::Inner;
use super::{LOOK_EVERY, OPEN_MAX, ToIngress, ToOwner};
use crate::Instance;
use crate::workers::connection::{
    ConnectionError, MessageConnection, pair, receive_message, send_message,
};

/// Queued replies of an owner. It drops an ingress that falls further behind.
pub(super) const REPLIES_MAX: usize = 16_384;

/// The requests of an ingress whose answers are not complete.
type OpenTickets = Arc<Mutex<BTreeSet<Ticket>>>;

/// Serves an ingress until its connection closes.
pub(in crate::fleet) fn answer(inner: &Arc<Inner>, line: &Arc<dyn MessageConnection>) {
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
pub(in crate::fleet) fn here(inner: &Arc<Inner>) -> Option<Arc<dyn MessageConnection>> {
    let (line, there) = pair();
    let (inner, there): (_, Arc<dyn MessageConnection>) = (Arc::clone(inner), Arc::new(there));
    let thread = std::thread::Builder::new().name("answers".to_owned());
    thread.spawn(move || answer(&inner, &there)).ok()?;
    Some(Arc::new(line))
}

/// `ingress`: whether the instance still answers, and no successor has replaced it.
pub(super) fn serve(
    line: &Arc<dyn MessageConnection>,
    instance: &Instance,
    answers: &dyn Fn() -> bool,
) -> Result<(), ConnectionError> {
    send_message(&**line, &ToIngress::Ready)?;
    let mut split = String::new();
    send_split(&**line, instance, &mut split)?;
    let (replies, queue) = sync_channel::<ToIngress>(REPLIES_MAX);
    let open = OpenTickets::default();
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
pub(super) fn send_split(
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
pub(super) fn listen(
    line: &Arc<dyn MessageConnection>,
    (instance, answers): (&Instance, &dyn Fn() -> bool),
    open: &OpenTickets,
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
                let is_open = lock(open).remove(&ticket);
                if is_open {
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
pub(super) fn submit(
    line: &Arc<dyn MessageConnection>,
    instance: &Instance,
    open: &OpenTickets,
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
    let (out, close, all) = (replies.clone(), Arc::clone(line), Arc::clone(open));
    let sink: Sink = Box::new(move |reply| {
        if matches!(reply, Reply::Finished { .. } | Reply::Failed(_)) {
            lock(&all).remove(&ticket);
        }
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
