//! The served model's text side: names, tokenizer, template, defaults.

use std::ops::RangeInclusive;
use std::sync::Arc;

use paceline_engine::SamplingParams;
use paceline_text::chat::ChatTemplate;
use paceline_text::tokenizer::Tokenizer;
use paceline_text::tools::Syntax;

use serde_json::Value;

use crate::Error;

/// A model as clients see it. The [`Service`](paceline_engine::Service) computes; this has the text
/// side.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// Name in requests.
    pub id: String,
    /// Other accepted names.
    pub aliases: Vec<String>,
    /// `created` in `/v1/models`, seconds since 1970, such as the file's time.
    pub created_unix_s: u64,
    /// Identifies all that determines a response's bits besides request and seed: kernel class and
    /// weights. Sent as `system_fingerprint`.
    pub fingerprint: String,
    /// Kernel classes at the beginning of the fingerprint, which the name of a service's
    /// [numbers](paceline_engine::Service::numbers) replaces.
    pub classes: String,
    /// Tokenises text.
    pub tokenizer: Arc<Tokenizer>,
    /// Renders conversations; a model without one only completes.
    pub template: Option<Arc<ChatTemplate>>,
    /// Maximum tokens of prompt and response.
    pub context: usize,
    /// Default sampling: the model's recommendation, else that of the command line. Seed and bias
    /// are not used.
    pub sampling: SamplingParams,
    /// Details for `/api/show` and similar endpoints.
    pub about: ModelDetails,
}

/// Details of a model for clients.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelDetails {
    /// Such as `llama`.
    pub architecture: String,
    /// Bytes of its files; 0 if unknown.
    pub bytes: u64,
    /// Number of parameters; 0 if unknown.
    pub parameters: u64,
    /// Storage type of the weights, such as `Q4_K_M`; empty if unknown.
    pub quantization: String,
}

/// Default sampling of a model without recommendations, for small chat models; the same as in
/// `paceline run`.
pub fn default_sampling() -> SamplingParams {
    SamplingParams {
        temperature: 0.7,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        ..SamplingParams::default()
    }
}

/// Parses the recommended sampling of a `generation_config.json`. If it sets no value,
/// [`default_sampling`] holds; else its missing values have no effect.
///
/// Ignores values out of range.
pub fn recommended_sampling(config: &Value) -> SamplingParams {
    const SAID: [&str; 4] = ["temperature", "top_k", "top_p", "min_p"];
    if config["do_sample"] == false {
        return SamplingParams::default();
    }
    if SAID.iter().all(|name| config[*name].is_null()) {
        return default_sampling();
    }
    let number = |name: &str, range: RangeInclusive<f64>| {
        let value = config[name].as_f64().filter(|value| range.contains(value));
        value.map(|value| value as f32)
    };
    let none = SamplingParams::default();
    SamplingParams {
        temperature: number("temperature", 0.0..=100.0).unwrap_or(1.0),
        top_k: number("top_k", 0.0..=1e6).map_or(none.top_k, |k| k as usize),
        top_p: number("top_p", 1e-6..=1.0).unwrap_or(none.top_p),
        min_p: number("min_p", 0.0..=1.0).unwrap_or(none.min_p),
        repetition_penalty: number("repetition_penalty", 1e-3..=1e3)
            .unwrap_or(none.repetition_penalty),
        ..none
    }
}

impl ServedModel {
    /// The fingerprint of answers whose numbers have this name, if they have one. Each answer names
    /// the numbers that read its prompt by itself.
    pub(crate) fn fingerprint_of(&self, numbers: Option<String>) -> String {
        match numbers.zip(self.fingerprint.strip_prefix(&self.classes)) {
            Some((numbers, rest)) => {
                let decoding = numbers.rsplit('>').next().unwrap_or_default();
                format!("{decoding}{rest}")
            }
            None => self.fingerprint.clone(),
        }
    }

    /// Whether `name` is one of its names; Ollama's clients append a tag.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        let is_known = |name: &str| self.names().any(|known| known == name);
        is_known(name) || name.strip_suffix(":latest").is_some_and(is_known)
    }

    /// All its names, the id first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.id)
            .chain(&self.aliases)
            .map(String::as_str)
    }

    /// Whether it was trained to call tools, in a form that is known.
    pub(crate) fn has_calls(&self) -> bool {
        let template = self.template.as_deref();
        let response = template.and_then(ChatTemplate::response);
        response.is_some_and(|response| response.has_calls())
            || template.is_some_and(|template| Syntax::of(template).family().is_some())
    }

    /// Bytes of the longest text token.
    ///
    /// Cost: O(vocabulary).
    pub(crate) fn longest_token(&self) -> usize {
        let bytes = |id| self.tokenizer.token_bytes(id).map_or(0, <[u8]>::len);
        (0..self.vocab()).map(bytes).max().unwrap_or(1).max(1)
    }

    /// Vocabulary size.
    pub(crate) fn vocab(&self) -> u32 {
        u32::try_from(self.tokenizer.vocab_size()).unwrap_or(u32::MAX)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let mut names = std::iter::once(&self.id).chain(&self.aliases);
        let is_bad = |name: &&String| {
            !(1..=256).contains(&name.chars().count()) || name.chars().any(char::is_control)
        };
        names.find(is_bad).map_or(Ok(()), |name| {
            let (what, name) = ("model", name.clone());
            Err(Error::Name { what, name })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn recommendations_are_taken_as_far_as_they_go() {
        let of = |config: Value| {
            let s = recommended_sampling(&config);
            (s.temperature, s.top_k, s.top_p, s.min_p)
        };
        for (config, expected) in [
            (json!({"eos_token_id": 2}), (0.7, 40, 0.95, 0.05)),
            (
                json!({"do_sample": false, "temperature": 0.6}),
                (0.0, 0, 1.0, 0.0),
            ),
            (
                json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
                (0.6, 20, 0.95, 0.0),
            ),
            (json!({"top_p": 0.9}), (1.0, 0, 0.9, 0.0)),
            (
                json!({"temperature": -1, "top_p": 7, "top_k": 5}),
                (1.0, 5, 1.0, 0.0),
            ),
        ] {
            assert_eq!(of(config.clone()), expected, "{config}");
        }
    }
}
