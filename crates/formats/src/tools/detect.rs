//! Which form a model's calls and reasoning have, by the markers of its chat template.

use serde_json::Value as Json;

use super::elements;
use super::harmony::{self, Harmony};
use super::named::{self, Header};
use super::reader::{Reader, ReaderOptions};
use super::schema::Parameters;
use super::{Family, gemma};
use crate::chat::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// Tags around reasoning.
#[derive(Debug)]
pub(super) struct Tags {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

/// Tags that are known; the first whose end the template has counts.
static TAGS: [Tags; 5] = [
    Tags {
        open: "<think>",
        close: "</think>",
    },
    Tags {
        open: "[THINK]",
        close: "[/THINK]",
    },
    Tags {
        open: "<mm:think>",
        close: "</mm:think>",
    },
    Tags {
        open: "<seed:think>",
        close: "</seed:think>",
    },
    Tags {
        open: "<|channel>thought",
        close: "<channel|>",
    },
];

/// The form of one call.
#[derive(Debug)]
pub(super) enum Item {
    /// `{"name": ..., "arguments": ...}`
    Object,
    /// The same without a marker, so that a plain answer may look like it.
    Bare,
    /// A list of objects, or a name with arguments.
    Mistral,
    Named(&'static named::Form),
    Elements(&'static elements::Form),
    Gemma,
}

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

/// The form of a family's calls.
#[derive(Debug)]
pub(super) struct Calls {
    pub(super) family: Family,
    /// Markers that end text and open calls.
    pub(super) opens: &'static [&'static str],
    /// Begins each call; may be empty.
    pub(super) begin: &'static str,
    /// Ends the calls; may be empty.
    pub(super) close: &'static str,
    pub(super) item: Item,
    /// Another form of the same family.
    pub(super) second: Option<&'static named::Form>,
}

static QWEN: elements::Form = elements::Form {
    name_ends: &[">"],
    keeps_name_end: false,
    key_open: "<parameter=",
    key_end: ">",
    value_open: "",
    has_attributes: false,
    value_ends: &["</parameter>", "\n</parameter>"],
    trims_line_end: true,
    end: "</function>",
    keeps_end: false,
};

static GLM: elements::Form = elements::Form {
    name_ends: &["\n", "<arg_key>", "</tool_call>"],
    keeps_name_end: true,
    key_open: "<arg_key>",
    key_end: "</arg_key>",
    value_open: "<arg_value>",
    has_attributes: false,
    value_ends: &["</arg_value>"],
    trims_line_end: false,
    end: "</tool_call>",
    keeps_end: true,
};

static MINIMAX: elements::Form = elements::Form {
    name_ends: &["\">"],
    keeps_name_end: false,
    key_open: "<parameter name=\"",
    key_end: "\">",
    value_open: "",
    has_attributes: false,
    value_ends: &["</parameter>"],
    trims_line_end: false,
    end: "</invoke>",
    keeps_end: false,
};

static DSML: elements::Form = elements::Form {
    name_ends: &["\">"],
    keeps_name_end: false,
    key_open: "<｜DSML｜parameter name=\"",
    key_end: "\"",
    value_open: ">",
    has_attributes: true,
    value_ends: &["</｜DSML｜parameter>"],
    trims_line_end: false,
    end: "</｜DSML｜invoke>",
    keeps_end: false,
};

static KIMI: named::Form = named::Form {
    header: Header::Kimi,
    separator: "<|tool_call_argument_begin|>",
    fence: "",
    ends: &["<|tool_call_end|>"],
};

static DEEPSEEK_V3: named::Form = named::Form {
    header: Header::DeepSeek,
    separator: "```json",
    fence: "```",
    ends: &["<｜tool▁call▁end｜>"],
};

static DEEPSEEK_V31: named::Form = named::Form {
    header: Header::DeepSeek,
    separator: "<｜tool▁sep｜>",
    fence: "",
    ends: &["<｜tool▁call▁end｜>"],
};

pub(super) static MISTRAL: named::Form = named::Form {
    header: Header::Mistral,
    separator: "[ARGS]",
    fence: "",
    ends: &[],
};

impl Calls {
    /// Whether each call has an opening marker of its own.
    pub(super) const fn is_single(&self) -> bool {
        match self.item {
            Item::Object | Item::Gemma => true,
            Item::Elements(form) => form.keeps_end,
            Item::Mistral => self.second.is_some(),
            Item::Bare | Item::Named(_) => false,
        }
    }
}

/// A family without a second form.
const fn calls(
    family: Family,
    opens: &'static [&'static str],
    (begin, close): (&'static str, &'static str),
    item: Item,
) -> Calls {
    let second = None;
    Calls {
        family,
        opens,
        begin,
        close,
        item,
        second,
    }
}

/// All families but harmony.
static CALLS: [Calls; 13] = [
    calls(
        Family::JsonTags,
        &["<tool_call>"],
        ("{", "</tool_call>"),
        Item::Object,
    ),
    calls(
        Family::QwenXml,
        &["<tool_call>", "<function="],
        ("<function=", "</tool_call>"),
        Item::Elements(&QWEN),
    ),
    calls(
        Family::Glm,
        &["<tool_call>"],
        ("", "</tool_call>"),
        Item::Elements(&GLM),
    ),
    calls(
        Family::KimiK2,
        &["<|tool_calls_section_begin|>"],
        ("<|tool_call_begin|>", "<|tool_calls_section_end|>"),
        Item::Named(&KIMI),
    ),
    calls(
        Family::Gemma4,
        &["<|tool_call>"],
        ("call:", "<tool_call|>"),
        Item::Gemma,
    ),
    calls(
        Family::MiniMax,
        &["<minimax:tool_call>"],
        ("<invoke name=\"", "</minimax:tool_call>"),
        Item::Elements(&MINIMAX),
    ),
    calls(
        Family::DeepSeekV3,
        &["<｜tool▁calls▁begin｜>"],
        ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
        Item::Named(&DEEPSEEK_V3),
    ),
    calls(
        Family::DeepSeekV31,
        &["<｜tool▁calls▁begin｜>"],
        ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
        Item::Named(&DEEPSEEK_V31),
    ),
    calls(
        Family::Dsml,
        &["<｜DSML｜function_calls>"],
        ("<｜DSML｜invoke name=\"", "</｜DSML｜function_calls>"),
        Item::Elements(&DSML),
    ),
    calls(
        Family::Dsml,
        &["<｜DSML｜tool_calls>"],
        ("<｜DSML｜invoke name=\"", "</｜DSML｜tool_calls>"),
        Item::Elements(&DSML),
    ),
    // The newer form first.
    Calls {
        second: Some(&MISTRAL),
        ..calls(
            Family::Mistral,
            &["[TOOL_CALLS]"],
            ("[ARGS]", ""),
            Item::Mistral,
        )
    },
    calls(Family::Mistral, &["[TOOL_CALLS]"], ("", ""), Item::Mistral),
    calls(Family::Llama3, &["<|python_tag|>"], ("{", ""), Item::Bare),
];

/// How a model writes calls and reasoning.
#[derive(Clone, Copy, Debug)]
pub struct Syntax {
    family: Option<Family>,
    calls: Option<&'static Calls>,
    tags: Option<&'static Tags>,
}

impl Syntax {
    /// By the markers in the template: those that only one family has first.
    pub fn of(template: &ChatTemplate) -> Self {
        Self::of_source(template.source())
    }

