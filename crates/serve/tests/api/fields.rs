//! Accepted fields, and their effect.

use paceline_engine::{Finish, SamplingParams, SchedulingParams};

use crate::rig::{CHAT, COMPLETE, Rig, chat_body, prompt_text, refusal};
use crate::scripted::Script;

/// The fields over a request that is right.
pub(crate) fn merge(path: &str, fields: &str) -> String {
    let mut body: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&match path {
        CHAT => chat_body(""),
        _ => crate::rig::completion_body(""),
    })
    .unwrap();
    let fields: serde_json::Map<_, _> = serde_json::from_str(&format!("{{{fields}}}")).unwrap();
    body.extend(fields);
    serde_json::to_string(&body).unwrap()
}

#[test]
fn fields_without_effect_are_accepted() {
    let rig = Rig::new();
    let plain = |rig: &Rig| {
        let mut request = rig.service.last();
        request.sampling.seed = 0;
        request
    };
    assert_eq!(rig.chat("").status, 200);
    let expected = plain(&rig);
    for fields in [
        r#""user":"u","safety_identifier":"s","prompt_cache_key":"k""#,
        r#""store":true,"metadata":{"a":"b"}"#,
        r#""prompt_cache_retention":"24h","prompt_cache_options":{"mode":"implicit"}"#,
        r#""prediction":{"type":"content","content":"x"}"#,
        r#""parallel_tool_calls":true,"tools":[],"tool_choice":"none","functions":[]"#,
        r#""service_tier":"auto""#,
        r#""service_tier":"default","modalities":["text"],"verbosity":"medium""#,
        r#""response_format":{"type":"text"},"function_call":"none""#,
        r#""temperature":1,"top_p":1.0,"n":1.0,"top_k":0,"min_p":0,"repetition_penalty":1"#,
        r#""top_k":-1,"logit_bias":{},"stop":[],"stream":false,"logprobs":false"#,
        r#""keep_alive":"5m","cache_prompt":true,"min_tokens":0,"ignore_eos":false"#,
        r#""repeat_penalty":1.0,"chat_template_kwargs":{"custom":1},"reasoning_effort":"low""#,
        r#""tools":null,"audio":null,"reasoning_effort":null,"response_format":null"#,
        r#""temperature":null,"n":null,"stop":null,"seed":null,"stream_options":null"#,
    ] {
        rig.chat(fields).ok(fields);
        assert_eq!(plain(&rig), expected, "{fields}");
    }
    for fields in [
        r#""best_of":1,"suffix":"","user":"u""#,
        r#""echo":false,"logprobs":null"#,
    ] {
        assert_eq!(rig.complete(fields).status, 200, "{fields}");
    }
}

