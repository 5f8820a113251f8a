//! One choice of a response: turns engine replies into parts for the client.
//!
//! Log-probabilities are held back together with the text of their tokens, so those of a stop text
//! are not sent either. A token's entry is released with the first text that becomes certain at or
//! after it, or at the end.

use std::time::Instant;

use paceline_engine::{DraftCounts, Finish, Reply, TokenLogprobs};

use paceline_text::tools::{Event, ToolCallParser};

/// A part of a choice's output. Indices of calls count from 0 in each choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ResponsePart {
    Text(String),
    Reasoning(String),
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// More of a call's arguments, which are JSON when joined.
    Arguments {
        index: usize,
        text: String,
    },
    CallEnd {
        index: usize,
    },
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinishReason {
    /// The model ended its output.
    Said,
    /// A stop text matched: its index in the request.
    StopText(usize),
    /// The token limit was reached.
    Length,
    /// The model called tools.
    Calls,
}

impl FinishReason {
    /// OpenAI's `finish_reason`.
    pub(crate) const fn openai(self) -> &'static str {
        match self {
            Self::Said | Self::StopText(_) => "stop",
            Self::Length => "length",
            Self::Calls => "tool_calls",
        }
    }
}

/// The output that a reply adds to a choice.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Log-probabilities of the prompt's tokens from the second on, if requested.
    pub(crate) prompt: Option<Vec<TokenLogprobs>>,
    pub(crate) pieces: Vec<ResponsePart>,
    /// The text's tokens, if log-probabilities are requested.
    pub(crate) entries: Vec<ScoredToken>,
    /// Set on the last delta.
    pub(crate) ending: Option<FinishReason>,
}

/// A token and its log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScoredToken {
    pub(crate) token: u32,
    pub(crate) logprobs: TokenLogprobs,
}

#[derive(Debug)]
pub(crate) struct ChoiceState {
    /// Generated tokens, with the one that ended the text.
    pub(crate) tokens: usize,
    /// Generated tokens while the model was thinking.
    pub(crate) reasoning_tokens: usize,
    /// Cached tokens of the prompt.
    pub(crate) reused: usize,
    /// Its verified draft tokens; none before its end.
    pub(crate) drafts: DraftCounts,
    /// When the prefill ended.
    pub(crate) read_at: Option<Instant>,
    held: Vec<ScoredToken>,
    /// Separates text, reasoning and calls; `None` where everything is text.
    reader: Option<Box<ToolCallParser>>,
    /// Whether calls after the first are dropped.
    is_single: bool,
    has_calls: bool,
}

impl ChoiceState {
    pub(crate) fn new(reader: Option<ToolCallParser>, is_single: bool) -> Self {
        Self {
            tokens: 0,
            reasoning_tokens: 0,
            reused: 0,
            drafts: DraftCounts::default(),
            read_at: None,
            held: Vec::new(),
            reader: reader.map(Box::new),
            is_single,
            has_calls: false,
        }
    }

    /// Number of parsed calls, and of texts that only looked like one.
    pub(crate) fn calls(&self) -> (usize, usize) {
        let reader = self.reader.as_deref();
        reader.map_or((0, 0), |r| (r.complete_calls(), r.failed_calls()))
    }

    fn read(&mut self, text: &str) -> Vec<ResponsePart> {
        match &mut self.reader {
            None if text.is_empty() => Vec::new(),
            None => vec![ResponsePart::Text(text.to_owned())],
            Some(reader) => {
                let events = reader.push(text);
                self.pieces(events, false)
            }
        }
    }

    fn pieces(&self, events: Vec<Event>, is_over: bool) -> Vec<ResponsePart> {
        let is_told = |piece: &ResponsePart| match piece {
            ResponsePart::Call { index, .. }
            | ResponsePart::Arguments { index, .. }
            | ResponsePart::CallEnd { index } => !self.is_single || *index == 0,
            ResponsePart::Text(_) | ResponsePart::Reasoning(_) => true,
        };
        let pieces = events.into_iter().filter_map(|event| piece(event, is_over));
        pieces.filter(is_told).collect()
    }

