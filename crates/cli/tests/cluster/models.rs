//! A model over three machines: loaded on one, asked on another, while machines are pulled out.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};

use serde_json::Value;

use super::{Machine, until, until_ready};
use crate::common::namespaces::Network;
use crate::common::text;
use crate::nodes::tiny::FAMILIES;

/// The model as n0 knows it: a path in its own folder, which the other machines lack.
const MODEL: &str = "llama.gguf";

/// Tokens of an answer during which a machine dies: some seconds of this model.
const LONG: &str = "1500";

/// Asks this machine's API; `after` is called at the tenth piece of the answer.
fn ask(host: &Machine, tokens: &str, temperature: &str, after: impl FnOnce()) -> Value {
    let client = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/client.py");
    let python = std::process::Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output()
        .unwrap();
    let python = text(&python.stdout).trim().to_owned();
    let mut child = host
        .program(&python, &[client, MODEL, tokens, temperature])
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut pieces = BufReader::new(child.stderr.take().unwrap());
    let mut after = Some(after);
    let mut n = 0;
    loop {
        let before = said.len();
        if pieces.read_line(&mut said).unwrap() == 0 {
            break;
        }
        n += usize::from(&said[before..] == "piece\n");
        if n == 10
            && let Some(after) = after.take()
        {
            after();
        }
    }
    let output = child.wait_with_output().unwrap();
    let answer = serde_json::from_slice(&output.stdout);
    let answer: Value = answer.unwrap_or_else(|_| panic!("{}", said.replace("piece\n", "")));
    assert_eq!(answer["error"], Value::Null, "{answer}");
    assert_eq!(answer["ended"], true, "{answer}");
    answer
}

/// `paceline ps --json`: state, nodes, epoch of the only instance.
fn only(host: &Machine) -> Value {
    let all: Value = serde_json::from_str(&host.told(&["ps", "--json"])).unwrap();
    assert_eq!(all.as_array().unwrap().len(), 1, "{all}");
    all[0].clone()
}

fn is(host: &Machine, state: &str, nodes: &[String]) -> bool {
    let it = only(host);
    it["state"] == state && it["nodes"] == Value::from(nodes)
}

/// The nodes of the only model, in the order of its record.
fn nodes(host: &Machine) -> Vec<String> {
    serde_json::from_value(only(host)["nodes"].clone()).unwrap()
}

/// The bar of the issue: the answer on a machine of three equals one node's bits. Then a worker's
/// machine and the owner are killed in the middle of sampled answers: nothing is lost or altered.
#[test]
fn a_model_over_machines_outlives_them() {
    let name = format!("pm{}x", std::process::id());
    let test = "a model over namespaces";
    let Some(network) = Network::new(&name, 3, test) else {
        return;
    };
    let mut hosts: Vec<Machine> = (0..3)
        .zip(network.hosts())
        .map(|(number, namespace)| Machine::new(&format!("n{number}"), Some(namespace)))
        .collect();
    let probe = hosts[0].run(&["--version"]);
    if !probe.status.success() {
        let said = super::said(&probe);
        eprintln!("SKIPPED {test}: no namespaces of processes: {said}");
        return;
    }
    FAMILIES[0].write(&hosts[0].home.path().join(MODEL));
    for host in &mut hosts {
        host.up_at("52415", &[]);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    for host in &hosts[1..] {
        super::live::join_by_token(host, &token);
    }
    until("all see all", || hosts[0].sees("alive").len() == 3);

    hosts[0].told(&["load", MODEL, "--threads", "1"]);
    let alone = |temperature| ask(&hosts[0], LONG, temperature, || ())["text"].clone();
    let (greedy, sampled) = (alone("0"), alone("0.8"));
    hosts[1].told(&["unload", MODEL]);
    until("it is unloaded", || {
        hosts[0].told(&["ps", "--json"]) == "[]"
    });

    hosts[0].told(&["load", MODEL, "--nodes", "3", "--threads", "1"]);
    for host in &hosts[1..] {
        until_ready(&hosts[0], host);
    }
    // The owner first; the others as their ways are measured, which a busy machine changes.
    let order = nodes(&hosts[1]);
    assert_eq!(order[0], "n0");
    let each: BTreeSet<&str> = order.iter().map(String::as_str).collect();
    assert_eq!(each, BTreeSet::from(["n0", "n1", "n2"]));
    assert!(is(&hosts[1], "ready", &order), "{}", only(&hosts[1]));
    assert_eq!(ask(&hosts[2], LONG, "0", || ())["text"], greedy);

    let [n0, n1, n2] = &mut hosts[..] else {
        unreachable!("there are three")
    };
    let answer = ask(n2, LONG, "0.8", || n1.kill());
    assert_eq!(answer["text"], sampled, "a worker's machine was killed");
    eprintln!(
        "a machine is killed: {} s without a token",
        answer["longest"]
    );
    n1.up_at("52415", &[]);
    until("n1 is back", || n2.sees("alive") == ["n0", "n1", "n2"]);
    let answer = ask(n2, LONG, "0.8", || n0.kill());
    assert_eq!(answer["text"], sampled, "the owner was killed");
    eprintln!(
        "the owner is killed: {} s without a token",
        answer["longest"]
    );
    until("another node owns it", || is(n2, "ready", &order[1..]));
    assert_eq!(only(n2)["epoch"], 2);
}
