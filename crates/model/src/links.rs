//! Messages between the ranks of a split model: plans, residual streams, partial sums and logits.
//!
//! [`Model`](crate::Model) and the MLX backend call [`Links`] during a step. The groups below it
//! move the bytes; this module defines order, sizes and deadlines.
//!
//! One step of a split model, leader L in the last stage:
//!
//! ```text
//! L      -- Plan --------------> every other rank                      ~100 bytes, decoding
//! stage 0   embeds tokens
//! stage s   each layer, twice:   all_gather of the roots of its sums   T x C f32 for each root
//!           -- residual -------> stage s + 1                           T x C f32
//! last      each rank -- logits of its rows of the head -> L           R x V / ranks f32
//! ```
//!
//! Activations travel as f32, directly from rank to rank.

use std::ops::Range;
use std::time::{Duration, Instant};

use paceline_base::{Bytes, Rank, tree};
use paceline_comm::{Deadline, Group, MESSAGES_HELD};

use crate::candidates::LogitExtent;
use crate::plan::{HEADER_WORDS, StepPlan};
use crate::progress::StepProgress;
use crate::split::{LeafCut, Shard};
use crate::step::halves::HalfTurn;
use crate::trace::{Kind, Tracer};
use crate::{Error, candidates, page_store};

/// Message tags.
const PLAN: u32 = 1;
const RESIDUAL: u32 = 2;
const LOGITS: u32 = 3;
const RECALLED: u32 = 4;

/// Messages per residual stream of a step: one for each half.
const RESIDUALS: usize = 2;

/// Maximum in-flight steps of a pipeline. The leader receives nothing while it waits for a rank to
/// take a plan. Meanwhile it must have room for the residuals of all other steps. Otherwise the
/// previous stage takes no plan either: deadlock. With 16 messages of capacity the limit is 9.
pub(crate) const STEPS_MAX: usize = 1 + MESSAGES_HELD / RESIDUALS;

/// The groups of a split model's rank.
#[derive(Debug)]
pub struct Links {
    /// All ranks of the split.
    pub world: Box<dyn Group>,
    /// The ranks of this rank's stage, in order.
    pub stage: Box<dyn Group>,
    /// Timeout for another rank's part of a step. The groups detect a dead or unreachable rank
    /// sooner.
    pub patience: Duration,
    /// Whether a step with enough rows runs as two halves; equal on all ranks. One half computes
    /// while the sums of the other are exchanged, or while later stages compute the other. It
    /// changes no bit.
    pub overlap: bool,
    /// Records exchange times while a trace runs.
    pub trace: Tracer,
    /// This rank's progress within a step. Steps on MLX are not counted.
    pub progress: StepProgress,
}

impl LeafCut {
    /// Completes a sum whose parts lie on the ranks of `group`. `sum` holds n values for each of
    /// [`all_roots`](Self::all_roots). The caller has written this rank's roots in place, after
    /// those of earlier ranks. On return the first n values are the whole sum. `counts` is scratch.
    ///
    /// Collective. Cost: an all-gather of `sum`, and an addition of n values for each root but one.
    ///
    /// # Errors
    /// Errors of the all-gather; `sum` is then undefined.
    pub fn complete(
        &self,
        group: &dyn Group,
        sum: &mut [f32],
        counts: &mut Vec<usize>,
        deadline: Deadline,
    ) -> Result<(), paceline_comm::Error> {
        let n = sum.len() / self.nodes.len();
        counts.clear();
        counts.extend(self.roots.iter().map(|roots| roots * n));
        group.all_gather_in_place(sum, counts, deadline)?;
        tree::combine(self.leaves, &self.nodes, sum);
        Ok(())
    }
}

impl Links {
    /// Overlaps computing and exchanges if some of the ranks communicate over a network. Ranks that
    /// only wait for each other's processors gain nothing.
    pub fn new(world: Box<dyn Group>, stage: Box<dyn Group>, patience: Duration) -> Self {
        let overlap = world.tuning().wire;
        Self {
            world,
            stage,
            patience,
            overlap,
            trace: Tracer::default(),
            progress: StepProgress::default(),
        }
    }

    /// Bytes that this rank has sent.
    pub fn sent(&self) -> Bytes {
        Bytes(self.world.traffic().sent.0 + self.stage.traffic().sent.0)
    }

    /// Sent bytes per rank of the world; empty if a group does not report them.
    pub fn sent_to(&self) -> Vec<Bytes> {
        let mut to = self.world.sent_to();
        let first = self.world.rank().0 - self.stage.rank().0;
        for (to, sent) in to.iter_mut().skip(first as usize).zip(self.stage.sent_to()) {
            to.0 += sent.0;
        }
        to
    }

