//! The listening sockets of a rank, and its pending connections.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, MutexGuard};

use super::greeting::{IncompleteGreeting, STRANGERS};
use super::hello::Hello;
use crate::locks::lock;

/// The listening end of a rank.
#[derive(Debug)]
pub struct Listener {
    sockets: Vec<TcpListener>,
    addrs: Vec<SocketAddr>,
    /// Accepted connections without a reply.
    waiting: Mutex<VecDeque<IncompleteGreeting>>,
}

impl Listener {
    /// Listens at `addr`; port 0 lets the system choose one.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        Self::bind_all(&[addr])
    }

    /// Listens at all of `addrs`, for a rank that is reachable over several networks.
    ///
    /// # Errors
    /// If the system refuses one of them, or there is none.
    pub fn bind_all(addrs: &[SocketAddr]) -> io::Result<Self> {
        let bind = |addr: &SocketAddr| {
            let socket = TcpListener::bind(addr)?;
            socket.set_nonblocking(true)?;
            Ok((socket.local_addr()?, socket))
        };
        let bound: Vec<_> = addrs.iter().map(bind).collect::<io::Result<_>>()?;
        let (addrs, sockets) = bound.into_iter().unzip::<_, _, Vec<_>, Vec<_>>();
        if addrs.is_empty() {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        let waiting = Mutex::default();
        Ok(Self {
            sockets,
            addrs,
            waiting,
        })
    }

    /// The bound address, with the chosen port; the first of several.
    pub fn addr(&self) -> SocketAddr {
        self.addrs[0]
    }

    /// All bound addresses.
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// The sockets, for a transport that accepts by itself.
    pub fn into_sockets(self) -> Vec<TcpListener> {
        self.sockets
    }

    pub(super) fn sockets(&self) -> &[TcpListener] {
        &self.sockets
    }

    pub(super) fn pending_connections(&self) -> PendingConnections<'_> {
        PendingConnections::new(&self.sockets, &self.waiting)
    }
}

/// Connections of a listener that no group has claimed; a new one evicts the oldest.
pub(super) struct PendingConnections<'a> {
    sockets: &'a [TcpListener],
    waiting: MutexGuard<'a, VecDeque<IncompleteGreeting>>,
}

impl<'a> PendingConnections<'a> {
    pub(super) fn new(
        sockets: &'a [TcpListener],
        waiting: &'a Mutex<VecDeque<IncompleteGreeting>>,
    ) -> Self {
        let waiting = lock(waiting);
        Self { sockets, waiting }
    }

    /// Accepts new connections, bounded per call.
    fn fill(&mut self) {
        for socket in self.sockets {
            for _ in 0..STRANGERS {
                let Ok((stream, _)) = socket.accept() else {
                    break;
                };
                let ready = stream
                    .set_nonblocking(true)
                    .and_then(|()| stream.set_nodelay(true));
                if ready.is_ok() {
                    self.waiting.push_back(IncompleteGreeting::new(stream));
                }
                if self.waiting.len() > STRANGERS {
                    self.waiting.pop_front();
                }
            }
        }
    }

    pub(super) fn take(mut self) -> impl Iterator<Item = IncompleteGreeting> + use<> {
        self.fill();
        std::mem::take(&mut *self.waiting).into_iter()
    }

    /// Offers each connection with a complete hello to `answer`, which returns false to leave it
    /// pending.
    pub(super) fn sort(mut self, answer: impl Fn(&IncompleteGreeting, &Hello) -> bool) {
        self.fill();
        for _ in 0..self.waiting.len() {
            let Some(mut pending) = self.waiting.pop_front() else {
                break;
            };
            let stays = match pending.hello() {
                Ok(Some(hello)) => !answer(&pending, &hello),
                Ok(None) => true,
                Err(_) => false,
            };
            if stays && pending.plausible() {
                self.waiting.push_back(pending);
            }
        }
    }
}