#[test]
fn fields_with_effect_reach_the_engine() {
    let rig = Rig::new();
    let sampling = SamplingParams {
        temperature: 0.5,
        top_p: 0.25,
        top_k: 7,
        min_p: 0.125,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        repetition_penalty: 1.5,
        seed: -3i64 as u64,
        logit_bias: vec![(5, -100.0), (257, 1.5)],
        ..SamplingParams::default()
    };
    let fields = r#""temperature":0.5,"top_p":0.25,"top_k":7,"min_p":0.125,"presence_penalty":-2,
        "frequency_penalty":2,"repetition_penalty":1.5,"seed":-3,
        "logit_bias":{"5":-100,"257":1.5},"max_tokens":9,"stop":["a","bc"]"#;
    let chat = format!(r#"{fields},"logprobs":true,"top_logprobs":20"#);
    assert_eq!(rig.chat(&chat).status, 200);
    let request = rig.service.last();
    assert_eq!(request.sampling, sampling);
    assert_eq!((request.max_tokens, request.logprobs), (9, Some(20)));
    assert_eq!(request.stop, ["a", "bc"]);
    assert_eq!(
        rig.complete(&format!(r#"{fields},"logprobs":5"#)).status,
        200
    );
    let request = rig.service.last();
    assert_eq!((request.sampling, request.logprobs), (sampling, Some(5)));
    for (fields, is_right) in [
        (
            r#""top_p":0"#,
            (|s| s.top_p > 0.0) as fn(&SamplingParams) -> bool,
        ),
        (r#""top_p":1e-60"#, |s| s.top_p > 0.0),
        (r#""temperature":0"#, |s| s.temperature == 0.0),
        ("", |s| s.temperature == 1.0 && s.top_p == 1.0),
        (r#""seed":9223372036854775807"#, |s| {
            s.seed == i64::MAX as u64
        }),
        (r#""seed":-9223372036854775808"#, |s| {
            s.seed == i64::MIN as u64
        }),
    ] {
        assert_eq!(rig.chat(fields).status, 200, "{fields}");
        let sampling = rig.service.last().sampling;
        assert!(
            is_right(&sampling) && sampling.check().is_ok(),
            "{fields}: {sampling:?}"
        );
    }
    rig.service.script(Script::Say(vec![], Finish::Length));
    for (path, fields, expected) in [
        (COMPLETE, "", 16),
        (COMPLETE, r#""max_tokens":0"#, 0),
        (CHAT, r#""max_completion_tokens":3"#, 3),
        (CHAT, "", usize::MAX),
    ] {
        assert_eq!(rig.post(path, &merge(path, fields)).status, 200);
        assert_eq!(rig.service.last().max_tokens, expected, "{path} {fields}");
    }
}

#[test]
fn extensions_with_effect_reach_engine_and_template() {
    let rig = Rig::of(crate::tiny::model_with(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if mood %}{{ mood }}{% endif %}",
    ));
    // More texts than OpenAI's four.
    let fields = r#""min_tokens":3,"stop":["a","b","c","d","e","f"],
        "chat_template_kwargs":{"mood":" calm"}"#;
    rig.chat(fields).ok(fields);
    let request = rig.service.last();
    assert_eq!(request.min_tokens, 3);
    assert_eq!(request.stop, ["a", "b", "c", "d", "e", "f"]);
    assert_eq!(prompt_text(&rig), "hi calm");
}

#[test]
fn a_suffix_is_what_comes_behind_the_answer() {
    let rig = Rig::of(crate::tiny::hole_model());
    let hole: [u32; 6] = [258, 97, 98, 259, 99, 260];
    let body = r#"{"model":"tiny","prompt":"ab","suffix":"c"}"#;
    rig.post(COMPLETE, body).ok("suffix");
    assert_eq!(rig.service.last().prompt, hole);
    let body = r#"{"input_prefix":"ab","input_suffix":"c"}"#;
    rig.post("/infill", body).ok("infill");
    assert_eq!(rig.service.last().prompt, hole);
}

#[test]
fn what_is_not_said_is_the_models_own() {
    let mut model = crate::tiny::model();
    model.sampling = paceline_serve::recommended_sampling(&serde_json::json!({
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1,
    }));
    let scripted = crate::scripted::ScriptedService::new(Script::Say(vec![], Finish::Length));
    let service = std::sync::Arc::new(scripted.clone());
    let rig = Rig::start(|_| {}, model, service, scripted);
    for (fields, temperature, top_k, repetition) in [
        ("", 0.6, 20, 1.1),
        (r#""temperature":1,"top_k":0"#, 1.0, 0, 1.1),
        (r#""top_k":-1,"repeat_penalty":1.3"#, 0.6, 0, 1.3),
        (
            r#""repeat_penalty":1.3,"repetition_penalty":1.5"#,
            0.6,
            20,
            1.5,
        ),
    ] {
        rig.chat(fields).ok(fields);
        let got = rig.service.last().sampling;
        let got = (got.temperature, got.top_k, got.repetition_penalty);
        assert_eq!(got, (temperature, top_k, repetition), "{fields}");
    }
    rig.chat(r#""ignore_eos":true,"logit_bias":{"257":5}"#)
        .ok("");
    // 257 ends an answer.
    let bias = rig.service.last().sampling.logit_bias;
    assert_eq!(bias, [(257, -100.0)]);
}

#[test]
fn priority_and_deadline_reach_the_engine() {
    let rig = Rig::new();
    let order = |priority, deadline_ms| SchedulingParams {
        priority,
        deadline_ms,
        client: 0,
    };
    for (fields, expected) in [
        ("", order(0, None)),
        (r#""priority":-7"#, order(-7, None)),
        (r#""priority":100,"deadline":1.5"#, order(100, Some(1500))),
    ] {
        rig.chat(fields).ok(fields);
        assert_eq!(rig.service.last().order, expected, "{fields}");
        assert_eq!(rig.complete(fields).status, 200);
        assert_eq!(rig.service.last().order, expected, "{fields}");
    }
    for fields in [
        r#""priority":101"#,
        r#""deadline":0"#,
        r#""deadline":"soon""#,
    ] {
        let refused = rig.chat(fields);
        assert_eq!(refused.status, 400, "{fields}");
    }
}

#[test]
fn lenient_servers_pass_unknown_fields_with_a_warning() {
    let rig = Rig::with(|config| config.is_lenient = true);
    let response = rig.chat(r#""foo":1,"messages":[{"role":"user","content":"a","bar":2}]"#);
    let warnings: Vec<&str> = response
        .headers
        .iter()
        .filter(|(name, _)| name == "warning")
        .map(|(_, value)| value.as_str())
        .collect();
    assert_eq!(
        warnings,
        [
            "299 paceline \"messages[0].bar is unknown and was ignored\"",
            "299 paceline \"foo is unknown and was ignored\""
        ]
    );
    response.ok("unknown fields");
    let format = r#""response_format":{"type":"json_schema","zed":3,
        "json_schema":{"name":"n","schema":{"type":"object"}}}"#;
    let response = rig.chat(format);
    let expected = "299 paceline \"response_format.zed is unknown and was ignored\"";
    assert_eq!(response.header("warning"), Some(expected));
    response.ok(format);
    // What is known and wrong stays wrong.
    assert_eq!(rig.chat(r#""temperature":"hot""#).status, 400);
    assert_eq!(rig.chat("").header("warning"), None);
    // Notes in messages come back in each turn, so any server passes them.
    let response = Rig::new().chat(r#""messages":[{"role":"user","content":"a","bar":2}]"#);
    let expected = "299 paceline \"messages[0].bar is unknown and was ignored\"";
    assert_eq!(response.header("warning"), Some(expected));
    response.ok("notes");
}

#[test]
fn requests_without_a_seed_have_different_ones() {
    let rig = Rig::new();
    let seeds: std::collections::BTreeSet<u64> = (0..5)
        .map(|_| {
            assert_eq!(rig.chat("").status, 200);
            rig.service.last().sampling.seed
        })
        .collect();
    assert_eq!(seeds.len(), 5);
}

#[test]
fn messages_become_the_templates() {
    let rig = Rig::new();
    for (messages, expected) in [
        (
            r#"{"role":"developer","content":"be brief"},{"role":"user","content":"hi","name":"al"}"#,
            "system\nbe brief\nuser\nhi\n",
        ),
        (
            r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#,
            "user\na\nb\n",
        ),
        (r#"{"role":"user","content":[]}"#, "user\n\n"),
        (
            r#"{"role":"user","content":"a","cache_control":{"type":"ephemeral"}},
               {"role":"assistant","content":null,"reasoning_content":"hm"}"#,
            "user\na\nassistant\n\n",
        ),
        (
            r#"{"role":"assistant","content":null,"refusal":null,"annotations":[],"audio":null,
               "tool_calls":[{"id":"1","type":"function",
                              "function":{"name":"f","arguments":"{\"a\":1}"}}]},
               {"role":"tool","content":"4","tool_call_id":"1"}"#,
            "assistant\n\ntool\n4\n",
        ),
        // Text that is spelt like a control token stays text.
        (
            r#"{"role":"user","content":"<|im_end|>"}"#,
            "user\n<|im_end|>\n",
        ),
    ] {
        let body = format!(r#"{{"model":"tiny","messages":[{messages}]}}"#);
        rig.post(CHAT, &body).ok(messages);
        let prompt = rig.service.last().prompt;
        let bytes = prompt
            .iter()
            .filter_map(|id| u8::try_from(*id).ok())
            .collect();
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(text, format!("{expected}assistant\n"), "{messages}");
    }
}

#[test]
fn bodies_that_are_no_request_are_refused() {
    let rig = Rig::new();
    let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(40), "]".repeat(40));
    let wide = format!(r#"{{"a":[{}0]}}"#, "0,".repeat(1 << 20));
    for (body, code) in [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("nonsense", "invalid_json"),
        ("[]", "invalid_json"),
        ("{\"a\":1e999}", "invalid_json"),
        (&deep, "json_too_large"),
        (&wide, "json_too_large"),
    ] {
        let (status, got, _, message) = refusal(rig.post(CHAT, body));
        assert_eq!((status, got.as_str()), (400, code), "{message}");
    }
}

#[test]
fn prompts_over_the_context_are_refused_with_both_numbers() {
    let rig = Rig::new();
    let long = "x".repeat(300);
    let ids = vec!["1"; 256].join(",");
    for (path, fields, tokens) in [
        (COMPLETE, format!(r#""prompt":"{long}""#), 300),
        (COMPLETE, format!(r#""prompt":[{ids}]"#), 256),
        (COMPLETE, format!(r#""prompt":["a","{long}"]"#), 300),
        (
            CHAT,
            format!(r#""messages":[{{"role":"user","content":"{long}"}}]"#),
            319,
        ),
    ] {
        let (status, code, param, message) = refusal(rig.post(path, &merge(path, &fields)));
        assert_eq!((status, code.as_str()), (400, "context_length_exceeded"));
        assert_eq!(
            param.as_deref(),
            Some(if path == CHAT { "messages" } else { "prompt" })
        );
        let expected = format!("has {tokens} tokens, the context is 256");
        assert!(message.contains(&expected), "{message}");
    }
    rig.service.script(Script::Say(vec![], Finish::Length));
    let fits = vec!["1"; 255].join(",");
    let body = merge(COMPLETE, &format!(r#""prompt":[{fits}]"#));
    assert_eq!(rig.post(COMPLETE, &body).status, 200);
}
