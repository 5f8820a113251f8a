//! Workers that are ranks of a sharded run: forms their group, has them make steps together, and
//! forms it again when one is lost.
//!
//! ```text
//! every rank ready --Listen--> addresses, steps --Form--> the state before a step --Step--> ...
//!                                      ^------------- a rank lost, or the group broken ---'
//! ```
//!
//! A lost rank's process is replaced, and gets its state from the copies of two others. A step that
//! one rank has committed is committed by all; any other is repeated. When a rank is lost with the
//! one that has its copy, the run continues from its newest checkpoint.

use std::net::SocketAddr;
use std::path::PathBuf;

use paceline_base::Rank;
use paceline_cluster::Error as ClusterError;
use paceline_comm::tcp::{GroupId, GroupKey};

use super::{LOOK_EVERY, WorkerEvent, WorkerSet};
use crate::checkpoint::{Checkpoint, split};
use crate::error::Error;
use crate::messages::{FromWorker, RankUse, ShardSource, ToWorker};
use crate::report::TrainingProgress;
use crate::run::TrainingRun;
use crate::shard::{GroupPlan, SecretKey, ShardCuts, ShardFile, ShardRole, Sharding};
use crate::workers::FRUITLESS_MAX;

/// Attempts, each of [`LOOK_EVERY`] at most, to reach a rank after the group broke. They last half
/// an hour, as long as calls of a group wait for leaves of the slowest machine.
const LOOKS_MAX: u32 = 18_000;

/// Receives the run's progress.
type Watch<'a> = dyn FnMut(TrainingProgress) + 'a;

/// The group of a sharded run, as far as the parent knows.
#[derive(Debug)]
pub(super) struct RankGroup {
    /// None of stages.
    sharding: Option<Sharding>,
    cuts: ShardCuts,
    /// Counts groups: messages about an earlier one are passed over.
    pub(super) epoch: u64,
    pub(super) is_formed: bool,
    /// Whether the ranks have had a state.
    has_begun: bool,
    /// The step that comes next.
    pub(super) step: u64,
    /// The last step that a rank committed.
    stepped: Option<Stepped>,
}

/// A step that a rank has committed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stepped {
    step: u64,
    /// The norm of the gradient.
    pub(crate) norm: f64,
    pub(crate) losses: Vec<f64>,
    pub(crate) most: RankUse,
}

impl RankGroup {
    /// A group of `ranks` ranks, which the next step begins with the state of `step`.
    pub(super) fn new(run: &TrainingRun, sharding: Option<Sharding>, ranks: usize) -> Self {
        Self {
            sharding,
            cuts: ShardCuts::new(run.net.layout(), run.net.parts(), ranks),
            epoch: 0,
            is_formed: false,
            has_begun: false,
            step: 0,
            stepped: None,
        }
    }

    /// Whether the ranks have the state of the training.
    pub(super) fn has_state(&self) -> bool {
        self.sharding.is_some_and(Sharding::has_state)
    }
}

/// A rank's answer when the group is to be formed.
#[derive(Clone, Debug, Default)]
struct Seat {
    addrs: Vec<SocketAddr>,
    has_state: bool,
}

impl WorkerSet {
    /// The part of a worker in a sharded run.
    pub(super) fn role(&self, rank: usize) -> Option<ShardRole> {
        let sharding = self.group.as_ref()?.sharding?;
        let of = self.members.len();
        Some(ShardRole { rank, of, sharding })
    }

    pub(super) fn group(&mut self) -> &mut RankGroup {
        self.group.as_mut().expect("these ranks have a group")
    }

