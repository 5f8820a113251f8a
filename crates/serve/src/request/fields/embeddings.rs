//! The fields of embedding requests: OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and its older
//! `/api/embeddings`.

use super::{KEEP_ALIVE, MAX_COUNT, MAX_TEXT, MODEL, USER};
use crate::field::Field;
use crate::field::Kind::{Any, Boolean, Integer, Only, Own, Text};
use crate::request::schema;

const INPUT: Field = Field::new(
    "input",
    Own(schema::input),
    "A text, texts, token ids, or lists of token ids. Ids are taken as they are; around a text \
     go the tokens that the model was trained with.",
)
.required();
const DIMENSIONS: Field = Field::new(
    "dimensions",
    Integer {
        min: 1,
        max: MAX_COUNT,
    },
    "Keeps so many first numbers of a vector and scales it to length 1 again. Default: all.",
);
const OPTIONS: Field = Field::new("options", Any, "Accepted, no effect on vectors.");

/// Fields of `POST /v1/embeddings`.
pub(crate) const OPENAI: &[Field] = &[
    MODEL,
    INPUT,
    Field::new(
        "encoding_format",
        Only {
            values: &["\"float\"", "\"base64\""],
            why: "vectors are told as float or base64",
        },
        "float for numbers, base64 for little-endian f32. Default float.",
    ),
    DIMENSIONS,
    USER,
];

/// Fields of `POST /api/embed`.
pub(crate) const OLLAMA: &[Field] = &[
    MODEL,
    INPUT,
    Field::new(
        "truncate",
        Boolean,
        "Cuts texts to the model's context; false refuses longer ones. Default true.",
    ),
    DIMENSIONS,
    OPTIONS,
    KEEP_ALIVE,
];

/// Fields of `POST /api/embeddings`.
pub(crate) const OLLAMA_OLD: &[Field] = &[
    MODEL,
    Field::new(
        "prompt",
        Text {
            min: 0,
            max: MAX_TEXT,
        },
        "The text; longer ones are cut to the model's context.",
    )
    .required(),
    OPTIONS,
    KEEP_ALIVE,
];
