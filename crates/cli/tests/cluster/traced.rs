//! A model over two nodes of this machine: where an answer's time goes, and what is logged.

use serde_json::Value;

use super::{Machine, said, until};
use crate::nodes::tiny::FAMILIES;

const MODEL: &str = "llama.gguf";

/// The node that does not own the instance asks; both tell what their rank recorded. Standard error
/// of a node whose log is JSON has nothing else, and no text of the prompt.
#[test]
fn an_answer_of_a_loaded_model_is_traced_from_any_node() {
    let mut one = Machine::new("one", None);
    let mut two = Machine::new("two", None);
    let json = [
        "--control-port",
        "0",
        "--log-format",
        "json",
        "--log",
        "debug",
    ];
    one.up(&json);
    let peer = format!("127.0.0.1:{}", one.nodes()[0]["port"]);
    super::live::join_by_token(&two, &one.told(&["key", "cluster", "show"]));
    two.up(&["--control-port", "0", "--peer", &peer]);
    until("they meet", || one.sees("alive") == ["one", "two"]);
    FAMILIES[0].write(&one.home.path().join(MODEL));
    one.told(&[
        "load",
        MODEL,
        "--nodes",
        "2",
        "--threads",
        "1",
        "--split",
        "tensor",
    ]);

    let question = "a secret question";
    let ask = [
        "trace",
        MODEL,
        question,
        "--loaded",
        "--json",
        "--max-tokens",
        "16",
    ];
    let told: Value = serde_json::from_str(&two.told(&ask)).unwrap();
    let trace = &told["trace"];
    assert_eq!(trace["steps"], 16, "{trace}");
    let whole = trace["whole_ms"].as_f64().unwrap();
    for parts in trace["ranks"].as_array().unwrap() {
        let part = |name: &str| parts[name].as_f64().unwrap();
        assert!(
            part("compute_ms") > 0.0 && part("exchange_ms") > 0.0,
            "{parts}"
        );
        assert!(part("rest_ms") <= 0.1 * whole, "{parts} of {whole} ms");
    }
    let output = two.run(&["trace", "other", question, "--loaded"]);
    assert!(
        said(&output).contains("no instance of \"other\""),
        "{}",
        said(&output)
    );

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
