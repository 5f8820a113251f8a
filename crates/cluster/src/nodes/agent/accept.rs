//! The control port: handshakes, newcomers with a code, channels to services.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, Socket, Type};

use super::super::discovery::DiscoveryMethod;
use super::super::member::Membership;
use super::super::session::{self, Hello, NodeSession, Own, PeerCheck, Purpose};
use super::super::{ClusterKey, NodeId, RegisterKey, pairing};
use super::channel::ServiceChannel;
use super::handshakes::{HandshakeSlot, Handshakes, Peer};
use super::links::NewLink;
use super::refusals::{REVOKED, of_pairing, of_session};
use super::{ClusterAct, Error, HANDSHAKE_LIMIT, Inner, facts};

/// Longest silence of a stranger before its first message, which a member sends at once.
const FIRST_LIMIT: Duration = Duration::from_secs(1);

/// Most concurrently served channels; further ones are closed.
const SERVED_MAX: usize = 256;

/// Interval at which the acceptor checks whether the agent stops.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct ConnectionCounts {
    handshakes: Handshakes,
    served: Arc<AtomicUsize>,
    pub(super) local: Arc<AtomicUsize>,
}

/// A slot of a bounded number; dropping it frees the slot.
pub(super) struct ConnectionSlot(Arc<AtomicUsize>);

