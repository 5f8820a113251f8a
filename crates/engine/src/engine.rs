//! The scheduler: continuous batching of the sequences of one model.
//!
//! [`Engine`] holds sequences in three queues (waiting, resuming, running). Each [`Engine::step`]
//! admits sequences, plans a batch, runs the forward pass and samples tokens. The runner calls it
//! on one thread; the engine does no I/O and reads no clock. Submodules have the in-flight batches,
//! speculation, persisted KV pages and fairness.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use paceline_model::trace::{Kind, Tracer};
use paceline_model::{AdapterId, Compute, LoadedModel, PersistedPage};
use paceline_tensor::PAGE;
use paceline_text::grammar::Constraint;
use paceline_text::tokenizer::Tokenizer;
use tracing::warn;

use crate::constraint::{Grammars, Guide};
use crate::fairness::RowCostModel;
use crate::ngram::{Costs, TextProposer};
use crate::pages::{Pages, follows};
use crate::prefill_budget::{Composition, PrefillBudget, share};
use crate::proposer::Proposer;
use crate::queue_order::{self, ServedRows};
use crate::request::check_tokens;
use crate::sampling::Scratch;
use crate::sequence::{Sequence, SequenceAdapter};
use crate::{
    ConstraintError, DraftCounters, EngineConfig, Error, Event, GenerationRequest, ResumeOutcome,
    SequenceId, Snapshot,
};

