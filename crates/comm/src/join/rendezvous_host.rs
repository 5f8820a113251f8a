//! Rendezvous at an address ([`crate::rendezvous`]). The rank that binds the address, the host,
//! collects the addresses of all ranks and sends each the list. With a group key, no other process
//! can join, host or forge the list.
//!
//! ```text
//! member -> a hello with the round's group id, all numbers 0        host -> its reply
//! member -> its address, padded with zeros: 64 bytes
//! host   -> when the round is over, all addresses, a line each, then an empty line
//! ```

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::config::GroupId;
use super::greeting::{self, IncompleteGreeting, STRANGER_WAIT, STRANGERS, refuse};
use super::hello::{Hello, REPLY_BYTES, Reply, VERSION};
use super::key::GroupKey;
use super::listener::Listener;
use super::refusal::Refusal;
use super::stream::PeerConnection;
use crate::transport::Closed;
use crate::{Deadline, deadline};

/// Maximum pending connections.
const COMERS: usize = 1024;

/// Bytes of a member's address on the wire; the longest address has 58.
const NAME_BYTES: usize = 64;

/// Longest list: [`COMERS`] lines.
pub(crate) const LIST_BYTES: usize = COMERS * NAME_BYTES;

/// Limit of an attempt to connect, or to send the list.
const WAIT: Duration = Duration::from_millis(500);

/// Polling interval of both sides.
const LOOK_EVERY: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) enum RendezvousFailure {
    /// The host has ended, is no rank, or is of another round.
    Gone,
    /// The host refuses this rank.
    Refused(Refusal),
}

impl From<Closed> for RendezvousFailure {
    fn from(Closed: Closed) -> Self {
        Self::Gone
    }
}

