//! Logging of the API: its events, and prompts if the log filter names their target.

use paceline_engine::GenerationRequest;
use paceline_text::tokenizer::Tokenizer;
use tracing::{Level, debug, enabled, info, trace, warn};

use crate::events::{Kind, LinkReport};

/// The only log target with prompt text. Level `trace` of all modules does not include it; a log
/// filter must name it.
pub const PROMPTS: &str = "prompts";

const PROMPT_CHARS_MAX: usize = 4000;

/// Logs the tokenised prompts, if enabled.
pub(crate) fn prompts(tokenizer: &Tokenizer, requests: &[GenerationRequest]) {
    if !enabled!(target: PROMPTS, Level::TRACE) {
        return;
    }
    for request in requests {
        let text = tokenizer.decode_all(&request.prompt);
        let text: String = text.chars().take(PROMPT_CHARS_MAX).collect();
        trace!(target: PROMPTS, tokens = request.prompt.len(), text, "prompt");
    }
}

impl Kind {
    /// Logs the event. It has no text of prompts or responses.
    pub(crate) fn log(&self) {
        match self {
            Self::NodeCame { node } => info!(node, "node came"),
            Self::NodeSilent { node } => warn!(node, "node is silent"),
            Self::NodeWent { node } => warn!(node, "node went"),
            Self::NodeSlow { node, answer_s } => warn!(node, answer_s, "node is slow"),
            Self::NodeSteady { node } => info!(node, "node is slow no more"),
            Self::LinkChanged {
                from,
                to,
                before,
                now,
            } => {
                let text = |link: &Option<LinkReport>| link.as_ref().map(LinkReport::to_string);
                let (before, now) = (text(before), text(now));
                let (before, now) = (before.as_deref(), now.as_deref());
                let (before, now) = (before.unwrap_or("none"), now.unwrap_or("none"));
                info!(from, to, before, now, "link changed");
            }
            Self::Instance {
                id,
                model,
                state,
                reason,
                nodes,
            } => {
                let (reason, nodes) = (reason.as_deref().unwrap_or_default(), nodes.join(", "));
                match state.as_str() {
                    "failed" | "recovering" => warn!(id, model, state, reason, nodes, "instance"),
                    _ => info!(id, model, state, nodes, "instance"),
                }
            }
            Self::SplitChanged { model, text } => info!(model, text, "split changed"),
            Self::Fault { text } => warn!(text, "fault"),
            Self::Unprotected { reason } => warn!(reason, "answers have no copy"),
            Self::KeyUsed { key, client, times } => debug!(key, client, times, "key used"),
            Self::Refused {
                code,
                client,
                times,
            } => warn!(code, client, times, "refused"),
            Self::Managed {
                action,
                subject,
                by,
            } => {
                let by = by.as_deref().unwrap_or("this node");
                info!(action, subject, by, "managed");
            }
            Self::RequestStarted {
                request,
                model,
                prompt_tokens,
            } => info!(request, model, prompt_tokens, "request started"),
            Self::FirstToken { request, ttft_s } => debug!(request, ttft_s, "first token"),
            Self::RequestEnded {
                request,
                model,
                outcome,
                tokens,
                tok_s,
            } => {
                let tok_s = tok_s.unwrap_or_default();
                info!(request, model, outcome, tokens, tok_s, "request ended");
            }
        }
    }
}
