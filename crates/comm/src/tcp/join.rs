//! How ranks become a group: every pair connects, says who it is, and learns why not.
//!
//! ```text
//! hello, from the higher rank, which dials          reply, from the lower one
//!   0  "paceline"   8  version (u16)                  0  "paceline"   8  version (u16)
//!  10  lane         11 0                              10  verdict     11 1: about another rank
//!  12  size (u32)   16 own rank   20 rank dialled     12  size (u32)  16 rank (u32)
//!  24  group id (16)              40 instance (u64)   20  0
//! ```
//!
//! When a rank has all its links it sends one beat on each control connection, and it is done when
//! it has one from everybody. Who gives up says why on the control connections it has.
//!
//! A stranger costs a slot among [`STRANGERS`] until its first bytes are wrong or
//! [`STRANGER_WAIT`] is over; the oldest makes room for a new one. Whoever is a member says hello
//! at once, so it is not the oldest for long, and it dials again when it was turned out.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use paceline_base::Rank;
use rustix::event::{PollFd, PollFlags};

use super::sockets::{outcome, poll_until};
use super::{GroupId, Listener, random};
use crate::transport::Closed;
use crate::wire::{CONTROL_BYTES, Control};
use crate::{Call, Deadline, Error, deadline};

/// Changes with every change of a frame.
const VERSION: u16 = 1;
const MAGIC: [u8; 8] = *b"paceline";
const HELLO_BYTES: usize = 48;
const REPLY_BYTES: usize = 24;

/// Connections for each pair: calls, messages, control.
const LANES: usize = 3;
const CONTROL: usize = 2;

/// Connections that may wait for their first bytes at once: several for each of 64 ranks.
const STRANGERS: usize = 256;

/// How long a connection may take to say hello.
const STRANGER_WAIT: Duration = Duration::from_secs(2);

/// How long one attempt to connect may take, and how long to wait before the next.
const DIAL_WAIT: Duration = Duration::from_millis(500);
const DIAL_AGAIN: Duration = Duration::from_millis(20);

/// How long a rank that gives up still answers those who come.
const FAREWELL: Duration = Duration::from_millis(300);

/// Longest sleep between two looks at everything.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Why a rank may not become a member. `ours` is what the rank that says so has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another version of the protocol.
    Version {
        /// Of the rank that refuses.
        ours: u16,
        /// Of the one refused.
        theirs: u16,
    },
    /// Another number of ranks.
    Size {
        /// Of the rank that refuses.
        ours: u32,
        /// Of the one refused.
        theirs: u32,
    },
    /// Another group id: a member of another group, or of none.
    Group,
    /// It cannot be that rank, or dialled the wrong one.
    Rank(Rank),
    /// Another process has that rank already.
    Duplicate(Rank),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { ours, theirs } => {
                write!(f, "protocol version is {theirs}, expected {ours}")
            }
            Self::Size { ours, theirs } => write!(f, "group size is {theirs}, expected {ours}"),
            Self::Group => write!(f, "it has another group id"),
            Self::Rank(rank) => write!(f, "{rank} does not fit the list of addresses"),
            Self::Duplicate(rank) => write!(f, "{rank} is taken by another process"),
        }
    }
}

/// Why a group did not come about.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The own rank is not in the list of addresses.
    #[error("{rank} cannot join a group of {size}")]
    NoSuchRank {
        /// The own rank.
        rank: Rank,
        /// Addresses given.
        size: usize,
    },
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The deadline passed.
    #[error("{rank} did not join before the deadline{}", refused(.turned_away))]
    Missing {
        /// The first rank that was missing.
        rank: Rank,
        /// Why somebody who wanted to join was turned away, if that happened.
        turned_away: Option<Refusal>,
    },
    /// Another rank does not want this one.
    #[error("{by} refuses this rank: {why}")]
    Refused {
        /// Who.
        by: Rank,
        /// What is wrong with this rank.
        why: Refusal,
    },
    /// A process with this group's id does not fit.
    #[error("a process that wants to join does not fit: {why}")]
    Unfit {
        /// What is wrong with it.
        why: Refusal,
    },
    /// Another rank found a process that does not fit.
    #[error("{by} gave up: {why}")]
    GaveUp {
        /// Who.
        by: Rank,
        /// What is wrong with that process.
        why: Refusal,
    },
    /// A rank cannot use another's memory, most likely because it is on another machine.
    #[error("{rank} cannot map the memory of all others")]
    Apart {
        /// The first rank that cannot.
        rank: Rank,
    },
    /// A rank that had joined is gone again.
    #[error("{rank} left before the group was complete")]
    Lost {
        /// Who.
        rank: Rank,
    },
}

