//! Grammars of calls: what a model may write once it calls a tool.
//!
//! Each family has one description, in the Lark dialect of `llguidance`, from the same markers that
//! the reader looks for. Where the model may also answer in words, the grammar begins behind the
//! marker and ends with the call. Where it must call, the grammar is the whole answer.

use serde_json::{Value as Json, json};

use super::detect::Syntax;
use super::form::{Calls, Item};
use super::{ToolCallFormat, constraint, elements, harmony};
use crate::grammar::{
    Constraint, DelimitedSpan, Grammar, Start, Unsupported, compilable, relaxed, strict,
};
use crate::tokenizer::{Fragment, Tokenizer};

/// Calls that a request allows.
#[derive(Clone, Copy, Debug)]
pub struct CallRules<'a> {
    /// Tools that may be called: `{"type": "function", "function": {...}}` each. Arguments of
    /// those with `"strict": true` must match their schema; of others, as far as it goes.
    pub tools: &'a [Json],
    /// Whether the model must call a tool.
    pub is_required: bool,
    /// Whether it may call several.
    pub is_parallel: bool,
    /// Allow any object as arguments, for schemas that the compiler refuses.
    pub has_any_arguments: bool,
    /// A schema that an answer without calls must match. The grammar binds from the beginning of
    /// the answer then. Has no effect where a call is required.
    pub answer: Option<&'a Json>,
}

#[derive(Clone, Debug)]
pub struct CallGrammar {
    /// The grammar that the answer must match, and from where on.
    pub constraint: Constraint,
    /// Keywords of tools that are not strict, which do not count: the tool and the keyword.
    pub relaxed: Vec<(String, Unsupported)>,
}

struct Tool {
    name: String,
    schema: Json,
    is_strict: bool,
}

/// White space as models write it between parts of a call; a bound keeps small models from writing
/// nothing else.
pub(super) const SPACE: &str = "WS: /[ \\n\\r\\t]{1,20}/\n";

/// `rule`: JSON of `schema`.
pub(super) fn json_rule(rule: &str, schema: &Json) -> String {
    format!("{rule}: %json {}\n", compilable(schema))
}

impl Syntax {
    /// The grammar of the calls that `rules` allow in the answer to `prompt`. `None` for models
    /// whose form of calls is not known, and where nothing marks a call.
    ///
    /// # Errors
    /// [`Unsupported`] for a keyword of a strict tool's schema that cannot be followed.
    pub fn constraint(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        rules: &CallRules<'_>,
    ) -> Result<Option<CallGrammar>, Unsupported> {
        let Some(family) = self.family() else {
            return Ok(None);
        };
        // A text that ends before a control token may contain the token's own beginning.
        let ends_in_control = |form: &elements::ElementSyntax| {
            let fragments = tokenizer.cut_control(form.value_ends[0]);
            !matches!(fragments.as_slice(), [Fragment::Text(_)])
        };
        let is_free = match self.calls().map(|calls| &calls.item) {
            Some(Item::Elements(form)) => ends_in_control(form),
            _ => false,
        };
        if is_free {
            return Ok(None);
        }
        let is_bare = family == ToolCallFormat::Llama3;
        let is_whole = rules.is_required || rules.answer.is_some();
        if rules.tools.is_empty() || is_bare && !is_whole {
            return Ok(None);
        }
        // gpt-oss writes a response without calls in a channel of its own.
        if family == ToolCallFormat::Harmony && rules.answer.is_some() && !rules.is_required {
            return Ok(None);
        }
        // Gemma's grammar holds names and form of calls, and their arguments to no schema yet.
        let is_formal = family == ToolCallFormat::Gemma4;
        if is_formal && rules.tools.iter().any(is_strict) {
            return Ok(None);
        }
        let mut relaxed = Vec::new();
        let tools: Result<Vec<Tool>, Unsupported> = rules
            .tools
            .iter()
            .filter_map(|tool| read(tool, rules, &mut relaxed))
            .collect();
        let tools = tools?;
        if is_formal {
            relaxed = tools.iter().map(unheld).collect();
        }
        let writer = CallGrammarWriter {
            tokenizer,
            tools: &tools,
            rules,
        };
        let tail = super::tail::tail_of(tokenizer, prompt);
        let constraint = match self.calls() {
            Some(calls) => writer.tagged(calls, self, &tail),
            None => writer.harmony(),
        };
        Ok(Some(CallGrammar {
            constraint,
            relaxed,
        }))
    }
}

