//! The group over the MPI library.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ::mpi::environment::Universe;
use ::mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};
use ::mpi::{Threading, initialize_with_threading};
use paceline_base::{Bytes, Rank, lock};

use super::ops::{Ops, datatype};
use super::{NAME, StartError};
use paceline_comm::provider::{Pause, SpinPolicy, members, now};
use paceline_comm::{
    Call, Collective, Data, DataMut, Deadline, Dtype, ElementCounts, Error, Group, Kind,
    MESSAGES_HELD, Traffic, Tuning, local,
};

/// Address of the data of an empty buffer. Rust's empty slices have small addresses, and 1 is Open
/// MPI's `MPI_IN_PLACE`.
static NOTHING: AtomicU64 = AtomicU64::new(0);

fn start(bytes: &[u8]) -> *const c_void {
    match bytes {
        [] => NOTHING.as_ptr().cast_const().cast(),
        bytes => bytes.as_ptr().cast(),
    }
}

fn start_mut(bytes: &mut [u8]) -> *mut c_void {
    match bytes {
        [] => NOTHING.as_ptr().cast(),
        bytes => bytes.as_mut_ptr().cast(),
    }
}

/// Pause between polls for a slow message: MPI's waits have no limit.
const NAP: Duration = Duration::from_micros(50);

/// A started MPI. It ends when its last group is dropped, which waits for all processes.
pub struct MpiSession {
    ops: Ops,
    /// Last, so that it is dropped last.
    _universe: Universe,
}

// SAFETY: handles of operations are values that MPI looks up. Any thread may use them, as `start`
// has requested; nothing else is in it.
unsafe impl Send for MpiSession {}
// SAFETY: as for `Send`.
unsafe impl Sync for MpiSession {}

impl fmt::Debug for MpiSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAME)
    }
}

impl MpiSession {
    /// Starts MPI. Once in a process.
    ///
    /// # Errors
    /// [`StartError::Started`] or [`StartError::Threads`].
    pub fn start() -> Result<Arc<Self>, StartError> {
        let started = initialize_with_threading(Threading::Multiple);
        let (universe, level) = started.ok_or(StartError::Started)?;
        if level < Threading::Multiple {
            // SAFETY: constants of the library.
            let (multiple, serialized) =
                unsafe { (ffi::RSMPI_THREAD_MULTIPLE, ffi::RSMPI_THREAD_SERIALIZED) };
            let got = serialized.min(multiple - 1);
            return Err(StartError::Threads {
                expected: multiple,
                got,
            });
        }
        let ops = Ops::new().expect("MPI has started and the functions are its own kind");
        Ok(Arc::new(Self {
            ops,
            _universe: universe,
        }))
    }

    /// All ranks that `mpirun` started.
    pub fn world(self: &Arc<Self>) -> Box<dyn Group> {
        // SAFETY: MPI has started; this is its constant for all ranks.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        Box::new(Mpi::new(
            Arc::clone(self),
            Communicator(world, CommunicatorOwner::Library),
        ))
    }
}

impl Drop for MpiSession {
    /// Ending MPI waits for all processes, but others do not wait for a process that panics.
    fn drop(&mut self) {
        if std::thread::panicking() {
            // SAFETY: MPI has started and not ended.
            unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
        }
    }
}

/// Which side frees a communicator.
enum CommunicatorOwner {
    Library,
    Group,
}

struct Communicator(MPI_Comm, CommunicatorOwner);

// SAFETY: a communicator may be used by any thread: `MpiSession::start` has requested that.
unsafe impl Send for Communicator {}
// SAFETY: as for `Send`.
unsafe impl Sync for Communicator {}

/// A message that MPI reads from until its request completes.
struct PendingSend {
    to: Rank,
    request: MPI_Request,
    /// Not touched until the request completes.
    bytes: Vec<u8>,
}

// SAFETY: as for `Communicator`.
unsafe impl Send for PendingSend {}

