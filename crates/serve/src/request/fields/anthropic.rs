//! The fields of Anthropic's Messages API (version 2023-06-01 and what Claude Code 2.1 sends).

use super::{CACHE_CONTROL, MAX_COUNT, MAX_TEXT, MODEL, NOT_YET, TEMPERATURE, TOP_K, TOP_P};
use crate::field::Field;
use crate::field::Kind::{Any, Boolean, Integer, Object, Only, Own, Text};
use crate::request::schema;

const MESSAGES: Field = Field::new("messages", Own(schema::array), "The conversation.").required();
const SYSTEM: Field = Field::new(
    "system",
    Own(schema::any),
    "What goes before the conversation: a text, or blocks of text.",
);
const TOOLS: Field = Field::new(
    "tools",
    Own(schema::array),
    "Tools that the model may call; those that a provider would host are left out.",
);
const TOOL_CHOICE: Field = Field::new(
    "tool_choice",
    Object,
    "auto, any, tool with a name, or none; disable_parallel_tool_use.",
);
const THINKING: Field = Field::new(
    "thinking",
    Object,
    "enabled, adaptive or disabled, for templates that know it; display.",
);
const OUTPUT_CONFIG: Field = Field::new(
    "output_config",
    Object,
    "effort, for templates that know it; format, JSON of a schema.",
);
const CONTEXT_MANAGEMENT: Field = Field::new(
    "context_management",
    Any,
    "Accepted, no effect: nothing is taken out of the conversation here.",
);
const MCP_SERVERS: Field = Field::new(
    "mcp_servers",
    Only {
        values: &["[]"],
        why: "tools are called by the client",
    },
    NOT_YET,
);
const SPEED: Field = Field::new("speed", Any, "Accepted, no effect.");
const BETAS: Field = Field::new("betas", Any, "Accepted, no effect.");

/// Fields of `POST /v1/messages`.
pub(crate) const MESSAGE_REQUEST: &[Field] = &[
    MODEL,
    MESSAGES,
    Field::new(
        "max_tokens",
        Integer {
            min: 1,
            max: MAX_COUNT,
        },
        "Most tokens of the answer; the context bounds it as well.",
    )
    .required(),
    SYSTEM,
    TEMPERATURE,
    TOP_P,
    TOP_K,
    Field::new(
        "stop_sequences",
        Own(schema::stop),
        "Texts that end the answer and are no part of it.",
    ),
    Field::new(
        "stream",
        Boolean,
        "Sends the answer as events. Default false.",
    ),
    TOOLS,
    TOOL_CHOICE,
    THINKING,
    OUTPUT_CONFIG,
    CONTEXT_MANAGEMENT,
    MCP_SERVERS,
    SPEED,
    BETAS,
    CACHE_CONTROL,
    Field::new(
        "metadata",
        Object,
        "Accepted, no effect: names the client's user.",
    ),
    Field::new(
        "service_tier",
        Text { min: 0, max: 64 },
        "Accepted, no effect: there is one tier.",
    ),
    Field::new(
        "inference_geo",
        Any,
        "Accepted, no effect: it is computed here.",
    ),
    Field::new(
        "container",
        Only {
            values: &[],
            why: "no code is run here",
        },
        NOT_YET,
    ),
];

/// Fields of `POST /v1/messages/count_tokens`.
pub(crate) const COUNT_REQUEST: &[Field] = &[
    MODEL,
    MESSAGES,
    SYSTEM,
    TOOLS,
    TOOL_CHOICE,
    THINKING,
    OUTPUT_CONFIG,
    CONTEXT_MANAGEMENT,
    MCP_SERVERS,
    SPEED,
    BETAS,
    CACHE_CONTROL,
];

pub(crate) const MESSAGE: &[Field] = &[
    Field::new(
        "role",
        Text { min: 1, max: 32 },
        "user, assistant or system",
    )
    .required(),
    Field::new("content", Own(schema::any), "a text or blocks").required(),
    CACHE_CONTROL,
];