fn is_strict(tool: &Json) -> bool {
    let function = tool.get("function").unwrap_or(tool);
    function["strict"] == true || tool["strict"] == true
}

/// The warning about a tool whose arguments are held to no schema.
fn unheld(tool: &Tool) -> (String, Unsupported) {
    let (keyword, place) = ("properties".to_owned(), "#".to_owned());
    (tool.name.clone(), Unsupported { keyword, place })
}

fn read(
    tool: &Json,
    rules: &CallRules<'_>,
    told: &mut Vec<(String, Unsupported)>,
) -> Option<Result<Tool, Unsupported>> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name")?.as_str()?.to_owned();
    let is_strict = is_strict(tool);
    let parameters = function
        .get("parameters")
        .filter(|schema| schema.is_object());
    let any = json!({"type": "object"});
    let schema = match parameters {
        _ if rules.has_any_arguments => any,
        None => any,
        Some(schema) if is_strict => match strict(schema) {
            Ok(schema) => schema,
            Err(unsupported) => return Some(Err(unsupported)),
        },
        Some(schema) => {
            let (schema, dropped) = relaxed(schema);
            told.extend(dropped.into_iter().map(|keyword| (name.clone(), keyword)));
            schema
        }
    };
    Some(Ok(Tool {
        name,
        schema,
        is_strict,
    }))
}

struct CallGrammarWriter<'a> {
    tokenizer: &'a Tokenizer,
    tools: &'a [Tool],
    rules: &'a CallRules<'a>,
}

