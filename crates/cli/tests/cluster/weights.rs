//! Weights that travel once: each machine gets what it computes with, and what it says of that.

use serde_json::Value;

use super::{Machine, live::join_by_token, machines, said, until};
use crate::common::namespaces::Network;
use crate::nodes::tiny::{FAMILIES, Tiny};

const MODEL: &str = "deep.gguf";

/// Some 28 MB, so that a third of it is far more than what tells a file from others.
const DEEP: Tiny = Tiny {
    layers: 4,
    ffn: 8192, // matrices of many pieces
    ..FAMILIES[0]
};

/// Share of the model's bytes that each machine has, as `host` tells; those without it have none.
fn shares(host: &Machine) -> Vec<(String, f64)> {
    let told: Value = serde_json::from_str(&host.told(&["models", "--nodes", "--json"])).unwrap();
    let nodes = told["nodes"].as_array().unwrap().iter();
    let share = |node: &Value| {
        let models = node["models"].as_array().unwrap();
        let own = models.iter().find(|model| model["name"] == MODEL);
        let number = |model: &Value, name: &str| model[name].as_f64().unwrap();
        let share = own.map_or(0.0, |it| number(it, "here_bytes") / number(it, "bytes"));
        (node["node"].as_str().unwrap().to_owned(), share)
    };
    let mut shares: Vec<_> = nodes.map(share).collect();
    shares.sort_by(|a, b| a.0.cmp(&b.0));
    shares
}

#[test]
fn each_machine_gets_what_it_computes_with() {
    let test = "weights between namespaces";
    let name = format!("pg{}x", std::process::id());
    let Some(network) = Network::new(&name, 3, test) else {
        return;
    };
    let Some(mut hosts) = machines(&network, test) else {
        return;
    };
    DEEP.write(&hosts[0].home.path().join(MODEL));
    for (number, host) in hosts.iter_mut().enumerate() {
        // n2 has room for a part of the model, and not for all of it.
        let budget = if number == 2 { "24M" } else { "1G" };
        host.up_at("52415", &["--disk-budget", budget]);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    for host in &hosts[1..] {
        join_by_token(host, &token);
    }
    until("all see all", || hosts[0].sees("alive").len() == 3);

    let (alone, _) = hosts[0].answer(MODEL, &["--local"]);
    for split in ["pipeline", "tensor"] {
        let load = ["load", MODEL, "--nodes", "3", "--split", split];
        hosts[0].told(&[&load[..], &["--weights", "shard", "--threads", "1"]].concat());
        let (answer, line) = hosts[2].answer(MODEL, &[]);
        assert!(line.contains("asking the instance"), "{line}");
        assert_eq!(answer["tokens"], alone["tokens"], "{split}");
        let shares = shares(&hosts[1]);
        assert_eq!(shares[0].1, 0.0, "its own file is in no store: {shares:?}");
        // 4 MB of 28 tell the file from others. Tensor splits read columns of whole matrices.
        let most = if split == "pipeline" { 0.7 } else { 0.85 };
        for (node, share) in &shares[1..] {
            assert!((0.15..most).contains(share), "{split}: {node}: {shares:?}");
        }
        let kept = hosts[0].run(&["rm", MODEL, "--everywhere"]);
        assert!(said(&kept).contains("is loaded"), "{}", said(&kept));
        hosts[0].told(&["unload", MODEL]);
        until("it is unloaded", || {
            hosts[0].told(&["ps", "--json"]) == "[]"
        });
        hosts[0].told(&["rm", MODEL, "--everywhere"]);
        assert!(
            self::shares(&hosts[0])
                .iter()
                .all(|(_, share)| *share == 0.0)
        );
    }
    sent(&hosts);
}

/// The model is sent to the machine that has room for it, and refused by the other one.
fn sent(hosts: &[Machine]) {
    let sent = hosts[0].run(&["pull", MODEL, "--to", "n1,n2"]);
    assert!(!sent.status.success(), "n2 has no room for it");
    let said = said(&sent);
    assert!(
        said.contains("n2: ") && said.contains("over the disk budget"),
        "{said}"
    );
    let shares = shares(&hosts[2]);
    assert_eq!((shares[1].1, shares[2].1), (1.0, 0.0), "{shares:?}");
    let table = hosts[2].told(&["models", "--nodes"]);
    assert!(
        table.contains("n2: ") && table.contains("disk budget"),
        "{table}"
    );
    let freed = hosts[2].told(&["rm", MODEL, "--node", "n1"]);
    assert!(freed.contains("removed deep.gguf on n1"), "{freed}");
    let none = hosts[2].run(&["rm", MODEL, "--node", "n1"]);
    assert!(
        super::said(&none).contains("n1: it has no model"),
        "{}",
        super::said(&none)
    );
}
