//! The NCCL backend through the real loader: against `nccl/fake.rs`, and against a real NCCL if
//! there is a GPU.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    reason = "a test, with helpers outside of test functions"
)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::free::free;
use paceline_base::Rank;
use paceline_base::testing::Stopwatch;
use paceline_comm::{Deadline, Error, Group, Plaintext, Reduce, local};
use paceline_comm_interop::nccl::{self, Libraries, Nccl, NcclJoinError, OpenError};
use tempfile::TempDir;

fn soon() -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(30))
}

/// A fake of both libraries, built with these `--cfg` flags.
struct Fake {
    libraries: Libraries,
    _folder: TempDir,
}

fn fake(cfg: &[&str]) -> Fake {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/fake.rs");
    let library: PathBuf = folder.path().join("libfake.so");
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc
        .args(["--edition=2024", "--crate-type=cdylib", "-O", "-o"])
        .arg(&library)
        .arg(source);
    for word in cfg {
        rustc.args(["--cfg", word]);
    }
    assert!(rustc.status().unwrap().success());
    let libraries = Libraries {
        nccl: Some(library.clone()),
        cuda: Some(library),
    };
    Fake {
        libraries,
        _folder: folder,
    }
}

/// Joins `size` ranks as threads, and runs `work` for each.
fn on_each<R: Send>(
    libraries: &Libraries,
    size: u32,
    work: impl Fn(Result<Nccl, NcclJoinError>) -> R + Send + Sync,
) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let start = |meeting: local::Local| {
            scope.spawn(move || {
                let joined = nccl::join(&meeting, libraries, Plaintext::Allowed, soon());
                work(joined)
            })
        };
        let threads: Vec<_> = local::ranks(size).into_iter().map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Every call, twice, on a group of any size.
fn check(group: &dyn Group) {
    let (rank, size) = (group.rank().0, group.size());
    for len in [0, 1, 5, 10_000] {
        group.barrier(soon()).unwrap();
        let mut data: Vec<f32> = (0..len).map(|i| (i % 7) as f32 + rank as f32).collect();
        group.all_reduce(&mut data, Reduce::Sum, soon()).unwrap();
        let ranks = (0..size).sum::<u32>();
        let sum = |i: usize| (size * (i as u32 % 7) + ranks) as f32;
        assert!(data.iter().enumerate().all(|(i, x)| *x == sum(i)));
        let mut flags = vec![rank == 0; len];
        group.all_reduce(&mut flags, Reduce::Sum, soon()).unwrap();
        assert_eq!(flags, vec![true; len]);
        let mut product = vec![2_i64; len];
        group
            .all_reduce(&mut product, Reduce::Prod, soon())
            .unwrap();
        assert_eq!(product, vec![1 << size; len]);
        let mut all = vec![0_u16; len * size as usize];
        group
            .all_gather(&vec![rank as u16; len], &mut all, soon())
            .unwrap();
        assert!((0..size).all(|r| {
            all[r as usize * len..][..len]
                .iter()
                .all(|x| *x == r as u16)
        }));
        let mut part = vec![0_i32; len];
        let values: Vec<i32> = (0..len * size as usize).map(|i| i as i32).collect();
        group
            .reduce_scatter(&values, &mut part, Reduce::Max, soon())
            .unwrap();
        assert_eq!(part, values[rank as usize * len..][..len]);
        uneven(group, len);
        let mut told = vec![rank as u8; len];
        group.broadcast(&mut told, Rank(size - 1), soon()).unwrap();
        assert_eq!(told, vec![size as u8 - 1; len]);
    }
}

/// Parts of `len + rank` elements.
fn uneven(group: &dyn Group, len: usize) {
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    let counts: Vec<usize> = (0..size).map(|r| len + r).collect();
    let before: usize = counts[..rank].iter().sum();
    let total: usize = counts.iter().sum();
    let whole: Vec<u32> = (0..total as u32).collect();
    let own = &whole[before..][..counts[rank]];
    let mut all = vec![0; total];
    group.all_gather_v(own, &mut all, &counts, soon()).unwrap();
    assert_eq!(all, whole);
    let mut part = vec![0; counts[rank]];
    group
        .reduce_scatter_v(&whole, &mut part, &counts, Reduce::Min, soon())
        .unwrap();
    assert_eq!(part, own);
    // Rank r sends r + s elements of value r to rank s.
    let counts: Vec<usize> = (0..size).map(|r| r + rank).collect();
    let total: usize = counts.iter().sum();
    let mut got = vec![0_u32; total];
    let sent = vec![rank as u32; total];
    group
        .all_to_all_v(&sent, &counts, &mut got, &counts, soon())
        .unwrap();
    let expected = (0..size).flat_map(|r| vec![r as u32; r + rank]);
    assert!(got.into_iter().eq(expected));
}

