//! Answers that move from one service to another while they are computed.
//!
//! ```text
//! callers -> Handover -> service A        change: A gives its sequences back (snapshots), A is
//!               |                         dropped, B is started, B goes on with them
//!               +-----> service B         meanwhile requests are kept, cancelled ones forgotten
//! ```
//! Each caller hears every token once and in order, as if nothing had happened: a snapshot holds
//! all that decides how a sequence goes on, and a service gives it back after the replies before.
//! What moves is computed again from its tokens, which takes as long as reading such a prompt.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use paceline_base::lock;

use crate::{Failure, Reply, Request, Runner, Service, Sink, Snapshot, State, Status, Ticket};

/// A service whose sequences can go on in another one.
pub trait Movable: Service {
    /// Takes every request out, in the order they came in; all replies so far were given, and no
    /// other comes. Blocks for up to a step.
    ///
    /// # Errors
    /// [`Failure::Unavailable`] when what computes is gone.
    fn take_all(&self) -> Result<Vec<(Ticket, Snapshot)>, Failure>;

    /// Goes on with a request that was taken out of a service of the same model.
    ///
    /// # Errors
    /// [`Failure::Unavailable`] when what computes is gone; what is wrong with a snapshot may come
    /// as [`Reply::Failed`].
    fn resume(&self, snapshot: Snapshot, sink: Sink) -> Result<Ticket, Failure>;
}

impl Movable for Runner {
    fn take_all(&self) -> Result<Vec<(Ticket, Snapshot)>, Failure> {
        self.take_all()
    }

    fn resume(&self, snapshot: Snapshot, sink: Sink) -> Result<Ticket, Failure> {
        self.resume(snapshot, sink)
    }
}

/// A service that can be replaced by another one of the same model.
pub struct Handover<S> {
    now: Mutex<Now<S>>,
    /// Apart from the service, whose own threads call sinks that look in here.
    open: Arc<Table>,
}

/// What computes now.
enum Now<S> {
    One(Arc<S>),
    /// It is being replaced.
    Changing,
    Gone(String),
}

#[derive(Default)]
struct Table(Mutex<Requests>);

#[derive(Default)]
struct Requests {
    open: BTreeMap<Ticket, Open>,
    last_ticket: u64,
}

struct Open {
    sink: Arc<Mutex<Sink>>,
    place: Place,
}

/// Where a request is.
enum Place {
    /// In the service, by the name that it has there once that is known.
    Sent(Option<Ticket>),
    /// Kept until there is a service again.
    Begins(Box<Request>),
    GoesOn(Box<Snapshot>),
}

impl<S: Movable> Handover<S> {
    /// Begins with `service`.
    pub fn new(service: S) -> Self {
        Self {
            now: Mutex::new(Now::One(Arc::new(service))),
            open: Arc::default(),
        }
    }

    /// What computes now; `None` while it is replaced, and when that failed.
    pub fn current(&self) -> Option<Arc<S>> {
        match &*lock(&self.now) {
            Now::One(service) => Some(Arc::clone(service)),
            Now::Changing | Now::Gone(_) => None,
        }
    }

