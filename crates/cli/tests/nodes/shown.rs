//! The messages that a user is shown about a split.

use serde_json::Value;

use super::processes::RunningCommand;
use super::tiny::FAMILIES;
use super::{TestHome, alone, finish, smollm2, text};
use crate::common::words;

#[test]
fn every_node_has_a_line_and_the_wire_a_figure() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let nodes = ["hi", "--nodes", "4", "--split", "2x2"];
    let short = ["--max-tokens", "8", "--temperature", "0"];
    let args = [&nodes[..], &short].concat();
    // The first run measures this machine for the second, which otherwise might say so.
    world.run(&model, &args);
    let output = world.run(&model, &args);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 6, "{said}");
    assert!(
        lines[0].starts_with("4 nodes, split 2x2, 1 thread each"),
        "{said}"
    );
    for (rank, line) in lines[1..5].iter().enumerate() {
        let layers = ["layers 0-1", "layers 2-3"][rank / 2];
        let start = format!("  rank {rank}: {layers}, heads 4 of 8, feed-forward 50 %");
        assert!(line.starts_with(&start), "{line:?}");
        assert_eq!(line.contains("vocabulary"), rank >= 2, "{line:?}");
        assert_eq!(line.ends_with(", leads"), rank == 2, "{line:?}");
    }
    assert!(lines[5].contains("per token on the wire"), "{said}");
    assert_eq!(text(&output.stdout).trim_end().len(), 8);
    world.assert_clean();
}

#[test]
fn one_node_says_nothing_of_wires() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let said = text(&world.run(&model, &["hi", "--max-tokens", "4"]).stderr);
    assert!(!said.contains("wire") && !said.contains("rank"), "{said}");
    let json = world.json(&model, &["hi", "--max-tokens", "4"]);
    assert_eq!(json["nodes"], 1);
    assert_eq!(json["wire_bytes_per_token"], Value::Null);
}

#[test]
fn programs_are_told_the_split() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = words("hi --max-tokens 8 --nodes 3 --split pipeline");
    let json = world.json(&model, &args);
    assert_eq!(json["nodes"], 3);
    assert_eq!(json["split"], "pipeline");
    assert_eq!(json["weight_bytes"].as_array().unwrap().len(), 3);
    // A row of 256 values passes two borders, the token and what to do with it come on top.
    let wire = json["wire_bytes_per_token"].as_u64().unwrap();
    assert!((2 * 256 * 4..16 * 256 * 4).contains(&wire), "{wire}");
}

/// A rank's process holds little more than its part; `crates/model/tests/splits.rs` has the parts.
#[test]
fn a_rank_reads_its_part_only() {
    let Some(model) = smollm2("a_rank_reads_its_part_only") else {
        return;
    };
    let _alone = alone();
    let world = TestHome::new();
    let memory = |args: &[&str], workers: usize| -> Vec<u64> {
        let start = ["run", &model, "Tell me a long story."];
        let all = start.iter().chain(args).copied();
        let mut running = RunningCommand::start(&mut world.paceline(all));
        running.wait_for_answer(1);
        let ids = match workers {
            0 => vec![running.id()],
            n => running.workers(n),
        };
        ids.into_iter().map(resident).collect()
    };
    let one = memory(&["--threads", "1"], 0)[0];
    for kib in memory(&["--nodes", "3", "--split", "tensor"], 3) {
        assert!(kib < one * 6 / 10, "{kib} KiB of {one} KiB");
    }
}

/// Memory that a process has of its own, in KiB: pages of files are shared by all that map them.
fn resident(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse().unwrap()
}

#[test]
fn predictions_stand_beside_runs_of_every_split() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = [
        "bench",
        "plan",
        &model,
        "--threads",
        "1",
        "--gen",
        "4",
        "--runs",
        "2",
        "--json",
    ];
    let output = finish(&mut world.paceline(args));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = json["rows"].as_array().unwrap();
    let names: Vec<_> = rows
        .iter()
        .map(|row| row["split"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["none", "tensor", "pipeline"]);
    assert_eq!(rows.iter().filter(|row| row["chosen"] == true).count(), 2);
    for row in rows {
        for speed in [&row["predicted"]["median"], &row["measured"]["median"]] {
            assert!(speed.as_f64().is_some_and(|n| n > 0.0), "{row}");
        }
    }
    let bars = json["bars"].as_array().unwrap();
    assert_eq!(bars.len(), 2, "{json}"); // two nodes at most, and the choice between two splits
    for bar in bars {
        let (worst, limit) = (
            bar["worst"].as_f64().unwrap(),
            bar["limit"].as_f64().unwrap(),
        );
        assert_eq!(bar["kept"], worst <= limit, "{bar}");
    }
    world.assert_clean();
}

/// Numbers do not depend on how bytes travel; what runs over several machines is TCP.
#[test]
fn nodes_reach_each_other_as_told() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let answer = |how: &[&str]| {
        let args = ["hi", "--max-tokens", "12", "--temperature", "0"];
        world.json(&model, &[&args, how].concat())["tokens"].clone()
    };
    let one = answer(&[]);
    for transport in ["shm", "tcp"] {
        assert_eq!(
            answer(&["--nodes", "3", "--transport", transport]),
            one,
            "{transport}"
        );
    }
    world.assert_clean();
}
