//! Joins ranks into a group: every pair connects, exchanges hellos, and reports why a join fails.
//!
//! The higher rank of a pair dials the lower, once for each slot (`hello`). A rank with all its
//! links sends one heartbeat on each control connection. It is done when it has received one from
//! every rank. A rank that gives up sends the reason on all its connections.
//!
//! A pending connection occupies one of [`STRANGERS`] slots until its first bytes are wrong or
//! [`STRANGER_WAIT`] is over. A new connection evicts the oldest one. A member sends its hello at
//! once, so it is not the oldest for long, and it dials again after an eviction.
//!
//! With a group key, a mismatching hello of a process that proved the key ends the join at once.
//! Without proof, a hello from outside the group's addresses never ends the join. An unproven hello
//! from an address of the group ends it only after [`UNPROVEN_WAIT`], if the rank that it names is
//! still missing.

use std::collections::VecDeque;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use paceline_base::Rank;
use rustix::event::{PollFd, PollFlags};

use super::greeting::{self, HandshakeReply, IncompleteGreeting, STRANGER_WAIT, STRANGERS, refuse};
use super::hello::{Hello, REPLY_BYTES, Reply, VERSION};
use super::late_connections::Roster;
use super::origin::JoinRecord;
use super::poll::poll_until;
use super::refusal::{JoinError, Refusal};
use super::seal::NoiseHandshake;
use super::stream::PeerConnection;
use crate::transport::Closed;
use crate::wire::{CONTROL_BYTES, Control};
use crate::{Deadline, deadline};

/// Limit of one attempt to connect, and the pause before the next.
const DIAL_WAIT: Duration = Duration::from_millis(500);
const DIAL_AGAIN: Duration = Duration::from_millis(20);

/// Delay before a rank dials its own address as a check. Most groups are complete by then, and
/// behind some gateways the address leads nowhere.
const SELF_AGAIN: Duration = Duration::from_millis(300);

/// How long one address of a reachable rank may refuse, before the rank's next address is tried.
const ADDRESS_WAIT: Duration = Duration::from_secs(1);

/// Grace period for a rank that dialled with another group id. It may be about to abandon a failed
/// group and dial again.
const STRAY_WAIT: Duration = Duration::from_secs(1);

/// Grace period for a rank that dialled from an address of the group without a proof of the key.
/// Either it has another key, and should be named soon, or it is another process of that machine.
/// Ranks that are started together arrive within tens of milliseconds.
const UNPROVEN_WAIT: Duration = Duration::from_millis(500);

/// How long a rank that gives up still answers new connections.
const FAREWELL: Duration = Duration::from_millis(300);

/// Longest sleep between two polls.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// First byte of a dialler over an encrypted connection: proof that its hello is no replay.
const PROOF: [u8; 1] = [1];

/// A rejected dialler that claimed a rank that is still missing.
#[derive(Clone, Copy)]
struct RejectedDialler {
    why: Refusal,
    from: IpAddr,
    since: Instant,
}

impl RejectedDialler {
    fn new(why: Refusal, from: IpAddr) -> Self {
        let since = deadline::now();
        Self { why, from, since }
    }

    const fn patience(why: Refusal) -> Duration {
        match why {
            Refusal::Group => STRAY_WAIT,
            _ => UNPROVEN_WAIT,
        }
    }
}

/// Connections by rank; `None` for the rank itself.
pub(crate) type Streams = Vec<Option<PeerConnection>>;

/// An accepted connection that is not a member's yet.
enum PendingConnection {
    /// Its hello is incomplete.
    Greeting(IncompleteGreeting),
    /// It was welcomed, and must prove the group key by an encrypted byte.
    Proving(Box<PeerConnection>, Hello, Instant),
}

impl PendingConnection {
    fn poll_fd(&self) -> PollFd<'_> {
        match self {
            Self::Greeting(pending) => PollFd::new(&pending.stream, PollFlags::IN),
            Self::Proving(stream, ..) => PollFd::new(&**stream, PollFlags::IN),
        }
    }
}

