//! Responses of each family. In fragments: `mutation_tests`.

use serde_json::{Value as Json, json};

use super::*;

/// Everything that was read of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ParsedCalls {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<(String, Json)>,
    pub(super) ids: Vec<String>,
    pub(super) failed: usize,
    /// Failed calls that were told before they were complete.
    pub(super) withdrawn: usize,
}

/// Reads `pieces`; checks that a call's events are in order and its arguments JSON.
pub(super) fn outcome(mut reader: ToolCallParser, pieces: &[&str]) -> ParsedCalls {
    let mut events: Vec<Event> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    events.extend(reader.finish());
    let mut answer = ParsedCalls::default();
    let mut open: Option<(usize, String, String)> = None;
    let mut begun = 0;
    for event in events {
        match event {
            Event::Text(text) => answer.text.push_str(&text),
            Event::Reasoning(text) => answer.reasoning.push_str(&text),
            Event::CallStart { index, id, name } => {
                // A call that failed keeps its number.
                assert_eq!(index, begun);
                begun += 1;
                answer.ids.push(id);
                assert!(open.replace((index, name, String::new())).is_none());
            }
            Event::Arguments { index, piece } => {
                let (at, _, arguments) = open.as_mut().unwrap();
                assert_eq!(*at, index);
                arguments.push_str(&piece);
            }
            Event::CallEnd { index } => {
                let (at, name, arguments) = open.take().unwrap();
                assert_eq!(at, index);
                let arguments: Json = serde_json::from_str(&arguments).unwrap();
                assert!(arguments.is_object(), "{arguments}");
                answer.calls.push((name, arguments));
            }
            Event::CallFailed { text, .. } => {
                assert!(open.take().is_some());
                answer.text.push_str(&text);
                answer.withdrawn += 1;
            }
        }
    }
    assert!(open.is_none(), "a call has no end");
    assert_eq!(reader.complete_calls(), answer.calls.len());
    answer.failed = reader.failed_calls();
    answer
}

/// An answer to a prompt with this end, by a template, and what is read in it.
#[derive(Clone, Debug)]
pub(super) struct Case<T> {
    pub(super) template: T,
    pub(super) prompt: &'static str,
    pub(super) answer: &'static str,
    pub(super) read: ParsedCalls,
}

/// An answer in which nothing is read yet.
pub(super) fn case<T>(template: T, prompt: &'static str, answer: &'static str) -> Case<T> {
    let read = ParsedCalls::default();
    Case {
        template,
        prompt,
        answer,
        read,
    }
}

impl<T> Case<T> {
    pub(super) fn text(mut self, text: &str) -> Self {
        self.read.text = text.to_owned();
        self
    }

    /// All of the answer is text.
    pub(super) fn plain(self) -> Self {
        let answer = self.answer;
        self.text(answer)
    }

    pub(super) fn thought(mut self, text: &str) -> Self {
        self.read.reasoning = text.to_owned();
        self
    }

    pub(super) fn calls(mut self, calls: Vec<(&str, Json)>) -> Self {
        let calls = calls.into_iter();
        self.read.calls = calls.map(|(name, it)| (name.to_owned(), it)).collect();
        self
    }

    pub(super) fn failed(mut self, calls: usize) -> Self {
        self.read.failed = calls;
        self
    }

    /// All of the answer is a call that cannot be read.
    pub(super) fn fails(self) -> Self {
        self.plain().failed(1)
    }
}

pub(super) fn tools() -> Vec<Json> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "flags": {"type": "array", "items": {"type": "boolean"}},
        "code": {"type": "string"},
        "deep": {"type": "object"},
    }});
    ["get_weather", "run", "noop"]
        .map(|name| {
            let function = json!({"name": name, "description": "d", "parameters": parameters});
            json!({"type": "function", "function": function})
        })
        .to_vec()
}

