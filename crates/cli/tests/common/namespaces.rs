//! Hosts that are network namespaces of Linux: real addresses, a real network between them. Wants
//! root and `ip`; skipped by name without.

use std::process::Command;

/// Namespaces on one bridge; deleted at the end.
pub(crate) struct Network {
    names: Vec<String>,
}

impl Network {
    /// `count` namespaces `NAME0` and on, with addresses 10.77.0.1 and on on `eth0`; `None` with a
    /// line when the system does not let us.
    pub(crate) fn new(name: &str, count: usize, test: &str) -> Option<Self> {
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

    /// The namespaces of the hosts.
    pub(crate) fn hosts(&self) -> &[String] {
        &self.names[..self.names.len() - 1]
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
