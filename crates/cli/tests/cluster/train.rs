//! A training over machines of a cluster, which have neither its model nor its data.

use serde_json::Value;

use super::{TestMachine, said, shared};
use crate::common::{text, words};

/// The model.
pub(super) const GOLDEN: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests-data/golden/hf/llama-tied"
);

/// A training of the tiny model of `machine`'s user: its report, and its messages.
pub(super) fn train(machine: &TestMachine, output: &str, more: &[&str]) -> (Value, String) {
    let fixed = "--data data.jsonl --method lora --rank 4 --batch 6 --steps 5 --seed 3 --threads 1";
    let mut args = vec!["train", GOLDEN, "--output", output, "--json"];
    args.extend(fixed.split(' '));
    args.extend(more);
    let done = machine.run(&args);
    assert!(done.status.success(), "{}", said(&done));
    let report = serde_json::from_str(&text(&done.stdout)).unwrap();
    (report, said(&done))
}

#[test]
fn machines_of_the_cluster_train_with_the_bytes_of_one() {
    let one = shared::up("one", None);
    let _two = shared::up("two", Some(&one));
    let line = |i: usize| format!("{{\"text\": \"a line of {i} riders takes turns\"}}\n");
    let lines: String = (0..14).map(line).collect();
    std::fs::write(one.home.path().join("data.jsonl"), lines).unwrap();
    let adapter = |output: &str| {
        let folder = one.home.path().join(output);
        std::fs::read(folder.join("adapter_model.safetensors")).unwrap()
    };
    train(&one, "alone", &["--local"]);
    for (output, more) in [
        ("both", &["--nodes", "2"][..]),
        ("stages", &["--nodes", "2", "--stages", "2"]),
    ] {
        let (report, line) = train(&one, output, more);
        assert!(line.contains("workers on one, two"), "{line}");
        assert_eq!((&report["nodes"], &report["lost"]), (&2.into(), &0.into()));
        assert!(adapter("alone") == adapter(output), "{output}");
    }
    measure(&one);
}

/// Collectives between the two, by TCP and never in memory that they share.
fn measure(one: &TestMachine) {
    let args = words("bench comm --nodes 2 --max-bytes 1024 --json");
    let report: Value = serde_json::from_str(&one.told(&args)).unwrap();
    assert_eq!(report["nodes"], serde_json::json!(["one", "two"]));
    assert_eq!(
        (&report["transport"], &report["ranks"]),
        (&"tcp".into(), &2.into())
    );
    let rows = report["rows"].as_array().unwrap();
    let is_measured = |row: &Value| row["op"] == "all_reduce" && row["p50_us"].as_f64() > Some(0.0);
    assert!(rows.iter().any(is_measured), "{report}");
}