/// Connects to the host `at`, registers this rank, and waits for the list.
pub(crate) fn fetch_members(
    at: SocketAddr,
    round: GroupId,
    key: Option<&GroupKey>,
    own: SocketAddr,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, RendezvousFailure> {
    let hello = Hello {
        version: VERSION,
        slot: 0,
        size: 0,
        rank: 0,
        to: 0,
        group: round,
        instance: 0,
        streams: 0,
        sealed: key.is_some(),
    };
    let stream = TcpStream::connect_timeout(&at, WAIT);
    let greeted = stream.and_then(|stream| greeting::greet(stream, &hello, key));
    let (mut pending, shaking) = greeted.map_err(|_| RendezvousFailure::Gone)?;
    let soon = Deadline::at(deadline::now() + STRANGER_WAIT).min(deadline);
    match look_until(soon, || pending.reply(shaking.is_some()))? {
        Some(Reply::Welcome) => {}
        Some(Reply::Refused(why) | Reply::GaveUp(why)) => {
            return Err(RendezvousFailure::Refused(why));
        }
        None => return Err(RendezvousFailure::Gone),
    }
    let session = shaking.map(|shaking| shaking.end(pending.shake(REPLY_BYTES)));
    let session = session.transpose().map_err(|_| RendezvousFailure::Gone)?;
    let stream = PeerConnection::new(pending.stream, session);
    write_all(&stream, &name(own), soon)?;
    let mut list = Vec::new();
    look_until(deadline, || read_list(&stream, &mut list))?.ok_or(RendezvousFailure::Gone)
}

/// Calls `look` until it returns a value or the deadline has passed.
fn look_until<T>(
    deadline: Deadline,
    mut look: impl FnMut() -> Result<Option<T>, Closed>,
) -> Result<T, Closed> {
    loop {
        match look()? {
            Some(found) => return Ok(found),
            None if deadline.left(deadline::now()).is_zero() => return Err(Closed),
            None => std::thread::sleep(LOOK_EVERY),
        }
    }
}

fn write_all(stream: &PeerConnection, mut bytes: &[u8], deadline: Deadline) -> Result<(), Closed> {
    look_until(deadline, || {
        bytes = &bytes[stream.write(&[], bytes)?..];
        Ok(bytes.is_empty().then_some(()))
    })
}

/// The list, once complete; the inner `None` if it is malformed.
fn read_list(
    stream: &PeerConnection,
    list: &mut Vec<u8>,
) -> Result<Option<Option<Vec<SocketAddr>>>, Closed> {
    let mut part = [0; 4096];
    loop {
        match stream.read(&mut part)? {
            0 => return Ok(None),
            count => list.extend_from_slice(&part[..count]),
        }
        if list.ends_with(b"\n\n") {
            return Ok(Some(parse_list(list)));
        }
        if list.len() > LIST_BYTES {
            return Err(Closed);
        }
    }
}

/// Parses addresses, one a line, up to the first empty line.
pub(crate) fn parse_list(list: &[u8]) -> Option<Vec<SocketAddr>> {
    let lines = std::str::from_utf8(list).ok()?.lines();
    let lines = lines.take_while(|line| !line.is_empty());
    lines.map(|line| line.parse().ok()).collect()
}

/// Formats such a list.
pub(crate) fn print_list(addrs: &[SocketAddr]) -> String {
    addrs.iter().map(|addr| format!("{addr}\n")).collect()
}

fn name(addr: SocketAddr) -> [u8; NAME_BYTES] {
    let (text, mut bytes) = (addr.to_string(), [0; NAME_BYTES]);
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

fn parse_name(bytes: &[u8; NAME_BYTES]) -> Option<SocketAddr> {
    let text = std::str::from_utf8(bytes).ok()?;
    text.trim_end_matches('\0').parse().ok()
}

/// A pending connection at the host.
enum PendingMember {
    Greeting(IncompleteGreeting),
    /// It was welcomed and must send its address. With a key, this also proves that its hello was
    /// no replay.
    Naming(Box<PeerConnection>, PartialAddress),
}

struct PartialAddress {
    bytes: [u8; NAME_BYTES],
    filled: usize,
    since: Instant,
}

/// The host's side of a round. Pending connections have the same bounds as in a join.
pub(crate) struct RendezvousHost<'a> {
    listener: &'a Listener,
    round: GroupId,
    key: Option<&'a GroupKey>,
    guests: VecDeque<PendingMember>,
    comers: Vec<(SocketAddr, PeerConnection)>,
    turned_away: Option<Refusal>,
}

impl<'a> RendezvousHost<'a> {
    pub(crate) const fn new(
        listener: &'a Listener,
        round: GroupId,
        key: Option<&'a GroupKey>,
    ) -> Self {
        Self {
            listener,
            round,
            key,
            guests: VecDeque::new(),
            comers: Vec::new(),
            turned_away: None,
        }
    }

    /// Accepts new connections, drops closed ones.
    pub(crate) fn poll_members(&mut self) {
        let come = self.listener.pending_connections().take();
        self.guests.extend(come.map(PendingMember::Greeting));
        let surplus = self.guests.len().saturating_sub(STRANGERS);
        let guests = std::mem::take(&mut self.guests).into_iter().skip(surplus);
        self.guests = guests.filter_map(|guest| self.poll_member(guest)).collect();
        self.comers
            .retain(|(_, stream)| stream.peek(&mut [0]).is_ok());
    }

    /// Addresses of the connected members; a member that connected twice appears twice.
    pub(crate) fn member_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.comers.iter().map(|(addr, _)| *addr)
    }

    /// Reason of the last rejection.
    pub(crate) const fn turned_away(&self) -> Option<Refusal> {
        self.turned_away
    }

    /// Sends the list to all members. A member that misses it has ended, or connects again.
    pub(crate) fn send_list(self, list: &[SocketAddr]) {
        let list = print_list(list) + "\n";
        let soon = Deadline::at(deadline::now() + WAIT);
        for (_, stream) in self.comers {
            if write_all(&stream, list.as_bytes(), soon).is_ok() {
                stream.shut_down();
            }
        }
    }

    fn poll_member(&mut self, guest: PendingMember) -> Option<PendingMember> {
        match guest {
            PendingMember::Greeting(mut pending) => match pending.hello() {
                Ok(Some(hello)) => self.admit(pending, &hello),
                Ok(None) if pending.plausible() => Some(PendingMember::Greeting(pending)),
                Ok(None) | Err(Closed) => None,
            },
            PendingMember::Naming(stream, mut name) => {
                name.filled += stream.read(&mut name.bytes[name.filled..]).ok()?;
                if name.filled < NAME_BYTES {
                    let waits = name.since.elapsed() < STRANGER_WAIT;
                    return waits.then_some(PendingMember::Naming(stream, name));
                }
                let addr = parse_name(&name.bytes).filter(|_| self.comers.len() < COMERS);
                self.comers.extend(addr.map(|addr| (addr, *stream)));
                None
            }
        }
    }

    fn admit(&mut self, pending: IncompleteGreeting, hello: &Hello) -> Option<PendingMember> {
        match greeting::check(&pending, hello, self.round, self.key) {
            Ok(answer) => {
                let stream = greeting::welcome(pending, answer).ok()?;
                let name = PartialAddress {
                    bytes: [0; NAME_BYTES],
                    filled: 0,
                    since: deadline::now(),
                };
                Some(PendingMember::Naming(Box::new(stream), name))
            }
            // Of another round: it may be early, or will find out that it is late.
            Err(Refusal::Group) => None,
            Err(why) => {
                refuse(&pending.stream, Reply::Refused(why));
                self.turned_away = Some(why);
                None
            }
        }
    }
}

/// Parses `bytes` as an address and as a list.
pub(crate) fn parse(bytes: &[u8]) {
    if let Some(addr) = bytes.first_chunk().and_then(parse_name) {
        assert_eq!(parse_name(&name(addr)), Some(addr));
    }
    if let Some(list) = parse_list(bytes) {
        assert_eq!(parse_list(print_list(&list).as_bytes()), Some(list));
    }
}
