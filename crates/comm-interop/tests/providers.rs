//! The providers of this crate with `paceline_comm::init`.

use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::provider::Provider;
use paceline_comm::tcp::{Config, GroupId, Listener};
use paceline_comm::{Backend, Deadline, Group, InitError, JoinParams, Plaintext, Strict, init};
use paceline_comm_interop::nccl::Libraries;
use paceline_comm_interop::{mlx_ring, mpi, nccl};

fn soon() -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(60))
}

/// Joins three ranks; returns their groups or errors.
fn three(provider: &dyn Provider) -> Vec<Result<Box<dyn Group>, InitError>> {
    let listen = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<Listener> = (0..3).map(listen).collect();
    let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
    let (backend, id, by) = (provider.backend(), GroupId::random(), soon());
    thread::scope(|scope| {
        let threads = (0..).zip(listeners).map(|(rank, listener)| {
            let addrs = &addrs;
            scope.spawn(move || {
                let seat = JoinParams {
                    listener,
                    rank: Rank(rank),
                    addrs,
                    id,
                    config: Config::default(),
                };
                init(backend, Strict::Yes, seat, &[provider], by)
            })
        });
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.collect()
    })
}

/// NCCL with missing libraries.
fn no_nccl(plaintext: Plaintext) -> nccl::NcclProvider {
    nccl::NcclProvider {
        libraries: Libraries {
            nccl: Some("no-such-nccl.so".into()),
            cuda: Some("no-such-cuda.so".into()),
        },
        plaintext,
    }
}

#[test]
fn a_ring_on_loopback_works_and_leaves_nothing() {
    let ring = mlx_ring::MlxRingProvider {
        plaintext: Plaintext::Refused,
    };
    let threads = three(&ring).into_iter().map(|group| {
        thread::spawn(move || {
            let group = group.unwrap();
            let mut all = [0_u8; 3];
            let own = [u8::try_from(group.rank().0).unwrap()];
            group.all_gather(&own, &mut all, soon()).unwrap();
            group.barrier(soon()).unwrap();
            (all, group.tuning())
        })
    });
    let threads: Vec<_> = threads.collect();
    let mut got = threads.into_iter().map(|thread| thread.join().unwrap());
    let first = got.next().unwrap();
    assert_eq!(first.0, [0, 1, 2]);
    assert!(!first.1.wire);
    assert!(got.all(|own| own == first), "all choose by {:?}", first.1);
}

#[test]
fn a_plaintext_wire_says_so_and_wants_to_be_allowed() {
    let mpi = mpi::MpiProvider {
        plaintext: Plaintext::Refused,
    };
    let nccl = no_nccl(Plaintext::Refused);
    let wires: [&dyn Provider; 2] = [&mpi, &nccl];
    for (wire, backend) in wires.into_iter().zip([Backend::Mpi, Backend::Nccl]) {
        assert_eq!(wire.backend(), backend);
        for refused in three(wire) {
            let expected = format!("{backend} is plaintext: not allowed");
            assert_eq!(refused.unwrap_err().to_string(), expected);
        }
    }
}

#[test]
fn what_a_wire_lacks_is_named() {
    for error in three(&no_nccl(Plaintext::Allowed)) {
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("nccl: open no-such-"), "{error}");
    }
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_build_without_mpi_says_so() {
    let wire = mpi::MpiProvider {
        plaintext: Plaintext::Allowed,
    };
    for error in three(&wire) {
        assert_eq!(error.unwrap_err().to_string(), "mpi is not in this build");
    }
}
