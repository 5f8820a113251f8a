//! Responses of each family, whole and in fragments.

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;

/// Everything that was read of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
struct ParsedCalls {
    text: String,
    reasoning: String,
    calls: Vec<(String, Json)>,
    ids: Vec<String>,
    failed: usize,
}

fn tools() -> Vec<Json> {
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

/// Reads `pieces` as the answer to a prompt that ends with `prompt`; checks that a call's events
/// are in order and its arguments JSON.
fn read(template: &str, prompt: &str, pieces: &[&str], holds_calls: bool) -> ParsedCalls {
    let options = ReaderOptions {
        holds_calls,
        id_seed: 7,
    };
    let syntax = Syntax::of_source(template);
    let mut reader = syntax.reader_after(prompt, &tools(), options);
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
                assert!(!holds_calls && open.take().is_some());
                answer.text.push_str(&text);
            }
        }
    }
    assert!(open.is_none(), "a call has no end");
    assert_eq!(reader.complete_calls(), answer.calls.len());
    answer.failed = reader.failed_calls();
    answer
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

/// A template's markers, the end of a prompt, an answer, and the text, reasoning, calls and
/// failures in it.
type Case = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    Vec<(&'static str, Json)>,
    usize,
);

fn weather() -> (&'static str, Json) {
    ("get_weather", json!({"city": "Ham\"burg\n", "days": 2}))
}

fn hermes_texts() -> Vec<Case> {
    let none = Vec::new;
    vec![
        (HERMES, "", "Hello.\n", "Hello.\n", "", none(), 0),
        (
            HERMES,
            "",
            "<think>\nhm\n</think>\n\nHi",
            "Hi",
            "hm",
            none(),
            0,
        ),
        (
            HERMES,
            "<think>\n",
            "hm <tool_call>{}</tool_call></think>Hi",
            "Hi",
            "hm <tool_call>{}</tool_call>",
            none(),
            0,
        ),
        (
            HERMES,
            "<think>\n\n</think>\n\n",
            "Hi <think>",
            "Hi <think>",
            "",
            none(),
            0,
        ),
        (
            HERMES,
            "",
            "a <tool_call>{\"name\": \"run\", \"arguments\": {\"x\" 1}}</tool_call> b",
            "a <tool_call>{\"name\": \"run\", \"arguments\": {\"x\" 1}}</tool_call> b",
            "",
            none(),
            1,
        ),
        (
            HERMES,
            "",
            "<tool_call>{\"name\": \"run\", \"arguments\": {\"x\": 1",
            "<tool_call>{\"name\": \"run\", \"arguments\": {\"x\": 1",
            "",
            none(),
            1,
        ),
        (HERMES, "", "1 < 2 <tool", "1 < 2 <tool", "", none(), 0),
    ]
}

fn hermes_calls() -> Vec<Case> {
    vec![
        (
            HERMES,
            "",
            "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ham\\\"burg\n\", \"days\": 2}}\n</tool_call>",
            "I look.",
            "",
            vec![weather()],
            0,
        ),
        (
            HERMES,
            "",
            "<tool_call>{\"arguments\": {\"days\": 1}, \"name\": \"run\"}</tool_call>\n<tool_call>\n{\"name\": \"noop\"}\n</tool_call>\n",
            "",
            "",
            vec![("run", json!({"days": 1})), ("noop", json!({}))],
            0,
        ),
        (
            HERMES,
            "",
            "<tool_call>{\"name\": \"run\", \"arguments\": \"{\\\"days\\\": 1}\"}",
            "",
            "",
            vec![("run", json!({"days": 1}))],
            0,
        ),
    ]
}

fn qwen_cases() -> Vec<Case> {
    let none = Vec::new;
    vec![
        (
            QWEN,
            "<think>\n",
            "why\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nHam\"burg\n\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            "",
            "why",
            vec![weather()],
            0,
        ),
        (
            QWEN,
            "",
            "<function=run>\n<parameter=code>\nif a < b:\n    <x>\n</parameter>\n<parameter=flags>\n[true, False]\n</parameter>\n</function>\n</tool_call>\n",
            "",
            "",
            vec![(
                "run",
                json!({"code": "if a < b:\n    <x>", "flags": "[true, False]"}),
            )],
            0,
        ),
        (
            QWEN,
            "",
            "<tool_call>\n<function=noop>\n</function>\n<function=noop></function></tool_call> ok",
            "ok",
            "",
            vec![("noop", json!({})), ("noop", json!({}))],
            0,
        ),
        (
            QWEN,
            "",
            "<tool_call>\n<function=run>\nwhat?</function></tool_call>",
            "<tool_call>\n<function=run>\nwhat?</function></tool_call>",
            "",
            none(),
            1,
        ),
    ]
}