impl ConnectionSlot {
    pub(super) fn take(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let place = Self(Arc::clone(count));
        // If there is no slot, dropping `place` undoes the increment.
        (count.fetch_add(1, Ordering::SeqCst) < most).then_some(place)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Listens on all addresses of both families, or of IPv4 only if there is no IPv6.
pub(super) fn listen(port: u16) -> Result<TcpListener, Error> {
    let six = listen_at(Domain::IPV6, (Ipv6Addr::UNSPECIFIED, port).into());
    let listener = six.or_else(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => Err(error),
        _ => listen_at(Domain::IPV4, (Ipv4Addr::UNSPECIFIED, port).into()),
    });
    listener.map_err(|source| Error::Port { port, source })
}

fn listen_at(domain: Domain, addr: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(false)?;
    }
    // Reuses the port despite lingering connections of an earlier process.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(128)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Waits until a socket has a connection to accept; false after [`LOOK_EVERY`].
pub(super) fn is_ready(socket: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let wait = Timespec::try_from(LOOK_EVERY).ok();
    matches!(poll(&mut fds, wait.as_ref()), Ok(1..))
}

impl Inner {
    pub(super) fn run_acceptor(self: &Arc<Self>, listener: &TcpListener) {
        while !self.is_stopped() {
            if !is_ready(listener) {
                continue;
            }
            let Ok((stream, addr)) = listener.accept() else {
                // Out of file descriptors, most likely: others need a moment to close theirs.
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            let is_node = lock(&self.state).book.is_address(addr.ip().to_canonical());
            let peer = Peer::new(addr.ip(), is_node);
            let Some(slot) = self.counts.handshakes.admit(peer, &stream) else {
                continue;
            };
            let limit = if is_node {
                HANDSHAKE_LIMIT
            } else {
                FIRST_LIMIT
            };
            let inner = Arc::clone(self);
            // Without a thread the connection is closed, and the peer tries again.
            let _ = self.spawn("shake", move || inner.answer(stream, addr, slot, limit));
        }
    }

    fn answer(
        self: &Arc<Self>,
        stream: TcpStream,
        addr: SocketAddr,
        slot: HandshakeSlot,
        limit: Duration,
    ) {
        let deadline = Instant::now() + limit;
        let Some(preface) = first_bytes(&stream, deadline) else {
            return;
        };
        if preface == pairing::PREFACE {
            if first_bytes::<{ pairing::FIRST_BYTES }>(&stream, deadline).is_some() {
                slot.spoke();
                self.pair(stream, addr);
            }
            return;
        }
        let first = first_bytes(&stream, deadline);
        // Another protocol may have a shorter first message. It is refused by name.
        if first.is_some() || session::purpose(preface).is_none() {
            self.shake(stream, addr, first, slot);
        }
    }

    fn shake(
        self: &Arc<Self>,
        stream: TcpStream,
        addr: SocketAddr,
        first: Option<[u8; session::FIRST_BYTES]>,
        slot: HandshakeSlot,
    ) {
        let era = self.key_and_era().1;
        let keys = self.keys();
        let fits = |key| first.is_some_and(|first| session::fits(&self.identity, key, &first));
        let key = keys.iter().position(fits);
        if key.is_some() {
            slot.spoke();
        }
        let key = &keys[key.unwrap_or(0)];
        let judge = |id: NodeId, hello: &Hello| {
            let refused = self.judge(id, hello);
            refused.or_else(|| self.judge_former(id, key))
        };
        let accepted = self.with_own(key, &judge, |own| {
            session::accept(own, stream, HANDSHAKE_LIMIT)
        });
        let session = match accepted {
            Ok(session) => session,
            Err(error) => {
                self.count_refusal(of_session(&error), addr);
                return self.refused(&error);
            }
        };
        // The peer's verdict may have arrived after this node's check.
        if judge(session.peer(), session.hello()).is_some() {
            return;
        }
        match session.purpose() {
            Purpose::Control => {
                let port = session.hello().port;
                let place = SocketAddr::new(addr.ip().to_canonical(), port);
                let place = scoped(place, addr);
                {
                    let mut state = lock(&self.state);
                    state
                        .book
                        .add(session.peer(), place, DiscoveryMethod::Incoming);
                    if state.key != *key {
                        // It gets the present key first, over a separate session.
                        return state.note_stale(session.peer());
                    }
                }
                let target = None;
                self.link(NewLink {
                    session,
                    target,
                    era,
                });
            }
            Purpose::Service => {
                drop(slot);
                self.serve(session, era, key);
            }
        }
    }

    fn serve(self: &Arc<Self>, session: NodeSession, era: u64, key: &ClusterKey) {
        let Some(_place) = ConnectionSlot::take(&self.counts.served, SERVED_MAX) else {
            return;
        };
        // The key may have been replaced while the peer delayed its opening message.
        let refuse = |service: &str| self.refuse_former(session.peer(), key, service);
        let answered = self.services.answer(&session, &refuse, HANDSHAKE_LIMIT);
        let Ok((service, handler)) = answered else {
            return;
        };
        let session = Arc::new(session);
        let channel = ServiceChannel { session, service };
        if lock(&self.state).era == era && self.keep_channel(&channel).is_ok() {
            handler(channel);
        }
    }

    /// Runs the pairing of a newcomer with the displayed code.
    fn pair(self: &Arc<Self>, mut stream: TcpStream, addr: SocketAddr) {
        use std::io::Read as _;
        let (code, key) = {
            let mut state = lock(&self.state);
            let invitation = state.invitation.as_mut();
            let code = invitation.and_then(|invitation| invitation.take(Instant::now()));
            (code, state.key.clone())
        };
        let Some(code) = code else {
            return self.count_refusal(of_pairing(&pairing::Error::NotInvited), addr);
        };
        // The preface was only peeked.
        if stream.read_exact(&mut [0; 8]).is_err() {
            return;
        }
        match pairing::host(stream, &code, &key, HANDSHAKE_LIMIT) {
            Ok(()) => {
                let mut state = lock(&self.state);
                state.invitation = None;
                state.record(ClusterAct::Paired(addr.ip().to_canonical()));
                drop(state);
                self.tell("the code was right: a machine joins");
            }
            Err(error) => {
                self.count_refusal(of_pairing(&error), addr);
                self.tell(&format!("a machine tried a code: {error}"));
            }
        }
    }

    pub(super) fn key_and_era(&self) -> (ClusterKey, u64) {
        let state = lock(&self.state);
        (state.key.clone(), state.era)
    }

    pub(super) fn with_own<T>(
        &self,
        key: &ClusterKey,
        judge: PeerCheck<'_>,
        work: impl FnOnce(Own<'_>) -> T,
    ) -> T {
        let mut hello = self.hello();
        if self.is_former(key) {
            // It may be no member, so it gets no name.
            hello.name = facts::shown("", self.identity.id());
            hello.build.clear();
        }
        work(Own {
            identity: &self.identity,
            key,
            hello: &hello,
            judge,
        })
    }

    /// The reason to refuse a member: revoked, a second process of one identity, or a clock that is
    /// far off.
    pub(super) fn judge(&self, id: NodeId, hello: &Hello) -> Option<String> {
        if id == self.identity.id() {
            return Some(match hello.boot == self.boot {
                true => "this is the node itself".to_owned(),
                false => twice(id),
            });
        }
        let wall_ms = self.now().wall_ms;
        if Membership::is_skewed(wall_ms, hello.wall_ms) {
            let seconds = wall_ms.abs_diff(hello.wall_ms) / 1000;
            return Some(format!(
                "the clocks of the two machines are {seconds} s apart, allowed are 60 s: \
                set both by NTP"
            ));
        }
        let state = lock(&self.state);
        if state.member.map().get(&RegisterKey::Revoked(id)).is_some() {
            return Some(REVOKED.to_owned());
        }
        let link = state.links.get(&id)?;
        let is_second = link.session.hello().boot != hello.boot && Self::is_fresh(link);
        is_second.then(|| twice(id))
    }

    fn count_refusal(&self, cause: Option<&'static str>, from: SocketAddr) {
        if let Some(cause) = cause {
            lock(&self.state)
                .refusals
                .note(cause, from.ip().to_canonical());
        }
    }

    /// Logs a refusal, once.
    pub(super) fn refused(&self, error: &session::Error) {
        let (name, reason) = match error {
            session::Error::Refused { name, reason } => (name, reason),
            session::Error::Refusing { name, reason } => (name, reason),
            _ => return,
        };
        if lock(&self.state).note(name, Some(reason.clone())) {
            self.tell(&format!("warning: no session with {name}: {reason}"));
        }
    }
}

fn twice(id: NodeId) -> String {
    format!(
        "two nodes have the identity {id}: its home was copied; remove node/identity in the home \
        of one of them and start that one again"
    )
}

/// A link-local IPv6 address needs the interface that it came over.
fn scoped(place: SocketAddr, from: SocketAddr) -> SocketAddr {
    match (place, from) {
        (SocketAddr::V6(mut place), SocketAddr::V6(from)) => {
            place.set_scope_id(from.scope_id());
            SocketAddr::V6(place)
        }
        _ => place,
    }
}

/// The first bytes of a connection, left unread; `None` if it ends before or at the deadline.
fn first_bytes<const N: usize>(stream: &TcpStream, deadline: Instant) -> Option<[u8; N]> {
    stream.set_nonblocking(false).ok()?;
    loop {
        let left = deadline.checked_duration_since(Instant::now())?;
        stream
            .set_read_timeout(Some(left.max(Duration::from_millis(1))))
            .ok()?;
        let mut bytes = [0; N];
        match stream.peek(&mut bytes) {
            Ok(count) if count == N => return Some(bytes),
            Ok(0) | Err(_) => return None,
            // The rest of a partial preface arrives at once, or never.
            Ok(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}
