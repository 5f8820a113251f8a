//! Form of answers, whole and as events.

use std::sync::Arc;

use paceline_engine::{Finish, RequestFailure, Service, ServiceStatus, Sink, Submission, Ticket};
use serde_json::{Value, json};

use crate::rig::{Rig, chunks};
use crate::scripted::{Script, ScriptedService};
use crate::tiny;

/// Removes what differs from answer to answer, after checking it.
fn settle(mut value: Value, prefix: &str) -> Value {
    let id = value["id"].take();
    assert!(id.as_str().unwrap().starts_with(prefix), "{id}");
    assert!(value["created"].take().as_u64().unwrap() > 1_700_000_000);
    value
}

#[test]
fn a_chat_completion_is_openais() {
    let rig = Rig::new();
    let got = settle(rig.chat("").json(), "chatcmpl-");
    let expected = json!({
        "id": null, "object": "chat.completion", "created": null, "model": "tiny",
        "system_fingerprint": "cpu-tiny",
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }],
        "usage": {"prompt_tokens": 21, "completion_tokens": 4, "total_tokens": 25,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0}},
    });
    assert_eq!(got, expected);
    let prompt = rig.service.last().prompt;
    let text: Vec<u8> = prompt
        .iter()
        .filter_map(|id| u8::try_from(*id).ok())
        .collect();
    assert_eq!(String::from_utf8(text).unwrap(), "user\nhi\nassistant\n");
}

