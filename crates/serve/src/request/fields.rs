//! The fields of both endpoints, as in OpenAI's specification of November 2026 (its Python SDK,
//! `completion_create_params.py` of `chat` and of `completions`), and three that others added.
//!
//! What each row is decides what happens to the field:
//!
//! | the field | is | so |
//! |---|---|---|
//! | changes the answer, and is implemented | bounded | honoured |
//! | changes the answer, not implemented | [`Only`] | 400, but for what asks for nothing |
//! | cannot change the answer | bounded, and never read | accepted |
//! | not here | | 400 |

use super::schema;
use crate::field::Field;
use crate::field::Kind::{Boolean, Integer, Number, Object, Only, Own, Text};

/// Largest count that is accepted where the model's context is the true bound: 2^31 - 1, what all
/// clients can write.
const MAX_COUNT: i64 = i32::MAX as i64;

/// The engine's smallest and largest repetition penalty.
const REPETITION: (f64, f64) = (1e-3, 1e3);

/// Longest word of a client about itself: the bound of OpenAI's specification for `metadata`.
const MAX_NOTE: usize = 512;

const MODEL: Field = Field::new(
    "model",
    Text { min: 1, max: 256 },
    "The name of the model, one of /v1/models.",
)
.required();
const TEMPERATURE: Field = Field::new(
    "temperature",
    Number { min: 0.0, max: 2.0 },
    "Divides the logits; 0 takes the most probable token always. Default 1.",
);
const TOP_P: Field = Field::new(
    "top_p",
    Number { min: 0.0, max: 1.0 },
    "Keeps the fewest most probable tokens whose probabilities sum to this. Default 1.",
);
const TOP_K: Field = Field::new(
    "top_k",
    Integer {
        min: -1,
        max: MAX_COUNT,
    },
    "Keeps so many most probable tokens; 0 and -1 keep all. Default 0. Not OpenAI's.",
);
const MIN_P: Field = Field::new(
    "min_p",
    Number { min: 0.0, max: 1.0 },
    "Keeps tokens at least this probable, as a share of the most probable. Default 0. \
     Not OpenAI's.",
);
const PRESENCE: Field = Field::new(
    "presence_penalty",
    Number {
        min: -2.0,
        max: 2.0,
    },
    "Subtracted once from the logits of tokens that the answer has. Default 0.",
);
const FREQUENCY: Field = Field::new(
    "frequency_penalty",
    Number {
        min: -2.0,
        max: 2.0,
    },
    "Subtracted from the logits of tokens as often as the answer has them. Default 0.",
);
const REPETITION_PENALTY: Field = Field::new(
    "repetition_penalty",
    Number {
        min: REPETITION.0,
        max: REPETITION.1,
    },
    "Divides positive and multiplies negative logits of the last 64 tokens. Default 1. \
     Not OpenAI's.",
);
const LOGIT_BIAS: Field = Field::new(
    "logit_bias",
    Own(schema::logit_bias),
    "Added to the logits of tokens, by token id; at most 1024.",
);
const SEED: Field = Field::new(
    "seed",
    Integer {
        min: i64::MIN,
        max: i64::MAX,
    },
    "Starts the random numbers: equal requests with equal seeds give equal answers while \
     system_fingerprint is equal. Choice i of n is what seed + i gives alone. Default random.",
);
const STOP: Field = Field::new(
    "stop",
    Own(schema::stop),
    "Texts that end the answer and are no part of it.",
);
const N: Field = Field::new(
    "n",
    // The configured bound may be lower or higher; this one is checked beside it.
    Own(schema::choices),
    "Choices of an answer. Default 1.",
);
const STREAM: Field = Field::new(
    "stream",
    Boolean,
    "Sends the answer as server-sent events while it is made. Default false.",
);
const STREAM_OPTIONS: Field = Field::new(
    "stream_options",
    Own(schema::stream_options),
    "Only with stream.",
);
const USER: Field = Field::new(
    "user",
    Text {
        min: 0,
        max: MAX_NOTE,
    },
    "Accepted, no effect: names the client's user.",
);

/// Longest text of a message: the default bound of the body that it is in.
const MAX_TEXT: usize = 8 << 20;

