//! `paceline bench comm` as the program of `paceline launch`: the wires that a launcher sets up.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use serde_json::Value;

use super::{LaunchOutput, SshHosts};
use crate::library;

/// The binary under test, as a rank's program.
const PROGRAM: &str = env!("CARGO_BIN_EXE_paceline");

/// `bench comm`, as short as it can be.
const SHORT: [&str; 4] = ["bench", "comm", "--max-bytes", "64"];

/// The first of two ports that nothing listens at, below those that Linux gives to connections
/// (32,768 on): none of another test takes them meanwhile.
fn free_port() -> String {
    let first = 20_000 + u16::try_from(std::process::id() % 5_000).unwrap() * 2;
    let is_free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let mut pairs = (first..32_000).step_by(2);
    let port = pairs.find(|port| is_free(*port) && is_free(*port + 1));
    port.unwrap().to_string()
}

/// The report of rank 0: nobody else prints.
pub(crate) fn report(ended: LaunchOutput) -> Value {
    let ended = ended.ok();
    let [line] = ended.lines()[..] else {
        panic!("more than a report: {ended:?}");
    };
    serde_json::from_str(line.strip_prefix("[0] ").unwrap()).unwrap()
}

fn operations(report: &Value) -> Vec<&str> {
    let rows = report["rows"].as_array().unwrap().iter();
    let mut names: Vec<&str> = rows.map(|row| row["op"].as_str().unwrap()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// A hostfile of this machine, twice, with a device from each rank to the other.
fn devices(world: &SshHosts) -> String {
    let host =
        |rdma: &str| format!(r#"{{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": {rdma}}}"#);
    let hosts = [host(r#"[null, "soft0"]"#), host(r#"["soft1", null]"#)].join(",");
    let path = world.path("devices.json");
    fs::write(
        &path,
        format!(r#"{{"backend": "jaccl", "hosts": [{hosts}]}}"#),
    )
    .unwrap();
    path.to_str().unwrap().to_owned()
}

/// Processes, a library that the system's loader finds by its name, and JACCL's environment.
#[test]
fn ranks_over_rdma_are_found_by_jaccls_environment() {
    let world = SshHosts::new();
    let folder = world.path("here");
    if library::build(&folder).is_none() {
        eprintln!("SKIPPED ranks_over_rdma_are_found_by_jaccls_environment: no rustc");
        return;
    }
    let hostfile = devices(&world);
    let port = free_port();
    let path = folder.to_str().unwrap();
    let env = [
        format!("LD_LIBRARY_PATH={path}"),
        format!("IBV_SOFT_FOLDER={path}"),
    ];
    let args = [
        "--hostfile",
        &hostfile,
        "-p",
        &port,
        "--env",
        &env[0],
        "--env",
        &env[1],
        "--",
    ];
    let program = [&[PROGRAM][..], &SHORT, &["--transport", "rdma"]].concat();
    let refused = world.run_launch(&[&args[..], &program].concat());
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(
        refused.stderr.contains("error: rdma is plaintext"),
        "{refused:?}"
    );
    assert!(
        refused.stderr.contains("hint: --plaintext allows it"),
        "{refused:?}"
    );
    let report =
        report(world.run_launch(&[&args[..], &program, &["--plaintext", "--json"]].concat()));
    assert_eq!(
        (&report["transport"], &report["ranks"]),
        (&"rdma".into(), &2.into())
    );
    assert_eq!(operations(&report).len(), 9, "{report}");
    world.assert_clean();
}

#[test]
fn ranks_of_mlxs_ring_are_found_by_its_hostfile() {
    let world = SshHosts::new();
    let port = free_port();
    let args = ["-n", "2", "-p", &port, "--", PROGRAM];
    let more = ["--transport", "mlx-ring", "--plaintext", "--json"];
    let report = report(world.run_launch(&[&args[..], &SHORT, &more].concat()));
    // What MLX's wire has, and what its sums are held against.
    let expected = [
        "all_gather",
        "all_reduce",
        "barrier",
        "send_recv",
        "two_copies",
    ];
    assert_eq!(operations(&report), expected);
}

#[test]
fn ranks_of_another_wire_can_be_started_without_a_launcher() {
    let world = SshHosts::new();
    let args = [&SHORT[..], &["--transport", "mlx-ring", "--plaintext"]].concat();
    let mut command = Command::new(PROGRAM);
    let output = command.args(args).env_remove("MLX_RANK").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("over mlx-ring"),
        "{output:?}"
    );
    drop(world);
}

#[test]
fn what_is_missing_is_said_with_advice() {
    for (transport, error, hint) in [
        (
            "rdma",
            "neither JACCL_IBV_DEVICES nor MLX_IBV_DEVICES is set",
            "paceline launch",
        ),
        #[cfg(not(feature = "mpi"))]
        ("mpi", "mpi is not in this build", "--features mpi"),
    ] {
        let mut command = Command::new(PROGRAM);
        command
            .env_clear()
            .args(SHORT)
            .args(["--transport", transport, "--plaintext"]);
        let output = command.env("MLX_RANK", "0").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(error) && text.contains(hint), "{text}");
    }
}
