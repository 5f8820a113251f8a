//! Measurements of an instance's ranks on request: bytes moved, experts chosen, and traces.

use std::sync::PoisonError;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_engine::DraftCounts;
use paceline_model::ExpertUses;
use paceline_model::trace::RankTrace;

use super::{Command, Instance, InstanceShared, InstanceState};
use crate::Error;
use paceline_worker::InstanceTraffic;

/// Longest wait for the ranks' counters: they answer between two messages.
const MEASURE_LIMIT: Duration = Duration::from_secs(1);

/// Longest wait for the ranks' traces: up to 12 MB each, over a network.
const TRACE_LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub(super) struct RankMeasurements {
    /// Bytes that it moved in its epoch.
    pub(super) moved: InstanceTraffic,
    /// How often its layers' experts were chosen.
    pub(super) uses: Vec<ExpertUses>,
    /// Bytes that it sent to each rank in its epoch.
    pub(super) sent_to: Vec<u64>,
    /// The draft tokens that it verified in its epoch.
    pub(super) guesses: DraftCounts,
}

/// A task of all ranks that one caller does at a time, so that answers are not mixed up. It takes a
/// bounded time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RankTask {
    Measure,
    Trace,
}

/// A caller's turn at a task, which ends when it is dropped.
pub(crate) struct RankTurn<'a> {
    shared: &'a InstanceShared,
    task: RankTask,
}

impl InstanceShared {
    fn turn(&self, task: RankTask) -> RankTurn<'_> {
        let is_taken = |state: &mut InstanceState| state.in_turn.contains(&task);
        let free = self.turn_over.wait_while(lock(&self.state), is_taken);
        let mut state = free.unwrap_or_else(PoisonError::into_inner);
        self.begin_turn(&mut state, task)
    }

    fn begin_turn(&self, state: &mut InstanceState, task: RankTask) -> RankTurn<'_> {
        state.in_turn.push(task);
        RankTurn { shared: self, task }
    }
}

impl Drop for RankTurn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.in_turn.retain(|task| *task != self.task);
        drop(state);
        self.shared.turn_over.notify_all();
    }
}

impl Instance {
    /// Bytes that all ranks together have moved so far; `None` if one does not answer within a
    /// second.
    pub fn moved(&self) -> Option<InstanceTraffic> {
        let ranks = self.measure(MEASURE_LIMIT)?;
        let now = ranks.into_iter().map(|rank| rank.moved).sum();
        let before = lock(&self.shared.state).status.moved;
        Some([before, now].into_iter().sum())
    }

    /// How often the experts of each layer were chosen since the weights were loaded. Empty without
    /// experts, or if a rank does not answer within a second.
    pub fn expert_uses(&self) -> Vec<ExpertUses> {
        let ranks = self.measure(MEASURE_LIMIT).unwrap_or_default().into_iter();
        let mut uses: Vec<ExpertUses> = ranks.flat_map(|rank| rank.uses).collect();
        // The ranks of a stage count the same.
        uses.sort_by_key(|uses| uses.layer);
        uses.dedup_by_key(|uses| uses.layer);
        uses
    }

    /// Bytes from each rank to each other one in the epoch so far, by sender and receiver. `None`
    /// if a rank does not answer within `limit`, or its groups do not count bytes.
    pub fn sent_between(&self, limit: Duration) -> Option<Vec<Vec<u64>>> {
        let ranks = self.measure(limit)?;
        let all = ranks.len();
        let sent: Vec<Vec<u64>> = ranks.into_iter().map(|rank| rank.sent_to).collect();
        sent.iter().all(|to| to.len() == all).then_some(sent)
    }

    /// Draft tokens verified in this epoch; zero if a rank does not answer within a second.
    pub fn guesses(&self) -> DraftCounts {
        let ranks = self.measure(MEASURE_LIMIT).unwrap_or_default();
        ranks.into_iter().map(|rank| rank.guesses).sum()
    }

    /// Draft tokens as the last measurement found them. Does not wait.
    pub fn drafts(&self) -> DraftCounts {
        lock(&self.shared.state).status.drafts
    }

    /// Queries every rank for its measurements, in rank order; `None` if one is missing after
    /// `limit`. Waits for other callers first, so that answers are not mixed up.
    fn measure(&self, limit: Duration) -> Option<Vec<RankMeasurements>> {
        let _turn = self.shared.turn(RankTask::Measure);
        let (sender, receiver) = channel();
        self.shared.command(Command::Measure(sender));
        let deadline = Instant::now() + limit;
        let mut told: Vec<Option<RankMeasurements>> =
            vec![None; self.cuts[0].split.ranks() as usize];
        while told.iter().any(Option::is_none) {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, measured) = receiver.recv_timeout(left).ok()?;
            *told.get_mut(rank.0 as usize)? = Some(measured);
        }
        told.into_iter().collect()
    }

    /// Starts a trace on every rank, until [`answer_traces`](Self::traced). Waits up to a second
    /// until all ranks record.
    pub fn trace(&self) {
        self.shared.command(Command::Trace);
        let _ = self.moved(); // same channels: its answer confirms the trace
    }

    /// A turn at a trace; waits for the others.
    pub(crate) fn trace_turn(&self) -> RankTurn<'_> {
        self.shared.turn(RankTask::Trace)
    }

    /// A turn at a trace; `None` during another one.
    pub(crate) fn try_trace_turn(&self) -> Option<RankTurn<'_>> {
        let mut state = lock(&self.shared.state);
        let is_free = !state.in_turn.contains(&RankTask::Trace);
        is_free.then(|| self.shared.begin_turn(&mut state, RankTask::Trace))
    }

    /// Ends a trace; returns the recordings of each rank, in rank order. Blocks for up to 20 s.
    ///
    /// # Errors
    /// [`Error::NotTraced`] if a rank did not answer, as after a failure in the meantime.
    pub fn traced(&self) -> Result<Vec<RankTrace>, Error> {
        let (sender, receiver) = channel();
        self.shared.command(Command::Traced(sender));
        let deadline = Instant::now() + TRACE_LIMIT;
        let mut told: Vec<Option<RankTrace>> = vec![None; self.cuts[0].split.ranks() as usize];
        while let Some(silent) = told.iter().position(Option::is_none) {
            let left = deadline.saturating_duration_since(Instant::now());
            let heard = receiver.recv_timeout(left);
            let (rank, trace) = heard.map_err(|_| Error::NotTraced {
                rank: Rank(silent as u32),
            })?;
            told[rank.0 as usize] = Some(trace);
        }
        Ok(told.into_iter().flatten().collect())
    }
}
