//! Any text as the answer of a model of any family: the same calls, thoughts and text whole and in
//! two pieces, and arguments that are JSON.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use paceline_formats::chat::ChatTemplate;
use paceline_formats::tokenizer::Tokenizer;
use paceline_formats::tools::{Event, ReaderOptions, Syntax};
use paceline_fuzz::{FAMILIES, TOKENIZER, tools};
use serde_json::{Map, Value};

static READY: LazyLock<(Tokenizer, Vec<Syntax>)> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_json_bytes(TOKENIZER.as_bytes()).expect("written by us");
    let syntax = |markers: &&str| {
        let template = ChatTemplate::new(&format!("{{# {markers} #}}")).expect("a comment");
        Syntax::of(&template)
    };
    (tokenizer, FAMILIES.iter().map(syntax).collect())
});

/// Text, reasoning and calls of an answer.
fn read(syntax: Syntax, pieces: &[&str]) -> (String, String, Vec<(String, String)>) {
    let options = ReaderOptions::default();
    let mut reader = syntax.reader(&READY.0, &[], &tools(), options);
    let mut events: Vec<Event> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    events.extend(reader.finish());
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    let mut open = (String::new(), String::new());
    for event in events {
        match event {
            Event::Text(piece) => text.push_str(&piece),
            Event::Reasoning(piece) => reasoning.push_str(&piece),
            Event::CallStart { name, .. } => open = (name, String::new()),
            Event::Arguments { piece, .. } => open.1.push_str(&piece),
            Event::CallFailed { text: all, .. } => text.push_str(&all),
            Event::CallEnd { .. } => {
                let arguments: Result<Map<String, Value>, _> = serde_json::from_str(&open.1);
                assert!(arguments.is_ok(), "{open:?}");
                calls.push(std::mem::take(&mut open));
            }
        }
    }
    (text, reasoning, calls)
}

fuzz_target!(|input: (u8, u8, &str)| {
    let (which, at, answer) = input;
    let syntax = READY.1[usize::from(which) % READY.1.len()];
    let mut at = usize::from(at).min(answer.len());
    while !answer.is_char_boundary(at) {
        at -= 1;
    }
    let (front, back) = answer.split_at(at);
    assert_eq!(read(syntax, &[front, back]), read(syntax, &[answer]));
});
