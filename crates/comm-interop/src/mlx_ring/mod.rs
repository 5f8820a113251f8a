//! Rings that real MLX ranks can join: MLX's `ring` backend, byte for byte.
//!
//! ```text
//! hosts   [[127.0.0.1:5000, 127.0.0.1:5001], [...], [...]]    MLX_HOSTFILE, the same on all ranks
//!
//!            left[0] <---- rank ----> right[0]                one pair of sockets per address
//!            left[1] <----      ----> right[1]
//! ```
//!
//! ```
//! use std::net::TcpListener;
//! use std::time::{Duration, Instant};
//! use paceline_base::Rank;
//! use paceline_comm::{Deadline, Group, Plaintext, Reduce};
//! use paceline_comm_interop::mlx_ring;
//!
//! let deadline = Deadline::at(Instant::now() + Duration::from_secs(5));
//! let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
//! let hosts: Vec<_> = listeners.iter().map(|own| vec![own.local_addr().unwrap()]).collect();
//! let threads: Vec<_> = (0..).map(Rank).zip(listeners).map(|(rank, own)| {
//!     let hosts = hosts.clone();
//!     std::thread::spawn(move || {
//!         let plaintext = Plaintext::Refused; // loopback needs no more
//!         let ring = mlx_ring::join_with(vec![own], rank, &hosts, plaintext, deadline).unwrap();
//!         let mut data = [1.0_f32, rank.0 as f32];
//!         (&ring as &dyn Group).all_reduce(&mut data, Reduce::Sum, deadline).map(|()| data)
//!     })
//! }).collect();
//! for thread in threads {
//!     assert_eq!(thread.join().unwrap(), Ok([2.0, 1.0]));
//! }
//! ```
//!
//! - `plan`: the byte streams of a call, as data; `run`: moves them; `connect`: connects the
//!   neighbours; `neighbour_listener`: separates them from strangers.
//!
//! **Supported calls.** All-reduce by sum, max and min, gathers of equal parts, messages to
//! neighbours without tags, and a barrier. The barrier is MLX users' own idiom: the sum of one
//! `f32`. Every other call, `split` included, gives [`Error::Unsupported`] on every rank before a
//! byte is sent, and the ring stays usable. Messages share the sockets with collectives, so all
//! calls of a rank wait for one another. Ranks that send to each other before they receive wait
//! until their deadline, unless the system buffers the message. (MLX hangs there.)
//!
//! **Limits of the protocol.** It carries array bytes only, with these consequences:
//! - No lockstep guard: ranks that make different calls get garbage or a timeout.
//! - No failure notices: a rank that is not next to the dead one gets an error that names a
//!   neighbour.
//! - No authentication and no encryption: [`Plaintext`]. A stranger's connection is taken for the
//!   neighbour's if it comes first, stays, and is alone when all else is ready. The neighbour then
//!   reports that its peer is missing.
//! - Sums follow the ring and its segments, as MLX's do. So results may depend on the number of
//!   ranks, though all ranks still hold the same bytes.
//! - MLX's own ranks lose a NaN that meets a number in max and min; these keep it.
//!
//! **Better than MLX.** Every wait ends. A dead neighbour is an error at once and on every later
//! call; silence is an error at the deadline.

mod connect;
mod neighbour_listener;
mod plan;
mod run;
mod socket_lock;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use paceline_base::{Bytes, Rank};

pub use self::connect::JoinError;
use self::connect::{RingEndpoints, system};
use self::plan::{PADDED_BYTES_MAX, RingPosition, RingStream};
use self::run::{Neighbour, NeighbourSockets, StreamFailure, StreamReduction};
use self::socket_lock::SocketLock;
use paceline_comm::local::{self, Local};
use paceline_comm::provider::Provider;
use paceline_comm::tcp::Addrs;
use paceline_comm::{
    Algorithm, Backend, Call, Collective, Data, DataMut, Deadline, Dtype, ElementCounts, Error,
    Group, InitError, Kind, Plaintext, Reduce, Traffic, Tuning,
};

/// The backend's name in errors.
pub const NAME: &str = Backend::MlxRing.name();