impl CallGrammarWriter<'_> {
    fn tagged(&self, calls: &Calls, syntax: &Syntax, tail: &str) -> Constraint {
        let body = self.body(calls);
        let lark = |start: &str| format!("start: {start}\n{SPACE}{body}");
        let open = calls.opens[0];
        let span = syntax.reasoning().map(|(open, close)| DelimitedSpan {
            open: open.to_owned(),
            close: close.to_owned(),
            is_open: syntax.opens_reasoning(tail),
        });
        let answer = self.rules.answer.filter(|_| !self.rules.is_required);
        if !self.rules.is_required && answer.is_none() {
            return Constraint {
                grammar: Grammar::Lark(lark("calls")),
                start: Start::Lazily {
                    markers: vec![open.to_owned()],
                    except: span,
                },
            };
        }
        let marker = match calls.item {
            Item::Bare => String::new(),
            _ => self.literal(open),
        };
        // Calls with an opening marker of their own each repeat it.
        let repeats = self.rules.is_parallel && calls.is_single();
        let start = match repeats {
            true => format!("WS? ({marker} calls WS?)+"),
            false => format!("WS? {marker} calls"),
        };
        let (start, last) = match answer {
            Some(schema) => (
                format!("{start} | answer"),
                format!("\n{}", json_rule("answer", schema)),
            ),
            None => (start, String::new()),
        };
        let rules = match &span {
            // The model may open its reasoning itself.
            Some(span) if !span.is_open => {
                let thought = constraint::thought(self.tokenizer, &span.open, &span.close, &start);
                format!("{thought}{SPACE}{body}")
            }
            _ => lark(&start),
        };
        let start_at = match span {
            Some(span) if span.is_open => Start::After { marker: span.close },
            _ => Start::Now,
        };
        Constraint {
            grammar: Grammar::Lark(rules + &last),
            start: start_at,
        }
    }

    /// Rules for what follows an opening marker; the first is `calls`.
    fn body(&self, calls: &Calls) -> String {
        let close = self.literal(calls.close);
        let many = |item: &str| match self.rules.is_parallel {
            true => format!("{item}+"),
            false => item.to_owned(),
        };
        match &calls.item {
            Item::Object => format!(
                "calls: WS? object WS? {close}\n{}",
                self.objects("arguments")
            ),
            Item::Bare => format!("calls: object\n{}", self.objects("parameters")),
            Item::Mistral if calls.second.is_none() => {
                let rest = if self.rules.is_parallel {
                    "(\",\" WS? object)*"
                } else {
                    ""
                };
                let objects = self.objects("arguments");
                format!("calls: WS? \"[\" object {rest} \"]\"\n{objects}")
            }
            Item::Mistral => {
                let call = |tool: &Tool, i: usize| {
                    format!("{} {} args{i}", quote(&tool.name), self.literal("[ARGS]"))
                };
                format!("calls: {}\n{}", self.alternatives(call), self.arguments())
            }
            Item::Named(_) => self.named(calls, &many("call"), &close),
            Item::Elements(form) => {
                let calls_rule = match form.keeps_end {
                    true => "calls: call".to_owned(),
                    false => format!("calls: WS? {} {close}", many("(call WS?)")),
                };
                format!("{calls_rule}\n{}", self.elements(calls, form))
            }
            Item::Gemma => format!("calls: call {close}\n{}", self.gemma()),
        }
    }

    /// A text as Lark: control tokens by id, the rest quoted.
    fn literal(&self, text: &str) -> String {
        literal(self.tokenizer, text)
    }

    /// The alternatives `call` of each tool; the response must contain one.
    fn alternatives(&self, call: impl Fn(&Tool, usize) -> String) -> String {
        let calls = self.tools.iter().enumerate().map(|(i, tool)| call(tool, i));
        calls.collect::<Vec<_>>().join(" | ")
    }

    /// `args0`, `args1`, ...: the arguments of each tool as JSON.
    fn arguments(&self) -> String {
        let mut out = String::new();
        for (i, tool) in self.tools.iter().enumerate() {
            out += &json_rule(&format!("args{i}"), &tool.schema);
        }
        out
    }

    /// `object`: a call as a JSON object.
    fn objects(&self, key: &str) -> String {
        let call = |tool: &Tool, i: usize| {
            let (name, key) = (
                quote(&json!(tool.name).to_string()),
                quote(&format!("\"{key}\"")),
            );
            format!("{name} WS? \",\" WS? {key} WS? \":\" WS? args{i}")
        };
        let calls = self.alternatives(call);
        let name = quote("\"name\"");
        let object = format!("object: \"{{\" WS? {name} WS? \":\" WS? ({calls}) WS? \"}}\"\n");
        object + &self.arguments()
    }

    fn named(&self, calls: &Calls, many: &str, close: &str) -> String {
        let begin = self.literal(calls.begin);
        let l = |text: &str| self.literal(text);
        let call = |tool: &Tool, i: usize| match calls.family {
            ToolCallFormat::KimiK2 => {
                let name = quote(&format!("functions.{}:", tool.name));
                let (mark, end) = (l("<|tool_call_argument_begin|>"), l("<|tool_call_end|>"));
                format!("{name} /[0-9]{{1,4}}/ {mark} args{i} {end}")
            }
            ToolCallFormat::DeepSeekV3 => {
                let (sep, end) = (l("<｜tool▁sep｜>"), l("<｜tool▁call▁end｜>"));
                let name = quote(&format!("{}\n```json\n", tool.name));
                format!(
                    "\"function\" {sep} {name} args{i} {} {end} WS?",
                    quote("\n```")
                )
            }
            _ => {
                let (sep, end) = (l("<｜tool▁sep｜>"), l("<｜tool▁call▁end｜>"));
                format!("{} {sep} args{i} {end}", quote(&tool.name))
            }
        };
        let alternatives = self.alternatives(call);
        let arguments = self.arguments();
        format!("calls: {many} {close}\ncall: {begin} ({alternatives})\n{arguments}")
    }

    fn elements(&self, calls: &Calls, form: &elements::ElementSyntax) -> String {
        let mut rules = String::new();
        let mut names = Vec::new();
        for (i, tool) in self.tools.iter().enumerate() {
            let name_end = if form.keeps_name_end {
                ""
            } else {
                form.name_ends[0]
            };
            let open = self.literal(&format!("{}{}{name_end}", calls.begin, tool.name));
            let end = self.literal(form.end);
            names.push(format!("{open} WS? params{i} {end}"));
            rules += &self.parameters(form, tool, i);
        }
        format!("call: {}\n{rules}", names.join(" | "))
    }

    /// `paramsI`: the parameters of a tool. A strict tool's are in the order of its schema, others'
    /// in any order.
    fn parameters(&self, form: &elements::ElementSyntax, tool: &Tool, i: usize) -> String {
        let none = serde_json::Map::new();
        let properties = tool.schema["properties"].as_object().unwrap_or(&none);
        let is_required = |name: &str| {
            let required = tool.schema["required"].as_array();
            required.is_some_and(|names| names.iter().any(|n| n == name))
        };
        let (mut rules, mut parts) = (String::new(), Vec::new());
        for (j, (name, schema)) in properties.iter().enumerate() {
            let rule = format!("p{i}x{j}");
            rules += &self.parameter(form, tool, &rule, (name, schema));
            let mark = if tool.is_strict && !is_required(name) {
                "?"
            } else {
                ""
            };
            parts.push(format!("{rule}{mark}"));
        }
        let open = tool.schema["additionalProperties"] != false && properties.is_empty();
        let all = match tool.is_strict {
            _ if open => {
                rules += &self.any_parameter(form, &format!("p{i}any"));
                format!("p{i}any*")
            }
            _ if parts.is_empty() => "\"\"".to_owned(),
            true => parts.join(" "),
            false => format!("({})*", parts.join(" | ")),
        };
        format!("params{i}: {all}\n{rules}")
    }

    fn parameter(
        &self,
        form: &elements::ElementSyntax,
        tool: &Tool,
        rule: &str,
        (name, schema): (&str, &Json),
    ) -> String {
        let is_text = schema["type"] == "string";
        let key = format!("{}{name}{}", form.key_open, form.key_end);
        let line = if form.trims_line_end { "\n" } else { "" };
        let open = match (form.has_attributes, is_text) {
            // Some models write a line end between key and value.
            (false, _) if !form.value_open.is_empty() => {
                format!(
                    "{} WS? {}",
                    self.literal(&key),
                    self.literal(form.value_open)
                )
            }
            (false, _) => self.literal(&(key + line)),
            (true, true) => self.literal(&format!("{key} string=\"true\">")),
            (true, false) => self.literal(&format!("{key} string=\"false\">")),
        };
        let close = form.value_ends[0];
        let choices = schema["enum"].as_array().filter(|_| is_text);
        if let Some(choices) = choices {
            let texts = choices.iter().filter_map(Json::as_str).map(quote);
            let texts = texts.collect::<Vec<_>>().join(" | ");
            let close = self.literal(&format!("{line}{close}"));
            return format!("{rule}: {open} ({texts}) {close} WS?\n");
        }
        if is_text || schema.get("type").is_none() {
            return format!(
                "{rule}: {open} {rule}v WS?\n{}",
                self.free_text(rule, close)
            );
        }
        let mut schema = schema.clone();
        // Definitions are the root's.
        for key in ["$defs", "definitions", "x-guidance"] {
            if let (Some(defs), Some(map)) = (tool.schema.get(key), schema.as_object_mut()) {
                map.insert(key.to_owned(), defs.clone());
            }
        }
        let close = self.literal(close);
        let value = json_rule(&format!("{rule}v"), &schema);
        format!("{rule}: {open} {rule}v WS? {close} WS?\n{value}")
    }

    fn any_parameter(&self, form: &elements::ElementSyntax, rule: &str) -> String {
        let open = self.literal(form.key_open);
        let string = if form.has_attributes {
            quote(" string=\"true\"")
        } else {
            String::new()
        };
        let key = self.literal(form.key_end);
        let value = match form.value_open {
            "" => String::new(),
            mark if form.has_attributes => self.literal(mark),
            mark => format!("WS? {}", self.literal(mark)),
        };
        let free = self.free_text(rule, form.value_ends[0]);
        format!(
            "{rule}: {open} /[A-Za-z0-9_.-]{{1,64}}/ {key} {string} {value} {rule}v WS?\n{free}"
        )
    }

    /// `RULEv`: any text up to `close`, and `close`.
    fn free_text(&self, rule: &str, close: &str) -> String {
        free_text(self.tokenizer, rule, close)
    }

    fn gemma(&self) -> String {
        let mark = self.literal(super::gemma::QUOTE);
        let call = |tool: &Tool, _| quote(&format!("call:{}", tool.name));
        let (names, text) = (
            self.alternatives(call),
            self.free_text("text", super::gemma::QUOTE),
        );
        format!(
            "call: ({names}) object\n{text}\
             object: \"{{\" (pair (\",\" pair)*)? \"}}\"\n\
             pair: /[A-Za-z_$][A-Za-z0-9_.$-]{{0,63}}/ \":\" value\n\
             value: text | NUMBER | \"true\" | \"false\" | \"null\" | object | list\n\
             list: \"[\" (value (\",\" value)*)? \"]\"\n\
             NUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/\n\
             text: {mark} textv\n"
        )
    }

    fn harmony(&self) -> Constraint {
        let message = self.literal(harmony::MESSAGE);
        let json = format!("({})?", self.literal(&format!(" {}", harmony::CONSTRAIN)));
        let call = |tool: &Tool, i: usize| {
            format!("{} {json} \"json\"? {message} args{i}", quote(&tool.name))
        };
        let rules = format!("call: {}\n{}", self.alternatives(call), self.arguments());
        if !self.rules.is_required {
            return Constraint {
                grammar: Grammar::Lark(format!("start: call\n{rules}")),
                start: Start::Lazily {
                    markers: vec!["to=functions.".to_owned()],
                    // Thought text may quote a recipient.
                    except: Some(DelimitedSpan {
                        open: harmony::MESSAGE.to_owned(),
                        close: harmony::CHANNEL.to_owned(),
                        is_open: false,
                    }),
                },
            };
        }
        let thought = self.literal("<|channel|>analysis<|message|>");
        let next = self.literal("<|end|><|start|>assistant");
        let open = self.literal("<|channel|>commentary to=functions.");
        let start = format!("start: ({thought} /(?s:.+)/? {next})? {open} call\n");
        Constraint::whole(Grammar::Lark(start + &rules))
    }
}

/// A text as Lark: control tokens by id, the rest quoted.
pub(super) fn literal(tokenizer: &Tokenizer, text: &str) -> String {
    let part = |fragment: &Fragment<'_>| match *fragment {
        Fragment::Token { id, .. } => format!("<[{id}]>"),
        Fragment::Text(text) => quote(text),
    };
    let fragments = tokenizer.cut_control(text);
    fragments.iter().map(part).collect::<Vec<_>>().join(" ")
}

/// `RULEv`: any text up to `close`, and `close`.
pub(super) fn free_text(tokenizer: &Tokenizer, rule: &str, close: &str) -> String {
    let fragments = tokenizer.cut_control(close);
    match fragments.as_slice() {
        [Fragment::Text(text)] => format!("{rule}v[lazy]: /(?s:.*)/ {}\n", quote(text)),
        _ => format!("{rule}v: /(?s:.+)/? {}\n", literal(tokenizer, close)),
    }
}

fn quote(text: &str) -> String {
    json!(text).to_string()
}
