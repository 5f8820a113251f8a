//! The handshake of a session: Noise messages of both sides, then a verdict of each on the other.
//!
//! A deadline bounds all of it, also for a peer that sends byte by byte.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use snow::HandshakeState;

use super::super::identity::id_of;
use super::halves::halves;
use super::{
    Error, HELLO_BYTES_MAX, Hello, NodeSession, Own, Purpose, Verdict, WRITE_LIMIT,
    end_with_its_way, is_nothing_yet, read_hello, say_hello,
};

/// A connection during its handshake.
pub(super) struct HandshakeStream {
    pub(super) stream: TcpStream,
    deadline: Instant,
    limit: Duration,
}

impl HandshakeStream {
    pub(super) fn new(
        stream: TcpStream,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Self, Error> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        end_with_its_way(&stream)?;
        Ok(Self {
            stream,
            deadline,
            limit,
        })
    }

    pub(super) fn shake_as_dialler(
        mut self,
        mut state: HandshakeState,
        own: Own<'_>,
        purpose: Purpose,
    ) -> Result<NodeSession, Error> {
        self.send(&mut state, &[])?;
        let hello = self.receive(&mut state)?;
        let hello = read_hello(&hello)?;
        self.send(&mut state, &say_hello(own.hello))?;
        self.settle(state, hello, own, purpose)
    }

    pub(super) fn shake_as_acceptor(
        mut self,
        mut state: HandshakeState,
        own: Own<'_>,
        purpose: Purpose,
    ) -> Result<NodeSession, Error> {
        self.receive(&mut state)?;
        self.send(&mut state, &say_hello(own.hello))?;
        let hello = self.receive(&mut state)?;
        let hello = read_hello(&hello)?;
        self.settle(state, hello, own, purpose)
    }

    /// Exchanges verdicts.
    pub(super) fn settle(
        self,
        state: HandshakeState,
        hello: Hello,
        own: Own<'_>,
        purpose: Purpose,
    ) -> Result<NodeSession, Error> {
        let peer = id_of(state.get_remote_static().ok_or(Error::Stranger)?);
        let ciphers = state
            .into_stateless_transport_mode()
            .map_err(|_| Error::Stranger)?;
        let (sending, receiving) = halves(self.stream, ciphers);
        let session = NodeSession {
            sending,
            receiving,
            peer,
            hello,
            purpose,
        };
        let refused = (own.judge)(peer, &session.hello);
        let ours = Verdict { refused };
        let theirs = session.exchange(&ours, self.deadline, self.limit);
        let name = session.hello.name.clone();
        // A refused peer cannot hide the refusal by closing the connection.
        if let Some(reason) = ours.refused {
            return Err(Error::Refusing { name, reason });
        }
        match theirs?.refused {
            Some(reason) => Err(Error::Refused { name, reason }),
            None => Ok(session),
        }
    }

    pub(super) fn send(&mut self, state: &mut HandshakeState, payload: &[u8]) -> Result<(), Error> {
        let mut message = [0; HELLO_BYTES_MAX];
        let written = state.write_message(payload, &mut message);
        let length = written.map_err(|_| Error::Protocol)?;
        let mut bytes = (length as u16).to_le_bytes().to_vec();
        bytes.extend_from_slice(&message[..length]);
        Ok(self.stream.write_all(&bytes)?)
    }

    pub(super) fn receive(&mut self, state: &mut HandshakeState) -> Result<Vec<u8>, Error> {
        let mut length = [0; 2];
        self.read_exact(&mut length)?;
        let bytes = usize::from(u16::from_le_bytes(length));
        if bytes > HELLO_BYTES_MAX {
            return Err(Error::TooLong {
                bytes,
                bytes_max: HELLO_BYTES_MAX,
            });
        }
        let mut message = vec![0; bytes];
        self.read_exact(&mut message)?;
        let mut payload = vec![0; bytes];
        let read = state.read_message(&message, &mut payload);
        payload.truncate(read.map_err(|_| Error::Stranger)?);
        Ok(payload)
    }

    pub(super) fn read_exact(&mut self, mut into: &mut [u8]) -> Result<(), Error> {
        while !into.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Late { limit: self.limit });
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(into) {
                Ok(0) => return Err(Error::Closed),
                Ok(count) => into = &mut into[count..],
                Err(error) if is_nothing_yet(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
