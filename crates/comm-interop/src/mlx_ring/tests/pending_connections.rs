//! Strangers that connect to a rank's addresses: before, during and after the neighbour's
//! connection.
//!
//! In most tests rank 0 is a real ring and rank 1 is written by hand. So the order of connections
//! does not depend on threads.

use super::*;

const GARBAGE: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

/// Rank 0 of a ring of two, where rank 1 accepts connections and makes none.
struct TwoRankRing {
    own: Vec<TcpListener>,
    hosts: Vec<Vec<SocketAddr>>,
    _right: TcpListener,
}

impl TwoRankRing {
    fn new() -> Self {
        let (mut all, hosts) = listeners(2, 1);
        Self {
            _right: all.remove(1).remove(0),
            own: all.remove(0),
            hosts,
        }
    }

    /// A stranger's connection to rank 0.
    fn caller(&self) -> TcpStream {
        TcpStream::connect(self.hosts[0][0]).unwrap()
    }

    fn join(self) -> Result<MlxRing, JoinError> {
        join_with(
            self.own,
            Rank(0),
            &self.hosts,
            Plaintext::Refused,
            soon(FAR),
        )
    }
}

/// The message that rank 0 receives from its neighbour.
fn received(ring: &MlxRing) -> Result<[u8; 5], Error> {
    let mut message = [0; 5];
    let group: &dyn Group = ring;
    group.recv(&mut message, Rank(1), 0, soon(FAR))?;
    Ok(message)
}

#[test]
fn strangers_that_leave_do_not_take_a_place() {
    for said in [b"", GARBAGE] {
        let place = TwoRankRing::new();
        for _ in 0..3 {
            place.caller().write_all(said).unwrap();
        }
        let mut neighbour = place.caller();
        place.caller().write_all(said).unwrap();
        let ring = place.join().unwrap();
        neighbour.write_all(b"hello").unwrap();
        assert_eq!(received(&ring), Ok(*b"hello"), "after {said:?}");
    }
}

/// As MLX's protocol allows: the system buffers the bytes a rank sent before it left.
#[test]
fn a_neighbour_that_spoke_and_left_is_heard() {
    let place = TwoRankRing::new();
    place.caller().write_all(b"hello").unwrap();
    let ring = place.join().unwrap();
    assert_eq!(received(&ring), Ok(*b"hello"));
    let lost = received(&ring).unwrap_err();
    assert!(
        matches!(lost, Error::PeerLost { rank: Rank(1), .. }),
        "{lost}"
    );
}

#[test]
fn a_stranger_that_stays_beside_the_neighbour_is_told_of() {
    for said in [b"", GARBAGE] {
        let place = TwoRankRing::new();
        let mut callers = [place.caller(), place.caller()];
        callers[0].write_all(said).unwrap();
        let (own, hosts) = (callers.map(|c| (c.local_addr().unwrap(), c)), &place.hosts);
        let mut named: Vec<_> = own.iter().map(|(addr, _)| *addr).collect();
        let expected = format!(" connected to {}, expected only rank 1", hosts[0][0]);
        let error = place.join().unwrap_err();
        assert!(error.to_string().ends_with(&expected), "{error}");
        let JoinError::Strangers { mut callers, .. } = error else {
            panic!("{error}");
        };
        callers.sort_unstable();
        named.sort_unstable();
        assert_eq!(callers, named);
    }
}

/// The ring listens no more, so late connections have no effect on it.
#[test]
fn strangers_that_come_late_change_nothing() {
    let (all, hosts) = listeners(3, 2);
    on_each_of(all, &hosts, |ring| {
        let group: &dyn Group = &ring;
        for _ in 0..3 {
            group.barrier(soon(FAR)).unwrap();
            for addr in hosts.iter().flatten() {
                if let Ok(mut late) = TcpStream::connect(addr) {
                    let _ = late.write_all(GARBAGE);
                    assert!(!matches!(late.read(&mut [0]), Ok(1)), "{addr} answers");
                }
            }
            let mut data = [1.0_f32; 1000];
            group.all_reduce(&mut data, Reduce::Sum, soon(FAR)).unwrap();
            assert_eq!(data, [3.0; 1000]);
        }
    });
}
