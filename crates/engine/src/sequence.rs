//! A sequence: its tokens, cache pages, sampler and the state that decodes tokens to text.
//!
//! The engine's queues hold sequences. This module decides nothing about scheduling.

use std::time::Duration;

use paceline_model::{ForbiddenTokens, Logits, PageName, PageStore, PersistedPage, TokenDraw};
use paceline_tensor::{Kernels, PAGE};
use paceline_text::detokenizer::{StopMatcher, StopOutput, StreamDecoder};
use paceline_text::tokenizer::Tokenizer;

use crate::constraint::{Allowed, Guide};
use crate::pages::SequencePages;
use crate::queue_order::QueueKey;
use crate::sampling::logprobs::logprobs;
use crate::sampling::{ChosenToken, Sampler, SamplingInputs, Scratch};
use crate::{
    DraftCounts, Error, Event, Finish, GenerationRequest, Reply, SchedulingParams, SequenceId,
    Snapshot, TokenLogprobs,
};

/// Maximum forced tokens per step. Names and punctuation of an object's field are 3 to 10 tokens;
/// each token costs a mask between two steps, some 20 us.
pub(crate) const FORCED_MAX: usize = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceAdapter {
    /// Number in this engine's model, from 1.
    pub(crate) place: u32,
    /// SHA-256 of the adapter's values.
    pub(crate) digest: [u8; 32],
}

impl SequenceAdapter {
    /// The name that precedes the first page of its sequences in a store.
    fn root(self, store: &dyn PageStore) -> PageName {
        let (words, _) = self.digest.as_chunks::<4>();
        let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        store.name(&PageName::default(), &words)
    }
}

/// A request in progress.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    /// Prompt and answer.
    pub(crate) tokens: Vec<u32>,
    prompt_len: usize,
    /// Positions with keys and values in the cache; fewer than `tokens.len()` between steps.
    pub(crate) computed: usize,
    /// Of these, positions found in the cache at admission.
    pub(crate) reused: usize,
    /// Name of the numbers that computed pages of its prompt, where they are not the model's own.
    pub(crate) read_by: Option<String>,
    /// Position of the last sampled token; later ones were [forced](Self::take_forced).
    /// `usize::MAX` before the first, and after a snapshot.
    chosen_at: usize,
    /// Cover at least `computed` positions.
    pub(crate) pages: SequencePages,
    pub(crate) adapter: Option<SequenceAdapter>,
    /// Names of its first pages, as far as a store needed them: tokens in full pages do not change.
    names: Vec<PageName>,
    /// Whether it waits for pages from a store.
    pub(crate) holds: bool,
    /// [`GenerationRequest::order`].
    pub(crate) order: SchedulingParams,
    /// End of its deadline, on the engine's clock.
    pub(crate) due: Option<Duration>,
    /// How often others were admitted before it, or got rows while its prompt got none.
    pub(crate) passed: u32,
    /// Whether its rows were withheld in favour of others since its last ones
    /// ([`fairness`](crate::fair)).
    pub(crate) withheld: bool,
    /// The lowest of a client has the next rows.
    pub(crate) ticket: u64,
    /// In-flight batches with rows of it, and those rows.
    pub(crate) n_in_flight: usize,
    pub(crate) rows_in_flight: usize,
    /// Draft tokens after its last token in in-flight windows.
    pub(crate) ahead: Vec<u32>,
    /// Incremented when a rejected draft token makes later in-flight rows stale.
    pub(crate) course: u32,
    /// Number of the proposer of its last draft, while all of that may still be right.
    pub(crate) guesser: Option<usize>,
    /// Its verified draft tokens.
    pub(crate) drafts: DraftCounts,
    /// Whether it was removed or has ended, with rows still in flight.
    pub(crate) gone: bool,
    /// Tokens that may still be generated.
    tokens_left: usize,
    /// [`GenerationRequest::min_tokens`].
    min_tokens: usize,
    /// [`GenerationRequest::logprobs`].
    logprobs: Option<usize>,
    /// Prompt logprobs not yet reported, from token 1; `None` if not requested or already reported.
    scores: Option<Vec<TokenLogprobs>>,
    /// [`GenerationRequest::shown`].
    shown: Vec<u32>,
    /// State of [`GenerationRequest::constraint`].
    pub(crate) guide: Option<Box<Guide>>,
    sampler: Sampler,
    decoder: StreamDecoder,
    stops: StopMatcher,
}