mod in_flight;
mod persistence;
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
        if let Some(Event::Finished { text, reason, .. }) = sequence.replay(tokens, &self.tokenizer)
        {
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
                events.push(Event::Continued { id: sequence.id });
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

    /// Plans the rows of a step and allocates their pages. Empty if nothing runs, and if every
    /// sequence to decode was preempted.
    fn plan(&mut self) -> Vec<PlannedRows> {
        (0..self.running.len()).for_each(|index| self.adopt_cached_pages(index));
        let mut plan = Vec::with_capacity(self.running.len());
        for (index, rows) in self.wanted_rows().into_iter().enumerate() {
            // Preemption removes from the end, so earlier indices stay valid.
            if rows > 0 && self.get_pages(index, rows) {
                let is_scored = self.running[index].is_scored_next();
                plan.push(PlannedRows::new(index, rows, is_scored));
            }
        }
        plan
    }

    /// Adopts pages that another sequence has computed since this one was admitted.
    fn adopt_cached_pages(&mut self, index: usize) {
        let reads_all = self.reads_all();
        let sequence = &mut self.running[index];
        let at = sequence.computed;
        if at != sequence.pages.len() * PAGE
            || reads_all
            || sequence.is_scoring()
            || !sequence.pages.is_known()
            || !self.pages.is_next_known(&sequence.tokens, &sequence.pages)
        {
            return;
        }
        self.rematch_prefix(index);
    }

    /// Replaces a sequence's pages by the longest cached prefix. Its own pages stay cached when
    /// released, so the match includes them.
    fn rematch_prefix(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        let at = sequence.computed;
        self.pages.release(&mut sequence.pages);
        sequence.computed = self.pages.reuse(&sequence.tokens, &mut sequence.pages);
        let more = sequence.computed.saturating_sub(at);
        self.count_reused(index, more);
    }

    /// Counts `tokens` more tokens that a sequence did not compute.
    fn count_reused(&mut self, index: usize, tokens: usize) {
        self.running[index].reused += tokens;
        self.reused += tokens as u64;
    }

    /// Whether a sequence waits for a page that an older one is about to compute. Of several
    /// answers to one prompt, the first computes the page.
    fn waits(&self, index: usize) -> bool {
        let own = &self.running[index];
        let is_at_page = own.computed == own.pages.len() * PAGE && own.pages.is_known();
        if own.is_scoring() {
            return false;
        }
        let goes_before = |older: &Sequence| {
            let is_reading = !older.is_decoding();
            let (client, of_older) = (own.order.client, older.order.client);
            // A throttled client's prompt is held back, so waiting for its pages would be long.
            is_reading
                && follows((&own.tokens, &own.pages), (&older.tokens, &older.pages))
                && (client == of_older || !self.throttled_clients().contains(&of_older))
        };
        is_at_page && self.running[..index].iter().any(goes_before)
    }

    /// Rows of each running sequence. Decoding ones get a row each, so that long prompts do not
    /// stall them; then forced tokens, then prompts.
    fn wanted_rows(&mut self) -> Vec<usize> {
        let mut spare = self.config.spare_logit_rows();
        let pending = |index: usize| {
            let sequence = &self.running[index];
            match sequence.is_to_end(self.elapsed) || sequence.holds || self.waits(index) {
                true => 0,
                false => sequence.next_rows(&mut spare),
            }
        };
        let mut rows: Vec<usize> = (0..self.running.len()).map(pending).collect();
        self.defer_prompts(&mut rows);
        let live = self.withhold(&mut rows);
        self.deal(&mut rows, live);
        let prompts = self.prompts(&rows);
        let decoding = rows.iter().filter(|rows| **rows > 0).count() - prompts.len();
        let room = self.config.max_rows.saturating_sub(decoding);
        let room = self
            .grant_forced(&mut rows, room)
            .min(self.stage_rows(&prompts));
        let (now, budget) = self.select_prompts(&prompts, (decoding, room));
        let left: Vec<usize> = now.iter().map(|index| rows[*index]).collect();
        prompts.iter().for_each(|index| rows[*index] = 0);
        for (index, share) in now.into_iter().zip(share(&left, budget)) {
            rows[index] = share;
        }
        rows
    }

    /// Rows of these prompts in a step that fills the stages of a pipeline. All of each prompt
    /// counts, so that its chunks are alike.
    fn stage_rows(&self, prompts: &[usize]) -> usize {
        let of = |index: &usize| self.running[*index].unread();
        let prompt = prompts.iter().map(of).sum();
        self.config.stage_rows(prompt, self.compute.depth())
    }

    /// Limits a batch to its share of the `live` sequences, if several batches are in flight.
    /// Sequences without in-flight rows have precedence. Otherwise the chunks of a long prompt
    /// would take a share of every batch.
    fn deal(&self, rows: &mut [usize], live: usize) {
        let most = live.div_ceil(self.compute.depth());
        let mut wanting: Vec<usize> = (0..rows.len()).filter(|at| rows[*at] > 0).collect();
        wanting.sort_by_key(|at| self.running[*at].n_in_flight); // stable: the oldest first
        wanting.iter().skip(most).for_each(|at| rows[*at] = 0);
    }

    /// Grants rows for forced tokens to decoding sequences, out of `room`. Returns the remaining
    /// room.
    fn grant_forced(&self, rows: &mut [usize], mut room: usize) -> usize {
        let is_forced = |(rows, s): &(&mut usize, &Sequence)| **rows > 1 && s.is_decoding();
        for (rows, _) in rows.iter_mut().zip(&self.running).filter(is_forced) {
            *rows = 1 + room.min(*rows - 1);
            room -= *rows - 1;
        }
        room
    }

    /// Indices of the running sequences with prompt rows to compute, in scheduling order.
    fn prompts(&self, rows: &[usize]) -> Vec<usize> {
        let reads = |i: &usize| rows[*i] > 1 && !self.running[*i].is_decoding();
        let places: Vec<usize> = (0..rows.len()).filter(reads).collect();
        let turn_of = |index: &usize| {
            let sequence = &self.running[*index];
            sequence.turn(self.shares.of(sequence.order.client))
        };
        let order = queue_order::in_order(places.iter().map(turn_of));
        order.into_iter().map(|place| places[place]).collect()
    }

    fn composition_of(&self, plan: &[PlannedRows]) -> Composition {
        let mut composition = Composition::default();
        for part in plan {
            match self.running[part.index].is_decoding() {
                true => {
                    composition.decoding += 1;
                    composition.drafted += part.rows - 1 + part.drafted();
                }
                false => composition.prompt += part.rows,
            }
        }
        composition
    }

    /// Allocates pages for `rows` more rows of a running sequence, preempting younger ones if
    /// needed. `false` if the sequence itself was preempted.
    fn get_pages(&mut self, index: usize, rows: usize) -> bool {
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let pages = (sequence.computed + sequence.rows_in_flight + rows).div_ceil(PAGE);
            if self.pages.grow(&mut sequence.pages, pages) {
                return true;
            }
            if self.running.last().is_some_and(|s| s.n_in_flight > 0) {
                self.starves = true;
                return false;
            }
            let youngest = self.stop_running(self.running.len() - 1);
            self.resuming.push_front(youngest);
        }
        false
    }

    /// Takes out the guides whose token mask is needed at the end of this step.
    fn take_due(&mut self, plan: &[PlannedRows]) -> Vec<(usize, Box<Guide>)> {
        let mut due = Vec::new();
        for part in plan {
            let sequence = &mut self.running[part.index];
            let is_last = part.rows == sequence.pending().len();
            let guide = sequence.guide.take_if(|guide| is_last && guide.is_due());
            due.extend(guide.map(|guide| (part.index, guide)));
        }
        due
    }

    /// Samples a token for every sequence whose tokens are all in the cache.
    fn take_results(&mut self, plan: &[PlannedRows], events: &mut Vec<Event>) {
        self.charge(plan);
        for part in plan {
            let mut logits_row = part.logits_row;
            if part.is_scored {
                logits_row += self.score(part, logits_row);
            }
            self.running[part.index].computed += part.rows;
            if self.running[part.index].pending().is_empty() {
                let right = self.choose(part, logits_row, events);
                let first = usize::from(part.is_behind); // its first row is a right draft token
                self.draft_counters.add(part.guessed(), first + right);
                let own = &mut self.running[part.index];
                own.drafts.add(part.guessed(), first + right);
                if let Some(Event::Finished { id, drafts, .. }) = events.last_mut()
                    && *id == own.id
                {
                    *drafts = own.drafts; // with those of this step
                }
            }
            self.keep(part.index);
            let last = events.last();
            if let Some(Event::Finished { id, .. }) = last
                && *id == self.running[part.index].id
            {
                self.running[part.index].gone = true; // until its in-flight rows complete
            }
        }
    }

    /// Scores prompt tokens by the logits from `row` on; returns how many.
    fn score(&mut self, part: &PlannedRows, row: usize) -> usize {
        let sequence = &mut self.running[part.index];
        let n = part.rows.min(sequence.unscored());
        for row in row..row + n {
            let logits = self.compute.logits_mut(row);
            sequence.score(self.model.kernels(), logits, &mut self.scratch);
        }
        n
    }

    /// Caches a sequence's full pages, and releases pages outside its windows.
    fn keep(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        let (computed, known) = (
            &sequence.tokens[..sequence.computed],
            sequence.pages.n_known(),
        );
        self.pages.register(computed, &mut sequence.pages);
        self.note_kept(index, known);
        let sequence = &mut self.running[index];
        let (computed, prompt) = (sequence.computed, sequence.prompt_len());
        self.pages
            .release_windows(&mut sequence.pages, computed, prompt);
    }

    /// Samples the next token of a sequence from the logits in `row`, and further tokens from the
    /// following rows as long as draft tokens match. Then appends forced tokens. Returns the
    /// accepted draft tokens.
    fn choose(&mut self, part: &PlannedRows, row: usize, events: &mut Vec<Event>) -> usize {
        let sequence = &mut self.running[part.index];
        let mut right = 0;
        for i in 0..=part.drafted() {
            let logits = self.compute.logits_mut(row + i);
            if sequence.must_go_on() {
                forbid(logits, self.tokenizer.end_of_generation());
            }
            let choice = sequence.next_token(self.model.kernels(), logits, &mut self.scratch);
            let chosen = choice.as_ref().ok().map(|choice| choice.token);
            sequence.accept(choice, &self.tokenizer, events);
            if let Some(Event::Finished { .. }) = events.last() {
                return i;
            }
            right = i;
            if part.checked.get(i + 1).copied() != chosen || i == part.drafted() {
                break;
            }
            sequence.computed += 1; // the next row was computed for this token
        }
        sequence.settle(part.drafted(), right);
        // In MLX, a row computed with others has other bits than alone.
        if !self.model.class().is_mlx() {
            let vocab = self.model.config().vocab;
            sequence.take_forced(vocab, &self.tokenizer, events);
        }
        right
    }
}

