//! The fields of OpenAI's endpoints, as in its specification of November 2026, and some that others
//! added. The source is its Python SDK, `completion_create_params.py` of `chat` and of
//! `completions`. The other dialects have files of their own.
//!
//! The kind of a row decides how the field is treated:
//!
//! | the field | is | so |
//! |---|---|---|
//! | changes the answer, and is implemented | bounded | honoured |
//! | changes the answer, not implemented | [`Only`] | 400, but for what asks for nothing |
//! | cannot change the answer | bounded, and never read | accepted |
//! | not here | | 400 |

pub(crate) mod anthropic;
pub(crate) mod embeddings;
pub(crate) mod llama;
pub(crate) mod ollama;
pub(crate) mod responses;

use paceline_text::grammar::MAX_GRAMMAR_BYTES;

use super::schema;
use crate::field::Field;
use crate::field::Kind::{Any, Boolean, Integer, Number, Object, Only, Own, Text, TokenLimit};

/// Maximum count where the model's context is the real bound: 2^31 - 1, which all clients can
/// write.
pub(super) const MAX_COUNT: i64 = i32::MAX as i64;

/// Range of the engine's repetition penalty.
const REPETITION: (f64, f64) = (1e-3, 1e3);

/// Maximum characters of a metadata value: OpenAI's specification.
pub(super) const MAX_NOTE: usize = 512;