impl Sequence {
    /// A new sequence. `context` is the maximum tokens, more than the prompt has.
    pub(crate) fn new(
        id: SequenceId,
        request: GenerationRequest,
        guide: Option<Guide>,
        context: usize,
    ) -> Result<Self, Error> {
        let prompt_len = request.prompt.len();
        let state = Snapshot {
            model: String::new(),
            prompt_len,
            tokens_left: request.max_tokens.min(context - prompt_len),
            min_tokens: request.min_tokens,
            tokens: request.prompt,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            shown: request.shown,
            order: request.order,
            adapter: None,
            constraint: None,
            sampler: Sampler::new(request.sampling)?,
            decoder: StreamDecoder::new(),
            stops: StopMatcher::new(request.stop)?,
        };
        Ok(Self::restored(id, state, guide))
    }

    /// Sets the adapter, before it has pages.
    pub(crate) fn adapted(self, adapter: Option<SequenceAdapter>) -> Self {
        let place = adapter.map_or(0, |adapter| adapter.place);
        Self {
            adapter,
            pages: SequencePages::of_adapter(place),
            ..self
        }
    }

    /// Tokens of its prompt.
    pub(crate) const fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Tokens that no cache had when it began.
    pub(crate) fn unread(&self) -> usize {
        self.tokens.len().saturating_sub(self.reused)
    }

    /// Tokens that are not in the cache yet.
    pub(crate) fn pending(&self) -> &[u32] {
        &self.tokens[self.computed..]
    }

    /// Whether it is past its prompt: one token is pending, with at most [`FORCED_MAX`] forced ones
    /// after it.
    pub(crate) fn is_decoding(&self) -> bool {
        self.pending().len() == 1 || self.computed >= self.chosen_at
    }

    /// Prompt tokens still to be scored.
    pub(crate) fn unscored(&self) -> usize {
        let scores = self.scores.as_ref();
        scores.map_or(0, |scores| self.prompt_len - 1 - scores.len())
    }

    /// Whether prompt tokens are still to be scored.
    pub(crate) fn is_scoring(&self) -> bool {
        self.unscored() > 0
    }

    /// Scored positions: the logits of each score the token after it.
    fn scored(&self) -> usize {
        self.prompt_len - 1 - self.unscored()
    }

    /// Whether the next row scores a token.
    pub(crate) fn is_scored_next(&self) -> bool {
        self.is_scoring() && self.computed >= self.scored()
    }

    /// Rows for the next step. Rows that score need logits: each sequence has one, further ones are
    /// taken from `spare`.
    pub(crate) fn next_rows(&self, spare: &mut usize) -> usize {
        let pending = self.pending().len() - self.rows_in_flight;
        if !self.is_scoring() {
            return pending;
        }
        if self.n_in_flight > 0 {
            return 0; // the next token to score depends on the in-flight rows
        }
        if !self.is_scored_next() {
            return self.scored() - self.computed;
        }
        let rows = pending.min(1 + *spare);
        *spare -= rows - 1;
        rows
    }

    /// Tokens that the prefix cache may match, and its pages. Rows that score tokens must be
    /// computed.
    pub(crate) fn reusable(&mut self) -> (&[u32], &mut SequencePages) {
        let len = match self.is_scoring() {
            true => self.scored() + 1,
            false => self.tokens.len(),
        };
        (&self.tokens[..len], &mut self.pages)
    }

    /// Scores the next prompt token by the logits of the token before it.
    pub(crate) fn score(&mut self, kernels: &Kernels, logits: &[f32], scratch: &mut Scratch) {
        let (scored, n) = (self.scored(), self.logprobs.unwrap_or(0));
        if let Some(scores) = &mut self.scores {
            let token = self.tokens[scored + 1];
            scores.push(logprobs(kernels, logits, token, n, scratch));
        }
    }

    /// Its scheduling key, if `served` rows were computed for its client.
    pub(crate) const fn turn(&self, served: u64) -> QueueKey {
        QueueKey {
            passed: self.passed,
            priority: self.order.priority,
            places: 0,
            resumes: false,
            served,
            due: self.due,
        }
    }

    /// The logits after its last token that determine the next one, and those after its draft
    /// tokens. `ends` is the number of end tokens, which are excluded while it must continue.
    pub(crate) fn wanted(&self, ends: usize) -> Logits {
        if self.guide.is_some() || self.logprobs.is_some() {
            return Logits::Last;
        }
        let forbidden = if self.must_go_on() { ends } else { 0 };
        self.sampler.params().wanted(forbidden)
    }

    /// How a step that draws tokens chooses the next one, without any of the `ends` while it must
    /// continue. `None` where only the host can choose it.
    pub(crate) fn draw(&self, ends: &[u32]) -> Option<TokenDraw> {
        if self.guide.is_some() || self.logprobs.is_some() {
            return None;
        }
        let forbidden = if self.must_go_on() { ends } else { &[] };
        self.sampler.draw_of(ForbiddenTokens::new(forbidden)?)
    }

    /// Whether no more rows are needed.
    pub(crate) fn is_to_end(&self, now: Duration) -> bool {
        self.gone || self.is_late(now)
    }

