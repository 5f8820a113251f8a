//! Parses tool calls and reasoning in generated text.
//!
//! ```text
//! template --markers--> Syntax --prompt--> Reader
//! generated text --Reader::push--> Event: Text, Reasoning, CallStart, Arguments, CallEnd
//! ```
//!
//! Models write calls in the syntax of their family: JSON in tags, XML, token-delimited names. The
//! chat template shows which: [`Syntax::of`] looks for its markers. A [`ToolCallParser`] takes
//! generated text in fragments and separates text, reasoning and calls. A model that describes its
//! responses itself, by a [`ResponseTemplate`], is parsed by that description.
//!
//! Invariants:
//! - the events, joined, do not depend on how the text was cut into fragments;
//! - the fragments of a call's arguments concatenate to a JSON object;
//! - text that looks like a call and is none is returned as text, and is counted;
//! - markup inside reasoning is reasoning.
//!
//! Memory: the text of the call that is being read. Cost: linear in the text.

mod body;
mod calls;
mod constraint;
mod detect;
mod elements;
mod form;
mod fragment;
mod gemma;
mod harmony;
mod input;
mod json;
mod named_call;
mod object;
mod reader;
mod response;
mod schema;
mod tail;

pub use calls::{CallGrammar, CallRules};
pub use detect::Syntax;
pub use reader::{ReaderOptions, ToolCallParser};
pub use response::{ResponseError, ResponseTemplate};

/// Meaning of a piece of generated text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Part of the answer. Never empty.
    Text(String),
    /// Part of what the model thought. Never empty.
    Reasoning(String),
    /// A call begins; the first event of a call.
    CallStart {
        /// Calls of this answer before it.
        index: usize,
        /// Names the call for its result: what the model wrote where the family has ids, else made
        /// from [`ReaderOptions::id_seed`].
        id: String,
        name: String,
    },
    /// Part of the arguments, as JSON text. Never empty.
    Arguments {
        index: usize,
        /// The next part.
        piece: String,
    },
    /// The call is complete: its pieces are a JSON object.
    CallEnd { index: usize },
    /// The call that began cannot be read and is none. Does not occur with
    /// [`ReaderOptions::holds_calls`].
    CallFailed {
        index: usize,
        /// All that the model wrote of it, to be shown as text.
        text: String,
    },
}

/// The families' forms of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.
    JsonTags,
    /// `<function=NAME><parameter=KEY>`: Qwen3-Coder, Qwen 3.5 and later, Nemotron 3.
    QwenXml,
    /// `<tool_call>NAME<arg_key>k</arg_key><arg_value>v</arg_value>`: GLM 4.5 and later.
    Glm,
    /// `functions.NAME:0<|tool_call_argument_begin|>{...}`: Kimi K2.
    KimiK2,
    /// Channels and recipients: gpt-oss.
    Harmony,
    /// `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>`: Gemma 4.
    Gemma4,
    /// `<minimax:tool_call><invoke name="N">`: MiniMax M2.
    MiniMax,
    /// `function<｜tool▁sep｜>NAME` with fenced JSON: DeepSeek V3 and R1.
    DeepSeekV3,
    /// `NAME<｜tool▁sep｜>{...}`: DeepSeek V3.1.
    DeepSeekV31,
    /// `<｜DSML｜invoke name="N">`: DeepSeek V3.2 and later.
    Dsml,
    /// `[TOOL_CALLS]` with a list of objects, or `NAME[ARGS]{...}`.
    Mistral,
    /// A bare object with `name` and `parameters`, or one behind `<|python_tag|>`: Llama 3.
    Llama3,
}

#[cfg(test)]
mod mutation_tests;
#[cfg(test)]
mod recording_tests;
#[cfg(test)]
mod tests;
