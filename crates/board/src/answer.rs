//! Collects the replies of one request, with times and traffic.

use std::time::{Duration, Instant};

use paceline_base::Bytes;
use paceline_engine::{DraftCounts, Finish, Reply, RequestFailure};
use paceline_model::ExpertUses;
use paceline_node::ReplyStream;
use paceline_node::supervisor::ChangeRecord;
use paceline_tensor::KvType;
use paceline_worker::InstanceTraffic;
use serde_json::json;

/// Interval of checks for a stop request while no token comes.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// An answer with its statistics.
#[derive(Clone, Debug)]
pub struct AnswerStats {
    /// Submission time.
    pub asked: Instant,
    /// The text, without the tokens that ended it.
    pub text: String,
    /// All generated tokens, with the one that ended the answer.
    pub tokens: Vec<u32>,
    pub n_prompt: usize,
    /// Of these, cached from an earlier turn of the chat.
    pub n_reused: usize,
    pub end: StopReason,
    /// Time to the first token.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
    /// Traffic between nodes; `None` for one node.
    pub moved: Option<InstanceTraffic>,
    /// Predicted decode tokens a second; `None` without earlier measurements.
    pub predicted: Option<f64>,
    pub changes: Vec<ChangeRecord>,
    /// How often it continued with numbers near those before, after a failure.
    pub continued: usize,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model's end token, or a stop string.
    Stop,
    /// `--max-tokens`.
    MaxTokens,
    Context,
    /// Ctrl-C in a chat.
    Stopped,
}

impl StopReason {
    /// The reason for an answer of `n_generated` tokens, limited to `max_tokens`.
    pub const fn new(finish: Finish, n_generated: usize, max_tokens: usize) -> Self {
        match finish {
            Finish::EndOfText | Finish::Stop(_) => Self::Stop,
            Finish::Length if n_generated == max_tokens => Self::MaxTokens,
            // `run` has no constraints or deadlines.
            Finish::Length | Finish::Constraint | Finish::Deadline => Self::Context,
        }
    }

    /// OpenAI's `finish_reason`.
    const fn word(self) -> &'static str {
        match self {
            Self::Stop | Self::Stopped => "stop",
            Self::MaxTokens | Self::Context => "length",
        }
    }
}

impl AnswerStats {
    fn prefill_tok_s(&self) -> Option<f64> {
        rate(self.n_prompt - self.n_reused, self.prefill)
    }

    /// `None` for a limit of 0 tokens.
    fn ttft_ms(&self) -> Option<f64> {
        (!self.tokens.is_empty()).then_some(self.prefill.as_secs_f64() * 1e3)
    }

    /// Without the first token, which comes with the prompt.
    pub fn decode_tok_s(&self) -> Option<f64> {
        rate(self.tokens.len().saturating_sub(1), self.decode)
    }

    fn moved_per_token(&self) -> Option<InstanceTraffic> {
        let computed = (self.n_prompt - self.n_reused + self.tokens.len()).saturating_sub(1);
        let moved = self.moved.filter(|_| computed > 0);
        moved.map(|moved| moved.per(computed as u64))
    }

    /// The statistics as a line.
    pub fn line(&self) -> String {
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
        if self.continued > 0 {
            line += "; continued after a failure, with near numbers";
        }
        line + match self.end {
            StopReason::Stop => "]",
            StopReason::Stopped => "; stopped]",
            StopReason::MaxTokens => "; ended by --max-tokens]",
            StopReason::Context => "; ended by the full --context]",
        }
    }

    /// The answer as a JSON object, with the run's details.
    pub fn json(&self, about: &RunDetails<'_>) -> serde_json::Value {
        let mut answer = json!({
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.end.word(),
            "n_prompt": self.n_prompt,
            "n_generated": self.tokens.len(),
            "load_ms": about.load_time.as_secs_f64() * 1e3,
            "ttft_ms": self.ttft_ms(),
            "prefill_tok_s": self.prefill_tok_s(),
            "decode_tok_s": self.decode_tok_s(),
            "predicted_decode_tok_s": self.predicted,
            "peak_memory_bytes": about.peak_memory,
            "nodes": about.nodes,
            "split": about.split,
            "split_changes": self.changes,
            "wire_bytes_per_token": self.moved_per_token().map(|moved| moved.sent.0),
            "array_bytes_per_token": self.moved_per_token().and_then(InstanceTraffic::arrays_json),
            "threads": about.threads,
            "weight_bytes": about.weights.iter().map(|bytes| bytes.0).collect::<Vec<_>>(),
            "model": about.model,
            "context": about.context,
            "kernel_class": about.class,
            "kv_type": about.kv.map(KvType::name),
            "instruction_set": about.device,
            "seed": about.seed,
            "expert_uses": expert_uses(&about.expert_uses),
            "guesses": about.guesses,
        });
        if self.continued > 0 {
            answer["continued"] = self.continued.into();
        }
        answer
    }
}