    /// Converts an error of the stage's group, which counts ranks from the first of the stage.
    fn stage_error(&self, error: paceline_comm::Error) -> Error {
        if self.stage.size() == self.world.size() {
            return error.into();
        }
        Error::Stage {
            first: Rank(self.world.rank().0 - self.stage.rank().0),
            source: error,
        }
    }

    /// Labels the following exchanges of the stage with layer `index` of the model, counted from 0.
    /// Ranks in different layers get an error that names both: mark n is the n-th layer, counted
    /// from 1.
    fn enter(&self, index: usize) {
        self.stage.mark(index as u64 + 1);
    }

    fn deadline(&self) -> Deadline {
        Deadline::at(Instant::now() + self.patience)
    }

    /// # Panics
    /// If the groups are not those of the rank and stage of `shard`.
    pub fn check(&self, shard: &Shard) {
        let ranks = shard.stage_ranks();
        assert_eq!(self.world.rank(), shard.rank, "rank in the world");
        assert_eq!(self.stage.size(), ranks.len() as u32, "ranks of the stage");
        let rank = ranks.start + self.stage.rank().0;
        assert_eq!(Rank(rank), shard.rank, "rank in the stage");
    }

    /// Sends every other rank a keepalive without work.
    pub fn announce_idle(&self) -> Result<(), Error> {
        let mut words = Vec::new();
        StepPlan::write_idle(&mut words);
        self.announce(&words)
    }

    /// Gathers the parts of all ranks of the stage, in rank order, `counts` bytes each.
    pub fn gather_parts(&self, mine: &[u8], all: &mut [u8], counts: &[usize]) -> Result<(), Error> {
        let _exchange = self.progress.exchange();
        let began = self.trace.begin();
        let gathered = self.stage.all_gather_v(mine, all, counts, self.deadline());
        self.trace.end(began, Kind::Sum, 0);
        gathered.map_err(|error| self.stage_error(error))
    }

    /// Sends every other rank the plan of the next step. Only the leader calls it.
    pub fn announce(&self, words: &[u32]) -> Result<(), Error> {
        self.trace.next_step();
        self.announce_step(words, 0)
    }

    /// As [`announce`](Self::announce), for the step `ahead` steps after the last one that the
    /// trace has counted. The trace counts a step when it is computed.
    pub fn announce_step(&self, words: &[u32], ahead: u64) -> Result<(), Error> {
        let began = self.trace.begin();
        self.announce_ahead(words)?;
        self.trace.end_ahead(began, Kind::Plan, ahead);
        Ok(())
    }

    /// Sends every other rank a message in place of a plan. The trace ignores it: only plans align
    /// the ranks' times.
    pub(crate) fn announce_ahead(&self, words: &[u32]) -> Result<(), Error> {
        let _exchange = self.progress.exchange();
        let deadline = self.deadline();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (header, rest) = bytes.split_at(4 * HEADER_WORDS);
        for rank in (0..self.world.size()).map(Rank) {
            if rank == self.world.rank() {
                continue;
            }
            self.world.send(header, rank, PLAN, deadline)?;
            if !rest.is_empty() {
                self.world.send(rest, rank, PLAN, deadline)?;
            }
        }
        Ok(())
    }

    /// Reports to the leader how many of its listed pages this rank has restored.
    pub(crate) fn answer_recall(&self, leader: Rank, pages: usize) -> Result<(), Error> {
        let count = (pages as u32).to_le_bytes();
        Ok(self.world.send(&count, leader, RECALLED, self.deadline())?)
    }

    /// Fewest restored pages over the other ranks; `most` without others.
    pub(crate) fn fewest_recalled(&self, most: usize) -> Result<usize, Error> {
        let _exchange = self.progress.exchange();
        let (own, mut fewest) = (self.world.rank(), most);
        for rank in (0..self.world.size()).map(Rank).filter(|r| *r != own) {
            let mut count = [0u8; 4];
            self.world
                .recv(&mut count, rank, RECALLED, self.deadline())?;
            fewest = fewest.min(u32::from_le_bytes(count) as usize);
        }
        Ok(fewest)
    }

    /// Waits for the next plan from `leader`.
    pub fn next_plan(&self, leader: Rank, words: &mut Vec<u32>) -> Result<(), Error> {
        words.clear();
        let began = self.trace.begin();
        self.receive_words(leader, HEADER_WORDS, words)?;
        let len = StepPlan::len_of(words)?;
        if len > HEADER_WORDS {
            self.receive_words(leader, len - HEADER_WORDS, words)?;
        }
        if page_store::is_message(words) {
            return Ok(());
        }
        self.trace.next_step();
        self.trace.end(began, Kind::Plan, 0);
        self.trace.begin_step();
        Ok(())
    }

