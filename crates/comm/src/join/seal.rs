//! Authenticated encryption of connections with the group key: the Noise framework's `NNpsk0`
//! (noiseprotocol.org, revision 34), over [`snow`].
//!
//! ```text
//! dialler   -> hello, psk, e        the hello is the prologue: it is authenticated, not hidden
//! acceptor  <- reply, e, ee         every connection has its own keys, erased with it
//! dialler   -> a record             proves that the hello was no replay
//!
//! record    0  length of the rest (u16, little-endian)   2  ciphertext   last 16  tag
//! ```
//!
//! `NN`, because ranks have no identities that outlive the group: a process with the key may be any
//! rank. `psk0`, because the acceptor then detects a different key in the first message, before any
//! curve multiplication, and can report it. Nonces count records in each direction, so a lost,
//! repeated, reordered or cut record ends the connection.
//!
//! Bounds: a record has at most [`RECORD_BYTES`] of payload and at least one byte. A connection
//! holds at most a batch of outgoing records, one buffer of incoming records and the payload of
//! one. Each direction copies a byte once more than plain sockets do, in the cache.

use std::io::{self, Read, Write};
use std::sync::Mutex;

use snow::resolvers::{DefaultResolver, FallbackResolver, RingResolver};
use snow::{Builder, HandshakeState, StatelessTransportState};

use super::key::GroupKey;
use super::poll::outcome;
use crate::locks::lock;
use crate::transport::Closed;

/// Bytes of either message of the handshake: a public key and the tag of an empty payload.
pub(super) const SHAKE_BYTES: usize = 48;

/// 25519 from the default resolver; AES-GCM and SHA-256 from ring, which uses the processor's
/// instructions for them.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Most payload of a record.
const RECORD_BYTES: usize = 32 << 10;

const TAG_BYTES: usize = 16;
const LENGTH_BYTES: usize = 2;

/// A record with the most payload, on the wire.
const WIRE_BYTES: usize = LENGTH_BYTES + RECORD_BYTES + TAG_BYTES;

/// Records that are sealed before one system call sends them together.
const BATCH: usize = 2;

/// The key differs, or the bytes are no handshake message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrongKey;

/// A handshake whose first message was sent.
pub(super) struct NoiseHandshake(HandshakeState);

fn builder<'a>(key: &'a GroupKey, prologue: &'a [u8]) -> Builder<'a> {
    let resolver = FallbackResolver::new(Box::new(RingResolver), Box::new(DefaultResolver));
    let pattern = PATTERN.parse().expect("the pattern is well-formed");
    Builder::with_resolver(pattern, Box::new(resolver))
        .psk(0, key.bytes())
        .and_then(|builder| builder.prologue(prologue))
        .expect("the pattern has one pre-shared key and one prologue")
}

/// The dialler's first message.
pub(super) fn begin(
    key: &GroupKey,
    prologue: &[u8],
) -> io::Result<(NoiseHandshake, [u8; SHAKE_BYTES])> {
    let mut message = [0; SHAKE_BYTES];
    let mut state = builder(key, prologue)
        .build_initiator()
        .map_err(io::Error::other)?;
    state
        .write_message(&[], &mut message)
        .map_err(io::Error::other)?;
    Ok((NoiseHandshake(state), message))
}

/// The acceptor's reply to a first message, and the session.
pub(super) fn accept_handshake(
    key: &GroupKey,
    prologue: &[u8],
    message: &[u8; SHAKE_BYTES],
) -> Result<(NoiseSession, [u8; SHAKE_BYTES]), WrongKey> {
    let state = builder(key, prologue).build_responder();
    let mut state = state.map_err(|_| WrongKey)?;
    let mut reply = [0; SHAKE_BYTES];
    state.read_message(message, &mut []).map_err(|_| WrongKey)?;
    state.write_message(&[], &mut reply).map_err(|_| WrongKey)?;
    NoiseSession::new(state).map(|session| (session, reply))
}

