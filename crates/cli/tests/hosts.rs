//! `paceline mapreduce --hosts`: workers by ssh, with the bits of one process. The hosts are this
//! machine ([`crate::common::hosts`]).
#![cfg(target_os = "linux")]

use std::fs;
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::hosts::{LaunchOutput, SshHosts, finish, write_program};
use crate::common::until;
use crate::nodes::processes::all_children;

/// Raw values of some 30 binary orders: seven parts.
fn stocked() -> SshHosts {
    let world = SshHosts::new();
    let value = |i: u64| {
        let bits = i.wrapping_mul(6364136223846793005).rotate_left(29);
        (bits >> 11) as f64 * ((bits % 61) as f64 - 30.0).exp2()
    };
    let bytes: Vec<u8> = (0..400_000).flat_map(|i| value(i).to_le_bytes()).collect();
    fs::write(world.path("here/x.raw"), bytes).unwrap();
    world
}

const SUM: [&str; 6] = ["mapreduce", "reduce", "var", "x.raw", "--raw", "f64"];

fn start(world: &SshHosts, args: &[&str]) -> Child {
    let args = [args, &["--json", "--threads", "1"]].concat();
    world.paceline(&args).spawn().unwrap()
}

fn object(ended: LaunchOutput) -> Value {
    serde_json::from_str(&ended.ok().stdout).unwrap()
}

/// Numbers, rows and keys of hosts come over their lines: hosts write no file.
#[test]
fn files_that_hosts_compute_have_the_bits_of_one_process() {
    let world = stocked();
    let alone = object(finish(start(&world, &SUM)));
    let args = [&SUM[..], &["--hosts", "a,b"]].concat();
    let both = object(finish(start(&world, &args)));
    assert_eq!(both["value"], alone["value"]);
    assert_eq!((&both["nodes"], &both["lost"]), (&2.into(), &0.into()));
    let calls = world.calls();
    let is_silent = |call: &String| call.contains("BatchMode=yes");
    assert!(calls.len() == 2 && calls.iter().all(is_silent), "{calls:?}");
    // A host says how many threads it has once it computes.
    let threads = both["node_threads"].as_array().unwrap();
    assert!(threads.len() == 2 && threads.contains(&1.into()), "{both}");
    let out = world.path("here/out.npy");
    for job in [
        &["sort", "x.raw"][..],
        &["sort", "x.raw", "--memory", "4M"],
        &["map", "x.raw", "--map", "x / 3"],
    ] {
        let job = [&["mapreduce"], job, &["--raw", "f64", "-o", "out.npy"]].concat();
        let [of_hosts, of_one] = [&["--hosts", "a,b"][..], &["--local"]].map(|more| {
            let ended = object(finish(start(&world, &[&job[..], more].concat())));
            assert_eq!(ended["lost"], 0);
            let bytes = fs::read(&out).unwrap();
            fs::remove_file(&out).unwrap();
            bytes
        });
        assert!(of_hosts == of_one, "{job:?}");
        for left in fs::read_dir(world.path("here")).unwrap() {
            let name = left.unwrap().file_name().into_string().unwrap();
            assert!(!name.starts_with("out"), "{name} is left");
        }
    }
}

#[test]
fn a_host_that_is_lost_or_greets_first_changes_no_bit() {
    let world = stocked();
    let job = [
        "mapreduce",
        "montecarlo",
        "sin(x) * y",
        "--samples",
        "10000000",
    ];
    let alone = object(finish(start(&world, &job)));
    // Host c cannot be reached: the others compute its parts.
    let some = object(finish(start(
        &world,
        &[&job[..], &["--hosts", "a,c"]].concat(),
    )));
    assert_eq!(some["value"], alone["value"]);
    assert_eq!(some["lost"], 1);
    // A login shell that greets.
    let shell = world.path("greets");
    write_program(
        &shell,
        "#!/bin/sh\necho Welcome to a\nexec /bin/sh \"$@\"\n",
    );
    let args = [&job[..], &["--hosts", "a", "--json", "--threads", "1"]].concat();
    let mut greeted = world.paceline(&args);
    greeted.env("FAKE_SSH_SHELL", shell);
    let greeted = object(finish(greeted.spawn().unwrap()));
    assert_eq!(greeted["value"], alone["value"]);

    let mut killed = start(&world, &[&job[..], &["--hosts", "a,b"]].concat());
    let bridges = |pid: u32| all_children(pid).len();
    until("bridges", || {
        bridges(killed.id()) == 2 || killed.try_wait().unwrap().is_some()
    });
    if let Some(bridge) = all_children(killed.id()).first() {
        let _ = kill_process(Pid::from_raw(*bridge as i32).unwrap(), Signal::KILL);
    }
    assert_eq!(object(finish(killed))["value"], alone["value"]);
}

#[test]
fn hosts_that_cannot_compute_are_named() {
    let world = stocked();
    let failed = finish(start(&world, &[&SUM[..], &["--hosts", "c,d"]].concat()));
    assert_eq!(failed.code, Some(1), "{failed:?}");
    assert!(failed.stderr.contains("all workers are lost"), "{failed:?}");
    assert!(failed.stderr.contains("Connection refused"), "{failed:?}");
    let wrong = finish(start(
        &world,
        &[&SUM[..], &["--hosts", "a", "--nodes", "2"]].concat(),
    ));
    assert_eq!(wrong.code, Some(2), "{wrong:?}");
    let wrong = finish(start(&world, &[&SUM[..], &["--hosts=-x"]].concat()));
    assert!(wrong.stderr.contains("hyphen"), "{wrong:?}");
}
