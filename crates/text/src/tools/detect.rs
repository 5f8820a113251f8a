//! Detects the syntax of a model's calls and reasoning by the markers of its chat template.

use serde_json::Value as Json;

use super::elements;
use super::form::{CALLS, Calls, Item, TAGS, Tags};
use super::harmony::{self, Harmony};
use super::named_call::{self, Header};
use super::reader::{ReaderOptions, ToolCallParser};
use super::schema::Parameters;
use super::tail::tail_of;
use super::{ToolCallFormat, gemma};
use crate::chat::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// A model's syntax of calls and reasoning.
#[derive(Clone, Copy, Debug)]
pub struct Syntax {
    family: Option<ToolCallFormat>,
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
            tags: tags.filter(|_| family != Some(ToolCallFormat::Harmony)),
        }
    }

    /// The form of the calls; `None` when the model was not trained to call tools, or in a form
    /// that is not known.
    pub const fn family(&self) -> Option<ToolCallFormat> {
        self.family
    }

    /// Whether the model may think before it answers.
    pub fn reasons(&self) -> bool {
        self.tags.is_some() || self.family == Some(ToolCallFormat::Harmony)
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
        if self.family == Some(ToolCallFormat::Harmony) {
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
    ) -> ToolCallParser {
        self.reader_after(&tail_of(tokenizer, prompt), tools, options)
    }

    /// A reader of the answer to a prompt that ends with the text `prompt`.
    pub(super) fn reader_after(
        &self,
        prompt: &str,
        tools: &[Json],
        options: ReaderOptions,
    ) -> ToolCallParser {
        if self.family == Some(ToolCallFormat::Harmony) {
            let opened = prompt.rsplit_once(harmony::START).map(|(_, rest)| rest);
            let is_open = |rest: &&str| !rest.contains("<|end|>");
            let machine = Harmony::new(opened.filter(is_open), !tools.is_empty());
            return ToolCallParser::harmony(machine, options);
        }
        let calls = self.calls.filter(|_| !tools.is_empty());
        let is_reasoning = self.opens_reasoning(prompt);
        ToolCallParser::tagged(
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

fn named_markers(form: &'static named_call::NamedCallSyntax) -> Vec<&'static str> {
    let mut markers = vec![form.separator, form.fence];
    // DeepSeek writes the kind of tool before its name.
    markers.extend((form.header == Header::DeepSeek).then_some("<｜tool▁sep｜>"));
    markers.extend(form.ends);
    markers
}

fn element_markers(form: &'static elements::ElementSyntax) -> Vec<&'static str> {
    let mut markers = vec![form.key_open, form.key_end, form.value_open, form.end];
    markers.extend(form.name_ends.iter().chain(form.value_ends));
    // Tokenizers have the mark itself as a token.
    markers.extend(form.end.contains("｜DSML｜").then_some("｜DSML｜"));
    markers
}

fn family_of(source: &str) -> Option<ToolCallFormat> {
    let has = |marker: &str| source.contains(marker);
    Some(match () {
        () if has("<|tool_calls_section_begin|>") => ToolCallFormat::KimiK2,
        () if has("<minimax:tool_call>") => ToolCallFormat::MiniMax,
        () if has("｜DSML｜") || has("dsml_token") => ToolCallFormat::Dsml,
        () if has("tool▁calls▁begin") && has("```json") => ToolCallFormat::DeepSeekV3,
        () if has("tool▁calls▁begin") => ToolCallFormat::DeepSeekV31,
        () if has(harmony::CHANNEL) && has(harmony::START) => ToolCallFormat::Harmony,
        () if has("<|tool_call>") => ToolCallFormat::Gemma4,
        () if has("<arg_key>") => ToolCallFormat::Glm,
        () if has("<function=") && has("<parameter=") => ToolCallFormat::QwenXml,
        () if has("[TOOL_CALLS]") => ToolCallFormat::Mistral,
        () if has("<tool_call>") => ToolCallFormat::JsonTags,
        () if has("<|python_tag|>") || has("{\"name\": function name") => ToolCallFormat::Llama3,
        () => return None,
    })
}
