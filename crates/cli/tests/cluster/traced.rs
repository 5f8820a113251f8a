//! A model over two nodes of this machine: where an answer's time goes, and what is logged.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{TestMachine, said, until};
use crate::common::words;
use crate::nodes::http;
use crate::nodes::tiny::FAMILIES;

const MODEL: &str = "llama.gguf";

/// Longest time in which the machines are kept busy.
const BUSY_LIMIT: Duration = Duration::from_secs(30);

/// The node that does not own the instance asks; both tell what their rank recorded. Standard error
/// of a node whose log is JSON has nothing else, and no text of the prompt.
#[test]
fn an_answer_of_a_loaded_model_is_traced_from_any_node() {
    let mut one = TestMachine::new("one", None);
    let mut two = TestMachine::new("two", None);
    let json = words("--control-port 0 --log-format json --log debug");
    one.up(&json);
    let peer = format!("127.0.0.1:{}", one.nodes()[0]["port"]);
    super::live::join_by_token(&two, &one.told(&["key", "cluster", "show"]));
    two.up(&["--control-port", "0", "--peer", &peer]);
    until("they meet", || one.sees("alive") == ["one", "two"]);
    FAMILIES[0].write(&one.home.path().join(MODEL));
    let load = words("--nodes 2 --threads 1 --split tensor");
    one.told(&[&["load", MODEL][..], &load].concat());

    let question = "a secret question";
    let ask = ["trace", MODEL, question];
    let ask = [&ask[..], &words("--loaded --json --max-tokens 16")].concat();
    // A rank that loses its core between two records makes a rest: not thrice in a row.
    let is_small = (0..3).any(|_| largest_rest(&two.told(&ask)) <= 0.1);
    assert!(is_small, "too much of the answer is in no part");
    let output = two.run(&["trace", "other", question, "--loaded"]);
    assert!(
        said(&output).contains("no instance of \"other\""),
        "{}",
        said(&output)
    );

    stages_are_looked_at(&one, &two);
    is_measured(&one);

    let log = std::fs::read_to_string(one.home.path().join("log")).unwrap();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let has = |field: &str, value: &str| lines.iter().any(|line| line[field] == value);
    assert!(
        has("message", "assign shard") && has("message", "node came"),
        "{log}"
    );
    assert!(has("target", "cli") && has("level", "DEBUG"), "{log}");
    assert!(!log.contains(question), "a prompt is in the log");
}

/// Checks a recording of 16 steps; the largest share of the answer that a rank has in no part.
fn largest_rest(told: &str) -> f64 {
    let told: Value = serde_json::from_str(told).unwrap();
    let trace = &told["trace"];
    assert_eq!(trace["steps"], 16, "{trace}");
    let whole = trace["whole_ms"].as_f64().unwrap();
    let mut largest = 0.0_f64;
    for parts in trace["ranks"].as_array().unwrap() {
        let part = |name: &str| parts[name].as_f64().unwrap();
        assert!(
            part("compute_ms") > 0.0 && part("exchange_ms") > 0.0,
            "{parts}"
        );
        largest = largest.max(part("rest_ms") / whole);
    }
    largest
}

/// `bench model` over the instance, and no local processes in its place.
fn is_measured(machine: &TestMachine) {
    let how = ["--prompt", "16", "--gen", "8", "--runs", "1", "--json"];
    let bench = ["bench", "model", MODEL, "--instance"];
    let report = machine.told(&[&bench[..], &how].concat());
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(
        (&report["nodes"], &report["split"]),
        (&json!(2), &json!("tensor"))
    );
    let rate = report["paceline"]["decode_tok_s"]["median"].as_f64();
    assert!(rate > Some(0.0), "{report}");
}

/// A node that does not own the instance is asked for its stages while it answers, and tells what
/// both machines send each other meanwhile.
fn stages_are_looked_at(owner: &TestMachine, other: &TestMachine) {
    let ports = [owner.port(), other.port()];
    let get = |path: &str| http::ask(ports[1], path, None);
    let status = get("/v1/paceline/status").body;
    let id = status["instances"][0]["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/paceline/stages?instance={id}");
    let idle = get(&path).body;
    assert_eq!(
        (&idle["split"], &idle["steps"]),
        (&json!("tensor"), &json!(0))
    );
    let asked = json!({
        "model": MODEL, "prompt": "once", "max_tokens": 100, "ignore_eos": true, "temperature": 0,
    });
    let (is_over, begun) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) && begun.elapsed() < BUSY_LIMIT {
                let answer = http::ask(ports[0], "/v1/completions", Some(&asked));
                assert_eq!(answer.status, 200, "{:?}", answer.body);
            }
        });
        let stages = get(&path);
        let mut links = Value::Null;
        let moved = |links: &Value| {
            let all = links.as_array().into_iter().flatten();
            let of = |it: &Value| it["model_bytes_s"].as_f64();
            all.filter_map(of).filter(|rate| *rate > 0.0).count()
        };
        while moved(&links) < 2 && begun.elapsed() < BUSY_LIMIT {
            links = get("/v1/paceline/status").body["links"].clone();
            std::thread::sleep(Duration::from_millis(300));
        }
        is_over.store(true, Relaxed);
        assert_eq!(stages.status, 200, "{:?}", stages.body);
        assert_eq!(moved(&links), 2, "both directions: {links}");
        let stages = stages.body;
        assert!(stages["steps"].as_u64() > Some(0), "{stages}");
        let whole = stages["whole_ms"].as_f64().unwrap();
        for rank in stages["ranks"].as_array().unwrap() {
            let part = |name: &str| rank[name].as_f64().unwrap();
            let parts = ["compute_ms", "exchange_ms", "wait_ms", "other_ms"].map(part);
            assert!(parts[0] > 0.0, "{rank}");
            let sum: f64 = parts.iter().sum();
            assert!(
                (sum - whole).abs() < 1e-6 * whole,
                "{sum} of {whole}: {rank}"
            );
            assert_eq!(rank["lane"].as_str().unwrap().len(), 120, "{rank}");
        }
    });
}
