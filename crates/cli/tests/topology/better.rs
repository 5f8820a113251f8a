//! Where MLX's tool goes wrong, and this one must not.

use serde_json::{Value, json};

use super::{SshHosts, macs, write_program};
use crate::common::terminal::Terminal;

/// The setup goes to standard error, so that standard output is a hostfile and nothing else. Nobody
/// is asked, so that it ends unattended, even with a standard input that never ends.
#[test]
fn output_is_a_hostfile_and_nobody_is_asked() {
    let world = SshHosts::with(&macs(2, &[(0, 1)]));
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

/// MLX gives such a host two addresses, the one that it was named by and that of en0.
#[test]
fn a_literal_address_is_the_only_one() {
    let world = SshHosts::new();
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

/// Nothing in MLX undoes a setup.
#[test]
fn a_setup_can_be_undone() {
    let world = SshHosts::with(&macs(2, &[(0, 1)]));
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

/// MLX does not look at how the commands end.
#[test]
fn a_setup_that_cannot_be_done_is_told() {
    let world = SshHosts::with(&macs(3, &[(0, 1), (1, 2), (2, 0)]));
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
    let world = SshHosts::with(&macs(2, &[(0, 1)]));
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
fn answer_at_terminal(world: &SshHosts, answer: &str) {
    let mut command = world.topology(&["--hosts", "h0,h1", "--auto-setup"]);
    let mut terminal = Terminal::start(&mut command);
    terminal.expect("Run these commands on all hosts? [y/N]");
    terminal.type_keys(answer);
    let status = terminal.child.wait().unwrap();
    assert!(status.success(), "{}", terminal.rest());
}
