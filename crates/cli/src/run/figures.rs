//! What an answer cost.

use std::time::Duration;

use paceline_engine::Finish;
use serde_json::json;

use super::Args;
use super::session::{Session, finish_word, rate};

/// An answer and its times.
#[derive(Clone, Debug, Default)]
pub(super) struct Figures {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) n_prompt: usize,
    pub(super) finish: Option<Finish>,
    /// From the request to the first token.
    pub(super) ttft: Duration,
    /// From the first token to the last.
    pub(super) decode: Duration,
}

impl Figures {
    fn prefill_tok_s(&self) -> f64 {
        rate(self.n_prompt, self.ttft)
    }

    /// Tokens after the first: that one comes with the prompt.
    fn decode_tok_s(&self) -> f64 {
        rate(self.tokens.len().saturating_sub(1), self.decode)
    }

    /// One line for people.
    pub(super) fn line(&self) -> String {
        format!(
            "[prompt {} tokens, answer {} tokens; first token after {:.0} ms; prefill {:.0} \
             tokens/s, decode {:.1} tokens/s]",
            self.n_prompt,
            self.tokens.len(),
            self.ttft.as_secs_f64() * 1e3,
            self.prefill_tok_s(),
            self.decode_tok_s(),
        )
    }

    /// The object of `--json`.
    pub(super) fn json(&self, args: &Args, session: &Session) -> serde_json::Value {
        let model = session.engine().model();
        json!({
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": finish_word(self.finish),
            "n_prompt": self.n_prompt,
            "n_generated": self.tokens.len(),
            "ttft_ms": self.ttft.as_secs_f64() * 1e3,
            "prefill_tok_s": self.prefill_tok_s(),
            "decode_tok_s": self.decode_tok_s(),
            "predicted_decode_tok_s": null,
            "nodes": 1,
            "split": "none",
            "threads": session.threads(),
            "model": args.model,
            "kernel_class": model.class().name(),
            "instruction_set": model.kernels().instruction_set().name(),
            "seed": session.seed(),
        })
    }
}