    /// Appends the `n` words of the next message.
    fn receive_words(&self, from: Rank, n: usize, words: &mut Vec<u32>) -> Result<(), Error> {
        let mut bytes = vec![0u8; 4 * n];
        self.world.recv(&mut bytes, from, PLAN, self.deadline())?;
        words.extend(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)));
        Ok(())
    }

    /// Completes a sum of layer `index` over the stage. `sum` holds the roots of all ranks, `(n,)`
    /// each; this rank's are already in place. On return the whole sum is at the start.
    pub(crate) fn sum(
        &self,
        index: usize,
        cut: &LeafCut,
        sum: &mut [f32],
        counts: &mut Vec<usize>,
    ) -> Result<(), Error> {
        let _exchange = self.progress.exchange();
        self.enter(index);
        let began = self.trace.begin();
        let completed = cut.complete(&*self.stage, sum, counts, self.deadline());
        self.trace.end(began, Kind::Sum, index);
        completed.map_err(|error| self.stage_error(error))
    }

    /// Runs an exchange of layer `index` while the other half of the step computes.
    pub(crate) fn in_turn(
        &self,
        turn: &mut HalfTurn<'_>,
        index: usize,
        exchange: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let began = self.trace.begin();
        // A half that waits for its turn computes nothing, before the exchange and after it.
        let mut waiting = Some(self.progress.exchange());
        let exchanged = turn.exchange(|| {
            drop(waiting.take()); // the exchange counts itself
            let exchanged = exchange();
            waiting = Some(self.progress.exchange());
            exchanged
        });
        drop(waiting);
        self.trace.end(began, Kind::Turn, index);
        exchanged
    }

    /// All-gathers values of layer `index` over the stage. `values` holds the parts of all ranks in
    /// order, `counts` their sizes. This rank's part is already in place.
    pub(crate) fn gather(
        &self,
        index: usize,
        values: &mut [f32],
        counts: &[usize],
    ) -> Result<(), Error> {
        let _exchange = self.progress.exchange();
        self.enter(index);
        let began = self.trace.begin();
        let gathered = self
            .stage
            .all_gather_in_place(values, counts, self.deadline());
        self.trace.end(began, Kind::Sum, index);
        gathered.map_err(|error| self.stage_error(error))
    }

    /// Receives the residual stream, `(T, C)`, from the previous stage, if there is one.
    pub fn receive_residual(&self, shard: &Shard, into: &mut [f32]) -> Result<(), Error> {
        let Some(rank) = shard.source() else {
            return Ok(());
        };
        let _exchange = self.progress.exchange();
        let began = self.trace.begin();
        self.world.recv(into, rank, RESIDUAL, self.deadline())?;
        self.trace.end(began, Kind::Receive, 0);
        Ok(())
    }

    /// Sends the residual stream to the next stage, if there is one.
    pub fn send_residual(&self, shard: &Shard, residual: &[f32]) -> Result<(), Error> {
        let _exchange = self.progress.exchange();
        let began = self.trace.begin();
        let mut sends = false;
        for rank in shard.targets() {
            sends = true;
            self.world.send(residual, rank, RESIDUAL, self.deadline())?;
        }
        self.trace.end(began.filter(|_| sends), Kind::Send, 0);
        Ok(())
    }

    /// Scratch values that [`gather_logits`](Self::gather_logits) needs for `rows` rows.
    pub fn logits_room(shard: &Shard, rows: usize) -> usize {
        let others = shard.vocab.iter().skip(1).map(Range::len);
        let most = others.max().filter(|_| shard.leads());
        rows * most.unwrap_or(0)
    }

    /// Gathers the logits of all ranks of the last stage at the leader. `mine` is `(rows,
    /// vocabulary of this rank)`. Only the leader uses `all`, `(rows, vocabulary)`, and `scratch`
    /// of [`logits_room`](Self::logits_room). `extents` limits each row: the leader gets NaN for
    /// other ranks' logits outside it.
    pub fn gather_logits(
        &self,
        shard: &Shard,
        extents: &[LogitExtent],
        mine: &[f32],
        all: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<(), Error> {
        let _exchange = self.progress.exchange();
        let leader = Rank(shard.stage_ranks.start);
        let began = self.trace.begin();
        if !shard.leads() {
            if mine.is_empty() {
                return Ok(());
            }
            self.send_logits(candidates::pack(mine, extents), mine, leader)?;
            self.trace.end(began, Kind::Logits, 0);
            return Ok(());
        }
        place(mine, extents.len(), shard.vocab().start, all);
        for (rank, columns) in shard.stage_ranks().zip(&shard.vocab).skip(1) {
            self.take_logits((Rank(rank), columns), extents, all, scratch)?;
        }
        let alone = shard.stage_ranks().len() == 1;
        self.trace.end(began.filter(|_| !alone), Kind::Logits, 0);
        Ok(())
    }

    /// Sends `packed`, or `mine` if nothing is packed.
    fn send_logits(
        &self,
        packed: Option<candidates::CandidateMessage>,
        mine: &[f32],
        leader: Rank,
    ) -> Result<(), Error> {
        let words = packed
            .as_ref()
            .map_or(mine, |packed| packed.words.as_slice());
        self.world.send(words, leader, LOGITS, self.deadline())?;
        let whole = packed.map(|packed| packed.whole).unwrap_or_default();
        if !whole.is_empty() {
            self.world.send(&whole, leader, LOGITS, self.deadline())?;
        }
        Ok(())
    }

    /// Receives a rank's `columns` of `all`.
    fn take_logits(
        &self,
        (rank, columns): (Rank, &Range<usize>),
        extents: &[LogitExtent],
        all: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<(), Error> {
        let part = &mut scratch[..candidates::packed_len(columns.len(), extents)];
        if part.is_empty() {
            return Ok(());
        }
        self.world.recv(part, rank, LOGITS, self.deadline())?;
        let owed = candidates::unpack(part, extents, columns, all);
        if owed.is_empty() {
            return Ok(());
        }
        let part = &mut scratch[..owed.len() * columns.len()];
        self.world.recv(part, rank, LOGITS, self.deadline())?;
        let vocab = all.len() / extents.len();
        candidates::place_owed(part, &owed, columns, (all, vocab));
        Ok(())
    }
}

/// Copies `part`, `(rows, n)`, to columns `first..first + n` of `all`, `(rows, vocabulary)`.
fn place(part: &[f32], rows: usize, first: usize, all: &mut [f32]) {
    let (n, vocab) = (part.len() / rows, all.len() / rows);
    for row in 0..rows {
        all[row * vocab + first..][..n].copy_from_slice(&part[row * n..(row + 1) * n]);
    }
}

#[cfg(test)]
mod tests {
    use paceline_comm::local;

    use super::*;

    /// Each step has a plan of two messages, pages to persist after it, and two halves. A stage
    /// that is ahead of the leader and the leader wait in turns for room at the other.
    #[test]
    fn the_leader_announces_no_more_steps_than_residuals_have_room() {
        let patience = Duration::from_secs(20);
        let worlds = local::ranks(2).into_iter().zip(local::ranks(2));
        let mut links =
            worlds.map(|(world, stage)| Links::new(Box::new(world), Box::new(stage), patience));
        let (first, last) = (links.next().unwrap(), links.next().unwrap());
        let steps = 4 * STEPS_MAX;
        let stage = std::thread::spawn(move || {
            let mut words = Vec::new();
            for _ in 0..2 * steps {
                first.next_plan(Rank(1), &mut words).unwrap();
                let computes = !page_store::is_message(&words);
                for _ in 0..RESIDUALS * usize::from(computes) {
                    let until = first.deadline();
                    let sent = first.world.send(&[1.0_f32], Rank(1), RESIDUAL, until);
                    sent.unwrap();
                }
            }
        });
        let announce = |kind| {
            let mut words = vec![0; 2 * HEADER_WORDS];
            (words[0], words[1]) = (2 * HEADER_WORDS as u32, kind);
            last.announce_ahead(&words).unwrap();
        };
        for step in 0..steps + STEPS_MAX {
            if let Some(computed) = step.checked_sub(STEPS_MAX) {
                for _ in 0..RESIDUALS {
                    let (mut half, until) = ([0.0_f32], last.deadline());
                    let came = last.world.recv(&mut half, Rank(0), RESIDUAL, until);
                    came.unwrap_or_else(|error| panic!("step {computed}: {error}"));
                }
                announce(3); // pages to persist
            }
            if step < steps {
                announce(1); // a step
            }
        }
        stage.join().unwrap();
    }

    #[test]
    fn ranks_in_different_layers_are_told_which() {
        let worlds = local::ranks(2).into_iter().zip(local::ranks(2));
        let threads = worlds.map(|(world, stage)| {
            std::thread::spawn(move || {
                let patience = Duration::from_secs(10);
                let links = Links::new(Box::new(world), Box::new(stage), patience);
                links.enter(3 + links.stage.rank().0 as usize);
                let gathered = links
                    .stage
                    .all_gather(&[1.0_f32], &mut [0.0; 2], links.deadline());
                links.stage_error(gathered.unwrap_err()).to_string()
            })
        });
        for thread in threads.collect::<Vec<_>>() {
            let error = thread.join().unwrap();
            assert!(
                error.contains("mark 4") && error.contains("mark 5"),
                "{error}"
            );
        }
    }
}
