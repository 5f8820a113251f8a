//! Measurements that the ranks of an instance tell when they are asked: bytes moved, experts
//! chosen, and recordings.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_engine::Guesses;
use paceline_model::ExpertUses;
use paceline_model::trace::RankTrace;

use super::{Command, Instance};
use crate::{Error, Moved};

/// Longest wait for what the ranks say they sent: they answer between two messages.
const MEASURE_LIMIT: Duration = Duration::from_secs(1);

/// Longest wait for what the ranks recorded: up to 12 MB each, over a network.
const TRACE_LIMIT: Duration = Duration::from_secs(20);

/// Measurements of a rank.
#[derive(Clone)]
pub(super) struct Measured {
    /// Bytes that it moved in its epoch.
    pub(super) moved: Moved,
    /// How often its layers' experts were chosen.
    pub(super) uses: Vec<ExpertUses>,
    /// Bytes that it sent to each rank in its epoch.
    pub(super) sent_to: Vec<u64>,
    /// The guesses that it checked in its epoch.
    pub(super) guesses: Guesses,
}

impl Instance {
    /// Bytes that all ranks together have moved so far; `None` when one does not say within a
    /// second.
    pub fn moved(&self) -> Option<Moved> {
        let ranks = self.measure(MEASURE_LIMIT)?;
        let now = ranks.into_iter().map(|rank| rank.moved).sum();
        let before = lock(&self.shared.view).moved;
        Some([before, now].into_iter().sum())
    }

    /// How often the experts of each layer were chosen since the weights were loaded. There are
    /// none without experts, or when a rank does not say within a second.
    pub fn expert_uses(&self) -> Vec<ExpertUses> {
        let ranks = self.measure(MEASURE_LIMIT).unwrap_or_default().into_iter();
        let mut uses: Vec<ExpertUses> = ranks.flat_map(|rank| rank.uses).collect();
        // The ranks of a stage count the same.
        uses.sort_by_key(|uses| uses.layer);
        uses.dedup_by_key(|uses| uses.layer);
        uses
    }

    /// Bytes that each rank has sent to each other one in the epoch so far, by both ranks. `None`
    /// when a rank does not say within `limit`, or its groups do not count that.
    pub fn sent_between(&self, limit: Duration) -> Option<Vec<Vec<u64>>> {
        let ranks = self.measure(limit)?;
        let all = ranks.len();
        let sent: Vec<Vec<u64>> = ranks.into_iter().map(|rank| rank.sent_to).collect();
        sent.iter().all(|to| to.len() == all).then_some(sent)
    }

    /// Guesses that were checked in this epoch; none when a rank does not say within a second.
    pub fn guesses(&self) -> Guesses {
        let ranks = self.measure(MEASURE_LIMIT).unwrap_or_default();
        ranks.into_iter().map(|rank| rank.guesses).sum()
    }

    /// Asks every rank for its measurements, in rank order; `None` when one's are missing after
    /// `limit`. Another caller's question is over first, so that its answers are not taken for
    /// those of this one.
    fn measure(&self, limit: Duration) -> Option<Vec<Measured>> {
        let _alone = lock(&self.shared.measures);
        let (sender, receiver) = channel();
        self.shared.command(Command::Measure(sender));
        let deadline = Instant::now() + limit;
        let mut told: Vec<Option<Measured>> = vec![None; self.cuts[0].split.ranks() as usize];
        while told.iter().any(Option::is_none) {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, measured) = receiver.recv_timeout(left).ok()?;
            *told.get_mut(rank.0 as usize)? = Some(measured);
        }
        told.into_iter().collect()
    }

    /// Has every rank record what takes how long from now on, until [`traced`](Self::traced).
    /// Waits up to a second until all ranks do.
    pub fn trace(&self) {
        self.shared.command(Command::Trace);
        let _ = self.moved(); // asked after it on the same channels, so answered after it
    }

    /// Held by a trace while it runs: ranks record for one at a time.
    pub(crate) fn traces(&self) -> &Mutex<()> {
        &self.shared.traces
    }

    /// Ends a trace; returns the recordings of each rank, in rank order. Blocks for up to 20 s.
    ///
    /// # Errors
    /// [`Error::NotTraced`] when a rank did not tell, as after a failure in the meantime.
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
