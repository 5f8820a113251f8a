//! RDMA as a provider of `paceline_comm::init`.

use paceline_comm::provider::Provider;
use paceline_comm::{Backend, InitError, JoinParams, Plaintext, Strict, init, tcp};

use super::*;
use crate::RdmaProvider;

type JoinResult = Result<Box<dyn Group>, InitError>;

/// Joins three ranks; returns the results and the fabric, which they need.
fn three(plaintext: Plaintext) -> (Fabric, Vec<JoinResult>) {
    let (fabric, cabling) = switched_cabling(3);
    let wire = RdmaProvider { cabling, plaintext };
    assert_eq!(wire.backend(), Backend::Rdma);
    let listen = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<Listener> = (0..3).map(listen).collect();
    let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
    let id = GroupId::random();
    let joined = thread::scope(|scope| {
        let threads = (0..).zip(listeners).map(|(rank, listener)| {
            let (addrs, wire) = (&addrs, &wire);
            scope.spawn(move || {
                let seat = JoinParams {
                    listener,
                    rank: Rank(rank),
                    addrs,
                    id,
                    config: tcp::Config::default(),
                };
                init(Backend::Rdma, Strict::Yes, seat, &[wire], soon(60))
            })
        });
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.collect()
    });
    (fabric, joined)
}

#[test]
fn init_makes_a_group_that_works() {
    let (_fabric, joined) = three(Plaintext::Allowed);
    let got = on_threads(joined, |group| {
        let group = group.unwrap();
        let mut all = [0_u8; 3];
        let own = [u8::try_from(group.rank().0).unwrap()];
        group.all_gather(&own, &mut all, soon(60)).unwrap();
        group.barrier(soon(60)).unwrap();
        (all, group.tuning())
    });
    let mut got = got.into_iter();
    let first = got.next().unwrap();
    assert_eq!(first.0, [0, 1, 2]);
    assert!(first.1.wire, "a cable");
    assert!(got.all(|own| own == first), "all choose by {:?}", first.1);
}

#[test]
fn a_wire_says_that_it_is_plaintext_and_wants_to_be_allowed() {
    for refused in three(Plaintext::Refused).1 {
        let expected = "rdma is plaintext: not allowed";
        assert_eq!(refused.unwrap_err().to_string(), expected);
    }
}
