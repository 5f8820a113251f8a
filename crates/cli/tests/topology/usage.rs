//! The output, and the errors where there is none.

use serde_json::{Value, json};

use super::{SshHosts, macs};
use crate::common::{assert_parts, rows, words};

#[test]
fn everything_found_is_one_object() {
    let world = SshHosts::with(&macs(3, &[(0, 1), (1, 2)]));
    let ended = world.run_topology(&["--hosts", "h0,h1", "--json"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(found["over"], "thunderbolt");
    assert_eq!(found["backend"], "jaccl");
    assert_eq!(found["ring"], json!({"order": ["h0", "h1"], "cables": 1}));
    assert_eq!(found["missing_for_mesh"], json!([]));
    assert_eq!(
        found["cables"],
        json!([{
            "from": {"host": "h0", "interface": "en2", "address": "192.168.0.1"},
            "to": {"host": "h1", "interface": "en2", "address": "192.168.0.2"},
        }])
    );
    assert_eq!(found["hosts"][1]["ports"].as_array().unwrap().len(), 2);
    assert_eq!(found["setup"]["h0"][0], "sudo ifconfig bridge0 down");
    assert_eq!(
        found["hostfile"]["hosts"][0]["rdma"],
        json!([null, "rdma_en2"])
    );
    let ended = world.run_topology(&["--hosts", "h0,h1", "--json", "--over", "ethernet"]);
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(found["hostfile"]["hosts"][1]["ips"], json!(["10.0.0.2"]));
}

#[test]
fn hosts_that_are_silent_are_named_or_left_out() {
    let world = SshHosts::with(&macs(3, &[(0, 1), (1, 2), (2, 0)]));
    let hosts = ["--hosts", "h0,gone,h1,away"];
    let ended = world.run_topology(&hosts);
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(1), ""),
        "{ended:?}"
    );
    let why = |host| format!("cannot reach {host}: ssh: connect to host {host} port 22");
    for part in [why("gone"), why("away"), "hint: `ssh away true`".to_owned()] {
        assert!(ended.stderr.contains(&part), "no {part:?} in {ended:?}");
    }
    let ended = world.run_topology(&[&hosts[..], &["--ignore-unreachable"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let file: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(file["hosts"].as_array().unwrap().len(), 2);
    let ended = world.run_topology(&["--hosts", "gone", "--ignore-unreachable"]);
    assert!(
        ended.code == Some(1) && ended.stderr.contains("none of the hosts answers"),
        "{ended:?}"
    );
}

#[test]
fn a_hostfile_names_hosts_too() {
    let world = SshHosts::with(&macs(2, &[(0, 1)]));
    let text = r#"[{"ssh": "h1"}, {"ssh": "h0"}]"#;
    std::fs::write(world.path("here/hosts.json"), text).unwrap();
    let file = world.printed_hostfile(&words("--hostfile hosts.json --env A=1 --over ethernet"));
    let expected = json!({"backend": "", "envs": ["A=1"], "hosts": [
        {"ssh": "h1", "ips": ["10.0.0.2"], "rdma": []},
        {"ssh": "h0", "ips": ["10.0.0.1"], "rdma": []},
    ]});
    assert_eq!(file, expected);
}

const IMPOSSIBLE: &str = "\
--hosts h0 | one host | hint: name several
--hosts h0,linux | linux says nothing about Thunderbolt | --over ethernet
--hosts h0,h0 | the same machine
--hosts h0,weak --backend jaccl | no RDMA on weak | rdma_ctl
--hosts h0,h1 --output /nonexistent/x | cannot write hostfile";

const WRONG: &str = "\
--hosts h0,-x | starts with a hyphen
--hosts h0,h1 --backend mpi | 'mpi'
--hosts h0,h1 --over wifi | 'wifi'";

#[test]
fn what_cannot_be_is_said_with_advice() {
    let world = SshHosts::with(&macs(2, &[(0, 1)]));
    let mut silent = macs(1, &[])["h0"].clone();
    silent["profiler.json"] = "".into();
    world.add_host("linux", &silent);
    let mut weak = macs(2, &[(0, 1)])["h1"].clone();
    weak["devices.txt"] = "".into();
    world.add_host("weak", &weak);
    for (code, table) in [(1, IMPOSSIBLE), (2, WRONG)] {
        for (args, says) in rows(table) {
            let ended = world.run_topology(&args);
            assert_eq!(ended.code, Some(code), "{args:?}: {ended:?}");
            assert_parts(&args, &ended.stderr, &says);
        }
    }
}
