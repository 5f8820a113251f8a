//! The scheduler: continuous batching of the sequences of one model.
//!
//! [`Engine`] holds sequences in three queues (waiting, resuming, running). Each [`Engine::step`]
//! admits sequences, plans a batch, runs the forward pass and samples tokens. The runner calls it
//! on one thread; the engine does no I/O and reads no clock. Submodules plan batches and take their
//! results; they have the in-flight batches, speculation, persisted KV pages and fairness.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use paceline_model::trace::{Kind, Tracer};
use paceline_model::{AdapterId, Compute, LoadedModel, PersistedPage};
use paceline_text::grammar::Constraint;
use paceline_text::tokenizer::Tokenizer;
use tracing::warn;

use crate::constraint::{Grammars, Guide};
use crate::fairness::RowCostModel;
use crate::ngram::{Costs, TextProposer};
use crate::pages::Pages;
use crate::prefill_budget::{Composition, PrefillBudget};
use crate::proposer::Proposer;
use crate::queue_order::ServedRows;
use crate::request::check_tokens;
use crate::sampling::Scratch;
use crate::sequence::{Sequence, SequenceAdapter};
use crate::{
    ConstraintError, DraftCounters, EngineConfig, Error, Event, GenerationRequest, Reply,
    ResumeOutcome, SequenceId, Snapshot,
};

mod in_flight;
mod persistence;
mod planning;
mod results;
mod scheduling;
mod speculation;

use in_flight::{InFlightBatch, StepTiming};

/// Runs the sequences of one model, each with or without an adapter.
///
/// Not thread-safe; one owner submits, steps and cancels. A step blocks for one batch.
#[derive(Debug)]
pub struct Engine {
    model: Arc<dyn LoadedModel>,
    tokenizer: Arc<Tokenizer>,
    config: EngineConfig,
    /// Model and kernel class, as in snapshots.
    identity: String,
    compute: Box<dyn Compute>,
    /// The tracer of the model's links, if it has links.
    tracer: Tracer,
    /// End of the last traced step, if sequences remained.
    stepped: Option<Instant>,
    /// Built for the first constraint: sorting a vocabulary takes some time.
    grammars: OnceLock<Result<Grammars, ConstraintError>>,
    scratch: Scratch,
    pages: Pages,
    prefill_budget: PrefillBudget,
    costs: Costs,
    /// Times between the ends of consecutive steps of a pipeline.
    intervals: Costs,
    /// Text lookups, then the draft model, if configured.
    proposers: Vec<Box<dyn Proposer>>,
    /// Steps with draft tokens since the last one without.
    drafted_steps: usize,
    draft_counters: DraftCounters,
    shares: ServedRows,
    row_costs: RowCostModel,
    /// The last assigned [`Sequence::ticket`].
    tickets: u64,
    /// Total duration of all steps.
    elapsed: Duration,
    /// Rows of the last step, by kind.
    composition: Composition,
    /// The quantity that the duration of the last step measures.
    measures: StepTiming,
    /// Tokens found in the cache when their sequence was admitted.
    reused: u64,
    /// Steps interrupted by the device.
    interruptions: u64,
    /// Pages cached in the current step and not yet in the store.
    to_keep: Vec<PersistedPage>,
    /// In order of admission. Only these own pages.
    running: Vec<Sequence>,
    /// In-flight batches: announced to the other ranks, in the order of computation.
    in_flight: VecDeque<InFlightBatch>,
    /// Planning is blocked until in-flight batches complete, because a sequence with in-flight rows
    /// must give up a page or its slot.
    starves: bool,
    /// Preempted sequences in their running order, then snapshots by arrival.
    resuming: VecDeque<Sequence>,
    /// Requests by arrival.
    waiting: VecDeque<Sequence>,
    last_id: u64,
}

impl Engine {
    /// Reserves memory for `config`.
    ///
    /// # Errors
    /// [`Error::Config`] for invalid sizes, [`Error::Model`] if the allocation fails.
    pub fn new(
        model: Arc<dyn LoadedModel>,
        tokenizer: Arc<Tokenizer>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        config.check()?;
        let compute = Arc::clone(&model).reserve(config.batch_size(), config.cache_positions)?;
        let (costs, intervals) = match model.class().is_mlx() {
            true => (Costs::fixed(1.0), Costs::never()),
            false => (Costs::default(), Costs::default()),
        };
        Ok(Self {
            grammars: OnceLock::new(),
            scratch: Scratch::new(model.config().vocab),
            pages: Pages::new(compute.pages(), compute.windows()),
            prefill_budget: PrefillBudget::new(config.pace),
            costs,
            intervals,
            proposers: vec![Box::new(TextProposer::default())],
            drafted_steps: 0,
            draft_counters: DraftCounters::default(),
            shares: ServedRows::default(),
            row_costs: RowCostModel::default(),
            tickets: 0,
            elapsed: Duration::ZERO,
            composition: Composition::default(),
            measures: StepTiming::default(),
            reused: 0,
            interruptions: 0,
            to_keep: Vec::new(),
            tracer: tracer(&*model),
            stepped: None,
            identity: format!("{} ({})", config.model, model.numbers()),
            model,
            tokenizer,
            config,
            compute,
            running: Vec::new(),
            in_flight: VecDeque::new(),
            starves: false,
            resuming: VecDeque::new(),
            waiting: VecDeque::new(),
            last_id: 0,
        })
    }

