//! A model over three machines: loaded on one, asked on another, while machines are killed. `chaos`
//! kills nodes while several answers are streamed.

use std::io::{BufRead as _, BufReader};

use serde_json::Value;

use super::{TestMachine, machines, until, until_ready};
use crate::common::namespaces::NamespaceNetwork;
use crate::common::text;
use crate::nodes::tiny::FAMILIES;

/// The model as n0 knows it: a path in its own folder, which the other machines lack.
const MODEL: &str = "llama.gguf";

/// Tokens of an answer during which a machine dies: some seconds of this model.
const LONG: &str = "1500";

/// Path of Python, which machines of tests have no PATH for.
pub(super) fn python() -> String {
    let python = std::process::Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output()
        .unwrap();
    text(&python.stdout).trim().to_owned()
}

/// Asks this machine's API; `after` is called at the tenth piece of the answer.
fn ask(host: &TestMachine, tokens: &str, temperature: &str, after: impl FnOnce()) -> Value {
    let client = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/client.py");
    let mut child = host
        .program(&python(), &[client, MODEL, tokens, temperature])
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
fn only(host: &TestMachine) -> Value {
    let all = host.ps();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].clone()
}

fn is(host: &TestMachine, state: &str, nodes: &[String]) -> bool {
    let it = only(host);
    it["state"] == state && it["nodes"] == Value::from(nodes)
}

/// The nodes of the only model, in the order of its record.
fn nodes(host: &TestMachine) -> Vec<String> {
    serde_json::from_value(only(host)["nodes"].clone()).unwrap()
}

/// Three machines of a cluster, all started with `more`. The first one has the model's file.
/// `None` where this system has no namespaces.
fn three(
    test: &str,
    more: impl Fn(u64) -> Vec<String>,
) -> Option<(NamespaceNetwork, Vec<TestMachine>)> {
    let name = format!("p{}{}", &test[..1], std::process::id());
    let network = NamespaceNetwork::new(&name, 3, test)?;
    let mut hosts = machines(&network, test)?;
    let model = hosts[0].home.path().join(MODEL);
    FAMILIES[0].write(&model);
    let more = more(std::fs::metadata(&model).unwrap().len());
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    for host in &mut hosts {
        host.up_at("52415", &more);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    for host in &hosts[1..] {
        super::live::join_by_token(host, &token);
    }
    until("all see all", || hosts[0].sees("alive").len() == 3);
    Some((network, hosts))
}

/// The only machine of a model dies, and another one takes it over. Then each machine has room for
/// half of the model. The part of a lost machine goes to the one that is left. Where none is left,
/// the owner says what is missing, and the answer continues once a machine is back.
#[test]
fn a_model_goes_where_it_fits() {
    let memory = |bytes: u64| vec!["--memory".to_owned(), bytes.to_string()];
    let Some((_network, mut hosts)) = three("room over namespaces", |model| memory(2 * model))
    else {
        return;
    };
    let load = |host: &TestMachine, nodes: &str| {
        let few = ["--threads", "1", "--context", "4096"];
        host.told(&[&["load", MODEL, "--nodes", nodes], &few[..]].concat())
    };
    load(&hosts[0], "1");
    for host in &hosts[1..] {
        until_ready(&hosts[0], host);
    }
    assert_eq!(nodes(&hosts[1]), ["n0"]);
    let says = |host: &TestMachine, words: &str| {
        let log = host.home.path().join("log");
        std::fs::read_to_string(log).unwrap().contains(words)
    };
    until("another machine has the model", || {
        says(&hosts[0], "has all of")
    });
    until("n2 answers with it", || says(&hosts[2], "answering as"));
    let right = ask(&hosts[2], LONG, "0.8", || ())["text"].clone();
    let half = memory(
        std::fs::metadata(hosts[0].home.path().join(MODEL))
            .unwrap()
            .len(),
    );
    let half: Vec<&str> = half.iter().map(String::as_str).collect();
    let [n0, n1, n2] = &mut hosts[..] else {
        unreachable!("there are three")
    };
    let answer = ask(n2, LONG, "0.8", || n0.kill());
    assert_eq!(answer["text"], right, "the only machine was killed");
    assert!(["n1", "n2"].contains(&&*nodes(n2)[0]));
    n2.told(&["unload", MODEL]);

    n0.up_at("52415", &half);
    for host in [&mut *n1, &mut *n2] {
        host.kill();
        host.up_at("52415", &half);
    }
    until("all see all again", || {
        n0.sees("alive") == ["n0", "n1", "n2"]
    });
    load(n0, "2");
    for host in [&*n1, &*n2] {
        until_ready(n0, host);
    }
    let (member, other) = match &nodes(n0)[1][..] {
        "n1" => (n1, n2),
        _ => (n2, n1),
    };
    let answer = ask(n0, LONG, "0.8", || member.kill());
    assert_eq!(answer["text"], right, "a part moved");
    until("it is on what is left", || {
        is(n0, "ready", &["n0".to_owned(), other.name.clone()])
    });
    let answer = ask(n0, LONG, "0.8", || {
        other.kill();
        until("what is missing is told", || {
            let reason = only(n0)["reason"].to_string();
            reason.contains("too little memory") && reason.contains("n0")
        });
        member.up_at("52415", &half);
    });
    assert_eq!(answer["text"], right, "it waited for a machine");
    assert_eq!(nodes(n0), ["n0".to_owned(), member.name.clone()]);
}
