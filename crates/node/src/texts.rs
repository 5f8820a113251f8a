//! What of a model's files is about text.

use paceline_formats::chat::{ChatTemplate, Error as ChatError};
use paceline_formats::tokenizer::{Error, Tokenizer};
use paceline_model::Source;

/// The tokenizer of a model.
///
/// # Errors
/// What is wrong with it, or that there is none.
pub fn tokenizer(source: &Source) -> Result<Tokenizer, Error> {
    match source {
        Source::Gguf(file) => Tokenizer::from_gguf(file.metadata()),
        Source::Hf(folder) => Tokenizer::from_hf_dir(folder.path()),
    }
}

/// The chat template of a model; `None` when it has none. What is wrong with one matters only to
/// callers that use it.
pub fn template(source: &Source) -> Option<Result<ChatTemplate, ChatError>> {
    let template = match source {
        Source::Gguf(file) => ChatTemplate::from_gguf(file.metadata()),
        Source::Hf(folder) => ChatTemplate::from_hf_dir(folder.path()),
    };
    (!matches!(template, Err(ChatError::NoTemplate))).then_some(template)
}
