//! The fields of Ollama's API, as its Python client 0.6 and its server 0.13 have them.

use super::{
    FREQUENCY, KEEP_ALIVE, MAX_COUNT, MAX_TEXT, MIN_P, MODEL, NOT_YET, PRESENCE, SEED, TEMPERATURE,
    TOP_K, TOP_P,
};
use crate::field::Field;
use crate::field::Kind::{Any, Boolean, Integer, Number, Object, Only, Own, Text};
use crate::request::schema;

const OPTIONS: Field = Field::new("options", Object, "How tokens are chosen, and how many.");
const FORMAT: Field = Field::new(
    "format",
    Own(schema::any),
    "What the answer must be: \"json\" or a JSON Schema.",
);
const STREAM: Field = Field::new(
    "stream",
    Boolean,
    "Sends the answer in lines while it is made. Default true.",
);
const THINK: Field = Field::new(
    "think",
    Own(schema::any),
    "true, false or an effort, for templates that know it.",
);
const IMAGES: Field = Field::new(
    "images",
    Only {
        values: &["[]"],
        why: "messages are text",
    },
    NOT_YET,
);
const LOGPROBS: Field = Field::new(
    "logprobs",
    Only {
        values: &["false"],
        why: "they are told at /v1/chat/completions",
    },
    NOT_YET,
);
const TOP_LOGPROBS: Field = Field::new(
    "top_logprobs",
    Only {
        values: &["0"],
        why: "they are told at /v1/chat/completions",
    },
    NOT_YET,
);
const TRUNCATE: Field = Field::new(
    "truncate",
    Any,
    "Accepted, no effect: what does not fit is refused.",
);
const SHIFT: Field = Field::new(
    "shift",
    Any,
    "Accepted, no effect: an answer ends with the context.",
);

/// Fields of `POST /api/chat`.
pub(crate) const CHAT: &[Field] = &[
    MODEL,
    Field::new(
        "messages",
        Own(schema::array),
        "The conversation; none loads the model.",
    ),
    Field::new(
        "tools",
        Own(schema::array),
        "Functions that the model may call.",
    ),
    FORMAT,
    OPTIONS,
    STREAM,
    THINK,
    KEEP_ALIVE,
    LOGPROBS,
    TOP_LOGPROBS,
    TRUNCATE,
    SHIFT,
];

/// Fields of `POST /api/generate`.
pub(crate) const GENERATE: &[Field] = &[
    MODEL,
    Field::new(
        "prompt",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What is answered; none loads the model.",
    ),
    Field::new(
        "suffix",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What comes after the answer, for models with tokens that fill a hole.",
    ),
    Field::new(
        "system",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What goes before the prompt.",
    ),
    Field::new(
        "raw",
        Boolean,
        "Completes the prompt as it is, without a template. Default false.",
    ),
    Field::new(
        "template",
        Only {
            values: &["\"\""],
            why: "the model's own template is used; raw takes none",
        },
        NOT_YET,
    ),
    Field::new(
        "context",
        Only {
            values: &["[]"],
            why: "use /api/chat with messages",
        },
        NOT_YET,
    ),
    IMAGES,
    FORMAT,
    OPTIONS,
    STREAM,
    THINK,
    KEEP_ALIVE,
    LOGPROBS,
    TOP_LOGPROBS,
    TRUNCATE,
    SHIFT,
];

const NO_MIROSTAT: &str = "tokens are not chosen by mirostat";

