//! Text components of a model's files: tokenizer, chat template and response template.

use paceline_model::ModelSource;
use paceline_text::chat::{ChatTemplate, Error as ChatError, Interpreter, TemplateSources};
use paceline_text::tokenizer::{Error, Tokenizer};
use paceline_text::tools::ResponseTemplate;

use crate::interpreter::{ChildProgram, SandboxedTemplate};

/// The tokenizer of a model.
pub fn tokenizer(source: &ModelSource) -> Result<Tokenizer, Error> {
    match source {
        ModelSource::Gguf(file) => Tokenizer::from_gguf(file.metadata()),
        ModelSource::Hf(folder) => Tokenizer::from_hf_dir(folder.path()),
    }
}

/// The chat template of a model, in its own process by `program`; `None` if the model has none.
/// Errors of a template matter only to callers that use it.
///
/// Cost: the start of a process for each of its templates.
pub fn template(
    source: &ModelSource,
    program: &ChildProgram,
) -> Option<Result<ChatTemplate, ChatError>> {
    let sources = match source {
        ModelSource::Gguf(file) => TemplateSources::in_gguf(file.metadata()),
        ModelSource::Hf(folder) => TemplateSources::in_dir(folder.path()),
    };
    let start = |text: &str| {
        let apart = SandboxedTemplate::start(program.clone(), text)?;
        Ok(Box::new(apart) as Box<dyn Interpreter>)
    };
    match sources.and_then(|sources| ChatTemplate::with(&sources, start)) {
        Err(ChatError::NoTemplate) => None,
        other => Some(other.map(|template| template.with_response(response(source)))),
    }
}

/// The model's response template. An invalid one is ignored with a warning: the chat template shows
/// the form of calls, too.
fn response(source: &ModelSource) -> Option<ResponseTemplate> {
    let ModelSource::Hf(folder) = source else {
        return None;
    };
    let described = folder.tokenizer_config()?.get("response_template")?;
    if described.is_null() {
        return None;
    }
    let read = ResponseTemplate::read(described);
    read.inspect_err(|error| tracing::warn!("the model's response_template is not used: {error}"))
        .ok()
}
