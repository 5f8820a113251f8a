//! The OpenAPI 3.1 document. Requests are the schemas that check them, narrowed to the served
//! model. Responses are described in `answers`; tests compare them with real ones.

mod answers;
mod dialects;
mod requests;

use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::model::ServedModel;

/// All endpoints, listed at `/`.
pub(crate) const PATHS: [&str; 28] = [
    "GET /health",
    "GET /metrics",
    "GET /openapi.json",
    "GET /v1/models",
    "GET /v1/models/{id}",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/responses",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /api/embeddings",
    "GET /api/tags",
    "POST /api/show",
    "GET /api/ps",
    "GET /api/version",
    "POST /api/pull",
    "DELETE /api/delete",
    "POST /tokenize",
    "POST /detokenize",
    "POST /apply-template",
    "POST /infill",
    "GET /",
];

/// All error statuses, with descriptions.
const REFUSALS: [(&str, &str); 14] = [
    (
        "400",
        "Something in the request is wrong; `param` names the field.",
    ),
    ("401", "No API key, or an unknown one."),
    (
        "403",
        "A host name that is not this server's, or a web page of another origin.",
    ),
    ("404", "No such model."),
    ("405", "The path takes other methods."),
    ("408", "The body did not arrive in time."),
    ("413", "The body is too long."),
    ("414", "The address is too long."),
    (
        "415",
        "Content-Type is not application/json, or the body is compressed.",
    ),
    ("429", "Too many requests are in work or waiting."),
    ("500", "The answer was lost: what computed it failed."),
    ("501", "What other servers do and this one does not."),
    (
        "503",
        "The model is being loaded, has failed, or the server is shutting down.",
    ),
    ("504", "No complete answer within the deadline."),
];

/// Error statuses of requests that need no computation.
const PLAIN: [&str; 4] = ["400", "401", "403", "405"];

/// A reference to a schema in the document.
fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// The document for one server; `embeds` for an embedding model.
pub(crate) fn document(config: &Config, model: &ServedModel, embeds: bool) -> Value {
    let has_keys = config.access.keys.is_some();
    let mut schemas = requests::schemas(config, model);
    schemas.extend(answers::schemas());
    let mut components = json!({"schemas": schemas});
    if has_keys {
        components["securitySchemes"] = json!({"key": {"type": "http", "scheme": "bearer"}});
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "paceline",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Chat and text completions in the forms of OpenAI's, Anthropic's, \
                Ollama's and llama-server's APIs. A field that would have no effect is refused by \
                name.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": if has_keys { json!([{"key": []}]) } else { json!([]) },
        "paths": paths(model, has_keys, embeds),
        "components": components,
    })
}

fn paths(served: &ServedModel, has_keys: bool, embeds: bool) -> Value {
    let get = |id: &str, summary: &str, kind: &str, schema: Value| {
        let ok = json!({"description": summary, "content": {kind: {"schema": schema}}});
        let mut responses = refusals(&PLAIN, has_keys);
        responses.insert("200".into(), ok);
        json!({"operationId": id, "summary": summary, "responses": responses})
    };
    let json_type = "application/json";
    let text_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let mut health = get(
        "health",
        "Whether requests are taken.",
        json_type,
        reference("Health"),
    );
    let not_ready = json!({"schema": reference("Health")});
    let description = "Not ready; the reason says why, and names the rank that failed.";
    health["responses"]["503"] =
        json!({"description": description, "content": {json_type: not_ready}});
    health["security"] = json!([]);
    let mut model = get(
        "model",
        "The model, if it is served.",
        json_type,
        reference("Model"),
    );
    model["parameters"] = json!([{
        "name": "id",
        "in": "path",
        "required": true,
        "schema": {"type": "string", "minLength": 1},
    }]);
    model["responses"]["404"] = refusals(&["404"], has_keys)
        .remove("404")
        .unwrap_or_default();
    let any = json!({"type": "object"});
    let mut paths = json!({
        "/": {"get": get("index", "What there is.", json_type, any.clone())},
        "/health": {"get": health},
        "/metrics": {"get": get("metrics", "Figures.", text_type, json!({"type": "string"}))},
        "/openapi.json": {"get": get("document", "This document.", json_type, any)},
        "/v1/models": {"get": get("models", "The models.", json_type, reference("Models"))},
        "/v1/models/{id}": {"get": model},
        "/v1/chat/completions": {"post": post("chat", "ChatRequest", "ChatCompletion", has_keys)},
        "/v1/completions": {"post": post("complete", "CompletionRequest", "Completion", has_keys)},
    });
    dialects::add(&mut paths, served, has_keys);
    if embeds {
        dialects::add_embedding(&mut paths, served, has_keys);
    }
    paths
}

/// An operation that the model computes.
fn post(id: &str, request: &str, answer: &str, has_keys: bool) -> Value {
    let all: Vec<&str> = REFUSALS.iter().map(|(status, _)| *status).collect();
    let mut responses = refusals(&all, has_keys);
    let chunk = format!("{answer}Chunk");
    let data = json!({
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(&chunk), reference("Error")]},
    });
    let event = json!({
        "type": "object",
        "description": "With stream: chunks, then [DONE]; or an error as the last.",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    });
    let ok = json!({
        "description": "The answer, whole or as server-sent events.",
        "content": {
            "application/json": {"schema": reference(answer)},
            "text/event-stream": {"schema": event},
        },
    });
    responses.insert("200".into(), ok);
    json!({
        "operationId": id,
        "summary": format!("Asks the model; see {request}."),
        "requestBody": {
            "required": true,
            "content": {"application/json": {"schema": reference(request)}},
        },
        "responses": responses,
    })
}

fn refusals(statuses: &[&str], has_keys: bool) -> Map<String, Value> {
    let content = json!({"application/json": {"schema": reference("Error")}});
    let is_used = |status: &str| statuses.contains(&status) && (has_keys || status != "401");
    let used = REFUSALS.iter().filter(|(status, _)| is_used(status));
    used.map(|(status, description)| {
        let mut refusal = json!({"description": description, "content": content});
        if matches!(*status, "429" | "503") {
            let seconds = json!({"description": "Seconds.", "schema": {"type": "integer"}});
            refusal["headers"] = json!({"Retry-After": seconds});
        }
        ((*status).to_owned(), refusal)
    })
    .collect()
}
