//! `--engine mlx` as a user calls it: the same answer over one node, several nodes and our own
//! kernels, and libraries that cannot be used.
//!
//! Runs where `PACELINE_MLXC` names a `libmlxc`, which `cargo xtask mlx` builds.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::processes::signal;
use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, alone, fake, finish, http, text};
use crate::common::words;

/// Where MLX is, or a line that says why a test is skipped.
fn library(test: &str) -> Option<PathBuf> {
    let found = std::env::var_os("PACELINE_MLXC").map(PathBuf::from);
    if found.is_none() {
        eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    }
    found
}

fn run(world: &TestHome, library: &Path, model: &str, more: &[&str]) -> Output {
    let own = ["run", model, "Once upon a time", "--max-tokens", "12"];
    let own = own.into_iter().chain(["--temperature", "0", "--json"]);
    let mut command = world.paceline(own.chain(more.iter().copied()));
    command.env("MLX_ENABLE_TF32", "1"); // a user's, which changes no number
    finish(command.env("PACELINE_MLXC", library))
}

fn answer(world: &TestHome, library: &Path, model: &str, more: &[&str]) -> Value {
    let output = run(world, library, model, more);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{more:?}: {said}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["n_generated"], 12, "{more:?}: {answer}");
    answer
}

#[test]
fn nodes_on_mlx_say_the_same() {
    let Some(library) = library("nodes on mlx say the same") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let answer = |more: &[&str]| answer(&world, &library, &model, more);
    let ours = answer(&[]);
    let one = answer(&["--engine", "mlx", "--class", "mlx-f32"]);
    assert_eq!(one["tokens"], ours["tokens"]);
    let device = one["instruction_set"].as_str().unwrap();
    assert!(device.starts_with("mlx 0.32"), "{device}");
    for (engines, split, class) in [
        ("mlx", "tensor", "mlx-f32"),
        ("mlx", "pipeline", "mlx-f32"),
        ("cpu,mlx", "pipeline", "cpu+mlx-f32"),
        ("mlx,cpu", "pipeline", "mlx-f32+cpu"),
    ] {
        let two = ["--nodes", "2", "--split", split, "--engine", engines];
        let two = answer(&[&two[..], &["--class", "mlx-f32"]].concat());
        assert_eq!(two["tokens"], one["tokens"], "{engines} {split}");
        assert_eq!(two["kernel_class"], class, "{engines} {split}");
        let arrays = &two["array_bytes_per_token"];
        assert!(arrays["in_place"].as_u64().unwrap() > 0, "{two}");
        assert_eq!([&arrays["converted"], &arrays["staged"]], [0, 0], "{two}");
    }
    world.assert_clean();
}

/// Log-probabilities to the last bit are `crates/model-mlx/tests/all.rs`; here the option is seen
/// to reach the nodes.
#[test]
fn the_exact_class_reaches_every_node() {
    let Some(library) = library("the exact class reaches every node") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[2]);
    let answer = |more: &[&str]| answer(&world, &library, &model, more);
    let one = answer(&["--class", "mlx-exact"]);
    assert_eq!(one["kernel_class"], "mlx-exact");
    let split = ["--class", "mlx-exact", "--nodes", "2", "--split", "tensor"];
    assert_eq!(answer(&split)["tokens"], one["tokens"]);
}

/// The command of a server on two workers whose answers are near.
fn near_command(world: &TestHome, library: &Path, model: &str, more: &[&str]) -> Command {
    let up = ["up", "--no-beacons", "--model", model, "--port", "0"];
    let nodes = ["--nodes", "2", "--class", "mlx-f32", "--context", "4096"];
    let args = up.iter().chain(&nodes).chain(more).copied();
    let mut command = world.paceline(args);
    command.env("PACELINE_MLXC", library);
    command
}

fn near(world: &TestHome, library: &Path, model: &str, more: &[&str]) -> NodeServer {
    NodeServer::of(&mut near_command(world, library, model, more))
}

/// Does `harm` within a streamed answer of `tokens`; the events of the stream.
fn harmed(server: &NodeServer, model: &str, tokens: usize, harm: impl Fn()) -> Vec<Value> {
    let fields = json!({"max_tokens": tokens, "ignore_eos": true, "stream": true});
    let asked = chat(model, "go", &fields);
    let mut stream = http::stream(server.port, "/v1/chat/completions", &asked);
    let mut events = Vec::new();
    while let Some(event) = stream.event() {
        events.push(event);
        if events.len() == 20 {
            harm();
        }
    }
    events
}

