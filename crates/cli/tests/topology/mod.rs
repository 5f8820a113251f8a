//! `paceline topology` as a user calls it, on Macs that are not there.
//!
//! A stand-in for `ssh` (`tests-data/topology/ssh`) runs commands in a host's folder, whose `bin`
//! has commands that print what a Mac would. `mlx-0.32.4.json` has such hosts and what MLX's own
//! tool makes of them ([`same`]). `cargo xtask mlx-tools` compares the two tools themselves, and
//! with `--golden` it writes that file.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod better;
mod namespaces;
mod same;
mod usage;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::hosts::{LaunchOutput, SshHosts, finish, tests_data, write_program};

/// Commands of a Mac: they print files of the host's folder.
const COMMANDS: [(&str, &str); 7] = [
    ("system_profiler", "cat \"$HOME/profiler.json\""),
    ("networksetup", "cat \"$HOME/hardware.txt\""),
    ("ibv_devices", "cat \"$HOME/devices.txt\""),
    ("ifconfig", "cat \"$HOME/ifconfig.txt\""),
    ("ipconfig", "cat \"$HOME/address.$2\" 2>/dev/null"),
    ("ip", "exit 127"),
    // Notes what an administrator is asked to do.
    (
        "sudo",
        "[ \"$1\" != -n ] || shift\n\
         case $1 in echo) shift; echo \"$@\" ;; *) echo \"$*\" >>\"$HOME/done\" ;; esac",
    ),
];

impl SshHosts {
    /// With hosts as they are recorded: files by name, by host.
    fn with(hosts: &Value) -> Self {
        let world = Self::new();
        for (name, files) in hosts.as_object().unwrap() {
            world.add_host(name, files);
        }
        world
    }

    fn add_host(&self, name: &str, files: &Value) {
        let folder = self.path(&format!("hosts/{name}"));
        fs::create_dir_all(folder.join("bin")).unwrap();
        for (file, text) in files.as_object().unwrap() {
            fs::write(folder.join(file), text.as_str().unwrap()).unwrap();
        }
        for (command, script) in COMMANDS {
            let path = folder.join("bin").join(command);
            write_program(&path, &format!("#!/bin/sh\n{script}\n"));
        }
    }

    fn topology(&self, args: &[&str]) -> Command {
        self.paceline(&[&["topology"], args].concat())
    }

    fn run_topology(&self, args: &[&str]) -> LaunchOutput {
        finish(self.topology(args).spawn().unwrap())
    }

    fn printed_hostfile(&self, args: &[&str]) -> Value {
        let ended = self.run_topology(args);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.stdout).unwrap()
    }

    /// The steps that were done on a host as an administrator.
    fn done(&self, host: &str) -> Option<String> {
        fs::read_to_string(self.path(&format!("hosts/{host}/done"))).ok()
    }
}

/// Macs `h0`, `h1` and so on with these cables, port `n` of each on interface `en(n + 2)`.
fn macs(count: usize, cables: &[(usize, usize)]) -> Value {
    let mut ports: BTreeMap<usize, Vec<(String, String)>> = BTreeMap::new();
    for (number, (a, b)) in cables.iter().enumerate() {
        let (from, to) = (format!("C{number}-FROM"), format!("C{number}-TO"));
        ports
            .entry(*a)
            .or_default()
            .push((from.clone(), to.clone()));
        ports.entry(*b).or_default().push((to, from));
    }
    let host = |host: usize| {
        let own = ports.get(&host).cloned().unwrap_or_default();
        (format!("h{host}"), mac(host, &own))
    };
    Value::Object((0..count).map(host).collect())
}

/// A Mac whose ports have these identifiers and peers.
fn mac(host: usize, ports: &[(String, String)]) -> Value {
    let entry = |(number, (own, peer)): (usize, &(String, String))| {
        json!({
            "_name": "thunderboltusb4_bus", "device_name_key": "Mac Studio",
            "domain_uuid_key": own,
            "receptacle_1_tag": {"receptacle_id_key": (number + 1).to_string()},
            "_items": [{"_name": "Mac Studio", "domain_uuid_key": peer}],
        })
    };
    let entries: Vec<Value> = ports.iter().enumerate().map(entry).collect();
    let service = |number| {
        let interface = number + 2;
        format!(
            "Hardware Port: Thunderbolt {}\nDevice: en{interface}\n\n",
            number + 1
        )
    };
    let hardware: String = (0..ports.len()).map(service).collect();
    let devices: String = (0..ports.len())
        .map(|n| format!("    rdma_en{}\n", n + 2))
        .collect();
    json!({
        "profiler.json": json!({"SPThunderboltDataType": entries}).to_string(),
        "hardware.txt": hardware,
        "devices.txt": devices,
        "ifconfig.txt": "",
        "address.en0": format!("10.0.0.{}\n", host + 1),
    })
}
