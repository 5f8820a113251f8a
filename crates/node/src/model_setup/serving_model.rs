//! A model that answers: its instance or the service elsewhere, and streams of its replies.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use paceline_base::{Bytes, lock};
use paceline_engine::{
    DraftCounters, DraftCounts, EngineConfig, GenerationRequest, Reply, RequestFailure, Runner,
    Service, Ticket,
};
use paceline_model::trace::{RankTrace, Tracer};
use paceline_model::{Config, ExpertUses, Split};
use paceline_worker::InstanceTraffic;

use super::{Options, Rehearsal};
use crate::supervisor::ChangeRecord;
use crate::{Error, Instance, SharedForecast};

/// A model that is ready to answer.
#[derive(Debug)]
pub struct ServingModel {
    pub(super) computing: Computing,
    pub(super) forecast: Option<SharedForecast>,
    pub(super) options: Options,
    pub(super) engine: EngineConfig,
    pub(super) config: Config,
    /// The initial split.
    pub(super) split: Split,
}

#[derive(Debug)]
pub(super) enum Computing {
    Here {
        tracer: Tracer,
        guesses: DraftCounters,
        runner: Runner,
        weights: Bytes,
        device: String,
    },
    Crew(Instance),
    /// It runs on a node.
    Elsewhere {
        service: Arc<dyn Service>,
        device: String,
    },
}

impl ServingModel {
    /// The service that answers.
    pub fn service(&self) -> &dyn Service {
        match &self.computing {
            Computing::Here { runner, .. } => runner,
            Computing::Crew(instance) => instance,
            Computing::Elsewhere { service, .. } => &**service,
        }
    }

    /// The shape.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The options of its computation.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Sizes of the engine.
    pub const fn engine(&self) -> &EngineConfig {
        &self.engine
    }

    /// The split in use.
    pub fn split(&self) -> &Split {
        match &self.computing {
            Computing::Here { .. } | Computing::Elsewhere { .. } => &self.split,
            Computing::Crew(instance) => instance.split(),
        }
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.split.ranks()
    }

    /// Packed weights of each rank; empty without workers.
    pub fn weights(&self) -> Vec<Bytes> {
        match &self.computing {
            Computing::Here { weights, .. } => vec![*weights],
            Computing::Elsewhere { .. } => Vec::new(),
            Computing::Crew(instance) => {
                let facts = instance.facts();
                facts.iter().map(|rank| Bytes(rank.weight_bytes)).collect()
            }
        }
    }

    /// The instruction set or device of the first rank.
    pub fn device(&self) -> String {
        match &self.computing {
            Computing::Here { device, .. } | Computing::Elsewhere { device, .. } => device.clone(),
            Computing::Crew(instance) => {
                let first = instance.facts().into_iter().next();
                first.map_or_else(String::new, |rank| rank.instruction_set)
            }
        }
    }

    /// Predicted decode tokens a second, corrected by runs before the start; `None` without
    /// measurements.
    pub fn predicted(&self) -> Option<f64> {
        match &self.computing {
            Computing::Elsewhere { .. } => None,
            Computing::Here { .. } => {
                let forecast = lock(self.forecast.as_ref()?);
                forecast.predict(&self.config, &self.split).ok()
            }
            Computing::Crew(instance) => instance.predicted(),
        }
    }

    /// As [`predicted`](Self::predicted) with `keys` in the cache.
    pub fn predicted_at(&self, keys: u32) -> Option<f64> {
        let forecast = lock(self.forecast.as_ref()?);
        forecast.predict_at(&self.config, self.split(), keys).ok()
    }

    /// Stores the decode speed of an answer with `keys` in the cache. Workers are measured in any
    /// case.
    pub fn learn(&self, keys: u32, decode_tok_s: f64) {
        if let (Computing::Here { .. }, Some(forecast)) = (&self.computing, &self.forecast) {
            lock(forecast).learn(&self.config, &self.split, (keys, decode_tok_s));
        }
    }

    /// Changes of the split so far.
    pub fn changes(&self) -> Vec<ChangeRecord> {
        match &self.computing {
            Computing::Here { .. } | Computing::Elsewhere { .. } => Vec::new(),
            Computing::Crew(instance) => instance.changes(),
        }
    }

    /// Bytes moved by the nodes so far; `None` for one node, or if one does not answer.
    pub fn moved(&self) -> Option<InstanceTraffic> {
        match &self.computing {
            Computing::Here { .. } | Computing::Elsewhere { .. } => None,
            Computing::Crew(instance) => instance.moved(),
        }
    }

