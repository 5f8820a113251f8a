//! A worker's part in one epoch: an engine that leads, or a loop that follows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::{Deadline, Error as CommError, Group};
use paceline_engine::{
    Draft, DraftCounters, DraftCounts, Engine, Follower, Reply, RequestMessage, Runner, Service,
    State,
};
use paceline_model::{LoadedModel, ModelSource, PageStore};
use paceline_text::tokenizer::Tokenizer;

use super::kv_transfer::KvTransfer;
use super::{ControlChannel, Identity, RetainedWeights, Watchdog, failed};
use crate::Error;
use crate::messages::{FromWorker, RankAssignment};
use crate::traffic::RankTraffic;

/// Time limit for a failed group to return its error again, which it does at once.
const LOST_LIMIT: Duration = Duration::from_millis(10);

pub(super) struct Epoch {
    pub(super) part: EpochRole,
    pub(super) weights: Arc<dyn LoadedModel>,
    pub(super) handing: KvTransfer,
    of: Identity,
    watchdog: Watchdog,
}

pub(super) enum EpochRole {
    Leads(Leader),
    /// Computes what the leader plans until the group ends.
    Follows {
        thread: JoinHandle<()>,
        /// Set when the worker leaves, so that the end of the group is no failure.
        leaving: Arc<AtomicBool>,
    },
}

/// An engine on its thread.
pub(super) struct Leader {
    runner: Runner,
    guesses: DraftCounters,
}

impl Epoch {
    /// Starts to compute; a leader uses `draft`. Takes the time of a row of a layer in the previous
    /// epoch, if the weights were kept.
    pub(super) fn start(
        channel: &ControlChannel,
        job: &RankAssignment,
        (source, draft): (&ModelSource, Option<Draft>),
        (weights, store, handing): (Arc<dyn LoadedModel>, Option<Box<dyn PageStore>>, KvTransfer),
        (of, row_time): (Identity, Option<Duration>),
    ) -> Result<Self, Error> {
        let part = if of.shard.leads() {
            let tokenizer = Arc::new(tokenizer(source)?);
            let mut engine = Engine::new(Arc::clone(&weights), tokenizer, job.engine.clone())?;
            if let Some(draft) = draft {
                engine.set_draft_model(&draft)?;
            }
            let engine = match store {
                Some(store) => engine.with_store(store),
                None => engine,
            };
            let guesses = engine.draft_counters().clone();
            let runner = Runner::start(engine, Instant::now);
            EpochRole::Leads(Leader { runner, guesses })
        } else {
            follow(channel, job, &weights, store)?
        };
        Ok(Self {
            part,
            weights,
            handing,
            of,
            watchdog: Watchdog::new(Instant::now(), row_time),
        })
    }

    /// The error of a hang, returned once.
    pub(super) fn hang(&mut self) -> Option<Error> {
        let links = self.weights.links()?;
        self.watchdog.look(Instant::now(), &links.progress)
    }

    /// Time of a row of a layer, if known.
    fn row_time(&self) -> Option<Duration> {
        let links = self.weights.links()?;
        self.watchdog.row_time(&links.progress)
    }

    /// Makes this rank hang at its next layer, as an injected fault.
    pub(super) fn halt(&self) {
        if let Some(links) = self.weights.links() {
            links.progress.halt();
        }
    }

    /// The message with the rank's measurements so far.
    pub(super) fn measured(&self) -> FromWorker {
        FromWorker::Measured {
            moved: RankTraffic::of(&*self.weights),
            uses: self.weights.expert_uses(),
            sent_to: self.sent_to(),
            guesses: match &self.part {
                EpochRole::Leads(leader) => leader.guesses.totals(),
                EpochRole::Follows { .. } => DraftCounts::default(),
            },
        }
    }

    fn sent_to(&self) -> Vec<u64> {
        let links = self.weights.links();
        let sent = links.map(|links| links.sent_to()).unwrap_or_default();
        sent.iter().map(|sent| sent.0).collect()
    }

    /// The message about the time of its steps.
    pub(super) fn busy(&self, epoch: u64) -> FromWorker {
        let links = self.weights.links();
        let busy = links.map(|links| links.progress.busy()).unwrap_or_default();
        FromWorker::Busy { epoch, busy }
    }

    /// Starts a trace of this rank, or ends it and reports it.
    pub(super) fn trace(&self, channel: &ControlChannel, on: bool) -> Result<(), Error> {
        let links = self.weights.links();
        let tracer = links.map(|links| links.trace.clone()).unwrap_or_default();
        if on {
            tracer.start();
            return Ok(());
        }
        Ok(channel.send(&FromWorker::Traced(Box::new(tracer.stop())))?)
    }

