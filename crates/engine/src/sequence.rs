//! A sequence: its tokens, its pages, and the state that turns tokens into text.

use paceline_formats::text::{StopMatcher, StreamDecoder};
use paceline_formats::tokenizer::Tokenizer;

use crate::request::{Event, Finish, SequenceId};
use crate::{Error, Request, Sampler, Snapshot};

/// A request in progress.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    /// Prompt and answer.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Positions whose keys and values are in the cache; below `tokens.len()`.
    pub(crate) computed: usize,
    /// Pages in order of position; cover at least `computed` positions.
    pub(crate) pages: Vec<u32>,
    /// Tokens that may still be generated.
    pub(crate) tokens_left: usize,
    pub(crate) sampler: Sampler,
    decoder: StreamDecoder,
    stops: StopMatcher,
}

impl Sequence {
    /// A sequence whose prompt is to be read. `context` is the most positions it can have.
    pub(crate) fn new(id: SequenceId, request: Request, context: usize) -> Result<Self, Error> {
        let prompt_len = request.prompt.len();
        Ok(Self {
            id,
            prompt_len,
            tokens_left: request.max_tokens.min(context - prompt_len),
            tokens: request.prompt,
            computed: 0,
            pages: Vec::new(),
            sampler: Sampler::new(request.sampling)?,
            decoder: StreamDecoder::new(),
            stops: StopMatcher::new(request.stop)?,
        })
    }

    /// The tokens that are not in the cache yet, at least one.
    pub(crate) fn pending(&self) -> &[u32] {
        &self.tokens[self.computed..]
    }

    /// Whether the last pending token is the last of the tokens known: its logits choose the next.
    pub(crate) fn is_reading_prompt(&self) -> bool {
        self.tokens.len() == self.prompt_len
    }

    /// Takes a sampled token in; returns the events and, when it was the last, says so.
    pub(crate) fn accept(&mut self, token: u32, tokenizer: &Tokenizer) -> (Vec<Event>, bool) {
        self.tokens.push(token);
        self.tokens_left -= 1;
        if tokenizer.is_end_of_generation(token) {
            let (id, text) = (self.id, String::new());
            let event = Event::Token { id, token, text };
            return (vec![event, self.finish(Finish::EndOfText)], true);
        }
        let decoded = self
            .decoder
            .push(tokenizer.token_bytes(token).unwrap_or_default());
        let output = self.stops.push(&decoded);
        let mut events = vec![Event::Token {
            id: self.id,
            token,
            text: output.text,
        }];
        let reason = match output.stopped {
            Some(which) => Some(Finish::Stop(which)),
            None if self.tokens_left == 0 => Some(Finish::Length),
            None => None,
        };
        let finished = reason.is_some();
        events.extend(reason.map(|reason| self.finish(reason)));
        (events, finished)
    }

    /// The last event. Text held back comes out unless a stop string ended the answer.
    pub(crate) fn finish(&mut self, reason: Finish) -> Event {
        let id = self.id;
        if let Finish::Stop(_) = reason {
            return Event::Finished {
                id,
                text: String::new(),
                reason,
            };
        }
        let tail = self.decoder.finish();
        let output = self.stops.push(&tail);
        let mut text = output.text;
        if let Some(which) = output.stopped {
            return Event::Finished {
                id,
                text,
                reason: Finish::Stop(which),
            };
        }
        text.push_str(&self.stops.finish().text);
        Event::Finished { id, text, reason }
    }

    /// Everything but the cache.
    pub(crate) fn snapshot(&self, model: &str) -> Snapshot {
        Snapshot {
            model: model.to_owned(),
            tokens: self.tokens.clone(),
            prompt_len: self.prompt_len,
            tokens_left: self.tokens_left,
            sampler: self.sampler.clone(),
            decoder: self.decoder.clone(),
            stops: self.stops.clone(),
        }
    }

    /// The sequence of a snapshot, with nothing in the cache.
    pub(crate) fn restored(id: SequenceId, snapshot: Snapshot) -> Self {
        Self {
            id,
            tokens: snapshot.tokens,
            prompt_len: snapshot.prompt_len,
            computed: 0,
            pages: Vec::new(),
            tokens_left: snapshot.tokens_left,
            sampler: snapshot.sampler,
            decoder: snapshot.decoder,
            stops: snapshot.stops,
        }
    }
}
