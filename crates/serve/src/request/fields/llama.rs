//! The fields of llama-server's own endpoints.

use super::{
    CACHE_PROMPT, FREQUENCY, IGNORE_EOS, LOGIT_BIAS, MAX_COUNT, MAX_TEXT, MIN_P, MODEL, PRESENCE,
    REPEAT_PENALTY, SEED, STOP, STREAM, TEMPERATURE, TOP_K, TOP_P,
};
use crate::field::Field;
use crate::field::Kind::{Any, Boolean, Integer, Object, Own, Text};
use crate::request::schema;

/// Fields of `POST /tokenize`.
pub(crate) const TOKENIZE: &[Field] = &[
    MODEL,
    Field::new(
        "content",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What becomes tokens.",
    )
    .required(),
    Field::new(
        "add_special",
        Boolean,
        "Puts the beginning-of-text token first if the model wants it. Default false.",
    ),
    Field::new(
        "parse_special",
        Boolean,
        "Makes names of special tokens these tokens. Default true.",
    ),
    Field::new(
        "with_pieces",
        Boolean,
        "Tells each token's text. Default false.",
    ),
];

/// Fields of `POST /detokenize`.
pub(crate) const DETOKENIZE: &[Field] = &[
    MODEL,
    Field::new("tokens", Own(schema::array), "Token ids.").required(),
];

/// Fields of `POST /apply-template`.
pub(crate) const APPLY: &[Field] = &[
    MODEL,
    Field::new("messages", Own(schema::messages), "The conversation.").required(),
    Field::new(
        "tools",
        Own(schema::tools),
        "Functions that the model may call.",
    ),
    Field::new(
        "tool_choice",
        Own(schema::tool_choice),
        "none hides the tools.",
    ),
    Field::new("parallel_tool_calls", Boolean, "No effect on the prompt."),
    Field::new(
        "reasoning_effort",
        Text { min: 1, max: 32 },
        "Given to the template.",
    ),
    Field::new(
        "chat_template_kwargs",
        Object,
        "More variables for the template.",
    ),
    Field::new(
        "add_generation_prompt",
        Any,
        "Accepted, no effect: it is always added.",
    ),
];

/// Fields of `POST /infill`.
pub(crate) const INFILL: &[Field] = &[
    MODEL,
    Field::new(
        "input_prefix",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What is before the hole.",
    ),
    Field::new(
        "input_suffix",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What is after it.",
    ),
    Field::new(
        "input_extra",
        Own(schema::files),
        "Other files: filename and text.",
    ),
    Field::new(
        "prompt",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "What the answer begins with, added to input_prefix.",
    ),
    Field::new(
        "n_predict",
        Integer {
            min: -1,
            max: MAX_COUNT,
        },
        "Most tokens of the answer; -1 for what fits. Default -1.",
    ),
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    PRESENCE,
    FREQUENCY,
    REPEAT_PENALTY,
    IGNORE_EOS,
    LOGIT_BIAS,
    SEED,
    STOP,
    STREAM,
    CACHE_PROMPT,
    Field::new(
        "samplers",
        Any,
        "Accepted, no effect: their order is fixed.",
    ),
    Field::new("t_max_prompt_ms", Any, "Accepted, no effect."),
    Field::new("t_max_predict_ms", Any, "Accepted, no effect."),
    Field::new("n_indent", Any, "Accepted, no effect."),
    Field::new("id_slot", Any, "Accepted, no effect on the answer."),
    Field::new("response_fields", Any, "Accepted, no effect: all are told."),
];