/// As [`harmed`], by the death of a worker.
fn killed(server: &NodeServer, model: &str, (victim, tokens): (usize, usize)) -> Vec<Value> {
    let kill = || signal(server.running.workers(2)[victim], Signal::KILL);
    harmed(server, model, tokens, kill)
}

/// The fingerprint of an event; empty for the last word of a stream.
fn fingerprint(event: &Value) -> &str {
    event["system_fingerprint"].as_str().unwrap_or_default()
}

/// The rank that lives keeps its weights, and the other one loads.
#[test]
fn near_answers_continue_after_a_failure_and_are_marked() {
    let Some(library) = library("near answers continue") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = near(&world, &library, &model, &[]);
    for (victim, times) in [(0, 1), (1, 2)] {
        let events = killed(&server, &model, (victim, 600));
        assert_eq!(events.last(), Some(&json!("[DONE]")), "{victim}");
        let first = fingerprint(&events[0]);
        assert!(first.contains("mlx-f32") && !first.contains('+'), "{first}");
        let last = fingerprint(&events[events.len() - 2]);
        assert_eq!(last, format!("{first}+continued"), "{victim}");
        http::health(server.port, 200);
        let metrics = http::ask(server.port, "/metrics", None).body;
        let counted = format!("\npaceline_answers_continued {times}\n");
        assert!(metrics.as_str().unwrap().contains(&counted), "{metrics}");
    }
    let ended = server.stop(2);
    let notice = "1 answer continues from the tokens so far";
    assert_eq!(ended.stderr.matches(notice).count(), 2, "{}", ended.stderr);
    world.assert_clean();
}

/// Whichever rank it is: the next epoch has smaller steps, and all workers keep their processes.
#[test]
fn a_step_that_the_system_interrupts_on_a_rank_ends_no_answer() {
    let Some(library) = library("an interrupted step of a rank") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let Some(interrupting) = linked(&world, &library, "interrupt.rs") else {
        return eprintln!("SKIPPED an interrupted step of a rank: no rustc");
    };
    let file = world.path("tmp/interrupt");
    let mut command = near_command(&world, &interrupting, &model, &[]);
    command.env("PACELINE_LOG", "warn");
    let server = NodeServer::of(command.env("PACELINE_INTERRUPT", &file));
    let workers = server.running.workers(2);
    for _ in 0..2 {
        let interrupt = || std::fs::write(&file, "").unwrap();
        let events = harmed(&server, &model, 100, interrupt);
        assert_eq!(events.last(), Some(&json!("[DONE]")), "{events:?}");
        let last = fingerprint(&events[events.len() - 2]);
        assert!(last.ends_with("+continued"), "{last}");
        assert!(!file.exists());
    }
    assert_eq!(server.running.workers(2), workers);
    let said = server.stop(2).stderr;
    assert!(said.contains("the system interrupted the GPU"), "{said}");
    for rows in ["rows=128", "rows=32"] {
        assert!(said.contains(rows), "{rows}: {said}");
    }
    std::fs::remove_file(interrupting).unwrap();
    world.assert_clean();
}

#[test]
fn a_near_answer_ends_where_that_is_asked_for() {
    let Some(library) = library("a near answer ends with --strict") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = near(&world, &library, &model, &["--strict"]);
    let events = killed(&server, &model, (1, 600));
    let error = events.iter().find_map(|event| event.get("error"));
    assert!(error.is_some(), "{:?}", events.last());
    assert!(events.iter().all(|event| !fingerprint(event).contains('+')));
    http::health(server.port, 200);
    server.stop(2);
    world.assert_clean();
}

/// As [`fake::linked`], in the folder of the test.
fn linked(world: &TestHome, library: &Path, name: &str) -> Option<PathBuf> {
    fake::linked(&world.path("tmp"), library, name)
}

