//! The fields of OpenAI's Responses API, as in its specification of November 2026 and as Codex
//! 0.169 sends them.

use super::{MAX_COUNT, MAX_NOTE, MAX_TEXT, MODEL, NOT_YET, TEMPERATURE, TOP_P};
use crate::field::Field;
use crate::field::Kind::{Any, Boolean, Object, Only, Own, Table, Text, TokenLimit};
use crate::request::schema;

/// Fields of `POST /v1/responses`.
pub(crate) const RESPONSE: &[Field] = &[
    MODEL,
    Field::new(
        "input",
        Own(schema::response_input),
        "A text, or items of a conversation.",
    )
    .required(),
    Field::new(
        "instructions",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What goes before the conversation; not kept for later responses.",
    ),
    Field::new(
        "previous_response_id",
        Text { min: 1, max: 128 },
        "A stored response that this one goes on from.",
    ),
    Field::new(
        "store",
        Boolean,
        "Keeps the response in memory, among the latest. Default true.",
    ),
    Field::new(
        "max_output_tokens",
        TokenLimit { max: MAX_COUNT },
        "Most tokens of the answer; the context bounds it as well. -1 and the default: the context.",
    ),
    TEMPERATURE,
    TOP_P,
    Field::new(
        "stream",
        Boolean,
        "Sends the answer as events. Default false.",
    ),
    Field::new(
        "stream_options",
        Object,
        "Accepted, no effect: events are not padded.",
    ),
    Field::new(
        "tools",
        Own(schema::response_tools),
        "Functions, and namespaces of them; hosted tools are left out with a warning.",
    ),
    Field::new(
        "tool_choice",
        Own(schema::response_tool_choice),
        "Whether and which tools are to be called. Default auto.",
    ),
    Field::new(
        "parallel_tool_calls",
        Boolean,
        "Whether one answer may have several calls. Default true.",
    ),
    Field::new(
        "max_tool_calls",
        Any,
        "Accepted, no effect: it bounds hosted tools.",
    ),
    Field::new(
        "text",
        Table(TEXT_FIELD),
        "format: what the answer must be; verbosity.",
    ),
    Field::new(
        "reasoning",
        Table(REASONING_FIELD),
        "effort, for templates that know it; summary.",
    ),
    Field::new(
        "metadata",
        Own(schema::metadata),
        "Repeated in the response.",
    ),
    Field::new("include", Any, "Accepted, no effect: nothing more is told."),
    Field::new("client_metadata", Any, "Accepted, no effect."),
    Field::new(
        "prompt_cache_key",
        Text {
            min: 0,
            max: MAX_NOTE,
        },
        "Accepted, no effect on the answer: a cache changes speed only.",
    ),
    Field::new(
        "prompt_cache_retention",
        Any,
        "Accepted, no effect on the answer.",
    ),
    Field::new("safety_identifier", Any, "Accepted, no effect."),
    Field::new(
        "service_tier",
        Any,
        "Accepted, no effect: there is one tier.",
    ),
    Field::new("user", Any, "Accepted, no effect: names the client's user."),
    Field::new(
        "truncation",
        Only {
            values: &["\"disabled\"", "\"auto\""],
            why: "the specification has \"disabled\" and \"auto\"",
        },
        "What does not fit is refused.",
    ),
    Field::new(
        "top_logprobs",
        Only {
            values: &["0"],
            why: "log-probabilities are told at /v1/chat/completions",
        },
        NOT_YET,
    ),
    Field::new(
        "background",
        Only {
            values: &["false"],
            why: "nothing is computed after a client has gone",
        },
        NOT_YET,
    ),
    Field::new(
        "conversation",
        Only {
            values: &[],
            why: "use previous_response_id",
        },
        NOT_YET,
    ),
    Field::new(
        "prompt",
        Only {
            values: &[],
            why: "no prompts are kept here",
        },
        NOT_YET,
    ),
];

const ID: Field = Field::new("id", Any, "no effect");
const STATUS: Field = Field::new("status", Any, "no effect");
const TYPE: Field = Field::new("type", Text { min: 1, max: 64 }, "the kind of item");

