//! The scheduler.

use std::collections::VecDeque;
use std::sync::Arc;

use paceline_formats::tokenizer::Tokenizer;
use paceline_model::{Batch, BatchSequence, Compute, Logits, Weights};
use paceline_tensor::PAGE;

use crate::pages::Pages;
use crate::sampling::Scratch;
use crate::sequence::Sequence;
use crate::{EngineConfig, Error, Event, Request, SequenceId, Snapshot};

/// Runs sequences of one model.
///
/// Not for several threads at once: the owner submits, steps and cancels. A step blocks for one
/// batch.
#[derive(Debug)]
pub struct Engine {
    model: Arc<dyn Weights>,
    tokenizer: Arc<Tokenizer>,
    config: EngineConfig,
    /// Model and kernel class, as snapshots carry it.
    identity: String,
    compute: Box<dyn Compute>,
    scratch: Scratch,
    pages: Pages,
    /// Tokens that were in the cache already when their sequence was admitted.
    reused: u64,
    /// In order of admission; only these own pages.
    running: Vec<Sequence>,
    /// Preempted sequences in the order they ran in, then snapshots in the order they came.
    resuming: VecDeque<Sequence>,
    /// Requests in the order they came.
    waiting: VecDeque<Sequence>,
    last_id: u64,
}

impl Engine {
    /// Reserves memory for `config`.
    ///
    /// # Errors
    /// [`Error::Config`] for sizes that cannot work, [`Error::Model`] when memory cannot be had.
    pub fn new(
        model: Arc<dyn Weights>,
        tokenizer: Arc<Tokenizer>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        config.check()?;
        let compute = Arc::clone(&model).reserve(config.batch_size(), config.cache_positions)?;
        Ok(Self {
            scratch: Scratch::new(model.config().vocab),
            pages: Pages::new(compute.pages()),
            reused: 0,
            identity: format!("{} ({})", config.model, model.numbers()),
            model,
            tokenizer,
            config,
            compute,
            running: Vec::new(),
            resuming: VecDeque::new(),
            waiting: VecDeque::new(),
            last_id: 0,
        })
    }

    /// The model.
    pub fn model(&self) -> &dyn Weights {
        &*self.model
    }