const HERMES: &str = "<tool_call> </think>";
const QWEN: &str = "<tool_call> <function= <parameter= </think>";
const GLM: &str = "<tool_call> <arg_key> </think>";
const KIMI: &str = "<|tool_calls_section_begin|>";
const HARMONY: &str = "<|start|> <|channel|>";
const GEMMA: &str = "<|tool_call> <channel|>";
const MINIMAX: &str = "<minimax:tool_call> </think>";
const V3: &str = "<｜tool▁calls▁begin｜> ```json";
const V31: &str = "<｜tool▁calls▁begin｜> </think>";
const DSML: &str = "<｜DSML｜function_calls> </think>";
const V4: &str = "dsml_token tool_calls> </think>";
const MISTRAL: &str = "[TOOL_CALLS] [/THINK]";
const LLAMA: &str = "<|python_tag|>";

fn weather() -> (&'static str, Json) {
    ("get_weather", json!({"city": "Ham\"burg\n", "days": 2}))
}

fn hermes_texts() -> Vec<Case<&'static str>> {
    vec![
        case(HERMES, "", "Hello.\n").plain(),
        case(HERMES, "", "<think>\nhm\n</think>\n\nHi")
            .text("Hi")
            .thought("hm"),
        case(
            HERMES,
            "<think>\n",
            "hm <tool_call>{}</tool_call></think>Hi",
        )
        .text("Hi")
        .thought("hm <tool_call>{}</tool_call>"),
        case(HERMES, "<think>\n\n</think>\n\n", "Hi <think>").plain(),
        case(
            HERMES,
            "",
            "a <tool_call>{\"name\": \"run\", \"arguments\": {\"x\" 1}}</tool_call> b",
        )
        .fails(),
        case(
            HERMES,
            "",
            "<tool_call>{\"name\": \"run\", \"arguments\": {\"x\": 1",
        )
        .fails(),
        case(HERMES, "", "1 < 2 <tool").plain(),
    ]
}

fn hermes_calls() -> Vec<Case<&'static str>> {
    vec![
        case(
            HERMES,
            "",
            "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \
             \"Ham\\\"burg\n\", \"days\": 2}}\n</tool_call>",
        )
        .text("I look.")
        .calls(vec![weather()]),
        case(
            HERMES,
            "",
            "<tool_call>{\"arguments\": {\"days\": 1}, \"name\": \"run\"}</tool_call>\
             \n<tool_call>\n{\"name\": \"noop\"}\n</tool_call>\n",
        )
        .calls(vec![("run", json!({"days": 1})), ("noop", json!({}))]),
        case(
            HERMES,
            "",
            "<tool_call>{\"name\": \"run\", \"arguments\": \"{\\\"days\\\": 1}\"}",
        )
        .calls(vec![("run", json!({"days": 1}))]),
    ]
}

fn qwen_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            QWEN,
            "<think>\n",
            "why\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n\
             Ham\"burg\n\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\
             \n</tool_call>",
        )
        .thought("why")
        .calls(vec![weather()]),
        case(
            QWEN,
            "",
            "<function=run>\n<parameter=code>\nif a < b:\n    <x>\n</parameter>\n<parameter=flag\
             s>\n[true, False]\n</parameter>\n</function>\n</tool_call>\n",
        )
        .calls(vec![(
            "run",
            json!({"code": "if a < b:\n    <x>", "flags": "[true, False]"}),
        )]),
        case(
            QWEN,
            "",
            "<tool_call>\n<function=noop>\n</function>\n<function=noop></function></tool_call> \
             ok",
        )
        .text("ok")
        .calls(vec![("noop", json!({})), ("noop", json!({}))]),
        case(
            QWEN,
            "",
            "<tool_call>\n<function=run>\nwhat?</function></tool_call>",
        )
        .fails(),
    ]
}

fn glm_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            GLM,
            "",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ham\"burg\n\
             </arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        )
        .calls(vec![weather()]),
        case(
            GLM,
            "",
            "so<tool_call>noop</tool_call><tool_call>run<arg_key>deep</arg_key><arg_value>\
             {\"a\": []}</arg_value></tool_call>",
        )
        .text("so")
        .calls(vec![
            ("noop", json!({})),
            ("run", json!({"deep": {"a": []}})),
        ]),
    ]
}

