//! Waiting for sockets, and the outcome of socket calls.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::deadline;
use crate::transport::Closed;

/// Ends a wait on sockets from another thread.
pub(crate) struct Waker {
    reads: UnixStream,
    writes: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let (reads, writes) = UnixStream::pair()?;
        reads.set_nonblocking(true)?;
        writes.set_nonblocking(true)?;
        Ok(Self { reads, writes })
    }

    /// A full stream wakes the waiter anyway.
    pub(crate) fn wake(&self) {
        let _ = (&self.writes).write(&[1]);
    }

    pub(crate) fn clear(&self) {
        let mut bytes = [0; 64];
        while (&self.reads)
            .read(&mut bytes)
            .is_ok_and(|count| count == 64)
        {}
    }

    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
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
    // Only a signal or lack of memory ends this early; the caller polls again anyway.
    let _ = poll(fds, Some(&timeout));
}

/// Result of a socket call: bytes moved, 0 if it would block, or the end.
///
/// # Errors
/// [`Closed`] if the peer has closed the connection, or for an error that a retry cannot fix.
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
