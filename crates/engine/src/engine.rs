//! The scheduler: [`Engine`] holds sequences in queues, and computes a batch of their rows in each
//! step.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use paceline_formats::grammar::Constraint;
use paceline_formats::tokenizer::Tokenizer;
use paceline_model::trace::{Kind, Tracer};
use paceline_model::{AdapterId, Compute, KeptPage, Weights};
use paceline_tensor::PAGE;

use crate::constraint::{Grammars, Guide};
use crate::draft::Costs;
use crate::drafter::Drafter;
use crate::fair::Leeway;
use crate::pace::{Composition, Pacer, share};
use crate::pages::{Pages, follows};
use crate::request::check_tokens;
use crate::sampling::Scratch;
use crate::sequence::{Adapted, Guesser, Sequence};
use crate::turn::{self, Shares};
use crate::{
    ConstraintError, EngineConfig, Error, Event, GuessCounts, Request, Resumed, SequenceId,
    Snapshot,
};

mod flights;
mod guessing;
mod kept;
mod turns;

use flights::{Flight, Measures};

/// Runs sequences of one model, each with or without one of the adapters beside it.
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
    /// Between the ends of steps that follow each other through a pipeline.
    intervals: Costs,
    /// Where a draft model guesses too.
    drafter: Option<Drafter>,
    /// Steps that checked guesses since one that did not.
    drafted_steps: usize,
    guesses: GuessCounts,
    shares: Shares,
    leeway: Leeway,
    /// The last [`Sequence::ticket`].
    tickets: u64,
    /// Of all steps so far.
    elapsed: Duration,
    /// Of the last step.
    composition: Composition,
    /// The kind of its duration.
    measures: Measures,
    /// Tokens that were in the cache already when their sequence was admitted.
    reused: u64,
    /// Pages that became known in the step under way and are not in the store.
    to_keep: Vec<KeptPage>,
    /// In order of admission; only these own pages.
    running: Vec<Sequence>,
    /// Batches that other ranks know of, in the order in which all compute them.
    flights: VecDeque<Flight>,
    /// Whether a sequence needs a page or the place of one that has rows under way: these are ended
    /// first.
    starves: bool,
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
            intervals: Costs::default(),
            drafter: None,
            drafted_steps: 0,
            guesses: GuessCounts::default(),
            shares: Shares::default(),
            leeway: Leeway::default(),
            tickets: 0,
            elapsed: Duration::ZERO,
            composition: Composition::default(),
            measures: Measures::default(),
            reused: 0,
            to_keep: Vec::new(),
            tracer: tracer(&*model),
            stepped: None,
            identity: format!("{} ({})", config.model, model.numbers()),
            model,
            tokenizer,
            config,
            compute,
            running: Vec::new(),
            flights: VecDeque::new(),
            starves: false,
            resuming: VecDeque::new(),
            waiting: VecDeque::new(),
            last_id: 0,
        })
    }

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

    /// Sequences that are computed; not those that have ended and have rows under way.
    pub fn n_running(&self) -> usize {
        self.running.iter().filter(|s| !s.gone).count()
    }

    /// Sequences that are to go on: preempted ones, and snapshots.
    pub fn n_resuming(&self) -> usize {
        self.resuming.len()
    }

    /// Requests that wait for a place.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Tokens so far that did not have to be computed: whole pages of 64. Another sequence had
    /// begun with the same ones, or the same sequence before it gave up its pages, or the store had
    /// them.
    pub const fn n_reused(&self) -> u64 {
        self.reused
    }

    /// Records what steps take, in this rank, where somebody asks.
    pub const fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Queues a request. A client that is named may have half of the queue.
    ///
    /// # Errors
    /// [`Error::Busy`] gives the request back before anything else is looked at; a request that
    /// cannot be answered says why.
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, Error> {
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

    fn adapter(&self, name: Option<&str>) -> Result<Option<Adapted>, Error> {
        let Some(name) = name else {
            return Ok(None);
        };
        let found = self.find_adapter(|id| id.name == name);
        let none = || Error::NoAdapter {
            got: name.to_owned(),
        };
        found.map(Some).ok_or_else(none)
    }

    fn find_adapter(&self, is_it: impl Fn(&AdapterId) -> bool) -> Option<Adapted> {
        let found = (1..).zip(self.model.adapters()).find(|(_, id)| is_it(id));
        found.map(|(place, id)| Adapted {
            place,
            digest: id.digest,
        })
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
        let mut all = self.running.iter().chain(queued);
        let sequence = all.find(|s| s.id == id && !s.gone);
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
        let adapter = self.adapter(request.adapter.as_deref())?;
        let sequence = Sequence::new(SequenceId(0), request, guide, context)?;
        let mut sequence = sequence.adapted(adapter);
        if let Some(Event::Finished { text, reason, .. }) = sequence.replay(tokens, &self.tokenizer)
        {
            return Ok(Resumed::Over { text, reason });
        }
        let snapshot = sequence.into_snapshot(self.identity.clone());
        self.restore(snapshot).map(Resumed::Goes)
    }

    /// Takes a sequence out of its queue, its pages given back; those of rows under way when they
    /// are computed.
    fn take(&mut self, id: SequenceId) -> Result<Sequence, Error> {
        let is_it = |s: &Sequence| s.id == id && !s.gone;
        if let Some(at) = self.running.iter().position(is_it) {
            if self.running[at].flights == 0 {
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
        sequence.computed = 0;
        sequence.withheld = false;
        sequence.holds = false;
        sequence
    }

    /// Runs one batch and returns what happened, in order; nothing when the engine is idle.
    ///
    /// Every running sequence that is past its prompt gets one row. It gets more for guesses and
    /// for tokens that its grammar left no choice of. A client with more sequences than others gets
    /// as many rows as slow the others little. Prompts get what [`EngineConfig::pace`] allows of
    /// the remaining [`EngineConfig::max_rows`]. At least half of that goes to the oldest prompt,
    /// and the shortest comes before others. A sequence that needs a page when none is free makes
    /// the youngest give up its pages and wait. The youngest computes them again later and loses
    /// nothing. The oldest never gives up, so every sequence ends.
    ///
    /// Of a pipeline several batches are under way: the stages before this one compute those that
    /// were planned behind the one that this step ends. A batch has its share of the sequences
    /// then, and the next rows of a prompt follow those under way. So do windows of guesses of one
    /// sequence, where they pay.
    ///
    /// The forward pass allocates a few words per sequence and layer and nothing per row. Besides,
    /// a step allocates its plan and its events with their texts. It also copies the tokens of each
    /// sequence that penalises repetition.
    ///
    /// # Errors
    /// When the forward pass fails: nothing can be computed any more, and what the sequences have
    /// in the cache is unknown. [`take_snapshot`](Self::take_snapshot) still works.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.tracer.end(self.stepped.take(), Kind::Between, 0);
        let began = self.tracer.begin();
        let mut events = self.end_late();
        self.admit();
        self.write_kept()?;
        self.take_off()?;
        let flight = self.flights.pop_front().unwrap_or_default();
        let plan = self.land(flight.parts);
        self.composition = flight.composition;
        self.measures = flight.measures;
        self.tracer.end(began, Kind::Schedule, plan.len());
        self.forward(&plan, &flight.rows)?;
        let began = self.tracer.begin();
        self.take_results(&plan, &mut events);
        self.drop_gone();
        self.write_kept()?;
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

    /// Tells how long the last [`step`](Self::step) took. By this the next steps keep
    /// [`EngineConfig::pace`]; an engine that is never told keeps none.
    pub fn took(&mut self, duration: Duration) {
        let step = std::mem::take(&mut self.composition);
        self.elapsed += duration;
        let measures = std::mem::take(&mut self.measures);
        let is_whole = measures == Measures::Step;
        let is_plain = is_whole && step.prompt == 0 && step.drafted == 0 && step.decoding > 0;
        let drafter = self.drafter.as_mut();
        let drafting = drafter.map(|drafter| drafter.took(is_plain, duration));
        let times = match measures {
            Measures::Step => &mut self.costs,
            Measures::Interval => &mut self.intervals,
            Measures::Nothing => return,
        };
        let duration = duration.saturating_sub(drafting.unwrap_or_default());
        if step.prompt == 0 && step.decoding > 0 {
            times.took(step.decoding + step.drafted, duration);
        }
        if is_whole {
            self.pacer.took(step, duration);
            self.leeway
                .took(is_plain.then_some(step.decoding), duration);
            self.pages.set_cost(self.pacer.page_nanos());
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
        plan
    }

    /// Gives a sequence the pages that another one has computed since it was admitted.
    fn catch_up(&mut self, index: usize) {
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
        self.find_again(index);
    }

    /// Gives a sequence all known pages that it begins with. Pages that it gives back for that stay
    /// known and are found again at once.
    fn find_again(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        let at = sequence.computed;
        self.pages.release(&mut sequence.pages);
        sequence.computed = self.pages.reuse(&sequence.tokens, &mut sequence.pages);
        let more = sequence.computed.saturating_sub(at);
        self.count_reused(index, more);
    }

    /// So many more tokens of a sequence did not have to be computed.
    fn count_reused(&mut self, index: usize, tokens: usize) {
        self.running[index].reused += tokens;
        self.reused += tokens as u64;
    }

    /// Whether a sequence waits for a page of its prompt that an older one is about to compute. Of
    /// several answers to one prompt, the first one computes the page.
    fn waits(&self, index: usize) -> bool {
        let own = &self.running[index];
        let is_at_page = own.computed == own.pages.len() * PAGE && own.pages.is_known();
        if own.is_scoring() {
            return false;
        }
        let goes_before = |older: &Sequence| {
            let is_reading = !older.is_decoding();
            let (client, of_older) = (own.order.client, older.order.client);
            is_reading
                && follows((&own.tokens, &own.pages), (&older.tokens, &older.pages))
                && (client == of_older || !self.pressed().contains(&of_older)) // it waits long
        };
        is_at_page && self.running[..index].iter().any(goes_before)
    }

    /// Rows for each running sequence. Each that decodes gets one, so that long prompts do not
    /// stall answers; then come forced tokens, then prompts.
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
        let room = self.grant_forced(&mut rows, room);
        let (now, budget) = self.read_now(&prompts, (decoding, room));
        let left: Vec<usize> = now.iter().map(|index| rows[*index]).collect();
        prompts.iter().for_each(|index| rows[*index] = 0);
        for (index, share) in now.into_iter().zip(share(&left, budget)) {
            rows[index] = share;
        }
        rows
    }

    /// Leaves a batch its share of the `live` sequences, where several batches are under way.
    /// Sequences without rows under way come first. The next rows of a long prompt could follow
    /// earlier ones in every batch, and take the turns of others.
    fn deal(&self, rows: &mut [usize], live: usize) {
        let most = live.div_ceil(self.compute.depth());
        let mut wanting: Vec<usize> = (0..rows.len()).filter(|at| rows[*at] > 0).collect();
        wanting.sort_by_key(|at| self.running[*at].flights); // stable: of equal ones the oldest
        wanting.iter().skip(most).for_each(|at| rows[*at] = 0);
    }

    /// Gives forced tokens of sequences that decode rows beside one each, of the `room` that is
    /// left for these. Returns the room that is left then.
    fn grant_forced(&self, rows: &mut [usize], mut room: usize) -> usize {
        let is_forced = |(rows, s): &(&mut usize, &Sequence)| **rows > 1 && s.is_decoding();
        for (rows, _) in rows.iter_mut().zip(&self.running).filter(is_forced) {
            *rows = 1 + room.min(*rows - 1);
            room -= *rows - 1;
        }
        room
    }

    /// Places of the running sequences whose prompts want several `rows`, in the order of their
    /// turns.
    fn prompts(&self, rows: &[usize]) -> Vec<usize> {
        let reads = |i: &usize| rows[*i] > 1 && !self.running[*i].is_decoding();
        let places: Vec<usize> = (0..rows.len()).filter(reads).collect();
        let turn_of = |index: &usize| {
            let sequence = &self.running[*index];
            sequence.turn(self.shares.of(sequence.order.client))
        };
        let order = turn::in_order(places.iter().map(turn_of));
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

    /// Gets pages for `rows` more rows of a running sequence, preempting younger ones if needed.
    /// `false` when the sequence itself had to give up.
    fn get_pages(&mut self, index: usize, rows: usize) -> bool {
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let pages = (sequence.computed + sequence.flying + rows).div_ceil(PAGE);
            if self.pages.grow(&mut sequence.pages, pages) {
                return true;
            }
            if self.running.last().is_some_and(|s| s.flights > 0) {
                self.starves = true;
                return false;
            }
            let youngest = self.stop_running(self.running.len() - 1);
            self.resuming.push_front(youngest);
        }
        false
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
                let first = usize::from(part.is_behind); // a guess as well, and a right one
                self.guesses.add(part.guessed(), first + right);
            }
            self.keep(part.index);
            let last = events.last();
            if let Some(Event::Finished { id, .. }) = last
                && *id == self.running[part.index].id
            {
                self.running[part.index].gone = true; // until its rows under way are computed
            }
        }
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
        let (computed, known) = (
            &sequence.tokens[..sequence.computed],
            sequence.pages.n_known(),
        );
        self.pages.learn(computed, &mut sequence.pages);
        self.note_kept(index, known);
        let sequence = &mut self.running[index];
        let (computed, prompt) = (sequence.computed, sequence.prompt_len());
        self.pages.leave(&mut sequence.pages, computed, prompt);
    }

    /// Chooses the next token of a sequence by the logits in `row`. The rows after it give further
    /// tokens, as long as the token before was guessed; then forced tokens follow. Returns how many
    /// guesses were right.
    fn choose(&mut self, part: &PlannedRows, row: usize, events: &mut Vec<Event>) -> usize {
        let sequence = &mut self.running[part.index];
        let mut is_own = true; // the guesses of its own text were right so far
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
            if let Some(guess) = part.guesses.get(i).filter(|_| is_own) {
                is_own = Some(*guess) == chosen;
                sequence.drafts.judge(is_own);
            }
            right = i;
            if part.checked.get(i + 1).copied() != chosen || i == part.drafted() {
                break;
            }
            sequence.computed += 1; // the next row was computed for this token
        }
        sequence.settle(part.drafted(), right);
        // MLX computes rows together with other bits than one after the other.
        if !self.model.class().is_mlx() {
            let vocab = self.model.config().vocab;
            sequence.take_forced(vocab, &self.tokenizer, events);
        }
        right
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

/// Rows of a running sequence in a step.
#[derive(Clone, Debug)]
struct PlannedRows {
    /// Its place among the running.
    index: usize,
    /// Of its tokens.
    rows: usize,
    /// Whether all of them have logits, by which the prompt's tokens are scored.
    is_scored: bool,
    /// Guesses from its own text of its next tokens; the first is judged although not checked.
    guesses: Vec<u32>,
    /// The pending token and the guesses that this step checks; empty when it checks none.
    checked: Vec<u32>,
    guesser: Option<Guesser>,
    /// Whether it is a window behind others under way: all that it checks are guesses.
    is_behind: bool,
    /// The sequence's [course](Sequence::course) when it was planned.
    course: u32,
    /// The first of its rows of logits.
    logits_row: usize,
}

impl PlannedRows {
    const fn new(index: usize, rows: usize, is_scored: bool) -> Self {
        Self {
            index,
            rows,
            is_scored,
            guesses: Vec::new(),
            checked: Vec::new(),
            guesser: None,
            is_behind: false,
            course: 0,
            logits_row: 0,
        }
    }

    /// Guesses that this step checks behind its first row.
    const fn drafted(&self) -> usize {
        self.checked.len().saturating_sub(1)
    }

    /// Guesses among its rows.
    const fn guessed(&self) -> usize {
        match self.is_behind {
            true => self.checked.len(),
            false => self.drafted(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