#[test]
fn a_chat_stream_is_openais() {
    let rig = Rig::new();
    let chunks = chunks(rig.chat(r#""stream":true"#));
    let first = settle(chunks[0].clone(), "chatcmpl-");
    let expected = json!({
        "id": null, "object": "chat.completion.chunk", "created": null, "model": "tiny",
        "system_fingerprint": "cpu-tiny",
        "choices": [{
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": null},
            "logprobs": null,
            "finish_reason": null,
        }],
    });
    assert_eq!(first, expected);
    let choices: Vec<&Value> = chunks[1..]
        .iter()
        .map(|chunk| &chunk["choices"][0])
        .collect();
    let text = |text: &str| json!({"index":0,"delta":{"content":text},"logprobs":null,"finish_reason":null});
    let end = json!({"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"});
    let expected = [text("Hello"), text(", "), text("wor"), text("ld"), end];
    assert_eq!(choices, expected.iter().collect::<Vec<_>>());
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
}

#[test]
fn usage_ends_a_stream_that_asks_for_it() {
    let rig = Rig::new();
    let chunks = chunks(rig.chat(r#""stream":true,"stream_options":{"include_usage":true}"#));
    let (last, others) = chunks.split_last().unwrap();
    assert!(
        others
            .iter()
            .all(|chunk| chunk.get("usage") == Some(&Value::Null))
    );
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"],
        json!({"prompt_tokens":21,"completion_tokens":4,"total_tokens":25,
            "prompt_tokens_details":{"cached_tokens":0},
            "completion_tokens_details":{"reasoning_tokens":0}})
    );
}

#[test]
fn a_completion_is_openais() {
    let rig = Rig::new();
    let got = settle(rig.complete(r#""n":2,"prompt":["a","bc"]"#).json(), "cmpl-");
    let choice =
        |index| json!({"text":"Hello, world","index":index,"logprobs":null,"finish_reason":"stop"});
    let expected = json!({
        "id": null, "object": "text_completion", "created": null, "model": "tiny",
        "system_fingerprint": "cpu-tiny",
        "choices": [choice(0), choice(1), choice(2), choice(3)],
        "usage": {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0}},
    });
    assert_eq!(got, expected);
    let prompts: Vec<Vec<u32>> = rig
        .service
        .requests()
        .into_iter()
        .map(|r| r.prompt)
        .collect();
    assert_eq!(prompts, [vec![97], vec![97], vec![98, 99], vec![98, 99]]);
}

#[test]
fn a_completion_stream_is_openais() {
    let rig = Rig::new();
    let chunks = chunks(rig.complete(r#""stream":true"#));
    let texts: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["text"])
        .collect();
    assert_eq!(texts, ["Hello", ", ", "wor", "ld", ""]);
    assert_eq!(chunks[4]["choices"][0]["finish_reason"], "stop");
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "text_completion")
    );
}

#[test]
fn echo_puts_the_prompt_first() {
    let rig = Rig::new();
    let whole = rig.complete(r#""echo":true"#).json();
    assert_eq!(whole["choices"][0]["text"], "hiHello, world");
    let ids = rig
        .complete(r#""echo":true,"prompt":[[97,98],[99]],"n":2"#)
        .json();
    let texts: Vec<&str> = (0..4)
        .map(|i| ids["choices"][i]["text"].as_str().unwrap())
        .collect();
    assert_eq!(
        texts,
        [
            "abHello, world",
            "abHello, world",
            "cHello, world",
            "cHello, world"
        ]
    );
    let chunks = chunks(rig.complete(r#""echo":true,"stream":true"#));
    assert_eq!(chunks[0]["choices"][0]["text"], "hi");
}

#[test]
fn choices_are_told_apart_by_index() {
    let rig = Rig::new();
    let chunks = chunks(rig.chat(r#""n":3,"stream":true,"seed":7"#));
    for index in 0..3 {
        let of = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let of: Vec<&Value> = of.filter(|choice| choice["index"] == index).collect();
        let text: String = of
            .iter()
            .filter_map(|c| c["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, "Hello, world");
        assert_eq!(of.last().unwrap()["finish_reason"], "stop");
        assert_eq!(of[0]["delta"]["role"], "assistant");
    }
    let mut seeds: Vec<u64> = rig
        .service
        .requests()
        .iter()
        .map(|r| r.sampling.seed)
        .collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [7, 8, 9]);
}

#[test]
fn chat_logprobs_come_with_their_text() {
    let rig = Rig::new();
    let tokens = vec![(0xe4, ""), (0xb8, ""), (0xad, "中"), (97, ""), (97, "")];
    rig.service.script(Script::Say(tokens, Finish::Stop(0)));
    let body = rig
        .chat(r#""logprobs":true,"top_logprobs":2,"stop":"aa""#)
        .json();
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(logprobs["refusal"], Value::Null);
    let content = logprobs["content"].as_array().unwrap();
    assert_eq!(
        content.len(),
        3,
        "those of the stop text are not shown: {content:?}"
    );
    let top = json!([
        {"token": "\\xe4", "bytes": [0xe4], "logprob": -0.5},
        {"token": "\\xe5", "bytes": [0xe5], "logprob": -1.5},
    ]);
    let first = json!({"token":"\\xe4","bytes":[0xe4],"logprob":-0.5,"top_logprobs":top});
    assert_eq!(content[0], first);
    let streamed = chunks(rig.chat(r#""logprobs":true,"stream":true"#));
    let logprobs = &streamed[1]["choices"][0]["logprobs"]["content"];
    assert_eq!(streamed[1]["choices"][0]["delta"]["content"], "中");
    assert_eq!(logprobs.as_array().unwrap().len(), 3);
    assert_eq!(logprobs[0]["top_logprobs"], json!([]));
    assert_eq!(streamed.len(), 3);
}

#[test]
fn completion_logprobs_are_four_arrays() {
    let rig = Rig::new();
    let tokens = vec![(97, "a"), (0xe4, ""), (0xb8, ""), (0xad, "中"), (98, "b")];
    rig.service.script(Script::Say(tokens, Finish::Length));
    let body = rig.complete(r#""logprobs":1"#).json();
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(
        logprobs["tokens"],
        json!(["a", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\xad", "b"])
    );
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 1, 2]));
    assert_eq!(
        logprobs["token_logprobs"],
        json!([-0.5, -0.5, -0.5, -0.5, -0.5])
    );
    assert_eq!(logprobs["top_logprobs"][0], json!({"a": -0.5}));
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let streamed = chunks(rig.complete(r#""logprobs":0,"stream":true"#));
    let offsets = streamed
        .iter()
        .map(|chunk| &chunk["choices"][0]["logprobs"]["text_offset"]);
    let offsets: Vec<&Value> = offsets.collect();
    assert_eq!(
        offsets,
        [&json!([0]), &json!([1, 1, 1]), &json!([2]), &json!([])]
    );
}

#[test]
fn models_and_index_and_health_say_what_is_served() {
    let rig = Rig::new();
    let model = json!({"id":"tiny","object":"model","created":1_700_000_000,"owned_by":"paceline"});
    assert_eq!(
        rig.get("/v1/models").json(),
        json!({"object":"list","data":[model]})
    );
    for path in [
        "/v1/models/tiny",
        "/v1/models/org/tiny",
        "/v1/models/org%2Ftiny",
    ] {
        assert_eq!(rig.get(path).json(), model);
    }
    assert_eq!(rig.get("/").json()["model"], "tiny");
    let health = rig.get("/health");
    assert_eq!(health.status, 200);
    assert_eq!(health.json()["status"], "ready");
}

/// A service whose model is cut over several ranks.
#[derive(Debug)]
struct ShardedService(ScriptedService);

impl Service for ShardedService {
    fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        self.0.accept(submission, sink)
    }

    fn cancel(&self, ticket: Ticket) {
        self.0.cancel(ticket);
    }

    fn status(&self) -> ServiceStatus {
        self.0.status()
    }

    fn cut(&self) -> String {
        "2x2".to_owned()
    }

    fn numbers(&self) -> Option<String> {
        Some("mlx(metal):0-1+cpu:2-3".to_owned())
    }
}

#[test]
fn near_numbers_are_named_by_answers_and_models() {
    let one = Script::Say(vec![(97, "a")], Finish::EndOfText);
    let service = ShardedService(ScriptedService::new(one));
    let rig = Rig::over(Arc::new(service), tiny::model());
    let fingerprint = rig.chat("").json()["system_fingerprint"].clone();
    assert_eq!(fingerprint, "mlx(metal):0-1+cpu:2-3-tiny");
    let models = rig.get("/v1/models").json();
    assert_eq!(models["data"][0]["numbers"], "mlx(metal):0-1+cpu:2-3");
}

#[test]
fn times_of_tokens_are_told_by_model_and_split() {
    let three = Script::Say(vec![(97, "a"); 3], Finish::EndOfText);
    let rig = Rig::over(
        Arc::new(ShardedService(ScriptedService::new(three))),
        tiny::model(),
    );
    assert_eq!(rig.chat("").status, 200);
    let text = rig.get("/metrics").text();
    for line in [
        r#"paceline_first_token_seconds_count{model="tiny",split="2x2"} 1"#,
        r#"paceline_inter_token_seconds_count{model="tiny",split="2x2"} 2"#,
    ] {
        assert!(text.lines().any(|known| known == line), "{line} in\n{text}");
    }
}

#[test]
fn metrics_count_what_happened() {
    let rig = Rig::with(|config| {
        let fact = paceline_serve::MetricSample {
            name: "wire_bytes",
            help: "Bytes on the wire",
            labels: String::new(),
            value: 7.0,
        };
        let rows = |expert, value| paceline_serve::MetricSample {
            name: "expert_rows",
            help: "Rows of experts",
            labels: format!("layer=\"1\",expert=\"{expert}\""),
            value,
        };
        let all = vec![fact, rows(0, 5.0), rows(1, 2.0)];
        config.facts = paceline_serve::ProcessMetrics(std::sync::Arc::new(move || all.clone()));
    });
    assert_eq!(rig.chat("").status, 200);
    assert_eq!(rig.chat(r#""foo":1"#).status, 400);
    assert_eq!(rig.get("/nothing/here").status, 404);
    let metrics = rig.get("/metrics");
    assert!(
        metrics
            .header("content-type")
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    let text = metrics.text();
    for line in [
        r#"paceline_http_requests_total{endpoint="/v1/chat/completions",status="200"} 1"#,
        r#"paceline_http_requests_total{endpoint="/v1/chat/completions",status="400"} 1"#,
        r#"paceline_http_requests_total{endpoint="other",status="404"} 1"#,
        r#"paceline_answers_total{outcome="complete"} 1"#,
        r#"paceline_tokens_total{kind="prompt"} 21"#,
        r#"paceline_tokens_total{kind="generated"} 4"#,
        r#"paceline_first_token_seconds_count{model="tiny",split="none"} 1"#,
        r#"paceline_inter_token_seconds_count{model="tiny",split="none"} 3"#,
        "paceline_requests_in_flight 0",
        "paceline_wire_bytes 7",
        r#"paceline_expert_rows{layer="1",expert="0"} 5"#,
        r#"paceline_expert_rows{layer="1",expert="1"} 2"#,
    ] {
        assert!(text.lines().any(|known| known == line), "{line} in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let told = types.map(|line| line.split(' ').next().unwrap().to_owned());
    let base = |name: &&str| {
        let end = name.find("_total").or(name.find("_bucket"));
        let end = end.or(name.find("_info")).unwrap_or(name.len());
        name[..end].to_owned()
    };
    let mut known: Vec<String> = paceline_serve::METRIC_NAMES.iter().map(base).collect();
    known.extend(["paceline_wire_bytes", "paceline_expert_rows"].map(str::to_owned));
    assert_eq!(told.collect::<Vec<_>>(), known);
}