/// Fields of `POST /v1/chat/completions`.
pub(crate) const CHAT: &[Field] = &[
    Field::new(
        "messages",
        Own(schema::messages),
        "The conversation, one message or more.",
    )
    .required(),
    MODEL,
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    PRESENCE,
    FREQUENCY,
    REPETITION_PENALTY,
    LOGIT_BIAS,
    SEED,
    STOP,
    N,
    STREAM,
    STREAM_OPTIONS,
    Field::new(
        "max_completion_tokens",
        Integer {
            min: 1,
            max: MAX_COUNT,
        },
        "Most tokens of a choice; the context bounds it as well. Default the context.",
    ),
    Field::new(
        "max_tokens",
        Integer {
            min: 1,
            max: MAX_COUNT,
        },
        "The older name of max_completion_tokens; not both.",
    ),
    Field::new(
        "logprobs",
        Boolean,
        "Tells log-probabilities of the answer's tokens. Default false.",
    ),
    Field::new(
        "top_logprobs",
        Integer { min: 0, max: 20 },
        "Tells them for so many most probable tokens as well; needs logprobs. Default 0.",
    ),
    USER,
    Field::new(
        "safety_identifier",
        Text {
            min: 0,
            max: MAX_NOTE,
        },
        "Accepted, no effect: names the client's user to OpenAI.",
    ),
    Field::new(
        "metadata",
        Own(schema::metadata),
        "Accepted, no effect: notes for a stored answer, and nothing is stored.",
    ),
    Field::new(
        "store",
        Boolean,
        "Accepted, no effect: nothing is ever stored.",
    ),
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
        Only {
            values: &["\"in_memory\"", "\"in-memory\"", "\"24h\""],
            why: "the specification has \"in_memory\" and \"24h\"",
        },
        "Accepted, no effect on the answer: a cache changes speed only.",
    ),
    Field::new(
        "prompt_cache_options",
        Object,
        "Accepted, no effect on the answer: a cache changes speed only.",
    ),
    Field::new(
        "prediction",
        Object,
        "Accepted, no effect on the answer: a guess at it, for speed only.",
    ),
    Field::new(
        "parallel_tool_calls",
        Boolean,
        "Accepted, no effect: there are no tools.",
    ),
    Field::new(
        "service_tier",
        Only {
            values: &["\"auto\"", "\"default\""],
            why: "there is one tier of service, \"default\"",
        },
        "There is one tier.",
    ),
    Field::new(
        "tools",
        Only {
            values: &["[]"],
            why: NO_TOOLS,
        },
        NOT_YET,
    ),
    Field::new(
        "tool_choice",
        Only {
            values: &["\"none\"", "\"auto\""],
            why: NO_TOOLS,
        },
        NOT_YET,
    ),
    Field::new(
        "functions",
        Only {
            values: &["[]"],
            why: NO_TOOLS,
        },
        NOT_YET,
    ),
    Field::new(
        "function_call",
        Only {
            values: &["\"none\"", "\"auto\""],
            why: NO_TOOLS,
        },
        NOT_YET,
    ),
    Field::new(
        "response_format",
        Only {
            values: &[r#"{"type":"text"}"#],
            why: "answers are not bound to a grammar, only {\"type\": \"text\"} is",
        },
        NOT_YET,
    ),
    Field::new(
        "modalities",
        Only {
            values: &[r#"["text"]"#],
            why: "answers are text",
        },
        NOT_YET,
    ),
    Field::new(
        "audio",
        Only {
            values: &[],
            why: "answers are text",
        },
        NOT_YET,
    ),
    Field::new(
        "reasoning_effort",
        Only {
            values: &[],
            why: "how long a model thinks is not controlled here",
        },
        NOT_YET,
    ),
    Field::new(
        "verbosity",
        Only {
            values: &["\"medium\""],
            why: "how much a model says is not controlled here",
        },
        NOT_YET,
    ),
    Field::new(
        "web_search_options",
        Only {
            values: &[],
            why: "nothing is searched for",
        },
        NOT_YET,
    ),
    Field::new(
        "moderation",
        Only {
            values: &[],
            why: "nothing is moderated",
        },
        NOT_YET,
    ),
];

const NO_TOOLS: &str = "tools are not called here";

const NOT_YET: &str = "Not supported; these values ask for nothing.";

/// Fields of `POST /v1/completions`.
pub(crate) const COMPLETION: &[Field] = &[
    Field::new(
        "prompt",
        Own(schema::prompt),
        "What is completed: a text, texts, token ids, or lists of token ids.",
    )
    .required(),
    MODEL,
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    PRESENCE,
    FREQUENCY,
    REPETITION_PENALTY,
    LOGIT_BIAS,
    SEED,
    STOP,
    N,
    STREAM,
    STREAM_OPTIONS,
    Field::new(
        "max_tokens",
        Integer {
            min: 0,
            max: MAX_COUNT,
        },
        "Most tokens of a choice; the context bounds it as well. Default 16.",
    ),
    Field::new(
        "logprobs",
        Integer { min: 0, max: 5 },
        "Tells log-probabilities of the answer's tokens and of so many most probable ones.",
    ),
    Field::new(
        "echo",
        Boolean,
        "Puts the prompt before the answer; not with logprobs. Default false.",
    ),
    USER,
    Field::new(
        "best_of",
        Only {
            values: &["1"],
            why: "choices are not ranked",
        },
        NOT_YET,
    ),
    Field::new(
        "suffix",
        Only {
            values: &["\"\""],
            why: "nothing is inserted before a text",
        },
        NOT_YET,
    ),
];

/// Fields of `stream_options`.
pub(crate) const STREAM_OPTION: &[Field] = &[
    Field::new(
        "include_usage",
        Boolean,
        "Ends the stream with a chunk without choices that has the usage. Default false.",
    ),
    Field::new(
        "include_obfuscation",
        Only {
            values: &["false"],
            why: "events are not padded to hide the lengths of tokens",
        },
        NOT_YET,
    ),
];

/// Fields of a message of any role; which role takes which is checked after.
pub(crate) const MESSAGE: &[Field] = &[
    Field::new(
        "role",
        Text { min: 1, max: 32 },
        "system, developer (the same), user, assistant or tool",
    )
    .required(),
    Field::new(
        "content",
        Own(schema::content),
        "What is said, as a text or parts of type text.",
    ),
    Field::new(
        "name",
        Text { min: 0, max: 256 },
        "Given to the chat template.",
    ),
    Field::new(
        "tool_call_id",
        Text { min: 0, max: 256 },
        "For the role tool; given to the template.",
    ),
    Field::new(
        "tool_calls",
        Own(schema::tool_calls),
        "For the role assistant; given to the template.",
    ),
    Field::new(
        "refusal",
        Only {
            values: &["\"\""],
            why: "templates have no place for it",
        },
        "",
    ),
    Field::new(
        "audio",
        Only {
            values: &[],
            why: "messages are text",
        },
        "",
    ),
    Field::new(
        "function_call",
        Only {
            values: &[],
            why: "use tool_calls",
        },
        "",
    ),
    Field::new(
        "annotations",
        Only {
            values: &["[]"],
            why: "templates have no place for it",
        },
        "",
    ),
];

/// Fields of a part of a message's content.
pub(crate) const PART: &[Field] = &[
    Field::new("type", Text { min: 1, max: 64 }, "always text").required(),
    Field::new(
        "text",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what is said",
    )
    .required(),
];

/// Fields of an entry of `tool_calls`.
pub(crate) const TOOL_CALL: &[Field] = &[
    Field::new(
        "id",
        Text { min: 0, max: 256 },
        "the call's name, which its result repeats",
    )
    .required(),
    Field::new(
        "type",
        Only {
            values: &["\"function\""],
            why: "functions are the only tools",
        },
        "always function",
    ),
    Field::new(
        "function",
        Own(schema::function),
        "name and arguments of the call",
    )
    .required(),
    Field::new(
        "index",
        Integer { min: 0, max: 1024 },
        "as streams number calls; no effect",
    ),
];

/// Fields of a call's `function`.
pub(crate) const FUNCTION: &[Field] = &[
    Field::new("name", Text { min: 1, max: 256 }, "the function's name").required(),
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
