//! Four machines on a network: three become a cluster, one is of another.

use std::io::Write as _;
use std::process::Stdio;

use super::{TestMachine, machines, said, until};
use crate::common::namespaces::NamespaceNetwork;
use crate::common::{collect, text};

/// README's steps, then a crash and a revocation, all while a stranger is there.
#[test]
fn machines_join_and_see_each_other_die() {
    let name = format!("pc{}x", std::process::id());
    let test = "a cluster of namespaces";
    let Some(network) = NamespaceNetwork::new(&name, 4, test) else {
        return;
    };
    let Some(mut hosts) = machines(&network, test) else {
        return;
    };
    let stranger_args = ["--peer", "10.77.0.1"];
    for (number, host) in hosts.iter_mut().enumerate() {
        host.up(if number == 3 { &stranger_args } else { &[] });
    }
    let stranger = hosts.pop().unwrap();
    for host in &hosts {
        assert_eq!(host.sees("alive"), [host.name.as_str()], "clusters of one");
    }
    hosts[0].told(&["key", "api", "new", "laptop"]);

    form(&hosts);
    crash(&mut hosts);
    cut_off(&mut hosts);

    assert_eq!(stranger.sees("alive"), ["n3"], "it learns nothing");
    let output = stranger.run(&["nodes"]);
    let all = text(&output.stdout) + &said(&output);
    assert!(all.contains("peer 10.77.0.1"), "{all}");
    assert!(
        !["n0", "n1", "n2"].iter().any(|name| all.contains(name)),
        "{all}"
    );
    let log = hosts[0].home.path().join("audit.jsonl");
    until("the audit log has the stranger", || {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let is_told = |line: &str| line.contains("node_wrong_key") && line.contains("10.77.0.");
        log.lines().any(is_told)
    });
}

/// Two machines join, by code and by token; all see all.
fn form(hosts: &[TestMachine]) {
    let code = hosts[0].told(&["nodes", "invite"]);
    hosts[1].told(&["join", &code]);
    let token = hosts[0].told(&["key", "cluster", "show"]);
    join_by_token(&hosts[2], &token);
    for host in hosts {
        let seen = || host.sees("alive") == ["n0", "n1", "n2"];
        until("all see all", seen);
        // A node known from others' word at first is heard by its own beacon within a second.
        let hears = |node: &serde_json::Value| {
            node["found_by"] == "self" || node["heard_by"].to_string().contains("\"beacon")
        };
        until("all find all", || host.nodes().iter().all(hears));
        for node in host.nodes() {
            let is_self = node["name"] == host.name.as_str();
            let found = node["found_by"].as_str().unwrap();
            assert_eq!(found == "self", is_self, "{node}");
            assert!(node["memory_bytes"].as_u64().unwrap() > 0, "{node}");
            assert!(node["cores"].as_u64().unwrap() > 0, "{node}");
            assert_eq!(node["kernel_class"], "cpu", "{node}");
            assert!(node["addresses"].to_string().contains("10.77.0."), "{node}");
        }
    }
    let adopted = || hosts[2].told(&["key", "api", "list"]).ends_with("  laptop");
    until("the API key is adopted", adopted);
    let refused = hosts[1].run(&["join", "--token-file", "/dev/null"]);
    assert!(
        said(&refused).contains("not a cluster token"),
        "{}",
        said(&refused)
    );
}

/// A crash is seen, and a dead machine can be forgotten. Its return: `scripts/docs/first_day.py`.
fn crash(hosts: &mut [TestMachine]) {
    hosts[2].kill();
    for host in &hosts[..2] {
        until("the crash is seen", || host.sees("dead") == ["n2"]);
    }
    hosts[0].told(&["nodes", "rm", "n2"]);
    until("it is forgotten", || hosts[1].nodes().len() == 2);
}

/// A machine is revoked: the token changes, and the old one lets nobody in that is not known.
fn cut_off(hosts: &mut [TestMachine]) {
    let old = hosts[0].told(&["key", "cluster", "show"]);
    hosts[0].told(&["nodes", "revoke", "n1"]);
    let token = hosts[0].told(&["key", "cluster", "show"]);
    assert_ne!(token, old);
    until("it is alone", || hosts[1].sees("alive") == ["n1"]);
    // Forgotten before, it has the old key.
    hosts[2].up(&["--peer", "10.77.0.1"]);
    until("it hears why it is refused", || {
        said(&hosts[2].run(&["nodes"])).contains("key has changed")
    });
    hosts[2].told(&["leave"]);
    join_by_token(&hosts[2], &token);
    until("it is in again", || hosts[0].sees("alive") == ["n0", "n2"]);
    // It may have met n2 while both had the old key.
    until("and n1 is not", || hosts[1].sees("alive") == ["n1"]);
}

/// `paceline join --token-file -`.
pub(super) fn join_by_token(host: &TestMachine, token: &str) {
    let mut command = host.command(&["join", "--token-file", "-"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    writeln!(stdin, "{token}").unwrap();
    drop(stdin);
    let output = collect(child);
    assert!(output.status.success(), "{}", said(&output));
}