    /// Has all ranks make step `step`. Ranks without a state begin with `from`, or with the first
    /// values.
    pub(super) fn step_together(
        &mut self,
        run: &TrainingRun,
        (step, from): (u64, Option<&Checkpoint>),
        watch: &mut Watch<'_>,
    ) -> Result<Stepped, Error> {
        self.group().step = step;
        loop {
            self.form(run, from, watch)?;
            if let Some(stepped) = self.group().stepped.take_if(|done| done.step == step) {
                self.fruitless = 0;
                return Ok(stepped);
            }
            let epoch = self.group().epoch;
            let mut told: Option<Stepped> = None;
            let mut most = RankUse::default();
            let whole =
                self.ask_all(
                    &|_| ToWorker::Step { epoch, step },
                    watch,
                    |_, said| match said {
                        FromWorker::Stepped {
                            epoch: of,
                            step,
                            norm,
                            losses,
                            use_of,
                        } if of == epoch => {
                            most.sent_bytes = most.sent_bytes.max(use_of.sent_bytes);
                            most.memory_bytes = most.memory_bytes.max(use_of.memory_bytes);
                            let losses = losses.into_iter().map(f64::from_bits).collect();
                            let norm = f64::from_bits(norm);
                            told = Some(Stepped {
                                step,
                                norm,
                                losses,
                                most,
                            });
                            true
                        }
                        _ => false,
                    },
                )?;
            self.group().stepped = told;
            self.group().is_formed &= whole;
        }
    }

    /// The loss of each row of what is held out, by the values before step `step`.
    pub(super) fn judge_together(
        &mut self,
        run: &TrainingRun,
        (step, from): (u64, Option<&Checkpoint>),
        watch: &mut Watch<'_>,
    ) -> Result<Vec<f64>, Error> {
        self.group().step = step;
        loop {
            self.form(run, from, watch)?;
            let epoch = self.group().epoch;
            let mut all = vec![0.0; run.held_out()];
            let whole = self.ask_all(&|_| ToWorker::Judge { epoch }, watch, |_, said| {
                let FromWorker::Judged { epoch: of, losses } = said else {
                    return false;
                };
                for (row, loss) in losses {
                    let place = all.get_mut(row).into_iter();
                    place.for_each(|place| *place = f64::from_bits(loss));
                }
                of == epoch
            })?;
            self.group().is_formed &= whole;
            if whole {
                return Ok(all);
            }
        }
    }

    /// Has all ranks write their shards. Gives the files, and their SHA-256, by rank.
    pub(super) fn save_together(
        &mut self,
        run: &TrainingRun,
        (step, from): (u64, Option<&Checkpoint>),
        watch: &mut Watch<'_>,
    ) -> Result<(ShardCuts, Vec<(PathBuf, String)>), Error> {
        self.group().step = step;
        loop {
            self.form(run, from, watch)?;
            let epoch = self.group().epoch;
            let exchange = self.exchange.clone();
            let mut files = vec![(PathBuf::new(), String::new()); self.members.len()];
            let whole = self.ask_all(&|_| ToWorker::Save { epoch }, watch, |rank, said| {
                let FromWorker::Saved {
                    epoch: of,
                    digest,
                    step: at,
                    ..
                } = said
                else {
                    return false;
                };
                files[rank] = (exchange.join(ShardFile::saved(rank)), digest);
                of == epoch && at == step
            })?;
            self.group().is_formed &= whole;
            if whole {
                return Ok((self.group().cuts.clone(), files));
            }
        }
    }

    /// Forms the group, unless it is there. Then every rank has the state before the next step, or
    /// the one behind a step that was committed.
    pub(super) fn form(
        &mut self,
        run: &TrainingRun,
        from: Option<&Checkpoint>,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        while !self.group().is_formed {
            self.wait_until_ready(watch)?;
            self.fruitless += 1; // until a step is made
            self.group().epoch += 1;
            let epoch = self.group().epoch;
            let open = self.posts.iter().any(|post| !post.place.is_empty());
            let mut seats = vec![Seat::default(); self.members.len()];
            let whole = self.ask_all(
                &|_| ToWorker::Listen { epoch, open },
                watch,
                |rank, said| {
                    let FromWorker::Listening {
                        epoch: of,
                        addrs,
                        step,
                    } = said
                    else {
                        return false;
                    };
                    let has_state = step.is_some();
                    seats[rank] = Seat { addrs, has_state };
                    of == epoch
                },
            )?;
            if !whole {
                continue;
            }
            let (source, step) = self.source(run, from, &seats)?;
            let key = open.then(GroupKey::random).transpose();
            let plan = GroupPlan {
                id: GroupId::random().0,
                key: key
                    .map_err(Error::Listen)?
                    .map(|key| SecretKey(*key.bytes())),
                addrs: seats.into_iter().map(|seat| seat.addrs).collect(),
            };
            let message = |rank| ToWorker::Form {
                epoch,
                rank,
                plan: plan.clone(),
                from: source.clone(),
                step,
            };
            let formed = self.ask_all(
                &message,
                watch,
                |_, said| matches!(said, FromWorker::Formed { epoch: of, .. } if of == epoch),
            )?;
            self.group().is_formed = formed;
            if self.group().has_state() {
                self.forget(step); // the files of shards
                self.group().has_begun |= formed;
            }
        }
        Ok(())
    }

