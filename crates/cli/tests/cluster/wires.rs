//! Two machines with an RDMA cable, by the verbs library in software. They use TCP before both
//! trust the cable, RDMA after, and TCP again once it is cut.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use super::{TestMachine, live::join_by_token, machines, until, until_ready};
use crate::common::namespaces::NamespaceNetwork;
use crate::library;
use crate::nodes::tiny::FAMILIES;

const MODEL: &str = "llama.gguf";

/// Loads the model over both machines, and returns the transports that `ps` names.
fn load(hosts: &[TestMachine]) -> String {
    let load = ["load", MODEL, "--nodes", "2", "--threads", "1"];
    hosts[0].told(&[&load[..], &["--split", "tensor"]].concat()); // measures nothing before
    until_ready(&hosts[0], &hosts[1]);
    wires(&hosts[0])
}

fn wires(host: &TestMachine) -> String {
    let all = host.ps();
    all[0]["wires"].as_str().unwrap_or_default().to_owned()
}

fn tokens(host: &TestMachine) -> Value {
    host.answer(MODEL, &[]).0["tokens"].clone()
}

/// Lines of a machine's log with this text.
fn logged(host: &TestMachine, text: &str) -> bool {
    let log = std::fs::read_to_string(host.home.path().join("log"));
    log.unwrap_or_default().contains(text)
}

/// Starts both machines with one device each, at the address of its interface.
fn form(hosts: &mut [TestMachine], (library, fabric): (&Path, &Path)) {
    for (number, host) in (1..).zip(hosts.iter_mut()) {
        host.variables = vec![
            format!("LD_LIBRARY_PATH={}", library.display()),
            format!("IBV_SOFT_FOLDER={}", fabric.display()),
            format!("IBV_SOFT_DEVICES=soft{number}=10.77.0.{number}"),
        ];
        host.up_at("52415", &[]);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    join_by_token(&hosts[1], &token);
    let cables = |host: &TestMachine| host.told(&["nodes", "trust", "--json"]);
    until("both see the cable", || {
        hosts.iter().all(|host| cables(host).contains("soft"))
    });
}

#[test]
fn a_cable_carries_plaintext_where_both_machines_trust_it() {
    let test = "an RDMA cable between namespaces";
    let folders = [(); 2].map(|()| TempDir::with_prefix_in("paceline-rdma", "/tmp").unwrap());
    let (built, fabric) = (folders[0].path(), folders[1].path().join("cable"));
    std::fs::create_dir(&fabric).unwrap();
    let name = format!("pr{}x", std::process::id());
    let Some(network) = NamespaceNetwork::new(&name, 2, test) else {
        return;
    };
    let Some(mut hosts) = machines(&network, test) else {
        return;
    };
    if library::build(built).is_none() {
        eprintln!("SKIPPED {test}: no rustc");
        return;
    }
    FAMILIES[0].write(&hosts[0].home.path().join(MODEL));
    form(&mut hosts, (built, &fabric));
    let rdma = &hosts[0].nodes()[0]["rdma"][0];
    assert_eq!(
        (&rdma["interface"], &rdma["mbit_per_s"]),
        (&"eth0".into(), &25_000.into())
    );

    // One machine alone cannot decide for the other.
    hosts[0].told(&["nodes", "trust", "soft1:n1"]);
    let waits = "encrypted TCP between n0 and n1: for RDMA, which is not encrypted, \
                 `paceline nodes trust soft2:n0` on n1";
    assert_eq!(load(&hosts), waits);
    assert!(logged(&hosts[0], waits));
    let expected = tokens(&hosts[1]);
    hosts[0].told(&["unload", MODEL]);

    let told = hosts[1].told(&["nodes", "trust", "soft2:n0"]);
    assert!(told.contains("soft2:n0"), "{told}");
    until("both know of it", || {
        hosts[0].told(&["nodes", "trust"]).contains("at both ends")
    });
    assert_eq!(load(&hosts), "RDMA, not encrypted, between n0 and n1");
    assert!(hosts[1].told(&["ps"]).contains("RDMA, not encrypted"));
    assert_eq!(tokens(&hosts[1]), expected);

    // From here on no message arrives.
    std::fs::rename(&fabric, fabric.with_extension("cut")).unwrap();
    assert_eq!(tokens(&hosts[1]), expected, "the answer comes by TCP");
    let text = wires(&hosts[0]);
    assert!(
        text.starts_with("encrypted TCP between n0 and n1 (n"),
        "{text}"
    );
    assert!(text.contains("nothing from rank"), "{text}");
    assert!(logged(
        &hosts[0],
        "llama.gguf: encrypted TCP between n0 and n1 (n"
    ));
}