/// An outgoing connection of this rank. One connection goes to the rank itself, to check that its
/// address leads to it.
struct OutboundConnection {
    peer: usize,
    slot: usize,
    /// Index among the peer's addresses.
    address: usize,
    pending: Option<(IncompleteGreeting, Option<NoiseHandshake>)>,
    not_before: Instant,
    /// Start of the time in which this address failed although the peer is reachable.
    failing: Option<Instant>,
}

struct GroupJoin<'a> {
    origin: &'a JoinRecord,
    rank: usize,
    roster: Roster,
    /// By slot.
    links: Vec<Streams>,
    strangers: VecDeque<PendingConnection>,
    dials: Vec<OutboundConnection>,
    turned_away: Option<Refusal>,
    /// By the rank that each claimed, the first.
    strays: Vec<Option<RejectedDialler>>,
}

/// All connections of `rank`, by slot, and the roster of processes at their other ends.
pub(crate) fn connect(
    origin: &JoinRecord,
    rank: Rank,
    deadline: Deadline,
) -> Result<(Vec<Streams>, Roster), JoinError> {
    let size = origin.addrs.len();
    if rank.0 as usize >= size || u32::try_from(size).is_err() {
        return Err(JoinError::NoSuchRank { rank, size });
    }
    if let Some(empty) = origin.addrs.iter().position(Vec::is_empty) {
        let rank = number(empty);
        return Err(JoinError::NoAddress { rank });
    }
    let listened = origin.listener.addrs().iter();
    let addrs = origin.addrs.iter().flatten().chain(listened).copied();
    if let Some(addr) = origin.config.protection.bars(addrs) {
        return Err(JoinError::Unprotected { addr });
    }
    let mut joining = GroupJoin::new(origin, rank.0 as usize);
    let result = joining
        .links(deadline)
        .and_then(|()| joining.ready(deadline));
    match result {
        Ok(()) => {
            let own = |slot: &mut Streams| slot[joining.rank] = None;
            joining.links.iter_mut().for_each(own);
            Ok((joining.links, joining.roster))
        }
        Err(error) => {
            joining.give_up(&error, deadline);
            Err(error)
        }
    }
}

impl<'a> GroupJoin<'a> {
    fn new(origin: &'a JoinRecord, rank: usize) -> Self {
        let (now, size) = (deadline::now(), origin.addrs.len());
        let slots = origin.config.slots();
        let streams = usize::from(origin.config.streams.get());
        let dial = |(peer, slot): (usize, usize)| OutboundConnection {
            peer,
            slot,
            address: slot % streams % origin.addrs[peer].len(),
            pending: None,
            not_before: if peer == rank { now + SELF_AGAIN } else { now },
            failing: None,
        };
        let pairs = (0..rank).flat_map(|peer| (0..slots).map(move |slot| (peer, slot)));
        let listened = origin.listener.addrs();
        let reached = |addr: &SocketAddr| listened.contains(addr);
        let itself = (!origin.addrs[rank].iter().all(reached)).then_some((rank, slots - 1));
        Self {
            origin,
            rank,
            roster: Roster::new(rank, size, &origin.config),
            links: (0..slots)
                .map(|_| (0..size).map(|_| None).collect())
                .collect(),
            strangers: VecDeque::new(),
            dials: pairs.chain(itself).map(dial).collect(),
            turned_away: None,
            strays: vec![None; size],
        }
    }

    fn size(&self) -> u32 {
        u32::try_from(self.origin.addrs.len()).expect("checked before")
    }

    fn links(&mut self, deadline: Deadline) -> Result<(), JoinError> {
        loop {
            self.accept();
            self.poll_pending()?;
            self.dial(deadline)?;
            let Some(missing) = self.missing() else {
                return Ok(());
            };
            self.poll_connected()?;
            self.check_rejected()?;
            if deadline.left(deadline::now()).is_zero() {
                return Err(JoinError::Missing {
                    rank: missing,
                    turned_away: self.turned_away,
                });
            }
            self.wait(deadline);
        }
    }

