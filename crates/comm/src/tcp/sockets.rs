//! Sockets as a [`Transport`]: three TCP connections for each pair of ranks, none of which blocks.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::control::{Controls, Kept};
use crate::deadline;
use crate::status::News;
use crate::transport::{Closed, Lane, Patience, Transport, Want};

/// The links of one rank.
pub(crate) struct Sockets {
    /// By lane and rank; none for the rank itself.
    lanes: [Vec<Option<TcpStream>>; 2],
    wakers: [Waker; 2],
    controls: Arc<Controls>,
    patience: Patience,
}

/// Ends a wait on sockets from another thread.
pub(super) struct Waker {
    reads: UnixStream,
    writes: UnixStream,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let (reads, writes) = UnixStream::pair()?;
        reads.set_nonblocking(true)?;
        writes.set_nonblocking(true)?;
        Ok(Self { reads, writes })
    }

    /// If the stream is full the waiter is woken anyway.
    pub(super) fn wake(&self) {
        let _ = (&self.writes).write(&[1]);
    }

    /// Forgets past wakes.
    pub(super) fn clear(&self) {
        let mut bytes = [0; 64];
        while (&self.reads)
            .read(&mut bytes)
            .is_ok_and(|count| count == 64)
        {}
    }

    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.reads, PollFlags::IN)
    }
}

/// Waits for one of `fds` or `until`. May return early.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], until: Instant) {
    let left = until.saturating_duration_since(deadline::now());
    let timeout = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    // Only a signal or a lack of memory ends this early; the caller looks again in any case.
    let _ = poll(fds, Some(&timeout));
}

/// What a socket did: bytes moved, none at the moment, or the end.
pub(crate) fn outcome(result: io::Result<usize>) -> Result<usize, Closed> {
    match result {
        Ok(0) => Err(Closed),
        Ok(count) => Ok(count),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
            _ => Err(Closed),
        },
    }
}

impl Sockets {
    pub(super) fn new(
        lanes: [Vec<Option<TcpStream>>; 2],
        controls: Arc<Controls>,
        patience: Patience,
    ) -> io::Result<Self> {
        let wakers = [Waker::new()?, Waker::new()?];
        Ok(Self {
            lanes,
            wakers,
            controls,
            patience,
        })
    }

    fn stream(&self, lane: Lane, peer: usize) -> Result<&TcpStream, Closed> {
        self.lanes[lane as usize][peer].as_ref().ok_or(Closed)
    }

    /// Says that nothing more will be sent, and reads what is there, so that closing the sockets
    /// does not make the system discard what peers have not read yet.
    fn shut_down(&self) {
        let mut bytes = [0; 4096];
        for stream in self.lanes.iter().flatten().flatten() {
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut reads = stream;
            while reads.read(&mut bytes).is_ok_and(|count| count > 0) {}
        }
    }
}

impl std::fmt::Debug for Sockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("tcp")
    }
}

impl Kept for Sockets {
    fn controls(&self) -> &Arc<Controls> {
        &self.controls
    }

    fn lost(&self, _peer: usize) {}

    fn close(&self) {
        self.shut_down();
    }
}

impl Transport for Sockets {
    fn write(&self, lane: Lane, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let mut stream = self.stream(lane, peer)?;
        outcome(match (head, body) {
            (head, []) => stream.write(head),
            ([], body) => stream.write(body),
            _ => stream.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]),
        })
    }

    fn read(&self, lane: Lane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        outcome(self.stream(lane, peer)?.read(into))
    }

    fn wait(&self, lane: Lane, wants: &[Want], until: Instant) {
        let waker = &self.wakers[lane as usize];
        let mut fds = Vec::with_capacity(wants.len() + 1);
        fds.push(waker.poll_fd());
        for want in wants {
            if let Ok(stream) = self.stream(want.lane, want.peer) {
                let flags = [(want.read, PollFlags::IN), (want.write, PollFlags::OUT)];
                let flags = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| *flag);
                fds.push(PollFd::from_borrowed_fd(stream.as_fd(), flags.collect()));
            }
        }
        poll_until(&mut fds, until);
        if !fds[0].revents().is_empty() {
            waker.clear();
        }
    }

    fn wake(&self) {
        self.wakers.iter().for_each(Waker::wake);
    }

    fn tell(&self, news: &News) {
        self.controls.tell(news);
    }

    fn nudge(&self) -> bool {
        self.controls.wake();
        true
    }

    fn now(&self) -> Instant {
        deadline::now()
    }

    fn patience(&self) -> Patience {
        self.patience
    }
}
