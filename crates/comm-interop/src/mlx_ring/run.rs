//! Runs the streams of a call: one thread moves all of their bytes over nonblocking sockets.
//!
//! A stream forwards what it received, so its received bytes bound its sendable bytes. Streams need
//! no other synchronisation, and the sizes of system calls have no effect.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags};

use super::plan::{RingStream, SendDirection};
use paceline_comm::provider::{
    Closed, OperandSide, Pause, SpinPolicy, fold, now, outcome, poll_until,
};
use paceline_comm::{Deadline, Dtype, Reduce};

/// Bytes of one read or write, so that the streams of a call take turns. Half of an L2 of 512 KiB.
const TURN_BYTES: usize = 256 << 10;

/// As for `tcp`, with less yielding: MLX's ranks spin, and need the core.
const PATIENCE: SpinPolicy = SpinPolicy {
    spins: 4,
    yields: 50,
};

/// The peer closed its sending side. Linux reports that separately from data.
#[cfg(target_os = "linux")]
const HANGUP: PollFlags = PollFlags::RDHUP;
#[cfg(not(target_os = "linux"))]
const HANGUP: PollFlags = PollFlags::HUP;

/// The sockets to both neighbours, by connection.
#[derive(Debug)]
pub(super) struct NeighbourSockets {
    pub(super) right: Vec<TcpStream>,
    pub(super) left: Vec<TcpStream>,
}

/// A neighbour, relative to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Neighbour {
    Right,
    Left,
}

/// Why a call stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamFailure {
    /// This neighbour has ended and owes bytes, or cannot receive those it needs.
    Gone(Neighbour),
    /// The deadline passed while waiting for this neighbour.
    Late(Neighbour),
}

impl SendDirection {
    const fn to(self) -> Neighbour {
        match self {
            Self::Right => Neighbour::Right,
            Self::Left => Neighbour::Left,
        }
    }

    const fn from(self) -> Neighbour {
        match self {
            Self::Right => Neighbour::Left,
            Self::Left => Neighbour::Right,
        }
    }
}

impl NeighbourSockets {
    fn socket(&self, neighbour: Neighbour, connection: usize) -> &TcpStream {
        match neighbour {
            Neighbour::Right => &self.right[connection],
            Neighbour::Left => &self.left[connection],
        }
    }

    fn all(&self) -> impl Iterator<Item = &TcpStream> {
        self.right.iter().chain(&self.left)
    }

    /// The neighbour that ended first; `noticed` is the one whose end was just noticed.
    ///
    /// A rank that loses one neighbour keeps the other connection open for a while. So if both have
    /// ended when a waiting rank notices one, the other ended earlier.
    pub(super) fn first_gone(&self, noticed: Neighbour) -> Neighbour {
        let (other, sockets) = match noticed {
            Neighbour::Right => (Neighbour::Left, &self.left),
            Neighbour::Left => (Neighbour::Right, &self.right),
        };
        match sockets.iter().any(is_closed) {
            true => other,
            false => noticed,
        }
    }

    /// Closes all connections at once, which the neighbours notice.
    pub(super) fn cut(&self) {
        for socket in self.all() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Half-closes the connections and drains the receive buffers, so that closing the sockets does
    /// not discard bytes that the neighbours have not read.
    pub(super) fn leave(&self) {
        let mut bytes = [0; 4096];
        for socket in self.all() {
            let _ = socket.shutdown(Shutdown::Write);
            let mut reads = socket;
            while reads.read(&mut bytes).is_ok_and(|count| count > 0) {}
        }
    }
}

/// Whether the peer has closed the connection and all its bytes were read.
pub(super) fn is_closed(socket: &TcpStream) -> bool {
    match socket.peek(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// Whether the peer will send no more; unread bytes may remain.
pub(super) fn has_ended(socket: &TcpStream) -> bool {
    let ends = HANGUP | PollFlags::HUP | PollFlags::ERR;
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), HANGUP)];
    poll_until(&mut fds, now());
    fds[0].revents().intersects(ends)
}

struct StreamProgress<'a> {
    course: &'a RingStream,
    /// Bytes to send in total, and sent.
    sends: usize,
    sent: usize,
    /// Index of the current receive range, and its whole bytes that are done.
    take: usize,
    within: usize,
    /// Bytes received in total.
    taken: usize,
    /// Bytes of an incomplete element.
    carry: [u8; 8],
    carried: usize,
}

/// How received bytes are reduced.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamReduction {
    pub(super) op: Reduce,
    pub(super) dtype: Dtype,
}

impl<'a> StreamProgress<'a> {
    fn new(course: &'a RingStream) -> Self {
        let mut new = Self {
            course,
            sends: course.sends(),
            sent: 0,
            take: 0,
            within: 0,
            taken: 0,
            carry: [0; 8],
            carried: 0,
        };
        new.skip_done();
        new
    }

    /// Moves to the next range once this one is done; empty ranges are done at once.
    fn skip_done(&mut self) {
        let done = |take: usize, within| {
            let takes = self.course.takes.get(take);
            takes.is_some_and(|take| take.range.len() == within)
        };
        while done(self.take, self.within) {
            (self.take, self.within) = (self.take + 1, 0);
        }
    }

    fn takes(&self) -> bool {
        self.take < self.course.takes.len()
    }

    /// Bytes that may be sent now: forwarded bytes must be received first.
    fn sendable(&self) -> usize {
        self.sends.min(self.course.own.len() + self.taken) - self.sent
    }

