//! Where MLX's tool goes wrong, and this one must not.

use std::process::Stdio;

use serde_json::{Value, json};

use super::{World, macs, replace, write_program};
use crate::common::complaints;

const MESH: [(usize, usize); 6] = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];

fn names(file: &Value) -> String {
    let hosts = file["hosts"].as_array().unwrap();
    hosts
        .iter()
        .map(|host| host["ssh"].as_str().unwrap())
        .collect::<Vec<_>>()
        .join(" ")
}

/// The setup goes to standard error, so that standard output is a hostfile and nothing else. Nobody
/// is asked, so that it ends unattended, even with a standard input that never ends.
#[test]
fn output_is_a_hostfile_and_nobody_is_asked() {
    let world = World::with(&macs(2, &[(0, 1)]));
    let ended = world.run_topology(&["--hosts", "h0,h1", "--backend", "ring"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let file: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(file["backend"], "ring");
    let expected = "Setup for h0\n============\nsudo ifconfig bridge0 down\n\
                    sudo ifconfig en2 inet 192.168.0.1 netmask 255.255.255.252\n\
                    sudo route change 192.168.0.2 -interface en2\n\nSetup for h1\n";
    assert!(ended.stderr.starts_with(expected), "{}", ended.stderr);
    assert_eq!(world.done("h0"), None, "nothing is done unless asked for");
}

/// MLX keeps the first ring of the same hosts.
#[test]
fn the_ring_with_most_cables_is_taken() {
    let cables = [&MESH[..], &[(0, 2), (2, 1), (1, 3), (3, 0)]].concat();
    let world = World::with(&macs(4, &cables));
    let file = world.printed_hostfile(&["--hosts", "h0,h1,h2,h3", "--backend", "ring"]);
    assert_eq!(names(&file), "h0 h2 h1 h3");
    for host in file["hosts"].as_array().unwrap() {
        assert_eq!(host["ips"].as_array().unwrap().len(), 2, "{host}");
    }
}

/// MLX follows every path: 12 hosts in a mesh, but for one, are 10^8 of them.
#[test]
fn a_search_without_result_ends() {
    let cables: Vec<_> = (1..12)
        .flat_map(|a| (a + 1..12).map(move |b| (a, b)))
        .collect();
    let hosts = macs(12, &[&cables[..], &[(0, 1)]].concat());
    let world = World::with(&hosts);
    let all: Vec<String> = (0..12).map(|host| format!("h{host}")).collect();
    let start = std::time::Instant::now();
    let ended = world.run_topology(&["--hosts", &all.join(","), "--backend", "ring"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let expected = "error: no ring through all hosts: h0 is not connected to h11\nhint: ";
    assert!(ended.stderr.starts_with(expected), "{ended:?}");
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn missing_cables_are_all_named() {
    let world = World::with(&macs(4, &[(0, 1), (1, 2), (2, 3)]));
    let hosts = ["--hosts", "h0,h1,h2,h3"];
    let ended = world.run_topology(&[&hosts[..], &["--backend", "jaccl"]].concat());
    let expected = "error: no mesh: h0 is not connected to h2, h0 is not connected to h3, \
                    h1 is not connected to h3\nhint: ";
    assert!(
        ended.code == Some(1) && ended.stderr.starts_with(expected),
        "{ended:?}"
    );
    let ended = world.run_topology(&hosts);
    let expected = "error: no ring through all hosts: h0 is not connected to h3\nhint: ";
    assert!(
        ended.code == Some(1) && ended.stderr.starts_with(expected),
        "{ended:?}"
    );
}

/// MLX gives such a host two addresses, the one that it was named by and that of en0.
#[test]
fn a_literal_address_is_the_only_one() {
    let world = World::new();
    for (number, name) in ["192.0.2.1", "192.0.2.2"].into_iter().enumerate() {
        world.add_host(name, &macs(2, &[(0, 1)])[format!("h{number}")]);
    }
    let hosts = ["--hosts", "192.0.2.1,192.0.2.2"];
    for own in [&["--over", "ethernet"], &["--backend", "jaccl"]] {
        let file = world.printed_hostfile(&[&hosts[..], own].concat());
        let ips: Vec<&Value> = file["hosts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|h| &h["ips"])
            .collect();
        assert_eq!(ips, [&json!(["192.0.2.1"]), &json!(["192.0.2.2"])]);
    }
}

/// MLX draws it once for each end, and gives it addresses.
#[test]
fn a_cable_from_a_host_to_itself_is_drawn_once() {
    let world = World::with(&macs(2, &[(0, 0), (0, 1)]));
    let ended = world.run_topology(&["--hosts", "h0,h1", "--dot"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let lines = ended.stdout.lines().filter(|line| line.contains("--"));
    let expected = [
        "  a -- a [label=\"en2/en3\"]",
        "  a -- b [label=\"en4/en2\"]",
    ];
    assert_eq!(lines.collect::<Vec<_>>(), expected);
    assert_eq!(ended.stderr, "warning: a cable leads from h0 to itself\n");
    let file = world.printed_hostfile(&["--hosts", "h0,h1", "--backend", "ring"]);
    assert_eq!(file["hosts"][0]["ips"], json!(["192.168.0.1"]));
}

/// MLX takes 192.168.0.0 on, whoever has it.
#[test]
fn networks_in_use_are_left_alone() {
    let mut hosts = macs(2, &[(0, 1)]);
    hosts["h1"]["ifconfig.txt"] =
        "en0: flags=8863<UP>\n\tinet 192.168.0.17 netmask 0xffffff00\n".into();
    let world = World::with(&hosts);
    let file = world.printed_hostfile(&["--hosts", "h0,h1", "--backend", "ring"]);
    assert_eq!(file["hosts"][0]["ips"], json!(["192.168.1.1"]));
    assert_eq!(file["hosts"][1]["ips"], json!(["192.168.1.2"]));
}

/// Nothing in MLX undoes a setup.
#[test]
fn a_setup_can_be_undone() {
    let world = World::with(&macs(2, &[(0, 1)]));
    let ended = world.run_topology(&["--hosts", "h0,h1", "--undo"]);
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(0), ""),
        "{ended:?}"
    );
    let commands = "route delete 192.168.0.2\nifconfig en2 inet 192.168.0.1 delete\n\
                    ifconfig bridge0 up\n";
    assert!(
        ended
            .stderr
            .contains("sudo ifconfig en2 inet 192.168.0.1 delete\n"),
        "{ended:?}"
    );
    assert_eq!(world.done("h0"), None);
    let ended = world.run_topology(&["--hosts", "h0,h1", "--undo", "--auto-setup", "--yes"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(world.done("h0").as_deref(), Some(commands));
}

/// MLX does not look below hubs.
#[test]
fn machines_behind_a_hub_are_found() {
    let mut hosts = macs(2, &[(0, 1)]);
    let (direct, behind) = (
        r#"[{"_name":"Mac Studio","domain_uuid_key":"C0-TO"}]"#,
        r#"[{"_name":"hub","_items":[{"_name":"x","domain_uuid_key":"C0-TO"}]}]"#,
    );
    replace(&mut hosts, "h0", "profiler.json", direct, behind);
    replace(&mut hosts, "h1", "profiler.json", "C0-FROM", "C0-UNKNOWN");
    let world = World::with(&hosts);
    let file = world.printed_hostfile(&["--hosts", "h0,h1", "--backend", "ring"]);
    assert_eq!(names(&file), "h0 h1");
}

/// MLX ends with KeyError when a person has deleted a network service, connected or not.
#[test]
fn a_service_that_is_missing_is_named() {
    let mut hosts = macs(2, &[(0, 1)]);
    replace(&mut hosts, "h1", "hardware.txt", "Thunderbolt 1", "Renamed");
    let world = World::with(&hosts);
    let ended = world.run_topology(&["--hosts", "h0,h1"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let expected = "error: h1 has a cable in Thunderbolt 1, but no network service of that name\n\
                    hint: add the service \"Thunderbolt 1\"";
    assert!(ended.stderr.starts_with(expected), "{ended:?}");
}

/// MLX does not look at how the commands end.
#[test]
fn a_setup_that_cannot_be_done_is_told() {
    let world = World::with(&macs(3, &[(0, 1), (1, 2), (2, 0)]));
    let run = || world.run_topology(&["--hosts", "h0,h1,h2", "--auto-setup", "--yes"]);
    let sudo = |script: &str| write_program(&world.path("hosts/h1/bin/sudo"), script);
    sudo("#!/bin/sh\necho sudo: a password is required >&2; exit 1\n");
    let ended = run();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let expected = "error: sudo wants a password on h1\nhint: run the commands shown above";
    assert!(ended.stderr.contains(expected), "{ended:?}");
    assert_eq!(world.done("h0"), None, "nothing is done by halves");
    let fails =
        "case \"$*\" in *inet*) echo no such interface >&2; exit 5 ;; *echo*) echo yes ;; esac";
    sudo(&format!("#!/bin/sh\n{fails}\n"));
    let ended = run();
    assert_eq!((ended.code, &ended.stdout[..]), (Some(1), ""), "{ended:?}");
    for part in [
        "  no such interface\n",
        "error: the setup of h1 failed: it exited with code 1",
        "--undo",
    ] {
        assert!(ended.stderr.contains(part), "{part:?} is not in {ended:?}");
    }
    assert_eq!(world.done("h2"), None, "it ends there");
}

/// A terminal is asked, and may say no.
#[test]
fn setup_runs_only_after_a_yes() {
    let world = World::with(&macs(2, &[(0, 1)]));
    let ended = world.run_topology(&["--hosts", "h0,h1", "--auto-setup"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("hint: add --yes"), "{ended:?}");
    assert_eq!((world.done("h0"), ended.stdout.as_str()), (None, ""));
    let ended = world.run_topology(&["--hosts", "h0,h1", "--auto-setup", "--yes"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        world
            .done("h1")
            .unwrap()
            .starts_with("ifconfig bridge0 down\nifconfig en2 ")
    );
    let output = world.path("hosts/h0/done");
    std::fs::remove_file(&output).unwrap();
    for (answer, is_done) in [("n\n", false), ("\n", false), ("y\n", true)] {
        answer_at_terminal(&world, answer);
        assert_eq!(output.exists(), is_done, "{answer:?}");
    }
}

/// Runs the setup at a terminal, where `answer` is typed.
fn answer_at_terminal(world: &World, answer: &str) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new())
        .unwrap()
        .into_string()
        .unwrap();
    let other = std::fs::File::options()
        .read(true)
        .write(true)
        .open(name)
        .unwrap();
    let mut keys = std::fs::File::from(terminal);
    std::io::Write::write_all(&mut keys, answer.as_bytes()).unwrap();
    let mut child = world
        .topology(&["--hosts", "h0,h1", "--auto-setup"])
        .stdin(other)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said = complaints(&mut child);
    assert!(child.wait().unwrap().success(), "{said}");
    assert!(
        said.contains("Run these commands on all hosts? [y/N]"),
        "{said}"
    );
}
