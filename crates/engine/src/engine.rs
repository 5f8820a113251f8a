//! The scheduler.

use std::collections::VecDeque;
use std::sync::Arc;

use paceline_formats::tokenizer::Tokenizer;
use paceline_model::{Batch, BatchSequence, Logits, Model, Workspace};
use paceline_tensor::{KvCache, PAGE};

use crate::pages::FreePages;
use crate::request::{Event, Finish, Request, SequenceId};
use crate::sequence::Sequence;
use crate::{Error, Snapshot};

/// Sizes of an engine; its memory follows from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Names the weights (file hash, or alias): snapshots only fit an engine of the same name.
    pub model: String,
    /// Most positions of one sequence.
    pub context: usize,
    /// Positions in the cache, over all sequences; at least one sequence of `context` fits.
    pub cache_positions: usize,
    /// Sequences that are computed at the same time.
    pub max_running: usize,
    /// Requests that wait for a place.
    pub max_waiting: usize,
    /// Rows of a step: decode rows, then prompt chunks. More rows read prompts faster and make
    /// others wait longer.
    pub max_rows: usize,
}

/// The rows of a step unless told otherwise: at 512, prefill of SmolLM2 reaches its full speed
/// (docs/measurements.md), and the buffers of an 8B model take 100 MB.
const DEFAULT_ROWS: usize = 512;

impl EngineConfig {
    /// For one sequence of at most `context` positions.
    pub fn single(model: impl Into<String>, context: usize) -> Self {
        Self {
            model: model.into(),
            context,
            cache_positions: context,
            max_running: 1,
            max_waiting: 1,
            max_rows: DEFAULT_ROWS.min(context),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let config = |setting, got, expected| {
            Err(Error::Config {
                setting,
                got,
                expected,
            })
        };
        if self.context < 2 {
            return config("context", self.context, "2 or more positions");
        }
        if self.cache_positions.div_ceil(PAGE) < self.context.div_ceil(PAGE) {
            return config(
                "cache_positions",
                self.cache_positions,
                "at least the context",
            );
        }
        if self.max_running == 0 {
            return config("max_running", 0, "1 or more");
        }
        if self.max_rows < self.max_running {
            return config("max_rows", self.max_rows, "at least max_running");
        }
        Ok(())
    }
}

/// Runs sequences of one model.
///
/// Not for several threads at once: the owner submits, steps and cancels. A step blocks for one
/// batch.
#[derive(Debug)]
pub struct Engine {
    model: Arc<Model>,
    tokenizer: Arc<Tokenizer>,
    config: EngineConfig,
    identity: String,
    cache: KvCache,
    workspace: Workspace,
    free: FreePages,
    /// Oldest first; only these own pages.
    running: Vec<Sequence>,
    /// Preempted sequences at the front, then requests in order.
    waiting: VecDeque<Sequence>,
    next_id: u64,
}

impl Engine {
    /// Reserves memory for `config`.
    ///
    /// # Errors
    /// [`Error::Config`] for sizes that cannot work, [`Error::Model`] when memory cannot be had.
    pub fn new(
        model: Arc<Model>,
        tokenizer: Arc<Tokenizer>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        config.check()?;
        let cache = model.new_cache(config.cache_positions)?;
        let workspace = Workspace::new(
            &model,
            config.max_rows,
            config.max_running,
            config.max_running,
            config.context,
        );
        Ok(Self {
            free: FreePages::new(cache.pages()),
            identity: format!("{} ({})", config.model, model.class()),
            model,
            tokenizer,
            config,
            cache,
            workspace,
            running: Vec::new(),
            waiting: VecDeque::new(),
            next_id: 0,
        })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The sizes.
    pub const fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Queues a request.
    ///
    /// # Errors
    /// A request that cannot be answered says why; [`Error::Busy`] gives it back.
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, Error> {
        self.check(&request)?;
        if self.waiting.len() >= self.config.max_waiting {
            let waiting = self.waiting.len();
            return Err(Error::Busy {
                waiting,
                request: Box::new(request),
            });
        }
        let id = self.new_id();
        self.waiting
            .push_back(Sequence::new(id, request, self.config.context)?);
        Ok(id)
    }

    fn check(&self, request: &Request) -> Result<(), Error> {
        if request.prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (tokens, context) = (request.prompt.len(), self.config.context);
        if tokens >= context {
            return Err(Error::PromptTooLong { tokens, context });
        }
        self.check_tokens(&request.prompt)
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let vocab = self.model.config().vocab;
        let outside = tokens.iter().position(|token| *token as usize >= vocab);
        outside.map_or(Ok(()), |position| {
            Err(Error::Token {
                token: tokens[position],
                position,
                vocab,
            })
        })
    }

    fn new_id(&mut self) -> SequenceId {
        self.next_id += 1;
        SequenceId(self.next_id)
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
        Ok(self.take(id)?.snapshot(&self.identity))
    }

    /// A copy of a sequence's state, which goes on here.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn snapshot(&self, id: SequenceId) -> Result<Snapshot, Error> {
        let all = self.running.iter().chain(&self.waiting);
        let sequence = all
            .into_iter()
            .find(|s| s.id == id)
            .ok_or(Error::NoSequence(id))?;
        Ok(sequence.snapshot(&self.identity))
    }