    fn is_linked(&self, rank: usize) -> bool {
        self.links.iter().all(|slot| slot[rank].is_some())
    }

    fn missing(&self) -> Option<Rank> {
        let mut others = (0..self.roster.instances.len()).filter(|rank| *rank != self.rank);
        others.find(|rank| !self.is_linked(*rank)).map(number)
    }

    fn control(&self) -> &Streams {
        self.links.last().expect("there is a slot for control")
    }

    /// Accepts new connections.
    fn accept(&mut self) {
        let come = self.origin.listener.pending_connections().take();
        self.strangers.extend(come.map(PendingConnection::Greeting));
        let surplus = self.strangers.len().saturating_sub(STRANGERS);
        self.strangers.drain(..surplus);
    }

    fn poll_pending(&mut self) -> Result<(), JoinError> {
        for _ in 0..self.strangers.len() {
            match self.strangers.pop_front() {
                Some(PendingConnection::Greeting(mut pending)) => match pending.hello() {
                    Ok(Some(hello)) => self.admit(pending, &hello)?,
                    Ok(None) if pending.plausible() => {
                        self.strangers
                            .push_back(PendingConnection::Greeting(pending));
                    }
                    Ok(None) | Err(Closed) => {}
                },
                Some(PendingConnection::Proving(stream, hello, since)) => {
                    self.receive_proof(stream, hello, since)?;
                }
                None => break,
            }
        }
        Ok(())
    }

    /// Checks a hello, replies, and keeps the connection of a member.
    fn admit(&mut self, pending: IncompleteGreeting, hello: &Hello) -> Result<(), JoinError> {
        let from = pending.stream.peer_addr().ok().map(|addr| addr.ip());
        match self.welcome(&pending, hello) {
            Ok(answer) => {
                let sealed = answer.is_some();
                match greeting::welcome(pending, answer) {
                    Ok(stream) if sealed => {
                        let stranger =
                            PendingConnection::Proving(Box::new(stream), *hello, deadline::now());
                        self.strangers.push_back(stranger);
                    }
                    Ok(stream) => self.take(stream, hello),
                    Err(_) => {}
                }
                Ok(())
            }
            Err(why) => {
                refuse(&pending.stream, Reply::Refused(why));
                self.offence(why, hello, from, false)
            }
        }
    }

    /// Links a pending connection whose handshake is complete.
    fn receive_proof(
        &mut self,
        stream: Box<PeerConnection>,
        hello: Hello,
        since: Instant,
    ) -> Result<(), JoinError> {
        let mut proof = [0; PROOF.len()];
        match stream.read(&mut proof) {
            Ok(0) if since.elapsed() < STRANGER_WAIT => {
                let stranger = PendingConnection::Proving(stream, hello, since);
                self.strangers.push_back(stranger);
            }
            // Checked only now that the key is proven: a replayed hello must not take the rank.
            Ok(1..) if proof == PROOF => match self.roster.judge(&hello) {
                None => self.take(*stream, &hello),
                Some(why) => {
                    let _ = stream.write(&farewell(Reply::Refused(why)), &[]);
                    return self.offence(why, &hello, stream.peer(), true);
                }
            },
            _ => {}
        }
        Ok(())
    }

    fn take(&mut self, stream: PeerConnection, hello: &Hello) {
        let peer = hello.rank as usize;
        if peer != self.rank {
            self.roster.instances[peer] = Some(hello.instance);
            self.links[usize::from(hello.slot)][peer] = Some(stream);
        }
    }

