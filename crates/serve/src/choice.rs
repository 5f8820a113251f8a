//! One choice of an answer, from replies to what clients are shown.
//!
//! Log-probabilities wait with the text that their tokens are held back with, so that those of a
//! stop text are not shown either: a token's entry is given out with the first text that becomes
//! certain at or after it, or with the end.

use paceline_engine::{Finish, Reply, TokenLogprobs};

/// What a reply adds to a choice.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) text: String,
    /// Tokens that the text was made of, when log-probabilities are asked for.
    pub(crate) entries: Vec<Entry>,
    /// Why the choice ends with this.
    pub(crate) finish: Option<&'static str>,
}

/// A token and its log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) token: u32,
    pub(crate) logprobs: TokenLogprobs,
}

/// The state of a choice between replies.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// Tokens generated, the one that ended the text included.
    pub(crate) tokens: usize,
    held: Vec<Entry>,
}

impl Choice {
    /// What `reply` adds; `None` if nothing.
    pub(crate) fn take(&mut self, reply: Reply) -> Option<Delta> {
        match reply {
            Reply::PromptRead { .. } | Reply::Failed(_) => None,
            Reply::Token {
                token,
                text,
                logprobs,
            } => {
                self.tokens += 1;
                let entry = |logprobs| Entry { token, logprobs };
                self.held.extend(logprobs.map(entry));
                (!text.is_empty()).then(|| self.delta(text, None))
            }
            Reply::Finished { text, reason } => {
                match reason {
                    // Its token has no text.
                    Finish::EndOfText => drop(self.held.pop()),
                    Finish::Stop(_) if text.is_empty() => self.held.clear(),
                    Finish::Stop(_) | Finish::Length => {}
                }
                let finish = match reason {
                    Finish::EndOfText | Finish::Stop(_) => "stop",
                    Finish::Length => "length",
                };
                Some(self.delta(text, Some(finish)))
            }
        }
    }

    fn delta(&mut self, text: String, finish: Option<&'static str>) -> Delta {
        Delta {
            text,
            entries: std::mem::take(&mut self.held),
            finish,
        }
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
        let text = text.to_owned();
        Reply::Finished { text, reason }
    }

    /// Texts, tokens and the end of what the replies give.
    fn shown(replies: Vec<Reply>) -> Vec<(String, Vec<u32>, Option<&'static str>)> {
        let mut choice = Choice::default();
        let deltas = replies.into_iter().filter_map(|reply| choice.take(reply));
        let tokens = |delta: &Delta| delta.entries.iter().map(|e| e.token).collect();
        deltas
            .map(|delta| (delta.text.clone(), tokens(&delta), delta.finish))
            .collect()
    }

    #[test]
    fn entries_come_with_their_text_and_not_with_a_stop_text() {
        let some = |text: &str, tokens: &[u32], finish| (text.to_owned(), tokens.to_vec(), finish);
        let plain = vec![
            Reply::PromptRead { reused: 0 },
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
                some("d", &[4], Some("length"))
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
            [some("a", &[1], None), some("", &[], Some("stop"))]
        );
        let ended = vec![token(1, ""), token(2, ""), finished("é", Finish::EndOfText)];
        assert_eq!(shown(ended), [some("é", &[1], Some("stop"))]);
        let nothing = vec![
            Reply::PromptRead { reused: 0 },
            finished("", Finish::Length),
        ];
        assert_eq!(shown(nothing), [some("", &[], Some("length"))]);
    }
}