/// Fields of `options`.
pub(crate) const OPTION: &[Field] = &[
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    PRESENCE,
    FREQUENCY,
    Field::new(
        "repeat_penalty",
        Number {
            min: 1e-3,
            max: 1e3,
        },
        "Divides positive and multiplies negative logits of the last tokens.",
    ),
    Field::new(
        "repeat_last_n",
        Integer {
            min: 0,
            max: MAX_COUNT,
        },
        "So many last tokens.",
    ),
    SEED,
    Field::new("stop", Own(schema::stop), "Texts that end the answer."),
    Field::new(
        "num_predict",
        Integer {
            min: -2,
            max: MAX_COUNT,
        },
        "Most tokens of the answer; below 0 the context is the bound.",
    ),
    Field::new(
        "num_ctx",
        Integer {
            min: 1,
            max: MAX_COUNT,
        },
        "Accepted, no effect: the context is fixed when the server starts.",
    ),
    Field::new("num_keep", Any, "Accepted, no effect."),
    Field::new("num_batch", Any, "Accepted, no effect on the answer."),
    Field::new("num_gpu", Any, "Accepted, no effect on the answer."),
    Field::new("main_gpu", Any, "Accepted, no effect on the answer."),
    Field::new("num_thread", Any, "Accepted, no effect on the answer."),
    Field::new("numa", Any, "Accepted, no effect on the answer."),
    Field::new("use_mmap", Any, "Accepted, no effect on the answer."),
    Field::new("use_mlock", Any, "Accepted, no effect on the answer."),
    Field::new("low_vram", Any, "Accepted, no effect on the answer."),
    Field::new("f16_kv", Any, "Accepted, no effect."),
    Field::new("penalize_newline", Any, "Accepted, no effect."),
    Field::new(
        "draft_num_predict",
        Any,
        "Accepted, no effect on the answer.",
    ),
    Field::new(
        "mirostat",
        Only {
            values: &["0"],
            why: NO_MIROSTAT,
        },
        NOT_YET,
    ),
    Field::new("mirostat_tau", Any, "Accepted, no effect without mirostat."),
    Field::new("mirostat_eta", Any, "Accepted, no effect without mirostat."),
    Field::new(
        "typical_p",
        Only {
            values: &["1", "1.0"],
            why: "tokens are not chosen by typicality",
        },
        NOT_YET,
    ),
    Field::new(
        "tfs_z",
        Only {
            values: &["1", "1.0"],
            why: "tokens are not chosen by their tail",
        },
        NOT_YET,
    ),
];

pub(crate) const MESSAGE: &[Field] = &[
    Field::new(
        "role",
        Text { min: 1, max: 32 },
        "system, user, assistant or tool",
    )
    .required(),
    Field::new(
        "content",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "what is said",
    ),
    Field::new(
        "thinking",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "for the role assistant: what it thought",
    ),
    Field::new("tool_calls", Own(schema::array), "for the role assistant"),
    Field::new(
        "tool_name",
        Text { min: 0, max: 256 },
        "for the role tool: which tool answers",
    ),
    Field::new(
        "tool_call_id",
        Text { min: 0, max: 256 },
        "for the role tool: which call it answers",
    ),
    IMAGES,
];

/// Fields of a call of a message.
pub(crate) const CALL: &[Field] = &[
    Field::new("id", Text { min: 0, max: 256 }, "the call's name"),
    Field::new("type", Text { min: 0, max: 64 }, "always function"),
    Field::new("function", Object, "name and arguments").required(),
];

pub(crate) const CALL_FUNCTION: &[Field] = &[
    Field::new("name", Text { min: 1, max: 256 }, "the tool's name").required(),
    Field::new("arguments", Own(schema::any), "an object").required(),
    Field::new("index", Any, "no effect"),
    Field::new("description", Any, "no effect"),
];

/// Fields of `POST /api/show` and of others that name a model only.
pub(crate) const NAMED: &[Field] = &[
    Field::new("model", Text { min: 1, max: 256 }, "The name of the model."),
    Field::new(
        "name",
        Text { min: 1, max: 256 },
        "The older name of model.",
    ),
    Field::new("verbose", Any, "Accepted, no effect."),
    Field::new("system", Any, "Accepted, no effect."),
    Field::new("template", Any, "Accepted, no effect."),
    Field::new("options", Any, "Accepted, no effect."),
    Field::new("insecure", Any, "Accepted, no effect."),
    Field::new(
        "stream",
        Boolean,
        "Sends the answer in lines. Default true.",
    ),
];
