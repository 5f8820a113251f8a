//! Sockets as a [`Transport`]: several TCP connections for each pair of ranks, none of which
//! blocks.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::control::{Controls, Kept};
use super::link::{Link, Stream};
use crate::deadline;
use crate::status::News;
use crate::transport::{Closed, Lane, Patience, Transport, Want};

/// The links of one rank.
pub(crate) struct Sockets {
    /// By lane and rank; none for the rank itself.
    lanes: [Vec<Option<Link>>; 2],
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
pub fn poll_until(fds: &mut [PollFd<'_>], until: Instant) {
    let left = until.saturating_duration_since(deadline::now());
    let timeout = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    // Only a signal or a lack of memory ends this early; the caller looks again in any case.
    let _ = poll(fds, Some(&timeout));
}

/// What a socket did: bytes moved, none at the moment, or the end.
///
/// # Errors
/// [`Closed`] where the other end is gone, or the system says what no later look can mend.
pub fn outcome(result: io::Result<usize>) -> Result<usize, Closed> {
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
        lanes: [Vec<Option<Link>>; 2],
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

    fn link(&self, lane: Lane, peer: usize) -> Result<&Link, Closed> {
        self.lanes[lane as usize][peer].as_ref().ok_or(Closed)
    }

    /// The connections of both lanes to `peer`.
    #[cfg(test)]
    pub(super) fn streams(&self, peer: usize) -> [&[Stream]; 2] {
        [0, 1].map(|lane| {
            self.lanes[lane][peer]
                .as_ref()
                .map_or(&[][..], Link::streams)
        })
    }

    fn shut_down(&self) {
        let links = self.lanes.iter().flatten().flatten();
        links.flat_map(Link::streams).for_each(Stream::shut_down);
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

    fn has_wire(&self) -> bool {
        let links = self.lanes.iter().flatten().flatten();
        links.flat_map(Link::streams).any(Stream::is_wire)
    }
}

impl Transport for Sockets {
    fn write(&self, lane: Lane, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        self.link(lane, peer)?.write(head, body)
    }

    fn read(&self, lane: Lane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let link = self.link(lane, peer)?;
        let count = link.read(into);
        if count.is_err() && link.streams().iter().any(Stream::is_garbled) {
            self.controls.suspect(peer);
        }
        count
    }

    fn wait(&self, lane: Lane, wants: &[Want], until: Instant) {
        let waker = &self.wakers[lane as usize];
        let mut fds = Vec::with_capacity(2 * wants.len() + 1);
        fds.push(waker.poll_fd());
        for want in wants {
            let Ok(link) = self.link(want.lane, want.peer) else {
                continue;
            };
            let [reads, writes] = link.next();
            if want.read && reads.is_filled() {
                return;
            }
            let both = want.read && want.write && std::ptr::eq(reads, writes);
            let flags = [
                (want.read, reads, PollFlags::IN),
                (want.write && !both, writes, PollFlags::OUT),
            ];
            for (_, stream, flag) in flags.into_iter().filter(|(wanted, ..)| *wanted) {
                let more = if both {
                    PollFlags::OUT
                } else {
                    PollFlags::empty()
                };
                fds.push(PollFd::from_borrowed_fd(stream.as_fd(), flag | more));
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
