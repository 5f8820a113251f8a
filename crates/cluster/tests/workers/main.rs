//! Workers as real processes: this test binary starts itself again.
//!
//! [`roles`] has the children's programs; the rest are tests. Foreign children are `sh` scripts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod endings;
mod hostile;
mod messages;
mod orphans;
mod roles;

use std::path::Path;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_base::testing::Stopwatch;
use paceline_cluster::sandbox::Sandbox;
use paceline_cluster::workers::{Event, WorkerLimits, WorkerSpec, Workers};
use paceline_process::{Ending, Signal};
use rustix::process::{Pid, kill_process, test_kill_process};

use roles::{ROLE, RoleCommand, RoleReply};

type Ours = Workers<RoleCommand, RoleReply>;

/// How long a test waits for an immediate event, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A grace period that no test waits for: anything within [`PATIENCE`] did not wait for it.
const GRACE: Duration = Duration::from_secs(100);

/// Children that obey orders.
fn spec(ranks: usize) -> WorkerSpec {
    roles::spec("worker", ranks)
}

fn spawn(ranks: usize) -> Ours {
    Workers::spawn(spec(ranks)).unwrap()
}

/// Foreign children: each runs its script.
fn scripts(scripts: &[&str]) -> WorkerSpec {
    let args = scripts.iter().map(|s| vec!["-c".into(), s.into()]);
    WorkerSpec::new("sh", args.collect())
}

/// A limit that no test waits for.
fn unlimited() -> WorkerLimits {
    WorkerLimits {
        start: PATIENCE * 10,
        ..WorkerLimits::default()
    }
}

fn next(workers: &Ours) -> Event<RoleReply> {
    workers.recv(PATIENCE).expect("an event in time")
}

fn answer(workers: &Ours) -> (Rank, RoleReply) {
    match next(workers) {
        Event::Message { rank, message } => (rank, message),
        event => panic!("{event}"),
    }
}

fn ask(workers: &Ours, rank: u32, order: &RoleCommand) -> RoleReply {
    workers.send(Rank(rank), order).unwrap();
    let (from, answer) = answer(workers);
    assert_eq!(from, Rank(rank));
    answer
}

fn exit(workers: &Ours) -> (Rank, Ending, Vec<String>) {
    match next(workers) {
        Event::Exited { rank, ending, tail } => (rank, ending, tail),
        event => panic!("{event}"),
    }
}

/// Checks that a silence was reported when it exceeded `limit` by the monitor's time, which may be
/// late by other clocks. A turn of the monitor counts at most a fifth of a second.
fn check_silence(silence: Duration, limit: Duration) {
    let turn = Duration::from_millis(200);
    assert!(
        silence >= limit && silence <= limit + turn,
        "{silence:?}, {limit:?}"
    );
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(i32::try_from(id).unwrap()).unwrap()
}

fn kill(id: u32, signal: Signal) {
    kill_process(pid(id), signal).unwrap();
}

/// Whether no such process runs; a zombie does not count.
fn is_gone(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat"));
    match stat {
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('Z'),
        Err(_) if Path::new("/proc/self").exists() => true,
        Err(_) => test_kill_process(pid(id)).is_err(),
    }
}

/// Waits until `done`, at most `limit`; returns the time it took.
fn wait_until(limit: Duration, what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    start.elapsed()
}

/// Not a test of its own: it runs a role when a test starts this binary with it.
#[test]
fn role() {
    if let Ok(role) = std::env::var(ROLE) {
        roles::play(&role);
    }
}

/// Whether rank 0 of workers in `sandbox` can read the memory of rank 1.
fn can_read(sandbox: Option<Sandbox>) -> bool {
    let mut spec = spec(2);
    spec.sandbox = sandbox;
    let workers: Ours = Workers::spawn(spec).unwrap();
    // Its answer shows that it runs: before, the check could hit its start.
    assert_eq!(
        ask(&workers, 1, &RoleCommand::Echo("x".into())),
        RoleReply::Echo("x".into())
    );
    ask(&workers, 0, &RoleCommand::Read(workers.ids()[1])) == RoleReply::Read(true)
}

/// Separate domains would prevent single-copy transfers between ranks.
#[test]
fn children_of_one_sandbox_read_each_other() {
    if !cfg!(target_os = "linux") || !can_read(None) {
        eprintln!("SKIPPED children_of_one_sandbox_read_each_other: no process may read another");
        return;
    }
    assert!(can_read(Some(Sandbox::Worker)));
}
