//! Discovers nodes of the same cluster on this machine's networks, by multicast beacons.
//!
//! Each node sends beacons with its id and port on every interface, over IPv6 (link-local
//! multicast) and IPv4 (multicast). It sends some within the first second, then one every five
//! seconds. It also answers a beacon of an unknown node. No address has to be configured: the
//! link-local ones of IPv6 suffice.
//!
//! ```text
//! beacon   0 PLbeac1 and a kind   8 nonce (8)   16 node id (16)   32 port (u16, little-endian)
//!          34 SHA-256 of a key of the cluster's and all before, its first 16 bytes
//! ```
//! A beacon only reveals that a cluster exists, and only members can make a valid one. A replayed
//! one leads to a failed handshake.
//!
//! Bounds: datagrams of [`BEACON_BYTES`], others are dropped. Interfaces are polled every two
//! seconds, so that cables may be plugged in later.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use socket2::{Domain, Protocol, Socket, Type};

use super::{ClusterKey, NodeId};

/// Port of beacons, of all clusters.
pub const BEACON_PORT: u16 = 52417;

/// Link-local, of the range for experiments (RFC 4291, RFC 3692).
const GROUP_V6: Ipv6Addr = Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0, 0x7061, 0x6365);

/// Administratively scoped (RFC 2365).
const GROUP_V4: Ipv4Addr = Ipv4Addr::new(239, 255, 112, 97);

/// Length of a beacon.
pub const BEACON_BYTES: usize = 50;

const MAGIC: [u8; 7] = *b"PLbeac1";

/// First bytes of an invitation; the node's port follows (u16, little-endian).
const INVITATION: [u8; 8] = *b"PLcode1\n";

/// Interval of invitations.
const INVITE_EVERY: Duration = Duration::from_secs(1);

/// When beacons are sent after a start or a change of interfaces.
const FIRST: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_millis(150),
    Duration::from_millis(400),
    Duration::from_millis(900),
];

/// Interval of beacons later on.
const EVERY: Duration = Duration::from_secs(5);

/// Most foreign datagrams read in one poll.
const FOREIGN_MAX: usize = 256;

/// Poll interval of interfaces.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How a node was discovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiscoveryMethod {
    /// By a beacon over IPv6.
    Beacon6,
    /// By a beacon over IPv4.
    Beacon4,
    /// By multicast DNS.
    Mdns,
    /// By an address that the user named.
    Peer,
    /// The other node connected to this one.
    Incoming,
    /// Reported by another node.
    Told,
}

/// A discovered node of this cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscoveredNode {
    pub id: NodeId,
    /// Address of its control port.
    pub addr: SocketAddr,
    pub how: DiscoveryMethod,
    /// Whether it requests an answer.
    pub asks: bool,
}

/// The bytes of a beacon; `asks` requests an immediate answer.
pub fn beacon(
    key: &ClusterKey,
    nonce: u64,
    id: NodeId,
    port: u16,
    asks: bool,
) -> [u8; BEACON_BYTES] {
    let mut bytes = [0; BEACON_BYTES];
    bytes[..7].copy_from_slice(&MAGIC);
    bytes[7] = if asks { b'?' } else { b'!' };
    bytes[8..16].copy_from_slice(&nonce.to_le_bytes());
    bytes[16..32].copy_from_slice(&id.0);
    bytes[32..34].copy_from_slice(&port.to_le_bytes());
    let tag = tag(key, &bytes[..34]);
    bytes[34..].copy_from_slice(&tag);
    bytes
}

fn tag(key: &ClusterKey, bytes: &[u8]) -> [u8; 16] {
    // Key and bytes have fixed lengths, so length extension is impossible.
    let hash = Sha256::new()
        .chain_update(key.derive("paceline beacon"))
        .chain_update(bytes);
    let hash: [u8; 32] = hash.finalize().into();
    std::array::from_fn(|i| hash[i])
}

