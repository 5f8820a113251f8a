//! The scheduler.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use paceline_formats::grammar::Constraint;
use paceline_formats::tokenizer::Tokenizer;
use paceline_model::trace::{Kind, Tracer};
use paceline_model::{Batch, BatchSequence, Compute, Logits, Weights, WindowPages};
use paceline_tensor::PAGE;

use crate::constraint::{Grammars, Guide};
use crate::draft::{Bounds, Candidate, Costs, DRAFT_ROWS, depths};
use crate::pace::{Composition, Pacer, share};
use crate::pages::{Pages, follows};
use crate::request::check_tokens;
use crate::sampling::Scratch;
use crate::sequence::Sequence;
use crate::{ConstraintError, EngineConfig, Error, Event, Request, Resumed, SequenceId, Snapshot};

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
    /// That of the links, where the model has some.
    tracer: Tracer,
    /// End of the last step of a trace, when sequences were left.
    stepped: Option<Instant>,
    /// Made for the first constraint: sorting a vocabulary takes a while.
    grammars: OnceLock<Result<Grammars, ConstraintError>>,
    scratch: Scratch,
    pages: Pages,
    pacer: Pacer,
    costs: Costs,
    /// Of the last step.
    composition: Composition,
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
            grammars: OnceLock::new(),
            scratch: Scratch::new(model.config().vocab),
            pages: Pages::new(compute.pages(), compute.windows()),
            pacer: Pacer::new(config.pace),
            costs: Costs::default(),
            composition: Composition::default(),
            reused: 0,
            tracer: tracer(&*model),
            stepped: None,
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

    /// Records what steps take, in this rank, where somebody asks.
    pub const fn tracer(&self) -> &Tracer {
        &self.tracer
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
        let guide = self.guide(request.constraint.as_ref(), &[])?;
        let id = self.new_id();
        let sequence = Sequence::new(id, request, guide, self.config.context)?;
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
        let generated = &snapshot.tokens[snapshot.prompt_len..];
        let guide = self.guide(snapshot.constraint.as_ref(), generated)?;
        let id = self.new_id();
        self.resuming
            .push_back(Sequence::restored(id, snapshot, guide));
        Ok(id)
    }

    /// A guide behind the tokens that were `generated`.
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

    /// Goes on with a request of whose answer its caller has `tokens` already, chosen by an engine
    /// of the same model and kernel class. The answer is the one that this engine would have given
    /// alone: random numbers, stop strings and half characters are wound forward. Like
    /// [`restore`](Self::restore) it comes before requests that wait.
    ///
    /// # Errors
    /// As [`submit`](Self::submit) and [`restore`](Self::restore); [`Error::Token`] for tokens that
    /// the vocabulary lacks, [`Error::BadSnapshot`] for more than the request may have.
    pub fn resume(&mut self, request: Request, tokens: &[u32]) -> Result<Resumed, Error> {
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
        let mut sequence = Sequence::new(SequenceId(0), request, guide, context)?;
        if let Some(Event::Finished { text, reason, .. }) = sequence.replay(tokens, &self.tokenizer)
        {
            return Ok(Resumed::Over { text, reason });
        }
        let snapshot = sequence.into_snapshot(self.identity.clone());
        self.restore(snapshot).map(Resumed::Goes)
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
    /// Every running sequence that is past its prompt gets one row, and more for guesses and for
    /// tokens that its grammar left no choice of. Prompts get what
    /// [`EngineConfig::pace`] allows of the remaining [`EngineConfig::max_rows`]: at least half of
    /// it goes to the oldest, and the shortest comes before others. A sequence that needs a page
    /// when none is free makes the youngest give up its pages and wait; that one computes them
    /// again later and loses nothing. The oldest never gives up, so every sequence ends.
    ///
    /// The forward pass allocates a few words per sequence and layer and nothing per row; besides,
    /// a step allocates its plan, its events with their texts, and a copy of the tokens of each
    /// sequence that penalises repetition.
    ///
    /// # Errors
    /// When the forward pass fails: nothing can be computed any more, and what the sequences have
    /// in the cache is unknown. [`take_snapshot`](Self::take_snapshot) still works.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.tracer.end(self.stepped.take(), Kind::Between, 0);
        let began = self.tracer.begin();
        self.admit();
        let plan = self.plan();
        self.composition = self.composition_of(&plan);
        self.tracer.end(began, Kind::Schedule, plan.len());
        self.forward(&plan)?;
        let began = self.tracer.begin();
        let events = self.take_results(&plan);
        self.tracer.end(began, Kind::Choose, events.len());
        self.stepped = self.tracer.begin().filter(|_| !self.is_idle());
        Ok(events)
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
            let (tokens, pages) = next.reusable();
            let reused = self.pages.reuse(tokens, pages);
            let promised: usize = self.running.iter().map(Sequence::pages_missing).sum();
            if promised + next.pages_missing() > self.pages.available() {
                return self.pages.release(&mut next.pages);
            }
            (next.computed, next.reused) = (reused, reused);
            self.reused += reused as u64;
            self.running.extend(queue.pop_front());
        }
    }

    /// Tells how long the last [`step`](Self::step) took. By this the next steps keep
    /// [`EngineConfig::pace`]; an engine that is never told keeps none.
    pub fn took(&mut self, duration: Duration) {
        let step = std::mem::take(&mut self.composition);
        self.pacer.took(step, duration);
        if step.prompt == 0 && step.decoding > 0 {
            self.costs.took(step.decoding + step.drafted, duration);
        }
    }

    /// Decides the rows of a step and gets the pages for them. Empty when nothing runs, and when
    /// all that was to decode gave up its pages.
    fn plan(&mut self) -> Vec<PlannedRows> {
        (0..self.running.len()).for_each(|index| self.catch_up(index));
        let mut plan = Vec::with_capacity(self.running.len());
        for (index, rows) in self.wanted_rows().into_iter().enumerate() {
            // Preemption takes from the end, so what is planned stays where it is.
            if rows > 0 && self.get_pages(index, rows) {
                let is_scored = self.running[index].is_scored_next();
                plan.push(PlannedRows::new(index, rows, is_scored));
            }
        }
        if self.drafts() {
            self.draft(&mut plan);
        }
        plan
    }

    /// Whether a step may check guesses: all sequences decode. MLX computes few rows no faster than
    /// one by one.
    fn drafts(&self) -> bool {
        let is_on = self.config.drafts > 0 && !self.model.class().is_mlx();
        is_on && self.running.iter().all(Sequence::is_decoding)
    }

    /// Adds guesses to the rows of sequences that decode, where they are expected to pay. Where a
    /// grammar binds they spell what it says must come: a mask beyond that, between two steps,
    /// would cost more than most guesses give.
    fn draft(&mut self, plan: &mut [PlannedRows]) {
        let most = self.config.drafts;
        // States of recurrent layers change with the last row of a page and cannot go back.
        let kept = usize::from(!self.compute.windows().is_empty());
        for part in &mut *plan {
            let sequence = &mut self.running[part.index];
            if sequence.pending().len() > 1 {
                continue; // forced tokens, whose logits nobody needs
            }
            part.guesses = match &mut sequence.guide {
                Some(guide) if !guide.is_free() => guide.guesses(most),
                _ => sequence.drafts.guess(&sequence.tokens, most),
            };
        }
        let candidate = |part: &PlannedRows| {
            let sequence = &self.running[part.index];
            let room = sequence.draft_room().saturating_sub(kept);
            Candidate {
                drafts: &sequence.drafts,
                guesses: part.guesses.len().min(room),
            }
        };
        let candidates: Vec<Candidate<'_>> = plan.iter().map(candidate).collect();
        let planned: usize = plan.iter().map(|part| part.rows).sum();
        let bounds = Bounds {
            decoding: plan.len(),
            most,
            rows: DRAFT_ROWS.min(self.config.step_rows().saturating_sub(planned)),
        };
        let depths = match candidates.iter().any(|candidate| candidate.guesses > 0) {
            true => depths(&candidates, bounds, &self.costs),
            false => return,
        };
        for (part, depth) in plan.iter_mut().zip(depths).filter(|(_, depth)| *depth > 0) {
            let pending = self.running[part.index].pending().iter().copied();
            part.checked = pending
                .chain(part.guesses[..depth].iter().copied())
                .collect();
        }
    }

    /// Gives a sequence the pages that another one has computed since it was admitted.
    fn catch_up(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        let at = sequence.computed;
        if at != sequence.pages.len() * PAGE
            || sequence.is_scoring()
            || !sequence.pages.is_known()
            || !self.pages.is_next_known(&sequence.tokens, &sequence.pages)
        {
            return;
        }
        // What is given back stays known and is found again at once.
        self.pages.release(&mut sequence.pages);
        sequence.computed = self.pages.reuse(&sequence.tokens, &mut sequence.pages);
        let more = sequence.computed.saturating_sub(at);
        sequence.reused += more;
        self.reused += more as u64;
    }

    /// Whether a sequence waits for a page of its prompt that an older one is about to compute: of
    /// several answers to one prompt, the first one computes it.
    fn waits(&self, index: usize) -> bool {
        let own = &self.running[index];
        let is_at_page = own.computed == own.pages.len() * PAGE && own.pages.is_known();
        if own.is_scoring() {
            return false;
        }
        let goes_before = |older: &Sequence| {
            let is_reading = !older.is_decoding();
            is_reading && follows((&own.tokens, &own.pages), (&older.tokens, &older.pages))
        };
        is_at_page && self.running[..index].iter().any(goes_before)
    }

    /// Rows for each running sequence. One is for each that decodes, so that long prompts do not
    /// stall answers; then come forced tokens, then prompts.
    fn wanted_rows(&self) -> Vec<usize> {
        let mut spare = self.config.spare_logit_rows();
        let pending = |index: usize| match self.waits(index) {
            true => 0,
            false => self.running[index].next_rows(&mut spare),
        };
        let mut rows: Vec<usize> = (0..self.running.len()).map(pending).collect();
        let is_prompt = |(rows, s): &(&mut usize, &Sequence)| **rows > 1 && !s.is_decoding();
        let prompts = rows.iter_mut().zip(&self.running).filter(is_prompt);
        let prompts: Vec<usize> = prompts.map(|(rows, _)| *rows).collect();
        let decoding = rows.iter().filter(|rows| **rows > 0).count() - prompts.len();
        let mut room = self.config.max_rows.saturating_sub(decoding);
        let is_forced = |(rows, s): &(&mut usize, &Sequence)| **rows > 1 && s.is_decoding();
        for (rows, _) in rows.iter_mut().zip(&self.running).filter(is_forced) {
            *rows = 1 + room.min(*rows - 1);
            room -= *rows - 1;
        }
        let mut shares = share(&prompts, self.pacer.budget(decoding, room)).into_iter();
        for (rows, _) in rows.iter_mut().zip(&self.running).filter(is_prompt) {
            *rows = shares.next().expect("a share for every prompt");
        }
        rows
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

    /// Computes the rows, and meanwhile what grammars allow behind them, which depends on tokens
    /// that are known already.
    fn forward(&mut self, plan: &[PlannedRows]) -> Result<(), Error> {
        let mut due = self.take_due(plan);
        let owned = plan.iter().map(|part| &self.running[part.index].pages);
        let windows: Vec<Vec<WindowPages<'_>>> = owned.map(|o| o.windows().collect()).collect();
        let rows = plan.iter().zip(&windows).map(|(part, windows)| {
            let s = &self.running[part.index];
            let is_last = part.rows == s.pending().len();
            let (tokens, logits) = match is_last {
                _ if part.drafted() > 0 => (&*part.checked, Logits::All),
                _ if part.is_scored => (&s.pending()[..part.rows], Logits::All),
                true => (s.pending(), Logits::Last),
                false => (&s.pending()[..part.rows], Logits::None),
            };
            BatchSequence {
                tokens,
                position: s.computed,
                pages: s.pages.pages(),
                windows,
                logits,
            }
        });
        let sequences: Vec<BatchSequence<'_>> = rows.collect();
        let batch = Batch {
            sequences: &sequences,
        };
        if self.model.links().is_none() {
            self.tracer.next_step(); // else the links count
        }
        let began = self.tracer.begin();
        let compute = &mut self.compute;
        let outcome = match sequences.is_empty() {
            true => Ok(()),
            false => beside(&mut due, || compute.forward(&batch)).map(drop),
        };
        self.tracer.end(began, Kind::Step, batch.rows());
        for (index, guide) in due {
            self.running[index].guide = Some(guide);
        }
        Ok(outcome?)
    }

    /// Takes out the guides that must know before the end of the step what may come next.
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

    /// Chooses tokens for every sequence of which all tokens are in the cache now.
    fn take_results(&mut self, plan: &[PlannedRows]) -> Vec<Event> {
        let (mut events, mut finished, mut logits_row) = (Vec::new(), Vec::new(), 0);
        for part in plan {
            if part.is_scored {
                logits_row += self.score(part, logits_row);
            }
            self.running[part.index].computed += part.rows;
            if self.running[part.index].pending().is_empty() {
                self.choose(part, logits_row, &mut events);
                logits_row += 1 + part.drafted();
            }
            self.keep(part.index);
            let last = events.last();
            if let Some(Event::Finished { id, .. }) = last
                && *id == self.running[part.index].id
            {
                finished.push(part.index);
            }
        }
        for index in finished.into_iter().rev() {
            self.stop_running(index);
        }
        events
    }

    /// Scores tokens of a prompt by the logits from `row` on; how many.
    fn score(&mut self, part: &PlannedRows, row: usize) -> usize {
        let sequence = &mut self.running[part.index];
        let n = part.rows.min(sequence.unscored());
        for row in row..row + n {
            let logits = self.compute.logits_mut(row);
            sequence.score(self.model.kernels(), logits, &mut self.scratch);
        }
        n
    }

    /// Remembers what a sequence has in full pages, and gives back what it looks at no more.
    fn keep(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        let computed = &sequence.tokens[..sequence.computed];
        self.pages.learn(computed, &mut sequence.pages);
        let (computed, prompt) = (sequence.computed, sequence.prompt_len());
        self.pages.leave(&mut sequence.pages, computed, prompt);
    }

    /// Chooses the next token of a sequence by the logits in `row`, and by the rows after it
    /// further ones, as long as the token before was guessed; then what is forced.
    fn choose(&mut self, part: &PlannedRows, row: usize, events: &mut Vec<Event>) {
        let sequence = &mut self.running[part.index];
        for i in 0..=part.drafted() {
            let logits = self.compute.logits_mut(row + i);
            if sequence.must_go_on() {
                forbid(logits, self.tokenizer.end_of_generation());
            }
            let choice = sequence.next_token(self.model.kernels(), logits, &mut self.scratch);
            let chosen = choice.as_ref().ok().map(|choice| choice.token);
            sequence.accept(choice, &self.tokenizer, events);
            if let Some(Event::Finished { .. }) = events.last() {
                return;
            }
            let is_guessed = part.guesses.get(i).map(|guess| Some(*guess) == chosen);
            if let Some(is_right) = is_guessed {
                sequence.drafts.judge(is_right);
            }
            if is_guessed != Some(true) || i == part.drafted() {
                break;
            }
            sequence.computed += 1; // the next row was computed for this token
        }
        // MLX computes rows together with other bits than one after the other.
        if !self.model.class().is_mlx() {
            let vocab = self.model.config().vocab;
            sequence.take_forced(vocab, &self.tokenizer, events);
        }
    }
}