fn refused(why: &Option<Refusal>) -> String {
    why.map_or(String::new(), |why| {
        format!("; a process was turned away: {why}")
    })
}

impl JoinError {
    /// The error of a call that belongs to the making of a group.
    pub(crate) fn of_call(error: Error) -> Self {
        match error {
            Error::Timeout { rank, .. } => Self::Missing {
                rank,
                turned_away: None,
            },
            Error::PeerLost { rank, .. }
            | Error::Silent { rank, .. }
            | Error::Garbled { rank, .. }
            | Error::Mismatch { rank, .. }
            | Error::Length { rank, .. }
            | Error::NoSuchRank { rank, .. }
            | Error::Unsupported { rank, .. }
            | Error::Library { rank, .. } => Self::Lost { rank },
        }
    }

    /// This error, met while a group was split: `ranks` are the new group's members by their old
    /// ranks.
    pub(crate) fn of_split(&self, call: Call, ranks: &[Rank]) -> Error {
        let old = |rank: &Rank| ranks.get(rank.0 as usize).copied().unwrap_or(*rank);
        match self {
            Self::Missing { rank, .. } => Error::Timeout {
                call,
                rank: old(rank),
            },
            Self::Lost { rank }
            | Self::Refused { by: rank, .. }
            | Self::GaveUp { by: rank, .. } => Error::PeerLost {
                call,
                rank: old(rank),
            },
            Self::NoSuchRank { .. }
            | Self::System { .. }
            | Self::Unfit { .. }
            | Self::Apart { .. } => Error::PeerLost {
                call,
                rank: ranks.first().copied().unwrap_or_default(),
            },
        }
    }
}

/// What a rank says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    version: u16,
    lane: u8,
    size: u32,
    rank: u32,
    to: u32,
    group: GroupId,
    instance: u64,
}

impl Hello {
    fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = self.lane;
        bytes[12..16].copy_from_slice(&self.size.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rank.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.group.0);
        bytes[40..].copy_from_slice(&self.instance.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let mut group = [0; 16];
        group.copy_from_slice(&bytes[24..40]);
        bytes.starts_with(&MAGIC).then(|| Self {
            version: u16::from_le_bytes([bytes[8], bytes[9]]),
            lane: bytes[10],
            size: word(bytes, 12),
            rank: word(bytes, 16),
            to: word(bytes, 20),
            group: GroupId(group),
            instance: u64::from(word(bytes, 40)) | u64::from(word(bytes, 44)) << 32,
        })
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |word| u32::from_le_bytes(*word))
}

/// What a rank answers to a hello, or says when it gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reply {
    Welcome,
    /// The one who said hello does not fit.
    Refused(Refusal),
    /// Another one did not fit.
    GaveUp(Refusal),
}

fn encode_reply(reply: Reply, size: u32) -> [u8; REPLY_BYTES] {
    let mut bytes = [0; REPLY_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    let (verdict, theirs) = match reply {
        Reply::Welcome => (0, 0),
        Reply::Refused(why) | Reply::GaveUp(why) => match why {
            Refusal::Version { theirs, .. } => (1, theirs.into()),
            Refusal::Size { theirs, .. } => (2, theirs),
            Refusal::Group => (3, 0),
            Refusal::Rank(rank) => (4, rank.0),
            Refusal::Duplicate(rank) => (5, rank.0),
        },
    };
    bytes[10] = verdict;
    bytes[11] = u8::from(matches!(reply, Reply::GaveUp(_)));
    bytes[12..16].copy_from_slice(&size.to_le_bytes());
    bytes[16..20].copy_from_slice(&theirs.to_le_bytes());
    bytes
}

/// `None` if these bytes are no reply.
fn decode_reply(bytes: &[u8; REPLY_BYTES]) -> Option<Reply> {
    let ours = u16::from_le_bytes([bytes[8], bytes[9]]);
    let (size, theirs) = (word(bytes, 12), word(bytes, 16));
    let why = match bytes[10] {
        0 => return bytes.starts_with(&MAGIC).then_some(Reply::Welcome),
        1 => Refusal::Version {
            ours,
            theirs: u16::try_from(theirs).ok()?,
        },
        2 => Refusal::Size { ours: size, theirs },
        3 => Refusal::Group,
        4 => Refusal::Rank(Rank(theirs)),
        5 => Refusal::Duplicate(Rank(theirs)),
        _ => return None,
    };
    let reply = match bytes[11] {
        0 => Reply::Refused(why),
        _ => Reply::GaveUp(why),
    };
    bytes.starts_with(&MAGIC).then_some(reply)
}

/// Reads `bytes` as a hello and as a reply.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn parse(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk().and_then(Hello::decode) {
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    }
    let _ = bytes.first_chunk().and_then(decode_reply);
}