    /// `Some` if the epoch has failed, with the error if it was not reported yet.
    pub(super) fn failure(&self) -> Option<Option<Error>> {
        match &self.part {
            EpochRole::Follows { thread, .. } => thread.is_finished().then_some(None),
            EpochRole::Leads(leader) => match leader.runner.status().state {
                State::Failed(reason) => Some(Some(Error::Stopped {
                    reason,
                    blamed: lost(&*self.weights),
                    interrupted: self.weights.is_interrupted(),
                })),
                State::Ready | State::Loading | State::Recovering(_) => None,
            },
        }
    }

    /// Ends the epoch after the current step. Returns the weights, unless they must be loaded
    /// again.
    ///
    /// The leader leaves by itself; the others' loops end because it has, or because a rank is
    /// lost.
    pub(super) fn leave(self) -> Option<RetainedWeights> {
        let row_time = self.row_time();
        let Self {
            part, weights, of, ..
        } = self;
        match part {
            EpochRole::Leads(leader) => drop(leader),
            EpochRole::Follows { thread, leaving } => {
                leaving.store(true, Ordering::SeqCst);
                let _ = thread.join(); // its panics were reported
            }
        }
        let weights = weights.unlinked()?;
        Some(RetainedWeights {
            of,
            weights,
            row_time,
        })
    }
}

impl Leader {
    /// Submits a request to the engine, or cancels it; reports a refusal to the instance.
    pub(super) fn request(
        &self,
        channel: &ControlChannel,
        message: RequestMessage,
    ) -> Result<(), Error> {
        let submission = match message {
            RequestMessage::Submit(submission) => submission,
            RequestMessage::Cancel(ticket) => {
                self.runner.cancel(ticket);
                return Ok(());
            }
        };
        let ticket = submission.ticket;
        let (replies, clock) = (Arc::clone(channel), self.runner.clock());
        let sink = Box::new(move |reply| {
            let at_us = Some(clock.last_us());
            // If the instance is lost, the reader of the channel ends this process.
            let _ = replies.send(&FromWorker::Reply {
                ticket,
                at_us,
                reply,
            });
        });
        if let Err(failure) = self.runner.accept(submission, sink) {
            channel.send(&FromWorker::Reply {
                ticket,
                at_us: None,
                reply: Reply::Failed(failure),
            })?;
        }
        Ok(())
    }
}

/// Executes the leader's plans on a thread, which reports a failure.
fn follow(
    channel: &ControlChannel,
    job: &RankAssignment,
    weights: &Arc<dyn LoadedModel>,
    store: Option<Box<dyn PageStore>>,
) -> Result<EpochRole, Error> {
    let mut follower = Follower::new(Arc::clone(weights), &job.engine)?;
    if let Some(store) = store {
        follower = follower.with_store(store);
    }
    let (channel, number) = (Arc::clone(channel), job.epoch);
    let leaving = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&leaving);
    let run = move || {
        let error = loop {
            if let Err(error) = follower.step() {
                break Error::from(error);
            }
        };
        // Drops the group too, so that ranks that wait for this one detect the failure.
        drop(follower);
        if !told.load(Ordering::SeqCst) {
            // Should the instance be gone, the reader of the channel ends this process.
            let _ = channel.send(&failed(number, &error));
        }
    };
    let builder = std::thread::Builder::new().name("follower".to_owned());
    let thread = builder.spawn(run).map_err(|source| Error::System {
        what: "start a thread",
        source,
    })?;
    Ok(EpochRole::Follows { thread, leaving })
}

/// The rank that the groups of a model have lost. A failed group returns its error again at once;
/// for a healthy one the time limit is too short to act.
fn lost(model: &dyn LoadedModel) -> Option<Rank> {
    let links = model.links()?;
    let of = |group: &dyn Group| match group.barrier(Deadline::at(Instant::now() + LOST_LIMIT)) {
        Err(
            CommError::PeerLost { rank, .. }
            | CommError::Silent { rank, .. }
            | CommError::Garbled { rank, .. },
        ) => Some(rank),
        _ => None,
    };
    let first = links.world.rank().0 - links.stage.rank().0;
    of(&*links.world).or_else(|| Some(Rank(first + of(&*links.stage)?.0)))
}

fn tokenizer(source: &ModelSource) -> Result<Tokenizer, Error> {
    Ok(match source {
        ModelSource::Gguf(file) => Tokenizer::from_gguf(file.metadata())?,
        ModelSource::Hf(folder) => Tokenizer::from_hf_dir(folder.path())?,
    })
}