    /// Whether its deadline has passed.
    pub(crate) fn is_late(&self, now: Duration) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Names its first `n` pages, which are full, for `store`.
    pub(crate) fn name_pages(&mut self, store: &dyn PageStore, n: usize) {
        let named = self.names.len();
        for page in self.tokens.chunks_exact(PAGE).take(n).skip(named) {
            let root = || {
                self.adapter
                    .map_or_else(PageName::default, |adapter| adapter.root(store))
            };
            let before = self.names.last().copied().unwrap_or_else(root);
            self.names.push(store.name(&before, page));
        }
    }

    /// The page at `index` of a pool, named before, for a store.
    pub(crate) fn kept_page(&self, (pool, index): (u32, usize)) -> PersistedPage {
        PersistedPage {
            name: self.names[index],
            index: index as u32,
            pool,
            page: self.pages.part((pool, index)).unwrap_or_default(),
        }
    }

    /// Maximum draft rows after the pending token: positions in its pages, and tokens that the
    /// answer may still have.
    pub(crate) const fn draft_room(&self) -> usize {
        let positions = self.pages.len() * PAGE - self.computed - 1;
        let tokens = self.tokens_left.saturating_sub(1);
        if positions < tokens {
            positions
        } else {
            tokens
        }
    }

    /// Whether a speculation window may follow the in-flight ones.
    pub(crate) fn may_go_on(&self) -> bool {
        let is_followed = self.guesser.is_some() && self.rows_in_flight == 1 && !self.gone;
        is_followed && self.guide.is_none() && self.pending().len() == 1
    }

    /// Processes a verified window: `right` of its `drafted` tokens were accepted, and the next
    /// token was sampled. Later windows stay valid if they begin with that token, else they are
    /// stale.
    pub(crate) fn settle(&mut self, drafted: usize, right: usize) {
        let follows = self.ahead.get(drafted);
        if right == drafted && follows.is_some() && follows == self.tokens.last() {
            self.ahead.drain(..=drafted);
            self.rows_in_flight = 1;
            return;
        }
        if self.ahead.len() > drafted {
            self.course = self.course.wrapping_add(1);
        }
        self.ahead.clear();
        self.guesser = None;
    }

    /// Tokens that the answer may still have.
    pub(crate) const fn tokens_left(&self) -> usize {
        self.tokens_left
    }

    pub(crate) const fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Pages that its tokens need beyond those it has.
    pub(crate) fn pages_missing(&self) -> usize {
        let needed = self.tokens.len().div_ceil(PAGE);
        needed.saturating_sub(self.pages.len())
    }

    /// Whether its next token must not end the answer.
    pub(crate) fn must_go_on(&self) -> bool {
        self.guide.is_none() && self.tokens.len() - self.prompt_len < self.min_tokens
    }

