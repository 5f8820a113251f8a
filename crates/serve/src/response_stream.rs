//! The engine's replies to all choices of one request, as a stream that can end early. It ends
//! early at a deadline, at shutdown, when the client reads too slowly, and when the client has
//! left.
//!
//! ```text
//! engine's thread --sink--> bounded channel --next()--> the response
//!                    | full                                | dropped
//!                    v                                     v
//!       watch task: deadline, shutdown, overflow --> Service::cancel
//! ```
//!
//! The channel has room for a whole response of ordinary length, so a slow client never blocks the
//! engine, and memory is bounded. A full channel ends the response with an error.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use paceline_engine::{
    GenerationRequest, Reply, RequestFailure, Service, Sink, Submission, Ticket,
};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Sleep;

use crate::metrics::Metrics;
use crate::phase::{ServerPhase, reach};
use crate::rejection::Rejection;
use paceline_auth::keys::{ClientKey, revoked};

/// Replies per choice that carry no token: the prompt's, the last, and one for a dropped sink.
const BESIDE_TOKENS: usize = 3;

/// Limits, API key and clock of one request.
#[derive(Debug)]
pub(crate) struct RequestContext {
    /// When the response must be complete.
    pub(crate) deadline: Pin<Box<Sleep>>,
    /// The deadline in seconds, for its message.
    pub(crate) deadline_s: u64,
    pub(crate) phase: watch::Receiver<ServerPhase>,
    /// Maximum positions of a sequence.
    pub(crate) context: usize,
    /// Maximum unread replies per choice.
    pub(crate) unread_replies: usize,
    pub(crate) key: Option<ClientKey>,
    /// Arrival time of the request.
    pub(crate) asked: Instant,
    pub(crate) now: fn() -> Instant,
}

/// A response in progress. Dropping it cancels the choices that are still computed.
#[derive(Debug)]
pub(crate) struct ResponseStream {
    replies: mpsc::Receiver<(usize, Reply)>,
    running: Arc<SubmittedChoices>,
    ended: oneshot::Receiver<Rejection>,
    /// Dropped with the response, which ends the watch task.
    _alive: oneshot::Sender<()>,
    /// Unfinished choices.
    left: usize,
    metrics: Arc<Metrics>,
    outcome: &'static str,
    /// A failure read behind earlier replies; reported by the next call.
    failed: Option<RequestFailure>,
}

impl ResponseStream {
    /// Submits a request per choice, with the tokens that the choice already has; `None` for
    /// finished choices.
    ///
    /// # Errors
    /// The first refusal; the choices submitted before it are cancelled.
    pub(crate) fn start(
        service: &Arc<dyn Service>,
        metrics: &Arc<Metrics>,
        requests: Vec<Option<(GenerationRequest, Vec<u32>)>>,
        terms: RequestContext,
    ) -> Result<Self, Rejection> {
        let room = |(request, _): &(GenerationRequest, Vec<u32>)| {
            let left = terms.context.saturating_sub(request.prompt.len());
            let replies = request.max_tokens.min(left).saturating_add(BESIDE_TOKENS);
            replies.min(terms.unread_replies)
        };
        let (sender, replies) =
            mpsc::channel(requests.iter().flatten().map(room).sum::<usize>().max(1));
        let (alive, gone) = oneshot::channel();
        let (tell, ended) = oneshot::channel();
        let overflow = Arc::new(Notify::new());
        let running = Arc::new(SubmittedChoices::new(Arc::clone(service), requests.len()));
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
            let outlet = ReplySender {
                choice,
                sender: sender.clone(),
                overflow: Arc::clone(&overflow),
                is_over: false,
                meter: metrics.meter(terms.asked, request.prompt.len(), service.cut()),
                now: terms.now,
            };
            let submission = Submission::new(request, tokens);
            let ticket = submission.ticket;
            service.accept(submission, outlet.into_sink())?;
            answer.running.tickets()[choice] = Some(ticket);
        }
        answer.outcome = if answer.left == 0 {
            "complete"
        } else {
            "client_left"
        };
        tokio::spawn(end_early(terms, overflow, running, gone, tell));
        Ok(answer)
    }

    /// The next reply and its choice. Never [`Reply::Failed`]. Cancel-safe.
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
                // All senders are gone without an error: the channel was full, and the watch task
                // sends the cause.
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

    /// Takes at most `most` replies that are already in the channel. Stops at a failure, which the
    /// following [`next`](Self::next) returns.
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

impl Drop for ResponseStream {
    fn drop(&mut self) {
        self.running.cancel();
        self.metrics.answered(self.outcome);
    }
}

/// The choices that the engine computes for a request.
#[derive(Debug)]
struct SubmittedChoices {
    service: Arc<dyn Service>,
    /// By choice; `None` before submission and after the last reply.
    tickets: Mutex<Vec<Option<Ticket>>>,
}

impl SubmittedChoices {
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

    fn cancel(&self) {
        let tickets: Vec<Ticket> = self.tickets().iter_mut().filter_map(Option::take).collect();
        tickets
            .into_iter()
            .for_each(|ticket| self.service.cancel(ticket));
    }
}

/// Cancels the response on deadline, overflow, shutdown or a revoked key. A task of its own,
/// because nothing polls the response body while the client reads nothing.
async fn end_early(
    mut terms: RequestContext,
    overflow: Arc<Notify>,
    running: Arc<SubmittedChoices>,
    gone: oneshot::Receiver<()>,
    tell: oneshot::Sender<Rejection>,
) {
    let rejection = tokio::select! {
        _ = gone => return,
        () = terms.deadline => Rejection::Deadline { limit_s: terms.deadline_s },
        () = overflow.notified() => Rejection::SlowReader { limit: terms.unread_replies },
        () = reach(&mut terms.phase, ServerPhase::Ending) => Rejection::ShuttingDown,
        () = revoked(terms.key.as_ref()) => Rejection::Revoked,
    };
    // Sent before the cancellation: the engine's reaction to it is not the cause. The send fails if
    // the response was dropped just now.
    let _ = tell.send(rejection);
    running.cancel();
}

/// The engine's end of one choice's channel.
struct ReplySender {
    choice: usize,
    sender: mpsc::Sender<(usize, Reply)>,
    overflow: Arc<Notify>,
    /// The last reply was sent, or the receiver is gone.
    is_over: bool,
    meter: crate::metrics::ReplyMeter,
    now: fn() -> Instant,
}

impl ReplySender {
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

impl Drop for ReplySender {
    /// Reports a sink that the service drops before its last reply; the client would else wait.
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // Not counted by the meter: a cancelled choice ends this way and did not fail.
        let reason = "its replies ended early".to_owned();
        self.send(Reply::Failed(RequestFailure::Lost { reason }));
    }
}
