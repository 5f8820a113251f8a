//! What several fuzz targets share.

use serde_json::{Value, json};

/// Three bytes and two control tokens.
pub const TOKENIZER: &str = r#"{"version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
         "rstrip": false, "normalized": false},
        {"id": 4, "content": "</s>", "special": true, "single_word": false, "lstrip": false,
         "rstrip": false, "normalized": false}],
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true},
    "model": {"type": "BPE", "vocab": {"a": 0, "<": 1, ">": 2}, "merges": []}}"#;

/// Markers by which the families' chat templates are known.
pub const FAMILIES: [&str; 13] = [
    "<tool_call> </think>",
    "<tool_call> <function= <parameter= </think>",
    "<tool_call> <arg_key> </think>",
    "<|tool_calls_section_begin|>",
    "<|start|> <|channel|>",
    "<|tool_call> <channel|>",
    "<minimax:tool_call> </think>",
    "<｜tool▁calls▁begin｜> ```json",
    "<｜tool▁calls▁begin｜> </think>",
    "<｜DSML｜function_calls> </think>",
    "[TOOL_CALLS] [/THINK]",
    "[TOOL_CALLS] [ARGS]",
    "<|python_tag|>",
];

/// Two tools.
pub fn tools() -> Vec<Value> {
    let tool = |name| {
        let properties = json!({
            "text": {"type": "string"}, "number": {"type": "integer"}, "inner": {"type": "object"},
        });
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    ["look", "run_it"].map(tool).to_vec()
}
