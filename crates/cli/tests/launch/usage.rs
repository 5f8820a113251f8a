//! Command lines that cannot be: what is wrong, and what to do instead.

use std::fs;

use super::SshHosts;
use crate::common::{assert_parts, rows};

/// Arguments, and what is said to them, in this order.
type LaunchUsageCase = (&'static [&'static str], &'static [&'static str]);

/// Wrong without any hostfile.
const ARGUMENTS: &str = "\
-n 0 true | '0'
--hosts a,,b true | host name \"\" is empty
--hosts studio true | studio has no address | hint: | topology
--hosts fe80::1 true | fe80::1 | IPv4 only
--backend gloo true | \"gloo\" | ring, mpi, nccl
--env NOT_SET_HERE true | --env NOT_SET_HERE: it is not set here
--env A-B=1 true | \"A-B=1\" | hint: | NAME=VALUE
-p 65535 -n 2 true | beyond port 65535 | hint:
--linger soon true | 'soon' | never
--stdin rank1 true | rank1 | rank0
--hostfile /nonexistent true | cannot read hostfile /nonexistent
 | required | <PROGRAM>";

const NO_IPS: &str = r#"[{"ssh": "a"}, {"ssh": "b"}]"#;

/// Hostfiles, what stands behind them on the command line, and what is said to that.
const HOSTFILES: [(&str, LaunchUsageCase); 6] = [
    (NO_IPS, (&["-n", "2", "true"], &["cannot be used with"])),
    (NO_IPS, (&["true"], &["host a has no address"])),
    (
        "hosts: a, b",
        (&["true"], &["not JSON", "hint: a hostfile looks like"]),
    ),
    (
        r#"[{"host": "a"}]"#,
        (&["true"], &["\"ssh\" of host 0 is missing"]),
    ),
    (
        r#"[{"ssh": "-oProxyCommand=touch pwned", "ips": ["1.2.3.4"]}]"#,
        (&["true"], &["starts with a hyphen"]),
    ),
    (
        r#"{"backend": "jaccl", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, null]},
            {"ssh": "b", "rdma": ["x", null]}]}"#,
        (
            &["true"],
            &["no RDMA device is listed for a to b", "hint: "],
        ),
    ),
];

/// These arguments are refused with those words before anybody is called.
fn assert_refused(world: &SshHosts, args: &[&str], says: &[impl AsRef<str>]) {
    let ended = world.run_launch(args);
    assert_eq!(ended.code, Some(2), "{args:?}: {ended:?}");
    assert_eq!(ended.stdout, "", "{args:?}");
    assert_parts(&args, &ended.stderr, says);
    assert!(world.calls().is_empty(), "{args:?}: somebody was called");
}

#[test]
fn arguments_that_cannot_be_are_said_with_advice() {
    let world = SshHosts::new();
    for (args, says) in rows(ARGUMENTS) {
        assert_refused(&world, &args, &says);
    }
    world.assert_clean();
}

#[test]
fn hostfiles_that_cannot_be_are_said_with_advice() {
    let world = SshHosts::new();
    let path = world.path("hosts.json");
    let hostfile = ["--hostfile", path.to_str().unwrap()];
    for (hosts, (args, says)) in HOSTFILES {
        fs::write(&path, hosts).unwrap();
        assert_refused(&world, &[&hostfile, args].concat(), says);
    }
    world.assert_clean();
}

#[test]
fn programs_that_are_missing_are_named() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(2);
    let mut command = world.launch(&["--hostfile", &hostfile, "true"]);
    let ended = super::finish(command.env("PATH", world.path("here")).spawn().unwrap());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for part in ["error: cannot start ssh: ", "hint: install an SSH client"] {
        assert!(ended.stderr.contains(part), "{ended:?}");
    }
    let mut command = world.launch(&["--backend", "mpi", "true"]);
    let ended = super::finish(command.env("PATH", world.path("here")).spawn().unwrap());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let expected = "error: there is no mpirun in PATH\nhint: install Open MPI";
    assert!(ended.stderr.starts_with(expected), "{ended:?}");
}