fn marker_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            MINIMAX,
            "<think>\n",
            "t</think>\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter \
             name=\"city\">Ham\"burg\n</parameter>\n<parameter name=\"days\">2</parameter>\
             \n</invoke>\n<invoke name=\"noop\">\n</invoke>\n</minimax:tool_call>",
        )
        .thought("t")
        .calls(vec![weather(), ("noop", json!({}))]),
        case(
            DSML,
            "",
            "Go\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜\
             parameter name=\"city\" string=\"true\">Ham\"burg\n</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜\
             DSML｜invoke>\n</｜DSML｜function_calls>",
        )
        .text("Go")
        .calls(vec![weather()]),
        case(
            V4,
            "",
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"noop\">\n</｜DSML｜invoke>\n</｜DSML｜\
             tool_calls>",
        )
        .calls(vec![("noop", json!({}))]),
        case(
            KIMI,
            "",
            "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_c\
             all_argument_begin|>{\"city\": \"Ham\\\"burg\\n\", \"days\": 2}<|tool_call_end|>\
             <|tool_call_begin|>functions.noop:1<|tool_call_argument_begin|>{}<|tool_call_end|>\
             <|tool_calls_section_end|>",
        )
        .text("Sure.")
        .calls(vec![weather(), ("noop", json!({}))]),
        case(
            V3,
            "",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n\
             ```json\n{\"city\": \"Ham\\\"burg\\n\", \"days\": 2}\n```<｜tool▁call▁end｜\
             >\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>noop\n```json\n{}\n```<｜tool▁call▁end｜\
             ><｜tool▁calls▁end｜>",
        )
        .calls(vec![weather(), ("noop", json!({}))]),
    ]
}

fn v31_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            V31,
            "<think>",
            "x</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>\
             {\"city\": \"Ham\\\"burg\\n\", \"days\": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜\
             >",
        )
        .thought("x")
        .calls(vec![weather()]),
        case(
            V31,
            "",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>noop<｜tool▁sep｜>[]<｜tool▁call▁end｜\
             ><｜tool▁calls▁end｜>",
        )
        .fails(),
    ]
}

fn mistral_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            MISTRAL,
            "",
            "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ham\\\"burg\\n\
             \", \"days\": 2}}, {\"name\": \"noop\", \"arguments\": {}, \"id\": \"abcdefghi\"}]",
        )
        .calls(vec![weather(), ("noop", json!({}))]),
        case(
            MISTRAL,
            "",
            "[THINK]a[/THINK]b[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Ham\\\"burg\\n\", \
             \"days\": 2}[TOOL_CALLS]noop[CALL_ID]123456789[ARGS]{}",
        )
        .text("b")
        .thought("a")
        .calls(vec![weather(), ("noop", json!({}))]),
    ]
}

fn llama_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            LLAMA,
            "",
            "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Ham\\\"burg\\n\", \
             \"days\": 2}}",
        )
        .calls(vec![weather()]),
        case(
            LLAMA,
            "",
            "<|python_tag|>{\"type\": \"function\", \"name\": \"noop\", \"parameters\": \
             {}}; {\"name\": \"noop\", \"parameters\": null}",
        )
        .calls(vec![("noop", json!({})), ("noop", json!({}))]),
        case(LLAMA, "", "{\"answer\": 1}").plain(),
        case(LLAMA, "", "{\"name\": \"Ada\", \"age\": 1}").plain(),
        case(LLAMA, "", "See {\"name\": \"noop\", \"parameters\": {}}").plain(),
    ]
}

fn gemma_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            GEMMA,
            "",
            "<|channel>thought\nhm<channel|>I look.<|tool_call>call:get_weather{city:<|\"|>\
             Ham\"burg\n<|\"|>,days:2}<tool_call|><|tool_call>call:run{deep:{a:[1,-2.5,\
             true,null,<|\"|><|\"|>]},code:<|\"|>{x:1}<|\"|>}<tool_call|>",
        )
        .text("I look.")
        .thought("hm")
        .calls(vec![
            weather(),
            (
                "run",
                json!({"deep": {"a": [1, -2.5, true, null, ""]}, "code": "{x:1}"}),
            ),
        ]),
        case(GEMMA, "", "<|tool_call>call:run{a:}<tool_call|>.").fails(),
    ]
}

