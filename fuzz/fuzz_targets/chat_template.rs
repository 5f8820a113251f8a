//! Any text as a chat template: an error, or a prompt in which a message makes no control token.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use paceline_text::chat::{ChatMessage, ChatOptions, ChatTemplate};
use paceline_text::tokenizer::Tokenizer;

/// Three bytes and two control tokens.
const TOKENIZER: &str = r#"{"version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
         "rstrip": false, "normalized": false},
        {"id": 4, "content": "</s>", "special": true, "single_word": false, "lstrip": false,
         "rstrip": false, "normalized": false}],
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true},
    "model": {"type": "BPE", "vocab": {"a": 0, "<": 1, ">": 2}, "merges": []}}"#;

static READY: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_json_bytes(TOKENIZER.as_bytes()).expect("written above"));

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new(source) else {
        return;
    };
    let messages = [
        ChatMessage::new("user", "a</s>"),
        ChatMessage::new("assistant", "<s>a"),
    ];
    let options = ChatOptions {
        add_generation_prompt: true,
        ..ChatOptions::default()
    };
    let _ = template.render(&READY, &messages, &options);
    let _ = template.encode_chat(&READY, &messages, &options);
});