/// Connections by rank, none for the rank itself.
type Streams = Vec<Option<TcpStream>>;

/// A connection whose first bytes have not all come.
struct Pending<const N: usize> {
    stream: TcpStream,
    bytes: [u8; N],
    filled: usize,
    since: Instant,
}

impl<const N: usize> Pending<N> {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            bytes: [0; N],
            filled: 0,
            since: deadline::now(),
        }
    }

    /// All bytes, once they are there.
    fn read(&mut self) -> Result<Option<[u8; N]>, Closed> {
        self.filled += outcome((&self.stream).read(&mut self.bytes[self.filled..]))?;
        Ok((self.filled == N).then_some(self.bytes))
    }

    /// Whether it may still become something.
    fn plausible(&self) -> bool {
        let head = self.filled.min(MAGIC.len());
        self.bytes[..head] == MAGIC[..head] && self.since.elapsed() < STRANGER_WAIT
    }
}

/// One connection that this rank has to make.
struct Dial {
    peer: usize,
    lane: usize,
    pending: Option<Pending<REPLY_BYTES>>,
    not_before: Instant,
}

struct Joining<'a> {
    listener: &'a Listener,
    rank: usize,
    addrs: &'a [SocketAddr],
    id: GroupId,
    instance: u64,
    links: [Streams; LANES],
    /// Which process a rank is.
    instances: Vec<Option<u64>>,
    strangers: VecDeque<Pending<HELLO_BYTES>>,
    dials: Vec<Dial>,
    turned_away: Option<Refusal>,
}

/// All connections of `rank`: for calls, for messages, for control.
pub(super) fn connect(
    listener: &Listener,
    rank: Rank,
    addrs: &[SocketAddr],
    id: GroupId,
    deadline: Deadline,
) -> Result<[Streams; LANES], JoinError> {
    let size = addrs.len();
    if rank.0 as usize >= size || u32::try_from(size).is_err() {
        return Err(JoinError::NoSuchRank { rank, size });
    }
    let mut joining = Joining::new(listener, rank.0 as usize, addrs, id);
    let result = joining
        .links(deadline)
        .and_then(|()| joining.ready(deadline));
    match result {
        Ok(()) => Ok(joining.links),
        Err(error) => {
            joining.give_up(&error, deadline);
            Err(error)
        }
    }
}

impl<'a> Joining<'a> {
    fn new(listener: &'a Listener, rank: usize, addrs: &'a [SocketAddr], id: GroupId) -> Self {
        let now = deadline::now();
        let dial = |(peer, lane)| Dial {
            peer,
            lane,
            pending: None,
            not_before: now,
        };
        let pairs = (0..rank).flat_map(|peer| (0..LANES).map(move |lane| (peer, lane)));
        Self {
            listener,
            rank,
            addrs,
            id,
            instance: random(),
            links: std::array::from_fn(|_| addrs.iter().map(|_| None).collect()),
            instances: vec![None; addrs.len()],
            strangers: VecDeque::new(),
            dials: pairs.map(dial).collect(),
            turned_away: None,
        }
    }

    fn size(&self) -> u32 {
        u32::try_from(self.addrs.len()).expect("checked before")
    }

    /// Makes all links.
    fn links(&mut self, deadline: Deadline) -> Result<(), JoinError> {
        loop {
            self.accept();
            self.hear_strangers()?;
            self.dial(deadline)?;
            let Some(missing) = self.missing() else {
                return Ok(());
            };
            self.look_at_members()?;
            if deadline.left(deadline::now()).is_zero() {
                return Err(JoinError::Missing {
                    rank: missing,
                    turned_away: self.turned_away,
                });
            }
            self.wait(deadline);
        }
    }

    fn missing(&self) -> Option<Rank> {
        let linked = |rank: &usize| self.links.iter().all(|lane| lane[*rank].is_some());
        let mut others = (0..self.addrs.len()).filter(|rank| *rank != self.rank);
        others.find(|rank| !linked(rank)).map(number)
    }

