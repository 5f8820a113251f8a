//! Output of a model, read as reasoning, calls and text in each family's form: the same however
//! it is cut, and arguments are JSON objects.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use paceline_fuzz::{FAMILIES, tokenizer, tools};
use paceline_text::chat::ChatTemplate;
use paceline_text::tokenizer::Tokenizer;
use paceline_text::tools::{Event, ReaderOptions, Syntax};
use serde_json::Value;

static READY: LazyLock<(Tokenizer, Vec<Syntax>)> = LazyLock::new(|| {
    let syntax = |text: &&str| Syntax::of(&ChatTemplate::new(text).expect("plain text"));
    (tokenizer(), FAMILIES.iter().map(syntax).collect())
});

/// Text, reasoning, and the calls with their arguments.
#[derive(Debug, Default, PartialEq)]
struct Read {
    text: String,
    reasoning: String,
    calls: Vec<(String, String)>,
}

fn read<'a>(syntax: &Syntax, pieces: impl Iterator<Item = &'a str>, holds_calls: bool) -> Read {
    let options = ReaderOptions {
        holds_calls,
        id_seed: 7,
    };
    let mut reader = syntax.reader(&READY.0, &[], &tools(), options);
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
            Event::CallFailed { text, .. } => {
                assert!(!holds_calls, "no call is told before it is complete");
                read.calls.pop();
                read.text += &text;
            }
        }
    }
    read
}

fuzz_target!(|text: &str| {
    for syntax in &READY.1 {
        for holds_calls in [true, false] {
            let whole = read(syntax, std::iter::once(text), holds_calls);
            let pieces = text.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
            assert_eq!(whole, read(syntax, pieces, holds_calls));
        }
    }
});