    /// The sizes.
    pub const fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.resuming.is_empty() && self.waiting.is_empty()
    }

    /// Sequences that are computed.
    pub const fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that are to go on: preempted ones, and snapshots.
    pub fn n_resuming(&self) -> usize {
        self.resuming.len()
    }

    /// Requests that wait for a place.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Tokens so far that did not have to be computed, because another sequence, or the same one
    /// before it gave up its pages, had begun with the same ones: whole pages of 64.
    pub const fn n_reused(&self) -> u64 {
        self.reused
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`Error::Busy`] gives the request back before anything else is looked at; a request that
    /// cannot be answered says why.
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, Error> {
        let waiting = self.waiting.len();
        if waiting >= self.config.max_waiting {
            let request = Box::new(request);
            return Err(Error::Busy { waiting, request });
        }
        request.check(self.model.config().vocab, self.config.context)?;
        let id = self.new_id();
        let sequence = Sequence::new(id, request, self.config.context)?;
        self.waiting.push_back(sequence);
        Ok(id)
    }

    fn new_id(&mut self) -> SequenceId {
        self.last_id += 1;
        SequenceId(self.last_id)
    }

    /// Forgets a sequence; no more events come of it.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn cancel(&mut self, id: SequenceId) -> Result<(), Error> {
        self.take(id).map(drop)
    }

    /// Takes a sequence out of this engine.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn take_snapshot(&mut self, id: SequenceId) -> Result<Snapshot, Error> {
        Ok(self.take(id)?.into_snapshot(self.identity.clone()))
    }

    /// A copy of a sequence's state, which goes on here.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn snapshot(&self, id: SequenceId) -> Result<Snapshot, Error> {
        let queued = self.resuming.iter().chain(&self.waiting);
        let sequence = self.running.iter().chain(queued).find(|s| s.id == id);
        let copy = sequence.ok_or(Error::NoSequence(id))?.clone();
        Ok(copy.into_snapshot(self.identity.clone()))
    }

    /// Continues a snapshot, before requests that wait. The bound on waiting requests does not
    /// apply: as many can be resumed as an engine of the same sizes holds.
    ///
    /// # Errors
    /// [`Error::BusyResuming`] gives the snapshot back. [`Error::OtherModel`] and
    /// [`Error::SnapshotTooLong`] when its answer would be another one here.
    /// [`Error::BadSnapshot`], [`Error::BadSnapshotText`], [`Error::Token`] and what is said of a
    /// request's parameters for one that no engine made.
    pub fn restore(&mut self, snapshot: Snapshot) -> Result<SequenceId, Error> {
        let waiting = self.resuming.len();
        if waiting >= self.config.max_resuming() {
            let snapshot = Box::new(snapshot);
            return Err(Error::BusyResuming { waiting, snapshot });
        }
        if snapshot.model != self.identity {
            let (got, expected) = (snapshot.model, self.identity.clone());
            return Err(Error::OtherModel { got, expected });
        }
        snapshot.check(self.config.context, self.model.config().vocab)?;
        let id = self.new_id();
        self.resuming.push_back(Sequence::restored(id, snapshot));
        Ok(id)
    }

    /// Takes a sequence out of its queue, its pages given back.
    fn take(&mut self, id: SequenceId) -> Result<Sequence, Error> {
        if let Some(at) = self.running.iter().position(|s| s.id == id) {
            return Ok(self.stop_running(at));
        }
        for queue in [&mut self.resuming, &mut self.waiting] {
            let at = queue.iter().position(|s| s.id == id);
            if let Some(sequence) = at.and_then(|at| queue.remove(at)) {
                return Ok(sequence);
            }
        }
        Err(Error::NoSequence(id))
    }

    fn stop_running(&mut self, index: usize) -> Sequence {
        let mut sequence = self.running.remove(index);
        self.pages.release(&mut sequence.pages);
        sequence.computed = 0;
        sequence
    }

    /// Runs one batch and returns what happened, in order; nothing when the engine is idle.
    ///
    /// Every running sequence that is past its prompt gets one row; the rest of
    /// [`EngineConfig::max_rows`] goes to prompts, oldest first. A sequence that needs a page when
    /// none is free makes the youngest give up its pages and wait; that one computes them again
    /// later and loses nothing. The oldest never gives up, so every sequence ends.
    ///
    /// The forward pass allocates a few words per sequence and layer and nothing per row; besides,
    /// a step allocates its plan, its events with their texts, and a copy of the tokens of each
    /// sequence that penalises repetition.
    ///
    /// # Errors
    /// When the forward pass fails: nothing can be computed any more, and what the sequences have
    /// in the cache is unknown. [`take_snapshot`](Self::take_snapshot) still works.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.admit();
        let plan = self.plan();
        self.forward(&plan)?;
        Ok(self.take_results(&plan))
    }

    /// Keeps the other ranks of a split model waiting. Called now and then by an owner that has
    /// nothing to compute, more often than the links' patience.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn idle(&mut self) -> Result<(), Error> {
        Ok(self.compute.idle()?)
    }

    /// Moves sequences to the running ones, in order, while all their tokens fit in the pages that
    /// are neither taken nor still needed for tokens of running ones. Pages that another sequence
    /// filled with the same beginning are shared.
    pub(crate) fn admit(&mut self) {
        while self.running.len() < self.config.max_running {
            let queue = if self.resuming.is_empty() {
                &mut self.waiting
            } else {
                &mut self.resuming
            };
            let Some(next) = queue.front_mut() else {
                return;
            };
            let reused = self.pages.reuse(&next.tokens, &mut next.pages);
            let promised: usize = self.running.iter().map(Sequence::pages_missing).sum();
            if promised + next.pages_missing() > self.pages.available() {
                return self.pages.release(&mut next.pages);
            }
            (next.computed, next.reused) = (reused, reused);
            self.reused += reused as u64;
            self.running.extend(queue.pop_front());
        }
    }

    /// Decides the rows of a step and gets the pages for them; not empty when a sequence runs.
    fn plan(&mut self) -> Vec<PlannedRows> {
        let mut plan = Vec::with_capacity(self.running.len());
        let mut rows_left = self.config.max_rows;
        let mut index = 0;
        while index < self.running.len() {
            // A row for each sequence behind that decodes is set aside, so that long prompts do
            // not stall answers.
            let decodes = |s: &&Sequence| s.pending().len() == 1;
            let reserved = self.running[index + 1..].iter().filter(decodes).count();
            let pending = self.running[index].pending().len();
            let rows = pending.min(rows_left.saturating_sub(reserved));
            // Preemption takes from the end, so what is planned stays where it is.
            if rows > 0 && self.get_pages(index, rows) {
                plan.push(PlannedRows { index, rows });
                rows_left -= rows;
            }
            index += 1;
        }
        plan
    }

    /// Gets pages for `rows` more rows of a running sequence, preempting younger ones if needed.
    /// `false` when the sequence itself had to give up.
    fn get_pages(&mut self, index: usize, rows: usize) -> bool {
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let pages = (sequence.computed + rows).div_ceil(PAGE);
            if self.pages.grow(&mut sequence.pages, pages) {
                return true;
            }
            let youngest = self.stop_running(self.running.len() - 1);
            self.resuming.push_front(youngest);
        }
        false
    }

    fn forward(&mut self, plan: &[PlannedRows]) -> Result<(), Error> {
        let rows = plan.iter().map(|part| {
            let s = &self.running[part.index];
            let is_last = part.rows == s.pending().len();
            BatchSequence {
                tokens: &s.pending()[..part.rows],
                position: s.computed,
                pages: s.pages.pages(),
                logits: if is_last { Logits::Last } else { Logits::None },
            }
        });
        let sequences: Vec<BatchSequence<'_>> = rows.collect();
        let batch = Batch {
            sequences: &sequences,
        };
        if !sequences.is_empty() {
            self.compute.forward(&batch)?;
        }
        Ok(())
    }

    /// Chooses a token for every sequence of which all tokens are in the cache now.
    fn take_results(&mut self, plan: &[PlannedRows]) -> Vec<Event> {
        let (mut events, mut finished, mut logits_row) = (Vec::new(), Vec::new(), 0);
        for part in plan {
            let sequence = &mut self.running[part.index];
            sequence.computed += part.rows;
            let computed = &sequence.tokens[..sequence.computed];
            self.pages.learn(computed, &mut sequence.pages);
            if !sequence.pending().is_empty() {
                continue;
            }
            let logits = self.compute.logits_mut(logits_row);
            logits_row += 1;
            let choice = sequence.next_token(self.model.kernels(), logits, &mut self.scratch);
            sequence.accept(choice, &self.tokenizer, &mut events);
            if let Some(Event::Finished { .. }) = events.last() {
                finished.push(part.index);
            }
        }
        for index in finished.into_iter().rev() {
            self.stop_running(index);
        }
        events
    }
}

/// Rows of a running sequence in a step.
#[derive(Clone, Copy, Debug)]
struct PlannedRows {
    /// Its place among the running.
    index: usize,
    rows: usize,
}

#[cfg(test)]
pub(crate) mod tests;
