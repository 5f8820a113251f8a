//! The replies of a service to all choices of one request, with everything that can end them early.
//! Early ends are a deadline, the server's end, a reader that fell behind, and a client that left.
//!
//! ```text
//! engine's thread --sink--> bounded channel --next()--> the response
//!                    | full                                | dropped
//!                    v                                     v
//!       watch task: deadline, shutdown, overflow --> Service::cancel
//! ```
//!
//! The channel has room for a whole answer of ordinary length, so a slow reader never makes the
//! engine wait, and memory is bounded. When it is full the answer is stopped and the reader told.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use paceline_engine::{Failure, Reply, Request, Service, Sink, Ticket};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Sleep;

use crate::keys::{Held, revoked};
use crate::metrics::Metrics;
use crate::phase::{Phase, reach};
use crate::rejection::Rejection;

/// Replies to a choice besides its tokens: the prompt's, the last, and one for a dropped sink.
const BESIDE_TOKENS: usize = 3;

/// The terms that an answer runs under.
#[derive(Debug)]
pub(crate) struct Terms {
    /// When it must be over.
    pub(crate) deadline: Pin<Box<Sleep>>,
    /// The deadline in seconds, for its message.
    pub(crate) deadline_s: u64,
    pub(crate) phase: watch::Receiver<Phase>,
    /// Positions of a sequence.
    pub(crate) context: usize,
    /// Replies of a choice that may be unread.
    pub(crate) unread_replies: usize,
    /// The key that asked.
    pub(crate) key: Option<Held>,
    /// When the request came.
    pub(crate) asked: Instant,
    pub(crate) now: fn() -> Instant,
}

/// The running answer. Dropping it stops what is still computed.
#[derive(Debug)]
pub(crate) struct Answer {
    replies: mpsc::Receiver<(usize, Reply)>,
    running: Arc<Running>,
    ended: oneshot::Receiver<Rejection>,
    /// Dropped with the answer, which ends the watch.
    _alive: oneshot::Sender<()>,
    /// Choices that have not finished.
    left: usize,
    metrics: Arc<Metrics>,
    outcome: &'static str,
    /// A failure that was found behind replies.
    failed: Option<Failure>,
}

impl Answer {
    /// Submits all requests, with the tokens that their answers have already; none for choices
    /// that are over.
    ///
    /// # Errors
    /// The first refusal; those that were taken are cancelled.
    pub(crate) fn start(
        service: &Arc<dyn Service>,
        metrics: &Arc<Metrics>,
        requests: Vec<Option<(Request, Vec<u32>)>>,
        terms: Terms,
    ) -> Result<Self, Rejection> {
        let room = |(request, _): &(Request, Vec<u32>)| {
            let left = terms.context.saturating_sub(request.prompt.len());
            let replies = request.max_tokens.min(left).saturating_add(BESIDE_TOKENS);
            replies.min(terms.unread_replies)
        };
        let (sender, replies) =
            mpsc::channel(requests.iter().flatten().map(room).sum::<usize>().max(1));
        let (alive, gone) = oneshot::channel();
        let (tell, ended) = oneshot::channel();
        let overflow = Arc::new(Notify::new());
        let running = Arc::new(Running::new(Arc::clone(service), requests.len()));
        let mut answer = Self {
            replies,
            running: Arc::clone(&running),
            ended,
            _alive: alive,
            left: requests.iter().flatten().count(),
            metrics: Arc::clone(metrics),
            outcome: "refused",
            failed: None,
        };
        let open = requests.into_iter().enumerate();
        let open = open.filter_map(|(choice, asked)| Some((choice, asked?)));
        for (choice, (request, tokens)) in open {
            let outlet = Outlet {
                choice,
                sender: sender.clone(),
                overflow: Arc::clone(&overflow),
                is_over: false,
                meter: metrics.meter(terms.asked, request.prompt.len(), service.cut()),
                now: terms.now,
            };
            let ticket = service.submit_after(request, tokens, outlet.into_sink())?;
            answer.running.tickets()[choice] = Some(ticket);
        }
        answer.outcome = if answer.left == 0 {
            "complete"
        } else {
            "client_left"
        };
        tokio::spawn(watch(terms, overflow, running, gone, tell));
        Ok(answer)
    }

    /// The next reply and its choice. Never [`Reply::Failed`]. Can be dropped and called again.
    ///
    /// # Errors
    /// Why the answer will not be completed; it is stopped then.
    pub(crate) async fn next(&mut self) -> Result<(usize, Reply), Rejection> {
        let broken = || Rejection::Broken {
            what: "finish the answer",
        };
        if let Some(failure) = self.failed.take() {
            return Err(self.failed_with(failure.into()));
        }
        let reply = tokio::select! {
            biased;
            ended = &mut self.ended => Err(ended.unwrap_or_else(|_| broken())),
            reply = self.replies.recv() => match reply {
                Some(reply) => Ok(reply),
                // All outlets are gone and none said why: the channel was full, as is told soon.
                None => Err((&mut self.ended).await.unwrap_or_else(|_| broken())),
            },
        };
        match reply {
            Ok((choice, Reply::Failed(failure))) => {
                self.running.forget(choice);
                Err(self.failed_with(failure.into()))
            }
            Ok((choice, reply)) => {
                self.note(choice, &reply);
                Ok((choice, reply))
            }
            Err(rejection) => Err(self.failed_with(rejection)),
        }
    }