fn harmony_cases() -> Vec<Case<&'static str>> {
    vec![
        case(
            HARMONY,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Need <|call|>? no<|end|><|start|>assistant<|channel|>\
             commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Ham\\\"burg\\n\", \
             \"days\": 2}<|call|>",
        )
        .text("? noWait.")
        .thought("Need")
        .calls(vec![weather()]),
        case(
            HARMONY,
            "<|start|>assistant",
            "<|channel|>final<|message|>Hi <b>",
        )
        .text("Hi <b>"),
        case(
            HARMONY,
            "<|start|>assistant",
            " to=functions.noop<|channel|>commentary json<|message|>{}",
        )
        .calls(vec![("noop", json!({}))]),
        case(
            HARMONY,
            "<|start|>assistant<|channel|>final<|message|>",
            "Hi<|return|>",
        )
        .text("Hi"),
        case(
            HARMONY,
            "<|start|>assistant",
            "<|channel|>commentary to=functions.run<|message|>oops<|call|>",
        )
        .fails(),
    ]
}

pub(super) fn cases() -> Vec<Case<&'static str>> {
    [
        hermes_texts(),
        hermes_calls(),
        qwen_cases(),
        glm_cases(),
        marker_cases(),
        v31_cases(),
        mistral_cases(),
        llama_cases(),
        gemma_cases(),
        harmony_cases(),
    ]
    .concat()
}

#[test]
fn answers_of_each_family() {
    for case in cases() {
        for holds_calls in [false, true] {
            let options = ReaderOptions {
                holds_calls,
                id_seed: 7,
            };
            let syntax = Syntax::of_source(case.template);
            let reader = syntax.reader_after(case.prompt, &tools(), options);
            let mut read = outcome(reader, &[case.answer]);
            assert!(!holds_calls || read.withdrawn == 0, "{read:?}");
            (read.ids, read.withdrawn) = (Vec::new(), 0);
            assert_eq!(read, case.read, "{}", case.answer);
        }
    }
}

#[test]
fn ids_have_the_form_of_the_family() {
    let ids = |template, answer| {
        let syntax = Syntax::of_source(template);
        let reader = syntax.reader_after("", &tools(), ReaderOptions::default());
        outcome(reader, &[answer]).ids
    };
    let hermes =
        "<tool_call>{\"name\": \"noop\"}</tool_call><tool_call>{\"name\": \"noop\"}</tool_call>";
    let made = ids(HERMES, hermes);
    assert!(
        made.iter()
            .all(|id| id.starts_with("call_") && id.len() == 29),
        "{made:?}"
    );
    assert_ne!(made[0], made[1]);
    let mistral = ids(
        MISTRAL,
        "[TOOL_CALLS]noop[ARGS]{}[TOOL_CALLS]noop[CALL_ID]123456789[ARGS]{}",
    );
    assert_eq!((mistral[0].len(), mistral[1].as_str()), (9, "123456789"));
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.noop:3\
                <|tool_call_argument_begin|>{}<|tool_call_end|>";
    assert_eq!(ids(KIMI, kimi), ["functions.noop:3"]);
}

#[test]
fn without_tools_calls_are_text() {
    let syntax = Syntax::of_source(HERMES);
    let mut reader = syntax.reader_after("", &[], ReaderOptions::default());
    let answer = "<think>a</think><tool_call>{\"name\": \"noop\"}</tool_call>";
    let mut events = reader.push(answer);
    events.extend(reader.finish());
    let expected = "<tool_call>{\"name\": \"noop\"}</tool_call>";
    assert_eq!(
        events,
        [Event::Reasoning("a".into()), Event::Text(expected.into())]
    );
}

#[test]
fn the_name_comes_before_the_arguments_are_complete() {
    let syntax = Syntax::of_source(HERMES);
    let mut reader = syntax.reader_after("", &tools(), ReaderOptions::default());
    let events = reader.push("<tool_call>{\"name\": \"run\", \"arguments\": {\"code\": \"abc");
    let pieces: Vec<&Event> = events.iter().skip(1).collect();
    assert!(matches!(&events[0], Event::CallStart { name, .. } if name == "run"));
    assert_eq!(
        pieces,
        [&Event::Arguments {
            index: 0,
            piece: "{\"code\": \"abc".into()
        }]
    );
}