/// MLX's ring as a provider of [`init`](paceline_comm::init), with one connection between
/// neighbours for each address of a rank. Its errors are [`JoinError`]s.
#[derive(Clone, Copy, Debug)]
pub struct MlxRingProvider {
    /// Whether bytes may leave this machine unencrypted; loopback needs no permission.
    pub plaintext: Plaintext,
}

impl Provider for MlxRingProvider {
    fn backend(&self) -> Backend {
        Backend::MlxRing
    }

    fn join(
        &self,
        seat: paceline_comm::JoinParams<'_, Addrs>,
        deadline: Deadline,
    ) -> Result<Box<dyn Group>, InitError> {
        let addrs = seat.addrs.iter().cloned();
        let hosts: Vec<Vec<SocketAddr>> = addrs.map(Into::into).collect();
        let listeners = seat.listener.into_sockets();
        let joined = join_with(listeners, seat.rank, &hosts, self.plaintext, deadline);
        Ok(Box::new(joined.map_err(InitError::wire)?))
    }
}

/// How long a rank that lost a neighbour keeps its other sockets open. So the neighbours on the far
/// side of the dead rank notice its end before this rank's: see `first_gone`.
const HEAD_START: Duration = Duration::from_millis(100);

/// A rank of a ring that MLX's ranks can join. Dropping it ends the ring for the others.
pub struct MlxRing {
    seat: RingPosition,
    /// `None` in a ring of one.
    sides: Option<NeighbourSockets>,
    alone: Local,
    turns: SocketLock,
    cause: OnceLock<Error>,
    collectives: AtomicU64,
    messages: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

/// Binds the addresses of `rank` and joins: see [`join_with`].
pub fn join(
    rank: Rank,
    hosts: &[Vec<SocketAddr>],
    plaintext: Plaintext,
    deadline: Deadline,
) -> Result<MlxRing, JoinError> {
    check(rank, hosts, plaintext)?;
    let own = match hosts.len() {
        1 => &[],
        _ => &hosts[rank.0 as usize][..],
    };
    let bind = |addr: &SocketAddr| TcpListener::bind(addr).map_err(system("listen at", *addr));
    let listeners = own.iter().map(bind).collect::<Result<_, _>>()?;
    join_with(listeners, rank, hosts, plaintext, deadline)
}

/// Connects `rank` with both neighbours and returns when they are connected. Collective.
///
/// `hosts` has the addresses of every rank in rank order, as in MLX's hostfile: equally many for
/// each, and one connection between neighbours for each. `listeners` are the sockets at
/// `hosts[rank]`. A ring of one connects to nobody. The protocol exchanges nothing: the launcher
/// ensures that all ranks have the same `hosts`.
///
/// # Errors
/// Any [`JoinError`]. The others notice at their own deadlines.
pub fn join_with(
    listeners: Vec<TcpListener>,
    rank: Rank,
    hosts: &[Vec<SocketAddr>],
    plaintext: Plaintext,
    deadline: Deadline,
) -> Result<MlxRing, JoinError> {
    let connections = check(rank, hosts, plaintext)?;
    let seat = RingPosition {
        rank: rank.0 as usize,
        size: hosts.len(),
        connections,
    };
    let as_rank = |index: usize| Rank(u32::try_from(index).unwrap_or(u32::MAX));
    let places = RingEndpoints {
        listeners: &listeners,
        own: &hosts[seat.rank],
        left: as_rank(seat.left()),
        right: as_rank(seat.right()),
        theirs: &hosts[seat.right()],
    };
    let sides = match seat.size {
        1 => None,
        _ => Some(places.connect(deadline)?),
    };
    Ok(MlxRing::new(seat, sides))
}

/// The number of connections, if the arguments are valid.
fn check(rank: Rank, hosts: &[Vec<SocketAddr>], plaintext: Plaintext) -> Result<usize, JoinError> {
    let size = hosts.len();
    if rank.0 as usize >= size {
        return Err(JoinError::NoSuchRank { rank, size });
    }
    let expected = hosts[0].len();
    let odd = (0..)
        .zip(hosts)
        .find(|(_, own)| own.is_empty() || own.len() != expected);
    if let (Some((rank, own)), 2..) = (odd, size) {
        let (rank, got) = (Rank(rank), own.len());
        return Err(JoinError::Connections {
            rank,
            expected,
            got,
        });
    }
    let far = hosts.iter().flatten().find(|addr| !addr.ip().is_loopback());
    match (far, plaintext) {
        (Some(addr), Plaintext::Refused) if size > 1 => Err(JoinError::Plaintext { addr: *addr }),
        _ => Ok(expected),
    }
}

impl MlxRing {
    fn new(seat: RingPosition, sides: Option<NeighbourSockets>) -> Self {
        Self {
            seat,
            sides,
            alone: local::ranks(1).remove(0),
            turns: SocketLock::default(),
            cause: OnceLock::new(),
            collectives: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    fn unsupported(&self, call: Call) -> Error {
        Error::Unsupported {
            call,
            rank: self.rank(),
            backend: NAME,
        }
    }

    /// Records why later calls fail, if they do.
    fn fail(&self, error: Error) -> Error {
        let first = *self.cause.get_or_init(|| error);
        if matches!(error, Error::PeerLost { .. }) {
            std::thread::sleep(HEAD_START);
        }
        if let Some(sides) = &self.sides {
            sides.cut();
        }
        first
    }

    /// Runs `courses` under the socket lock.
    fn go(
        &self,
        sides: &NeighbourSockets,
        call: Call,
        courses: &[RingStream],
        data: &mut [u8],
        folding: StreamReduction,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let turn = self.turns.lock(deadline);
        // Checked under the lock: the previous call may have failed.
        if let Some(cause) = self.cause.get() {
            return Err(*cause);
        }
        let Some(mut turn) = turn else {
            let rank = self.rank();
            return Err(self.fail(Error::Timeout { call, rank }));
        };
        let scratch = turn.scratch(run::scratch_bytes());
        match run::run(sides, courses, data, scratch, folding, deadline) {
            Ok(()) => {
                self.count(courses);
                Ok(())
            }
            Err(stop) => Err(self.fail(self.stopped(sides, call, stop))),
        }
    }

    fn count(&self, courses: &[RingStream]) {
        let takes = |course: &RingStream| course.takes.iter().map(|t| t.range.len()).sum::<usize>();
        let sent: usize = courses.iter().map(RingStream::sends).sum();
        let received: usize = courses.iter().map(takes).sum();
        self.sent.fetch_add(sent as u64, Ordering::Relaxed);
        self.received.fetch_add(received as u64, Ordering::Relaxed);
    }

    fn stopped(&self, sides: &NeighbourSockets, call: Call, stop: StreamFailure) -> Error {
        let rank = |neighbour| {
            let index = match neighbour {
                Neighbour::Right => self.seat.right(),
                Neighbour::Left => self.seat.left(),
            };
            Rank(u32::try_from(index).unwrap_or(u32::MAX))
        };
        match stop {
            StreamFailure::Gone(neighbour) => Error::PeerLost {
                call,
                rank: rank(sides.first_gone(neighbour)),
            },
            StreamFailure::Late(neighbour) => Error::Timeout {
                call,
                rank: rank(neighbour),
            },
        }
    }

    fn collective(
        &self,
        sides: &NeighbourSockets,
        call: Call,
        collective: Collective<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        match collective {
            Collective::Barrier => {
                let mut one = 1.0_f32.to_ne_bytes();
                let op = Reduce::Sum;
                self.all_reduce(sides, call, &mut one, op, Dtype::F32, deadline)
            }
            Collective::AllReduce { mut data, op } if op != Reduce::Prod => {
                let dtype = data.dtype();
                data.write(|bytes| self.all_reduce(sides, call, bytes, op, dtype, deadline))
            }
            Collective::AllGather {
                input,
                mut output,
                counts,
            } if is_even(counts) => {
                let bytes = counts.max() * output.dtype().bytes();
                let courses = self.seat.all_gather(bytes);
                output.write(|output| {
                    if let Some(input) = input {
                        output[self.seat.rank * bytes..][..bytes].copy_from_slice(input.bytes());
                    }
                    self.go(sides, call, &courses, output, COPYING, deadline)
                })
            }
            _ => Err(self.unsupported(call)),
        }
    }

    fn all_reduce(
        &self,
        sides: &NeighbourSockets,
        call: Call,
        data: &mut [u8],
        op: Reduce,
        dtype: Dtype,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let (len, size) = (data.len() / dtype.bytes(), self.seat.size);
        let folding = StreamReduction { op, dtype };
        if len >= size {
            let courses = self.seat.all_reduce(len, dtype);
            return self.go(sides, call, &courses, data, folding, deadline);
        }
        if size * dtype.bytes() > PADDED_BYTES_MAX {
            return Err(self.unsupported(call));
        }
        let mut padded = [0; PADDED_BYTES_MAX];
        let padded = &mut padded[..size * dtype.bytes()];
        padded[..data.len()].copy_from_slice(data);
        let courses = self.seat.all_reduce_padded(dtype);
        self.go(sides, call, &courses, padded, folding, deadline)?;
        data.copy_from_slice(&padded[..data.len()]);
        Ok(())
    }

    /// A message call, if the peer exists.
    fn message(&self, kind: Kind, dtype: Dtype, len: usize) -> Result<Call, Error> {
        let sequence = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call::plain(sequence, kind, dtype, len);
        let checked = call.with_peer(self.rank(), self.size());
        checked.map_err(|error| self.fail(error))
    }
}

/// For streams that reduce nothing.
const COPYING: StreamReduction = StreamReduction {
    op: Reduce::Sum,
    dtype: Dtype::U8,
};

fn is_even(counts: ElementCounts<'_>) -> bool {
    match counts {
        ElementCounts::Even(_) => true,
        ElementCounts::Each(each) => each.iter().all(|count| *count == each[0]),
    }
}

impl fmt::Debug for MlxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RingPosition {
            rank,
            size,
            connections,
        } = self.seat;
        write!(
            f,
            "{NAME} rank {rank} of {size} over {connections} connections"
        )
    }
}

impl Drop for MlxRing {
    fn drop(&mut self) {
        if let Some(sides) = &self.sides {
            sides.leave();
        }
    }
}

impl Group for MlxRing {
    fn rank(&self) -> Rank {
        Rank(u32::try_from(self.seat.rank).expect("made of a u32"))
    }

