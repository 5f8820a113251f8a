//! Encrypted, authenticated messages between two nodes over TCP: the Noise framework's
//! `XXpsk0` (noiseprotocol.org, revision 34), over [`snow`].
//!
//! ```text
//! dialler   -> preface (8 bytes), psk, e       the preface is the prologue: authenticated
//! acceptor  <- e, ee, s, es, its hello
//! dialler   -> s, se, its hello
//! both      -> verdict                         only members get a reason for a refusal
//!
//! handshake message   length (u16, little-endian), bytes
//! record              length (u16, little-endian), ciphertext, tag (16)
//! message             its length (u32, little-endian) and bytes, split into records
//! ```
//!
//! The handshake uses `psk0` and not `psk3`. With the key in the first message, the acceptor sends
//! nothing at all to a dialler without the key. With `psk3` it would first send its static key. The
//! proofs of `psk3` hold as well, since every later key depends on the first.
//!
//! A replayed first message gets an answer that only the original sender can read. Nonces count
//! records, so a lost, repeated, reordered or truncated one ends the session.
//!
//! Bounds: a handshake message has at most [`HELLO_BYTES_MAX`] and the whole handshake a deadline.
//! The reader limits the length of a message, and memory grows as its bytes arrive.

mod halves;
mod handshake;

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use snow::Builder;
use snow::resolvers::{DefaultResolver, FallbackResolver, RingResolver};

use super::{ClusterKey, Identity, NodeId};
use halves::{ReceiveHalf, SendHalf};
use handshake::HandshakeStream;

const PATTERN: &str = "Noise_XXpsk0_25519_AESGCM_SHA256";

/// Longest message of a handshake: keys, tags and a hello.
pub const HELLO_BYTES_MAX: usize = 4096;

/// The first bytes of a connection; the last digit is the protocol's version.
const MAGIC: [u8; 7] = *b"PLnode2";

/// Most payload of a record.
const RECORD_BYTES: usize = 32 << 10;

const TAG_BYTES: usize = 16;

const VERDICT_BYTES_MAX: usize = 1024;

/// Longest wait of a write for a peer that does not read.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// Silence of a session before the first TCP keepalive probe. Each of the [`PROBES`] waits for
/// [`PROBE_EVERY`]. Only keepalives detect a pulled cable while other cables lead to the peer.
const PROBE_AFTER: Duration = Duration::from_secs(2);

/// See [`PROBE_AFTER`].
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// Unanswered probes that end a session: three, so that two lost packets do not.
const PROBES: u32 = 3;

/// The purpose of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Purpose {
    /// Membership, one between each two nodes.
    Control = b'c',
    /// A channel to a service of the other node; its first message names the service.
    Service = b's',
}

impl Purpose {
    const ALL: [Self; 2] = [Self::Control, Self::Service];

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|purpose| *purpose as u8 == byte)
    }
}

/// A node's description of itself when a session begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Its host's name.
    pub name: String,
    /// Random number of its process, which distinguishes two processes of one identity.
    pub boot: u64,
    pub port: u16,
    /// Milliseconds since 1970 by its clock.
    pub wall_ms: u64,
    /// Version of the program.
    pub build: String,
    /// Revision of the numerics, which determines bits besides the kernel class. Nodes with
    /// different revisions do not compute together.
    pub numerics: u32,
}

/// Why a session was not established, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot connect to {addr}: {source}")]
    Connect { addr: SocketAddr, source: io::Error },
    #[error("the connection broke: {0}")]
    Broken(#[source] io::Error),
    #[error("the other side closed the connection")]
    Closed,
    /// The peer has another cluster key, or is no node at all.
    #[error("the other side is not in this cluster")]
    Stranger,
    #[error("the other side speaks another protocol than this version of paceline")]
    Protocol,
    #[error("no answer within {limit:?}")]
    Late {
        /// The time waited.
        limit: Duration,
    },
    /// The peer is a member and refuses this session.
    #[error("refused by {name}: {reason}")]
    Refused { name: String, reason: String },
    #[error("refused {name}: {reason}")]
    Refusing { name: String, reason: String },
    #[error("a message of {bytes} bytes, allowed are {bytes_max}")]
    TooLong { bytes: usize, bytes_max: usize },
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Broken(error),
        }
    }
}

