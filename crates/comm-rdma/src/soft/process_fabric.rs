//! Queue pairs in other processes. Each pair is a datagram socket, named by its number, in a folder
//! that the processes share. The system buffers some datagrams for a receiver that does not poll;
//! beyond that they are lost, as on any cable.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::Duration;

/// How long a send waits for room: the receiver polls every few microseconds unless it has no core.
const ROOM: Duration = Duration::from_millis(2);

/// The folder of the sockets.
#[derive(Clone, Debug)]
pub(crate) struct ProcessFabric(pub(crate) PathBuf);

impl ProcessFabric {
    /// The socket of pair `number`; fails if another process has a pair of this number.
    pub(crate) fn inbox(&self, number: u32) -> io::Result<Inbox> {
        let path = self.path(number);
        let socket = UnixDatagram::bind(&path)?;
        socket.set_nonblocking(true)?;
        let outbox = UnixDatagram::unbound()?;
        outbox.set_write_timeout(Some(ROOM))?;
        Ok(Inbox {
            path,
            socket,
            outbox,
        })
    }

    fn path(&self, number: u32) -> PathBuf {
        self.0.join(number.to_string())
    }

    /// Sends a message to pair `to`, or loses it.
    pub(crate) fn send(&self, from: &Inbox, to: u32, bytes: &[u8]) {
        let _ = from.outbox.send_to(bytes, self.path(to));
    }
}

/// The socket of a pair, for messages from other processes.
#[derive(Debug)]
pub(crate) struct Inbox {
    path: PathBuf,
    socket: UnixDatagram,
    outbox: UnixDatagram,
}

impl Inbox {
    /// The next message, if there is one; returns its bytes in `into`.
    pub(crate) fn next(&self, into: &mut [u8]) -> Option<usize> {
        self.socket.recv(into).ok()
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