impl NoiseHandshake {
    /// The session, from the acceptor's reply.
    pub(super) fn end(mut self, reply: &[u8; SHAKE_BYTES]) -> Result<NoiseSession, WrongKey> {
        self.0.read_message(reply, &mut []).map_err(|_| WrongKey)?;
        NoiseSession::new(self.0)
    }
}

/// The keys and buffers of one connection.
pub(super) struct NoiseSession {
    ciphers: StatelessTransportState,
    outgoing: Mutex<SealedRecords>,
    incoming: Mutex<OpenedRecords>,
}

/// Sealed records that the system has not accepted yet.
struct SealedRecords {
    nonce: u64,
    bytes: Vec<u8>,
    end: usize,
    gone: usize,
    payload: usize,
    /// Scratch buffer that joins a head and the beginning of its body.
    stage: Vec<u8>,
}

/// Bytes that were received and not consumed yet.
struct OpenedRecords {
    nonce: u64,
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    plain: Vec<u8>,
    plain_start: usize,
    plain_end: usize,
    garbled: bool,
}

impl NoiseSession {
    fn new(state: HandshakeState) -> Result<Self, WrongKey> {
        let ciphers = state
            .into_stateless_transport_mode()
            .map_err(|_| WrongKey)?;
        Ok(Self {
            ciphers,
            outgoing: Mutex::new(SealedRecords::new()),
            incoming: Mutex::new(OpenedRecords::new()),
        })
    }

    /// Seals and writes as much of `head` followed by `body` as fits. Returns how many of these
    /// bytes the system accepted. The caller must offer the rest again before other bytes: some of
    /// it may be sealed already.
    pub(super) fn write(
        &self,
        sink: &mut impl Write,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        let mut outgoing = lock(&self.outgoing);
        let (total, mut taken) = (head.len() + body.len(), 0);
        loop {
            while outgoing.gone < outgoing.end {
                let left = &outgoing.bytes[outgoing.gone..outgoing.end];
                match outcome(sink.write(left))? {
                    0 => return Ok(taken),
                    count => outgoing.gone += count,
                }
            }
            taken = (taken + std::mem::take(&mut outgoing.payload)).min(total);
            if taken == total {
                return Ok(taken);
            }
            let (head, body) = rest(head, body, taken);
            outgoing.seal(&self.ciphers, head, body)?;
        }
    }

    /// Reads available bytes; 0 if there are none.
    pub(super) fn read(&self, source: &mut impl Read, into: &mut [u8]) -> Result<usize, Closed> {
        lock(&self.incoming).read(&self.ciphers, source, into)
    }

    /// Like `read`, but the bytes stay; looks into at most one record.
    pub(super) fn peek(&self, source: &mut impl Read, into: &mut [u8]) -> Result<usize, Closed> {
        lock(&self.incoming).peek(&self.ciphers, source, into)
    }

    /// Whether a read would return bytes without a system call.
    pub(super) fn is_filled(&self) -> bool {
        let incoming = lock(&self.incoming);
        incoming.garbled
            || incoming.plain_start < incoming.plain_end
            || !matches!(incoming.record(), Ok(None))
    }

    /// Whether the peer sent bytes that are no record of this session.
    pub(super) fn is_garbled(&self) -> bool {
        lock(&self.incoming).garbled
    }
}

/// `head` followed by `body`, without the first `taken` bytes.
pub(crate) fn rest<'a>(head: &'a [u8], body: &'a [u8], taken: usize) -> (&'a [u8], &'a [u8]) {
    let of_body = taken.saturating_sub(head.len());
    (&head[taken.min(head.len())..], &body[of_body..])
}

impl SealedRecords {
    const fn new() -> Self {
        Self {
            nonce: 0,
            bytes: Vec::new(),
            end: 0,
            gone: 0,
            payload: 0,
            stage: Vec::new(),
        }
    }