    /// Checks `hello`; returns a session if there is a group key.
    fn welcome(
        &self,
        pending: &IncompleteGreeting,
        hello: &Hello,
    ) -> Result<Option<HandshakeReply>, Refusal> {
        let origin = self.origin;
        let key = origin.config.protection.key();
        let session = greeting::check(pending, hello, origin.id, key)?;
        match self.roster.judge(hello) {
            // See `hear_proof`.
            Some(Refusal::Duplicate(_)) if session.is_some() => Ok(session),
            Some(why) => Err(why),
            None => Ok(session),
        }
    }

    /// Records a rejected dialler; fails if the group can then never be complete. `proven`: the
    /// dialler has the group key.
    fn offence(
        &mut self,
        why: Refusal,
        hello: &Hello,
        from: Option<IpAddr>,
        proven: bool,
    ) -> Result<(), JoinError> {
        self.turned_away = Some(why);
        let listed = |ip: &IpAddr| {
            let addrs = self.origin.addrs.iter().flatten();
            addrs.map(|addr| addr.ip()).any(|addr| addr == *ip)
        };
        let listed = from.filter(listed);
        if hello.group != self.origin.id {
            // A member of another group dialled the wrong address. If the rank that it claims stays
            // missing, it was that rank.
            let (rank, to) = (hello.rank as usize, hello.to as usize);
            let meant = (hello.size, to) == (self.size(), self.rank);
            if let (true, Some(from), Some(stray)) = (meant, listed, self.strays.get_mut(rank)) {
                stray.get_or_insert(RejectedDialler::new(Refusal::Group, from));
            }
            return Ok(());
        }
        let open = self.origin.config.protection.key().is_none();
        if let (Some(from), true) = (from, proven || open) {
            return Err(JoinError::Unfit { why, from });
        }
        if let (Some(from), Some(stray)) = (listed, self.strays.get_mut(hello.rank as usize)) {
            stray.get_or_insert(RejectedDialler::new(why, from));
        }
        Ok(())
    }

    /// Fails if a rank dialled with another group id, or without a proof of the key, and did not
    /// return as a member.
    fn check_rejected(&self) -> Result<(), JoinError> {
        for (rank, stray) in self.strays.iter().enumerate() {
            if let Some(RejectedDialler { why, from, since }) = *stray
                && rank != self.rank // which is here
                && !self.is_linked(rank)
                && since.elapsed() > RejectedDialler::patience(why)
            {
                return Err(JoinError::Unfit { why, from });
            }
        }
        Ok(())
    }

    /// Advances all outgoing connections.
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

    /// True when the connection is established.
    fn dial_one(
        &mut self,
        dial: &mut OutboundConnection,
        deadline: Deadline,
    ) -> Result<bool, JoinError> {
        let now = deadline::now();
        let Some((pending, shaking)) = &mut dial.pending else {
            if now >= dial.not_before {
                self.call(dial, deadline);
            }
            return Ok(false);
        };
        let by = number(dial.peer);
        match pending.reply(shaking.is_some()) {
            Ok(None) => Ok(false),
            Ok(Some(Some(Reply::Welcome))) => {
                let Some((pending, shaking)) = dial.pending.take() else {
                    return Ok(false);
                };
                Ok(self.linked(dial, pending, shaking))
            }
            Ok(Some(Some(Reply::Refused(why)))) => Err(JoinError::Refused { by, why }),
            Ok(Some(Some(Reply::GaveUp(why)))) => Err(JoinError::GaveUp { by, why }),
            // The process there is no rank, or has ended; a rank may still start at this address.
            Ok(Some(None)) | Err(Closed) => {
                dial.pending = None;
                dial.not_before = now + DIAL_AGAIN;
                Ok(false)
            }
        }
    }