    fn note(&mut self, choice: usize, reply: &Reply) {
        if matches!(reply, Reply::Finished { .. }) {
            self.running.forget(choice);
            self.left -= 1;
            if self.left == 0 {
                self.outcome = "complete";
            }
        }
    }

    /// Replies that are here already, at most `most`. A failure ends them, and comes with
    /// [`next`](Self::next).
    pub(crate) fn ready(&mut self, most: usize) -> Vec<(usize, Reply)> {
        let mut all = Vec::new();
        while all.len() < most && self.failed.is_none() {
            match self.replies.try_recv() {
                Ok((_, Reply::Failed(failure))) => self.failed = Some(failure),
                Ok((choice, reply)) => {
                    self.note(choice, &reply);
                    all.push((choice, reply));
                }
                Err(_) => break,
            }
        }
        all
    }

    /// Whether all choices have finished.
    pub(crate) const fn is_complete(&self) -> bool {
        self.left == 0
    }

    fn failed_with(&mut self, rejection: Rejection) -> Rejection {
        self.outcome = match &rejection {
            Rejection::Deadline { .. } => "deadline",
            Rejection::SlowReader { .. } => "slow_reader",
            Rejection::ShuttingDown => "shutdown",
            Rejection::Revoked => "revoked",
            _ => "failed",
        };
        rejection
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.running.cancel();
        self.metrics.answered(self.outcome);
    }
}

/// The computation that runs for a request.
#[derive(Debug)]
struct Running {
    service: Arc<dyn Service>,
    /// By choice; `None` before it is submitted and when it is over.
    tickets: Mutex<Vec<Option<Ticket>>>,
}

impl Running {
    fn new(service: Arc<dyn Service>, choices: usize) -> Self {
        let tickets = Mutex::new(vec![None; choices]);
        Self { service, tickets }
    }

    fn tickets(&self) -> MutexGuard<'_, Vec<Option<Ticket>>> {
        self.tickets.lock().expect("nothing panics with the lock")
    }

    fn forget(&self, choice: usize) {
        self.tickets()[choice] = None;
    }

    /// Stops what is not over.
    fn cancel(&self) {
        let tickets: Vec<Ticket> = self.tickets().iter_mut().filter_map(Option::take).collect();
        tickets
            .into_iter()
            .for_each(|ticket| self.service.cancel(ticket));
    }
}

/// Ends the answer when something else than its last reply does. Runs beside the response,
/// which is not polled while a client takes nothing.
async fn watch(
    mut terms: Terms,
    overflow: Arc<Notify>,
    running: Arc<Running>,
    gone: oneshot::Receiver<()>,
    tell: oneshot::Sender<Rejection>,
) {
    let rejection = tokio::select! {
        _ = gone => return,
        () = terms.deadline => Rejection::Deadline { limit_s: terms.deadline_s },
        () = overflow.notified() => Rejection::SlowReader { limit: terms.unread_replies },
        () = reach(&mut terms.phase, Phase::Ending) => Rejection::ShuttingDown,
        () = revoked(terms.key.as_ref()) => Rejection::Revoked,
    };
    // Told first: what the service says to being cancelled is not why the answer ends. Nobody
    // listens when the answer was dropped just now.
    let _ = tell.send(rejection);
    running.cancel();
}

/// The side of one choice that the service holds.
struct Outlet {
    choice: usize,
    sender: mpsc::Sender<(usize, Reply)>,
    overflow: Arc<Notify>,
    /// The last reply was sent, or there is nowhere to send to.
    is_over: bool,
    meter: crate::metrics::Meter,
    now: fn() -> Instant,
}

impl Outlet {
    fn into_sink(mut self) -> Sink {
        Box::new(move |reply| self.put(reply))
    }

    fn put(&mut self, reply: Reply) {
        if self.is_over {
            return;
        }
        self.is_over = matches!(reply, Reply::Finished { .. } | Reply::Failed(_));
        self.meter.reply(&reply, (self.now)());
        self.send(reply);
    }

    fn send(&mut self, reply: Reply) {
        match self.sender.try_send((self.choice, reply)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => self.is_over = true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.is_over = true;
                self.overflow.notify_one();
            }
        }
    }
}

impl Drop for Outlet {
    /// A service that drops a sink before its last reply would leave the client waiting.
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // The meter does not hear of it: a cancelled answer ends so, and did not fail.
        let reason = "its replies ended early".to_owned();
        self.send(Reply::Failed(Failure::Lost { reason }));
    }
}
