//! Hosts that are network namespaces of Linux: real addresses, a real network between them. Wants
//! root and `ip`; skipped by name without.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Namespaces on one bridge or several; deleted at the end.
pub(crate) struct NamespaceNetwork {
    names: Vec<String>,
}

/// Writes all frames from and to the first host to a file.
const CAPTURE: &str = "\
import socket, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
raw.bind(('p0', 0))
with open(sys.argv[1], 'wb', buffering=0) as out:
    print('listening', flush=True)
    while True:
        out.write(raw.recv(65535))
";

impl NamespaceNetwork {
    /// `count` namespaces `NAME0` and on, with addresses 10.77.0.1 and on on `eth0`; `None` with a
    /// line when the system does not let us.
    pub(crate) fn new(name: &str, count: usize, test: &str) -> Option<Self> {
        Self::with_cables(name, count, 1, test)
    }

    /// As [`new`](Self::new), with several networks: on `eth1` there are 10.78.0.1 and on.
    pub(crate) fn with_cables(name: &str, count: usize, cables: usize, test: &str) -> Option<Self> {
        let names: Vec<String> = (0..=count)
            .map(|number| format!("{name}{number}"))
            .collect();
        let network = Self { names };
        if let Err(why) = network.make(count, cables) {
            eprintln!("SKIPPED {test}: no network namespaces: {why}");
            return None;
        }
        Some(network)
    }

    pub(crate) fn hosts(&self) -> &[String] {
        &self.names[..self.names.len() - 1]
    }

    /// Writes all frames of the first network to `file` until the program is ended; `None` with a
    /// line where that cannot be.
    pub(crate) fn capture(&self, file: &Path, test: &str) -> Option<Child> {
        let bridge = &self.names[self.names.len() - 1];
        let mut command = Command::new("ip");
        command.args(["netns", "exec", bridge, "python3", "-c", CAPTURE]);
        command.arg(file).stdout(Stdio::piped());
        let Ok(mut child) = command.spawn() else {
            eprintln!("SKIPPED {test}: no ip");
            return None;
        };
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take()?);
        if said.read_line(&mut line).is_err() || line.trim() != "listening" {
            eprintln!("SKIPPED {test}: no packet sockets, or no python3");
            let _ = (child.kill(), child.wait());
            return None;
        }
        Some(child)
    }

    /// Makes the first network slow, 200 Mbit/s out of each host, so that another one is better.
    pub(crate) fn slow_down(&self) -> Result<(), String> {
        let shape = "tc qdisc add dev eth0 root tbf rate 200mbit burst 64kb latency 50ms";
        let shape: Vec<&str> = shape.split(' ').collect();
        let mut hosts = self.hosts().iter();
        hosts.try_for_each(|host| ip(&[&["netns", "exec", host.as_str()][..], &shape[..]].concat()))
    }

    /// Has the first network pass nothing on between these hosts.
    pub(crate) fn part(&self, hosts: &[usize]) -> Result<(), String> {
        let bridge = &self.names[self.names.len() - 1];
        let mut ports = hosts.iter().map(|host| format!("p{host}"));
        let set = ["-n", bridge, "link", "set", "dev"];
        let isolated = ["type", "bridge_slave", "isolated", "on"];
        ports.try_for_each(|port| ip(&[&set[..], &[&port], &isolated].concat()))
    }

    /// Has the first network pass no multicast on to a host.
    pub(crate) fn drop_multicast(&self, host: usize) -> Result<(), String> {
        let bridge = &self.names[self.names.len() - 1];
        let port = format!("p{host}");
        let set = |args: &[&str]| ip(&[&["-n", bridge, "link", "set", "dev"], args].concat());
        set(&["br0", "type", "bridge", "mcast_snooping", "0"])?;
        set(&[&port, "type", "bridge_slave", "mcast_flood", "off"])
    }

    fn make(&self, count: usize, cables: usize) -> Result<(), String> {
        let bridge = &self.names[count];
        ip(&["netns", "add", bridge])?;
        let within = |args: &[&str]| ip(&[&["-n", bridge][..], args].concat());
        for (number, host) in self.names[..count].iter().enumerate() {
            ip(&["netns", "add", host])?;
            ip(&["-n", host, "link", "set", "lo", "up"])?;
            for cable in 0..cables {
                let (name, eth) = (format!("br{cable}"), format!("eth{cable}"));
                if number == 0 {
                    within(&["link", "add", &name, "type", "bridge"])?;
                    within(&["link", "set", &name, "up"])?;
                }
                let letter = if cable == 0 { "p" } else { "q" };
                let port = format!("{letter}{number}");
                let address = format!("10.{}.0.{}/24", 77 + cable, number + 1);
                within(&[
                    "link", "add", &port, "type", "veth", "peer", "name", &eth, "netns", host,
                ])?;
                within(&["link", "set", &port, "master", &name, "up"])?;
                ip(&["-n", host, "addr", "add", &address, "dev", &eth])?;
                ip(&["-n", host, "link", "set", &eth, "up"])?;
            }
        }
        Ok(())
    }
}

impl Drop for NamespaceNetwork {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

/// Runs `ip`; what it says when it fails.
pub(crate) fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip")
        .args(args)
        .output()
        .map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}
