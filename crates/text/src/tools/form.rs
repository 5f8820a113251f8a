//! The families' syntax of calls and of reasoning, as tables.

use super::named_call::{self, Header};
use super::{ToolCallFormat, elements};

/// Tags around reasoning.
#[derive(Debug)]
pub(super) struct Tags {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

/// Tags that are known; the first whose end the template has counts.
pub(super) static TAGS: [Tags; 5] = [
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
    Named(&'static named_call::NamedCallSyntax),
    Elements(&'static elements::ElementSyntax),
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
    pub(super) family: ToolCallFormat,
    /// Markers that end text and open calls.
    pub(super) opens: &'static [&'static str],
    /// Begins each call; may be empty.
    pub(super) begin: &'static str,
    /// Ends the calls; may be empty.
    pub(super) close: &'static str,
    pub(super) item: Item,
    /// Another form of the same family.
    pub(super) second: Option<&'static named_call::NamedCallSyntax>,
}

static QWEN: elements::ElementSyntax = elements::ElementSyntax {
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

static GLM: elements::ElementSyntax = elements::ElementSyntax {
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

static MINIMAX: elements::ElementSyntax = elements::ElementSyntax {
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

static DSML: elements::ElementSyntax = elements::ElementSyntax {
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

static KIMI: named_call::NamedCallSyntax = named_call::NamedCallSyntax {
    header: Header::Kimi,
    separator: "<|tool_call_argument_begin|>",
    fence: "",
    ends: &["<|tool_call_end|>"],
};

static DEEPSEEK_V3: named_call::NamedCallSyntax = named_call::NamedCallSyntax {
    header: Header::DeepSeek,
    separator: "```json",
    fence: "```",
    ends: &["<｜tool▁call▁end｜>"],
};

static DEEPSEEK_V31: named_call::NamedCallSyntax = named_call::NamedCallSyntax {
    header: Header::DeepSeek,
    separator: "<｜tool▁sep｜>",
    fence: "",
    ends: &["<｜tool▁call▁end｜>"],
};

pub(super) static MISTRAL: named_call::NamedCallSyntax = named_call::NamedCallSyntax {
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
    family: ToolCallFormat,
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
pub(super) static CALLS: [Calls; 13] = [
    calls(
        ToolCallFormat::JsonTags,
        &["<tool_call>"],
        ("{", "</tool_call>"),
        Item::Object,
    ),
    calls(
        ToolCallFormat::QwenXml,
        &["<tool_call>", "<function="],
        ("<function=", "</tool_call>"),
        Item::Elements(&QWEN),
    ),
    calls(
        ToolCallFormat::Glm,
        &["<tool_call>"],
        ("", "</tool_call>"),
        Item::Elements(&GLM),
    ),
    calls(
        ToolCallFormat::KimiK2,
        &["<|tool_calls_section_begin|>"],
        ("<|tool_call_begin|>", "<|tool_calls_section_end|>"),
        Item::Named(&KIMI),
    ),
    calls(
        ToolCallFormat::Gemma4,
        &["<|tool_call>"],
        ("call:", "<tool_call|>"),
        Item::Gemma,
    ),
    calls(
        ToolCallFormat::MiniMax,
        &["<minimax:tool_call>"],
        ("<invoke name=\"", "</minimax:tool_call>"),
        Item::Elements(&MINIMAX),
    ),
    calls(
        ToolCallFormat::DeepSeekV3,
        &["<｜tool▁calls▁begin｜>"],
        ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
        Item::Named(&DEEPSEEK_V3),
    ),
    calls(
        ToolCallFormat::DeepSeekV31,
        &["<｜tool▁calls▁begin｜>"],
        ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
        Item::Named(&DEEPSEEK_V31),
    ),
    calls(
        ToolCallFormat::Dsml,
        &["<｜DSML｜function_calls>"],
        ("<｜DSML｜invoke name=\"", "</｜DSML｜function_calls>"),
        Item::Elements(&DSML),
    ),
    calls(
        ToolCallFormat::Dsml,
        &["<｜DSML｜tool_calls>"],
        ("<｜DSML｜invoke name=\"", "</｜DSML｜tool_calls>"),
        Item::Elements(&DSML),
    ),
    // The newer form first.
    Calls {
        second: Some(&MISTRAL),
        ..calls(
            ToolCallFormat::Mistral,
            &["[TOOL_CALLS]"],
            ("[ARGS]", ""),
            Item::Mistral,
        )
    },
    calls(
        ToolCallFormat::Mistral,
        &["[TOOL_CALLS]"],
        ("", ""),
        Item::Mistral,
    ),
    calls(
        ToolCallFormat::Llama3,
        &["<|python_tag|>"],
        ("{", ""),
        Item::Bare,
    ),
];