fn glm_cases() -> Vec<Case> {
    vec![
        (
            GLM,
            "",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ham\"burg\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            "",
            "",
            vec![weather()],
            0,
        ),
        (
            GLM,
            "",
            "so<tool_call>noop</tool_call><tool_call>run<arg_key>deep</arg_key><arg_value>{\"a\": []}</arg_value></tool_call>",
            "so",
            "",
            vec![("noop", json!({})), ("run", json!({"deep": {"a": []}}))],
            0,
        ),
    ]
}

fn minimax_cases() -> Vec<Case> {
    vec![(
        MINIMAX,
        "<think>\n",
        "t</think>\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Ham\"burg\n</parameter>\n<parameter name=\"days\">2</parameter>\n</invoke>\n<invoke name=\"noop\">\n</invoke>\n</minimax:tool_call>",
        "",
        "t",
        vec![weather(), ("noop", json!({}))],
        0,
    )]
}

fn dsml_cases() -> Vec<Case> {
    vec![(
        DSML,
        "",
        "Go\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Ham\"burg\n</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Go",
        "",
        vec![weather()],
        0,
    )]
}

fn v4_cases() -> Vec<Case> {
    vec![(
        V4,
        "",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"noop\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        "",
        vec![("noop", json!({}))],
        0,
    )]
}

fn kimi_cases() -> Vec<Case> {
    vec![(
        KIMI,
        "",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Ham\\\"burg\\n\", \"days\": 2}<|tool_call_end|><|tool_call_begin|>functions.noop:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Sure.",
        "",
        vec![weather(), ("noop", json!({}))],
        0,
    )]
}

fn v3_cases() -> Vec<Case> {
    vec![(
        V3,
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Ham\\\"burg\\n\", \"days\": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>noop\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        vec![weather(), ("noop", json!({}))],
        0,
    )]
}

