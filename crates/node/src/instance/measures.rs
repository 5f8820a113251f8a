//! Measurements of an instance's ranks on request: bytes moved, experts chosen, and traces.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_engine::DraftCounts;
use paceline_model::ExpertUses;
use paceline_model::trace::RankTrace;

use super::{Command, Instance};
use crate::Error;
use paceline_worker::InstanceTraffic;

/// Longest wait for the ranks' counters: they answer between two messages.
const MEASURE_LIMIT: Duration = Duration::from_secs(1);

/// Longest wait for the ranks' traces: up to 12 MB each, over a network.
const TRACE_LIMIT: Duration = Duration::from_secs(20);

/// Measurements of a rank.
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

impl Instance {
    /// Bytes that all ranks together have moved so far; `None` if one does not answer within a
    /// second.
    pub fn moved(&self) -> Option<InstanceTraffic> {
        let ranks = self.measure(MEASURE_LIMIT)?;
        let now = ranks.into_iter().map(|rank| rank.moved).sum();
        let before = lock(&self.shared.view).moved;
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
        lock(&self.shared.view).drafts
    }

    /// Queries every rank for its measurements, in rank order; `None` if one is missing after
    /// `limit`. Waits for other callers first, so that answers are not mixed up.
    fn measure(&self, limit: Duration) -> Option<Vec<RankMeasurements>> {
        let _alone = lock(&self.shared.measures);
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

    /// Locked during a trace: ranks record one trace at a time.
    pub(crate) fn traces(&self) -> &Mutex<()> {
        &self.shared.traces
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
