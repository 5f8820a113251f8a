//! The same answers in the words of Anthropic, Ollama, OpenAI's responses and llama-server.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_auth::keys::KeyRole;
use paceline_engine::Finish;
use paceline_serve::{PullStep, Puller, Removal, Remover};
use serde_json::{Value, json};

use crate::client::TestResponse;
use crate::rig::{Rig, TestKeys, bearer, prompt_text, refusal};
use crate::scripted::Script;

const MESSAGES: &str = "/v1/messages?beta=true";
const COUNT: &str = "/v1/messages/count_tokens?beta=true";
const RESPONSES: &str = "/v1/responses";

/// The events of a stream: each with its name, which is its type.
fn named(response: TestResponse) -> Vec<Value> {
    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let text = response.text();
    let events = text
        .split_terminator("\n\n")
        .filter(|e| !e.starts_with(':'));
    let parse = |event: &str| {
        // The id, by which a client resumes a stream, is not of this test.
        let rest = event
            .split_once('\n')
            .filter(|(id, _)| id.starts_with("id: "));
        let event = rest.map_or(event, |(_, rest)| rest);
        let (name, data) = event.split_once('\n').expect(event);
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(
            name.strip_prefix("event: ").unwrap(),
            data["type"],
            "{event}"
        );
        data
    };
    events.map(parse).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|e| e["type"].as_str().unwrap()).collect()
}