    /// Applies `reply`, received at `now`; `None` if it adds nothing.
    pub(crate) fn apply_reply(&mut self, reply: Reply, now: Instant) -> Option<Delta> {
        match reply {
            Reply::Failed(_) | Reply::Continued => None,
            Reply::PromptRead {
                reused, logprobs, ..
            } => {
                self.reused = reused;
                self.read_at = Some(now);
                logprobs.map(|prompt| Delta {
                    prompt: Some(prompt),
                    ..Delta::default()
                })
            }
            Reply::Token {
                token,
                text,
                logprobs,
            } => {
                self.tokens += 1;
                let entry = |logprobs| ScoredToken { token, logprobs };
                self.held.extend(logprobs.map(entry));
                if text.is_empty() {
                    return None;
                }
                let pieces = self.read(&text);
                let is_reasoning = matches!(pieces.last(), Some(ResponsePart::Reasoning(_)));
                self.reasoning_tokens += usize::from(is_reasoning);
                self.delta(pieces, None)
            }
            Reply::Finished {
                text,
                reason,
                drafts,
            } => {
                self.drafts = drafts;
                self.finish(&text, reason)
            }
        }
    }

    fn finish(&mut self, text: &str, reason: Finish) -> Option<Delta> {
        match reason {
            // The end token has no text.
            Finish::EndOfText => drop(self.held.pop()),
            Finish::Stop(_) if text.is_empty() => self.held.clear(),
            Finish::Stop(_) | Finish::Length | Finish::Constraint | Finish::Deadline => {}
        }
        let mut pieces = self.read(text);
        if let Some(reader) = &mut self.reader {
            let events = reader.finish();
            pieces.extend(self.pieces(events, true));
        }
        let has_calls = self.has_calls || pieces.iter().any(is_call);
        let ending = match reason {
            Finish::Length | Finish::Constraint | Finish::Deadline => FinishReason::Length,
            _ if has_calls => FinishReason::Calls,
            Finish::EndOfText => FinishReason::Said,
            Finish::Stop(i) => FinishReason::StopText(i),
        };
        self.delta(pieces, Some(ending))
    }

    fn delta(&mut self, pieces: Vec<ResponsePart>, ending: Option<FinishReason>) -> Option<Delta> {
        self.has_calls |= pieces.iter().any(is_call);
        if pieces.is_empty() && ending.is_none() {
            return None;
        }
        Some(Delta {
            pieces,
            entries: std::mem::take(&mut self.held),
            ending,
            prompt: None,
        })
    }
}

/// Only complete calls count: output may end inside one.
const fn is_call(piece: &ResponsePart) -> bool {
    matches!(piece, ResponsePart::CallEnd { .. })
}

/// The part that clients get for an event; `is_over` when the output ended with it.
fn piece(event: Event, is_over: bool) -> Option<ResponsePart> {
    Some(match event {
        Event::Text(text) => ResponsePart::Text(text),
        Event::Reasoning(text) => ResponsePart::Reasoning(text),
        Event::CallStart { index, id, name } => ResponsePart::Call { index, id, name },
        Event::Arguments { index, piece: text } => ResponsePart::Arguments { index, text },
        Event::CallEnd { index } => ResponsePart::CallEnd { index },
        // Clients have its beginning: the call is truncated with the output, as at OpenAI.
        Event::CallFailed { .. } if is_over => return None,
        Event::CallFailed { text, .. } => ResponsePart::Text(text),
    })
}

