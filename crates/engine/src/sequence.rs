//! A sequence: its tokens, its pages, and the state that turns tokens into text.

use paceline_formats::text::{StopMatcher, StopOutput, StreamDecoder};
use paceline_formats::tokenizer::Tokenizer;
use paceline_tensor::{Kernels, PAGE};

use crate::pages::Owned;
use crate::sampling::{Choice, Sampler, Scratch};
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
    /// Tokens that may still be generated.
    tokens_left: usize,
    /// [`Request::logprobs`].
    logprobs: Option<usize>,
    sampler: Sampler,
    decoder: StreamDecoder,
    stops: StopMatcher,
}

impl Sequence {
    /// A sequence whose prompt is to be read. `context` is the most tokens it can have, more than
    /// the prompt has.
    pub(crate) fn new(id: SequenceId, request: Request, context: usize) -> Result<Self, Error> {
        let prompt_len = request.prompt.len();
        Ok(Self {
            id,
            prompt_len,
            tokens_left: request.max_tokens.min(context - prompt_len),
            tokens: request.prompt,
            computed: 0,
            reused: 0,
            pages: Owned::default(),
            logprobs: request.logprobs,
            sampler: Sampler::new(request.sampling)?,
            decoder: StreamDecoder::new(),
            stops: StopMatcher::new(request.stop)?,
        })
    }

    /// The tokens that are not in the cache yet.
    pub(crate) fn pending(&self) -> &[u32] {
        &self.tokens[self.computed..]
    }

    /// Pages that its tokens need beyond those it owns.
    pub(crate) fn pages_missing(&self) -> usize {
        let needed = self.tokens.len().div_ceil(PAGE);
        needed.saturating_sub(self.pages.len())
    }

    /// Chooses the next token by the logits after the last one; `None` when the request wants no
    /// more.
    pub(crate) fn next_token(
        &mut self,
        kernels: &Kernels,
        logits: &mut [f32],
        scratch: &mut Scratch,
    ) -> Option<Choice> {
        let history = (&*self.tokens, self.prompt_len);
        let (sampler, n) = (&mut self.sampler, self.logprobs);
        (self.tokens_left > 0).then(|| sampler.choose(kernels, logits, history, n, scratch))
    }

    /// Takes in what [`next_token`](Self::next_token) gave. The last event is [`Event::Finished`]
    /// if the sequence has ended.
    pub(crate) fn accept(
        &mut self,
        choice: Option<Choice>,
        tokenizer: &Tokenizer,
        events: &mut Vec<Event>,
    ) {
        let id = self.id;
        if self.tokens.len() == self.prompt_len {
            let reused = self.reused;
            events.push(Event::PromptRead { id, reused });
        }
        let Some(Choice { token, logprobs }) = choice else {
            return events.push(self.finish(Finish::Length));
        };
        self.tokens.push(token);
        self.tokens_left -= 1;
        let ends = tokenizer.is_end_of_generation(token);
        let mut output = StopOutput::default();
        if !ends {
            let bytes = tokenizer.token_bytes(token).unwrap_or_default();
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
            sampler: self.sampler,
            decoder: self.decoder,
            stops: self.stops,
        }
    }

    /// The sequence of a snapshot, with nothing in the cache.
    pub(crate) fn restored(id: SequenceId, snapshot: Snapshot) -> Self {
        Self {
            id,
            tokens: snapshot.tokens,
            prompt_len: snapshot.prompt_len,
            computed: 0,
            reused: 0,
            pages: Owned::default(),
            tokens_left: snapshot.tokens_left,
            logprobs: snapshot.logprobs,
            sampler: snapshot.sampler,
            decoder: snapshot.decoder,
            stops: snapshot.stops,
        }
    }
}
