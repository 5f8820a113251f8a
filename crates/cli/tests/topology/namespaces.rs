//! `paceline topology` over hosts that are network namespaces.

use std::fs;

use serde_json::{Value, json};

use super::{SshHosts, finish};
use crate::common::namespaces::NamespaceNetwork;
use crate::common::words;

/// The addresses are found, and ranks that are launched with them reach each other.
#[test]
fn an_ethernet_between_namespaces_carries_a_launch() {
    let name = format!("pt{}x", std::process::id());
    let Some(network) = NamespaceNetwork::new(&name, 3, "topology --over ethernet, live") else {
        return;
    };
    let world = SshHosts::new();
    for (number, namespace) in network.hosts().iter().enumerate() {
        fs::create_dir(world.path(&format!("hosts/n{number}"))).unwrap();
        fs::write(world.path(&format!("hosts/n{number}/netns")), namespace).unwrap();
    }
    let args = words("--hosts n0,n1,n2 --over ethernet --output hosts.json");
    let ended = world.run_topology(&args);
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(0), ""),
        "{ended:?}"
    );
    let text = fs::read_to_string(world.path("here/hosts.json")).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    let ips: Vec<&Value> = file["hosts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|h| &h["ips"])
        .collect();
    assert_eq!(
        ips,
        [
            &json!(["10.77.0.1"]),
            &json!(["10.77.0.2"]),
            &json!(["10.77.0.3"])
        ]
    );
    let script = "import json, os, socket
ring = json.load(open(os.environ['MLX_HOSTFILE'])); rank = int(os.environ['MLX_RANK'])
host, port = ring[rank][0].split(':')
server = socket.create_server((host, int(port)))
right, port = ring[(rank + 1) % len(ring)][0].split(':')
for attempt in range(100):
    try: out = socket.create_connection((right, int(port)), 5); break
    except OSError: import time; time.sleep(0.05)
left, address = server.accept()
out.sendall(bytes([rank])); print('from', left.recv(1)[0], 'at', address[0])";
    let ended = launch(
        &world,
        &["--hostfile", "hosts.json", "--", "python3", "-c", script],
    );
    let mut lines: Vec<&str> = ended.lines().collect();
    lines.sort_unstable();
    let expected = [
        "[0] from 2 at 10.77.0.3",
        "[1] from 0 at 10.77.0.1",
        "[2] from 1 at 10.77.0.2",
    ];
    assert_eq!(lines, expected);
}

fn launch(world: &SshHosts, args: &[&str]) -> String {
    let mut command = world.paceline(&[&["launch"], args].concat());
    finish(command.spawn().unwrap()).ok().stdout
}