    /// Continues a snapshot, before requests that wait. The bound on waiting requests does not
    /// apply: a restored sequence was admitted once.
    ///
    /// # Errors
    /// [`Error::OtherModel`] when its answer would differ here, or it does not fit.
    pub fn restore(&mut self, snapshot: Snapshot) -> Result<SequenceId, Error> {
        let (tokens, prompt) = (snapshot.tokens.len(), snapshot.prompt_len);
        if snapshot.model != self.identity {
            let expected = self.identity.clone();
            return Err(Error::OtherModel {
                got: snapshot.model,
                expected,
            });
        }
        if prompt == 0 || tokens < prompt || snapshot.tokens_left == 0 {
            return Err(Error::BadSnapshot { tokens, prompt });
        }
        self.check_tokens(&snapshot.tokens)?;
        if tokens.saturating_add(snapshot.tokens_left) > self.config.context {
            return Err(Error::PromptTooLong {
                tokens,
                context: self.config.context,
            });
        }
        let id = self.new_id();
        self.waiting.push_front(Sequence::restored(id, snapshot));
        Ok(id)
    }

    fn take(&mut self, id: SequenceId) -> Result<Sequence, Error> {
        if let Some(at) = self.running.iter().position(|s| s.id == id) {
            let mut sequence = self.running.remove(at);
            self.free.release(&mut sequence.pages);
            return Ok(sequence);
        }
        let at = self
            .waiting
            .iter()
            .position(|s| s.id == id)
            .ok_or(Error::NoSequence(id))?;
        Ok(self.waiting.remove(at).expect("just found"))
    }

    /// Runs one batch and returns what happened, in order; nothing when the engine is idle.
    ///
    /// Every running sequence that is past its prompt gets one row; the rest of
    /// [`EngineConfig::max_rows`] goes to prompts, oldest first. A sequence that needs a page when
    /// none is free makes the youngest give up its pages and wait; that one computes them again
    /// later and loses nothing.
    pub fn step(&mut self) -> Vec<Event> {
        self.admit();
        let plan = self.plan();
        if plan.is_empty() {
            return Vec::new();
        }
        let sequences: Vec<BatchSequence<'_>> = plan
            .iter()
            .map(|part| {
                let s = &self.running[part.index];
                let tokens = &s.pending()[..part.rows];
                let logits = if part.rows == s.pending().len() {
                    Logits::Last
                } else {
                    Logits::None
                };
                BatchSequence {
                    tokens,
                    position: s.computed,
                    pages: &s.pages,
                    logits,
                }
            })
            .collect();
        let batch = Batch {
            sequences: &sequences,
        };
        self.model
            .forward(&batch, &mut self.workspace, &mut self.cache);
        self.take_results(&plan)
    }

    /// Moves waiting sequences to the running ones while their known tokens fit.
    fn admit(&mut self) {
        while self.running.len() < self.config.max_running {
            let Some(next) = self.waiting.front() else {
                return;
            };
            if next.tokens.len().div_ceil(PAGE) > self.free.len() {
                return;
            }
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// Decides the rows of a step and gets the pages for them.
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
        loop {
            let sequence = &mut self.running[index];
            let pages = (sequence.computed + rows).div_ceil(PAGE);
            if self.free.grow(&mut sequence.pages, pages) {
                return true;
            }
            let mut youngest = self.running.pop().expect("the sequence itself is running");
            self.free.release(&mut youngest.pages);
            youngest.computed = 0;
            self.waiting.push_front(youngest);
            if self.running.len() <= index {
                return false;
            }
        }
    }

    /// Samples for every sequence whose known tokens are all in the cache now.
    fn take_results(&mut self, plan: &[PlannedRows]) -> Vec<Event> {
        let vocab = self.model.config().vocab;
        let (mut events, mut finished, mut logit_row) = (Vec::new(), Vec::new(), 0);
        for part in plan {
            let sequence = &mut self.running[part.index];
            sequence.computed += part.rows;
            if sequence.computed < sequence.tokens.len() {
                continue;
            }
            logit_row += 1;
            if sequence.is_reading_prompt() {
                events.push(Event::PromptRead { id: sequence.id });
            }
            if sequence.tokens_left == 0 {
                events.push(sequence.finish(Finish::Length));
                finished.push(part.index);
                continue;
            }
            let logits = self.workspace.logits_mut(logit_row - 1, vocab);
            let (tokens, prompt_len) = (&sequence.tokens, sequence.prompt_len);
            let token = sequence
                .sampler
                .sample(self.model.kernels(), logits, tokens, prompt_len);
            let (new, last) = sequence.accept(token, &self.tokenizer);
            events.extend(new);
            if last {
                finished.push(part.index);
            }
        }
        for index in finished.into_iter().rev() {
            let mut sequence = self.running.remove(index);
            self.free.release(&mut sequence.pages);
        }
        events
    }
}

/// Rows of a running sequence in a step.
#[derive(Clone, Copy, Debug)]
struct PlannedRows {
    index: usize,
    rows: usize,
}
