//! Every field's edges, by table: the name, code and text of what is refused.

use crate::fields::merge;
use crate::rig::{CHAT, COMPLETE, Rig, refusal};

/// Fields, and the code, param and a part of the message of their refusal.
type Bad = (&'static str, &'static str, &'static str, &'static str);

const BOTH: &[Bad] = &[
    (
        r#""temperature":2.1"#,
        "invalid_value",
        "temperature",
        "is 2.1, expected 0 to 2",
    ),
    (
        r#""temperature":-0.1"#,
        "invalid_value",
        "temperature",
        "is -0.1, expected 0 to 2",
    ),
    (
        r#""temperature":"1""#,
        "invalid_type",
        "temperature",
        "expected a number",
    ),
    (
        r#""temperature":[]"#,
        "invalid_type",
        "temperature",
        "is [], expected a number",
    ),
    (
        r#""top_p":1.01"#,
        "invalid_value",
        "top_p",
        "expected 0 to 1",
    ),
    (r#""top_p":-1"#, "invalid_value", "top_p", "expected 0 to 1"),
    (
        r#""top_k":-2"#,
        "invalid_value",
        "top_k",
        "is -2, expected -1 to",
    ),
    (
        r#""top_k":1.5"#,
        "invalid_type",
        "top_k",
        "expected an integer",
    ),
    (
        r#""min_p":2"#,
        "invalid_value",
        "min_p",
        "is 2, expected 0 to 1",
    ),
    (
        r#""presence_penalty":3"#,
        "invalid_value",
        "presence_penalty",
        "is 3, expected -2 to 2",
    ),
    (
        r#""frequency_penalty":-3"#,
        "invalid_value",
        "frequency_penalty",
        "expected -2 to 2",
    ),
    (
        r#""repetition_penalty":0"#,
        "invalid_value",
        "repetition_penalty",
        "expected 0.001 to 1000",
    ),
    (
        r#""seed":1.5"#,
        "invalid_type",
        "seed",
        "is 1.5, expected an integer",
    ),
    (
        r#""seed":1e300"#,
        "invalid_value",
        "seed",
        "is 1e+300, expected",
    ),
    (
        r#""seed":9223372036854775808"#,
        "invalid_value",
        "seed",
        "expected",
    ),
    (
        r#""seed":-9223372036854775809"#,
        "invalid_value",
        "seed",
        "expected",
    ),
    (r#""n":0"#, "invalid_value", "n", "is 0, expected 1 to 16"),
    (r#""n":17"#, "invalid_value", "n", "is 17, expected 1 to 16"),
    (r#""n":"2""#, "invalid_type", "n", "expected an integer"),
    (
        r#""max_tokens":-1"#,
        "invalid_value",
        "max_tokens",
        "is -1, expected",
    ),
    (
        r#""max_tokens":1e10"#,
        "invalid_value",
        "max_tokens",
        "expected",
    ),
    (
        r#""stop":"""#,
        "invalid_value",
        "stop[0]",
        "0 characters, expected 1 to 1024",
    ),
    (
        r#""stop":["a",""]"#,
        "invalid_value",
        "stop[1]",
        "0 characters",
    ),
    (
        r#""stop":5"#,
        "invalid_type",
        "stop",
        "a string or an array of strings",
    ),
    (
        r#""stop":[5]"#,
        "invalid_type",
        "stop[0]",
        "is 5, expected a string",
    ),
    (
        r#""logit_bias":[]"#,
        "invalid_type",
        "logit_bias",
        "an object",
    ),
    (
        r#""logit_bias":{"258":1}"#,
        "invalid_value",
        "logit_bias.258",
        "from 0 to 257",
    ),
    (
        r#""logit_bias":{"-1":1}"#,
        "invalid_value",
        "logit_bias.-1",
        "a token id",
    ),
    (
        r#""logit_bias":{"01":1}"#,
        "invalid_value",
        "logit_bias.01",
        "a token id",
    ),
    (
        r#""logit_bias":{"a":1}"#,
        "invalid_value",
        "logit_bias.a",
        "a token id",
    ),
    (
        r#""logit_bias":{"1":101}"#,
        "invalid_value",
        "logit_bias.1",
        "is 101, expected -100 to 100",
    ),
    (
        r#""logit_bias":{"1":"1"}"#,
        "invalid_type",
        "logit_bias.1",
        "expected a number",
    ),
    (
        r#""logit_bias":{"1":null}"#,
        "invalid_type",
        "logit_bias.1",
        "is null",
    ),
    (r#""stream":1"#, "invalid_type", "stream", "true or false"),
    (
        r#""stream_options":{}"#,
        "conflicting_parameters",
        "stream_options",
        "without stream",
    ),
    (
        r#""stream":true,"stream_options":[]"#,
        "invalid_type",
        "stream_options",
        "an object",
    ),
    (
        r#""stream":true,"stream_options":{"x":1}"#,
        "unknown_parameter",
        "stream_options.x",
        "no field",
    ),
    (
        r#""stream":true,"stream_options":{"include_obfuscation":true}"#,
        "unsupported_parameter",
        "stream_options.include_obfuscation",
        "not padded",
    ),
    (r#""user":7"#, "invalid_type", "user", "expected a string"),
    (r#""model":7"#, "invalid_type", "model", "expected a string"),
    (
        r#""model":null"#,
        "missing_required_parameter",
        "model",
        "missing",
    ),
    (r#""model":"""#, "invalid_value", "model", "0 characters"),
    (
        r#""foo":1"#,
        "unknown_parameter",
        "foo",
        "no field of this request",
    ),
    (
        r#""foo":null"#,
        "unknown_parameter",
        "foo",
        "no field of this request",
    ),
    (
        r#""Temperature":1"#,
        "unknown_parameter",
        "Temperature",
        "no field",
    ),
];

const CHATS: &[Bad] = &[
    (
        r#""max_tokens":0"#,
        "invalid_value",
        "max_tokens",
        "is 0, expected 1 to",
    ),
    (
        r#""max_completion_tokens":0"#,
        "invalid_value",
        "max_completion_tokens",
        "expected 1 to",
    ),
    (
        r#""max_tokens":1,"max_completion_tokens":1"#,
        "conflicting_parameters",
        "max_tokens",
        "together with max_completion_tokens",
    ),
    (
        r#""logprobs":1"#,
        "invalid_type",
        "logprobs",
        "true or false",
    ),
    (
        r#""top_logprobs":1"#,
        "conflicting_parameters",
        "top_logprobs",
        "without logprobs: true",
    ),
    (
        r#""logprobs":false,"top_logprobs":0"#,
        "conflicting_parameters",
        "top_logprobs",
        "without",
    ),
    (
        r#""logprobs":true,"top_logprobs":21"#,
        "invalid_value",
        "top_logprobs",
        "expected 0 to 20",
    ),
    (
        r#""tools":[{"type":"function"}]"#,
        "missing_required_parameter",
        "tools[0].function",
        "missing",
    ),
    (
        r#""tools":[{"type":"custom","custom":{"name":"f"}}]"#,
        "unsupported_parameter",
        "tools[0].type",
        "only tools",
    ),
    (
        r#""tools":[{"type":"function","function":{"name":"f","x":1}}]"#,
        "unknown_parameter",
        "tools[0].function.x",
        "no field",
    ),
    (
        r#""tools":[{"type":"function","function":{"name":"f"}}]"#,
        "unsupported_parameter",
        "tools",
        "not trained to call",
    ),
    (
        r#""tool_choice":"required""#,
        "conflicting_parameters",
        "tool_choice",
        "without tools",
    ),
    (
        r#""tool_choice":{"type":"function","function":{"name":"f"}}"#,
        "conflicting_parameters",
        "tool_choice",
        "not among tools",
    ),
    (
        r#""tool_choice":"perhaps""#,
        "invalid_value",
        "tool_choice",
        "expected \"auto\"",
    ),
    (
        r#""chat_template_kwargs":{"messages":[]}"#,
        "unsupported_parameter",
        "chat_template_kwargs.messages",
        "the request itself",
    ),
    (
        r#""repeat_penalty":0"#,
        "invalid_value",
        "repeat_penalty",
        "expected 0.001 to 1000",
    ),
    (
        r#""functions":[{}]"#,
        "unsupported_parameter",
        "functions",
        "use tools",
    ),
    (
        r#""function_call":{"name":"f"}"#,
        "unsupported_parameter",
        "function_call",
        "use tools",
    ),
    (
        r#""response_format":{"type":"json_schema","json_schema":{"name":"a",
            "schema":{"type":"array","uniqueItems":true}}}"#,
        "unsupported_schema",
        "response_format",
        "uniqueItems",
    ),
    (
        r#""audio":{}"#,
        "unsupported_parameter",
        "audio",
        "answers are text",
    ),
    (
        r#""modalities":["audio"]"#,
        "unsupported_parameter",
        "modalities",
        "answers are text",
    ),
    (
        r#""modalities":["text","audio"]"#,
        "unsupported_parameter",
        "modalities",
        "text",
    ),
    (
        r#""response_format":{"type":"json_schema","json_schema":{"name":"a"},"x":1}"#,
        "unknown_parameter",
        "response_format.x",
        "no field",
    ),
    (
        r#""response_format":{"type":"xml"}"#,
        "unsupported_parameter",
        "response_format",
        "json_schema",
    ),
    (
        r#""verbosity":"low""#,
        "unsupported_parameter",
        "verbosity",
        "not controlled",
    ),
    (
        r#""web_search_options":{}"#,
        "unsupported_parameter",
        "web_search_options",
        "searched",
    ),
    (
        r#""moderation":{"model":"m"}"#,
        "unsupported_parameter",
        "moderation",
        "moderated",
    ),
    (
        r#""service_tier":"flex""#,
        "unsupported_parameter",
        "service_tier",
        "one tier",
    ),
    (r#""store":1"#, "invalid_type", "store", "true or false"),
    (r#""metadata":[]"#, "invalid_type", "metadata", "an object"),
    (
        r#""metadata":{"a":1}"#,
        "invalid_type",
        "metadata.a",
        "expected a string",
    ),
    (
        r#""prediction":"x""#,
        "invalid_type",
        "prediction",
        "expected an object",
    ),
    (
        r#""prompt_cache_retention":"1h""#,
        "unsupported_parameter",
        "prompt_cache_retention",
        "24h",
    ),
    (r#""suffix":"x""#, "unknown_parameter", "suffix", "no field"),
    (r#""best_of":1"#, "unknown_parameter", "best_of", "no field"),
    (
        r#""messages":null"#,
        "missing_required_parameter",
        "messages",
        "one message or more",
    ),
    (
        r#""messages":[]"#,
        "invalid_value",
        "messages",
        "0 messages, expected 1 to 2048",
    ),
    (
        r#""messages":"hi""#,
        "invalid_type",
        "messages",
        "expected an array",
    ),
    (
        r#""messages":["hi"]"#,
        "invalid_type",
        "messages[0]",
        "expected an object",
    ),
    (
        r#""messages":[{}]"#,
        "missing_required_parameter",
        "messages[0].role",
        "missing",
    ),
    (
        r#""messages":[{"role":"owner","content":""}]"#,
        "invalid_value",
        "messages[0].role",
        "expected one of system, developer, user, assistant, tool",
    ),
    (
        r#""messages":[{"role":"user"}]"#,
        "missing_required_parameter",
        "messages[0].content",
        "missing",
    ),
    (
        r#""messages":[{"role":"user","content":7}]"#,
        "invalid_type",
        "messages[0].content",
        "a string or an array of parts",
    ),
    (
        r#""messages":[{"role":"user","content":"","x":1}]"#,
        "unknown_parameter",
        "messages[0].x",
        "no field",
    ),
    (
        r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#,
        "unsupported_parameter",
        "messages[0].content[0].type",
        "messages are text",
    ),
    (
        r#""messages":[{"role":"user","content":[{"type":"text"}]}]"#,
        "missing_required_parameter",
        "messages[0].content[0].text",
        "missing",
    ),
    (
        r#""messages":[{"role":"user","content":[7]}]"#,
        "invalid_type",
        "messages[0].content[0]",
        "expected an object",
    ),
    (
        r#""messages":[{"role":"user","content":"","tool_calls":[]}]"#,
        "unsupported_parameter",
        "messages[0].tool_calls",
        "role assistant",
    ),
    (
        r#""messages":[{"role":"assistant","tool_calls":[{}]}]"#,
        "missing_required_parameter",
        "messages[0].tool_calls[0].id",
        "missing",
    ),
    (
        r#""messages":[{"role":"assistant","content":"","refusal":"no"}]"#,
        "unsupported_parameter",
        "messages[0].refusal",
        "no place",
    ),
    // The template's own word.
    (
        r#""messages":[{"role":"tool","content":"4"}]"#,
        "invalid_messages",
        "messages",
        "a tool result needs its call",
    ),
];

const COMPLETIONS: &[Bad] = &[
    (
        r#""logprobs":6"#,
        "invalid_value",
        "logprobs",
        "is 6, expected 0 to 5",
    ),
    (
        r#""logprobs":true"#,
        "invalid_type",
        "logprobs",
        "expected an integer",
    ),
    (
        r#""best_of":2"#,
        "unsupported_parameter",
        "best_of",
        "not ranked",
    ),
    (
        r#""suffix":"x""#,
        "unsupported_parameter",
        "suffix",
        "no tokens that fill a hole",
    ),
    (
        r#""messages":[]"#,
        "unknown_parameter",
        "messages",
        "no field",
    ),
    (
        r#""prompt":null"#,
        "missing_required_parameter",
        "prompt",
        "missing",
    ),
    (
        r#""prompt":7"#,
        "invalid_type",
        "prompt",
        "a string, or an array",
    ),
    (
        r#""prompt":"""#,
        "invalid_value",
        "prompt",
        "empty, expected at least one token",
    ),
    (
        r#""prompt":[]"#,
        "invalid_value",
        "prompt",
        "0 prompts, expected 1 to 64",
    ),
    (
        r#""prompt":["a",""]"#,
        "invalid_value",
        "prompt[1]",
        "empty",
    ),
    (
        r#""prompt":["a",5]"#,
        "invalid_type",
        "prompt[0]",
        "a token id",
    ),
    (
        r#""prompt":["a",null]"#,
        "invalid_type",
        "prompt[1]",
        "token ids",
    ),
    (r#""prompt":[[]]"#, "invalid_value", "prompt[0]", "empty"),
    (
        r#""prompt":[258]"#,
        "invalid_value",
        "prompt[0]",
        "is 258, expected 0 to 257",
    ),
    (
        r#""prompt":[[1],[-1]]"#,
        "invalid_value",
        "prompt[1][0]",
        "is -1, expected 0 to 257",
    ),
    (
        r#""prompt":[1.5]"#,
        "invalid_type",
        "prompt[0]",
        "a token id",
    ),
];

fn refuses(path: &str, table: &[Bad]) {
    let rig = Rig::new();
    for (fields, code, param, text) in table {
        let body = merge(path, fields);
        let (status, got, at, message) = refusal(rig.post(path, &body));
        assert_eq!((status, got.as_str()), (400, *code), "{fields}: {message}");
        assert_eq!(at.as_deref(), Some(*param), "{fields}: {message}");
        assert!(message.contains(text), "{fields}: {message}");
    }
    assert_eq!(rig.service.requests(), []);
}

#[test]
fn wrong_fields_of_chats_are_refused_by_name() {
    refuses(CHAT, BOTH);
    refuses(CHAT, CHATS);
}

#[test]
fn wrong_fields_of_completions_are_refused_by_name() {
    refuses(COMPLETE, BOTH);
    refuses(COMPLETE, COMPLETIONS);
}

#[test]
fn counts_have_bounds() {
    let rig = Rig::new();
    let list = |item: &str, n: usize| vec![item; n].join(",");
    let biases: Vec<String> = (0..1025).map(|i| format!("\"{i}\":0")).collect();
    let notes: Vec<String> = (0..17).map(|i| format!("\"{i}\":\"\"")).collect();
    let message = r#"{"role":"user","content":"a"}"#;
    let part = r#"{"type":"text","text":"a"}"#;
    let (long_note, parts) = ("x".repeat(513), list(part, 257));
    for (path, fields, param) in [
        (
            CHAT,
            format!(r#""logit_bias":{{{}}}"#, biases.join(",")),
            "logit_bias",
        ),
        (
            CHAT,
            format!(r#""metadata":{{{}}}"#, notes.join(",")),
            "metadata",
        ),
        (
            CHAT,
            format!(r#""metadata":{{"a":"{long_note}"}}"#),
            "metadata.a",
        ),
        (CHAT, format!(r#""user":"{long_note}""#), "user"),
        (CHAT, format!(r#""stop":"{}""#, "x".repeat(1025)), "stop[0]"),
        (CHAT, format!(r#""stop":[{}]"#, list("\"a\"", 65)), "stop"),
        (
            CHAT,
            format!(r#""messages":[{}]"#, list(message, 2049)),
            "messages",
        ),
        (
            CHAT,
            format!(r#""messages":[{{"role":"user","content":[{parts}]}}]"#),
            "messages[0].content",
        ),
        (
            COMPLETE,
            format!(r#""prompt":[{}]"#, list("\"a\"", 65)),
            "prompt",
        ),
    ] {
        let (status, code, at, message) = refusal(rig.post(path, &merge(path, &fields)));
        assert_eq!(
            (status, code.as_str()),
            (400, "invalid_value"),
            "{param}: {message}"
        );
        assert_eq!(at.as_deref(), Some(param), "{message}");
    }
}
