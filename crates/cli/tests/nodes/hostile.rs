//! Models that mean harm, and files that are not what they were.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::processes::{assert_gone, signal, templates};
use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, alone, finish, http, until};
use crate::common::words;

/// Doubles a text forty times when a message asks for it.
const DOUBLING: &str = "{% for m in messages %}{% if m.content == 'attack' %}\
    {% set n = namespace(x='aaaaaaaaaaaaaaaa') %}\
    {% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}\
    {% else %}<turn>{{ m.content }}{% endif %}{% endfor %}";

/// Most memory that a process had, in bytes.
pub(super) fn peak_bytes(id: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().strip_suffix(" kB").unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// Requests whose template takes all memory get an error each; the server stays, and answers the
/// others.
#[test]
fn a_template_that_takes_all_memory_ends_its_own_process() {
    let world = TestHome::new();
    let path = world.path("models/doubling.gguf");
    FAMILIES[0].write_with(&path, (DOUBLING, 7));
    let model = path.to_str().unwrap();
    let server = NodeServer::start(&world, model, &[]);
    let ask = |prompt: &str| {
        let body = chat("doubling", prompt, &json!({"max_tokens": 3}));
        http::ask(server.port, "/v1/chat/completions", Some(&body))
    };
    assert_eq!(ask("hello").status, 200);
    let before = peak_bytes(server.running.id());
    for _ in 0..3 {
        let answer = ask("attack");
        assert_eq!(answer.status, 500, "{answer:?}");
        assert_eq!(
            answer.body["error"]["code"], "template_failed",
            "{answer:?}"
        );
        assert_eq!(ask("hello").status, 200);
    }
    let grown = peak_bytes(server.running.id()) - before;
    assert!(grown < 64 << 20, "the server took {grown} bytes");
    let left = templates(server.running.id());
    assert_eq!(left.len(), 1, "{left:?}");
    server.stop(1);
    assert_gone(&left);
    world.assert_clean();
}

pub(super) fn memory_bytes(id: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.unwrap().trim().strip_suffix(" kB").unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// Prompts of megabytes are refused before they become tokens, and the server does not keep the
/// memory that they took.
#[test]
fn memory_of_long_prompts_is_given_back() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = NodeServer::start(&world, &model, &[]);
    let hello = chat(&model, "hi", &json!({"max_tokens": 3}));
    let ask = |body: &Value| http::ask(server.port, "/v1/chat/completions", Some(body)).status;
    assert_eq!(ask(&hello), 200);
    let before = memory_bytes(server.running.id());
    let long = chat(
        &model,
        &"All work and no play. ".repeat(350_000),
        &json!({}),
    );
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..6).map(|_| scope.spawn(|| ask(&long))).collect();
        let told = asked.into_iter().map(|thread| thread.join().unwrap());
        assert_eq!(told.collect::<Vec<_>>(), [400; 6]);
    });
    let peak = peak_bytes(server.running.id());
    assert!(peak <= before + 150_000_000, "{before} bytes, then {peak}");
    until("memory is given back", || {
        memory_bytes(server.running.id()) <= before + 30_000_000
    });
    server.stop(1);
}

/// Another file in the model's place is not served by a worker that starts again.
#[test]
fn a_file_that_was_replaced_is_refused_by_name() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = NodeServer::start(&world, &model, &["--nodes", "2"]);
    let body = chat(&model, "hi", &json!({"max_tokens": 3}));
    let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
    let fingerprint = answer.body["system_fingerprint"]
        .as_str()
        .unwrap()
        .to_owned();
    let other = world.path("models/other");
    FAMILIES[0].write_with(&other, ("{{ messages[0].content }}", 8));
    fs::rename(&other, &model).unwrap();
    signal(server.running.workers(2)[1], Signal::KILL);
    until("the worker refuses the file", || {
        let health = http::ask(server.port, "/health", None);
        health.body.to_string().contains("was replaced")
            || server.running.said().contains("was replaced")
    });
    let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
    assert_ne!(answer.status, 200, "{answer:?}");
    drop(server);
    let again = NodeServer::start(&world, &model, &["--nodes", "2"]);
    let answer = http::ask(again.port, "/v1/chat/completions", Some(&body));
    assert_ne!(answer.body["system_fingerprint"], Value::from(fingerprint));
    again.stop(2);
}

/// Workers share memory although they have given up rights, and may not write the user's files.
#[test]
fn workers_in_a_sandbox_share_memory() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = NodeServer::start(&world, &model, &["--nodes", "2"]);
    let body = chat(&model, "hi", &json!({"max_tokens": 3}));
    http::ask(server.port, "/v1/chat/completions", Some(&body));
    for worker in server.running.workers(2) {
        let status = fs::read_to_string(format!("/proc/{worker}/status")).unwrap();
        assert!(status.contains("NoNewPrivs:\t1"), "{status}");
        let maps = fs::read_to_string(format!("/proc/{worker}/maps")).unwrap();
        assert!(maps.contains("memfd:paceline"), "no shared memory: {maps}");
    }
    server.stop(2);
}

/// Workers and the template's process get no secrets of the user's environment.
#[test]
fn workers_get_no_secrets_of_the_environment() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let up = words("up --no-beacons --port 0 --nodes 2 --model");
    let mut command = world.paceline(up.into_iter().chain([&*model]));
    for name in ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PACELINE_API_KEY"] {
        command.env(name, "a-secret");
    }
    let server = NodeServer::of(&mut command);
    let templates = templates(server.running.id());
    for id in server.running.workers(2).into_iter().chain(templates) {
        let variables = fs::read_to_string(format!("/proc/{id}/environ")).unwrap();
        assert!(!variables.contains("a-secret"), "{variables}");
    }
    for worker in server.running.workers(2) {
        let variables = fs::read_to_string(format!("/proc/{worker}/environ")).unwrap();
        assert!(variables.contains("PACELINE_HOME="), "{variables}");
    }
    server.stop(2);
}

/// The audit log once it has all that is waited for.
fn audited(world: &TestHome, is_all: impl Fn(&str) -> bool) -> String {
    let log = world.path("home/audit.jsonl");
    let start = Instant::now();
    let mut text = String::new();
    while !is_all(&text) {
        assert!(start.elapsed() < Duration::from_secs(60), "{text}");
        std::thread::sleep(Duration::from_millis(20));
        text = fs::read_to_string(&log).unwrap_or_default();
    }
    text
}

/// A node without a model, with one and with several keeps an audit log of loads, keys and
/// refusals, without prompts.
#[test]
fn every_way_to_start_a_server_keeps_the_audit_log() {
    let _alone = alone();
    for models in 0..3 {
        let world = TestHome::new();
        let made = finish(&mut world.paceline(words("key api new tester")));
        assert!(made.status.success(), "{made:?}");
        let models: Vec<String> = (0..models)
            .map(|i| world.write_model(FAMILIES[i]))
            .collect();
        let up = words("up --no-beacons --port 0 --control-port 0 --context 256");
        let args = up.into_iter().chain(models.iter().map(String::as_str));
        let server = NodeServer::of(&mut world.paceline(args));
        let body = chat("any", "a secret prompt", &json!({"max_tokens": 3}));
        let refused = http::ask(server.port, "/v1/chat/completions", Some(&body));
        assert_eq!(refused.status, 401);
        let text = audited(&world, |text| {
            let ready = text.matches("\"ready\"").count();
            text.contains("\"refused\"") && ready == models.len()
        });
        assert!(text.contains("missing_api_key"), "{text}");
        assert!(!text.contains("secret"), "{text}");
        server.stop(models.len());
    }
}
