//! A draft model or head, as the caller of an engine gives it.

use std::sync::Arc;
use std::time::Instant;

use paceline_model::{DraftHead, LoadedModel};
use paceline_text::tokenizer::Tokenizer;

use crate::Error;

/// Time that a head on the CPU takes for a byte of its weights, relative to that of its model on
/// MLX. An estimate: 1 where both share a memory, about 10 for a card in a server.
const HEAD_BYTE: f64 = 4.0;

/// Maximum difference of the two vocabulary sizes, in tokens. Vocabularies are padded to multiples
/// of 128 (Qwen 2.5 has 151,936 and 152,064). The bound is llama.cpp's.
const PADDING: usize = 128;

/// A draft model for [`Engine::set_draft_model`](crate::Engine::set_draft_model).
#[derive(Clone, Debug)]
pub struct Draft {
    pub network: DraftNetwork,
    /// Clock for its passes.
    pub now: fn() -> Instant,
}

/// The network of a draft.
#[derive(Clone, Debug)]
pub enum DraftNetwork {
    /// A small model.
    Model {
        /// The whole model, on this rank.
        model: Arc<dyn LoadedModel>,
        /// Must have the vocabulary of the large model.
        tokenizer: Arc<Tokenizer>,
    },
    /// A head of the large model, which must [capture](LoadedModel::captures) its layers.
    Head(Arc<dyn DraftHead>),
}

impl Draft {
    /// Estimated time of a pass relative to a step of `model` without drafts, by bytes of weights.
    pub(super) fn share(&self, model: &dyn LoadedModel) -> f64 {
        let bytes = match &self.network {
            DraftNetwork::Model { model, .. } => model.weight_bytes().0 as f64,
            DraftNetwork::Head(head) => HEAD_BYTE * head.weight_bytes().0 as f64,
        };
        bytes / (model.weight_bytes().0 as f64).max(1.0)
    }

    /// Checks that the tokens of the `ngram` vocabulary have the same texts in `tokenizer`. Up to
    /// 128 may be missing at the end of one: vocabularies are padded.
    ///
    /// # Errors
    /// [`Error::DraftVocabulary`] for the first token that differs.
    pub fn check(draft: &Tokenizer, tokenizer: &Tokenizer) -> Result<(), Error> {
        let sizes = [draft, tokenizer].map(Tokenizer::vocab_size);
        let (fewer, more) = (sizes[0].min(sizes[1]), sizes[0].max(sizes[1]));
        let end = if more - fewer <= PADDING { fewer } else { more };
        let differs = |id: &u32| draft.token_text(*id) != tokenizer.token_text(*id);
        let name = |text: Option<&str>| text.map_or("none".to_owned(), |text| format!("{text:?}"));
        match (0..end as u32).find(differs) {
            None => Ok(()),
            Some(token) => Err(Error::DraftVocabulary {
                token,
                got: name(draft.token_text(token)),
                expected: name(tokenizer.token_text(token)),
            }),
        }
    }
}