/// The model and its configuration, for the JSON object.
#[derive(Clone, Debug)]
pub struct RunDetails<'a> {
    /// Time from opening the model's files until ready for a prompt.
    pub load_time: Duration,
    /// Peak memory of this process in bytes, if known.
    pub peak_memory: Option<u64>,
    pub nodes: u32,
    /// The model's split.
    pub split: String,
    pub threads: usize,
    pub weights: Vec<Bytes>,
    /// The user's name for it.
    pub model: &'a str,
    /// Maximum positions of a conversation.
    pub context: usize,
    /// Kernel classes.
    pub class: String,
    /// KV type on CPU nodes; `None` if all are on MLX.
    pub kv: Option<KvType>,
    /// Instruction sets or devices.
    pub device: String,
    pub seed: u64,
    /// Routing counts of experts.
    pub expert_uses: Vec<ExpertUses>,
    /// Verified draft tokens.
    pub guesses: DraftCounts,
}

/// A submitted request.
#[derive(Clone, Copy, Debug)]
pub struct SubmittedPrompt {
    /// Submission time.
    pub at: Instant,
    pub n_prompt: usize,
    pub max_tokens: usize,
}

/// Collects an answer, and shows each part of its text once it is certain. Ends early when
/// `is_stopped`, if that is given.
///
/// # Errors
/// A failure of the model, or an error of `show`.
pub fn collect<E: From<RequestFailure>>(
    answer: &ReplyStream<'_>,
    asked: SubmittedPrompt,
    is_stopped: Option<&dyn Fn() -> bool>,
    mut show: impl FnMut(&str) -> Result<(), E>,
) -> Result<AnswerStats, E> {
    let start = asked.at;
    let (mut prefill, mut first) = (Duration::ZERO, start);
    let (mut text, mut tokens, mut n_reused) = (String::new(), Vec::new(), 0);
    let mut continued = 0;
    let (end, last) = loop {
        let Some((at, reply)) = next(answer, is_stopped)? else {
            break (StopReason::Stopped, Instant::now());
        };
        let (piece, end) = match reply {
            Reply::PromptRead { reused, .. } => {
                (prefill, first) = (at - start, at);
                n_reused = reused;
                continue;
            }
            Reply::Token { token, text, .. } => {
                tokens.push(token);
                (text, None)
            }
            Reply::Continued => {
                continued += 1;
                continue;
            }
            Reply::Finished { text, reason, .. } => {
                let end = StopReason::new(reason, tokens.len(), asked.max_tokens);
                (text, Some(end))
            }
            Reply::Failed(failure) => return Err(failure.into()),
        };
        if !piece.is_empty() {
            show(&piece)?;
            text.push_str(&piece);
        }
        if let Some(end) = end {
            break (end, at);
        }
    };
    Ok(AnswerStats {
        asked: start,
        text,
        tokens,
        n_prompt: asked.n_prompt,
        n_reused,
        end,
        prefill,
        decode: last - first,
        moved: None,
        predicted: None,
        changes: Vec::new(),
        continued,
    })
}

/// The next reply; `None` once it `is_stopped`.
fn next(
    answer: &ReplyStream<'_>,
    is_stopped: Option<&dyn Fn() -> bool>,
) -> Result<Option<(Instant, Reply)>, RequestFailure> {
    let Some(is_stopped) = is_stopped else {
        return answer.next().map(Some);
    };
    while !is_stopped() {
        if let Some(reply) = answer.next_within(LOOK_EVERY)? {
            return Ok(Some(reply));
        }
    }
    Ok(None)
}

/// Routing counts of experts, by layer; null without experts.
fn expert_uses(uses: &[ExpertUses]) -> serde_json::Value {
    let of = |uses: &ExpertUses| json!({"layer": uses.layer, "rows": uses.rows});
    match uses {
        [] => serde_json::Value::Null,
        uses => uses.iter().map(of).collect(),
    }
}

/// Events per second; `None` without events or measurable time.
fn rate(events: usize, time: Duration) -> Option<f64> {
    (events > 0 && !time.is_zero()).then(|| events as f64 / time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(n_tokens: usize, end: StopReason) -> AnswerStats {
        AnswerStats {
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
            continued: 0,
        }
    }

    #[test]
    fn the_line_has_only_what_was_measured() {
        for (n_tokens, end, line) in [
            (
                0,
                StopReason::MaxTokens,
                "[prompt 50 tokens, answer 0 tokens; prefill 500 tokens/s; ended by --max-tokens]",
            ),
            (
                1,
                StopReason::Stop,
                "[prompt 50 tokens, answer 1 token; first token after 100 ms; prefill 500 tokens/s]",
            ),
            (
                11,
                StopReason::Context,
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
