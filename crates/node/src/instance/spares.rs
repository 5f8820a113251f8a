//! Keeps a standby worker of each rank while an instance answers.
//!
//! A standby that is lost, cannot pack its weights or has replaced its rank's worker is started
//! again. This runs on its own thread: starting a worker takes seconds, and copying a model
//! minutes.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use paceline_base::Rank;
use tracing::debug;

use super::InstanceShared;
use crate::workers::{InstanceWorkers, WorkerSite};
use paceline_worker::adapters;
use paceline_worker::messages::{RankAssignment, ToWorker};

/// Poll interval: the loss of a standby shows after 1.5 s of silence at the soonest.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Pauses before the attempts to start a rank's standby, and so the most attempts within
/// [`TRIES_WITHIN`]. A restarted node is back after some seconds, a machine after about a minute.
const PAUSES: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_secs(10),
    Duration::from_secs(60),
];

/// Older attempts do not count: the time after which a flapping node is used again.
const TRIES_WITHIN: Duration = Duration::from_secs(600);

/// Keeps standbys for one epoch's ranks and split at a time.
#[derive(Debug, Default)]
pub(super) struct Keeper(Option<Arc<()>>);

impl Keeper {
    /// Starts standbys for `jobs`, in rank order, after a delay; `tag` identifies their split.
    /// Returns at once.
    pub(super) fn begin(
        &mut self,
        shared: &Arc<InstanceShared>,
        (jobs, tag): (Vec<RankAssignment>, u64),
        after: Duration,
    ) {
        let lasts = Arc::new(());
        let round = SpareRound {
            lasts: Arc::downgrade(&lasts),
            shared: Arc::downgrade(shared),
            tag,
            after,
        };
        self.0 = Some(lasts);
        let mut ranks: Vec<_> = jobs
            .into_iter()
            .map(|job| (job, Tries::default()))
            .collect();
        let thread = std::thread::Builder::new().name("spares".to_owned());
        let _ = thread.spawn(move || round.run(&mut ranks)); // without a thread, a recovery loads
    }

    /// Stops starting standbys. Does not wait for one that is being started.
    pub(super) fn end(&mut self) {
        self.0 = None;
    }
}

struct SpareRound {
    /// Dropped when the round is over.
    lasts: Weak<()>,
    shared: Weak<InstanceShared>,
    tag: u64,
    after: Duration,
}

impl SpareRound {
    fn run(&self, ranks: &mut [(RankAssignment, Tries)]) {
        let begun = Instant::now();
        while begun.elapsed() < self.after {
            if self.lasts.strong_count() == 0 {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        loop {
            for (job, tries) in &mut *ranks {
                if self.lasts.strong_count() == 0 {
                    return;
                }
                let Some(shared) = self.shared.upgrade() else {
                    return;
                };
                keep(&*shared.crew, (&*job, self.tag), tries);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Starts the standby of a rank if it lacks one and an attempt is due.
fn keep(crew: &dyn InstanceWorkers, (job, tag): (&RankAssignment, u64), tries: &mut Tries) {
    let rank = Rank(job.rank);
    if !crew.lacks_spare(rank, tag) || !tries.take(Instant::now()) {
        return;
    }
    let prepare = |post: WorkerSite| {
        ToWorker::Prepare(Box::new(RankAssignment {
            model: post.model,
            adapters: adapters::at(&job.adapters, &post.adapters),
            draft: job.draft.clone().and_then(|draft| draft.at(post.draft)),
            first_core: post.first_core,
            ..job.clone()
        }))
    };
    match crew.keep_spare(rank, tag, &prepare) {
        Ok(is_kept) => debug!(rank = rank.0, is_kept, "start spare"),
        Err(error) => debug!(rank = rank.0, %error, "no spare"),
    }
}

/// Times of the attempts to start a rank's standby.
#[derive(Debug, Default)]
struct Tries(Vec<Instant>);

impl Tries {
    /// Whether an attempt is due; if so, it is counted.
    fn take(&mut self, now: Instant) -> bool {
        let since = |at: &Instant| now.saturating_duration_since(*at);
        self.0.retain(|at| since(at) < TRIES_WITHIN);
        let last = self.0.last().map_or(Duration::MAX, since);
        let pause = PAUSES.get(self.0.len());
        let is_due = pause.is_some_and(|pause| last >= *pause);
        if is_due {
            self.0.push(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spare_is_tried_three_times_with_pauses_within_ten_minutes() {
        let (mut tries, start) = (Tries::default(), Instant::now());
        let mut due = |s| tries.take(start + Duration::from_secs(s));
        let seconds = (0..1300).filter(|s| due(*s));
        assert_eq!(
            seconds.collect::<Vec<u64>>(),
            [0, 10, 70, 600, 660, 720, 1200, 1260]
        );
    }
}