/// Fields of a message of the input.
pub(crate) const MESSAGE: &[Field] = &[
    TYPE,
    ID,
    STATUS,
    Field::new(
        "role",
        Text { min: 1, max: 32 },
        "user, assistant, system or developer",
    )
    .required(),
    Field::new("content", Own(schema::any), "a text or parts").required(),
    Field::new("phase", Any, "no effect"),
];

/// Fields of a part of a message, of a result and of reasoning.
pub(crate) const PART: &[Field] = &[
    Field::new("type", Text { min: 1, max: 64 }, "the kind of part").required(),
    Field::new(
        "text",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what is said",
    ),
    Field::new(
        "refusal",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what was refused",
    ),
    Field::new("annotations", Any, "no effect"),
    Field::new("logprobs", Any, "no effect"),
];

/// Fields of a call of a function.
pub(crate) const CALL: &[Field] = &[
    TYPE,
    ID,
    STATUS,
    Field::new("call_id", Text { min: 1, max: 256 }, "the call's name").required(),
    Field::new("name", Text { min: 1, max: 256 }, "the function's name").required(),
    Field::new(
        "namespace",
        Text { min: 0, max: 256 },
        "where the function is",
    ),
    Field::new(
        "arguments",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "JSON in a string",
    )
    .required(),
];

/// Fields of a call of a custom tool, whose argument is a text.
pub(crate) const CUSTOM_CALL: &[Field] = &[
    TYPE,
    ID,
    STATUS,
    Field::new("call_id", Text { min: 1, max: 256 }, "the call's name").required(),
    Field::new("name", Text { min: 1, max: 256 }, "the tool's name").required(),
    Field::new(
        "input",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what the tool is given",
    )
    .required(),
];

/// Fields of a call of a shell or of a patch.
pub(crate) const ACTION_CALL: &[Field] = &[
    TYPE,
    ID,
    STATUS,
    Field::new("call_id", Text { min: 1, max: 256 }, "the call's name").required(),
    Field::new("action", Object, "what a shell runs"),
    Field::new("operation", Object, "what a patch changes"),
];

/// Fields of a call's result.
pub(crate) const OUTPUT: &[Field] = &[
    TYPE,
    ID,
    STATUS,
    Field::new("call_id", Text { min: 1, max: 256 }, "the call's name").required(),
    Field::new("output", Own(schema::any), "a text or parts").required(),
];

pub(crate) const REASONING: &[Field] = &[
    TYPE,
    ID,
    STATUS,
    Field::new("summary", Own(schema::any), "parts of text"),
    Field::new("content", Own(schema::any), "parts of text"),
    Field::new("encrypted_content", Any, "no effect"),
];

/// Fields of a tool of type function.
pub(crate) const FUNCTION: &[Field] = &[
    Field::new("type", Text { min: 1, max: 64 }, "always function").required(),
    Field::new("name", Text { min: 1, max: 256 }, "the function's name").required(),
    Field::new(
        "description",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what it does",
    ),
    Field::new("parameters", Object, "JSON Schema of its arguments"),
    Field::new("strict", Boolean, "whether arguments follow the schema"),
    Field::new("defer_loading", Any, "no effect"),
    Field::new("output_schema", Any, "no effect"),
];

/// Fields of a tool of type namespace.
pub(crate) const NAMESPACE: &[Field] = &[
    Field::new("type", Text { min: 1, max: 64 }, "always namespace").required(),
    Field::new("name", Text { min: 1, max: 256 }, "its name").required(),
    Field::new("description", Any, "no effect"),
    Field::new("tools", Own(schema::array), "functions").required(),
];

/// Fields of `reasoning`.
pub(crate) const REASONING_FIELD: &[Field] = &[
    Field::new(
        "effort",
        Text { min: 1, max: 32 },
        "given to templates that know it",
    ),
    Field::new(
        "summary",
        Any,
        "no effect: what was thought is told as it is",
    ),
    Field::new("generate_summary", Any, "no effect"),
];

/// Fields of `text`.
pub(crate) const TEXT_FIELD: &[Field] = &[
    Field::new(
        "format",
        Own(schema::response_format_beside),
        "what the answer must be",
    ),
    Field::new(
        "verbosity",
        Any,
        "no effect: how much a model says is not controlled",
    ),
];