    pub(super) fn of_source(source: &str) -> Self {
        let family = family_of(source);
        let of_family = || CALLS.iter().filter(|calls| Some(calls.family) == family);
        // DeepSeek names the block in one of two ways.
        let has = |text: &str| source.contains(text);
        let is_written = |c: &&Calls| c.opens.iter().any(|open| has(open)) && has(c.begin);
        let named = of_family().find(is_written);
        let is_block = |c: &&Calls| has(c.close.trim_start_matches("</｜DSML｜"));
        let calls = named
            .or_else(|| of_family().find(is_block))
            .or_else(|| of_family().next());
        let tags = TAGS.iter().find(|tags| source.contains(tags.close));
        Self {
            family,
            calls,
            tags: tags.filter(|_| family != Some(Family::Harmony)),
        }
    }

    /// The form of the calls; `None` when the model was not trained to call tools, or in a form
    /// that is not known.
    pub const fn family(&self) -> Option<Family> {
        self.family
    }

    /// Whether the model may think before it answers.
    pub fn reasons(&self) -> bool {
        self.tags.is_some() || self.family == Some(Family::Harmony)
    }

    /// Texts around reasoning, where it is in tags.
    pub fn reasoning(&self) -> Option<(&'static str, &'static str)> {
        self.tags.map(|tags| (tags.open, tags.close))
    }

    pub(super) const fn calls(&self) -> Option<&'static Calls> {
        self.calls
    }