    /// Takes in whoever knocks, up to a bound for each look.
    fn accept(&mut self) {
        for _ in 0..STRANGERS {
            let Ok((stream, _)) = self.listener.socket.accept() else {
                return;
            };
            let ready = stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true));
            if ready.is_ok() {
                self.strangers.push_back(Pending::new(stream));
            }
            if self.strangers.len() > STRANGERS {
                self.strangers.pop_front();
            }
        }
    }

    fn hear_strangers(&mut self) -> Result<(), JoinError> {
        for _ in 0..self.strangers.len() {
            let Some(mut stranger) = self.strangers.pop_front() else {
                break;
            };
            match stranger.read() {
                Ok(Some(bytes)) => self.admit(stranger.stream, &bytes)?,
                Ok(None) if stranger.plausible() => self.strangers.push_back(stranger),
                Ok(None) | Err(Closed) => {}
            }
        }
        Ok(())
    }

    /// Judges a hello, answers, and keeps the connection of a member.
    fn admit(&mut self, stream: TcpStream, bytes: &[u8; HELLO_BYTES]) -> Result<(), JoinError> {
        let Some(hello) = Hello::decode(bytes) else {
            return Ok(());
        };
        let why = self.judge(&hello);
        let reply = why.map_or(Reply::Welcome, Reply::Refused);
        let answer = (&stream).write(&encode_reply(reply, self.size()));
        match why {
            None if answer.is_ok() => {
                let peer = hello.rank as usize;
                self.instances[peer] = Some(hello.instance);
                self.links[usize::from(hello.lane)][peer] = Some(stream);
            }
            None => {}
            Some(why) => {
                self.turned_away = Some(why);
                // A member of another group has lost its way; one of this group is misconfigured,
                // and the group will never be complete.
                if hello.group == self.id {
                    return Err(JoinError::Unfit { why });
                }
            }
        }
        Ok(())
    }

    fn judge(&self, hello: &Hello) -> Option<Refusal> {
        let (rank, lane) = (hello.rank as usize, usize::from(hello.lane));
        let (ours, theirs) = (self.size(), hello.size);
        if hello.version != VERSION {
            let (ours, theirs) = (VERSION, hello.version);
            Some(Refusal::Version { ours, theirs })
        } else if hello.group != self.id {
            Some(Refusal::Group)
        } else if theirs != ours {
            Some(Refusal::Size { ours, theirs })
        } else if rank <= self.rank
            || rank >= self.addrs.len()
            || hello.to as usize != self.rank
            || lane >= LANES
        {
            Some(Refusal::Rank(Rank(hello.rank)))
        } else if self.instances[rank].is_some_and(|known| known != hello.instance) {
            Some(Refusal::Duplicate(Rank(hello.rank)))
        } else {
            None
        }
    }

    /// Goes on with all connections that this rank has to make.
    fn dial(&mut self, deadline: Deadline) -> Result<(), JoinError> {
        let mut dials = std::mem::take(&mut self.dials);
        let mut result = Ok(());
        dials.retain_mut(|dial| match self.dial_one(dial, deadline) {
            Ok(done) => !done,
            Err(error) => {
                result = Err(error);
                true
            }
        });
        self.dials = dials;
        result
    }

    /// True when the connection is made.
    fn dial_one(&mut self, dial: &mut Dial, deadline: Deadline) -> Result<bool, JoinError> {
        let now = deadline::now();
        let Some(pending) = &mut dial.pending else {
            if now >= dial.not_before {
                let wait = deadline
                    .left(now)
                    .min(DIAL_WAIT)
                    .max(Duration::from_millis(1));
                let stream = TcpStream::connect_timeout(&self.addrs[dial.peer], wait);
                dial.pending = stream.and_then(|s| self.greet(dial, s)).ok();
                dial.not_before = deadline::now() + DIAL_AGAIN;
            }
            return Ok(false);
        };
        match pending.read() {
            Ok(None) => Ok(false),
            Ok(Some(bytes)) => {
                let by = number(dial.peer);
                let Some(pending) = dial.pending.take() else {
                    return Ok(false);
                };
                match decode_reply(&bytes) {
                    Some(Reply::Welcome) => {
                        self.links[dial.lane][dial.peer] = Some(pending.stream);
                        Ok(true)
                    }
                    Some(Reply::Refused(why)) => Err(JoinError::Refused { by, why }),
                    Some(Reply::GaveUp(why)) => Err(JoinError::GaveUp { by, why }),
                    // Whoever is there is not a rank; perhaps one will come.
                    None => Ok(false),
                }
            }
            Err(Closed) => {
                dial.pending = None;
                dial.not_before = now + DIAL_AGAIN;
                Ok(false)
            }
        }
    }

    fn greet(&self, dial: &Dial, mut stream: TcpStream) -> io::Result<Pending<REPLY_BYTES>> {
        let hello = Hello {
            version: VERSION,
            lane: u8::try_from(dial.lane).expect("three lanes"),
            size: self.size(),
            rank: number(self.rank).0,
            to: number(dial.peer).0,
            group: self.id,
            instance: self.instance,
        };
        stream.set_nodelay(true)?;
        stream.write_all(&hello.encode())?;
        stream.set_nonblocking(true)?;
        Ok(Pending::new(stream))
    }

    /// Whether a member has given up meanwhile.
    fn look_at_members(&self) -> Result<(), JoinError> {
        for (rank, stream) in self.links[CONTROL].iter().enumerate() {
            let Some(stream) = stream else { continue };
            let mut bytes = [0; REPLY_BYTES];
            let by = number(rank);
            match outcome(stream.peek(&mut bytes)) {
                Ok(REPLY_BYTES) => {
                    if let Some(Reply::GaveUp(why)) = decode_reply(&bytes) {
                        return Err(JoinError::GaveUp { by, why });
                    }
                }
                Ok(_) => {}
                Err(Closed) => return Err(JoinError::Lost { rank: by }),
            }
        }
        Ok(())
    }

    /// Tells the members that there will be no group, and for a moment those who still come.
    fn give_up(&mut self, error: &JoinError, deadline: Deadline) {
        let (JoinError::Unfit { why } | JoinError::GaveUp { why, .. }) = error else {
            return;
        };
        let reply = encode_reply(Reply::GaveUp(*why), self.size());
        for mut stream in self.links[CONTROL].iter().flatten() {
            let _ = stream.write(&reply);
        }
        self.dials.clear();
        let until = Deadline::at(deadline::now() + FAREWELL).min(deadline);
        while !until.left(deadline::now()).is_zero() {
            self.accept();
            for mut stranger in std::mem::take(&mut self.strangers) {
                match stranger.read() {
                    Ok(Some(bytes)) => {
                        let hello = Hello::decode(&bytes);
                        let own = hello.and_then(|hello| self.judge(&hello));
                        let own = own.map(|why| encode_reply(Reply::Refused(why), self.size()));
                        let _ = (&stranger.stream).write(&own.unwrap_or(reply));
                    }
                    Ok(None) if stranger.plausible() => self.strangers.push_back(stranger),
                    Ok(None) | Err(Closed) => {}
                }
            }
            self.wait(until);
        }
    }

    /// Waits until all ranks have all their links.
    fn ready(&mut self, deadline: Deadline) -> Result<(), JoinError> {
        for mut stream in self.links[CONTROL].iter().flatten() {
            let _ = stream.write(&Control::Beat.encode());
        }
        let mut missing: Vec<usize> = (0..self.addrs.len()).collect();
        missing.retain(|rank| *rank != self.rank);
        loop {
            let mut lost = None;
            missing.retain(|rank| match self.is_ready(*rank) {
                Ok(ready) => !ready,
                Err(Closed) => {
                    lost = lost.or(Some(*rank));
                    true
                }
            });
            let Some(first) = missing.first() else {
                return Ok(());
            };
            self.look_at_members()?;
            if let Some(rank) = lost {
                let rank = number(rank);
                return Err(JoinError::Lost { rank });
            }
            if deadline.left(deadline::now()).is_zero() {
                return Err(JoinError::Missing {
                    rank: number(*first),
                    turned_away: self.turned_away,
                });
            }
            self.accept();
            self.hear_strangers()?;
            self.wait(deadline);
        }
    }

    /// Whether the beat of `rank` is there; it is taken off the connection.
    fn is_ready(&self, rank: usize) -> Result<bool, Closed> {
        let Some(mut stream) = self.links[CONTROL][rank].as_ref() else {
            return Err(Closed);
        };
        let mut bytes = [0; CONTROL_BYTES];
        let whole = outcome(stream.peek(&mut bytes))? == CONTROL_BYTES;
        if !whole || Control::decode(&bytes).is_none() {
            return Ok(false);
        }
        outcome(stream.read(&mut bytes)).map(|_| true)
    }

    /// Sleeps until something may have changed.
    fn wait(&self, deadline: Deadline) {
        let mut fds = vec![PollFd::new(&self.listener.socket, PollFlags::IN)];
        let dials = self.dials.iter().filter_map(|dial| dial.pending.as_ref());
        let strangers = self.strangers.iter().map(|stranger| &stranger.stream);
        let streams = strangers.chain(dials.map(|pending| &pending.stream));
        fds.extend(streams.map(|stream| PollFd::new(stream, PollFlags::IN)));
        let until = deadline::now() + LOOK_EVERY;
        poll_until(&mut fds, until.min(deadline.instant()));
    }
}

fn number(rank: usize) -> Rank {
    Rank(u32::try_from(rank).expect("checked before"))
}