/// The node, its port and whether it requests an answer, if the beacon is of this cluster.
pub fn read_beacon(key: &ClusterKey, bytes: &[u8]) -> Option<(NodeId, u16, bool)> {
    let bytes: &[u8; BEACON_BYTES] = bytes.try_into().ok()?;
    let asks = match bytes[7] {
        b'?' => true,
        b'!' => false,
        _ => return None,
    };
    // No constant-time comparison needed: a replayed valid beacon has the same effect as a forged
    // one.
    if bytes[..7] != MAGIC || bytes[34..] != tag(key, &bytes[..34]) {
        return None;
    }
    let id = NodeId(std::array::from_fn(|i| bytes[16 + i]));
    Some((id, u16::from_le_bytes([bytes[32], bytes[33]]), asks))
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum BeaconInterface {
    V4(Ipv4Addr),
    V6(u32),
}

/// Sends and receives beacons. Driven by one thread that calls [`Beacons::turn`] repeatedly.
#[derive(Debug)]
pub struct Beacons {
    id: NodeId,
    port: u16,
    v4: Option<UdpSocket>,
    v6: Option<UdpSocket>,
    /// Interfaces, each with the error that blocks it.
    ways: BTreeMap<BeaconInterface, Option<String>>,
    looked: Option<Instant>,
    /// When the interfaces last changed; `sent` counts the beacons since.
    changed: Instant,
    sent: usize,
    nonce: u64,
    invited: Option<Instant>,
}

impl Beacons {
    /// Opens the sockets. Skips an address family that this machine does not have.
    pub fn open(id: NodeId, port: u16, nonce: u64) -> io::Result<Self> {
        let (v4, v6) = (socket_v4(), socket_v6());
        if let (Err(error), Err(_)) = (&v4, &v6) {
            return Err(io::Error::new(error.kind(), error.to_string()));
        }
        Ok(Self {
            id,
            port,
            v4: v4.ok(),
            v6: v6.ok(),
            ways: BTreeMap::new(),
            looked: None,
            changed: Instant::now(),
            sent: 0,
            nonce,
            invited: None,
        })
    }

    /// Sends due beacons, then waits up to `wait` for a beacon of this cluster.
    pub fn poll(&mut self, key: &ClusterKey, wait: Duration) -> Option<DiscoveredNode> {
        self.look();
        let due = FIRST.get(self.sent).copied().unwrap_or_else(|| {
            FIRST[FIRST.len() - 1] + EVERY * (self.sent + 1 - FIRST.len()) as u32
        });
        if self.changed.elapsed() >= due {
            self.sent += 1;
            self.say(key, self.sent <= FIRST.len());
        }
        self.hear(key, wait)
    }

    /// Restarts the schedule, as after a start: others may have dropped this node.
    pub fn restart(&mut self) {
        (self.changed, self.sent) = (Instant::now(), 0);
    }

    /// Sends a beacon on every interface.
    pub fn say(&mut self, key: &ClusterKey, asks: bool) {
        self.nonce = self.nonce.wrapping_add(1);
        let bytes = beacon(key, self.nonce, self.id, self.port, asks);
        for (way, blocked) in &mut self.ways {
            let sent = send(way, (self.v4.as_ref(), self.v6.as_ref()), &bytes);
            *blocked = sent.err().map(|error| error.to_string());
        }
    }

    /// Sends an invitation on all networks once a second: a newcomer with a code may connect to the
    /// control port.
    pub fn invite(&mut self) {
        if self.invited.is_some_and(|at| at.elapsed() < INVITE_EVERY) {
            return;
        }
        self.invited = Some(Instant::now());
        let mut bytes = INVITATION.to_vec();
        bytes.extend(self.port.to_le_bytes());
        for way in self.ways.keys() {
            // A blocked interface is reported by the beacons.
            let _ = send(way, (self.v4.as_ref(), self.v6.as_ref()), &bytes);
        }
    }

    /// Errors that block beacons, by interface. Over IPv6 only those that last beyond the first
    /// beacons: a new address sends nothing in its first two seconds (RFC 4862, 5.4).
    pub fn blocked(&self) -> Vec<String> {
        let is_settled = self.sent > FIRST.len();
        let of = |(way, blocked): (&BeaconInterface, &Option<String>)| {
            let blocked = blocked.as_ref()?;
            match way {
                BeaconInterface::V4(addr) => Some(format!("beacons from {addr}: {blocked}")),
                BeaconInterface::V6(index) => {
                    is_settled.then(|| format!("IPv6 beacons on interface {index}: {blocked}"))
                }
            }
        };
        self.ways.iter().filter_map(of).collect()
    }

    fn hear(&self, key: &ClusterKey, wait: Duration) -> Option<DiscoveredNode> {
        let deadline = Instant::now() + wait;
        loop {
            for (socket, how) in [
                (&self.v6, DiscoveryMethod::Beacon6),
                (&self.v4, DiscoveryMethod::Beacon4),
            ] {
                if let Some(heard) = socket.as_ref().and_then(|s| self.receive(s, key, how)) {
                    return Some(heard);
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            std::thread::sleep(left.min(Duration::from_millis(20)));
        }
    }

    fn receive(
        &self,
        socket: &UdpSocket,
        key: &ClusterKey,
        how: DiscoveryMethod,
    ) -> Option<DiscoveredNode> {
        let mut bytes = [0; BEACON_BYTES + 1];
        // Skips foreign beacons, up to a limit.
        for _ in 0..FOREIGN_MAX {
            let (count, mut addr) = socket.recv_from(&mut bytes).ok()?;
            let Some((id, port, asks)) = read_beacon(key, &bytes[..count]) else {
                continue;
            };
            if id != self.id {
                addr.set_port(port);
                return Some(DiscoveredNode {
                    id,
                    addr,
                    how,
                    asks,
                });
            }
        }
        None
    }

    /// Joins the groups on interfaces that are new.
    fn look(&mut self) {
        if self.looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return;
        }
        self.looked = Some(Instant::now());
        let mut ways = BTreeMap::new();
        for interface in if_addrs::get_if_addrs().unwrap_or_default() {
            match (&interface.addr, interface.index) {
                _ if interface.is_loopback() => {}
                (if_addrs::IfAddr::V4(addr), _) => {
                    ways.insert(BeaconInterface::V4(addr.ip), None);
                }
                (if_addrs::IfAddr::V6(addr), Some(index)) if addr.is_link_local() => {
                    ways.insert(BeaconInterface::V6(index), None);
                }
                _ => {}
            }
        }
        if ways.keys().eq(self.ways.keys()) {
            return;
        }
        for way in ways.keys().filter(|way| !self.ways.contains_key(way)) {
            // Errors are ignored: a group joined before stays joined.
            let _ = match (way, &self.v4, &self.v6) {
                (BeaconInterface::V4(addr), Some(socket), _) => {
                    socket.join_multicast_v4(&GROUP_V4, addr)
                }
                (BeaconInterface::V6(index), _, Some(socket)) => {
                    socket.join_multicast_v6(&GROUP_V6, *index)
                }
                _ => Ok(()),
            };
        }
        (self.ways, self.changed, self.sent) = (ways, Instant::now(), 0);
    }
}

/// Prefix of a test's datagram; the test's nonce follows (u64, little-endian).
const TEST: [u8; 8] = *b"PLtest1\n";

/// How often a test's datagram is sent, and the pause between them.
const TEST_TIMES: u32 = 5;
const TEST_EVERY: Duration = Duration::from_millis(200);

/// Tests whether multicast passes between two machines, over the groups of beacons.
#[derive(Debug)]
pub struct Probe(Beacons);

impl Probe {
    /// Opens the sockets and joins the groups on all interfaces.
    pub fn open() -> io::Result<Self> {
        let mut beacons = Beacons::open(NodeId([0; 16]), 0, 0)?;
        beacons.look();
        Ok(Self(beacons))
    }

    /// Sends the test `nonce` out of every interface for a second.
    pub fn say(&mut self, nonce: u64) {
        let mut bytes = TEST.to_vec();
        bytes.extend(nonce.to_le_bytes());
        let beacons = &self.0;
        for _ in 0..TEST_TIMES {
            for way in beacons.ways.keys() {
                // A blocked interface just does not arrive.
                let _ = send(way, (beacons.v4.as_ref(), beacons.v6.as_ref()), &bytes);
            }
            std::thread::sleep(TEST_EVERY);
        }
    }

    /// Sends one test on every interface. Returns the first error of the system, as macOS returns
    /// for programs without permission for the local network.
    pub fn refused(&self) -> Option<io::Error> {
        let beacons = &self.0;
        let mut bytes = TEST.to_vec();
        bytes.extend(0_u64.to_le_bytes());
        let sent = |way| send(way, (beacons.v4.as_ref(), beacons.v6.as_ref()), &bytes);
        beacons.ways.keys().find_map(|way| sent(way).err())
    }

    /// The address families over which the test `nonce` arrives within `wait`; returns early once
    /// it arrived over all.
    pub fn hear(&mut self, nonce: u64, wait: Duration) -> Vec<String> {
        let deadline = Instant::now() + wait;
        let mut heard = std::collections::BTreeSet::new();
        let sockets = [(&self.0.v4, "IPv4"), (&self.0.v6, "IPv6")];
        while Instant::now() < deadline && heard.len() < sockets.len() {
            for (socket, family) in sockets {
                let Some(socket) = socket else { continue };
                let mut bytes = [0; BEACON_BYTES + 1];
                while let Ok((count, _)) = socket.recv_from(&mut bytes) {
                    let number = bytes[..count].strip_prefix(&TEST);
                    if number == Some(&nonce.to_le_bytes()) {
                        heard.insert(family.to_owned());
                    }
                    if Instant::now() >= deadline {
                        break;
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        heard.into_iter().collect()
    }
}

/// The first inviting node discovered within `wait`. It is authenticated only by the code, which it
/// cannot learn from an attempt.
///
/// # Errors
/// This machine has no network.
pub fn find_inviting(wait: Duration) -> io::Result<Option<SocketAddr>> {
    let mut beacons = Beacons::open(NodeId([0; 16]), 0, 0)?;
    let deadline = Instant::now() + wait;
    while Instant::now() < deadline {
        beacons.look();
        for socket in [&beacons.v4, &beacons.v6].into_iter().flatten() {
            let mut bytes = [0; BEACON_BYTES + 1];
            let Ok((count, mut from)) = socket.recv_from(&mut bytes) else {
                continue;
            };
            if let Some([low, high]) = bytes[..count].strip_prefix(&INVITATION) {
                from.set_port(u16::from_le_bytes([*low, *high]));
                return Ok(Some(from));
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(None)
}

/// Addresses of this machine that others may reach. Excludes loopback, and link-local IPv6
/// addresses, which need an interface.
pub fn addresses() -> Vec<std::net::IpAddr> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    let mut found: Vec<std::net::IpAddr> = all
        .iter()
        .filter(|one| !one.is_loopback())
        .filter(|one| one.ip().is_ipv4() || !one.is_link_local())
        .map(if_addrs::Interface::ip)
        .collect();
    found.sort_unstable();
    found
}

/// Listen address for a program on one interface, with port 0: the interface's first address,
/// routable ones first. Without an interface it is the wildcard address, of both families if the
/// machine has both.
///
/// # Errors
/// The interface does not exist or has no address.
pub fn listen_address(interface: Option<&str>) -> io::Result<SocketAddr> {
    let Some(name) = interface else {
        let six = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let has_six = std::net::TcpListener::bind(six).is_ok();
        let four = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        return Ok(if has_six { six } else { four });
    };
    let all = if_addrs::get_if_addrs()?;
    let own = all.iter().filter(|one| one.name == name);
    let first = own.min_by_key(|one| (one.is_link_local(), one.ip().is_ipv6()));
    let first = first.ok_or_else(|| {
        let names: std::collections::BTreeSet<&str> =
            all.iter().map(|one| one.name.as_str()).collect();
        let names: Vec<&str> = names.into_iter().collect();
        let reason = format!(
            "no interface {name:?} with an address, there are {}",
            names.join(", ")
        );
        io::Error::new(io::ErrorKind::AddrNotAvailable, reason)
    })?;
    Ok(match first.ip() {
        std::net::IpAddr::V6(ip) if first.is_link_local() => {
            SocketAddrV6::new(ip, 0, 0, first.index.unwrap_or(0)).into()
        }
        ip => SocketAddr::new(ip, 0),
    })
}

/// Sends to the multicast group on the network of `way`.
fn send(
    way: &BeaconInterface,
    (v4, v6): (Option<&UdpSocket>, Option<&UdpSocket>),
    bytes: &[u8],
) -> io::Result<()> {
    match (way, v4, v6) {
        (BeaconInterface::V4(addr), Some(socket), _) => {
            socket2::SockRef::from(socket).set_multicast_if_v4(addr)?;
            let to = SocketAddrV4::new(GROUP_V4, BEACON_PORT);
            socket.send_to(bytes, to).map(drop)
        }
        (BeaconInterface::V6(index), _, Some(socket)) => {
            socket2::SockRef::from(socket).set_multicast_if_v6(*index)?;
            let to = SocketAddrV6::new(GROUP_V6, BEACON_PORT, 0, *index);
            socket.send_to(bytes, to).map(drop)
        }
        _ => Ok(()),
    }
}

fn socket_v4() -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_multicast_ttl_v4(1)?;
    finish(
        socket,
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, BEACON_PORT)),
    )
}

fn socket_v6() -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_only_v6(true)?;
    finish(
        socket,
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, BEACON_PORT)),
    )
}

/// Reuses the address: several nodes of one machine may listen, and each receives every beacon.
fn finish(socket: Socket, addr: SocketAddr) -> io::Result<UdpSocket> {
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&addr.into())?;
    let socket = UdpSocket::from(socket);
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beacons_are_believed_by_members_only() {
        let key = ClusterKey::new([7; 32]);
        let id = NodeId([9; 16]);
        for asks in [false, true] {
            let bytes = beacon(&key, 3, id, 52416, asks);
            assert_eq!(read_beacon(&key, &bytes), Some((id, 52416, asks)));
            assert_eq!(read_beacon(&ClusterKey::new([8; 32]), &bytes), None);
            for at in 0..BEACON_BYTES {
                let mut bad = bytes;
                bad[at] ^= 1;
                assert_eq!(read_beacon(&key, &bad), None, "{at}");
                assert_eq!(read_beacon(&key, &bytes[..at]), None, "{at}");
            }
        }
    }

    #[test]
    fn a_new_address_of_ipv6_has_time_before_it_is_a_problem() {
        let Ok(mut beacons) = Beacons::open(NodeId([1; 16]), 1, 1) else {
            eprintln!("SKIPPED errors of beacons: no network");
            return;
        };
        let error = || Some("no address".to_owned());
        let ways = [
            BeaconInterface::V4(Ipv4Addr::LOCALHOST),
            BeaconInterface::V6(7),
        ];
        beacons.ways = ways.map(|way| (way, error())).into();
        beacons.sent = FIRST.len();
        assert_eq!(beacons.blocked(), ["beacons from 127.0.0.1: no address"]);
        beacons.sent += 1;
        assert_eq!(beacons.blocked().len(), 2);
    }

    /// Without configured addresses a network still has link-local ones. Lines of the file:
    /// address, index, length of the prefix, scope (20: link-local), flags, name.
    #[cfg(target_os = "linux")]
    #[test]
    fn beacons_leave_by_every_link_local_address() {
        let Ok(mut beacons) = Beacons::open(NodeId([1; 16]), 1, 1) else {
            eprintln!("SKIPPED beacons over link-local addresses: no network");
            return;
        };
        let text = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
        beacons.look();
        for line in text.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let index = u32::from_str_radix(fields[1], 16).unwrap();
            let has_way = beacons.ways.contains_key(&BeaconInterface::V6(index));
            assert!(has_way || fields[3] != "20", "{line}");
        }
    }
}