/// Makes tokens impossible.
fn forbid(logits: &mut [f32], tokens: &[u32]) {
    for token in tokens {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// The tracer of a model's links; for one without, a new one.
pub(crate) fn tracer(model: &dyn Weights) -> Tracer {
    let of_links = model.links().map(|links| links.trace.clone());
    of_links.unwrap_or_default()
}

/// Runs `compute`, and prepares `guides` on a thread of its own when there are any: starting one
/// takes some 20 us, a mask up to milliseconds.
fn beside<T>(guides: &mut [(usize, Box<Guide>)], compute: impl FnOnce() -> T) -> T {
    if guides.is_empty() {
        return compute();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| guides.iter_mut().for_each(|(_, guide)| guide.prepare()));
        compute()
    })
}

/// Rows of a running sequence in a step.
#[derive(Clone, Debug)]
struct PlannedRows {
    /// Its place among the running.
    index: usize,
    /// Of its tokens.
    rows: usize,
    /// Whether all of them have logits, by which the prompt's tokens are scored.
    is_scored: bool,
    /// What may follow its tokens; the first is judged although it is not checked.
    guesses: Vec<u32>,
    /// The pending token and the guesses that this step checks; empty when it checks none.
    checked: Vec<u32>,
}

impl PlannedRows {
    const fn new(index: usize, rows: usize, is_scored: bool) -> Self {
        Self {
            index,
            rows,
            is_scored,
            guesses: Vec::new(),
            checked: Vec::new(),
        }
    }

    /// Guesses that this step checks.
    const fn drafted(&self) -> usize {
        self.checked.len().saturating_sub(1)
    }
}

#[cfg(test)]
pub(crate) mod tests;
