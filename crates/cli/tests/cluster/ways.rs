//! Two machines with two cables, and three in a row:
//!
//! - which cable is used;
//! - what happens when it is pulled or its addresses change;
//! - what is seen on it;
//! - what `doctor --peer` says when something blocks it.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use super::{TestMachine, live::join_by_token, machines, said, train, until, until_ready};
use crate::common::namespaces::{NamespaceNetwork, ip};
use crate::common::text;
use crate::nodes::tiny::FAMILIES;

const MODEL: &str = "llama.gguf";

/// Two machines with `cables` between them; `None` with a line where the system refuses.
fn pair(prefix: &str, cables: usize, test: &str) -> Option<(NamespaceNetwork, Vec<TestMachine>)> {
    let name = format!("{prefix}{}x", std::process::id());
    let network = NamespaceNetwork::with_cables(&name, 2, cables, test)?;
    let hosts = machines(&network, test)?;
    Some((network, hosts))
}

/// Starts both and makes them one cluster.
fn form(hosts: &mut [TestMachine], args: &[&str]) {
    for host in hosts.iter_mut() {
        host.up_at("52415", args);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    for host in &hosts[1..] {
        join_by_token(host, &token);
    }
    until("all see all", || {
        hosts[0].sees("alive").len() == hosts.len()
    });
}

/// The ways of a machine to the others: interface, whether it is up, whether it is used.
fn ways(host: &TestMachine) -> Vec<(String, bool, bool)> {
    let nodes = host.nodes();
    let paths = nodes[0]["paths"].as_array().cloned().unwrap_or_default();
    let of = |path: &Value| {
        let name = path["interface"].as_str().unwrap().to_owned();
        (name, path["up"] == true, path["preferred"] == true)
    };
    paths.iter().map(of).collect()
}

fn used(host: &TestMachine) -> Option<String> {
    let ways = ways(host).into_iter();
    ways.filter(|(_, _, used)| *used).map(|it| it.0).next()
}

/// Tokens of a greedy answer of the instance, asked on `host`.
fn asked(host: &TestMachine) -> Value {
    let (answer, said) = host.answer(MODEL, &[]);
    assert!(said.contains("asking the instance"), "{said}");
    answer["tokens"].clone()
}

/// The first and the last machine never reach each other. They compute together as a pipeline, and
/// the last one answers with an instance of the first.
#[test]
fn three_machines_in_a_row_compute_and_answer() {
    let test = "three machines in a row";
    let network = NamespaceNetwork::new(&format!("pr{}x", std::process::id()), 3, test);
    let Some(network) = network else { return };
    let Some(mut hosts) = machines(&network, test) else {
        return;
    };
    network.part(&[0, 2]).unwrap();
    FAMILIES[0].write(&hosts[0].home.path().join(MODEL));
    form(&mut hosts, &[]);
    hosts[0].told(&["load", MODEL, "--nodes", "3", "--threads", "1"]);
    until_ready(&hosts[0], &hosts[2]);
    let shown = hosts[2].ps();
    assert_eq!(shown[0]["nodes"], json!(["n1", "n0", "n2"]), "n1 relays");
    assert_eq!(shown[0]["split"], "pipeline");
    let by_three = asked(&hosts[0]);
    assert_eq!(asked(&hosts[2]), by_three);

    hosts[0].told(&["unload", MODEL]);
    hosts[0].told(&["load", MODEL, "--nodes", "n0", "--threads", "1"]);
    until_ready(&hosts[0], &hosts[2]);
    assert_eq!(asked(&hosts[2]), by_three, "through n1");
}

#[test]
fn the_best_cable_is_used_left_and_taken_again() {
    let test = "two cables between namespaces";
    let Some((network, mut hosts)) = pair("pw", 2, test) else {
        return;
    };
    FAMILIES[0].write(&hosts[0].home.path().join(MODEL));
    let slow = network.slow_down();
    form(&mut hosts, &[]);
    until("both cables are measured", || {
        let up = ways(&hosts[0]).into_iter().filter(|way| way.1);
        let up: BTreeSet<String> = up.map(|way| way.0).collect();
        up.len() == 2 && used(&hosts[0]).is_some()
    });
    match slow {
        Err(why) => eprintln!("SKIPPED the faster of two cables: {why}"),
        Ok(()) => {
            let is_best = || used(&hosts[0]).as_deref() == Some("eth1");
            until("the faster cable is used", is_best);
        }
    }
    let first = used(&hosts[0]).unwrap();
    let other = if first == "eth0" { "eth1" } else { "eth0" };
    hosts[0].told(&["load", MODEL, "--nodes", "2", "--threads", "1"]);
    until_ready(&hosts[0], &hosts[1]);
    let before = asked(&hosts[1]);

    let set = |state: &str| ip(&["-n", &network.hosts()[0], "link", "set", &first, state]);
    set("down").unwrap();
    until("the other cable is used", || {
        used(&hosts[0]).as_deref() == Some(other)
    });
    let problems = hosts[0].run(&["nodes"]);
    assert!(
        said(&problems).contains("does not answer"),
        "{}",
        said(&problems)
    );
    until("the instance is there again, for both", || {
        hosts.iter().all(|host| {
            let all = host.ps();
            all[0]["state"] == "ready" && host.sees("alive").len() == 2
        })
    });
    assert_eq!(asked(&hosts[1]), before, "over the other cable");
    set("up").unwrap();
    let address = format!("10.{}.0.1/24", if first == "eth0" { 77 } else { 78 });
    // The kernel keeps IPv4 addresses of an interface that was down.
    let _ = ip(&[
        "-n",
        &network.hosts()[0],
        "addr",
        "add",
        &address,
        "dev",
        &first,
    ]);
    until("the first cable is used again", || {
        used(&hosts[0]).as_deref() == Some(&first)
    });
    let log = std::fs::read_to_string(hosts[0].home.path().join("log")).unwrap();
    let fell = log.find("warning: n1 is reached over").unwrap();
    let again = log.rfind("again").unwrap();
    assert!(fell < again, "{log}");
}

/// Waits until `hosts[0]` has the other machine by an address, and by none of an earlier network;
/// then both have the instance's answer.
fn found_again(hosts: &[TestMachine], id: &Value, address: (&str, &str), answer: &Value) {
    let (now, before) = address;
    until(&format!("it is found at {now}"), || {
        let nodes = hosts[0].nodes();
        let is_there = |node: &Value| {
            let addresses = node["addresses"].to_string();
            node["id"] == *id && addresses.contains(now) && !addresses.contains(before)
        };
        nodes.len() == 2 && nodes.iter().any(is_there)
    });
    until("both see both, and the instance", || {
        hosts.iter().all(|host| {
            let all = host.ps();
            all[0]["state"] == "ready" && host.sees("alive").len() == 2
        })
    });
    for host in hosts {
        assert_eq!(asked(host), *answer, "from {} on", host.name);
    }
}

/// A laptop: its DHCP server gives it another address, then it goes from one network to another.
#[test]
fn a_machine_is_found_again_at_another_address_and_on_another_network() {
    let test = "other addresses between namespaces";
    let Some((network, mut hosts)) = pair("pa", 2, test) else {
        return;
    };
    let laptop = network.hosts()[1].as_str();
    let on = |host: &str, words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        ip(&[&["-n", host][..], &words[..]].concat()).unwrap();
    };
    // Only addresses that change lead from one to the other.
    for host in network.hosts() {
        on(host, "-6 addr flush dev eth0");
    }
    on(laptop, "addr del 10.78.0.2/24 dev eth1");
    on(laptop, "link set eth1 down");
    FAMILIES[0].write(&hosts[0].home.path().join(MODEL));
    form(&mut hosts, &[]);
    hosts[0].told(&["load", MODEL, "--nodes", "2", "--threads", "1"]);
    let (id, before) = (hosts[1].nodes()[0]["id"].clone(), asked(&hosts[0]));

    on(laptop, "addr del 10.77.0.2/24 dev eth0");
    on(laptop, "addr add 10.77.0.9/24 dev eth0");
    found_again(&hosts, &id, ("10.77.0.9", "10.77.0.2"), &before);

    on(laptop, "addr del 10.77.0.9/24 dev eth0");
    on(laptop, "link set eth0 down");
    on(laptop, "addr add 10.78.0.2/24 dev eth1");
    on(laptop, "link set eth1 up");
    found_again(&hosts, &id, ("10.78.0.2", "10.77.0."), &before);
    assert_eq!(hosts[1].nodes()[0]["id"], id, "it is the same node");
}

