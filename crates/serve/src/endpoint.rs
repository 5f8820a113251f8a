//! Endpoints with a request body, and their paths.

use serde::{Deserialize, Serialize};

/// An endpoint that takes a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Endpoint {
    Chat,
    Completion,
    Response,
    Message,
    CountTokens,
    OllamaChat,
    OllamaGenerate,
    Tokenize,
    Detokenize,
    ApplyTemplate,
    Infill,
    Embeddings,
    OllamaEmbed,
    OllamaEmbeddings,
}

/// Whether a request at `path` names its model where several are served. llama-server's endpoints
/// use the first.
pub(crate) fn needs_model(path: &str) -> bool {
    let endpoint = ENDPOINTS.iter().find(|(known, _)| *known == path);
    endpoint.is_some_and(|(_, endpoint)| {
        use Endpoint::{ApplyTemplate, Detokenize, Infill, Tokenize};
        !matches!(endpoint, ApplyTemplate | Detokenize | Infill | Tokenize)
    })
}

/// All endpoints with a request body, by path.
pub(crate) const ENDPOINTS: [(&str, Endpoint); 14] = [
    ("/v1/chat/completions", Endpoint::Chat),
    ("/v1/completions", Endpoint::Completion),
    ("/v1/responses", Endpoint::Response),
    ("/v1/messages", Endpoint::Message),
    ("/v1/messages/count_tokens", Endpoint::CountTokens),
    ("/api/chat", Endpoint::OllamaChat),
    ("/api/generate", Endpoint::OllamaGenerate),
    ("/tokenize", Endpoint::Tokenize),
    ("/detokenize", Endpoint::Detokenize),
    ("/apply-template", Endpoint::ApplyTemplate),
    ("/infill", Endpoint::Infill),
    ("/v1/embeddings", Endpoint::Embeddings),
    ("/api/embed", Endpoint::OllamaEmbed),
    ("/api/embeddings", Endpoint::OllamaEmbeddings),
];
