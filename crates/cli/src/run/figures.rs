//! What an answer cost.

use std::time::{Duration, Instant};

use paceline_engine::Finish;
use paceline_model::ExpertUses;
use paceline_node::Moved;
use paceline_node::supervisor::Change;
use paceline_tensor::KvType;
use serde_json::json;

use super::Args;
use super::session::Session;
use crate::process::peak_memory_bytes;

/// An answer and its times.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    /// When the request was handed over.
    pub(super) asked: Instant,
    /// Without the tokens that ended it.
    pub(super) text: String,
    /// All that were generated, the one that ended the answer included.
    pub(super) tokens: Vec<u32>,
    pub(super) n_prompt: usize,
    /// Of these, computed for an earlier turn of the chat.
    pub(super) n_reused: usize,
    pub(super) end: End,
    /// Until the prompt was read, which the first token comes with.
    pub(super) prefill: Duration,
    /// From the first token to the last.
    pub(super) decode: Duration,
    /// What nodes moved; `None` for one node.
    pub(super) moved: Option<Moved>,
    /// Decode tokens a second as they were expected; `None` when nothing was measured before.
    pub(super) predicted: Option<f64>,
    /// Changes of the split while it was computed.
    pub(super) changes: Vec<Change>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The model ended it, or a stop string.
    Stop,
    /// `--max-tokens`.
    MaxTokens,
    /// No position is left.
    Context,
    /// Ctrl-C in a chat.
    Stopped,
}

impl End {
    pub(super) const fn new(finish: Finish, n_generated: usize, max_tokens: usize) -> Self {
        match finish {
            Finish::EndOfText | Finish::Stop(_) => Self::Stop,
            Finish::Length if n_generated == max_tokens => Self::MaxTokens,
            // Nothing that `run` offers constrains an answer.
            Finish::Length | Finish::Constraint | Finish::Deadline => Self::Context,
        }
    }

    /// In the words of the OpenAI API.
    const fn word(self) -> &'static str {
        match self {
            Self::Stop | Self::Stopped => "stop",
            Self::MaxTokens | Self::Context => "length",
        }
    }
}

impl Figures {
    fn prefill_tok_s(&self) -> Option<f64> {
        rate(self.n_prompt - self.n_reused, self.prefill)
    }

    /// `None` when no token was asked for.
    fn ttft_ms(&self) -> Option<f64> {
        (!self.tokens.is_empty()).then_some(self.prefill.as_secs_f64() * 1e3)
    }

    /// Of tokens after the first: that one comes with the prompt.
    pub(super) fn decode_tok_s(&self) -> Option<f64> {
        rate(self.tokens.len().saturating_sub(1), self.decode)
    }

    /// Of prompt and answer alike.
    fn moved_per_token(&self) -> Option<Moved> {
        let computed = (self.n_prompt - self.n_reused + self.tokens.len()).saturating_sub(1);
        let moved = self.moved.filter(|_| computed > 0);
        moved.map(|moved| moved.per(computed as u64))
    }

    /// One line for people.
    pub(super) fn line(&self) -> String {
        let tokens = |n: usize| format!("{n} token{}", if n == 1 { "" } else { "s" });
        let mut line = format!(
            "[prompt {}, answer {}",
            tokens(self.n_prompt),
            tokens(self.tokens.len())
        );
        if let Some(ms) = self.ttft_ms() {
            line += &format!("; first token after {ms:.0} ms");
        }
        if let Some(speed) = self.prefill_tok_s() {
            line += &format!("; prefill {speed:.0} tokens/s");
        }
        if let Some(speed) = self.decode_tok_s() {
            line += &format!(", decode {speed:.1} tokens/s");
            if let Some(predicted) = self.predicted {
                line += &format!(" ({predicted:.1} predicted)");
            }
        }
        if let Some(moved) = self.moved_per_token() {
            line += &format!("; {} per token on the wire{}", moved.sent, moved.arrays());
        }
        line + match self.end {
            End::Stop => "]",
            End::Stopped => "; stopped]",
            End::MaxTokens => "; ended by --max-tokens]",
            End::Context => "; ended by the full --context]",
        }
    }

    /// The object of `--json`.
    pub(super) fn json(&self, args: &Args, session: &Session) -> serde_json::Value {
        let loaded = session.loaded();
        json!({
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.end.word(),
            "n_prompt": self.n_prompt,
            "n_generated": self.tokens.len(),
            "load_ms": loaded.load_time.as_secs_f64() * 1e3,
            "ttft_ms": self.ttft_ms(),
            "prefill_tok_s": self.prefill_tok_s(),
            "decode_tok_s": self.decode_tok_s(),
            "predicted_decode_tok_s": self.predicted,
            "peak_memory_bytes": peak_memory_bytes(),
            "nodes": loaded.nodes(),
            "split": loaded.split().to_string(),
            "split_changes": self.changes,
            "wire_bytes_per_token": self.moved_per_token().map(|moved| moved.sent.0),
            "array_bytes_per_token": self.moved_per_token().and_then(Moved::arrays_json),
            "threads": loaded.threads,
            "weight_bytes": loaded.weights().iter().map(|bytes| bytes.0).collect::<Vec<_>>(),
            "model": args.model,
            "context": loaded.engine.context,
            "kernel_class": loaded.classes.to_string(),
            "kv_type": loaded.kv.map(KvType::name),
            "instruction_set": loaded.device(),
            "seed": session.seed(),
            "expert_uses": expert_uses(&loaded.expert_uses()),
            "guesses": loaded.guesses(),
        })
    }
}

/// How often each expert was chosen, by layer; null without experts.
fn expert_uses(uses: &[ExpertUses]) -> serde_json::Value {
    let of = |uses: &ExpertUses| json!({"layer": uses.layer, "rows": uses.rows});
    match uses {
        [] => serde_json::Value::Null,
        uses => uses.iter().map(of).collect(),
    }
}

/// Events per second; `None` for no event, or no time that the clock can see.
fn rate(events: usize, time: Duration) -> Option<f64> {
    (events > 0 && !time.is_zero()).then(|| events as f64 / time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(n_tokens: usize, end: End) -> Figures {
        Figures {
            asked: Instant::now(),
            text: String::new(),
            tokens: vec![7; n_tokens],
            n_prompt: 50,
            n_reused: 0,
            end,
            prefill: Duration::from_millis(100),
            decode: Duration::from_millis(200),
            moved: None,
            predicted: None,
            changes: Vec::new(),
        }
    }

    #[test]
    fn the_line_has_only_what_was_measured() {
        for (n_tokens, end, line) in [
            (
                0,
                End::MaxTokens,
                "[prompt 50 tokens, answer 0 tokens; prefill 500 tokens/s; ended by --max-tokens]",
            ),
            (
                1,
                End::Stop,
                "[prompt 50 tokens, answer 1 token; first token after 100 ms; prefill 500 tokens/s]",
            ),
            (
                11,
                End::Context,
                "[prompt 50 tokens, answer 11 tokens; first token after 100 ms; prefill 500 \
                 tokens/s, decode 50.0 tokens/s; ended by the full --context]",
            ),
        ] {
            assert_eq!(figures(n_tokens, end).line(), line);
        }
    }

    #[test]
    fn rates_are_never_infinite() {
        assert_eq!(rate(0, Duration::from_secs(1)), None);
        assert_eq!(rate(5, Duration::ZERO), None);
        assert_eq!(rate(5, Duration::from_millis(500)), Some(10.0));
    }
}
