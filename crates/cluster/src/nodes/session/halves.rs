//! The two directions of a session. Each has its own state, so that neither waits for the other.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use snow::StatelessTransportState;

use super::{Error, RECORD_BYTES, TAG_BYTES, is_nothing_yet};

/// The connection and the keys of both directions.
struct SecureLink {
    stream: TcpStream,
    ciphers: StatelessTransportState,
}

/// Encrypts and writes messages, one at a time.
pub(super) struct SendHalf {
    link: Arc<SecureLink>,
    state: Mutex<SendState>,
}

/// Reads and decrypts messages, one at a time.
pub(super) struct ReceiveHalf {
    link: Arc<SecureLink>,
    state: Mutex<ReceiveState>,
}

#[derive(Default)]
struct SendState {
    nonce: u64,
    buffer: Vec<u8>,
    broken: bool,
}

#[derive(Default)]
struct ReceiveState {
    nonce: u64,
    /// Bytes of an incomplete record.
    wire: Vec<u8>,
    /// Payload of an incomplete message.
    message: Vec<u8>,
}

/// Both directions of a connection after its handshake.
pub(super) fn halves(
    stream: TcpStream,
    ciphers: StatelessTransportState,
) -> (SendHalf, ReceiveHalf) {
    let link = Arc::new(SecureLink { stream, ciphers });
    let sending = SendHalf {
        link: Arc::clone(&link),
        state: Mutex::default(),
    };
    let receiving = ReceiveHalf {
        link,
        state: Mutex::default(),
    };
    (sending, receiving)
}

impl SendHalf {
    pub(super) fn stream(&self) -> &TcpStream {
        &self.link.stream
    }

    /// Whether no send has failed and the session is not closed.
    pub(super) fn is_open(&self) -> bool {
        !lock(&self.state).broken
    }

    /// Ends the connection; a waiting read and a waiting write return.
    pub(super) fn close(&self) {
        // A lost connection is closed already.
        let _ = self.link.stream.shutdown(Shutdown::Both);
        lock(&self.state).broken = true;
    }

    /// As [`NodeSession::send`](super::NodeSession::send).
    pub(super) fn send(&self, message: &[u8]) -> Result<(), Error> {
        let mut sending = lock(&self.state);
        if sending.broken {
            return Err(Error::Closed);
        }
        let outcome = self.seal_and_write(&mut sending, message);
        sending.broken = outcome.is_err();
        outcome
    }

    fn seal_and_write(&self, sending: &mut SendState, message: &[u8]) -> Result<(), Error> {
        let length = u32::try_from(message.len()).map_err(|_| Error::TooLong {
            bytes: message.len(),
            bytes_max: u32::MAX as usize,
        })?;
        let first = message.len().min(RECORD_BYTES - 4);
        let mut part = length.to_le_bytes().to_vec();
        part.extend_from_slice(&message[..first]);
        self.write_record(sending, &part)?;
        for part in message[first..].chunks(RECORD_BYTES) {
            self.write_record(sending, part)?;
        }
        Ok(())
    }

    fn write_record(&self, sending: &mut SendState, part: &[u8]) -> Result<(), Error> {
        let length = part.len() + TAG_BYTES;
        sending.buffer.resize(2 + length, 0);
        sending.buffer[..2].copy_from_slice(&(length as u16).to_le_bytes());
        // Fails only after 2^64 - 1 records.
        self.link
            .ciphers
            .write_message(sending.nonce, part, &mut sending.buffer[2..])
            .map_err(|_| Error::Closed)?;
        sending.nonce += 1;
        Ok((&self.link.stream).write_all(&sending.buffer)?)
    }
}

impl ReceiveHalf {
    /// As [`NodeSession::recv`](super::NodeSession::recv).
    pub(super) fn recv(
        &self,
        bytes_max: usize,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>, Error> {
        let mut receiving = lock(&self.state);
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(message) = self.complete(&mut receiving, bytes_max)? {
                return Ok(Some(message));
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) && !timeout.is_zero() {
                return Ok(None);
            }
            let wait = left.map(|left| left.max(Duration::from_millis(1)));
            self.link.stream.set_read_timeout(wait)?;
            let mut piece = [0; 16 << 10];
            match (&self.link.stream).read(&mut piece) {
                Ok(0) => return Err(Error::Closed),
                Ok(count) => receiving.wire.extend_from_slice(&piece[..count]),
                Err(error) if is_nothing_yet(&error) && timeout.is_zero() => return Ok(None),
                Err(error) if is_nothing_yet(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Decrypts the complete records; returns a message once it is complete.
    fn complete(
        &self,
        receiving: &mut ReceiveState,
        bytes_max: usize,
    ) -> Result<Option<Vec<u8>>, Error> {
        let mut used = 0;
        let found = loop {
            if let Some(message) = whole(&mut receiving.message, bytes_max)? {
                break Some(message);
            }
            let rest = &receiving.wire[used..];
            let Some((length, rest)) = rest.split_first_chunk::<2>() else {
                break None;
            };
            let length = usize::from(u16::from_le_bytes(*length));
            let Some(record) = rest.get(..length) else {
                break None;
            };
            let start = receiving.message.len();
            receiving.message.resize(start + length, 0);
            let into = &mut receiving.message[start..];
            let opened = self
                .link
                .ciphers
                .read_message(receiving.nonce, record, into);
            let count = opened.map_err(|_| Error::Stranger)?;
            receiving.message.truncate(start + count);
            receiving.nonce += 1;
            used += 2 + length;
        };
        receiving.wire.drain(..used);
        Ok(found)
    }
}

/// The message at the start of `bytes`, if it is complete. A record has parts of one message only,
/// so nothing follows it.
fn whole(bytes: &mut Vec<u8>, bytes_max: usize) -> Result<Option<Vec<u8>>, Error> {
    let Some(length) = bytes.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*length) as usize;
    if length > bytes_max {
        return Err(Error::TooLong {
            bytes: length,
            bytes_max,
        });
    }
    match (bytes.len() - 4).cmp(&length) {
        std::cmp::Ordering::Less => Ok(None),
        std::cmp::Ordering::Greater => Err(Error::Protocol),
        std::cmp::Ordering::Equal => {
            bytes.drain(..4);
            Ok(Some(std::mem::take(bytes)))
        }
    }
}
