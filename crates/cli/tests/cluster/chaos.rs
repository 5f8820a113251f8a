//! `paceline chaos` on a tiny model: one fault of each kind, with clients at all nodes, and every
//! answer is right. With networks and disks of their own, nodes are cut off, have slow or bad
//! links, and no room on the disk or in memory.

use std::process::Stdio;

use paceline_base::testing::long;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{TestMachine, said, until};
use crate::common::text;
use crate::nodes::processes::{children, lives, signal};
use crate::nodes::tiny::FAMILIES;

/// A parent that is killed closes its end of the node's standard input.
#[test]
fn a_node_of_chaos_ends_with_it() {
    let machine = TestMachine::new("n0", None);
    let up = ["up", "--port", "0", "--control-port", "0", "--no-beacons"];
    let mut command = machine.command(&[&up[..], &["--with-parent"]].concat());
    command.stdin(Stdio::piped());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut node = command.spawn().unwrap();
    until("it is up", || !machine.nodes().is_empty());
    assert!(node.try_wait().unwrap().is_none(), "its parent lives");
    drop(node.stdin.take());
    until("it ends", || node.try_wait().unwrap().is_some());
}

/// The second Ctrl-C leaves no time to put anything in order.
#[test]
fn a_killed_chaos_leaves_no_node() {
    let host = TestMachine::new("n0", None);
    let model = host.home.path().join("tiny.gguf");
    FAMILIES[0].write(&model);
    let asked = ["chaos", model.to_str().unwrap(), "--nodes", "2"];
    let mut command = host.command(&asked);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut chaos = command.spawn().unwrap();
    let mut nodes = Vec::new();
    until("both nodes run", || {
        nodes = children(chaos.id());
        nodes.len() == 2
    });
    // Stopped processes do not see their input end.
    signal(nodes[0], Signal::STOP);
    kill_process(Pid::from_child(&chaos), Signal::KILL).unwrap();
    chaos.wait().unwrap();
    until("no node is left", || !nodes.iter().any(|id| lives(*id)));
}

/// A template by whose words the model calls tools as Hermes 2 Pro does.
const TOOLS: &str = "{% if tools %}<turn>system\n{{ tools | tojson }} Answer by <tool_call>\n\
    {\"name\": ..., \"arguments\": ...}\n</tool_call></turn>\n{% endif %}{% for m in messages %}\
    <turn>{{ m['role'] }}\n{{ m['content'] }}</turn>\n{% endfor %}<turn>assistant\n";

#[test]
fn faults_neither_lose_nor_alter_answers() {
    let host = TestMachine::new("n0", None);
    let model = host.home.path().join("tiny.gguf");
    FAMILIES[0].write_with(&model, (TOOLS, 7));
    let model = model.to_str().unwrap();
    let mut all = [
        "kill-node",
        "kill-worker",
        "freeze-node",
        "freeze-worker",
        "hang-worker",
        "leave-node",
        "flap",
    ];
    let asked = ["--rounds", "7", "--tokens", "400", "--streams", "5"];
    let faults = ["--seed", "3", "--json", "--faults", &all.join(",")];
    let output = host.run(&[&["chaos", model], &faults[..], &asked].concat());
    let report = text(&output.stdout);
    assert!(output.status.success(), "{}{report}", said(&output));
    assert!(!said(&output).contains("no request with tools"), "it calls");
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["answers"], 35, "{report}");
    assert_eq!(report["lost"], 0, "{report}");
    assert_eq!(report["altered"], 0, "{report}");
    let rounds = report["rounds"].as_array().unwrap();
    let mut faults: Vec<_> = rounds
        .iter()
        .map(|it| it["fault"].as_str().unwrap())
        .collect();
    faults.sort_unstable();
    all.sort_unstable();
    assert_eq!(faults, all, "{report}");
    // A node that leaves may not be felt at all.
    for round in rounds.iter().filter(|it| it["fault"] != "leave-node") {
        assert!(
            round["pause_s"].as_f64().unwrap() > 0.05,
            "no fault was felt: {round}"
        );
    }
    // Two seconds of no progress, and what a busy machine takes: not minutes.
    let hang = rounds.iter().find(|it| it["fault"] == "hang-worker");
    let hang = hang.unwrap();
    let detected = hang["detected_s"].as_f64().unwrap();
    assert!(detected < 12.0, "{hang}");
    assert!(detected > 1.9 || !hang["second"].is_null(), "{hang}");
}