/// Checks a peer; returns the reason of a refusal, if it is refused.
pub type PeerCheck<'a> = &'a dyn Fn(NodeId, &Hello) -> Option<String>;

/// The identity, key and rules of this side.
#[derive(Clone, Copy)]
pub struct Own<'a> {
    pub identity: &'a Identity,
    pub key: &'a ClusterKey,
    /// Its description of itself.
    pub hello: &'a Hello,
    /// The check that admits or refuses peers.
    pub judge: PeerCheck<'a>,
}

impl std::fmt::Debug for Own<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.identity.fmt(f)
    }
}

/// Messages to and from one other node. All methods may be called from any thread; one message
/// is written and one read at a time.
#[derive(derive_more::Debug)]
#[debug("session with {} ({})", self.hello.name, self.peer)]
pub struct NodeSession {
    sending: SendHalf,
    receiving: ReceiveHalf,
    peer: NodeId,
    hello: Hello,
    purpose: Purpose,
}

#[derive(Serialize, Deserialize)]
struct Verdict {
    refused: Option<String>,
}

/// Bytes of a dialler's preface and first message: its length, an ephemeral key and a tag.
pub(super) const FIRST_BYTES: usize = 8 + 2 + 32 + TAG_BYTES;

fn builder<'a>(identity: &'a Identity, key: &'a ClusterKey, prologue: &'a [u8]) -> Builder<'a> {
    let resolver = FallbackResolver::new(Box::new(RingResolver), Box::new(DefaultResolver));
    let pattern = PATTERN.parse().expect("the pattern is well-formed");
    Builder::with_resolver(pattern, Box::new(resolver))
        .psk(0, key.bytes())
        .and_then(|builder| builder.local_private_key(identity.private()))
        .and_then(|builder| builder.prologue(prologue))
        .expect("the pattern has one pre-shared key, static keys and one prologue")
}

/// Connects to a node; all of it takes no longer than `limit`.
///
/// # Errors
/// The peer is unreachable, has another key, or refuses the session.
pub fn dial(
    own: Own<'_>,
    addr: SocketAddr,
    purpose: Purpose,
    limit: Duration,
) -> Result<NodeSession, Error> {
    let deadline = Instant::now() + limit;
    let stream = TcpStream::connect_timeout(&addr, limit)
        .map_err(|source| Error::Connect { addr, source })?;
    let mut wire = HandshakeStream::new(stream, deadline, limit)?;
    let preface = preface(purpose);
    wire.stream.write_all(&preface)?;
    let shaking = builder(own.identity, own.key, &preface)
        .build_initiator()
        .map_err(|_| Error::Stranger)?;
    wire.shake_as_dialler(shaking, own, purpose)
}

/// Answers an incoming connection; all of it takes no longer than `limit`.
///
/// # Errors
/// As [`dial`]. A stranger got no information.
pub fn accept(own: Own<'_>, stream: TcpStream, limit: Duration) -> Result<NodeSession, Error> {
    let mut wire = HandshakeStream::new(stream, Instant::now() + limit, limit)?;
    let mut preface = [0; 8];
    wire.read_exact(&mut preface)?;
    let purpose = purpose(preface).ok_or(Error::Protocol)?;
    let shaking = builder(own.identity, own.key, &preface)
        .build_responder()
        .map_err(|_| Error::Stranger)?;
    wire.shake_as_acceptor(shaking, own, purpose)
}

/// The purpose of a connection by its preface; `None` of another protocol.
pub(super) fn purpose(preface: [u8; 8]) -> Option<Purpose> {
    let rest = preface.strip_prefix(&MAGIC)?;
    Purpose::of(rest[0])
}