fn v31_cases() -> Vec<Case> {
    let none: Vec<(&'static str, Json)> = Vec::new();
    vec![
        (
            V31,
            "<think>",
            "x</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Ham\\\"burg\\n\", \"days\": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            "x",
            vec![weather()],
            0,
        ),
        (
            V31,
            "",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>noop<｜tool▁sep｜>[]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>noop<｜tool▁sep｜>[]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            none.clone(),
            1,
        ),
    ]
}

fn mistral_cases() -> Vec<Case> {
    vec![
        (
            MISTRAL,
            "",
            "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ham\\\"burg\\n\", \"days\": 2}}, {\"name\": \"noop\", \"arguments\": {}, \"id\": \"abcdefghi\"}]",
            "",
            "",
            vec![weather(), ("noop", json!({}))],
            0,
        ),
        (
            MISTRAL,
            "",
            "[THINK]a[/THINK]b[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Ham\\\"burg\\n\", \"days\": 2}[TOOL_CALLS]noop[CALL_ID]123456789[ARGS]{}",
            "b",
            "a",
            vec![weather(), ("noop", json!({}))],
            0,
        ),
    ]
}

fn llama_cases() -> Vec<Case> {
    let none: Vec<(&'static str, Json)> = Vec::new();
    vec![
        (
            LLAMA,
            "",
            "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Ham\\\"burg\\n\", \"days\": 2}}",
            "",
            "",
            vec![weather()],
            0,
        ),
        (
            LLAMA,
            "",
            "<|python_tag|>{\"type\": \"function\", \"name\": \"noop\", \"parameters\": {}}; {\"name\": \"noop\", \"parameters\": null}",
            "",
            "",
            vec![("noop", json!({})), ("noop", json!({}))],
            0,
        ),
        (
            LLAMA,
            "",
            "{\"answer\": 1}",
            "{\"answer\": 1}",
            "",
            none.clone(),
            0,
        ),
        (
            LLAMA,
            "",
            "{\"name\": \"Ada\", \"age\": 1}",
            "{\"name\": \"Ada\", \"age\": 1}",
            "",
            none.clone(),
            0,
        ),
        (
            LLAMA,
            "",
            "See {\"name\": \"noop\", \"parameters\": {}}",
            "See {\"name\": \"noop\", \"parameters\": {}}",
            "",
            none.clone(),
            0,
        ),
    ]
}

fn gemma_cases() -> Vec<Case> {
    let none: Vec<(&'static str, Json)> = Vec::new();
    vec![
        (
            GEMMA,
            "",
            "<|channel>thought\nhm<channel|>I look.<|tool_call>call:get_weather{city:<|\"|>Ham\"burg\n<|\"|>,days:2}<tool_call|><|tool_call>call:run{deep:{a:[1,-2.5,true,null,<|\"|><|\"|>]},code:<|\"|>{x:1}<|\"|>}<tool_call|>",
            "I look.",
            "hm",
            vec![
                weather(),
                (
                    "run",
                    json!({"deep": {"a": [1, -2.5, true, null, ""]}, "code": "{x:1}"}),
                ),
            ],
            0,
        ),
        (
            GEMMA,
            "",
            "<|tool_call>call:run{a:}<tool_call|>.",
            "<|tool_call>call:run{a:}<tool_call|>.",
            "",
            none.clone(),
            1,
        ),
    ]
}

fn harmony_cases() -> Vec<Case> {
    let none: Vec<(&'static str, Json)> = Vec::new();
    vec![
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Need <|call|>? no<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Ham\\\"burg\\n\", \"days\": 2}<|call|>",
            "? noWait.",
            "Need",
            vec![weather()],
            0,
        ),
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>final<|message|>Hi <b>",
            "Hi <b>",
            "",
            none.clone(),
            0,
        ),
        (
            HARMONY,
            "<|start|>assistant",
            " to=functions.noop<|channel|>commentary json<|message|>{}",
            "",
            "",
            vec![("noop", json!({}))],
            0,
        ),
        (
            HARMONY,
            "<|start|>assistant<|channel|>final<|message|>",
            "Hi<|return|>",
            "Hi",
            "",
            none.clone(),
            0,
        ),
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>commentary to=functions.run<|message|>oops<|call|>",
            "<|channel|>commentary to=functions.run<|message|>oops<|call|>",
            "",
            none,
            1,
        ),
    ]
}

fn cases() -> Vec<Case> {
    [
        hermes_texts(),
        hermes_calls(),
        qwen_cases(),
        glm_cases(),
        minimax_cases(),
        dsml_cases(),
        v4_cases(),
        kimi_cases(),
        v3_cases(),
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
    for (template, prompt, answer, text, reasoning, calls, failed) in cases() {
        for holds_calls in [false, true] {
            let read = read(template, prompt, &[answer], holds_calls);
            assert_eq!(read.text, text, "{answer}");
            assert_eq!(read.reasoning, reasoning, "{answer}");
            let expected: Vec<(String, Json)> = calls
                .iter()
                .map(|(name, json)| ((*name).to_owned(), json.clone()))
                .collect();
            assert_eq!(read.calls, expected, "{answer}");
            assert_eq!(read.failed, failed, "{answer}");
        }
    }
}

#[test]
fn ids_have_the_form_of_the_family() {
    let ids = |template, answer| read(template, "", &[answer], false).ids;
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn the_same_whatever_the_pieces(
        which in 0..cases().len(),
        cuts in prop::collection::vec(0..400usize, 0..40),
        holds_calls: bool,
    ) {
        let (template, prompt, answer, ..) = cases()[which].clone();
        let whole = |at: &usize| answer.is_char_boundary(*at);
        let mut cuts: Vec<usize> = cuts.into_iter().filter(whole).collect();
        cuts.extend([0, answer.len()]);
        cuts.retain(|at| *at <= answer.len());
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|w| &answer[w[0]..w[1]]).collect();
        let whole = read(template, prompt, &[answer], holds_calls);
        prop_assert_eq!(read(template, prompt, &pieces, holds_calls), whole);
    }

    /// Pieces of markup in any order never panic, lose nothing but markers, and do not depend on
    /// the cuts.
    #[test]
    fn soups_of_markup(
        template in prop::sample::select(vec![
            HERMES, QWEN, GLM, KIMI, HARMONY, GEMMA, MINIMAX, V3, V31, DSML, MISTRAL, LLAMA,
        ]),
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "{\"name\": \"run\", \"arguments\": {", "}}", "}", "{", "<think>",
            "</think>", "<function=run>", "<parameter=code>", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
            "<arg_value>", "</arg_value>", "run", "\n", " ", "a", "\"", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
            "functions.run:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
            "<|channel|>", "analysis", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "to=functions.run", "<|tool_call>",
            "call:run{", "<|\"|>", "<tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", ",", ":", "1", "<|python_tag|>",
            "<minimax:tool_call>", "<invoke name=\"run\">", "</invoke>", "</minimax:tool_call>",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "<｜tool▁call▁end｜>",
        ]), 0..14),
        cut in 0..200usize,
        holds_calls: bool,
    ) {
        let text = parts.concat();
        let cut = (0..=cut.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let whole = read(template, "", &[&text], holds_calls);
        let (front, back) = text.split_at(cut);
        prop_assert_eq!(&read(template, "", &[front, back], holds_calls), &whole);
        let one_by_one: Vec<String> = text.chars().map(String::from).collect();
        let one_by_one: Vec<&str> = one_by_one.iter().map(String::as_str).collect();
        prop_assert_eq!(&read(template, "", &one_by_one, holds_calls), &whole);
    }
}
