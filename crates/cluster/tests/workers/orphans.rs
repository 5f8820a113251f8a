//! A parent that dies or is suspended.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr};

use super::*;

/// A parent in its own process, and its children's ids.
struct ParentProcess {
    parent: Child,
    said: BufReader<ChildStderr>,
    ids: Vec<u32>,
}

impl ParentProcess {
    fn start(role: &str) -> Self {
        let mut parent = roles::command(role).spawn().unwrap();
        let mut said = BufReader::new(parent.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let ids = line
            .strip_prefix("ids ")
            .unwrap_or_else(|| panic!("{role}: {line}"));
        let ids: Vec<u32> = ids
            .split_whitespace()
            .map(|id| id.parse().unwrap())
            .collect();
        assert!(ids.len() == 3 && !ids.iter().any(|id| is_gone(*id)));
        Self { parent, said, ids }
    }
}

impl Drop for ParentProcess {
    fn drop(&mut self) {
        let _ = self.parent.kill();
        let _ = self.parent.wait();
    }
}

/// Kills a parent and gives the time until its children are gone.
fn orphan(role: &str, prepare: impl Fn(&ParentProcess)) -> Duration {
    let mut family = ParentProcess::start(role);
    prepare(&family);
    kill(family.parent.id(), Signal::KILL);
    family.parent.wait().unwrap();
    let gone = || family.ids.iter().all(|id| is_gone(*id));
    let start = Stopwatch::start();
    wait_until(PATIENCE, role, gone);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(1), "{role}: {took:?}");
    took
}

#[test]
fn no_child_outlives_its_parent() {
    for _ in 0..10 {
        for role in ["parent", "parent of busy"] {
            orphan(role, |_| {});
        }
    }
}

#[test]
fn a_child_whose_queue_is_full_does_not_outlive_its_parent() {
    orphan("parent of deaf", |_| {});
}

#[test]
fn a_stopped_child_does_not_outlive_its_parent() {
    if !cfg!(target_os = "linux") {
        eprintln!("SKIPPED stopped orphans: only Linux ends a stopped process with its parent");
        return;
    }
    orphan("parent of busy", |family| {
        for id in &family.ids {
            kill(*id, Signal::STOP);
        }
    });
}

#[test]
fn a_suspended_parent_accuses_nobody_when_it_comes_back() {
    let mut family = ParentProcess::start("parent");
    kill(family.parent.id(), Signal::STOP);
    // Longer than the silence that is allowed.
    std::thread::sleep(Duration::from_millis(2500));
    kill(family.parent.id(), Signal::CONT);
    std::thread::sleep(Duration::from_millis(500));
    // Its first report is the child that is killed now.
    kill(family.ids[1], Signal::KILL);
    let mut line = String::new();
    family.said.read_line(&mut line).unwrap();
    assert_eq!(line, "event rank 1 was ended by SIGKILL\n");
}