    /// Starts a trace on every rank, until [`answer_traces`](Self::traced).
    pub fn trace(&self) {
        match &self.computing {
            Computing::Here { tracer, .. } => tracer.start(),
            Computing::Crew(instance) => instance.trace(),
            Computing::Elsewhere { .. } => {} // `Fleet::trace` does that
        }
    }

    /// Ends a trace; returns the recordings of each rank, in rank order.
    ///
    /// # Errors
    /// As [`Instance::traced`].
    pub fn traced(&self) -> Result<Vec<RankTrace>, Error> {
        match &self.computing {
            Computing::Here { tracer, .. } => Ok(vec![tracer.stop()]),
            Computing::Crew(instance) => instance.traced(),
            Computing::Elsewhere { .. } => Ok(Vec::new()),
        }
    }

    /// Draft tokens verified so far; zero if a node does not answer.
    pub fn guesses(&self) -> DraftCounts {
        match &self.computing {
            Computing::Here { guesses, .. } => guesses.totals(),
            Computing::Crew(instance) => instance.guesses(),
            Computing::Elsewhere { .. } => DraftCounts::default(),
        }
    }

    /// How often the experts of each layer were chosen since the weights were loaded; empty without
    /// experts, or if a node does not answer.
    pub fn expert_uses(&self) -> Vec<ExpertUses> {
        match &self.computing {
            Computing::Here { runner, .. } => {
                let uses = runner.inspect(|engine| engine.model().expert_uses());
                uses.unwrap_or_default()
            }
            Computing::Crew(instance) => instance.expert_uses(),
            Computing::Elsewhere { .. } => Vec::new(),
        }
    }

    /// Starts an answer.
    ///
    /// # Errors
    /// Refusals before computation starts.
    pub fn submit(&self, request: GenerationRequest) -> Result<ReplyStream<'_>, RequestFailure> {
        ReplyStream::begin(self.service(), request)
    }

    /// Lets it answer `rehearsal`, whose speed its prediction then has. Blocks until it is over.
    pub fn rehearse(&mut self, rehearsal: &Rehearsal) {
        match &mut self.computing {
            Computing::Crew(instance) => instance.rehearse(rehearsal),
            Computing::Here { runner, .. } => drop(rehearsal.run(runner)), // the forecast has it
            Computing::Elsewhere { .. } => {}
        }
    }
}

/// An answer that is being computed. Dropping it stops it.
#[derive(Debug)]
pub struct ReplyStream<'a> {
    service: &'a dyn Service,
    ticket: Ticket,
    replies: Receiver<(Instant, Reply)>,
}

impl<'a> ReplyStream<'a> {
    pub(super) fn begin(
        service: &'a dyn Service,
        request: GenerationRequest,
    ) -> Result<Self, RequestFailure> {
        let (sender, replies) = channel();
        let sink = Box::new(move |reply| {
            let _ = sender.send((Instant::now(), reply)); // the receiver may be gone
        });
        Ok(Self {
            ticket: service.submit(request, sink)?,
            service,
            replies,
        })
    }

    /// Waits for the next reply; returns its arrival time.
    ///
    /// # Errors
    /// [`Failure`] if the answer will not be completed.
    pub fn next(&self) -> Result<(Instant, Reply), RequestFailure> {
        Self::reply(self.replies.recv().ok())
    }

    /// As [`next`](Self::next), for at most `limit`; `None` when no reply came in that time.
    ///
    /// # Errors
    /// As of [`next`](Self::next).
    pub fn next_within(&self, limit: Duration) -> Result<Option<(Instant, Reply)>, RequestFailure> {
        match self.replies.recv_timeout(limit) {
            Err(RecvTimeoutError::Timeout) => Ok(None),
            other => Self::reply(other.ok()).map(Some),
        }
    }

    fn reply(reply: Option<(Instant, Reply)>) -> Result<(Instant, Reply), RequestFailure> {
        match reply {
            Some((_, Reply::Failed(failure))) => Err(failure),
            Some(reply) => Ok(reply),
            None => Err(RequestFailure::Lost {
                reason: "what computed it ended".to_owned(),
            }),
        }
    }
}

impl Drop for ReplyStream<'_> {
    fn drop(&mut self) {
        self.service.cancel(self.ticket); // does nothing for one that is complete
    }
}
