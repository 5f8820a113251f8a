//! What a model writes, read as reasoning, calls and text in each family's form: the same however
//! it is cut, and arguments are JSON objects.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use paceline_formats::chat::ChatTemplate;
use paceline_formats::tokenizer::Tokenizer;
use paceline_formats::tools::{Event, ReaderOptions, Syntax};
use serde_json::{Value, json};

/// Texts by which the families are known.
const MARKERS: [&str; 13] = [
    "<think></think><tool_call>",
    "<|tool_calls_section_begin|>",
    "<minimax:tool_call>",
    "｜DSML｜",
    "<｜tool▁calls▁begin｜>```json",
    "<｜tool▁calls▁begin｜>",
    "<|start|><|channel|>",
    "<|tool_call>",
    "<tool_call><arg_key>",
    "<tool_call><function=<parameter=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "no markers at all",
];

static READY: LazyLock<(Tokenizer, Vec<Syntax>, [Value; 1])> = LazyLock::new(|| {
    let syntax = |text: &&str| Syntax::of(&ChatTemplate::new(text).expect("plain text"));
    let tool = json!({"type": "function", "function": {"name": "look", "parameters":
        {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}});
    let all = MARKERS.iter().map(syntax).collect();
    (paceline_fuzz::tokenizer(), all, [tool])
});

/// Text, reasoning, and the calls with their arguments.
#[derive(Debug, Default, PartialEq)]
struct Read {
    text: String,
    reasoning: String,
    calls: Vec<(String, String)>,
}

fn read<'a>(syntax: &Syntax, pieces: impl Iterator<Item = &'a str>) -> Read {
    let (tokenizer, _, tools) = &*READY;
    let options = ReaderOptions {
        holds_calls: true,
        id_seed: 7,
    };
    let mut reader = syntax.reader(tokenizer, &[], tools, options);
    let mut events: Vec<Event> = pieces.flat_map(|piece| reader.push(piece)).collect();
    events.extend(reader.finish());
    let mut read = Read::default();
    for event in events {
        match event {
            Event::Text(text) => read.text += &text,
            Event::Reasoning(text) => read.reasoning += &text,
            Event::CallStart { name, .. } => read.calls.push((name, String::new())),
            Event::Arguments { index, piece } => read.calls[index].1 += &piece,
            Event::CallEnd { index } => {
                let arguments = serde_json::from_str(&read.calls[index].1);
                assert!(
                    matches!(arguments, Ok(Value::Object(_))),
                    "{:?}",
                    read.calls[index]
                );
            }
            Event::CallFailed { .. } => panic!("no call is told before it is complete"),
        }
    }
    read
}

fuzz_target!(|text: &str| {
    for syntax in &READY.1 {
        let whole = read(syntax, std::iter::once(text));
        let cut = read(
            syntax,
            text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()),
        );
        assert_eq!(whole, cut);
    }
});