/// Trains over both machines with lines that are easy to find.
fn train_with_wizards(host: &TestMachine) {
    let line = |i: usize| format!("{{\"text\": \"line {i}: wizards quickly jinxed a gnu\"}}\n");
    let lines: String = (0..14).map(line).collect();
    std::fs::write(host.home.path().join("data.jsonl"), lines).unwrap();
    let (report, told) = train::train(host, "both", &["--nodes", "2"]);
    assert!(told.contains("workers on n0, n1"), "{told}");
    assert_eq!(report["nodes"], 2, "{report}");
}

/// Everything that crosses the cables while a model is copied, loaded and asked, and while another
/// one is trained.
#[test]
fn nothing_crosses_the_network_in_the_clear() {
    let test = "a capture between namespaces";
    let Some((network, mut hosts)) = pair("ps", 1, test) else {
        return;
    };
    let model = hosts[0].home.path().join(MODEL);
    FAMILIES[0].write(&model);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("frames");
    let Some(mut capture) = network.capture(&file, test) else {
        return;
    };
    form(&mut hosts, &[]);
    hosts[0].told(&["load", MODEL, "--nodes", "2", "--threads", "1"]);
    until_ready(&hosts[0], &hosts[1]);
    let secret = "the quick brown fox jumps over the lazy dog";
    let run = [
        "run",
        MODEL,
        secret,
        "--json",
        "--temperature",
        "0",
        "--max-tokens",
        "200",
    ];
    let output = hosts[1].run(&run);
    assert!(output.status.success(), "{}", said(&output));
    let answer: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let answer = answer["text"].as_str().unwrap().to_owned();
    let token = hosts[0].told(&["key", "cluster", "show"]);
    train_with_wizards(&hosts[0]);
    capture.kill().unwrap();
    capture.wait().unwrap();

    let frames = std::fs::read(&file).unwrap();
    let models = [model, Path::new(train::GOLDEN).join("model.safetensors")];
    let models = models.map(|path| std::fs::read(path).unwrap());
    let copied: usize = models.iter().map(Vec::len).sum();
    assert!(frames.len() > copied, "{} bytes", frames.len());
    let has = |needle: &[u8]| frames.windows(needle.len()).any(|window| window == needle);
    assert!(!has(&secret.as_bytes()[..24]), "the prompt");
    let part: String = answer.chars().take(16).collect();
    assert!(
        part.len() < 8 || !has(part.as_bytes()),
        "the answer {part:?}"
    );
    assert!(!has(b"general.architecture"), "the model's header");
    assert!(!has(token.as_bytes()), "the cluster's token");
    assert!(!has(b"wizards quickly jinxed"), "what is trained with");
    for weights in models {
        for at in (0..weights.len() - 32).step_by(weights.len() / 8 + 1) {
            let piece = &weights[at..at + 32];
            let is_plain = piece.iter().collect::<BTreeSet<_>>().len() < 8;
            assert!(is_plain || !has(piece), "weights from byte {at}");
        }
    }
    assert!(has(b"PLnode2"), "the capture sees what is in the clear");
}