    /// The text that ends reasoning, where reasoning is in tags.
    pub fn reasoning_end(&self) -> Option<&'static str> {
        self.tags.map(|tags| tags.close)
    }

    /// Control tokens that the reader must see as text: their names are markers of this form.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let markers = self.markers();
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let is_shown = |id: &u32| {
            let name = tokenizer.token_text(*id).unwrap_or_default();
            tokenizer.is_control(*id) && markers.iter().any(|marker| marker.contains(name))
        };
        ids.filter(|id| tokenizer.is_control(*id))
            .filter(is_shown)
            .collect()
    }

    /// All texts that the reader looks for.
    fn markers(&self) -> Vec<&'static str> {
        let mut markers = Vec::new();
        markers.extend(
            self.tags
                .into_iter()
                .flat_map(|tags| [tags.open, tags.close]),
        );
        if let Some(calls) = self.calls {
            markers.extend(calls.opens);
            markers.extend([calls.begin, calls.close]);
            markers.extend(calls.second.into_iter().flat_map(named_markers));
            match calls.item {
                Item::Named(form) => markers.extend(named_markers(form)),
                Item::Elements(form) => markers.extend(element_markers(form)),
                Item::Gemma => markers.push(gemma::QUOTE),
                Item::Mistral => markers.push("[CALL_ID]"),
                Item::Object | Item::Bare => {}
            }
        }
        if self.family == Some(Family::Harmony) {
            markers.extend([
                harmony::START,
                harmony::CHANNEL,
                harmony::MESSAGE,
                harmony::CONSTRAIN,
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ]);
        }
        markers.retain(|marker| !marker.is_empty());
        markers
    }

    /// A reader of the answer to `prompt` (token ids) for a request with `tools`; without tools,
    /// calls are text.
    pub fn reader(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        tools: &[Json],
        options: ReaderOptions,
    ) -> Reader {
        self.reader_after(&tail_of(tokenizer, prompt), tools, options)
    }

    /// A reader of the answer to a prompt that ends with the text `prompt`.
    pub(super) fn reader_after(
        &self,
        prompt: &str,
        tools: &[Json],
        options: ReaderOptions,
    ) -> Reader {
        if self.family == Some(Family::Harmony) {
            let opened = prompt.rsplit_once(harmony::START).map(|(_, rest)| rest);
            let is_open = |rest: &&str| !rest.contains("<|end|>");
            let machine = Harmony::new(opened.filter(is_open), !tools.is_empty());
            return Reader::harmony(machine, options);
        }
        let calls = self.calls.filter(|_| !tools.is_empty());
        let is_reasoning = self.opens_reasoning(prompt);
        Reader::tagged(
            self.tags,
            calls,
            Parameters::of(tools),
            is_reasoning,
            options,
        )
    }

    /// Whether a prompt that ends with `prompt` leaves the model in the middle of its reasoning.
    pub fn opens_reasoning(&self, prompt: &str) -> bool {
        self.tags.is_some_and(|tags| {
            let opened = prompt.rfind(tags.open);
            opened > prompt.rfind(tags.close)
                && opened.is_some_and(|at| prompt[at + tags.open.len()..].trim().is_empty())
        })
    }
}

/// Tokens of a prompt in which the end of a reasoning's tag is looked for.
const TAIL_TOKENS: usize = 32;

/// The end of a prompt as text, names of control tokens included.
pub(super) fn tail_of(tokenizer: &Tokenizer, prompt: &[u32]) -> String {
    text_of(tokenizer, prompt, TAIL_TOKENS)
}

/// The last `tokens` of a prompt as text, names of control tokens included.
pub(super) fn text_of(tokenizer: &Tokenizer, prompt: &[u32], tokens: usize) -> String {
    let tail = &prompt[prompt.len().saturating_sub(tokens)..];
    let mut bytes = Vec::new();
    for id in tail {
        let name = tokenizer
            .token_text(*id)
            .filter(|_| tokenizer.is_control(*id));
        let text = tokenizer.token_bytes(*id).unwrap_or_default();
        bytes.extend_from_slice(name.map_or(text, str::as_bytes));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn named_markers(form: &'static named::Form) -> Vec<&'static str> {
    let mut markers = vec![form.separator, form.fence];
    // DeepSeek writes the kind of tool before its name.
    markers.extend((form.header == Header::DeepSeek).then_some("<｜tool▁sep｜>"));
    markers.extend(form.ends);
    markers
}

fn element_markers(form: &'static elements::Form) -> Vec<&'static str> {
    let mut markers = vec![form.key_open, form.key_end, form.value_open, form.end];
    markers.extend(form.name_ends.iter().chain(form.value_ends));
    // Tokenizers have the mark itself as a token.
    markers.extend(form.end.contains("｜DSML｜").then_some("｜DSML｜"));
    markers
}

fn family_of(source: &str) -> Option<Family> {
    let has = |marker: &str| source.contains(marker);
    Some(match () {
        () if has("<|tool_calls_section_begin|>") => Family::KimiK2,
        () if has("<minimax:tool_call>") => Family::MiniMax,
        () if has("｜DSML｜") || has("dsml_token") => Family::Dsml,
        () if has("tool▁calls▁begin") && has("```json") => Family::DeepSeekV3,
        () if has("tool▁calls▁begin") => Family::DeepSeekV31,
        () if has(harmony::CHANNEL) && has(harmony::START) => Family::Harmony,
        () if has("<|tool_call>") => Family::Gemma4,
        () if has("<arg_key>") => Family::Glm,
        () if has("<function=") && has("<parameter=") => Family::QwenXml,
        () if has("[TOOL_CALLS]") => Family::Mistral,
        () if has("<tool_call>") => Family::JsonTags,
        () if has("<|python_tag|>") || has("{\"name\": function name") => Family::Llama3,
        () => return None,
    })
}