const TYPE: Field = Field::new("type", Text { min: 1, max: 64 }, "the kind of block").required();
const CITATIONS: Field = Field::new("citations", Any, "no effect");
const TEXT: Field = Field::new(
    "text",
    Text {
        min: 0,
        max: MAX_TEXT,
    },
    "what is said",
)
.required();

pub(crate) const TEXT_BLOCK: &[Field] = &[TYPE, TEXT, CITATIONS, CACHE_CONTROL];

/// Fields of a block of type thinking.
pub(crate) const THINKING_BLOCK: &[Field] = &[
    TYPE,
    Field::new(
        "thinking",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what was thought",
    )
    .required(),
    Field::new("signature", Any, "no effect: any is taken"),
    CACHE_CONTROL,
];

/// Fields of a block of type redacted_thinking, which is ignored.
pub(crate) const REDACTED_BLOCK: &[Field] =
    &[TYPE, Field::new("data", Any, "no effect"), CACHE_CONTROL];

/// Fields of a block of type tool_use.
pub(crate) const USE_BLOCK: &[Field] = &[
    TYPE,
    Field::new("id", Text { min: 1, max: 256 }, "the call's name").required(),
    Field::new("name", Text { min: 1, max: 256 }, "the tool's name").required(),
    Field::new("input", Own(schema::any), "the arguments").required(),
    Field::new("caller", Any, "no effect"),
    Field::new("toolset_name", Any, "no effect"),
    CACHE_CONTROL,
];

/// Fields of a block of type tool_result.
pub(crate) const RESULT_BLOCK: &[Field] = &[
    TYPE,
    Field::new("tool_use_id", Text { min: 1, max: 256 }, "the call's name").required(),
    Field::new("content", Own(schema::any), "a text or blocks of text"),
    Field::new("is_error", Boolean, "whether the call failed"),
    CACHE_CONTROL,
];

pub(crate) const TOOL: &[Field] = &[
    Field::new("type", Text { min: 1, max: 64 }, "custom"),
    Field::new("name", Text { min: 1, max: 256 }, "its name").required(),
    Field::new(
        "description",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what it does",
    ),
    Field::new("input_schema", Object, "JSON Schema of its arguments").required(),
    Field::new(
        "strict",
        Boolean,
        "whether arguments follow the schema to the letter",
    ),
    Field::new(
        "defer_loading",
        Boolean,
        "left out until a tool_reference names it",
    ),
    Field::new("eager_input_streaming", Any, "no effect"),
    Field::new("input_examples", Any, "no effect"),
    Field::new("allowed_callers", Any, "no effect"),
    CACHE_CONTROL,
];

/// Fields of `tool_choice`.
pub(crate) const CHOICE: &[Field] = &[
    Field::new("type", Text { min: 1, max: 64 }, "auto, any, tool or none").required(),
    Field::new("name", Text { min: 1, max: 256 }, "for the type tool"),
    Field::new(
        "disable_parallel_tool_use",
        Boolean,
        "whether one answer has one call at most",
    ),
];

/// Fields of `thinking`.
pub(crate) const THINKING_FIELD: &[Field] = &[
    Field::new(
        "type",
        Text { min: 1, max: 64 },
        "enabled, adaptive or disabled",
    )
    .required(),
    Field::new(
        "budget_tokens",
        Any,
        "no effect: max_tokens bounds the answer",
    ),
    Field::new(
        "display",
        Text { min: 1, max: 64 },
        "omitted hides what was thought",
    ),
];

/// Fields of `output_config`.
pub(crate) const OUTPUT: &[Field] = &[
    Field::new(
        "effort",
        Text { min: 1, max: 32 },
        "given to templates that know it",
    ),
    Field::new("format", Own(schema::any), "JSON of a schema"),
    Field::new("task_budget", Any, "no effect"),
];
