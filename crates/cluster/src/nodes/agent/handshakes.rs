//! Handshakes in progress on the control port: strangers cannot fill it.
//!
//! A connection is *silent* until its first message fits a key of the cluster, or a code. Silent
//! connections make room for new ones, the oldest first: a member speaks within one round trip, so
//! it passes however fast strangers connect.

use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use paceline_base::lock;

const HANDSHAKES_MAX: usize = 64;

/// Most concurrent handshakes of one address that is no node's: some machines may share it.
const STRANGERS_MAX: usize = 16;

#[derive(Default)]
pub(super) struct Handshakes(Arc<Mutex<HandshakeTable>>);

#[derive(Default)]
struct HandshakeTable {
    next: u64,
    rows: Vec<HandshakeRow>,
}

struct HandshakeRow {
    id: u64,
    peer: Peer,
    is_silent: bool,
    /// To close it from here.
    stream: TcpStream,
}

/// Source of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    /// The address, or the network that one machine can have all addresses of.
    from: IpAddr,
    /// Whether a node of the cluster has this address.
    is_node: bool,
}

impl Peer {
    pub(super) fn new(from: IpAddr, is_node: bool) -> Self {
        let from = match from.to_canonical() {
            IpAddr::V6(from) if !from.is_unicast_link_local() => {
                let [a, b, c, d, ..] = from.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
            from => from,
        };
        Self { from, is_node }
    }
}

/// A place among the handshakes; dropping it frees the place.
pub(super) struct HandshakeSlot {
    id: u64,
    table: Arc<Mutex<HandshakeTable>>,
}

impl HandshakeSlot {
    /// The connection has sent a first message that fits.
    pub(super) fn spoke(&self) {
        let mut table = lock(&self.table);
        if let Some(row) = table.rows.iter_mut().find(|row| row.id == self.id) {
            row.is_silent = false;
        }
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        lock(&self.table).rows.retain(|row| row.id != self.id);
    }
}

/// Decision about a new connection.
#[derive(Debug, PartialEq, Eq)]
enum Admission {
    Free,
    /// Closes this row for it.
    Instead(usize),
    Full,
}

impl Handshakes {
    /// A slot for a connection, perhaps that of a silent one, which is closed; `None` refuses it.
    pub(super) fn admit(&self, peer: Peer, stream: &TcpStream) -> Option<HandshakeSlot> {
        let stream = stream.try_clone().ok()?;
        let mut table = lock(&self.0);
        let rows: Vec<_> = table
            .rows
            .iter()
            .map(|row| (row.peer, row.is_silent))
            .collect();
        match admission(&rows, peer) {
            Admission::Free => {}
            Admission::Full => return None,
            Admission::Instead(at) => {
                // Its thread sees the end of the connection.
                let _ = table.rows.remove(at).stream.shutdown(Shutdown::Both);
            }
        }
        table.next += 1;
        let id = table.next;
        table.rows.push(HandshakeRow {
            id,
            peer,
            is_silent: true,
            stream,
        });
        let table = Arc::clone(&self.0);
        Some(HandshakeSlot { id, table })
    }
}

/// The oldest silent connection goes: of the same address where it has its share, of a stranger
/// before a node's. A stranger never takes a node's place.
fn admission(rows: &[(Peer, bool)], peer: Peer) -> Admission {
    let same = rows.iter().filter(|(other, _)| *other == peer).count();
    let oldest = |fits: &dyn Fn(&Peer) -> bool| {
        let mut rows = rows.iter();
        rows.position(|(other, is_silent)| *is_silent && fits(other))
    };
    let found = if !peer.is_node && same >= STRANGERS_MAX {
        oldest(&|other| *other == peer)
    } else if rows.len() < HANDSHAKES_MAX {
        return Admission::Free;
    } else {
        let stranger = oldest(&|other| !other.is_node);
        stranger.or_else(|| oldest(&|_| peer.is_node))
    };
    found.map_or(Admission::Full, Admission::Instead)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stranger(host: u8) -> Peer {
        Peer::new([10, 0, 0, host].into(), false)
    }

    fn node(host: u8) -> Peer {
        Peer::new([10, 0, 1, host].into(), true)
    }

    #[test]
    fn silent_strangers_make_room() {
        let silent = |peer| (peer, true);
        // An address has its share, and then replaces its own oldest connection.
        let mut rows = vec![(stranger(1), false)];
        rows.extend([silent(stranger(1)); STRANGERS_MAX - 1]);
        assert_eq!(admission(&rows, stranger(1)), Admission::Instead(1));
        assert_eq!(admission(&rows, stranger(2)), Admission::Free);
        let speaking = [(stranger(1), false); STRANGERS_MAX];
        assert_eq!(admission(&speaking, stranger(1)), Admission::Full);
        // A full table: strangers go first, and never for the place of a node.
        let mut rows = vec![silent(node(1)), (node(1), false)];
        rows.extend((0..HANDSHAKES_MAX as u8 - 2).map(|host| silent(stranger(host))));
        assert_eq!(admission(&rows, stranger(99)), Admission::Instead(2));
        assert_eq!(admission(&rows, node(2)), Admission::Instead(2));
        let mut rows = [(node(1), false); HANDSHAKES_MAX];
        assert_eq!(admission(&rows, node(2)), Admission::Full);
        rows[5].1 = true;
        assert_eq!(admission(&rows, node(2)), Admission::Instead(5));
        assert_eq!(admission(&rows, stranger(1)), Admission::Full);
    }

    #[test]
    fn one_machine_has_a_network_of_addresses() {
        let peer = |text: &str| Peer::new(text.parse().unwrap(), false);
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::2:1"));
        assert_ne!(peer("2001:db8:0:1::1"), peer("2001:db8::1"));
        assert_ne!(peer("fe80::1"), peer("fe80::2"));
        assert_eq!(peer("::ffff:10.0.0.1"), peer("10.0.0.1"));
    }
}