    /// Samples the next token from the logits after the last one; else returns why there is none.
    pub(crate) fn next_token(
        &mut self,
        kernels: &Kernels,
        logits: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<ChosenToken, Finish> {
        if self.tokens_left == 0 {
            return Err(Finish::Length);
        }
        let allowed = self.guide.as_mut().map(|guide| guide.allowed(logits.len()));
        let mask = match allowed {
            None | Some(Allowed::All) => None,
            Some(Allowed::Only(mask)) => Some(mask),
            Some(Allowed::Complete) => return Err(Finish::EndOfText),
            Some(Allowed::Broken) => return Err(Finish::Constraint),
        };
        let asked = SamplingInputs {
            history: (&*self.tokens, self.prompt_len),
            mask,
            logprobs: self.logprobs,
        };
        Ok(self.sampler.choose(kernels, logits, asked, scratch))
    }

    /// Appends the result of [`next_token`](Self::next_token). The last event is
    /// [`Reply::Finished`] if the sequence has ended.
    pub(crate) fn accept(
        &mut self,
        choice: Result<ChosenToken, Finish>,
        tokenizer: &Tokenizer,
        events: &mut Vec<Event>,
    ) {
        let id = self.id;
        if self.tokens.len() == self.prompt_len {
            let reply = Reply::PromptRead {
                reused: self.reused,
                logprobs: self.scores.take(),
                read_by: self.read_by.clone(),
            };
            events.push(Event { id, reply });
        }
        let ChosenToken { token, logprobs } = match choice {
            Ok(choice) => choice,
            Err(reason) => return events.push(self.finish(reason)),
        };
        self.tokens.push(token);
        self.tokens_left -= 1;
        if let Some(guide) = &mut self.guide {
            guide.accept(token, tokenizer);
        }
        let ends = tokenizer.is_end_of_generation(token);
        let mut output = StopOutput::default();
        if !ends {
            let bytes = self.bytes_of(token, tokenizer);
            output = self.stops.push(&self.decoder.push(bytes));
        }
        let reply = Reply::Token {
            token,
            text: output.text,
            logprobs,
        };
        events.push(Event { id, reply });
        if ends {
            return events.push(self.finish(Finish::EndOfText));
        }
        if let Some(which) = output.stopped {
            let reply = Reply::Finished {
                text: String::new(),
                reason: Finish::Stop(which),
                drafts: self.drafts,
            };
            events.push(Event { id, reply });
        } else if self.tokens_left == 0 {
            events.push(self.finish(Finish::Length));
        }
    }

    /// Appends the tokens that its grammar forces, without logits. `vocab` is the number of logits.
    /// Takes none if log-probabilities are requested, which need logits.
    pub(crate) fn take_forced(
        &mut self,
        vocab: usize,
        tokenizer: &Tokenizer,
        events: &mut Vec<Event>,
    ) {
        if self.logprobs.is_some() {
            return;
        }
        self.chosen_at = self.tokens.len() - 1;
        for _ in 0..FORCED_MAX {
            let Some(token) = self.guide.as_mut().and_then(|guide| guide.sole(vocab)) else {
                return;
            };
            // The random number that sampling would have used.
            self.sampler.skip();
            let logprobs = None;
            self.accept(Ok(ChosenToken { token, logprobs }), tokenizer, events);
            if events.last().is_some_and(Event::is_last) {
                return;
            }
        }
    }

    /// The bytes that `token` adds to the text.
    fn bytes_of<'a>(&self, token: u32, tokenizer: &'a Tokenizer) -> &'a [u8] {
        if self.shown.binary_search(&token).is_ok() {
            return tokenizer.token_text(token).unwrap_or_default().as_bytes();
        }
        tokenizer.token_bytes(token).unwrap_or_default()
    }

    /// Replays tokens that were sampled and shown elsewhere. Returns the final event if they have
    /// ended it.
    pub(crate) fn replay(&mut self, tokens: &[u32], tokenizer: &Tokenizer) -> Option<Event> {
        let mut events = Vec::new();
        for &token in tokens {
            events.clear();
            self.sampler.skip();
            let logprobs = None;
            self.accept(Ok(ChosenToken { token, logprobs }), tokenizer, &mut events);
        }
        events.pop().filter(Event::is_last)
    }

    /// The final event, with the text that was held back. A stop string completed by the end takes
    /// precedence over `reason`.
    pub(crate) fn finish(&mut self, reason: Finish) -> Event {
        let mut text = self.stops.push(&self.decoder.finish()).text;
        let output = self.stops.finish();
        text.push_str(&output.text);
        let reply = Reply::Finished {
            text,
            reason: output.stopped.map_or(reason, Finish::Stop),
            drafts: self.drafts,
        };
        Event { id: self.id, reply }
    }

    /// The state without the cache.
    pub(crate) fn into_snapshot(self, model: String) -> Snapshot {
        Snapshot {
            model,
            tokens: self.tokens,
            prompt_len: self.prompt_len,
            tokens_left: self.tokens_left,
            min_tokens: self.min_tokens,
            logprobs: self.logprobs,
            prompt_logprobs: self.scores.is_some(),
            shown: self.shown,
            order: self.order,
            adapter: self.adapter.map(|adapter| adapter.digest),
            constraint: self.guide.map(|guide| guide.constraint().clone()),
            sampler: self.sampler,
            decoder: self.decoder,
            stops: self.stops,
        }
    }

    /// The sequence of a snapshot, with an empty cache. `guide` must be advanced by its tokens.
    pub(crate) fn restored(id: SequenceId, snapshot: Snapshot, guide: Option<Guide>) -> Self {
        let is_new = snapshot.tokens.len() == snapshot.prompt_len;
        Self {
            id,
            tokens: snapshot.tokens,
            prompt_len: snapshot.prompt_len,
            computed: 0,
            reused: 0,
            read_by: None,
            chosen_at: usize::MAX,
            pages: SequencePages::default(),
            adapter: None,
            names: Vec::new(),
            holds: false,
            order: snapshot.order,
            due: None,
            passed: 0,
            withheld: false,
            ticket: 0,
            n_in_flight: 0,
            rows_in_flight: 0,
            ahead: Vec::new(),
            course: 0,
            guesser: None,
            drafts: DraftCounts::default(),
            gone: false,
            tokens_left: snapshot.tokens_left,
            min_tokens: snapshot.min_tokens,
            logprobs: snapshot.logprobs,
            scores: (snapshot.prompt_logprobs && is_new).then(Vec::new),
            shown: snapshot.shown,
            guide: guide.map(Box::new),
            sampler: snapshot.sampler,
            decoder: snapshot.decoder,
            stops: snapshot.stops,
        }
    }
}