fn lines(response: TestResponse) -> Vec<Value> {
    assert_eq!(
        response.header("content-type"),
        Some("application/x-ndjson")
    );
    let text = response.text();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn message(fields: &str) -> String {
    format!(
        r#"{{"model":"tiny","max_tokens":20,"messages":[{{"role":"user","content":"hi"}}]{fields}}}"#
    )
}

#[test]
fn a_message_is_anthropics() {
    let rig = Rig::new();
    let mut got = rig.post(MESSAGES, &message("")).json();
    assert!(got["id"].take().as_str().unwrap().starts_with("msg_"));
    let expected = json!({
        "id": null, "type": "message", "role": "assistant", "model": "tiny",
        "content": [{"type": "text", "text": "Hello, world"}],
        "stop_reason": "end_turn", "stop_sequence": null,
        "usage": {"input_tokens": 21, "cache_creation_input_tokens": 0,
                  "cache_read_input_tokens": 0, "output_tokens": 4},
    });
    assert_eq!(got, expected);
    let events = named(rig.post(MESSAGES, &message(r#","stream":true"#)));
    assert_eq!(
        types(&events),
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    let texts = events.iter().filter_map(|e| e["delta"]["text"].as_str());
    assert_eq!(texts.collect::<String>(), "Hello, world");
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], 21);
    assert_eq!(events[7]["delta"]["stop_reason"], "end_turn");
    assert_eq!(events[7]["usage"]["output_tokens"], 4);
}

#[test]
fn messages_end_for_anthropics_reasons() {
    let rig = Rig::new();
    for (finish, reason, stop) in [
        (Finish::Length, "max_tokens", Value::Null),
        (Finish::Stop(1), "stop_sequence", "END".into()),
    ] {
        rig.service.script(Script::Say(vec![(97, "a")], finish));
        let body = message(r#","stop_sequences":["x","END"]"#);
        let got = rig.post(MESSAGES, &body).json();
        assert_eq!(got["stop_reason"], reason);
        assert_eq!(got["stop_sequence"], stop);
    }
    assert_eq!(rig.service.last().stop, ["x", "END"]);
}

#[test]
fn what_claude_code_sends_is_understood() {
    let rig = Rig::new();
    let body = r#"{"model":"tiny","max_tokens":32000,"stream":true,
        "metadata":{"user_id":"u"},
        "thinking":{"type":"adaptive","display":"omitted"},
        "context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]},
        "output_config":{"effort":"high"},
        "system":[
            {"type":"text","text":"x-anthropic-billing-header: cc_version=1; cch=5f1;"},
            {"type":"text","text":"You help.","cache_control":{"type":"ephemeral"}}],
        "tools":[
            {"name":"later","input_schema":{"type":"object"},"defer_loading":true},
            {"type":"web_search_20250305","name":"web_search"}],
        "messages":[
            {"role":"user","content":[{"type":"text","text":"hi"}]},
            {"role":"system","content":"Today is Monday."},
            {"role":"assistant","content":[
                {"type":"thinking","thinking":"hm","signature":""},
                {"type":"text","text":"I look."},
                {"type":"tool_use","id":"t1","name":"Read","input":{"path":"a"}}]},
            {"role":"user","content":[
                {"type":"tool_result","tool_use_id":"t1","is_error":false,
                 "content":[{"type":"text","text":"42"}],
                 "cache_control":{"type":"ephemeral"}},
                {"type":"text","text":"go on"}]}]}"#;
    let response = rig.post(MESSAGES, body);
    let warning = response.header("warning").unwrap().to_owned();
    assert!(warning.contains("web_search_20250305"), "{warning}");
    assert_eq!(types(&named(response)).last(), Some(&"message_stop"));
    let expected = "system\nYou help.\nuser\nhi\nsystem\nToday is Monday.\nassistant\nI look.\n\
        tool\n42\nuser\ngo on\nassistant\n";
    assert_eq!(prompt_text(&rig), expected);
    let count = body.replace(r#""max_tokens":32000,"stream":true,"#, "");
    let count = count.replace(r#""metadata":{"user_id":"u"},"#, "");
    let counted = rig.post(COUNT, &count).json();
    assert_eq!(counted["input_tokens"], rig.service.last().prompt.len());
}

#[test]
fn refusals_are_in_the_clients_words() {
    let rig = Rig::new();
    let long = message("").replace("hi", &"x".repeat(300));
    for (path, body, status, kind) in [
        (
            MESSAGES,
            message(r#","foo":1"#),
            400,
            "invalid_request_error",
        ),
        (
            MESSAGES,
            message("").replace("tiny", "opus"),
            404,
            "not_found_error",
        ),
        (MESSAGES, long, 400, "invalid_request_error"),
    ] {
        let response = rig.post(path, &body);
        assert_eq!(response.status, status);
        let got = response.json();
        assert_eq!(
            (&got["type"], &got["error"]["type"]),
            (&json!("error"), &json!(kind))
        );
        let text = got["error"]["message"].as_str().unwrap();
        let is_long = body.contains("xxx");
        assert_eq!(
            text.starts_with("prompt is too long: 319 tokens > 256"),
            is_long,
            "{text}"
        );
    }
    let got = rig.post("/api/chat", r#"{"model":"other"}"#);
    assert_eq!(got.status, 404);
    let text = got.json()["error"].as_str().unwrap().to_owned();
    assert!(text.contains("other"), "{text}");
}

#[test]
fn a_chat_is_ollamas() {
    let rig = Rig::new();
    let body = r#"{"model":"tiny:latest","messages":[{"role":"user","content":"hi"}],
        "options":{"temperature":0.5,"num_predict":7,"num_ctx":4096,"repeat_last_n":9,"seed":3,
                   "stop":["END"]},"keep_alive":"5m","think":false}"#;
    let lines = lines(rig.post("/api/chat", body));
    let (last, others) = lines.split_last().unwrap();
    let texts = others.iter().map(|line| {
        assert_eq!(
            (&line["done"], &line["model"]),
            (&json!(false), &json!("tiny:latest"))
        );
        line["message"]["content"].as_str().unwrap()
    });
    assert_eq!(texts.collect::<String>(), "Hello, world");
    assert_eq!(
        (&last["done"], &last["done_reason"]),
        (&json!(true), &json!("stop"))
    );
    assert_eq!(
        (&last["prompt_eval_count"], &last["eval_count"]),
        (&json!(21), &json!(4))
    );
    assert!(last["total_duration"].as_u64() >= last["eval_duration"].as_u64());
    let request = rig.service.last();
    assert_eq!(
        (request.max_tokens, request.sampling.penalty_window),
        (7, 9)
    );
    assert_eq!(
        (request.sampling.temperature, request.sampling.seed),
        (0.5, 3)
    );
    assert_eq!(request.stop, ["END"]);
    let whole = body.replace(r#""think":false"#, r#""stream":false"#);
    let whole = rig.post("/api/chat", &whole).json();
    assert_eq!(
        whole["message"],
        json!({"role": "assistant", "content": "Hello, world"})
    );
    let generate = r#"{"model":"tiny","prompt":"hi","system":"be brief","stream":false}"#;
    assert_eq!(
        rig.post("/api/generate", generate).json()["response"],
        "Hello, world"
    );
    assert_eq!(prompt_text(&rig), "system\nbe brief\nuser\nhi\nassistant\n");
    let raw = r#"{"model":"tiny","prompt":"hi","raw":true,"stream":false}"#;
    rig.post("/api/generate", raw).ok("raw");
    assert_eq!(prompt_text(&rig), "hi");
    let load = rig.post("/api/generate", r#"{"model":"tiny"}"#).json();
    assert_eq!(
        (&load["done"], &load["done_reason"]),
        (&json!(true), &json!("load"))
    );
}

#[test]
fn the_model_is_shown_as_ollama_does() {
    let rig = Rig::new();
    let names = rig.get("/api/tags").json();
    let names: Vec<&str> = names["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tag| tag["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["tiny", "tiny:latest", "org/tiny", "org/tiny:latest"]
    );
    let show = rig.post("/api/show", r#"{"model":"tiny:latest"}"#).json();
    assert_eq!(show["model_info"]["general.architecture"], "llama");
    assert_eq!(show["model_info"]["llama.context_length"], 256);
    assert_eq!(show["capabilities"][0], "completion");
    assert_eq!(show["details"]["parameter_size"], "135M");
    assert_eq!(rig.post("/api/show", r#"{"name":"other"}"#).status, 404);
    let running = rig.get("/api/ps").json();
    assert_eq!(running["models"][0]["context_length"], 256);
    let version = rig.get("/api/version").json();
    assert!(version["version"].as_str().unwrap().starts_with("0.1"));
    let pulled = lines(rig.post("/api/pull", r#"{"model":"tiny:latest","stream":true}"#));
    assert_eq!(pulled.last().unwrap()["status"], "success");
    assert_eq!(rig.post("/api/pull", r#"{"model":"other"}"#).status, 501);
    assert_eq!(rig.send("DELETE", "/api/delete", "", "").status, 501);
    assert_eq!(rig.send("HEAD", "/", "", "").status, 200);
    assert!(rig.get("/").text().contains("Ollama is running"));
}

#[test]
fn models_are_removed_where_that_was_allowed() {
    let kept = Arc::new(Mutex::new(vec!["old".to_owned()]));
    let shelf = Arc::clone(&kept);
    let remove = move |name: &str, served: &[String]| {
        let mut kept = shelf.lock().unwrap();
        match name {
            "held" => Err("another process reads it".into()),
            "tiny-on-the-hub" if served.contains(&"tiny".to_owned()) => Ok(Removal::InUse),
            name => Ok(match kept.iter().position(|k| k == name) {
                Some(i) => {
                    kept.remove(i);
                    Removal::Done
                }
                None => Removal::NotKept,
            }),
        }
    };
    let rig = Rig::with(|config| config.remover = Some(Remover(Arc::new(remove))));
    let ask = |body: &str| {
        let json = "Content-Type: application/json\r\n";
        rig.send("DELETE", "/api/delete", json, body)
    };
    for (body, status, message) in [
        (r#"{"model":"tiny:latest"}"#, 409, "being served"),
        (r#"{"model":"tiny-on-the-hub"}"#, 409, "being served"),
        (r#"{"model":"new"}"#, 404, "no model \"new\""),
        (r#"{"name":"held"}"#, 400, "another process"),
        ("{}", 400, "model is missing"),
    ] {
        let response = ask(body);
        assert_eq!(response.status, status, "{body}");
        let error = response.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(message), "{body}: {error}");
    }
    assert_eq!(ask(r#"{"model":"old"}"#).status, 200);
    assert!(kept.lock().unwrap().is_empty());
    assert_eq!(rig.post("/api/delete", "{}").status, 405);
}

/// As Ollama's clients read it: files told apart by digest, sizes, a status at the end.
#[test]
fn models_are_fetched_where_that_was_allowed() {
    let pull = |name: &str, tell: &mut dyn FnMut(PullStep) -> bool, _: &Arc<AtomicBool>| {
        let step = |part: &str, total, done| PullStep {
            part: part.to_owned(),
            total,
            done,
        };
        match name {
            "new" | "broken" => {
                assert!(tell(step("a.gguf", Some(10), 4)) && tell(step("a.gguf", Some(10), 10)));
                assert!(tell(step("b.json", None, 3)));
                match name {
                    "new" => Ok(true),
                    _ => Err("the disk is full".into()),
                }
            }
            "here" => Ok(true),
            "wrong" => Err("the hub cannot be reached".into()),
            _ => Ok(false),
        }
    };
    let rig = Rig::with(|config| config.puller = Some(Puller(Arc::new(pull))));
    let told = lines(rig.post("/api/pull", r#"{"model":"new"}"#));
    let status = |i: usize| told[i]["status"].as_str().unwrap();
    assert_eq!(status(0), "pulling manifest");
    let digest = told[1]["digest"].as_str().unwrap();
    let hex = digest.strip_prefix("sha256:").unwrap();
    assert!(hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    assert_eq!(status(1), format!("pulling {}", &hex[..12]));
    assert_eq!(
        (&told[1]["total"], &told[1]["completed"]),
        (&json!(10), &json!(4))
    );
    assert_eq!(
        (&told[2]["digest"], &told[2]["completed"]),
        (&json!(digest), &json!(10))
    );
    assert_ne!(told[3]["digest"], digest);
    assert!(told[3].get("total").is_none());
    let last: Vec<&str> = (4..told.len()).map(status).collect();
    assert_eq!(
        last,
        ["verifying sha256 digest", "writing manifest", "success"]
    );
    let broken = lines(rig.post("/api/pull", r#"{"name":"broken"}"#));
    assert_eq!(broken.last().unwrap()["error"], "the disk is full");
    for (body, status) in [
        (r#"{"model":"here"}"#, 200),
        (r#"{"model":"new","stream":false}"#, 200),
        (r#"{"model":"broken","stream":false}"#, 400),
        (r#"{"model":"wrong"}"#, 400),
        (r#"{"model":"none"}"#, 404),
        ("{}", 400),
    ] {
        assert_eq!(rig.post("/api/pull", body).status, status, "{body}");
    }
    let whole = rig
        .post("/api/pull", r#"{"model":"new","stream":false}"#)
        .json();
    assert_eq!(whole, json!({"status": "success"}));
}

/// The store is the owner's: a key that may ask models may not fill it.
#[test]
fn where_keys_are_in_use_an_admin_fetches() {
    let mut keys = TestKeys::new();
    let (_, user, _) = keys.make("laptop", KeyRole::User);
    let (_, admin, _) = keys.make("owner", KeyRole::Admin);
    let pull = |_: &str, _: &mut dyn FnMut(PullStep) -> bool, _: &Arc<AtomicBool>| Ok(true);
    let rig = keys.rig(|config| config.puller = Some(Puller(Arc::new(pull))));
    let ask = |header: &str| {
        rig.send("POST", "/api/pull", header, r#"{"model":"new"}"#)
            .status
    };
    let none = bearer("sk-none");
    assert_eq!([ask(&user), ask(&admin), ask(&none)], [403, 200, 401]);
}

/// A client that leaves ends the pull: nobody else waits for it.
#[test]
fn a_pull_ends_with_its_client() {
    let (over, ended) = std::sync::mpsc::channel();
    let over = Mutex::new(over);
    let pull = move |_: &str, tell: &mut dyn FnMut(PullStep) -> bool, _: &Arc<AtomicBool>| {
        let step = PullStep {
            part: "a.gguf".to_owned(),
            total: Some(1 << 30),
            done: 1,
        };
        while tell(step.clone()) {}
        over.lock().unwrap().send(()).unwrap();
        Err("cancelled".into())
    };
    let rig = Rig::with(|config| config.puller = Some(Puller(Arc::new(pull))));
    drop(rig.post("/api/pull", r#"{"model":"new"}"#));
    ended.recv_timeout(crate::client::PATIENCE).unwrap();
}

/// A pull that has no step to tell ends with its key too.
#[test]
fn a_pull_ends_with_its_key() {
    let mut keys = TestKeys::new();
    let (_, header, id) = keys.make("owner", KeyRole::Admin);
    let (say, heard) = std::sync::mpsc::channel();
    let say = Mutex::new(say);
    let pull = move |name: &str, tell: &mut dyn FnMut(PullStep) -> bool, over: &Arc<AtomicBool>| {
        let step = PullStep {
            part: "a.gguf".to_owned(),
            total: None,
            done: 1,
        };
        assert!(name == "silent" || tell(step));
        say.lock().unwrap().send(()).unwrap();
        while !over.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        Err("cancelled".into())
    };
    let rig = keys.rig(|config| config.puller = Some(Puller(Arc::new(pull))));
    let ask = |name: &str| {
        let body = format!(r#"{{"model":"{name}"}}"#);
        rig.send("POST", "/api/pull", &header, &body)
    };
    let begun = || heard.recv_timeout(crate::client::PATIENCE).unwrap();
    std::thread::scope(|scope| {
        let silent = scope.spawn(|| ask("silent"));
        begun();
        let telling = ask("new");
        begun();
        keys.keys.revoke(&id).unwrap();
        assert_eq!(silent.join().unwrap().status, 401);
        let last = lines(telling).pop().unwrap();
        assert!(
            last["error"].as_str().unwrap().contains("revoked"),
            "{last}"
        );
    });
}

/// Two pulls wait for a lock without a step to tell, a third is refused, and those end with their
/// clients.
#[test]
fn pulls_that_wait_are_bounded_and_end_with_their_clients() {
    let (say, heard) = std::sync::mpsc::channel();
    let say = Mutex::new(say);
    let pull = move |_: &str, _: &mut dyn FnMut(PullStep) -> bool, over: &Arc<AtomicBool>| {
        say.lock().unwrap().send("waits").unwrap();
        while !over.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        say.lock().unwrap().send("ends").unwrap();
        Err("cancelled".into())
    };
    let rig = Rig::with(|config| config.puller = Some(Puller(Arc::new(pull))));
    let body = r#"{"model":"new"}"#;
    let request = format!(
        "POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let next = || heard.recv_timeout(crate::client::PATIENCE).unwrap();
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = crate::client::connect(rig.addr);
            stream.write_all(request.as_bytes()).unwrap();
            assert_eq!(next(), "waits");
            stream
        })
        .collect();
    let refused = rig.post("/api/pull", body);
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (429, Some("5"))
    );
    let error = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(error.starts_with("2 models are being fetched"), "{error}");
    drop(waiting);
    assert_eq!([next(), next()], ["ends", "ends"]);
}

#[test]
fn a_response_is_openais_and_kept() {
    let rig = Rig::new();
    let first = rig.post(
        RESPONSES,
        r#"{"model":"tiny","input":"hi","instructions":"be brief"}"#,
    );
    let first = first.json();
    assert_eq!(prompt_text(&rig), "system\nbe brief\nuser\nhi\nassistant\n");
    let id = first["id"].as_str().unwrap();
    assert!(id.starts_with("resp_"));
    assert_eq!(
        (&first["status"], &first["store"]),
        (&json!("completed"), &json!(true))
    );
    assert_eq!(first["output"][0]["content"][0]["text"], "Hello, world");
    assert_eq!(first["usage"]["total_tokens"], 43);
    assert_eq!(rig.get(&format!("/v1/responses/{id}")).json(), first);
    let next = format!(r#"{{"model":"tiny","input":"and?","previous_response_id":"{id}"}}"#);
    rig.post(RESPONSES, &next).ok("the next");
    let expected = "user\nhi\nassistant\nHello, world\nuser\nand?\nassistant\n";
    assert_eq!(prompt_text(&rig), expected);
    let forgotten = rig
        .send("DELETE", &format!("/v1/responses/{id}"), "", "")
        .json();
    assert_eq!(forgotten["deleted"], true);
    let gone = rig.post(RESPONSES, &next);
    assert_eq!(gone.status, 404);
    let body = r#"{"model":"tiny","input":"hi","store":false}"#;
    let unkept = rig.post(RESPONSES, body).json();
    let id = unkept["id"].as_str().unwrap();
    assert_eq!(rig.get(&format!("/v1/responses/{id}")).status, 404);
}

#[test]
fn what_codex_sends_is_understood() {
    let rig = Rig::new();
    let body = r#"{"model":"tiny","stream":true,"store":false,"tool_choice":"auto",
        "parallel_tool_calls":true,"reasoning":{"summary":"auto"},
        "include":["reasoning.encrypted_content"],"prompt_cache_key":"s1",
        "client_metadata":{"a":"b"},"tools":[{"type":"web_search","external_web_access":false}],
        "input":[
            {"type":"message","role":"developer","content":[{"type":"input_text","text":"base"}]},
            {"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]},
            {"type":"reasoning","id":"rs_1","summary":[],"encrypted_content":null},
            {"type":"message","id":"m","role":"assistant","content":[
                {"type":"output_text","text":"I look."}]},
            {"type":"function_call","id":"fc","call_id":"c1","name":"shell","arguments":"{}"},
            {"type":"function_call_output","call_id":"c1","output":"ok"}]}"#;
    let events = named(rig.post(RESPONSES, body));
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i);
    }
    assert_eq!(events[10]["item"]["content"][0]["text"], "Hello, world");
    let usage = &events[11]["response"]["usage"];
    assert_eq!(usage["output_tokens"], 4);
    let expected = "system\nbase\nuser\nhi\nassistant\nI look.\ntool\nok\nassistant\n";
    assert_eq!(prompt_text(&rig), expected);
    rig.service.script(Script::Fail(
        1,
        paceline_engine::RequestFailure::Lost {
            reason: "rank 1 is gone".into(),
        },
    ));
    let failed = named(rig.post(RESPONSES, r#"{"model":"tiny","input":"hi","stream":true}"#));
    let last = failed.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "answer_lost");
}

#[test]
fn tools_of_mcp_servers_are_refused_by_name() {
    let rig = Rig::new();
    let body = r#"{"model":"tiny","input":"hi","tools":[
        {"type":"mcp","server_label":"s","server_url":"http://127.0.0.1:1"}]}"#;
    let (status, code, param, message) = refusal(rig.post(RESPONSES, body));
    assert_eq!((status, code.as_str()), (400, "unsupported_parameter"));
    assert_eq!(param.as_deref(), Some("tools[0].type"));
    assert!(message.contains("calls no MCP servers"), "{message}");
}

#[test]
fn texts_become_tokens_and_prompts_as_at_llama_server() {
    let rig = Rig::new();
    let tokens = rig
        .post("/tokenize", r#"{"content":"hé<|im_end|>"}"#)
        .json();
    assert_eq!(tokens["tokens"], json!([104, 195, 169, 257]));
    let body = r#"{"content":"h<|im_end|>","parse_special":false,"with_pieces":true}"#;
    let pieces = rig.post("/tokenize", body).json();
    assert_eq!(pieces["tokens"].as_array().unwrap().len(), 11);
    assert_eq!(pieces["tokens"][0], json!({"id": 104, "piece": "h"}));
    let text = rig
        .post("/detokenize", r#"{"tokens":[104,195,169]}"#)
        .json();
    assert_eq!(text["content"], "hé");
    assert_eq!(rig.post("/detokenize", r#"{"tokens":[999]}"#).status, 400);
    let body = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    let prompt = rig.post("/apply-template", body).json();
    let expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt["prompt"], expected);
    let hole = rig.post("/infill", r#"{"input_prefix":"a","input_suffix":"b"}"#);
    assert_eq!(hole.status, 400);
    assert!(hole.text().contains("no tokens that fill a hole"));
}

/// Prompts without a template have the control tokens that their author wrote; messages have none.
#[test]
fn control_tokens_are_read_in_raw_prompts_alone() {
    const START: u32 = 256;
    let rig = Rig::of(crate::tiny::hole_model());
    for (path, body, expected) in [
        (
            "/v1/completions",
            r#"{"model":"tiny","prompt":"<|im_start|>a"}"#,
            vec![START, 97],
        ),
        (
            "/v1/completions",
            r#"{"model":"tiny","prompt":["<|im_start|>"]}"#,
            vec![START],
        ),
        (
            "/v1/completions",
            r#"{"model":"tiny","prompt":"<|im_start|>","suffix":"<|im_start|>"}"#,
            vec![258, START, 259, START, 260],
        ),
        (
            "/infill",
            r#"{"input_prefix":"<|im_start|>","input_suffix":"<|im_start|>"}"#,
            vec![258, START, 259, START, 260],
        ),
        (
            "/api/generate",
            r#"{"model":"tiny","raw":true,"prompt":"<|im_start|>a"}"#,
            vec![START, 97],
        ),
    ] {
        rig.post(path, body).ok(body);
        assert_eq!(rig.service.last().prompt, expected, "{path} {body}");
    }
    let count = |path: &str, body: &str| {
        rig.post(path, body).ok(body);
        let prompt = rig.service.last().prompt;
        prompt.iter().filter(|id| **id == START).count()
    };
    // The template's own: of the message, and of the answer.
    let chat = r#"{"model":"tiny","messages":[{"role":"user","content":"<|im_start|>"}]}"#;
    assert_eq!(count("/v1/chat/completions", chat), 2);
    let generate = r#"{"model":"tiny","prompt":"<|im_start|>"}"#;
    assert_eq!(count("/api/generate", generate), 2);
    // Other files are no part of the prompt's own text.
    let extra = r#"{"input_prefix":"a","input_extra":[{"filename":"b","text":"<|im_start|>"}]}"#;
    assert_eq!(count("/infill", extra), 0);
}

/// llama-server and Ollama draw a seed for -1; OpenAI knows no such number.
#[test]
fn a_seed_of_minus_one_is_random() {
    let rig = Rig::of(crate::tiny::hole_model());
    let seed = |path: &str, body: &str| {
        rig.post(path, body).ok(body);
        rig.service.last().sampling.seed
    };
    for (path, body) in [
        ("/infill", r#"{"input_prefix":"a","seed":-1}"#),
        (
            "/v1/completions",
            r#"{"model":"tiny","prompt":"a","seed":-1}"#,
        ),
        (
            "/api/generate",
            r#"{"model":"tiny","prompt":"a","options":{"seed":-1}}"#,
        ),
        (
            "/api/chat",
            r#"{"model":"tiny","messages":[{"role":"user","content":"a"}],"options":{"seed":-1}}"#,
        ),
    ] {
        assert_ne!(seed(path, body), seed(path, body), "{path}");
        let given = body.replace("-1", "-2");
        assert_eq!(seed(path, &given), seed(path, &given), "{path}");
    }
}

#[test]
fn fields_of_every_dialect_are_refused_by_name() {
    let rig = Rig::new();
    let chat = r#""model":"tiny","messages":[{"role":"user","content":"hi"}]"#;
    let message = format!(r#"{chat},"max_tokens":5"#);
    let table = include_str!("dialect_refusals.tsv").lines();
    for row in table.filter(|row| !row.starts_with('#')) {
        let columns: Vec<&str> = row.split('\t').collect();
        let [path, body, param] = columns[..] else {
            panic!("{row}");
        };
        let body = body.replace("MESSAGE", &message).replace("CHAT", chat);
        // Of two fields with one name the later one counts.
        let response = rig.post(path, &body);
        let status = response.status;
        let text = response.text();
        assert_eq!(status, 400, "{path} {body}: {text}");
        assert!(text.contains(param), "{param}: {text}");
    }
    assert_eq!(rig.service.requests(), []);
}