    /// Fills the empty buffer with records of the first available bytes.
    fn seal(
        &mut self,
        ciphers: &StatelessTransportState,
        head: &[u8],
        mut body: &[u8],
    ) -> Result<(), Closed> {
        (self.end, self.gone, self.payload) = (0, 0, 0);
        if !head.is_empty() {
            let mut stage = std::mem::take(&mut self.stage);
            stage.clear();
            let of_head = head.len().min(RECORD_BYTES);
            let of_body = body.len().min(RECORD_BYTES - of_head);
            stage.extend_from_slice(&head[..of_head]);
            stage.extend_from_slice(&body[..of_body]);
            self.record(ciphers, &stage)?;
            self.stage = stage;
            // The rest of such a long head would come first; no head is that long.
            body = if of_head < head.len() {
                &[]
            } else {
                &body[of_body..]
            };
        }
        for part in body.chunks(RECORD_BYTES) {
            if self.payload + part.len() > BATCH * RECORD_BYTES {
                break;
            }
            self.record(ciphers, part)?;
        }
        Ok(())
    }

    fn record(&mut self, ciphers: &StatelessTransportState, part: &[u8]) -> Result<(), Closed> {
        let start = self.end + LENGTH_BYTES;
        let end = start + part.len() + TAG_BYTES;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        let length = u16::try_from(end - start).expect("a record is shorter than 64 KiB");
        self.bytes[self.end..start].copy_from_slice(&length.to_le_bytes());
        // Fails only after 2^64 - 1 records.
        ciphers
            .write_message(self.nonce, part, &mut self.bytes[start..end])
            .map_err(|_| Closed)?;
        self.nonce += 1;
        self.payload += part.len();
        self.end = end;
        Ok(())
    }
}

/// Bytes that are no valid record.
struct Garbled;

impl OpenedRecords {
    const fn new() -> Self {
        Self {
            nonce: 0,
            bytes: Vec::new(),
            start: 0,
            end: 0,
            plain: Vec::new(),
            plain_start: 0,
            plain_end: 0,
            garbled: false,
        }
    }