pub(super) const MODEL: Field = Field::new(
    "model",
    Text { min: 1, max: 256 },
    "The name of the model, one of /v1/models. Default: the only one.",
);
pub(super) const TEMPERATURE: Field = Field::new(
    "temperature",
    Number { min: 0.0, max: 2.0 },
    "Divides the logits; 0 takes the most probable token always. \
     Default: the model's own.",
);
pub(super) const TOP_P: Field = Field::new(
    "top_p",
    Number { min: 0.0, max: 1.0 },
    "Keeps the fewest most probable tokens whose probabilities sum to this. \
     Default: the model's own.",
);
pub(super) const TOP_K: Field = Field::new(
    "top_k",
    Integer {
        min: -1,
        max: MAX_COUNT,
    },
    "Keeps so many most probable tokens; 0 and -1 keep all. \
     Default: the model's own. Not OpenAI's.",
);
pub(super) const MIN_P: Field = Field::new(
    "min_p",
    Number { min: 0.0, max: 1.0 },
    "Keeps tokens at least this probable, as a share of the most probable. \
     Default: the model's own. Not OpenAI's.",
);
pub(super) const PRESENCE: Field = Field::new(
    "presence_penalty",
    Number {
        min: -2.0,
        max: 2.0,
    },
    "Subtracted once from the logits of tokens that the answer has. Default 0.",
);
pub(super) const FREQUENCY: Field = Field::new(
    "frequency_penalty",
    Number {
        min: -2.0,
        max: 2.0,
    },
    "Subtracted from the logits of tokens as often as the answer has them. Default 0.",
);
pub(super) const REPETITION_PENALTY: Field = Field::new(
    "repetition_penalty",
    Number {
        min: REPETITION.0,
        max: REPETITION.1,
    },
    "Divides positive and multiplies negative logits of the last 64 tokens. \
     Default: the model's own. Not OpenAI's.",
);
pub(super) const LOGIT_BIAS: Field = Field::new(
    "logit_bias",
    Own(schema::logit_bias),
    "Added to the logits of tokens, by token id; at most 1024.",
);
/// A seed; -1 asks for a random one, as clients of llama-server, Ollama and LM Studio send it.
pub(super) const SEED: Field = Field::new(
    "seed",
    Integer {
        min: i64::MIN,
        max: i64::MAX,
    },
    "Starts the random numbers: equal requests with equal seeds give equal answers while \
     system_fingerprint is equal. Choice i of n is what seed + i gives alone. -1 and the default: \
     a random one.",
);
pub(super) const STOP: Field = Field::new(
    "stop",
    Own(schema::stop),
    "Texts that end the answer and are no part of it.",
);
const REPEAT_PENALTY: Field = Field::new(
    "repeat_penalty",
    Number {
        min: REPETITION.0,
        max: REPETITION.1,
    },
    "Another name of repetition_penalty, which goes first. Not OpenAI's.",
);
const IGNORE_EOS: Field = Field::new(
    "ignore_eos",
    Boolean,
    "Forbids the tokens that end an answer. Default false. Not OpenAI's.",
);
const MIN_TOKENS: Field = Field::new(
    "min_tokens",
    Integer {
        min: 0,
        max: MAX_COUNT,
    },
    "Tokens before which the answer does not end by itself. Default 0. Not OpenAI's.",
);
const PRIORITY: Field = Field::new(
    "priority",
    Integer {
        min: -100,
        max: 100,
    },
    "Of requests that wait those of a higher priority get their turn first. Default 0. \
     Not OpenAI's.",
);
const DEADLINE: Field = Field::new(
    "deadline",
    Number {
        min: 1e-3,
        max: 86_400.0,
    },
    "Seconds after which the answer ends with what there is of it, with the finish reason length. \
     Of equal priority what is due first gets its turn first. Not OpenAI's.",
);
pub(super) const KEEP_ALIVE: Field = Field::new(
    "keep_alive",
    Any,
    "Accepted, no effect: the model stays loaded.",
);
const CACHE_PROMPT: Field = Field::new(
    "cache_prompt",
    Boolean,
    "Accepted, no effect on the answer: prompts are always cached.",
);
const N: Field = Field::new(
    "n",
    // The configured limit is checked separately; it may be lower or higher.
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

const GUIDED_JSON: Field = Field::new(
    "guided_json",
    Object,
    "A JSON Schema that the answer matches. Not OpenAI's.",
);
const GUIDED_REGEX: Field = Field::new(
    "guided_regex",
    Text {
        min: 1,
        max: MAX_GRAMMAR_BYTES,
    },
    "A regular expression that the answer matches. Not OpenAI's.",
);
const GUIDED_CHOICE: Field = Field::new(
    "guided_choice",
    Own(schema::texts),
    "Texts of which the answer is one. Not OpenAI's.",
);
const GUIDED_GRAMMAR: Field = Field::new(
    "guided_grammar",
    Text {
        min: 1,
        max: MAX_GRAMMAR_BYTES,
    },
    "A grammar in the Lark dialect of llguidance that the answer matches. Not OpenAI's.",
);
const GRAMMAR: Field = Field::new(
    "grammar",
    Text {
        min: 1,
        max: MAX_GRAMMAR_BYTES,
    },
    "Another name of guided_grammar; GBNF is not taken. Not OpenAI's.",
);

/// Maximum characters of a message's text: the default body limit.
pub(super) const MAX_TEXT: usize = 8 << 20;

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
    REPEAT_PENALTY,
    IGNORE_EOS,
    MIN_TOKENS,
    PRIORITY,
    DEADLINE,
    KEEP_ALIVE,
    CACHE_PROMPT,
    GUIDED_JSON,
    GUIDED_REGEX,
    GUIDED_CHOICE,
    GUIDED_GRAMMAR,
    GRAMMAR,
    LOGIT_BIAS,
    SEED,
    STOP,
    N,
    STREAM,
    STREAM_OPTIONS,
    Field::new(
        "max_completion_tokens",
        TokenLimit { max: MAX_COUNT },
        "Most tokens of a choice; the context bounds it as well. -1 and the default: the context.",
    ),
    Field::new(
        "max_tokens",
        TokenLimit { max: MAX_COUNT },
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
        "Whether one answer may have several calls. Default true.",
    ),
    Field::new(
        "chat_template_kwargs",
        Object,
        "More variables for the chat template, such as enable_thinking. Not OpenAI's.",
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
        Own(schema::tools),
        "Functions that the model may call.",
    ),
    Field::new(
        "tool_choice",
        Own(schema::tool_choice),
        "Whether and which tools are to be called. Default auto.",
    ),
    Field::new(
        "functions",
        Only {
            values: &["[]"],
            why: "use tools and tool_choice",
        },
        NOT_YET,
    ),
    Field::new(
        "function_call",
        Only {
            values: &["\"none\"", "\"auto\""],
            why: "use tools and tool_choice",
        },
        NOT_YET,
    ),
    Field::new(
        "response_format",
        Own(schema::response_format),
        "What the answer must be: text, a JSON object, or JSON of a schema.",
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
        Text { min: 1, max: 32 },
        "Given to templates that know it; none switches thinking off where that can be.",
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

pub(super) const NOT_YET: &str = "Not supported; these values ask for nothing.";

/// Fields of `POST /v1/completions`.
pub(crate) const COMPLETION: &[Field] = &[
    Field::new(
        "prompt",
        Own(schema::prompt),
        "What is completed: a text, texts, token ids, or lists of token ids. Names of control \
         tokens in texts are these tokens.",
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
    REPEAT_PENALTY,
    IGNORE_EOS,
    MIN_TOKENS,
    PRIORITY,
    DEADLINE,
    KEEP_ALIVE,
    CACHE_PROMPT,
    GUIDED_JSON,
    GUIDED_REGEX,
    GUIDED_CHOICE,
    GUIDED_GRAMMAR,
    GRAMMAR,
    LOGIT_BIAS,
    SEED,
    STOP,
    N,
    STREAM,
    STREAM_OPTIONS,
    Field::new(
        "max_tokens",
        Integer {
            min: -1,
            max: MAX_COUNT,
        },
        "Most tokens of a choice; the context bounds it as well, alone if -1. Default 16.",
    ),
    Field::new(
        "logprobs",
        Integer { min: 0, max: 5 },
        "Tells log-probabilities of the answer's tokens and of so many most probable ones; with \
         echo of the prompt's too, null for the first.",
    ),
    Field::new(
        "echo",
        Boolean,
        "Puts the prompt before the answer. Default false.",
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
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What comes after the answer, for models with tokens that fill a hole; with one prompt of \
         text.",
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

/// Fields of a message of any role; the parser checks which role allows which.
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
        "reasoning_content",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "For the role assistant: what it thought; given to templates that keep it.",
    ),
    Field::new(
        "reasoning",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "Another name of reasoning_content, which goes first. Not OpenAI's.",
    ),
    CACHE_CONTROL,
    Field::new(
        "refusal",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "For the role assistant: what is said in place of content.",
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
    Field::new("annotations", Any, "no effect"),
];

/// Anthropic's cache marker, accepted in any dialect.
pub(super) const CACHE_CONTROL: Field = Field::new(
    "cache_control",
    Any,
    "Accepted, no effect on the answer: prompts are always cached.",
);

pub(crate) const TOOL: &[Field] = &[
    Field::new(
        "type",
        Only {
            values: &["\"function\""],
            why: "functions are the only tools",
        },
        "always function",
    )
    .required(),
    Field::new(
        "function",
        Own(schema::tool_function),
        "name, description and parameters",
    )
    .required(),
    CACHE_CONTROL,
];

/// Fields of a tool's `function`.
pub(crate) const TOOL_FUNCTION: &[Field] = &[
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
    Field::new(
        "strict",
        Boolean,
        "whether arguments follow the schema to the letter",
    ),
];

/// Fields of `response_format.json_schema`.
pub(crate) const JSON_SCHEMA: &[Field] = &[
    Field::new("name", Text { min: 0, max: 256 }, "no effect"),
    Field::new(
        "description",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "no effect",
    ),
    Field::new("schema", Object, "JSON Schema of the answer"),
    Field::new("strict", Boolean, "no effect: schemas always hold"),
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
    CACHE_CONTROL,
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
