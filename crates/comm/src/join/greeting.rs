//! The first bytes of an incoming connection: parsing shared by all connection types.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::config::GroupId;
use super::hello::{
    GREETING_BYTES, HELLO_BYTES, HELLO_BYTES_MIN, Hello, MAGIC, REPLY_BYTES, Reply, VERSION,
};
use super::key::GroupKey;
use super::poll::outcome;
use super::refusal::Refusal;
use super::seal::{self, NoiseHandshake, NoiseSession, SHAKE_BYTES, WrongKey};
use super::stream::PeerConnection;
use crate::deadline;
use crate::transport::Closed;

/// Most connections that may wait for their first bytes: several for each of 64 ranks.
pub(super) const STRANGERS: usize = 256;

/// How long a connection may take to send its hello.
pub(super) const STRANGER_WAIT: Duration = Duration::from_secs(2);

/// A connection whose first bytes are incomplete.
#[derive(Debug)]
pub(super) struct IncompleteGreeting {
    pub(super) stream: TcpStream,
    bytes: [u8; GREETING_BYTES],
    filled: usize,
    since: Instant,
}

impl IncompleteGreeting {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            bytes: [0; GREETING_BYTES],
            filled: 0,
            since: deadline::now(),
        }
    }

    /// Whether the first `count` bytes are there.
    fn read(&mut self, count: usize) -> Result<bool, Closed> {
        if self.filled < count {
            self.filled += outcome((&self.stream).read(&mut self.bytes[self.filled..count]))?;
        }
        Ok(self.filled >= count)
    }

    /// The hello, once complete; of another version, as much as is needed to report it.
    pub(super) fn hello(&mut self) -> Result<Option<Hello>, Closed> {
        let whole = self.read(HELLO_BYTES)?;
        let head = self.bytes.first_chunk().expect("a greeting is longer");
        let Some(hello) = Hello::decode(head) else {
            return Ok(None);
        };
        if self.filled >= HELLO_BYTES_MIN && hello.version != VERSION {
            return Ok(Some(hello));
        }
        let all = if hello.sealed {
            GREETING_BYTES
        } else {
            HELLO_BYTES
        };
        Ok((whole && self.read(all)?).then_some(hello))
    }

    /// The reply, once complete; with a handshake message, if it welcomes and `sealed`.
    pub(super) fn reply(&mut self, sealed: bool) -> Result<Option<Option<Reply>>, Closed> {
        if !self.read(REPLY_BYTES)? {
            return Ok(None);
        }
        let reply = Reply::decode(self.bytes.first_chunk().expect("a greeting is longer"));
        let all = match reply {
            Some(Reply::Welcome) if sealed => REPLY_BYTES + SHAKE_BYTES,
            _ => REPLY_BYTES,
        };
        Ok(self.read(all)?.then_some(reply))
    }

    /// The handshake message behind `head` bytes.
    pub(super) fn shake(&self, head: usize) -> &[u8; SHAKE_BYTES] {
        let bytes = self.bytes[head..].first_chunk();
        bytes.expect("a greeting has room for it")
    }

    /// Whether the connection may still become valid.
    pub(super) fn plausible(&self) -> bool {
        let head = self.filled.min(MAGIC.len());
        self.bytes[..head] == MAGIC[..head] && self.since.elapsed() < STRANGER_WAIT
    }
}

/// Sends `hello`, with the first handshake message if there is a key.
pub(super) fn greet(
    mut stream: TcpStream,
    hello: &Hello,
    key: Option<&GroupKey>,
) -> std::io::Result<(IncompleteGreeting, Option<NoiseHandshake>)> {
    let hello = hello.encode();
    let (shaking, message) = match key.map(|key| seal::begin(key, &hello)).transpose()? {
        Some((shaking, message)) => (Some(shaking), message.to_vec()),
        None => (None, Vec::new()),
    };
    stream.set_nodelay(true)?;
    stream.write_all(&[&hello[..], &message].concat())?;
    stream.set_nonblocking(true)?;
    Ok((IncompleteGreeting::new(stream), shaking))
}

/// Welcomes a connection that passed [`check`] with this reply.
pub(super) fn welcome(
    pending: IncompleteGreeting,
    answer: Option<HandshakeReply>,
) -> std::io::Result<PeerConnection> {
    let mut reply = Reply::Welcome.encode().to_vec();
    let session = answer.map(|(session, shake)| {
        reply.extend(shake);
        session
    });
    (&pending.stream).write_all(&reply)?;
    Ok(PeerConnection::new(pending.stream, session))
}

/// A session, and the acceptor's message that completes it at the dialler.
pub(super) type HandshakeReply = (NoiseSession, [u8; SHAKE_BYTES]);

/// Checks version, group and key of `hello`; returns a session if there is a key. The hello may be
/// a replay until a byte has arrived over that session.
pub(super) fn check(
    pending: &IncompleteGreeting,
    hello: &Hello,
    group: GroupId,
    key: Option<&GroupKey>,
) -> Result<Option<HandshakeReply>, Refusal> {
    if hello.version != VERSION {
        let (ours, theirs) = (VERSION, hello.version);
        return Err(Refusal::Version { ours, theirs });
    }
    if hello.group != group {
        return Err(Refusal::Group);
    }
    match (key, hello.sealed) {
        (None, false) => Ok(None),
        (Some(_), false) => Err(Refusal::NoKey),
        (None, true) => Err(Refusal::UnknownKey),
        (Some(key), true) => {
            let prologue = &pending.bytes[..HELLO_BYTES];
            let answer = seal::accept_handshake(key, prologue, pending.shake(HELLO_BYTES));
            answer.map(Some).map_err(|WrongKey| Refusal::Key)
        }
    }
}

/// Sends the refusal. Unread bytes are drained first, as the system would otherwise discard the
/// reply.
pub(super) fn refuse(mut stream: &TcpStream, reply: Reply) {
    let _ = stream.read(&mut [0; 4096]);
    let _ = stream.write(&reply.encode());
}
