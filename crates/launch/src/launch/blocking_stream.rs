//! Blocking reads and writes on nonblocking streams.
//!
//! Nonblocking mode belongs to the open file, which all processes that have it share. An earlier
//! program of a pipeline, or the last user of the terminal, may have set it. Then "would block" is
//! neither the end of the input nor a lost reader.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};

/// A stream that waits instead of returning `WouldBlock`.
#[derive(Debug)]
pub struct BlockingStream<S>(pub S);

impl<S: AsFd> BlockingStream<S> {
    fn until(&self, ready: PollFlags) -> io::Result<()> {
        match poll(&mut [PollFd::new(&self.0, ready)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl<S: Read + AsFd> Read for BlockingStream<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.until(PollFlags::IN)?,
                done => return done,
            }
        }
    }
}

impl<S: Write + AsFd> Write for BlockingStream<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.until(PollFlags::OUT)?
                }
                done => return done,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        loop {
            match self.0.flush() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.until(PollFlags::OUT)?
                }
                done => return done,
            }
        }
    }
}
