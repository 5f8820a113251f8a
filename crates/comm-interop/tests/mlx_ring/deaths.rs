//! Deaths and stops of an MLX rank, observed by a Rust rank; MLX's own ranks hang there.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_base::testing::Stopwatch;
use paceline_comm::{Deadline, Error, Group, Plaintext};
use paceline_comm_interop::mlx_ring::{self, MlxRing};

use super::python::{Hosts, Python, one_ring, patient, python};

/// More barriers than the test reaches.
const BARRIERS: usize = 50_000;

/// Rank 1 is Python and makes barriers; the Rust ranks around it run `work`.
fn around<R: Send>(
    test: &str,
    size: usize,
    harm: impl FnOnce(&Python) + Send,
    work: impl Fn(MlxRing) -> R + Sync,
) -> Option<(Vec<R>, Python)> {
    let python = python(test)?;
    let _alone = one_ring();
    let mut hosts = Hosts::new(size, 1);
    let plan = hosts.folder.path().join("plan.json");
    let steps = vec!["[\"barrier\", \"f32\", 1]"; BARRIERS].join(",");
    std::fs::write(&plan, format!("[{steps}]")).unwrap();
    let rank_1 = hosts.start(&python, 1, "mixed.py", &[plan.to_str().unwrap()]);
    let joined = Barrier::new(size);
    let results = thread::scope(|scope| {
        let start = |rank: u32| {
            let own = std::mem::take(&mut hosts.listeners[rank as usize]);
            let (addrs, work, joined) = (hosts.addrs.clone(), &work, &joined);
            scope.spawn(move || {
                let ring =
                    mlx_ring::join_with(own, Rank(rank), &addrs, Plaintext::Refused, patient());
                let ring = ring.unwrap();
                for _ in 0..3 {
                    (&ring as &dyn Group).barrier(patient()).unwrap();
                }
                joined.wait();
                work(ring)
            })
        };
        let size = u32::try_from(size).unwrap();
        let threads: Vec<_> = (0..size).filter(|rank| *rank != 1).map(start).collect();
        joined.wait();
        harm(&rank_1);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    // The ring's files stay until its Python rank has ended.
    Some((results, rank_1.keeping(hosts)))
}

fn barriers_until_error(group: &dyn Group, by: impl Fn() -> Deadline) -> Error {
    loop {
        if let Err(error) = group.barrier(by()) {
            return error;
        }
    }
}

fn by_millis(millis: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_millis(millis))
}

#[test]
fn a_killed_mlx_rank_is_named_by_its_neighbours_again_and_again() {
    let harm = |python: &Python| {
        thread::sleep(Duration::from_millis(50));
        python.signal("-KILL");
    };
    let work = |ring: MlxRing| {
        let errors: Vec<Error> = (0..4)
            .map(|_| barriers_until_error(&ring, patient))
            .collect();
        errors
    };
    let Some((results, _)) = around("mlx-ring: killed MLX rank", 3, harm, work) else {
        return;
    };
    for error in results.into_iter().flatten() {
        assert!(
            matches!(error, Error::PeerLost { rank: Rank(1), .. }),
            "{error}"
        );
    }
}

#[test]
fn a_stopped_mlx_rank_is_an_error_at_the_deadline() {
    let harm = |python: &Python| {
        thread::sleep(Duration::from_millis(50));
        python.signal("-STOP");
    };
    let work = |ring: MlxRing| {
        let error = barriers_until_error(&ring, || by_millis(500));
        let again = Stopwatch::start();
        assert_eq!(barriers_until_error(&ring, patient), error);
        assert!(again.elapsed() < Duration::from_millis(100));
        error
    };
    let Some((results, _)) = around("mlx-ring: stopped MLX rank", 2, harm, work) else {
        return;
    };
    let named = |e: &Error| matches!(e, Error::Timeout { rank: Rank(1), .. });
    assert!(results.iter().all(named), "{results:?}");
}

#[test]
fn a_rust_rank_that_leaves_ends_the_mlx_rank_with_an_error() {
    let found = around("mlx-ring: Rust rank leaves", 2, |_| {}, drop);
    let Some((_, mut python)) = found else { return };
    let started = Stopwatch::start();
    let status = loop {
        if let Some(status) = python.child.try_wait().unwrap() {
            break status;
        }
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "{}",
            python.log()
        );
        thread::sleep(Duration::from_millis(10));
    };
    let log = python.log();
    assert!(
        !status.success() && log.contains("connection to a peer was lost"),
        "{log}"
    );
}
