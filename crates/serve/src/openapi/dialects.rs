//! Operations of the other dialects. Their requests' schemas are those that check them.
//! Their responses are described in their own specifications.

use serde_json::{Map, Value, json};

use super::requests::{name_model, narrow_tools};
use super::{REFUSALS, refusals};
use crate::model::ServedModel;
use crate::request::anthropic::{CountRequest, MessageRequest};
use crate::request::embeddings::{OllamaEmbed, OllamaEmbeddings, OpenAiEmbeddings};
use crate::request::infill::InfillRequest;
use crate::request::llama::{ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest};
use crate::request::ollama::{NamedModel, OllamaChat, OllamaGenerate};
use crate::request::responses::ResponseRequest;
use crate::schema::schema_of;

struct Operation {
    path: &'static str,
    id: &'static str,
    summary: &'static str,
    schema: fn() -> &'static Value,
    /// Content type of a streamed response; `None` if never streamed.
    stream: Option<&'static str>,
}

const fn operation(
    path: &'static str,
    id: &'static str,
    summary: &'static str,
    schema: fn() -> &'static Value,
    stream: Option<&'static str>,
) -> Operation {
    Operation {
        path,
        id,
        summary,
        schema,
        stream,
    }
}

const EVENTS: Option<&str> = Some("text/event-stream");
const LINES: Option<&str> = Some("application/x-ndjson");

const OPERATIONS: [Operation; 11] = [
    operation(
        "/v1/responses",
        "respond",
        "Asks the model, as OpenAI's Responses API.",
        schema_of::<ResponseRequest>,
        EVENTS,
    ),
    operation(
        "/v1/messages",
        "message",
        "Asks the model, as Anthropic's Messages API.",
        schema_of::<MessageRequest>,
        EVENTS,
    ),
    operation(
        "/v1/messages/count_tokens",
        "countTokens",
        "Counts the tokens of a prompt, as Anthropic's Messages API.",
        schema_of::<CountRequest>,
        None,
    ),
    operation(
        "/api/chat",
        "ollamaChat",
        "Asks the model, as Ollama.",
        schema_of::<OllamaChat>,
        LINES,
    ),
    operation(
        "/api/generate",
        "ollamaGenerate",
        "Asks the model, as Ollama.",
        schema_of::<OllamaGenerate>,
        LINES,
    ),
    operation(
        "/api/show",
        "ollamaShow",
        "Shows the model, as Ollama.",
        schema_of::<NamedModel>,
        None,
    ),
    operation(
        "/api/pull",
        "ollamaPull",
        "Finds the model that is served, as Ollama.",
        schema_of::<NamedModel>,
        LINES,
    ),
    operation(
        "/tokenize",
        "tokenize",
        "Makes text tokens, as llama-server.",
        schema_of::<TokenizeRequest>,
        None,
    ),
    operation(
        "/detokenize",
        "detokenize",
        "Makes tokens text, as llama-server.",
        schema_of::<DetokenizeRequest>,
        None,
    ),
    operation(
        "/apply-template",
        "applyTemplate",
        "Makes a conversation a prompt, as llama-server.",
        schema_of::<ApplyTemplateRequest>,
        None,
    ),
    operation(
        "/infill",
        "infill",
        "Fills a hole in a text, as llama-server.",
        schema_of::<InfillRequest>,
        EVENTS,
    ),
];

/// Operations of embedding models.
const EMBEDDING: [Operation; 3] = [
    operation(
        "/v1/embeddings",
        "embed",
        "Makes vectors of texts.",
        schema_of::<OpenAiEmbeddings>,
        None,
    ),
    operation(
        "/api/embed",
        "ollamaEmbed",
        "Makes vectors of texts, as Ollama.",
        schema_of::<OllamaEmbed>,
        None,
    ),
    operation(
        "/api/embeddings",
        "ollamaEmbeddings",
        "Makes the vector of a text, as Ollama.",
        schema_of::<OllamaEmbeddings>,
        None,
    ),
];

/// Removes a model; its body is like that of other operations that name one.
const DELETE: Operation = operation(
    "/api/delete",
    "ollamaDelete",
    "Removes a model that is kept, as Ollama.",
    schema_of::<NamedModel>,
    None,
);

/// Error statuses of operations on a stored response.
const STORED: [&str; 7] = ["400", "401", "403", "404", "429", "503", "504"];

pub(super) fn add_embedding(paths: &mut Value, model: &ServedModel, has_keys: bool) {
    for operation in &EMBEDDING {
        paths[operation.path] = json!({"post": operate(operation, model, has_keys)});
    }
}

pub(super) fn add(paths: &mut Value, model: &ServedModel, has_keys: bool) {
    for operation in &OPERATIONS {
        paths[operation.path] = json!({"post": operate(operation, model, has_keys)});
    }
    paths[DELETE.path] = json!({"delete": operate(&DELETE, model, has_keys)});
    paths["/v1/responses/{id}"] = stored(has_keys);
    for (path, id, summary) in [
        ("/api/tags", "ollamaTags", "The models, as Ollama."),
        ("/api/ps", "ollamaRunning", "The loaded models, as Ollama."),
        ("/api/version", "ollamaVersion", "The version, as Ollama."),
    ] {
        let mut responses = told(&["401", "403"], has_keys);
        responses.insert("200".into(), answer(None));
        paths[path] =
            json!({"get": {"operationId": id, "summary": summary, "responses": responses}});
    }
}

/// The operations on a stored response.
fn stored(has_keys: bool) -> Value {
    let text = json!({"type": "string", "minLength": 1});
    let operation = |id: &str, summary: &str, stream: Option<&str>, parameters: Value| {
        let mut responses = told(&STORED, has_keys);
        responses.insert("200".into(), answer(stream));
        json!({"operationId": id, "summary": summary, "parameters": parameters,
            "responses": responses})
    };
    let id = json!({"name": "id", "in": "path", "required": true, "schema": text});
    let is_stream = json!({"type": "boolean"});
    let stream = json!({"name": "stream", "in": "query", "schema": is_stream});
    let after = json!({"type": "integer", "minimum": 0});
    let after = json!({"name": "starting_after", "in": "query", "schema": after});
    let (tell, forget) = ("Tells a stored response.", "Forgets a stored response.");
    json!({
        "get": operation("storedResponse", tell, EVENTS, json!([id, stream, after])),
        "delete": operation("forgetResponse", forget, None, json!([id])),
    })
}

/// An operation with a request body.
fn operate(operation: &Operation, model: &ServedModel, has_keys: bool) -> Value {
    let mut schema = (operation.schema)().clone();
    name_model(&mut schema, model);
    if operation.path == "/v1/responses" {
        narrow_tools(&mut schema, model);
    }
    let all: Vec<&str> = REFUSALS.iter().map(|(status, _)| *status).collect();
    let mut responses = told(&all, has_keys);
    responses.insert("200".into(), answer(operation.stream));
    json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "requestBody": {
            "required": true,
            "content": {"application/json": {"schema": schema}},
        },
        "responses": responses,
    })
}

fn answer(stream: Option<&str>) -> Value {
    let mut content = json!({"application/json": {"schema": {"type": "object"}}});
    if let Some(kind) = stream {
        content[kind] = json!({"schema": {"type": "string"}});
    }
    json!({"description": "The answer.", "content": content})
}

/// Error responses, with bodies in the dialect's form.
fn told(statuses: &[&str], has_keys: bool) -> Map<String, Value> {
    let mut all = refusals(statuses, has_keys);
    for (_, refusal) in &mut all {
        refusal["content"]["application/json"]["schema"] = json!({"type": "object"});
    }
    all
}
