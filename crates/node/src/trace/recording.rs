//! Traces of one answer by all ranks of a split, in the form that an instance's owner sends.

use std::ops::Range;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_engine::{GenerationRequest, Reply, Service};
use paceline_model::trace::RankTrace;
use paceline_model::{Config, Split};
use serde::{Deserialize, Serialize};

use super::stages::stretch;
use super::{AnswerTimes, UnixClock};
use crate::{Error, Instance};

/// Longest traced answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(240);

/// The traces of one answer by every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// The split of the model.
    pub split: String,
    /// The rank that leads.
    pub leader: u32,
    /// In rank order.
    pub ranks: Vec<RankRecording>,
    /// Times by the caller's clock.
    pub times: AnswerTimes,
}

/// A rank's part of a [`Recording`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankRecording {
    /// Layers that it holds a share of.
    pub layers: Range<usize>,
    /// Ranks of its stage.
    pub stage: Range<u32>,
    /// Spans that the rank recorded.
    pub trace: RankTrace,
}

impl Recording {
    /// The traces of all ranks, in rank order.
    ///
    /// # Panics
    /// If there is not a trace for each rank of `split`.
    pub fn new(traces: Vec<RankTrace>, times: AnswerTimes, split: &Split, config: &Config) -> Self {
        assert_eq!(traces.len(), split.ranks() as usize, "traces and ranks");
        let record = |(rank, trace)| {
            let shard = split.shard(config, Rank(rank));
            RankRecording {
                layers: shard.layers.clone(),
                stage: shard.stage_ranks(),
                trace,
            }
        };
        Self {
            split: split.to_string(),
            leader: split.leader().0,
            ranks: (0..).zip(traces).map(record).collect(),
            times,
        }
    }

    /// Submits a request to an instance and traces it. Concurrent requests share its steps. Blocks
    /// until the answer is complete, at most four minutes.
    ///
    /// # Errors
    /// Why it was not answered, or a rank returned no trace.
    pub fn of(
        instance: &Instance,
        config: &Config,
        request: GenerationRequest,
    ) -> Result<Self, Error> {
        let _turn = instance.trace_turn();
        let clock = UnixClock::now();
        instance.trace();
        let answered = answer(instance, request, &clock);
        let traces = instance.traced();
        let (times, traces) = (answered?, traces?);
        Ok(Self::new(traces, times, instance.split(), config))
    }

    /// Traces an instance for `time`, without a request of its own; the times are those of the
    /// whole steps in it. Blocks for `time` plus the ranks' reports, at most some 20 s.
    ///
    /// # Errors
    /// Another trace is running, or a rank returned no trace.
    pub fn watch(instance: &Instance, time: Duration) -> Result<Self, Error> {
        let Some(_turn) = instance.try_trace_turn() else {
            return Err(Error::BeingTraced);
        };
        instance.trace();
        std::thread::sleep(time);
        let traces = instance.traced()?;
        let split = instance.split();
        let leader = split.leader().0;
        Ok(Self {
            split: split.to_string(),
            leader,
            times: stretch(&traces[leader as usize]),
            ranks: records(split, traces),
        })
    }
}

/// The trace and shard of each rank, in rank order.
fn records(split: &Split, traces: Vec<RankTrace>) -> Vec<RankRecording> {
    let mut first = 0;
    let places = split.each_stage().flat_map(|(layers, shares)| {
        let stage = first..first + shares.len() as u32;
        first = stage.end;
        std::iter::repeat_n((layers, stage), shares.len())
    });
    let record = |((layers, stage), trace)| RankRecording {
        layers,
        stage,
        trace,
    };
    places.zip(traces).map(record).collect()
}

/// Waits for an answer; returns its times.
fn answer(
    instance: &Instance,
    request: GenerationRequest,
    clock: &UnixClock,
) -> Result<AnswerTimes, Error> {
    let (sender, replies) = channel();
    let asked = Instant::now();
    let sink = Box::new(move |reply| {
        let _ = sender.send((Instant::now(), reply)); // the receiver may be gone
    });
    let ticket = instance.submit(request, sink)?;
    let mut first = None;
    loop {
        let left = (asked + ANSWER_LIMIT).saturating_duration_since(Instant::now());
        let Ok((at, reply)) = replies.recv_timeout(left) else {
            instance.cancel(ticket);
            return Err(Error::NoAnswer {
                limit: ANSWER_LIMIT,
            });
        };
        match reply {
            Reply::PromptRead { .. } => first = Some(at),
            Reply::Token { .. } | Reply::Continued => {}
            Reply::Failed(failure) => return Err(failure.into()),
            Reply::Finished { .. } => {
                return Ok(AnswerTimes {
                    asked_unix_ns: clock.unix_ns(asked),
                    first_unix_ns: clock.unix_ns(first.unwrap_or(at)),
                    ended_unix_ns: clock.unix_ns(at),
                });
            }
        }
    }
}