    fn is_done(&self) -> bool {
        self.sent == self.sends && !self.takes()
    }

    /// Sends at most [`TURN_BYTES`]; whether bytes moved.
    fn push(&mut self, sides: &NeighbourSockets, data: &[u8]) -> Result<bool, StreamFailure> {
        let sendable = self.sendable().min(TURN_BYTES);
        if sendable == 0 {
            return Ok(false);
        }
        let range = self.course.sent_range(self.sent);
        let end = range.end.min(range.start + sendable);
        let to = self.course.way.to();
        let mut socket = sides.socket(to, self.course.connection);
        let count = outcome(socket.write(&data[range.start..end]));
        let count = count.map_err(|Closed| StreamFailure::Gone(to))?;
        self.sent += count;
        Ok(count > 0)
    }

    /// Receives at most [`TURN_BYTES`]; whether bytes moved.
    fn pull(
        &mut self,
        sides: &NeighbourSockets,
        data: &mut [u8],
        scratch: &mut [u8],
        folding: StreamReduction,
    ) -> Result<bool, StreamFailure> {
        let Some(take) = self.course.takes.get(self.take) else {
            return Ok(false);
        };
        let from = self.course.way.from();
        let socket = sides.socket(from, self.course.connection);
        let into = &mut data[take.range.start + self.within..take.range.end];
        let count = match take.reduces {
            true => self.reduce(socket, into, scratch, folding),
            false => outcome((&*socket).read(into)).inspect(|count| {
                self.within += count;
                self.taken += count;
            }),
        };
        let count = count.map_err(|Closed| StreamFailure::Gone(from))?;
        self.skip_done();
        Ok(count > 0)
    }

    /// Reads some bytes and reduces the complete elements; returns the number of bytes.
    fn reduce(
        &mut self,
        mut socket: &TcpStream,
        into: &mut [u8],
        scratch: &mut [u8],
        folding: StreamReduction,
    ) -> Result<usize, Closed> {
        let room = scratch.len().min(into.len());
        let scratch = &mut scratch[..room];
        scratch[..self.carried].copy_from_slice(&self.carry[..self.carried]);
        let count = outcome(socket.read(&mut scratch[self.carried..]))?;
        let have = self.carried + count;
        let whole = have - have % folding.dtype.bytes();
        let StreamReduction { op, dtype } = folding;
        fold(
            op,
            dtype,
            OperandSide::First,
            &mut into[..whole],
            &scratch[..whole],
        );
        self.carried = have - whole;
        self.carry[..self.carried].copy_from_slice(&scratch[whole..have]);
        self.within += whole;
        self.taken += whole;
        Ok(count)
    }

    /// The neighbour that this stream waits for.
    fn waits_for(&self) -> Neighbour {
        match self.takes() {
            true => self.course.way.from(),
            false => self.course.way.to(),
        }
    }
}

/// Runs `courses` over `data` to their end.
///
/// `scratch` has [`scratch_bytes`]; `folding` applies to the streams that reduce.
pub(super) fn run(
    sides: &NeighbourSockets,
    courses: &[RingStream],
    data: &mut [u8],
    scratch: &mut [u8],
    folding: StreamReduction,
    deadline: Deadline,
) -> Result<(), StreamFailure> {
    let mut all: Vec<StreamProgress<'_>> = courses.iter().map(StreamProgress::new).collect();
    let mut looks = 0;
    loop {
        let mut moved = false;
        for course in &mut all {
            moved |= course.push(sides, data)?;
            moved |= course.pull(sides, data, scratch, folding)?;
        }
        let Some(waiting) = all.iter().find(|course| !course.is_done()) else {
            return Ok(());
        };
        let left = deadline.left(now());
        if left.is_zero() && !moved {
            return Err(StreamFailure::Late(waiting.waits_for()));
        }
        looks = if moved { 0 } else { looks + 1 };
        if !moved && PATIENCE.pause(looks) == Pause::Block {
            wait(sides, &all, deadline)?;
        }
    }
}

/// Bytes of scratch memory for a reducing call: whole elements of every type.
pub(super) const fn scratch_bytes() -> usize {
    TURN_BYTES
}

/// Blocks until one of the streams may make progress, or the deadline.
fn wait(
    sides: &NeighbourSockets,
    all: &[StreamProgress<'_>],
    deadline: Deadline,
) -> Result<(), StreamFailure> {
    let mut fds = Vec::with_capacity(2 * all.len());
    let mut watched = Vec::with_capacity(2 * all.len());
    for course in all {
        let mut add = |neighbour, flags| {
            let socket = sides.socket(neighbour, course.course.connection);
            fds.push(PollFd::from_borrowed_fd(socket.as_fd(), flags));
            watched.push((neighbour, flags));
        };
        let way = course.course.way;
        if course.takes() {
            add(way.from(), PollFlags::IN);
        }
        // A neighbour that left before it received all it needs is dead, even if nothing can be
        // sent to it at the moment.
        if course.sent < course.sends {
            let out = match course.sendable() {
                0 => PollFlags::empty(),
                _ => PollFlags::OUT,
            };
            add(way.to(), out | HANGUP);
        }
    }
    poll_until(&mut fds, deadline.instant());
    for (fd, (neighbour, flags)) in fds.iter().zip(watched) {
        if flags.contains(HANGUP) && fd.revents().contains(HANGUP) {
            return Err(StreamFailure::Gone(neighbour));
        }
    }
    Ok(())
}