/// A second worker of each rank waits on another node, and takes over. A round, or six in a long
/// run.
#[test]
fn a_spare_takes_the_place_of_a_killed_worker() {
    let host = TestMachine::new("n0", None);
    let model = host.home.path().join("tiny.gguf");
    FAMILIES[0].write(&model);
    let model = model.to_str().unwrap();
    let rounds = if long() { 6 } else { 1 };
    let count = rounds.to_string();
    let fault = [
        "--faults",
        "kill-worker",
        "--spare",
        "1",
        "--rounds",
        count.as_str(),
    ];
    let asked = ["--tokens", "400", "--streams", "3"];
    let output = host.run(&[&["chaos", model, "--json"], &fault[..], &asked].concat());
    let report = text(&output.stdout);
    assert!(output.status.success(), "{}{report}", said(&output));
    let report: Value = serde_json::from_str(&report).unwrap();
    let counts = ["answers", "lost", "altered"].map(|name| report[name].as_u64());
    assert_eq!(counts, [Some(3 * rounds), Some(0), Some(0)], "{report}");
    for round in report["rounds"].as_array().unwrap() {
        assert!(round["resumed_s"].is_number(), "no token came: {round}");
    }
}

/// A round of each fault that wants networks and disks of the nodes' own, or damages copies.
#[test]
fn bad_networks_disks_and_memory_neither_lose_nor_alter_answers() {
    let host = TestMachine::new("n0", None);
    let model = host.home.path().join("tiny.gguf");
    FAMILIES[0].write(&model);
    let model = model.to_str().unwrap();
    let mut faults = vec![
        "cut-node",
        "split-node",
        "fill-disk",
        "bit-rot",
        "cut-file",
        "lose-in-load",
        "cut-pair",
        "cut-one-way",
        "delay-links",
        "limit-links",
        "lossy-links",
        "out-of-memory",
    ];
    let run = |faults: &[&str]| {
        let (rounds, faults) = (faults.len().to_string(), faults.join(","));
        let space = [
            "chaos",
            model,
            "--json",
            "--namespaces",
            "--faults",
            &faults,
        ];
        let asked = ["--rounds", &rounds, "--tokens", "400", "--streams", "4"];
        host.run(&[&space[..], &asked].concat())
    };
    let mut output = run(&faults);
    if said(&output).contains("needs a control group") {
        eprintln!("SKIPPED a node without memory: {}", said(&output).trim());
        faults.pop();
        output = run(&faults);
    }
    let said = said(&output);
    if said.contains("no network namespaces") {
        eprintln!("SKIPPED a node without network or disk: {}", said.trim());
        return;
    }
    let report = text(&output.stdout);
    assert!(output.status.success(), "{said}{report}");
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["answers"], 4 * faults.len(), "{report}");
    for count in ["lost", "altered", "hung"] {
        assert_eq!(report[count], 0, "{report}");
    }
    let all = report["rounds"].as_array().unwrap();
    let felt = all.iter().filter(|it| {
        let fault = it["fault"].as_str().unwrap();
        [
            "cut-node",
            "split-node",
            "out-of-memory",
            "bit-rot",
            "cut-file",
            "cut-pair",
        ]
        .contains(&fault)
    });
    for round in felt {
        assert!(round["detected_s"].is_number(), "nobody missed it: {round}");
    }
}