    /// Replaces the service by what `start` gives, after the old one was dropped: two may not find
    /// room. Open requests go on there.
    ///
    /// # Errors
    /// What the old service says instead of its requests, or `start` says: there is no service any
    /// more then, and all open requests are lost. [`Failure::Unavailable`], too, while another
    /// call is under way, which changes nothing.
    pub fn change(&self, start: impl FnOnce() -> Result<S, String>) -> Result<(), Failure> {
        let old = {
            let mut now = lock(&self.now);
            match std::mem::replace(&mut *now, Now::Changing) {
                Now::One(service) => service,
                Now::Changing => return Err(unavailable("it is being replaced")),
                Now::Gone(reason) => {
                    *now = Now::Gone(reason.clone());
                    return Err(unavailable(&reason));
                }
            }
        };
        let taken = old.take_all();
        let kept = taken.map(|taken| self.open.keep(taken));
        drop(old);
        let next = kept.and_then(|()| start().map_err(|reason| unavailable(&reason)));
        match next {
            Ok(service) => self.go_on(service),
            Err(failure) => {
                *lock(&self.now) = Now::Gone(failure.to_string());
                self.open.lose(&failure.to_string());
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Hands all that was kept to `service`. Callers wait, so that nothing comes in between.
    fn go_on(&self, service: S) {
        let mut now = lock(&self.now);
        for (ticket, place) in self.open.kept() {
            // Nothing when it was cancelled just now.
            let Some(sink) = self.open.sink(ticket) else {
                continue;
            };
            let sent = match place {
                Place::Begins(request) => service.submit(*request, sink),
                Place::GoesOn(snapshot) => service.resume(*snapshot, sink),
                Place::Sent(_) => continue,
            };
            match sent {
                Ok(own) => self.open.sent(ticket, own),
                Err(failure) => self.open.end(ticket, Reply::Failed(failure)),
            }
        }
        *now = Now::One(Arc::new(service));
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Requests> {
        lock(&self.0)
    }

    fn insert(&self, sink: Sink, place: Place) -> Ticket {
        let mut requests = self.lock();
        requests.last_ticket += 1;
        let ticket = Ticket(requests.last_ticket);
        let sink = Arc::new(Mutex::new(sink));
        requests.open.insert(ticket, Open { sink, place });
        ticket
    }

    /// A sink for whatever service has the request; the last reply forgets it.
    fn sink(self: &Arc<Self>, ticket: Ticket) -> Option<Sink> {
        let sink = Arc::clone(&self.lock().open.get(&ticket)?.sink);
        let table = Arc::clone(self);
        Some(Box::new(move |reply| {
            if matches!(reply, Reply::Finished { .. } | Reply::Failed(_)) {
                table.end(ticket, reply);
            } else {
                (lock(&sink))(reply);
            }
        }))
    }

    fn sent(&self, ticket: Ticket, own: Ticket) {
        // Nothing when its last reply came already.
        if let Some(open) = self.lock().open.get_mut(&ticket) {
            open.place = Place::Sent(Some(own));
        }
    }

    /// The last reply to a request that is open.
    fn end(&self, ticket: Ticket, reply: Reply) {
        let open = self.lock().open.remove(&ticket);
        if let Some(open) = open {
            (lock(&open.sink))(reply);
        }
    }

    fn forget(&self, ticket: Ticket) -> Option<Open> {
        self.lock().open.remove(&ticket)
    }

    /// Keeps what a service gave back.
    fn keep(&self, taken: Vec<(Ticket, Snapshot)>) {
        let mut requests = self.lock();
        let mut taken: BTreeMap<Ticket, Snapshot> = taken.into_iter().collect();
        for open in requests.open.values_mut() {
            if let Place::Sent(Some(own)) = open.place
                && let Some(snapshot) = taken.remove(&own)
            {
                open.place = Place::GoesOn(Box::new(snapshot));
            }
        }
    }

    /// All that is kept, in the order it came in.
    fn kept(&self) -> Vec<(Ticket, Place)> {
        let mut requests = self.lock();
        let kept = requests.open.iter_mut().filter_map(|(ticket, open)| {
            let is_kept = !matches!(open.place, Place::Sent(_));
            is_kept.then(|| {
                let place = std::mem::replace(&mut open.place, Place::Sent(None));
                (*ticket, place)
            })
        });
        kept.collect()
    }

    fn lose(&self, reason: &str) {
        let open = std::mem::take(&mut self.lock().open);
        for open in open.into_values() {
            let reason = reason.to_owned();
            (lock(&open.sink))(Reply::Failed(Failure::Lost { reason }));
        }
    }
}

impl<S: Movable> Service for Handover<S> {
    fn submit(&self, request: Request, sink: Sink) -> Result<Ticket, Failure> {
        let now = lock(&self.now);
        let service = match &*now {
            Now::Gone(reason) => return Err(unavailable(reason)),
            Now::Changing => {
                let place = Place::Begins(Box::new(request));
                return Ok(self.open.insert(sink, place));
            }
            Now::One(service) => service,
        };
        let ticket = self.open.insert(sink, Place::Sent(None));
        let own = self.open.sink(ticket);
        let own = own.ok_or_else(|| unavailable("it was cancelled"))?;
        match service.submit(request, own) {
            Ok(own) => self.open.sent(ticket, own),
            Err(failure) => {
                drop(self.open.forget(ticket));
                return Err(failure);
            }
        }
        Ok(ticket)
    }

    fn cancel(&self, ticket: Ticket) {
        let now = lock(&self.now);
        let open = self.open.forget(ticket);
        if let (Now::One(service), Some(open)) = (&*now, &open)
            && let Place::Sent(Some(own)) = open.place
        {
            service.cancel(own);
        }
        drop(now);
        // Only now its sink, which may do anything when it is dropped.
        drop(open);
    }

    fn status(&self) -> Status {
        let now = lock(&self.now);
        let state = match &*now {
            Now::One(service) => return service.status(),
            Now::Changing => State::Ready,
            Now::Gone(reason) => State::Failed(reason.clone()),
        };
        Status {
            state,
            running: 0,
            waiting: self.open.lock().open.len(),
        }
    }
}

impl<S> fmt::Debug for Handover<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "handover of {} requests", self.open.lock().open.len())
    }
}

fn unavailable(reason: &str) -> Failure {
    Failure::Unavailable {
        reason: reason.to_owned(),
    }
}

#[cfg(test)]
mod tests;