#[test]
fn calls_are_right_through_the_opened_tables() {
    let fake = fake(&[]);
    for size in [1, 2, 3, 5] {
        on_each(&fake.libraries, size, |joined| {
            let joined = joined.unwrap();
            let group: &dyn Group = &joined;
            check(group);
            let part = group.split(group.rank().0 % 2, 0, soon()).unwrap();
            assert_eq!(
                part.size(),
                size.div_ceil(2) - (size % 2) * (group.rank().0 % 2)
            );
            check(&*part);
            let sent = group.send(&[1_u8], Rank((group.rank().0 + 1) % size.max(2)), 0, soon());
            assert!(matches!(
                sent,
                Err(Error::Unsupported {
                    backend: "nccl",
                    ..
                })
            ));
            let wide = group.all_reduce(&mut [1_u16], Reduce::Sum, soon());
            assert!(matches!(
                wide,
                Err(Error::Unsupported {
                    backend: "nccl",
                    ..
                })
            ));
            group.barrier(soon()).unwrap();
        });
    }
}

#[test]
fn ranks_meet_by_mlxs_bytes() {
    let fake = fake(&[]);
    let addr = free();
    let libraries = &fake.libraries;
    thread::scope(|scope| {
        for rank in (0..3).map(Rank) {
            scope.spawn(move || {
                let seat = nccl::NcclRank {
                    rank,
                    size: 3,
                    addr,
                };
                let group = nccl::join_mlx(seat, libraries, Plaintext::Allowed, soon()).unwrap();
                check(&group);
            });
        }
    });
    let by = Deadline::at(Instant::now() + Duration::from_millis(100));
    for rank in [Rank(0), Rank(1)] {
        let seat = nccl::NcclRank {
            rank,
            size: 2,
            addr,
        };
        let error = nccl::join_mlx(seat, libraries, Plaintext::Allowed, by).unwrap_err();
        assert!(matches!(error, NcclJoinError::Late), "{error}");
    }
}

#[test]
fn a_missing_rank_is_an_error_at_the_deadline_and_stays_one() {
    let fake = fake(&[]);
    on_each(&fake.libraries, 3, |joined| {
        let joined = joined.unwrap();
        let group: &dyn Group = &joined;
        group.barrier(soon()).unwrap();
        if group.rank() == Rank(1) {
            return;
        }
        let by = Deadline::at(Instant::now() + Duration::from_millis(200));
        let started = Stopwatch::start();
        let error = group
            .all_reduce(&mut [1.0_f32; 10], Reduce::Sum, by)
            .unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2));
        assert_eq!(group.barrier(soon()), Err(error));
    });
}

#[test]
fn what_the_library_refuses_is_an_error_by_its_code() {
    let fake = fake(&[]);
    on_each(&fake.libraries, 2, |joined| {
        let joined = joined.unwrap();
        // The fake has no half floats and returns 4, invalid argument.
        let mut halves = [half::f16::ONE];
        let error = (&joined as &dyn Group).all_reduce(&mut halves, Reduce::Sum, soon());
        let error = error.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Library {
                    backend: "nccl",
                    code: 4,
                    ..
                }
            ),
            "{error}"
        );
    });
}

#[test]
fn libraries_that_cannot_be_used_are_named() {
    let missing = Libraries {
        nccl: Some("/nowhere/libnccl.so.2".into()),
        cuda: None,
    };
    let cases: [(Option<Fake>, Libraries, &str); 4] = {
        let of = |cfg: &str, text| {
            let fake = fake(&[cfg]);
            let libraries = fake.libraries.clone();
            (Some(fake), libraries, text)
        };
        [
            (None, missing, "nccl: open /nowhere/libnccl.so.2: "),
            of(
                "old",
                "nccl: nccl version 2708, expected 21000 or later and before 30000",
            ),
            of("lacking", "nccl: nccl has no ncclSend: "),
            of("bare", "nccl: no cuda device"),
        ]
    };
    for (_fake, libraries, expected) in cases {
        for error in on_each(&libraries, 2, |joined| joined.unwrap_err().to_string()) {
            assert!(error.starts_with(expected), "{error}");
        }
    }
    let meeting = local::ranks(1).remove(0);
    let refused = nccl::join(&meeting, &Libraries::default(), Plaintext::Refused, soon());
    assert!(matches!(refused, Err(NcclJoinError::Plaintext)));
}

#[test]
fn a_real_nccl_does_the_same() {
    // NCCL needs a GPU for each rank.
    let is_there = |gpu: &u32| Path::new(&format!("/dev/nvidia{gpu}")).exists();
    let ranks = (0..8).take_while(is_there).count().max(1) as u32;
    let joined = on_each(&Libraries::default(), ranks, |joined| {
        joined.map(|group| check(&group))
    });
    for joined in joined {
        match joined {
            Ok(()) => {}
            Err(NcclJoinError::Open(error @ (OpenError::Missing { .. } | OpenError::NoDevice))) => {
                eprintln!("SKIPPED real NCCL: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
