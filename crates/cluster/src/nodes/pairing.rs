//! Pairing: admits a machine by a short code, displayed on one screen and typed at another.
//!
//! The code is the password of SPAKE2 (RFC 9382, crate `spake2`). An attacker gets one attempt for
//! each run, and an [`Invitation`] has three within five minutes. The resulting shared secret is
//! the pre-shared key of a Noise handshake, `NNpsk0`. Its answer has the cluster key.
//!
//! ```text
//! newcomer -> preface (8)   SPAKE2 message (33)
//! member   <- SPAKE2 message (33)
//! newcomer -> psk, e (48)                    proves that it knows the code
//! member   <- length (u16), e, ee, cluster key
//! ```

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use snow::Builder;
use snow::resolvers::{DefaultResolver, FallbackResolver, RingResolver};
use spake2::{Ed25519Group, Identity, Password, Spake2};
use zeroize::Zeroizing;

use super::ClusterKey;

/// The first bytes of a newcomer.
pub const PREFACE: [u8; 8] = *b"PLpair1\n";

/// Validity of a code.
pub const LIFETIME: Duration = Duration::from_secs(300);

/// Wrong codes that end an invitation.
pub const TRIES: u32 = 3;

/// Digits of a code: with three attempts one in 333,333 attackers succeeds.
const DIGITS: usize = 6;

const SPAKE_BYTES: usize = 33;

/// Bytes of a newcomer's first message. It uses up a try of an invitation, a preface alone none.
pub(super) const FIRST_BYTES: usize = PREFACE.len() + SPAKE_BYTES;

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Why no machine was admitted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no code is shown, or it is older than five minutes, or was mistyped three times")]
    NotInvited,
    #[error("the code is wrong, or is no longer valid")]
    WrongCode,
    #[error("a code has six digits, such as 123-456")]
    NotACode,
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
}

/// A code of six digits.
#[derive(Clone, derive_more::Debug)]
#[debug("Code(..)")]
pub struct Code(Zeroizing<String>);

impl Code {
    /// A new one.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        let number = u64::from_le_bytes(bytes) % 10_u64.pow(DIGITS as u32);
        Ok(Self(Zeroizing::new(format!("{number:06}"))))
    }

    /// Parses a typed code; ignores anything but digits.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        let is_sane = text
            .trim()
            .chars()
            .all(|c| c.is_ascii_digit() || " -".contains(c));
        match digits.len() == DIGITS && is_sane {
            true => Ok(Self(Zeroizing::new(digits))),
            false => Err(Error::NotACode),
        }
    }

    /// The code in its form for people.
    pub fn shown(&self) -> String {
        format!("{}-{}", &self.0[..3], &self.0[3..])
    }
}

/// A code with a limited time and number of attempts.
#[derive(Debug)]
pub struct Invitation {
    code: Code,
    until: Instant,
    tries: u32,
}

impl Invitation {
    /// Starts at `now`.
    pub fn new(code: Code, now: Instant) -> Self {
        Self {
            code,
            until: now + LIFETIME,
            tries: TRIES,
        }
    }

    /// The code for one more attempt, which this call uses up.
    pub fn take(&mut self, now: Instant) -> Option<Code> {
        if !self.is_open(now) {
            return None;
        }
        self.tries -= 1;
        Some(self.code.clone())
    }

    /// Whether the code is still valid.
    pub fn is_open(&self, now: Instant) -> bool {
        now < self.until && self.tries > 0
    }

    /// The code was used: it admits no further machine.
    pub const fn end(&mut self) {
        self.tries = 0;
    }
}

/// Admits a newcomer that has sent its preface and proves that it knows `code`.
///
/// # Errors
/// [`Error::WrongCode`]; it got no information then.
pub fn host(
    mut stream: TcpStream,
    code: &Code,
    key: &ClusterKey,
    limit: Duration,
) -> Result<(), Error> {
    bound(&stream, limit)?;
    let (state, ours) = start(code);
    let mut theirs = [0; SPAKE_BYTES];
    stream.read_exact(&mut theirs)?;
    stream.write_all(&ours)?;
    let secret = finish(state, &theirs)?;
    let mut first = [0; 48];
    stream.read_exact(&mut first)?;
    let mut shaking = builder(&secret)
        .build_responder()
        .map_err(|_| Error::WrongCode)?;
    shaking
        .read_message(&first, &mut [])
        .map_err(|_| Error::WrongCode)?;
    let mut answer = [0; 128];
    let written = shaking.write_message(key.bytes(), &mut answer);
    let count = written.map_err(|_| Error::WrongCode)?;
    stream.write_all(&(count as u16).to_le_bytes())?;
    Ok(stream.write_all(&answer[..count])?)
}