/// `doctor --peer` as the names of what it found wrong.
fn wrong(host: &TestMachine, peer: &str) -> Vec<String> {
    let told = host.told(&["doctor", "--peer", peer, "--json"]);
    let told: Value = serde_json::from_str(&told).unwrap();
    let checks = told["checks"].as_array().unwrap();
    let wrong = checks.iter().filter(|check| check["state"] != "ok");
    let named = wrong.map(|check| {
        assert!(check["mend"].as_str().is_some(), "{check}");
        check["name"].as_str().unwrap().to_owned()
    });
    named.collect()
}

#[test]
fn doctor_names_what_blocks_a_machine() {
    let test = "doctor between namespaces";
    let Some((network, mut hosts)) = pair("pd", 1, test) else {
        return;
    };
    form(&mut hosts, &["--data-ports", "52500-52509"]);
    let none: [&str; 0] = [];
    assert_eq!(wrong(&hosts[0], "10.77.0.2"), none);

    let host = network.hosts()[1].as_str();
    ip(&["-n", host, "link", "set", "eth0", "mtu", "1280"]).unwrap();
    assert_eq!(wrong(&hosts[0], "10.77.0.2"), ["packet size"]);
    ip(&["-n", host, "link", "set", "eth0", "mtu", "1500"]).unwrap();

    // The bridge stops to pass multicast on to the second machine.
    if network.drop_multicast(1).is_err() {
        eprintln!("SKIPPED {test}: this bridge passes all multicast on");
    } else {
        assert_eq!(wrong(&hosts[0], "10.77.0.2"), ["multicast from here"]);
        assert_eq!(wrong(&hosts[1], "10.77.0.1"), ["multicast from there"]);
    }

    // Answers from its data ports are dropped, as by a firewall.
    let drop_from = |ports: &str| {
        let own = [
            "-n", host, "rule", "add", "iif", "lo", "ipproto", "tcp", "sport",
        ];
        ip(&[&own[..], &[ports, "blackhole"]].concat())
    };
    if let Err(why) = drop_from("52500-52509") {
        eprintln!("SKIPPED {test}: no rules about ports: {why}");
        return;
    }
    let found = wrong(&hosts[0], "10.77.0.2");
    assert!(found.contains(&"data port there".to_owned()), "{found:?}");
    drop_from("52416").unwrap();
    assert_eq!(wrong(&hosts[0], "10.77.0.2"), ["control port there"]);
    let back = wrong(&hosts[1], "10.77.0.1");
    assert!(back.contains(&"control port here".to_owned()), "{back:?}");
}

#[test]
fn multicast_dns_finds_machines_without_beacons() {
    let test = "multicast DNS between namespaces";
    let Some((_network, mut hosts)) = pair("pn", 1, test) else {
        return;
    };
    form(&mut hosts, &["--discovery", "mdns"]);
    let found: Vec<Value> = hosts[0]
        .nodes()
        .iter()
        .map(|it| it["heard_by"].clone())
        .collect();
    let found = serde_json::to_string(&found).unwrap();
    assert!(
        found.contains("mdns") || hosts[1].nodes()[1]["found_by"] == "mdns",
        "{found}"
    );
}