    /// Dials and sends the hello.
    fn call(&self, dial: &mut OutboundConnection, deadline: Deadline) {
        let addrs = &self.origin.addrs[dial.peer];
        let wait = deadline.left(deadline::now()).min(DIAL_WAIT);
        let wait = wait.max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&addrs[dial.address], wait);
        dial.pending = stream.and_then(|stream| self.greet(dial, stream)).ok();
        let now = deadline::now();
        dial.not_before = now
            + if dial.peer == self.rank {
                SELF_AGAIN
            } else {
                DIAL_AGAIN
            };
        let reached = self.links.iter().any(|slot| slot[dial.peer].is_some());
        if dial.pending.is_none() && reached {
            let since = *dial.failing.get_or_insert(now);
            if now.saturating_duration_since(since) > ADDRESS_WAIT {
                dial.address = (dial.address + 1) % addrs.len();
                dial.failing = None;
            }
        }
    }

    /// Keeps a connection whose acceptor welcomes this rank; false if it must be dialled again.
    fn linked(
        &mut self,
        dial: &mut OutboundConnection,
        pending: IncompleteGreeting,
        shaking: Option<NoiseHandshake>,
    ) -> bool {
        let session = shaking.map(|shaking| shaking.end(pending.shake(REPLY_BYTES)));
        let Ok(session) = session.transpose() else {
            dial.not_before = deadline::now() + DIAL_AGAIN;
            return false;
        };
        let sealed = session.is_some();
        let stream = PeerConnection::new(pending.stream, session);
        if sealed && stream.write(&PROOF, &[]) != Ok(PROOF.len()) {
            dial.not_before = deadline::now() + DIAL_AGAIN;
            return false;
        }
        self.links[dial.slot][dial.peer] = Some(stream);
        true
    }

    fn greet(
        &self,
        dial: &OutboundConnection,
        stream: TcpStream,
    ) -> std::io::Result<(IncompleteGreeting, Option<NoiseHandshake>)> {
        let key = self.origin.config.protection.key();
        let hello = Hello {
            version: VERSION,
            slot: u16::try_from(dial.slot).expect("less than 2 * 255 + 1 slots"),
            size: self.size(),
            rank: number(self.rank).0,
            to: number(dial.peer).0,
            group: self.origin.id,
            instance: self.roster.instance,
            streams: self.origin.config.streams.get().into(),
            sealed: key.is_some(),
        };
        greeting::greet(stream, &hello, key)
    }

    /// Whether a member has given up meanwhile, or rejected this rank later.
    fn poll_connected(&self) -> Result<(), JoinError> {
        let mut lost = None;
        for (rank, stream) in self
            .links
            .iter()
            .rev()
            .flat_map(|slot| slot.iter().enumerate())
        {
            let Some(stream) = stream else { continue };
            let mut bytes = [0; REPLY_BYTES];
            let by = number(rank);
            match stream.peek(&mut bytes) {
                Ok(REPLY_BYTES) => match Reply::decode(&bytes) {
                    Some(Reply::GaveUp(why)) => return Err(JoinError::GaveUp { by, why }),
                    Some(Reply::Refused(why)) => return Err(JoinError::Refused { by, why }),
                    Some(Reply::Welcome) | None => {}
                },
                // The own end of the connection to itself.
                Err(Closed) if rank == self.rank => {}
                Err(Closed) => lost = lost.or(Some(by)),
                Ok(_) => {}
            }
        }
        lost.map_or(Ok(()), |rank| Err(JoinError::Lost { rank }))
    }

    /// Notifies the members that there will be no group, and for a moment also new connections.
    fn give_up(&mut self, error: &JoinError, deadline: Deadline) {
        let (JoinError::Unfit { why, .. }
        | JoinError::GaveUp { why, .. }
        | JoinError::Refused { why, .. }) = error
        else {
            return;
        };
        let reply = Reply::GaveUp(*why);
        for stream in self.links.iter().flatten().flatten() {
            let _ = stream.write(&farewell(reply), &[]);
        }
        self.call_the_uncalled(deadline); // may wait for who is not there, so after those who are
        // A peer whose welcome was not read yet counts on this rank too. An encrypted connection
        // has no session yet, and without a proof the peer does not count on it.
        for (pending, shaking) in self.dials.iter().filter_map(|dial| dial.pending.as_ref()) {
            if shaking.is_none() {
                let _ = (&pending.stream).write(&farewell(reply));
            }
        }
        if let JoinError::Refused { .. } = error {
            return;
        }
        self.dials.clear();
        let until = Deadline::at(deadline::now() + FAREWELL).min(deadline);
        while !until.left(deadline::now()).is_zero() {
            self.accept();
            for stranger in std::mem::take(&mut self.strangers) {
                self.turn_away(stranger, reply);
            }
            self.wait(until);
        }
    }

    /// Sends a hello to members not yet dialled, which would otherwise wait for this rank. They
    /// find the mismatch themselves or receive the reason.
    fn call_the_uncalled(&mut self, deadline: Deadline) {
        let until = Deadline::at(deadline::now() + FAREWELL).min(deadline);
        let control = self.origin.config.slots() - 1;
        let mut dials = std::mem::take(&mut self.dials);
        for dial in &mut dials {
            let open = dial.pending.is_none() && dial.slot == control && dial.peer != self.rank;
            if open && !until.left(deadline::now()).is_zero() {
                self.call(dial, until);
            }
        }
        self.dials = dials;
    }

    /// Rejects a late connection.
    fn turn_away(&mut self, stranger: PendingConnection, reply: Reply) {
        match stranger {
            PendingConnection::Greeting(mut pending) => match pending.hello() {
                Ok(Some(hello)) => {
                    let own = self.welcome(&pending, &hello).err();
                    refuse(&pending.stream, own.map_or(reply, Reply::Refused));
                }
                Ok(None) if pending.plausible() => {
                    self.strangers
                        .push_back(PendingConnection::Greeting(pending));
                }
                Ok(None) | Err(Closed) => {}
            },
            PendingConnection::Proving(stream, hello, _) => {
                let own = self.roster.judge(&hello).map_or(reply, Reply::Refused);
                let _ = stream.write(&farewell(own), &[]);
            }
        }
    }

    /// Waits until all ranks have all their links.
    fn ready(&mut self, deadline: Deadline) -> Result<(), JoinError> {
        for stream in self.control().iter().flatten() {
            // The connection is new, so its buffer has room.
            let _ = stream.write(&Control::Beat.encode(), &[]);
        }
        let mut missing: Vec<usize> = (0..self.roster.instances.len()).collect();
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
            self.poll_connected()?;
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
            self.poll_pending()?;
            self.dial(deadline)?;
            self.wait(deadline);
        }
    }

    /// Whether the heartbeat of `rank` has arrived; consumes it.
    fn is_ready(&self, rank: usize) -> Result<bool, Closed> {
        let Some(stream) = &self.control()[rank] else {
            return Err(Closed);
        };
        let mut bytes = [0; CONTROL_BYTES];
        let whole = stream.peek(&mut bytes)? == CONTROL_BYTES;
        if !whole || Control::decode(&bytes).is_none() {
            return Ok(false);
        }
        stream.read(&mut bytes).map(|_| true)
    }

    /// Sleeps until a socket is ready or a timer is due.
    fn wait(&self, deadline: Deadline) {
        let listening = self.origin.listener.sockets().iter();
        let mut fds: Vec<_> = listening
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        let dials = self.dials.iter().filter_map(|dial| dial.pending.as_ref());
        let dials = dials.map(|(pending, _)| PollFd::new(&pending.stream, PollFlags::IN));
        fds.extend(
            self.strangers
                .iter()
                .map(PendingConnection::poll_fd)
                .chain(dials),
        );
        let until = deadline::now() + LOOK_EVERY;
        poll_until(&mut fds, until.min(deadline.instant()));
    }
}

/// A reply padded to the length of a control frame.
fn farewell(reply: Reply) -> [u8; CONTROL_BYTES] {
    let mut bytes = [0; CONTROL_BYTES];
    bytes[..REPLY_BYTES].copy_from_slice(&reply.encode());
    bytes
}

fn number(rank: usize) -> Rank {
    Rank(u32::try_from(rank).expect("checked before"))
}
