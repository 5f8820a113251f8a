//! `paceline trace`: parts of an answer's time, for every split.

use serde_json::Value;

use super::tiny::FAMILIES;
use super::{TestHome, finish, text};

/// Most of an answer that may be told as nothing: the bar.
const REST_MAX: f64 = 0.02;

const COLUMNS: [&str; 7] = [
    "compute_ms",
    "exchange_ms",
    "wait_ms",
    "choose_ms",
    "plan_ms",
    "way_ms",
    "rest_ms",
];

fn traced(world: &TestHome, model: &str, args: &[&str]) -> Value {
    let all = [
        &[
            "trace",
            model,
            "hello there",
            "--json",
            "--temperature",
            "0",
        ],
        args,
    ]
    .concat();
    let output = finish(&mut world.paceline(&all));
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ms(parts: &Value, column: &str) -> f64 {
    parts[column].as_f64().unwrap()
}

/// Checks the parts of every rank; the largest share of an answer that no part has.
fn check(trace: &Value, ranks: usize, split: &str) -> f64 {
    let whole = ms(trace, "whole_ms");
    let told = trace["ranks"].as_array().unwrap();
    assert_eq!(told.len(), ranks, "{split}");
    let mut rest = 0.0_f64;
    for (rank, parts) in told.iter().enumerate() {
        let sum: f64 = COLUMNS.iter().map(|column| ms(parts, column)).sum();
        assert!(
            (sum - whole).abs() < 1e-3,
            "{split}, rank {rank}: {sum} of {whole}"
        );
        assert!(
            ms(parts, "compute_ms") > 0.0,
            "{split}, rank {rank}: {parts}"
        );
        let moved = ms(parts, "exchange_ms") + ms(parts, "wait_ms");
        assert_eq!(moved > 0.0, ranks > 1, "{split}, rank {rank}: {parts}");
        assert!(ms(parts, "rest_ms") >= 0.0, "{split}, rank {rank}: {parts}");
        rest = rest.max(ms(parts, "rest_ms") / whole);
    }
    let chooses = |parts: &&Value| ms(parts, "choose_ms") > 0.0;
    assert_eq!(
        told.iter().filter(chooses).count(),
        1,
        "{split}: one rank leads"
    );
    rest
}

#[test]
fn parts_add_up_to_the_whole_for_every_split() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    for (nodes, split) in [("1", "auto"), ("4", "2x2")] {
        let args = ["--nodes", nodes, "--split", split, "--max-tokens", "32"];
        let rest = || {
            let told = traced(&world, &model, &args);
            assert_eq!(told["answer"]["n_generated"], 32);
            // The last token needs no step of its own.
            assert_eq!(told["trace"]["steps"], 32, "{split}");
            check(&told["trace"], nodes.parse().unwrap(), split)
        };
        // A thread that loses its core between two records makes a rest: not thrice in a row.
        let is_small = (0..3).any(|_| rest() <= REST_MAX);
        assert!(is_small, "{split}: too much of the answer is in no part");
    }
    world.assert_clean();
}

/// A file that Perfetto reads: complete events, nested by their times, a process for each rank.
#[test]
fn a_timeline_is_written_for_perfetto() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let file = world.path("trace.json");
    let out = file.to_str().unwrap();
    let args = [
        "--nodes",
        "2",
        "--split",
        "tensor",
        "--max-tokens",
        "4",
        "--out",
        out,
    ];
    let all = [
        &["trace", model.as_str(), "hi", "--temperature", "0"],
        &args[..],
    ]
    .concat();
    let output = finish(&mut world.paceline(&all));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for part in [
        "until the first token",
        "compute",
        "exchange",
        "wait",
        "sums over ranks",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let told: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let events = told["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = events
        .iter()
        .filter(|event| event["ph"] == "M")
        .map(|event| event["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["request", "rank 0: layers 0-3, leads", "rank 1: layers 0-3"]
    );
    for pid in [1, 2] {
        let of = |name: &str| {
            let is = |event: &&Value| {
                event["pid"] == pid && event["name"].as_str().unwrap().contains(name)
            };
            events.iter().filter(is).count()
        };
        assert!(
            of("sum in layer 3") > 0 && of("compute") > 0,
            "rank {}",
            pid - 1
        );
    }
    let complete = |event: &&Value| event["ph"] == "X";
    for event in events.iter().filter(complete) {
        assert!(event["dur"].as_f64().unwrap() >= 0.0, "{event}");
    }
}
