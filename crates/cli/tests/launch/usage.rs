//! Command lines that cannot be: what is wrong, and what to do instead.

use std::fs;

use crate::World;
use crate::common::assert_parts;

// long: one table of wrong command lines.
#[test]
fn what_is_wrong_is_said_with_advice() {
    let world = World::new();
    let file = |name: &str, text: &str| -> String {
        fs::write(world.path(name), text).unwrap();
        world.path(name).to_str().unwrap().to_owned()
    };
    let no_ips = file("no-ips.json", r#"[{"ssh": "a"}, {"ssh": "b"}]"#);
    let no_json = file("no-json.json", "hosts: a, b");
    let no_ssh = file("no-ssh.json", r#"[{"host": "a"}]"#);
    let option = file(
        "option.json",
        r#"[{"ssh": "-oProxyCommand=touch pwned", "ips": ["1.2.3.4"]}]"#,
    );
    let rdma = file(
        "rdma.json",
        r#"{"backend": "jaccl", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, null]},
            {"ssh": "b", "rdma": ["x", null]}]}"#,
    );
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["required", "<PROGRAM>"]),
        (&["-n", "0", "true"], &["'0'"]),
        (&["--hosts", "a,,b", "true"], &["host name \"\" is empty"]),
        (
            &["--hosts", "studio", "true"],
            &["studio has no address", "hint: ", "topology"],
        ),
        (&["--hosts", "fe80::1", "true"], &["fe80::1", "IPv4 only"]),
        (
            &["--backend", "gloo", "true"],
            &["\"gloo\"", "ring, mpi, nccl"],
        ),
        (
            &["--env", "A-B=1", "true"],
            &["\"A-B=1\"", "hint: ", "NAME=VALUE"],
        ),
        (
            &["-p", "65535", "-n", "2", "true"],
            &["beyond port 65535", "hint: "],
        ),
        (&["--linger", "soon", "true"], &["'soon'", "never"]),
        (&["--stdin", "rank1", "true"], &["rank1", "rank0"]),
        (
            &["--hostfile", "/nonexistent", "true"],
            &["cannot read hostfile /nonexistent"],
        ),
        (
            &["--hostfile", &no_ips, "-n", "2", "true"],
            &["cannot be used with"],
        ),
        (&["--hostfile", &no_ips, "true"], &["host a has no address"]),
        (
            &["--hostfile", &no_json, "true"],
            &["not JSON", "hint: a hostfile looks like"],
        ),
        (
            &["--hostfile", &no_ssh, "true"],
            &["\"ssh\" of host 0 is missing"],
        ),
        (&["--hostfile", &option, "true"], &["starts with a hyphen"]),
        (
            &["--hostfile", &rdma, "true"],
            &["no RDMA device is listed for a to b", "hint: "],
        ),
    ];
    for (args, says) in cases {
        let ended = world.run(args);
        assert_eq!(ended.code, Some(2), "{args:?}: {ended:?}");
        assert_eq!(ended.stdout, "", "{args:?}");
        assert_parts(args, &ended.stderr, says);
    }
    assert!(world.calls().is_empty(), "nobody was called");
    world.assert_clean();
}

#[test]
fn programs_that_are_missing_are_named() {
    let world = World::new();
    let hostfile = world.hostfile(2);
    let mut command = world.launch(&["--hostfile", &hostfile, "true"]);
    let ended = crate::finish(command.env("PATH", world.path("here")).spawn().unwrap());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for part in ["error: cannot start ssh: ", "hint: install an SSH client"] {
        assert!(ended.stderr.contains(part), "{ended:?}");
    }
    let mut command = world.launch(&["--backend", "mpi", "true"]);
    let ended = crate::finish(command.env("PATH", world.path("here")).spawn().unwrap());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let expected = "error: there is no mpirun in PATH\nhint: install Open MPI";
    assert!(ended.stderr.starts_with(expected), "{ended:?}");
}