/// Sets the logits of `tokens` to minus infinity.
fn forbid(logits: &mut [f32], tokens: &[u32]) {
    for token in tokens {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// The tracer of a model's links, or a new one.
pub(crate) fn tracer(model: &dyn LoadedModel) -> Tracer {
    let of_links = model.links().map(|links| links.trace.clone());
    of_links.unwrap_or_default()
}

/// Rows of a running sequence in a step.
#[derive(Clone, Debug)]
struct PlannedRows {
    /// Index among the running sequences.
    index: usize,
    /// Rows of its own tokens.
    rows: usize,
    /// Whether all rows have logits, to score prompt tokens.
    is_scored: bool,
    /// The pending token and the draft tokens that this step checks; empty without a draft.
    checked: Vec<u32>,
    /// Number of the draft's proposer.
    guesser: Option<usize>,
    /// Whether it is a speculation window after in-flight ones: all its tokens are draft tokens.
    is_behind: bool,
    /// The sequence's [course](Sequence::course) when it was planned.
    course: u32,
    /// Index of its first row of logits.
    logits_row: usize,
    /// Its rows in the batch.
    span: Range<usize>,
    /// Position of the first of them.
    position: usize,
}

impl PlannedRows {
    const fn new(index: usize, rows: usize, is_scored: bool) -> Self {
        Self {
            index,
            rows,
            is_scored,
            checked: Vec::new(),
            guesser: None,
            is_behind: false,
            course: 0,
            logits_row: 0,
            span: 0..0,
            position: 0,
        }
    }

    /// Draft tokens that this step checks, after its first row.
    const fn drafted(&self) -> usize {
        self.checked.len().saturating_sub(1)
    }

    /// Draft tokens among its rows.
    const fn guessed(&self) -> usize {
        match self.is_behind {
            true => self.checked.len(),
            false => self.drafted(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
