//! The parent's end of one control channel.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Error;

/// A socket that never blocks: reads by the monitor, writes by any thread, one at a time.
#[derive(Debug)]
pub(crate) struct WorkerSocket {
    rank: Rank,
    socket: UnixStream,
    /// The reason that no further line is written: half of one may be sent, or the channel is
    /// closed.
    broken: Mutex<Option<WriteFailure>>,
}

/// The failure of a write, which all later writes return too.
#[derive(Clone, Copy, Debug)]
enum WriteFailure {
    Stuck {
        written: usize,
        bytes: usize,
        limit: Duration,
    },
    Closed,
}

impl WriteFailure {
    const fn error(self, rank: Rank) -> Error {
        match self {
            Self::Stuck {
                written,
                bytes,
                limit,
            } => Error::Stuck {
                rank,
                written,
                bytes,
                limit,
            },
            Self::Closed => Error::Closed { rank },
        }
    }
}

impl WorkerSocket {
    /// Makes a pair: this end, and the child's, which blocks.
    pub(crate) fn pair(rank: Rank) -> io::Result<(Self, UnixStream)> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let channel = Self {
            rank,
            socket,
            broken: Mutex::new(None),
        };
        Ok((channel, theirs))
    }

    /// Reads without blocking; `None` if there is nothing yet, `Some(0)` if the child is gone.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> Option<usize> {
        match read_now(&mut &self.socket, buffer) {
            Ok(count) => count,
            // A child that exited with unread messages causes a reset instead of an end.
            Err(_) => Some(0),
        }
    }

    /// Writes a line, waiting for the child to read at most `limit`.
    ///
    /// # Errors
    /// [`Error::Stuck`] and [`Error::Closed`]. Every later write fails with the same error: half a
    /// line may be sent. So a caller that ignores the first `Stuck` gets it again.
    pub(crate) fn write_line(&self, line: &[u8], limit: Duration) -> Result<(), Error> {
        let mut broken = lock(&self.broken);
        if broken.is_none() {
            *broken = self.write_all(line, limit).err();
        }
        match *broken {
            None => Ok(()),
            Some(broken) => Err(broken.error(self.rank)),
        }
    }

    fn write_all(&self, line: &[u8], limit: Duration) -> Result<(), WriteFailure> {
        let start = Instant::now();
        let mut written = 0;
        while written < line.len() {
            match (&self.socket).write(&line[written..]) {
                Ok(count) => written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = limit.saturating_sub(start.elapsed());
                    if left.is_zero() {
                        return Err(WriteFailure::Stuck {
                            written,
                            bytes: line.len(),
                            limit,
                        });
                    }
                    wait_for(&mut [PollFd::new(&self.socket, PollFlags::OUT)], Some(left));
                }
                Err(_) => return Err(WriteFailure::Closed),
            }
        }
        Ok(())
    }

    /// Closes the channel for writing, which asks the child to end. Never waits.
    pub(crate) fn close(&self) {
        // Without the lock, so that a write that waits for a stuck child fails at once.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

impl AsFd for WorkerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Reads from a non-blocking source; `None` if there is nothing yet, `Some(0)` at the end.
pub(crate) fn read_now(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match source.read(buffer) {
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// Waits until one of `fds` is ready or `timeout` is over; may return early.
pub(crate) fn wait_for(fds: &mut [PollFd<'_>], timeout: Option<Duration>) {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    // Fails if interrupted, or if the kernel has no memory; callers poll again anyway.
    let _ = poll(fds, timeout.as_ref());
}
