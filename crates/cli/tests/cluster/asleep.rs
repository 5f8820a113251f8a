//! Machines that are suspended together, as virtual machines on a host that sleeps.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use super::shared::{MODEL, up};
use super::{TestMachine, until};
use crate::nodes::processes::{children, signal};

/// Far longer than a side may be silent: 1.5 s.
const SLEEP: Duration = Duration::from_secs(4);

/// After it, for an accusation to show: a silence of 1.5 s and the time to tell.
const AWAKE: Duration = Duration::from_secs(3);

/// A node with its workers.
fn processes(machine: &TestMachine) -> Vec<u32> {
    let node = machine.node.as_ref().unwrap().id();
    let mut all = children(node);
    assert!(!all.is_empty(), "{} has a worker", machine.name);
    all.push(node);
    all
}

#[test]
fn machines_that_sleep_together_accuse_nobody() {
    let one = up("one", None);
    let two = up("two", Some(&one));
    one.told(&["load", MODEL, "--nodes", "2", "--threads", "1"]);
    let (before, _) = two.answer(MODEL, &[]);
    let all = [&one, &two].map(processes).concat();
    for id in &all {
        signal(*id, Signal::STOP);
    }
    std::thread::sleep(SLEEP);
    for id in &all {
        signal(*id, Signal::CONT);
    }
    let woken = Instant::now();
    while woken.elapsed() < AWAKE {
        let told = one.ps();
        let it = &told[0];
        let now = (&it["state"], &it["epoch"], &it["reason"]);
        assert_eq!(now, (&"ready".into(), &1.into(), &Value::Null), "{it}");
        std::thread::sleep(Duration::from_millis(100));
    }
    until("both live", || two.sees("alive") == ["one", "two"]);
    let (after, _) = two.answer(MODEL, &[]);
    assert_eq!(after["tokens"], before["tokens"]);
    for machine in [&one, &two] {
        let log = std::fs::read_to_string(machine.home.path().join("log")).unwrap();
        assert!(!log.contains("error"), "{}: {log}", machine.name);
    }
}