/// MLX's CUDA build aborts in its exit handlers. Neither the program nor its workers come to them.
#[test]
fn a_library_that_aborts_at_exit_spoils_no_answer() {
    let Some(library) = library("a library that aborts at exit") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let Some(aborting) = linked(&world, &library, "abort.rs") else {
        return eprintln!("SKIPPED a library that aborts at exit: no rustc");
    };
    let aborts = world.path("tmp/aborts");
    for nodes in ["1", "2"] {
        let own = ["run", &model, "Once", "--nodes", nodes].into_iter();
        let mut command = world.paceline(own.chain(words("--max-tokens 2 --engine mlx")));
        command.env("PACELINE_MLXC", &aborting);
        let output = finish(command.env("PACELINE_ABORTS", &aborts));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{nodes}: {said}");
        assert!(!aborts.exists(), "{nodes}: {said}");
    }
    std::fs::remove_file(aborting).unwrap();
    world.assert_clean();
}

/// On a library of this test that stands for MLX with a CUDA card. Where the C layer has groups,
/// exchanges are operations of a step, which is submitted whole. A lost rank is an error then too.
#[test]
fn ranks_on_cards_exchange_within_the_graph() {
    let Some(library) = library("ranks on cards") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let Some(card) = linked(&world, &library, "card.rs") else {
        return eprintln!("SKIPPED ranks on cards: no rustc");
    };
    let folder = tempfile::tempdir().unwrap();
    let Some(grouped) = fake::with_group(folder.path(), &card, &library) else {
        return eprintln!("SKIPPED ranks on cards: no C++ compiler, or no headers of MLX");
    };
    let submissions = world.path("tmp/submissions");
    let answer = |layer: &Path| {
        let own = ["run", &model, "Once upon a time", "--max-tokens", "12"];
        let two = ["--nodes", "2", "--split", "tensor", "--class", "mlx-f32"];
        let own = own.into_iter().chain(["--temperature", "0", "--json"]);
        let mut command = world.paceline(own.chain(two));
        command.env("PACELINE_SUBMISSIONS", &submissions);
        let output = finish(command.env("PACELINE_MLXC", layer));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["tokens"].clone()
    };
    let within = answer(&grouped);
    assert!(!submissions.exists(), "a step was cut");
    assert_eq!(within, answer(&card));
    assert!(submissions.exists());
    let server = near(&world, &grouped, &model, &["--split", "tensor"]);
    let events = killed(&server, &model, (1, 600));
    assert_eq!(events.last(), Some(&json!("[DONE]")));
    server.stop(2);
    for file in [submissions, card] {
        std::fs::remove_file(file).unwrap();
    }
    world.assert_clean();
}

/// The device's memory bounds the context. It is filled as positions are used, so that a large
/// context costs nothing by itself.
#[test]
fn a_context_beyond_the_devices_memory_is_refused_with_what_fits() {
    let Some(library) = library("a context beyond the device's memory") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let with = |context: &str| {
        let more = ["--engine", "mlx", "--context", context];
        run(&world, &library, &model, &more)
    };
    let refused = with("4000000000");
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("mlx: 4000000000 positions need"), "{said}");
    assert!(said.contains("a smaller --context"), "{said}");
    let (before, _) = said.split_once(" positions fit").unwrap();
    let (_, fitting) = before.rsplit_once(' ').unwrap();
    let output = with(fitting);
    assert!(output.status.success(), "{}", text(&output.stderr));
    world.assert_clean();
}

/// Others that cannot: `crates/mlx/tests/library.rs`.
#[test]
fn libraries_that_cannot_be_used_are_told_by_name() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let refused = |library: &Path, message: &str| {
        for nodes in ["1", "2"] {
            let more = ["--engine", "mlx", "--nodes", nodes];
            let output = run(&world, library, &model, &more);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains(message), "{nodes}: {said}");
            assert!(said.contains("hint: "), "{nodes}: {said}");
        }
    };
    refused(&world.path("none.so"), "none.so");
    let none = world.path("libmlxc.so");
    std::fs::write(&none, "no library").unwrap();
    refused(&none, "is not a shared library of this system");
    if let Some(stating) = fake::build(&world.path("tmp"), "other.rs", &["--cfg", "states_tf32"]) {
        refused(&stating, "is of version without TF32, expected 0.32.x");
        std::fs::remove_file(stating).unwrap();
    }
    world.assert_clean();
}
