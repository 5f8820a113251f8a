//! What the server needs to know of the model it speaks for.

use std::sync::Arc;

use paceline_formats::chat::ChatTemplate;
use paceline_formats::tokenizer::Tokenizer;

use crate::Error;

/// A model as clients see it. Its text side is here; what computes is a
/// [`Service`](paceline_engine::Service).
#[derive(Clone, Debug)]
pub struct Model {
    /// The name that clients give.
    pub id: String,
    /// Other names that are accepted.
    pub aliases: Vec<String>,
    /// Seconds since 1970 that `/v1/models` tells, such as the file's time.
    pub created_unix_s: u64,
    /// What determines the bits of an answer besides request and seed: kernel class and weights.
    /// Sent as `system_fingerprint`.
    pub fingerprint: String,
    /// Makes text tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Makes a conversation a prompt; a model without one only completes.
    pub template: Option<Arc<ChatTemplate>>,
    /// Most tokens of prompt and answer.
    pub context: usize,
}

impl Model {
    /// Whether clients may call it `name`.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.id == name || self.aliases.iter().any(|alias| alias == name)
    }

    /// Tokens that there are.
    pub(crate) fn vocab(&self) -> u32 {
        u32::try_from(self.tokenizer.vocab_size()).unwrap_or(u32::MAX)
    }

    /// # Errors
    /// [`Error::Name`].
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