/// Requests the cluster's key from the member at `addr`.
///
/// # Errors
/// [`Error::WrongCode`], or the connection's error.
pub fn guest(addr: SocketAddr, code: &Code, limit: Duration) -> Result<ClusterKey, Error> {
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    bound(&stream, limit)?;
    let (state, ours) = start(code);
    // One write: a host without an invitation closes after the preface, and a second write would
    // fail before the end of the stream is read.
    stream.write_all(&[&PREFACE[..], &ours].concat())?;
    let mut theirs = [0; SPAKE_BYTES];
    stream
        .read_exact(&mut theirs)
        .map_err(|_| Error::NotInvited)?;
    let secret = finish(state, &theirs)?;
    let mut shaking = builder(&secret)
        .build_initiator()
        .map_err(|_| Error::WrongCode)?;
    let mut first = [0; 48];
    shaking
        .write_message(&[], &mut first)
        .map_err(|_| Error::WrongCode)?;
    stream.write_all(&first)?;
    let mut length = [0; 2];
    stream
        .read_exact(&mut length)
        .map_err(|_| Error::WrongCode)?;
    let count = usize::from(u16::from_le_bytes(length));
    let mut answer = [0; 128];
    let answer = answer.get_mut(..count).ok_or(Error::WrongCode)?;
    stream.read_exact(answer)?;
    let mut key = Zeroizing::new([0; 128]);
    let read = shaking.read_message(answer, &mut *key);
    let count = read.map_err(|_| Error::WrongCode)?;
    let key = <[u8; 32]>::try_from(&key[..count]).map_err(|_| Error::WrongCode)?;
    Ok(ClusterKey::new(key))
}

fn bound(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))
}

fn start(code: &Code) -> (Spake2<Ed25519Group>, Vec<u8>) {
    let password = Password::new(code.0.as_bytes());
    Spake2::<Ed25519Group>::start_symmetric(&password, &Identity::new(b"paceline pairing"))
}

fn finish(state: Spake2<Ed25519Group>, theirs: &[u8]) -> Result<Zeroizing<[u8; 32]>, Error> {
    let shared = Zeroizing::new(state.finish(theirs).map_err(|_| Error::WrongCode)?);
    let hash = Sha256::new()
        .chain_update(b"paceline pairing psk")
        .chain_update(&*shared);
    Ok(Zeroizing::new(hash.finalize().into()))
}

fn builder(secret: &[u8; 32]) -> Builder<'_> {
    let resolver = FallbackResolver::new(Box::new(RingResolver), Box::new(DefaultResolver));
    let pattern = PATTERN.parse().expect("the pattern is well-formed");
    Builder::with_resolver(pattern, Box::new(resolver))
        .psk(0, secret)
        .expect("the pattern has one pre-shared key")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_six_digits() {
        for bad in ["", "12345", "1234567", "12345a", "123.456"] {
            assert!(Code::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(Code::parse(" 123 456\n").unwrap().shown(), "123-456");
        let code = Code::random().unwrap();
        assert_eq!(Code::parse(&code.shown()).unwrap().0, code.0);
        assert_eq!(format!("{code:?}"), "Code(..)");
    }

    #[test]
    fn an_invitation_ends_after_three_tries_or_five_minutes() {
        let start = Instant::now();
        let code = Code::parse("123456").unwrap();
        let mut invitation = Invitation::new(code.clone(), start);
        for _ in 0..TRIES {
            assert!(invitation.take(start).is_some());
        }
        assert!(invitation.take(start).is_none());
        let mut invitation = Invitation::new(code.clone(), start);
        assert!(invitation.take(start + LIFETIME).is_none());
        assert!(invitation.take(start).is_some());
        invitation.end();
        assert!(invitation.take(start).is_none());
    }
}
