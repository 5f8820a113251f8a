//! A sequence: its tokens, its pages, and the state that turns tokens into text.

use paceline_formats::text::{StopMatcher, StopOutput, StreamDecoder};
use paceline_formats::tokenizer::Tokenizer;
use paceline_tensor::{Kernels, PAGE};

use crate::constraint::{Allowed, Guide};
use crate::draft::Drafts;
use crate::pages::Owned;
use crate::sampling::{Asked, Choice, Sampler, Scratch};
use crate::{Error, Event, Finish, Request, SequenceId, Snapshot};

/// A request in progress.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    /// Prompt and answer.
    pub(crate) tokens: Vec<u32>,
    prompt_len: usize,
    /// Positions whose keys and values are in the cache; below `tokens.len()` between steps.
    pub(crate) computed: usize,
    /// Of these, positions that did not have to be computed when it was admitted.
    pub(crate) reused: usize,
    /// Cover at least `computed` positions.
    pub(crate) pages: Owned,
    pub(crate) drafts: Drafts,
    /// Tokens that may still be generated.
    tokens_left: usize,
    /// [`Request::logprobs`].
    logprobs: Option<usize>,
    /// [`Request::shown`].
    shown: Vec<u32>,
    /// Keeps [`Request::constraint`].
    pub(crate) guide: Option<Box<Guide>>,
    sampler: Sampler,
    decoder: StreamDecoder,
    stops: StopMatcher,
}

impl Sequence {
    /// A sequence whose prompt is to be read. `context` is the most tokens it can have, more than
    /// the prompt has.
    pub(crate) fn new(
        id: SequenceId,
        request: Request,
        guide: Option<Guide>,
        context: usize,
    ) -> Result<Self, Error> {
        let prompt_len = request.prompt.len();
        Ok(Self {
            id,
            prompt_len,
            tokens_left: request.max_tokens.min(context - prompt_len),
            tokens: request.prompt,
            computed: 0,
            reused: 0,
            pages: Owned::default(),
            drafts: Drafts::default(),
            logprobs: request.logprobs,
            shown: request.shown,
            guide: guide.map(Box::new),
            sampler: Sampler::new(request.sampling)?,
            decoder: StreamDecoder::new(),
            stops: StopMatcher::new(request.stop)?,
        })
    }

    /// Tokens of its prompt.
    pub(crate) const fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// The tokens that are not in the cache yet.
    pub(crate) fn pending(&self) -> &[u32] {
        &self.tokens[self.computed..]
    }

    /// Rows behind the pending token that a draft may have: positions that need no further page,
    /// and tokens that the answer may still have.
    pub(crate) const fn draft_room(&self) -> usize {
        let positions = self.pages.len() * PAGE - self.computed - 1;
        let tokens = self.tokens_left.saturating_sub(1);
        if positions < tokens {
            positions
        } else {
            tokens
        }
    }

    /// Pages that its tokens need beyond those it owns.
    pub(crate) fn pages_missing(&self) -> usize {
        let needed = self.tokens.len().div_ceil(PAGE);
        needed.saturating_sub(self.pages.len())
    }

    /// Chooses the next token by the logits after the last one; else why there is none.
    pub(crate) fn next_token(
        &mut self,
        kernels: &Kernels,
        logits: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<Choice, Finish> {
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
        let asked = Asked {
            history: (&*self.tokens, self.prompt_len),
            mask,
            logprobs: self.logprobs,
        };
        Ok(self.sampler.choose(kernels, logits, asked, scratch))
    }

    /// Takes in what [`next_token`](Self::next_token) gave. The last event is [`Event::Finished`]
    /// if the sequence has ended.
    pub(crate) fn accept(
        &mut self,
        choice: Result<Choice, Finish>,
        tokenizer: &Tokenizer,
        events: &mut Vec<Event>,
    ) {
        let id = self.id;
        if self.tokens.len() == self.prompt_len {
            let reused = self.reused;
            events.push(Event::PromptRead { id, reused });
        }
        let Choice { token, logprobs } = match choice {
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
        events.push(Event::Token {
            id,
            token,
            text: output.text,
            logprobs,
        });
        if ends {
            return events.push(self.finish(Finish::EndOfText));
        }
        if let Some(which) = output.stopped {
            let (text, reason) = (String::new(), Finish::Stop(which));
            events.push(Event::Finished { id, text, reason });
        } else if self.tokens_left == 0 {
            events.push(self.finish(Finish::Length));
        }
    }

    /// What `token` adds to the text.
    fn bytes_of<'a>(&self, token: u32, tokenizer: &'a Tokenizer) -> &'a [u8] {
        if self.shown.binary_search(&token).is_ok() {
            return tokenizer.token_text(token).unwrap_or_default().as_bytes();
        }
        tokenizer.token_bytes(token).unwrap_or_default()
    }

    /// Takes in tokens that were chosen for it elsewhere, whose texts were shown there. The last
    /// event if they have ended it.
    pub(crate) fn replay(&mut self, tokens: &[u32], tokenizer: &Tokenizer) -> Option<Event> {
        let mut events = Vec::new();
        for &token in tokens {
            events.clear();
            self.sampler.skip();
            let logprobs = None;
            self.accept(Ok(Choice { token, logprobs }), tokenizer, &mut events);
        }
        let last = events.pop();
        last.filter(|event| matches!(event, Event::Finished { .. }))
    }

    /// The last event, with the text that was held back. A stop string that the end decides goes
    /// before `reason`.
    fn finish(&mut self, reason: Finish) -> Event {
        let mut text = self.stops.push(&self.decoder.finish()).text;
        let output = self.stops.finish();
        text.push_str(&output.text);
        Event::Finished {
            id: self.id,
            text,
            reason: output.stopped.map_or(reason, Finish::Stop),
        }
    }

    /// Everything but the cache.
    pub(crate) fn into_snapshot(self, model: String) -> Snapshot {
        Snapshot {
            model,
            tokens: self.tokens,
            prompt_len: self.prompt_len,
            tokens_left: self.tokens_left,
            logprobs: self.logprobs,
            shown: self.shown,
            constraint: self.guide.map(|guide| guide.constraint().clone()),
            sampler: self.sampler,
            decoder: self.decoder,
            stops: self.stops,
        }
    }

    /// The sequence of a snapshot, with nothing in the cache.
    /// `guide` keeps its constraint and stands where its tokens lead.
    pub(crate) fn restored(id: SequenceId, snapshot: Snapshot, guide: Option<Guide>) -> Self {
        Self {
            id,
            tokens: snapshot.tokens,
            prompt_len: snapshot.prompt_len,
            computed: 0,
            reused: 0,
            pages: Owned::default(),
            drafts: Drafts::default(),
            tokens_left: snapshot.tokens_left,
            logprobs: snapshot.logprobs,
            shown: snapshot.shown,
            guide: guide.map(Box::new),
            sampler: snapshot.sampler,
            decoder: snapshot.decoder,
            stops: snapshot.stops,
        }
    }
}