    /// Where the ranks get their state, and the step before which it is that.
    fn source(
        &mut self,
        run: &TrainingRun,
        from: Option<&Checkpoint>,
        seats: &[Seat],
    ) -> Result<(ShardSource, u64), Error> {
        let (exchange, last) = (self.exchange.clone(), self.last.clone());
        let group = self.group();
        if !group.has_begun {
            return match from.filter(|_| group.has_state()) {
                None => Ok((ShardSource::First, group.step)),
                Some(checkpoint) => {
                    split(checkpoint, run, &group.cuts, &exchange)?;
                    Ok((ShardSource::File, group.step))
                }
            };
        }
        let empty: Vec<usize> = (0..seats.len())
            .filter(|rank| !seats[*rank].has_state)
            .collect();
        let behind = |rank: &&usize| empty.contains(&((**rank + 1) % seats.len()));
        if let Some(rank) = empty.iter().find(behind) {
            (group.has_begun, group.stepped) = (false, None);
            return Err(Error::ShardLost { rank: *rank, last });
        }
        let step = group.step;
        let committed = group.stepped.as_ref().filter(|done| done.step == step);
        let norm = committed.map(|done| done.norm.to_bits());
        let step = step + u64::from(norm.is_some());
        Ok((ShardSource::Copies { empty, norm }, step))
    }

    /// Waits until every rank has read its model.
    fn wait_until_ready(&mut self, watch: &mut Watch<'_>) -> Result<(), Error> {
        loop {
            let has_all = self.members.iter().all(|member| member.is_there);
            if !has_all || self.fruitless > FRUITLESS_MAX {
                let last = self.last.clone();
                return Err(Error::Lost { last });
            }
            if self.members.iter().all(|member| member.is_ready) {
                return Ok(());
            }
            if let Some(event) = self.workers.recv(LOOK_EVERY) {
                self.take(event)?;
            }
            self.report_progress(watch);
        }
    }

    /// Sends every rank a message, and waits until each has answered, failed or ended. `answer`
    /// gets each message and says whether it is a rank's answer. False if not all have answered.
    pub(super) fn ask_all(
        &mut self,
        message: &dyn Fn(usize) -> ToWorker,
        watch: &mut Watch<'_>,
        mut answer: impl FnMut(usize, FromWorker) -> bool,
    ) -> Result<bool, Error> {
        let mut waits = vec![true; self.members.len()];
        let mut whole = true;
        for (rank, waits) in waits.iter_mut().enumerate() {
            match self.workers.send(Rank(rank as u32), &message(rank)) {
                // The event of its end follows within `CLOSED_LIMIT` of the monitor.
                Ok(()) | Err(ClusterError::Closed { .. }) => {}
                Err(error) => {
                    self.lose(rank as u32, error.to_string());
                    (*waits, whole) = (false, false);
                }
            }
        }
        let epoch = self.group().epoch;
        let mut looks = 0;
        while waits.contains(&true) {
            looks = if whole { 0 } else { looks + 1 };
            if looks > LOOKS_MAX {
                for rank in (0..waits.len()).filter(|rank| waits[*rank]) {
                    self.lose(rank as u32, format!("rank {rank} hangs"));
                }
                return Ok(false);
            }
            if let Some(event) = self.workers.recv(LOOK_EVERY) {
                let rank = event.rank().0 as usize;
                match self.take(event)? {
                    WorkerEvent::Nothing => {}
                    WorkerEvent::Lost(_) => (waits[rank], whole) = (false, false),
                    WorkerEvent::Said(_, FromWorker::Broken { epoch: of, reason }) => {
                        if of == epoch {
                            self.last = reason;
                            (waits[rank], whole) = (false, false);
                        }
                    }
                    WorkerEvent::Said(_, said) => {
                        if answer(rank, said) {
                            waits[rank] = false;
                        }
                    }
                }
            }
            self.report_progress(watch);
        }
        Ok(whole)
    }
}