#[derive(Debug, Default, PartialEq)]
pub(crate) struct ChoiceOutput {
    pub(crate) prompt: Option<Vec<TokenLogprobs>>,
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<CompletedCall>,
    pub(crate) entries: Vec<ScoredToken>,
    pub(crate) ending: Option<FinishReason>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CompletedCall {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON.
    pub(crate) arguments: String,
}

impl ChoiceOutput {
    pub(crate) fn add(&mut self, delta: Delta) {
        for piece in delta.pieces {
            self.add_piece(piece);
        }
        self.prompt = delta.prompt.or(self.prompt.take());
        self.entries.extend(delta.entries);
        self.ending = delta.ending.or(self.ending);
    }

    fn add_piece(&mut self, piece: ResponsePart) {
        match piece {
            ResponsePart::Text(text) => self.text.push_str(&text),
            ResponsePart::Reasoning(text) => self.reasoning.push_str(&text),
            ResponsePart::Call { id, name, .. } => {
                let arguments = String::new();
                self.calls.push(CompletedCall {
                    id,
                    name,
                    arguments,
                });
            }
            ResponsePart::Arguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
            ResponsePart::CallEnd { .. } => {}
        }
    }

    /// OpenAI's `finish_reason`.
    pub(crate) fn finish_reason(&self) -> Option<&'static str> {
        self.ending.map(FinishReason::openai)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(token: u32, text: &str) -> Reply {
        let (text, logprob, top) = (text.to_owned(), -1.0, vec![]);
        let logprobs = Some(TokenLogprobs { logprob, top });
        Reply::Token {
            token,
            text,
            logprobs,
        }
    }

    fn finished(text: &str, reason: Finish) -> Reply {
        Reply::Finished {
            text: text.to_owned(),
            reason,
            drafts: DraftCounts::default(),
        }
    }

    /// Texts, tokens and the end of what the replies give.
    fn shown(replies: Vec<Reply>) -> Vec<(String, Vec<u32>, Option<FinishReason>)> {
        let (mut choice, now) = (ChoiceState::new(None, false), Instant::now());
        let deltas = replies
            .into_iter()
            .filter_map(|reply| choice.apply_reply(reply, now));
        let tokens = |delta: &Delta| delta.entries.iter().map(|e| e.token).collect();
        let text = |delta: &Delta| {
            let texts = delta.pieces.iter().map(|piece| match piece {
                ResponsePart::Text(text) => text.as_str(),
                other => panic!("{other:?}"),
            });
            texts.collect::<String>()
        };
        deltas
            .map(|delta| (text(&delta), tokens(&delta), delta.ending))
            .collect()
    }

    #[test]
    fn entries_come_with_their_text_and_not_with_a_stop_text() {
        let some = |text: &str, tokens: &[u32], finish| (text.to_owned(), tokens.to_vec(), finish);
        let plain = vec![
            Reply::PromptRead {
                reused: 0,
                logprobs: None,
                read_by: None,
            },
            token(1, "a"),
            token(2, ""),
            token(3, "bc"),
            token(4, ""),
            finished("d", Finish::Length),
        ];
        assert_eq!(
            shown(plain),
            [
                some("a", &[1], None),
                some("bc", &[2, 3], None),
                some("d", &[4], Some(FinishReason::Length))
            ]
        );
        let stopped = vec![
            token(1, "a"),
            token(2, ""),
            token(3, ""),
            finished("", Finish::Stop(0)),
        ];
        assert_eq!(
            shown(stopped),
            [
                some("a", &[1], None),
                some("", &[], Some(FinishReason::StopText(0)))
            ]
        );
        let ended = vec![token(1, ""), token(2, ""), finished("é", Finish::EndOfText)];
        assert_eq!(shown(ended), [some("é", &[1], Some(FinishReason::Said))]);
        let nothing = vec![
            Reply::PromptRead {
                reused: 0,
                logprobs: None,
                read_by: None,
            },
            finished("", Finish::Length),
        ];
        assert_eq!(shown(nothing), [some("", &[], Some(FinishReason::Length))]);
    }
}