    fn size(&self) -> u32 {
        u32::try_from(self.seat.size).expect("more ranks than a u32 counts")
    }

    fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error> {
        let Some(sides) = &self.sides else {
            return self.alone.run(collective, deadline);
        };
        let sequence = self.collectives.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call::of(&collective, sequence, self.rank(), self.size());
        let call = call.map_err(|error| self.fail(error))?;
        self.collective(sides, call, collective, deadline)
    }

    fn send_data(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let Some(sides) = &self.sides else {
            return self.alone.send_data(message, to, tag, deadline);
        };
        let call = self.message(Kind::Send { to, tag }, message.dtype(), message.len())?;
        let Some(way) = self.seat.way_to(to.0 as usize).filter(|_| tag == 0) else {
            return Err(self.unsupported(call));
        };
        let courses = self.seat.send(way, message.bytes().len());
        // A sent buffer is only read; the copy keeps one runner for all calls.
        let mut bytes = message.bytes().to_vec();
        self.go(sides, call, &courses, &mut bytes, COPYING, deadline)
    }

    fn recv_data(
        &self,
        mut into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let Some(sides) = &self.sides else {
            return self.alone.recv_data(into, from, tag, deadline);
        };
        let call = self.message(Kind::Recv { from, tag }, into.dtype(), into.len())?;
        let Some(way) = self.seat.way_from(from.0 as usize).filter(|_| tag == 0) else {
            return Err(self.unsupported(call));
        };
        let courses = self.seat.recv(way, into.bytes().len());
        into.write(|bytes| self.go(sides, call, &courses, bytes, COPYING, deadline))
    }

    fn traffic(&self) -> Traffic {
        Traffic {
            sent: Bytes(self.sent.load(Ordering::Relaxed)),
            received: Bytes(self.received.load(Ordering::Relaxed)),
        }
    }

    /// MLX's protocol has one algorithm.
    fn tuning(&self) -> Tuning {
        Tuning {
            force: Some(Algorithm::Ring),
            ..Tuning::default()
        }
    }

    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        if self.sides.is_none() {
            return self.alone.split(color, key, deadline);
        }
        let sequence = self.collectives.load(Ordering::Relaxed) + 1;
        let call = Call::plain(sequence, Kind::AllGather, Dtype::U8, 0);
        Err(self.unsupported(call))
    }
}