/// A rank of a group over MPI.
#[derive(derive_more::Debug)]
#[debug("{NAME} {} of {}", self.rank, self.size)]
struct Mpi {
    handle: Communicator,
    session: Arc<MpiSession>,
    rank: Rank,
    size: u32,
    /// How to poll for a message before the first nap.
    patience: SpinPolicy,
    /// Serialises collectives.
    turn: Mutex<()>,
    sending: Mutex<Vec<PendingSend>>,
    cause: OnceLock<Error>,
    collectives: AtomicU64,
    messages: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Mpi {
    fn new(session: Arc<MpiSession>, handle: Communicator) -> Self {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a live communicator; both numbers are written.
        unsafe {
            ffi::MPI_Comm_set_errhandler(handle.0, ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Comm_rank(handle.0, &raw mut rank);
            ffi::MPI_Comm_size(handle.0, &raw mut size);
        }
        Self {
            handle,
            session,
            rank: Rank(rank.cast_unsigned()),
            size: size.cast_unsigned(),
            patience: local::patience(usize::try_from(size).unwrap_or(usize::MAX)),
            turn: Mutex::new(()),
            sending: Mutex::default(),
            cause: OnceLock::new(),
            collectives: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    fn fail(&self, error: Error) -> Error {
        *self.cause.get_or_init(|| error)
    }

    /// The result of an MPI call that returned `code`.
    fn done(&self, call: Call, code: c_int) -> Result<(), Error> {
        let rank = self.rank;
        match code {
            0 => Ok(()),
            code => Err(self.fail(Error::Library {
                call,
                rank,
                backend: NAME,
                code,
            })),
        }
    }

    /// Pauses after poll number `looks` for a message, longer after many.
    ///
    /// Measured: 4 KiB to another process and back, November 2026 (`COMM_TEST_SPEED`,
    /// docs/measurements.md). It took 5 to 12 us, and 660 us with a nap after each poll; with four
    /// ranks on two cores 27 to 40 us.
    fn rest(&self, looks: u32) {
        if self.patience.pause(looks) == Pause::Block {
            std::thread::sleep(NAP);
        }
    }

    fn unsupported(&self, call: Call) -> Error {
        Error::Unsupported {
            call,
            rank: self.rank,
            backend: NAME,
        }
    }

    /// A count in MPI's type: its interface ends at 2^31 elements.
    fn count(&self, call: Call, count: usize) -> Result<c_int, Error> {
        c_int::try_from(count).map_err(|_| self.unsupported(call))
    }

    /// Counts and displacements of all ranks.
    fn counts(&self, call: Call, counts: &ElementCounts<'_>) -> Result<[Vec<c_int>; 2], Error> {
        let ranks = || 0..self.size as usize;
        let lengths = ranks().map(|rank| self.count(call, counts.of(rank)));
        let starts = ranks().map(|rank| self.count(call, counts.before(rank)));
        Ok([
            lengths.collect::<Result<_, _>>()?,
            starts.collect::<Result<_, _>>()?,
        ])
    }

    fn collective(&self, call: Call, collective: Collective<'_>) -> Result<(), Error> {
        match collective {
            // SAFETY: a live communicator.
            Collective::Barrier => self.done(call, unsafe { ffi::MPI_Barrier(self.handle.0) }),
            Collective::AllGather {
                input,
                output,
                counts,
            } => self.all_gather(call, input, output, &counts),
            Collective::AllReduce { mut data, op } => {
                let count = self.count(call, data.len())?;
                let input = data.bytes().to_vec();
                let (of, op) = (
                    datatype(data.dtype()),
                    self.session.ops.get(op, data.dtype()),
                );
                let code = data.write(|bytes| {
                    let (from, to) = (start(&input), start_mut(bytes));
                    // SAFETY: both have `count` elements of the type, and do not overlap.
                    unsafe { ffi::MPI_Allreduce(from, to, count, of, op, self.handle.0) }
                });
                self.done(call, code)
            }
            Collective::ReduceScatter {
                input,
                mut output,
                counts,
                op,
            } => {
                let [lengths, _] = self.counts(call, &counts)?;
                let (of, op) = (
                    datatype(input.dtype()),
                    self.session.ops.get(op, input.dtype()),
                );
                let code = output.write(|bytes| {
                    let (from, to) = (start(input.bytes()), start_mut(bytes));
                    let lengths = lengths.as_ptr();
                    // SAFETY: `input` has as many elements as all counts together, `output` as many
                    // as this rank's: `Call::of` has checked that.
                    unsafe { ffi::MPI_Reduce_scatter(from, to, lengths, of, op, self.handle.0) }
                });
                self.done(call, code)
            }
            Collective::AllToAll {
                input,
                output,
                sends,
                receives,
            } => self.all_to_all(call, input, output, &sends, &receives),
            Collective::Broadcast { mut data, root } => {
                let (count, of) = (self.count(call, data.len())?, datatype(data.dtype()));
                let root = self.count(call, root.0 as usize)?;
                let code = data.write(|bytes| {
                    // SAFETY: `data` has `count` elements of the type.
                    unsafe { ffi::MPI_Bcast(start_mut(bytes), count, of, root, self.handle.0) }
                });
                self.done(call, code)
            }
        }
    }

    fn all_gather(
        &self,
        call: Call,
        input: Option<Data<'_>>,
        mut output: DataMut<'_>,
        counts: &ElementCounts<'_>,
    ) -> Result<(), Error> {
        let [lengths, starts] = self.counts(call, counts)?;
        let (own, of) = (self.rank.0 as usize, datatype(output.dtype()));
        let bytes = output.dtype().bytes();
        let input = match input {
            Some(input) => input.bytes().to_vec(),
            None => {
                let start = counts.before(own) * bytes;
                output.bytes()[start..start + counts.of(own) * bytes].to_vec()
            }
        };
        let code = output.write(|to| {
            // SAFETY: `input` has this rank's count of elements, `output` all of them: `Call::of`
            // has checked that.
            unsafe {
                ffi::MPI_Allgatherv(
                    start(&input),
                    lengths[own],
                    of,
                    start_mut(to),
                    lengths.as_ptr(),
                    starts.as_ptr(),
                    of,
                    self.handle.0,
                )
            }
        });
        self.done(call, code)
    }

    fn all_to_all(
        &self,
        call: Call,
        input: Data<'_>,
        mut output: DataMut<'_>,
        sends: &ElementCounts<'_>,
        receives: &ElementCounts<'_>,
    ) -> Result<(), Error> {
        let [send_counts, send_starts] = self.counts(call, sends)?;
        let [receive_counts, receive_starts] = self.counts(call, receives)?;
        let of = datatype(input.dtype());
        let code = output.write(|to| {
            // SAFETY: both have as many elements as their counts together: `Call::of` has checked
            // that.
            unsafe {
                ffi::MPI_Alltoallv(
                    start(input.bytes()),
                    send_counts.as_ptr(),
                    send_starts.as_ptr(),
                    of,
                    start_mut(to),
                    receive_counts.as_ptr(),
                    receive_starts.as_ptr(),
                    of,
                    self.handle.0,
                )
            }
        });
        self.done(call, code)
    }

    /// A message call, if the peer exists and the group is not poisoned.
    fn message(&self, kind: Kind, dtype: Dtype, len: usize) -> Result<Call, Error> {
        let sequence = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call::plain(sequence, kind, dtype, len);
        let call = call.with_peer(self.rank, self.size);
        let call = call.map_err(|error| self.fail(error))?;
        self.cause.get().map_or(Ok(call), |cause| Err(*cause))
    }

    /// Drops completed messages; returns how many to `to` are in flight.
    fn held(&self, to: Rank) -> usize {
        let mut sending = lock(&self.sending);
        sending.retain_mut(|message| {
            let mut over = 0;
            // SAFETY: an incomplete request of this process; the status is ignored.
            unsafe {
                ffi::MPI_Test(
                    &raw mut message.request,
                    &raw mut over,
                    ffi::RSMPI_STATUS_IGNORE,
                );
            }
            over == 0
        });
        sending.iter().filter(|message| message.to == to).count()
    }
}

impl Drop for Mpi {
    /// Messages in flight continue; MPI keeps their memory for good.
    fn drop(&mut self) {
        self.held(self.rank);
        for message in lock(&self.sending).drain(..) {
            let PendingSend {
                mut request, bytes, ..
            } = message;
            std::mem::forget(bytes);
            // SAFETY: an incomplete request; MPI frees it on completion.
            unsafe { ffi::MPI_Request_free(&raw mut request) };
        }
        if matches!(self.handle.1, CommunicatorOwner::Group) {
            // SAFETY: made by `split` and used nowhere else; `session` is dropped after this.
            unsafe { ffi::MPI_Comm_free(&raw mut self.handle.0) };
        }
    }
}

impl Mpi {
    /// Waits for a message of `from` (a rank in MPI's type) with `tag`, and reserves it for this
    /// call.
    fn find(
        &self,
        call: Call,
        from: Rank,
        (peer, tag): (i32, i32),
        deadline: Deadline,
    ) -> Result<(ffi::MPI_Message, MPI_Status), Error> {
        let mut status = MaybeUninit::<MPI_Status>::uninit();
        let mut message = MaybeUninit::uninit();
        let (mut found, mut looks) = (0, 0);
        loop {
            // SAFETY: all three are written, the last two if something was found.
            let code = unsafe {
                let (message, status) = (message.as_mut_ptr(), status.as_mut_ptr());
                ffi::MPI_Improbe(peer, tag, self.handle.0, &raw mut found, message, status)
            };
            self.done(call, code)?;
            if found != 0 {
                // SAFETY: both were written.
                return Ok(unsafe { (message.assume_init(), status.assume_init()) });
            }
            if deadline.left(now()).is_zero() {
                return Err(self.fail(Error::Timeout { call, rank: from }));
            }
            self.held(from);
            looks += 1;
            self.rest(looks);
        }
    }
}

impl Group for Mpi {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn run(&self, collective: Collective<'_>, _: Deadline) -> Result<(), Error> {
        let _turn = lock(&self.turn);
        if let Some(cause) = self.cause.get() {
            return Err(*cause);
        }
        let sequence = self.collectives.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call::of(&collective, sequence, self.rank, self.size);
        let call = call.map_err(|error| self.fail(error))?;
        let bytes = call.length * call.dtype.bytes() as u64;
        self.collective(call, collective)?;
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.received.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn send_data(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let call = self.message(Kind::Send { to, tag }, message.dtype(), message.len())?;
        let (count, tag) = (
            self.count(call, message.len())?,
            self.count(call, tag as usize)?,
        );
        let peer = self.count(call, to.0 as usize)?;
        let mut looks = 0;
        while self.held(to) >= MESSAGES_HELD {
            if deadline.left(now()).is_zero() {
                return Err(self.fail(Error::Timeout { call, rank: to }));
            }
            looks += 1;
            self.rest(looks);
        }
        let bytes = message.bytes().to_vec();
        let of = datatype(message.dtype());
        let mut request = MaybeUninit::uninit();
        let from = start(&bytes);
        // SAFETY: `bytes` has `count` elements and is kept until the request completes; the request
        // is written.
        let (code, request) = unsafe {
            let code = ffi::MPI_Isend(
                from,
                count,
                of,
                peer,
                tag,
                self.handle.0,
                request.as_mut_ptr(),
            );
            self.done(call, code)?;
            (code, request.assume_init())
        };
        lock(&self.sending).push(PendingSend { to, request, bytes });
        self.sent
            .fetch_add(message.bytes().len() as u64, Ordering::Relaxed);
        self.done(call, code)
    }

    fn recv_data(
        &self,
        mut into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let call = self.message(Kind::Recv { from, tag }, into.dtype(), into.len())?;
        let (count, tag) = (
            self.count(call, into.len())?,
            self.count(call, tag as usize)?,
        );
        let (peer, of) = (self.count(call, from.0 as usize)?, datatype(into.dtype()));
        let (mut message, mut status) = self.find(call, from, (peer, tag), deadline)?;
        let mut came = 0;
        // SAFETY: the message has exactly these elements, or none of it is received and the group
        // ends.
        unsafe {
            ffi::MPI_Get_count(&raw const status, of, &raw mut came);
        }
        if came != count {
            let got = Call {
                length: u64::from(came.cast_unsigned()),
                kind: Kind::Send {
                    to: self.rank,
                    tag: tag.cast_unsigned(),
                },
                ..call
            };
            return Err(self.fail(Error::Mismatch {
                rank: from,
                expected: call,
                got,
            }));
        }
        let code = into.write(|to| {
            // SAFETY: `into` has `count` elements, and the message was found and not yet received.
            unsafe { ffi::MPI_Mrecv(start_mut(to), count, of, &raw mut message, &raw mut status) }
        });
        self.done(call, code)?;
        self.received
            .fetch_add(into.bytes().len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of the calls' arrays: the traffic of MPI's algorithms is unknown.
    fn traffic(&self) -> Traffic {
        Traffic {
            sent: Bytes(self.sent.load(Ordering::Relaxed)),
            received: Bytes(self.received.load(Ordering::Relaxed)),
        }
    }

    /// MPI chooses by itself.
    fn tuning(&self) -> Tuning {
        Tuning::default()
    }

    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        // MPI's colors are not negative, and ours arbitrary: the lowest old rank names a part.
        let member = members(self, color, key, deadline)?;
        let lowest = member.ranks.iter().min().copied().unwrap_or(self.rank);
        let color = self.count(member.call, lowest.0 as usize)?;
        let key = self.count(member.call, member.rank.0 as usize)?;
        let mut part = MaybeUninit::uninit();
        // SAFETY: a live communicator; the new one is written if MPI succeeds.
        let part = unsafe {
            let code = ffi::MPI_Comm_split(self.handle.0, color, key, part.as_mut_ptr());
            self.done(member.call, code)?;
            part.assume_init()
        };
        Ok(Box::new(Self::new(
            Arc::clone(&self.session),
            Communicator(part, CommunicatorOwner::Group),
        )))
    }
}
