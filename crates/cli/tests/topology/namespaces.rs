//! Hosts that are network namespaces of Linux: real addresses, a real network between them. Wants
//! root; skipped by name without.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::{World, finish};

/// Namespaces on one bridge; deleted at the end.
struct Network {
    names: Vec<String>,
}

impl Network {
    /// `count` namespaces `NAME0` and on, with addresses 10.77.0.1 and on on `eth0`; `None` with a
    /// line when the system does not let us.
    fn new(name: &str, count: usize, test: &str) -> Option<Self> {
        let names: Vec<String> = (0..=count)
            .map(|number| format!("{name}{number}"))
            .collect();
        let network = Self { names };
        if let Err(why) = network.make(count) {
            eprintln!("SKIPPED {test}: no network namespaces: {why}");
            return None;
        }
        Some(network)
    }

    fn make(&self, count: usize) -> Result<(), String> {
        let bridge = &self.names[count];
        ip(&["netns", "add", bridge])?;
        let within = |args: &[&str]| ip(&[&["-n", bridge][..], args].concat());
        within(&["link", "add", "br0", "type", "bridge"])?;
        within(&["link", "set", "br0", "up"])?;
        for (number, host) in self.names[..count].iter().enumerate() {
            ip(&["netns", "add", host])?;
            let (port, address) = (format!("p{number}"), format!("10.77.0.{}/24", number + 1));
            within(&[
                "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", host,
            ])?;
            within(&["link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", host, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", host, "link", "set", "eth0", "up"])?;
            ip(&["-n", host, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip")
        .args(args)
        .output()
        .map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

/// The addresses are found, and ranks that are launched with them reach each other.
#[test]
fn an_ethernet_between_namespaces_carries_a_launch() {
    let name = format!("pt{}x", std::process::id());
    let Some(network) = Network::new(&name, 3, "topology --over ethernet, live") else {
        return;
    };
    let world = World::new();
    for (number, namespace) in network.names[..3].iter().enumerate() {
        fs::create_dir(world.path(&format!("hosts/n{number}"))).unwrap();
        fs::write(world.path(&format!("hosts/n{number}/netns")), namespace).unwrap();
    }
    let args = [
        "--hosts",
        "n0,n1,n2",
        "--over",
        "ethernet",
        "--output",
        "hosts.json",
    ];
    let ended = world.run(&args);
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

fn launch(world: &World, args: &[&str]) -> String {
    let mut command = world.paceline(&[&["launch"], args].concat());
    finish(command.spawn().unwrap()).ok().stdout
}