    pub fn model(&self) -> &dyn LoadedModel {
        &*self.model
    }

    pub const fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Whether no sequence is running, resuming or waiting.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.resuming.is_empty() && self.waiting.is_empty()
    }

    /// Running sequences, without ended ones that still have in-flight rows.
    pub fn n_running(&self) -> usize {
        self.running.iter().filter(|s| !s.gone).count()
    }

    /// Sequences in the resuming queue: preempted ones, and snapshots.
    pub fn n_resuming(&self) -> usize {
        self.resuming.len()
    }

    /// Requests in the waiting queue.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Tokens so far that were not computed, in whole pages of 64. Sources are the prefix cache,
    /// with the pages of other sequences or of a preempted one, and the page store.
    pub const fn n_reused(&self) -> u64 {
        self.reused
    }

    /// Records step times of this rank while a trace runs.
    pub const fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Queues a request. A named client may occupy half of the queue.
    ///
    /// # Errors
    /// [`Error::Busy`] returns the request, before any other check. Other errors name an invalid
    /// field.
    pub fn submit(&mut self, request: GenerationRequest) -> Result<SequenceId, Error> {
        let (waiting, most) = (self.waiting.len(), self.config.max_waiting);
        let client = request.order.client;
        let own = self.waiting.iter().filter(|s| s.order.client == client);
        let own = if client == 0 { 0 } else { own.count() };
        if waiting >= most || own >= most.div_ceil(2) {
            let request = Box::new(request);
            return Err(Error::Busy { waiting, request });
        }
        request.check(self.model.config().vocab, self.config.context)?;
        let adapter = self.adapter(request.adapter.as_deref())?;
        let guide = self.guide(request.constraint.as_ref(), &[])?;
        let id = self.new_id();
        let sequence = Sequence::new(id, request, guide, self.config.context)?;
        let sequence = self.enter(sequence.adapted(adapter));
        self.waiting.push_back(sequence);
        Ok(id)
    }

    fn adapter(&self, name: Option<&str>) -> Result<Option<SequenceAdapter>, Error> {
        let Some(name) = name else {
            return Ok(None);
        };
        let found = self.find_adapter(|id| id.name == name);
        let none = || Error::NoAdapter {
            got: name.to_owned(),
        };
        found.map(Some).ok_or_else(none)
    }

    fn find_adapter(&self, is_it: impl Fn(&AdapterId) -> bool) -> Option<SequenceAdapter> {
        let found = (1..).zip(self.model.adapters()).find(|(_, id)| is_it(id));
        found.map(|(place, id)| SequenceAdapter {
            place,
            digest: id.digest,
        })
    }

    fn new_id(&mut self) -> SequenceId {
        self.last_id += 1;
        SequenceId(self.last_id)
    }

    /// Removes a sequence without further events.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn cancel(&mut self, id: SequenceId) -> Result<(), Error> {
        self.take(id).map(drop)
    }

    /// Removes a sequence and returns its state.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn take_snapshot(&mut self, id: SequenceId) -> Result<Snapshot, Error> {
        Ok(self.take(id)?.into_snapshot(self.identity.clone()))
    }

    /// Copies the state of a sequence, which continues here.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn snapshot(&self, id: SequenceId) -> Result<Snapshot, Error> {
        let queued = self.resuming.iter().chain(&self.waiting);
        let mut all = self.running.iter().chain(queued);
        let sequence = all.find(|s| s.id == id && !s.gone);
        let copy = sequence.ok_or(Error::NoSequence(id))?.clone();
        Ok(copy.into_snapshot(self.identity.clone()))
    }

    /// Continues a snapshot, with precedence over waiting requests. Snapshots have their own bound:
    /// as many as an engine of these sizes can run.
    ///
    /// # Errors
    /// [`Error::BusyResuming`] returns the snapshot. [`Error::OtherModel`] and
    /// [`Error::SnapshotTooLong`] if the answer would differ on this engine.
    /// [`Error::BadSnapshot`], [`Error::BadSnapshotText`], [`Error::Token`] and errors of request
    /// parameters for a snapshot that no engine made.
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
        let find = |digest: [u8; 32]| {
            let found = self.find_adapter(|id| id.digest == digest);
            found.ok_or(Error::OtherAdapter)
        };
        let adapter = snapshot.adapter.map(find).transpose()?;
        let generated = &snapshot.tokens[snapshot.prompt_len..];
        let guide = self.guide(snapshot.constraint.as_ref(), generated)?;
        let id = self.new_id();
        let sequence = Sequence::restored(id, snapshot, guide).adapted(adapter);
        let sequence = self.enter(sequence);
        self.resuming.push_back(sequence);
        Ok(id)
    }

    /// A guide advanced by the `generated` tokens.
    fn guide(
        &self,
        constraint: Option<&Constraint>,
        generated: &[u32],
    ) -> Result<Option<Guide>, Error> {
        let Some(constraint) = constraint else {
            return Ok(None);
        };
        let made = || Grammars::new(&self.tokenizer, self.model.config().vocab);
        let grammars = self.grammars.get_or_init(made);
        let mut guide = grammars
            .as_ref()
            .map_err(Clone::clone)?
            .guide(constraint.clone())?;
        for token in generated {
            guide.accept(*token, &self.tokenizer);
        }
        Ok(Some(guide))
    }

    /// Continues a request after `tokens`, generated by an engine of the same model and kernel
    /// class. The rest of the answer equals the one without interruption: random numbers, stop
    /// strings and partial characters are replayed. Like [`restore`](Self::restore) it precedes
    /// waiting requests.
    ///
    /// # Errors
    /// As [`submit`](Self::submit) and [`restore`](Self::restore); [`Error::Token`] for tokens
    /// outside the vocabulary, [`Error::BadSnapshot`] for more tokens than the request allows.
    pub fn resume(
        &mut self,
        request: GenerationRequest,
        tokens: &[u32],
    ) -> Result<ResumeOutcome, Error> {
        let (vocab, context) = (self.model.config().vocab, self.config.context);
        request.check(vocab, context)?;
        check_tokens(tokens, vocab)?;
        let prompt = request.prompt.len();
        let left = request.max_tokens.min(context - prompt);
        if tokens.len() > left {
            let tokens = prompt + tokens.len();
            return Err(Error::BadSnapshot {
                tokens,
                prompt,
                left,
            });
        }
        let guide = self.guide(request.constraint.as_ref(), &[])?;
        let adapter = self.adapter(request.adapter.as_deref())?;
        let sequence = Sequence::new(SequenceId(0), request, guide, context)?;
        let mut sequence = sequence.adapted(adapter);
        let last = sequence.replay(tokens, &self.tokenizer);
        if let Some(Reply::Finished { text, reason, .. }) = last.map(|event| event.reply) {
            return Ok(ResumeOutcome::Finished { text, reason });
        }
        let snapshot = sequence.into_snapshot(self.identity.clone());
        self.restore(snapshot).map(ResumeOutcome::Running)
    }

    /// Removes a sequence from its queue and releases its pages. Pages of in-flight rows are
    /// released when these complete.
    fn take(&mut self, id: SequenceId) -> Result<Sequence, Error> {
        let is_it = |s: &Sequence| s.id == id && !s.gone;
        if let Some(at) = self.running.iter().position(is_it) {
            if self.running[at].n_in_flight == 0 {
                return Ok(self.stop_running(at));
            }
            let sequence = &mut self.running[at];
            sequence.gone = true;
            return Ok(sequence.clone());
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
        let proposers = self.proposers.iter_mut();
        proposers.for_each(|proposer| proposer.forget(sequence.id));
        sequence.computed = 0;
        sequence.withheld = false;
        sequence.holds = false;
        sequence
    }

    /// Runs one batch and returns its events, in order; none if the engine is idle.
    ///
    /// Every decoding sequence gets one row, plus rows for draft tokens and for tokens forced by
    /// its grammar. A client with more sequences than others is limited to rows that slow others
    /// little. Prompts get the share of [`EngineConfig::max_rows`] that [`EngineConfig::pace`]
    /// allows. At least half of that goes to the oldest prompt, and the shortest prompt is first. A
    /// sequence that needs a page when none is free preempts the youngest. The youngest recomputes
    /// its pages later and loses nothing. The oldest is never preempted, so every sequence ends.
    ///
    /// In a pipeline, several batches are in flight: earlier stages compute batches that were
    /// planned after the one that this step completes. Each batch gets its share of the sequences.
    /// The next chunk of a prompt follows its in-flight chunks, and so do speculation windows of
    /// one sequence, where they pay.
    ///
    /// The forward pass allocates a few words per sequence and layer and nothing per row. A step
    /// also allocates its plan, its events with their texts, and a copy of the tokens of each
    /// sequence with repetition penalties.
    ///
    /// # Errors
    /// If the forward pass fails. The engine cannot compute further steps, and the cache contents
    /// are undefined. [`take_snapshot`](Self::take_snapshot) still works.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.tracer.end(self.stepped.take(), Kind::Between, 0);
        let began = self.tracer.begin();
        let mut events = self.finish_expired();
        self.admit();
        self.write_kept()?;
        self.launch_batches()?;
        let flight = self.in_flight.pop_front().unwrap_or_default();
        let plan = self.complete_batch(flight.parts);
        self.composition = flight.composition;
        self.measures = flight.measures;
        self.tracer.end(began, Kind::Schedule, plan.len());
        if let Err(error) = self.forward(&plan, &flight.rows) {
            self.recover(error, &mut events)?;
            return Ok(events);
        }
        let began = self.tracer.begin();
        self.take_results(&plan, &mut events);
        self.observe(&plan);
        self.drop_gone();
        self.write_kept()?;
        self.tracer.end(began, Kind::Choose, events.len());
        self.stepped = self.tracer.begin().filter(|_| !self.is_idle());
        Ok(events)
    }

    /// Recovers from a step that the device interrupted for taking too long: steps get a quarter of
    /// the rows, and all sequences recompute their cache.
    ///
    /// # Errors
    /// Returns `error` in these cases:
    /// - it is not such an interruption;
    /// - other ranks have computed their part of the step: the owner starts all ranks again, with
    ///   [smaller steps](EngineConfig::shrink_rows);
    /// - steps are already minimal;
    /// - [`strict`](EngineConfig::strict) forbids other bits.
    fn recover(&mut self, error: Error, events: &mut Vec<Event>) -> Result<(), Error> {
        let is_interrupted = matches!(&error, Error::Model(error) if error.is_interrupted());
        let is_near = !self.model.class().is_exact();
        let is_alone = self.model.links().is_none();
        let is_over = is_near && self.config.strict;
        if !is_interrupted || !is_alone || is_over || !self.config.shrink_rows() {
            return Err(error);
        }
        self.interruptions += 1;
        warn!(%error, rows = self.config.max_rows, "the device interrupted a step: smaller steps");
        self.measures = StepTiming::Nothing;
        self.to_keep.clear();
        self.drop_gone();
        for index in (0..self.running.len()).rev() {
            let sequence = self.stop_running(index);
            if is_near && sequence.tokens.len() > sequence.prompt_len() {
                let (id, reply) = (sequence.id, Reply::Continued);
                events.push(Event { id, reply });
            }
            self.resuming.push_front(sequence);
        }
        self.pages = Pages::new(self.compute.pages(), self.compute.windows());
        Ok(())
    }

    /// Steps that the device interrupted and that were repeated with fewer rows.
    pub const fn n_interruptions(&self) -> u64 {
        self.interruptions
    }

    /// Keepalive for the other ranks of a split model. An owner without work calls it more often
    /// than the links' patience.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn idle(&mut self) -> Result<(), Error> {
        Ok(self.compute.idle()?)
    }

    /// Reports the duration of the last [`step`](Self::step). The prefill token budget follows from
    /// it ([`EngineConfig::pace`]); without reports there is no limit.
    pub fn record_duration(&mut self, duration: Duration) {
        let step = std::mem::take(&mut self.composition);
        self.elapsed += duration;
        let measures = std::mem::take(&mut self.measures);
        let is_whole = measures == StepTiming::Step;
        let is_plain = is_whole && step.prompt == 0 && step.drafted == 0 && step.decoding > 0;
        let known = match self.costs.is_fixed() {
            true => Duration::from_secs(1),
            false => duration,
        };
        let proposers = self.proposers.iter_mut();
        let drafting = proposers.map(|proposer| proposer.record_step(is_plain, known));
        let drafting = drafting.sum();
        let times = match measures {
            StepTiming::Step => &mut self.costs,
            StepTiming::Interval => &mut self.intervals,
            StepTiming::Nothing => return,
        };
        let duration = duration.saturating_sub(drafting);
        if step.prompt == 0 && step.decoding > 0 {
            times.record(step.decoding + step.drafted, duration);
        }
        if is_whole {
            self.prefill_budget.record(step, duration);
            self.row_costs
                .record(is_plain.then_some(step.decoding), duration);
            self.pages.set_cost(self.prefill_budget.page_nanos());
        }
    }
}

/// The tracer of a model's links, or a new one.
pub(crate) fn tracer(model: &dyn LoadedModel) -> Tracer {
    let of_links = model.links().map(|links| links.trace.clone());
    of_links.unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests;