    /// Range of the next record's ciphertext, if it is complete.
    fn record(&self) -> Result<Option<std::ops::Range<usize>>, Garbled> {
        let there = &self.bytes[self.start..self.end];
        let Some(length) = there.first_chunk() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_le_bytes(*length));
        if !(TAG_BYTES + 1..=TAG_BYTES + RECORD_BYTES).contains(&length) {
            return Err(Garbled);
        }
        let start = self.start + LENGTH_BYTES;
        Ok((start + length <= self.end).then_some(start..start + length))
    }

    fn read(
        &mut self,
        ciphers: &StatelessTransportState,
        source: &mut impl Read,
        into: &mut [u8],
    ) -> Result<usize, Closed> {
        let mut count = 0;
        while count < into.len() {
            let held = self.plain_end - self.plain_start;
            if held > 0 {
                let part = held.min(into.len() - count);
                let from = &self.plain[self.plain_start..self.plain_start + part];
                into[count..count + part].copy_from_slice(from);
                self.plain_start += part;
                count += part;
            } else {
                match self.open(ciphers, &mut into[count..]) {
                    Ok(Some(opened)) => count += opened,
                    Ok(None) if count > 0 || self.fill(source)? == 0 => break,
                    Ok(None) => {}
                    // Earlier bytes are returned first.
                    Err(Closed) if count > 0 => break,
                    Err(Closed) => return Err(Closed),
                }
            }
        }
        Ok(count)
    }

    fn peek(
        &mut self,
        ciphers: &StatelessTransportState,
        source: &mut impl Read,
        into: &mut [u8],
    ) -> Result<usize, Closed> {
        while self.plain_start == self.plain_end {
            if self.open(ciphers, &mut [])?.is_none() && self.fill(source)? == 0 {
                return Ok(0);
            }
        }
        let there = &self.plain[self.plain_start..self.plain_end];
        let count = there.len().min(into.len());
        into[..count].copy_from_slice(&there[..count]);
        Ok(count)
    }

    /// Opens the next record if it is complete: into `into` if that has room for the tag too, else
    /// into the own buffer. Returns the number of bytes written to `into`.
    fn open(
        &mut self,
        ciphers: &StatelessTransportState,
        into: &mut [u8],
    ) -> Result<Option<usize>, Closed> {
        if self.garbled {
            return Err(Closed);
        }
        let record = self.record().map_err(|Garbled| self.fail())?;
        let Some(record) = record else {
            return Ok(None);
        };
        let (sealed, next) = (&self.bytes[record.clone()], record.end);
        let direct = into.len() >= sealed.len();
        let opened = if direct {
            ciphers.read_message(self.nonce, sealed, into)
        } else {
            self.plain.resize(RECORD_BYTES + TAG_BYTES, 0);
            ciphers.read_message(self.nonce, sealed, &mut self.plain)
        };
        let count = opened.map_err(|_| self.fail())?;
        self.nonce += 1;
        self.start = next;
        if !direct {
            (self.plain_start, self.plain_end) = (0, count);
        }
        Ok(Some(if direct { count } else { 0 }))
    }

    fn fail(&mut self) -> Closed {
        self.garbled = true;
        Closed
    }

    /// Reads available bytes that fit; there is room, since no whole record is buffered.
    fn fill(&mut self, source: &mut impl Read) -> Result<usize, Closed> {
        if self.bytes.is_empty() {
            self.bytes.resize(BATCH * WIRE_BYTES, 0);
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.start < WIRE_BYTES {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let count = outcome(source.read(&mut self.bytes[self.end..]))?;
        self.end += count;
        Ok(count)
    }
}

/// Makes both ends of a session with a public key.
pub(crate) fn pair(prologue: &[u8]) -> (NoiseSession, NoiseSession) {
    let key = GroupKey::new([7; super::key::KEY_BYTES]);
    let (shaking, message) = begin(&key, prologue).expect("the system has random numbers");
    let (acceptor, reply) = accept_handshake(&key, prologue, &message).expect("the same key");
    let dialler = shaking.end(&reply).expect("the same key");
    (dialler, acceptor)
}

/// For fuzzing: reads `bytes` as handshake messages, as records, and as a script that alters valid
/// records. The payload read is always a prefix of the payload written.
pub(crate) fn parse(bytes: &[u8]) {
    let key = GroupKey::new([7; super::key::KEY_BYTES]);
    if let Some(message) = bytes.first_chunk() {
        assert!(
            accept_handshake(&key, b"", message).is_err(),
            "a forged first message"
        );
        let begun = begin(&key, b"").expect("the system has random numbers");
        assert!(begun.0.end(message).is_err(), "a forged answer");
    }
    let (dialler, acceptor) = pair(b"fuzz");
    let mut into = [0; 100];
    let mut forged = bytes;
    let forgery = acceptor.read(&mut forged, &mut into);
    assert!(matches!(forgery, Err(Closed) | Ok(0)), "a forged record");

    let (from, to) = pair(b"fuzz");
    let (mut wire, mut sent, mut got) = (Vec::new(), Vec::new(), Vec::new());
    for part in bytes.chunks(37) {
        let count = from.write(&mut wire, &part[..part.len() / 3], &part[part.len() / 3..]);
        assert_eq!(count, Ok(part.len()));
        sent.extend_from_slice(part);
    }
    let flip = bytes
        .iter()
        .take(4)
        .fold(0, |at, byte| at << 8 | usize::from(*byte));
    if bytes.len().is_multiple_of(2) && !wire.is_empty() {
        let at = flip % wire.len();
        wire[at] ^= bytes[0] | 1;
    }
    let mut wire = &wire[..];
    while let Ok(1..) = to
        .read(&mut wire, &mut into[..1 + bytes.len() % 99])
        .inspect(|count| {
            got.extend_from_slice(&into[..*count]);
        })
    {}
    assert!(sent.starts_with(&got), "altered bytes were delivered");
    drop(dialler);
}

#[cfg(test)]
mod tests;