/// Whether the first bytes of a connection were made with this key.
pub(super) fn fits(identity: &Identity, key: &ClusterKey, first: &[u8; FIRST_BYTES]) -> bool {
    let (preface, message) = first.split_at(8);
    let (length, message) = message.split_at(2);
    if length != (message.len() as u16).to_le_bytes() {
        return false;
    }
    let shaking = builder(identity, key, preface).build_responder();
    let mut payload = [0; FIRST_BYTES];
    shaking.is_ok_and(|mut state| state.read_message(message, &mut payload).is_ok())
}

fn preface(purpose: Purpose) -> [u8; 8] {
    std::array::from_fn(|i| *MAGIC.get(i).unwrap_or(&(purpose as u8)))
}

/// Makes the system end a connection whose network path is lost, within five seconds. A busy or
/// stopped peer stays while its system accepts data. On Linux a connection whose peer has read
/// nothing for five seconds, with a full buffer, is ended too, as by [`WRITE_LIMIT`] elsewhere.
fn end_with_its_way(stream: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new().with_time(PROBE_AFTER);
    let keepalive = keepalive.with_interval(PROBE_EVERY).with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    // Unacknowledged bytes delay keepalives, so they get the same time limit. Other systems allow
    // more.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(PROBE_AFTER + PROBE_EVERY * PROBES))?;
    Ok(())
}

fn is_nothing_yet(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

fn say_hello(hello: &Hello) -> Vec<u8> {
    serde_json::to_vec(hello).expect("a hello is JSON")
}

/// Parses `bytes` as the start of a session, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = read_hello(bytes);
    let _ = serde_json::from_slice::<Verdict>(bytes);
}

fn read_hello(bytes: &[u8]) -> Result<Hello, Error> {
    serde_json::from_slice(bytes).map_err(|_| Error::Protocol)
}

impl NodeSession {
    /// Sends this side's verdict; returns the other side's.
    fn exchange(
        &self,
        ours: &Verdict,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Verdict, Error> {
        self.send(&serde_json::to_vec(ours).expect("a verdict is JSON"))?;
        let left = deadline.saturating_duration_since(Instant::now());
        let theirs = self.recv(VERDICT_BYTES_MAX, left)?;
        let theirs = theirs.ok_or(Error::Late { limit })?;
        serde_json::from_slice(&theirs).map_err(|_| Error::Protocol)
    }

    /// The node at the other end: the owner of a static key, proven.
    pub const fn peer(&self) -> NodeId {
        self.peer
    }

    /// The other end's description of itself.
    pub const fn hello(&self) -> &Hello {
        &self.hello
    }

    pub const fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// The other end's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.sending.stream().peer_addr()
    }

    /// This end's address.
    pub fn own_addr(&self) -> io::Result<SocketAddr> {
        self.sending.stream().local_addr()
    }

    /// Largest segment payload in bytes, without headers and options; `None` if the system does not
    /// report it.
    pub fn segment_bytes(&self) -> Option<u32> {
        socket2::SockRef::from(self.sending.stream()).tcp_mss().ok()
    }

    /// Sends a message; waits at most a few seconds for a peer that does not read.
    pub fn send(&self, message: &[u8]) -> Result<(), Error> {
        self.sending.send(message)
    }

    /// The next message, of at most `bytes_max`; `None` if it is not complete within `timeout`. The
    /// next call continues it.
    pub fn recv(&self, bytes_max: usize, timeout: Duration) -> Result<Option<Vec<u8>>, Error> {
        self.receiving.recv(bytes_max, timeout)
    }

    /// Whether no send has failed yet.
    pub fn is_open(&self) -> bool {
        self.sending.is_open()
    }

    /// Ends the session for both sides; a waiting read returns.
    pub fn close(&self) {
        self.sending.close();
    }
}

impl Drop for NodeSession {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests;
