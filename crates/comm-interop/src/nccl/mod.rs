//! Groups of GPUs by NVIDIA's NCCL, opened at run time: the build needs neither NCCL nor CUDA.
//!
//! NCCL's unique id is distributed by a group of another kind ([`join`]), or as by MLX's ranks
//! ([`join_mlx`]). Buffers are the caller's, in host memory: each call copies to the GPU, runs
//! there, and copies back.
//!
//! **Limits.** No messages, as in MLX; no reductions of `i16`, `u16` and `complex64`, which NCCL
//! lacks. They give [`Error::Unsupported`] before anything is sent. There is no lockstep guard, and
//! the order of sums is NCCL's. NCCL sends plaintext over any link it finds: [`join`] must be
//! requested by name.
//!
//! **Deadlines.** The host never blocks in NCCL: it polls the stream until the deadline, then
//! aborts the communicator. NCCL does not report the missing rank, so [`Error::Timeout`] names the
//! rank that waited. Errors of the libraries are [`Error::Library`] with their own codes.

mod device;
mod id_exchange;
mod table;

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use paceline_base::{Bytes, Rank, lock};

use self::device::{Buffer, CudaDevice, CudaStream};
pub use self::table::{Libraries, OpenError};
use self::table::{Opaque, UniqueId, done};
use paceline_comm::provider::{Provider, allowed, members, now};
use paceline_comm::tcp::{self, Addrs};
use paceline_comm::{
    Backend, Call, Collective, Data, DataMut, Deadline, Dtype, ElementCounts, Error, Group,
    InitError, Kind, Plaintext, Reduce, Traffic, Tuning,
};

/// The backend's name in errors.
pub const NAME: &str = Backend::Nccl.name();

/// Pause between polls of a stream, after yielding has not helped.
const NAP: Duration = Duration::from_micros(50);

/// Polls with the core yielded between them: about as long as a small call takes on a GPU.
const YIELDS: u32 = 200;

/// Why a rank could not join.
#[derive(Debug, thiserror::Error)]
pub enum NcclJoinError {
    #[error("nccl is plaintext: not allowed")]
    Plaintext,
    /// The libraries or the GPU cannot be used.
    #[error("nccl: {0}")]
    Open(#[from] OpenError),
    #[error("nccl: hand the id round: {0}")]
    Meeting(#[from] Error),
    #[error("nccl: another rank cannot use it")]
    Others,
    /// The address where rank 0 distributes the id cannot be used.
    #[error("nccl: meet at {addr}: {source}")]
    Meet { addr: SocketAddr, source: io::Error },
    #[error("nccl: the ranks did not all come before the deadline")]
    Late,
}

/// A rank that exchanges the id as MLX's ranks do.
#[derive(Clone, Copy, Debug)]
pub struct NcclRank {
    pub rank: Rank,
    /// Number of ranks: MLX's `MLX_WORLD_SIZE`.
    pub size: u32,
    /// Address where rank 0 distributes the id: MLX's `NCCL_HOST_IP` and `NCCL_PORT`.
    pub addr: SocketAddr,
}

/// NCCL as a provider of [`init`](paceline_comm::init), whose ranks meet by TCP. Its errors are
/// [`NcclJoinError`]s.
#[derive(Clone, Debug)]
pub struct NcclProvider {
    /// Paths of NCCL and CUDA.
    pub libraries: Libraries,
    /// Whether bytes may leave this machine unencrypted.
    pub plaintext: Plaintext,
}

impl Provider for NcclProvider {
    fn backend(&self) -> Backend {
        Backend::Nccl
    }

    fn join(
        &self,
        seat: paceline_comm::JoinParams<'_, Addrs>,
        deadline: Deadline,
    ) -> Result<Box<dyn Group>, InitError> {
        allowed(self.backend(), self.plaintext)?;
        let paceline_comm::JoinParams {
            listener,
            rank,
            addrs,
            id,
            config,
        } = seat;
        let meeting = tcp::join_with(listener, rank, addrs, id, config, deadline)?;
        let joined = join(&meeting, &self.libraries, self.plaintext, deadline);
        Ok(Box::new(joined.map_err(InitError::wire)?))
    }
}

/// A rank of a group of GPUs. Dropping it ends the group for the others.
#[derive(derive_more::Debug)]
#[debug("{NAME} {} of {}", self.rank, self.size)]
pub struct Nccl {
    rank: Rank,
    size: u32,
    device: Arc<CudaDevice>,
    state: Mutex<State>,
    cause: OnceLock<Error>,
    calls: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

/// State of calls, one at a time.
struct State {
    /// `None` once it was aborted.
    comm: Option<Comm>,
    input: Buffer,
    output: Buffer,
    stream: CudaStream,
}

/// `ncclComm_t`.
#[derive(Clone, Copy)]
struct Comm(Opaque);

// SAFETY: a handle that NCCL looks up; `State` serialises the calls on it.
unsafe impl Send for Comm {}

/// Whether NCCL and the driver can be opened here, in a supported version. Makes no group and
/// touches no GPU.
pub fn check(libraries: &Libraries) -> Result<(), OpenError> {
    table::open_all(libraries).map(drop)
}

/// Makes a group of GPUs from the ranks of `meeting`, one for each. Collective.
///
/// # Errors
/// Any [`NcclJoinError`]. Ranks that cannot open NCCL report it before the others wait for them.
pub fn join(
    meeting: &dyn Group,
    libraries: &Libraries,
    plaintext: Plaintext,
    deadline: Deadline,
) -> Result<Nccl, NcclJoinError> {
    let opened = match plaintext {
        Plaintext::Refused => Err(NcclJoinError::Plaintext),
        Plaintext::Allowed => {
            CudaDevice::open(libraries, meeting.rank().0).map_err(NcclJoinError::Open)
        }
    };
    // A rank that cannot join must report it: NCCL's own start waits for all.
    let mut comes = [u8::from(opened.is_ok())];
    meeting.all_reduce(&mut comes, Reduce::Min, deadline)?;
    let device = Arc::new(opened?);
    if comes == [0] {
        return Err(NcclJoinError::Others);
    }
    let mut id = [0_u8; 128];
    if meeting.rank() == Rank(0) {
        id = unique_id(&device)?.0;
    }
    meeting.broadcast(&mut id, Rank(0), deadline)?;
    Nccl::start(
        device,
        meeting.rank(),
        meeting.size(),
        UniqueId(id),
        deadline,
    )
}

/// [`join`] for ranks that may include MLX's: they exchange the id by its protocol. Collective.
///
/// # Errors
/// Any [`NcclJoinError`] but [`NcclJoinError::Meeting`] and [`NcclJoinError::Others`].
pub fn join_mlx(
    seat: NcclRank,
    libraries: &Libraries,
    plaintext: Plaintext,
    deadline: Deadline,
) -> Result<Nccl, NcclJoinError> {
    if plaintext == Plaintext::Refused {
        return Err(NcclJoinError::Plaintext);
    }
    let NcclRank { rank, size, addr } = seat;
    let device = Arc::new(CudaDevice::open(libraries, rank.0)?);
    let id = match rank {
        Rank(0) => {
            let id = unique_id(&device)?;
            id_exchange::serve_id(addr, size.saturating_sub(1), &id.0, deadline)?;
            id
        }
        _ => UniqueId(id_exchange::fetch_id(addr, deadline)?),
    };
    Nccl::start(device, rank, size, id, deadline)
}

fn unique_id(device: &CudaDevice) -> Result<UniqueId, OpenError> {
    let mut id = UniqueId([0; 128]);
    device.enter()?;
    // SAFETY: the id is written.
    done("ncclGetUniqueId", unsafe {
        (device.nccl.get_unique_id)(&raw mut id)
    })?;
    Ok(id)
}

impl Nccl {
    /// Starts NCCL on its own thread, since it waits for the others without limit.
    fn start(
        device: Arc<CudaDevice>,
        rank: Rank,
        size: u32,
        id: UniqueId,
        deadline: Deadline,
    ) -> Result<Self, NcclJoinError> {
        let (tell, hear) = mpsc::channel();
        let starter = Arc::clone(&device);
        thread::spawn(move || {
            // The receiver is dropped if the deadline has passed.
            let _ = tell.send(start_comm(&starter, rank, size, id));
        });
        let comm = hear.recv_timeout(deadline.left(now()));
        let comm = comm.map_err(|_| NcclJoinError::Late)??;
        device.enter()?;
        let state = State {
            comm: Some(comm),
            input: Buffer::new(&device),
            output: Buffer::new(&device),
            stream: CudaStream::new(&device)?,
        };
        Ok(Self {
            rank,
            size,
            device,
            state: Mutex::new(state),
            cause: OnceLock::new(),
            calls: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn unsupported(&self, call: Call) -> Error {
        Error::Unsupported {
            call,
            rank: self.rank,
            backend: NAME,
        }
    }

    /// The error of `call`. Aborts the communicator, so that nothing waits for it any more.
    fn fail(&self, state: &mut State, error: Error) -> Error {
        let first = *self.cause.get_or_init(|| error);
        if let Some(comm) = state.comm.take() {
            // SAFETY: a live communicator, not used anywhere else from here on.
            unsafe { (self.device.nccl.comm_abort)(comm.0) };
        }
        first
    }

    /// Copies `input` to the GPU, enqueues `work` on the stream, waits, and copies the result that
    /// `work` locates to `output`.
    fn go(
        &self,
        call: Call,
        input: &[u8],
        output: (&mut [u8], usize, usize),
        work: impl FnOnce(&NcclCall<'_>) -> Result<(), OpenError>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let mut state = self.state();
        if let Some(cause) = self.cause.get() {
            return Err(*cause);
        }
        let result = self.try_go(&mut state, input, output, work, deadline);
        match result {
            Ok(true) => Ok(()),
            Ok(false) => {
                let rank = self.rank;
                Err(self.fail(&mut state, Error::Timeout { call, rank }))
            }
            Err(error) => {
                let code = match error {
                    OpenError::Call { code, .. } => code,
                    _ => -1,
                };
                let (rank, backend) = (self.rank, NAME);
                let error = Error::Library {
                    call,
                    rank,
                    backend,
                    code,
                };
                Err(self.fail(&mut state, error))
            }
        }
    }

    /// Whether the call completed before the deadline.
    fn try_go(
        &self,
        state: &mut State,
        input: &[u8],
        (output, output_bytes, offset): (&mut [u8], usize, usize),
        work: impl FnOnce(&NcclCall<'_>) -> Result<(), OpenError>,
        deadline: Deadline,
    ) -> Result<bool, OpenError> {
        self.device.enter()?;
        state.input.hold(input.len().max(1))?;
        state.output.hold(output_bytes.max(1))?;
        self.device.upload(&state.input, input)?;
        let comm = state.comm.expect("there is one until the first error");
        work(&NcclCall {
            nccl: &self.device.nccl,
            comm: comm.0,
            stream: state.stream.handle,
            input: state.input.start,
            output: state.output.start,
        })?;
        if !self.wait(comm, &state.stream, deadline)? {
            return Ok(false);
        }
        self.device.download(output, &state.output, offset)?;
        self.sent.fetch_add(input.len() as u64, Ordering::Relaxed);
        self.received
            .fetch_add(output.len() as u64, Ordering::Relaxed);
        Ok(true)
    }

    /// Whether the stream completed before the deadline.
    fn wait(&self, comm: Comm, stream: &CudaStream, deadline: Deadline) -> Result<bool, OpenError> {
        let mut looks = 0;
        while !self.device.is_over(stream)? {
            let mut code = 0;
            // SAFETY: a live communicator; the code is written.
            unsafe {
                let asked = (self.device.nccl.async_error)(comm.0, &raw mut code);
                done("ncclCommGetAsyncError", asked)?;
            }
            done("an operation of nccl", code)?;
            if deadline.left(now()).is_zero() {
                return Ok(false);
            }
            match looks {
                0..YIELDS => thread::yield_now(),
                _ => thread::sleep(NAP),
            }
            looks += 1;
        }
        Ok(true)
    }

    fn collective(
        &self,
        call: Call,
        collective: Collective<'_>,
        by: Deadline,
    ) -> Result<(), Error> {
        match collective {
            Collective::Barrier => {
                let one = [1];
                self.go(call, &one, (&mut [0], 1, 0), |on| on.reduce(1, (1, 0)), by)
            }
            Collective::AllReduce { mut data, op } => {
                let kind = self.reduction(call, data.dtype(), op)?;
                let (input, len) = (data.bytes().to_vec(), data.len());
                data.write(|to| {
                    let to = (to, input.len(), 0);
                    self.go(call, &input, to, |on| on.reduce(len, kind), by)
                })
            }
            Collective::ReduceScatter {
                input,
                output,
                counts,
                op,
            } => self.reduce_scatter(call, input, output, counts, op, by),
            Collective::Broadcast { mut data, root } => {
                let input = data.bytes().to_vec();
                let (bytes, root) = (input.len(), root.0.cast_signed());
                data.write(|to| {
                    let to = (to, bytes, 0);
                    self.go(call, &input, to, |on| on.broadcast(bytes, root), by)
                })
            }
            Collective::AllGather {
                input,
                output,
                counts,
            } => self.all_gather(call, input, output, counts, by),
            Collective::AllToAll {
                input,
                mut output,
                sends,
                receives,
            } => {
                let (bytes, size) = (output.bytes().len(), self.size as usize);
                let each = input.dtype().bytes();
                let work = |on: &NcclCall<'_>| {
                    on.exchange(
                        size,
                        |to| place(sends, to, each),
                        |from| place(receives, from, each),
                    )
                };
                output.write(|to| self.go(call, input.bytes(), (to, bytes, 0), work, by))
            }
        }
    }

    /// NCCL scatters equal parts only; for others every rank reduces all.
    fn reduce_scatter(
        &self,
        call: Call,
        input: Data<'_>,
        mut output: DataMut<'_>,
        counts: ElementCounts<'_>,
        op: Reduce,
        by: Deadline,
    ) -> Result<(), Error> {
        let kind = self.reduction(call, input.dtype(), op)?;
        let (len, bytes) = (input.len(), input.bytes().len());
        let (offset, own) = place(counts, self.rank.0 as usize, input.dtype().bytes());
        output.write(|output| match counts {
            ElementCounts::Even(part) => {
                let to = (output, own, 0);
                self.go(call, input.bytes(), to, |on| on.scatter(part, kind), by)
            }
            ElementCounts::Each(_) => {
                let to = (output, bytes, offset);
                self.go(call, input.bytes(), to, |on| on.reduce(len, kind), by)
            }
        })
    }

    /// NCCL gathers equal parts only; others are sent between all pairs.
    fn all_gather(
        &self,
        call: Call,
        input: Option<Data<'_>>,
        mut output: DataMut<'_>,
        counts: ElementCounts<'_>,
        by: Deadline,
    ) -> Result<(), Error> {
        let (size, each) = (self.size as usize, output.dtype().bytes());
        let (start, own) = place(counts, self.rank.0 as usize, each);
        let input = match input {
            Some(input) => input.bytes().to_vec(),
            None => output.bytes()[start..start + own].to_vec(),
        };
        let work = |on: &NcclCall<'_>| match counts {
            ElementCounts::Even(count) => on.gather(count * each),
            ElementCounts::Each(_) => {
                on.exchange(size, |_| (0, own), |from| place(counts, from, each))
            }
        };
        let bytes = output.bytes().len();
        output.write(|to| self.go(call, &input, (to, bytes, 0), work, by))
    }

    /// NCCL's codes of a type and a reduction: `ncclDataType_t` and `ncclRedOp_t`.
    fn reduction(&self, call: Call, dtype: Dtype, op: Reduce) -> Result<(c_int, c_int), Error> {
        let dtype = match dtype {
            Dtype::I8 => 0,
            Dtype::U8 => 1,
            Dtype::I32 => 2,
            Dtype::U32 => 3,
            Dtype::I64 => 4,
            Dtype::U64 => 5,
            Dtype::F16 => 6,
            Dtype::F32 => 7,
            Dtype::F64 => 8,
            Dtype::Bf16 => 9,
            // "or" and "and" of bytes that are 0 or 1.
            Dtype::Bool => {
                let max = matches!(op, Reduce::Sum | Reduce::Max);
                return Ok((1, if max { 2 } else { 3 }));
            }
            Dtype::I16 | Dtype::U16 | Dtype::Complex64 => return Err(self.unsupported(call)),
        };
        let op = match op {
            Reduce::Sum => 0,
            Reduce::Prod => 1,
            Reduce::Max => 2,
            Reduce::Min => 3,
        };
        Ok((dtype, op))
    }

    fn no_messages(&self, kind: Kind, dtype: Dtype, len: usize) -> Error {
        let sequence = self.calls.load(Ordering::Relaxed);
        self.unsupported(Call::plain(sequence, kind, dtype, len))
    }
}

/// Offset and length of the part of `rank`, in bytes.
fn place(counts: ElementCounts<'_>, rank: usize, each: usize) -> (usize, usize) {
    (counts.before(rank) * each, counts.of(rank) * each)
}

fn start_comm(device: &CudaDevice, rank: Rank, size: u32, id: UniqueId) -> Result<Comm, OpenError> {
    device.enter()?;
    let mut comm = std::ptr::null_mut();
    let (rank, size) = (rank.0.cast_signed(), size.cast_signed());
    // SAFETY: the handle is written; the id is by value, as in the header.
    let code = unsafe { (device.nccl.comm_init_rank)(&raw mut comm, size, id, rank) };
    done("ncclCommInitRank", code).map(|()| Comm(comm))
}

/// Bytes: `ncclUint8`.
const BYTES: c_int = 1;

struct NcclCall<'a> {
    nccl: &'a table::Nccl,
    comm: Opaque,
    stream: Opaque,
    input: u64,
    output: u64,
}

// `go` has made both buffers as long as these calls read and write, so that they are sound.
impl NcclCall<'_> {
    fn reduce(&self, len: usize, (dtype, op): (c_int, c_int)) -> Result<(), OpenError> {
        let (from, to, comm, stream) = (self.input, self.output, self.comm, self.stream);
        // SAFETY: both buffers have `len` elements.
        let code = unsafe { (self.nccl.all_reduce)(from, to, len, dtype, op, comm, stream) };
        done("ncclAllReduce", code)
    }

    fn scatter(&self, len: usize, (dtype, op): (c_int, c_int)) -> Result<(), OpenError> {
        let (from, to, comm, stream) = (self.input, self.output, self.comm, self.stream);
        // SAFETY: the output has `len` elements, the input that for each rank.
        let code = unsafe { (self.nccl.reduce_scatter)(from, to, len, dtype, op, comm, stream) };
        done("ncclReduceScatter", code)
    }

    fn gather(&self, bytes: usize) -> Result<(), OpenError> {
        let (from, to, comm, stream) = (self.input, self.output, self.comm, self.stream);
        // SAFETY: the input has `bytes` bytes, the output that for each rank.
        let code = unsafe { (self.nccl.all_gather)(from, to, bytes, BYTES, comm, stream) };
        done("ncclAllGather", code)
    }

    fn broadcast(&self, bytes: usize, root: c_int) -> Result<(), OpenError> {
        let (from, to, comm, stream) = (self.input, self.output, self.comm, self.stream);
        // SAFETY: both buffers have `bytes` bytes.
        let code = unsafe { (self.nccl.broadcast)(from, to, bytes, BYTES, root, comm, stream) };
        done("ncclBroadcast", code)
    }

    /// Offset and bytes of the part sent to each rank, and of the part received from it.
    fn exchange(
        &self,
        size: usize,
        to: impl Fn(usize) -> (usize, usize),
        from: impl Fn(usize) -> (usize, usize),
    ) -> Result<(), OpenError> {
        let (nccl, comm, stream) = (self.nccl, self.comm, self.stream);
        // SAFETY: no arguments; ended below.
        done("ncclGroupStart", unsafe { (nccl.group_start)() })?;
        let mut posted = Ok(());
        for (rank, peer) in (0..size).zip(0..) {
            let ((start, sends), (place, receives)) = (to(rank), from(rank));
            let (start, place) = (self.input + start as u64, self.output + place as u64);
            // SAFETY: both ranges are within the buffers, as the counts of the call say.
            let codes = unsafe {
                [
                    (nccl.send)(start, sends, BYTES, peer, comm, stream),
                    (nccl.recv)(place, receives, BYTES, peer, comm, stream),
                ]
            };
            posted = posted
                .and(done("ncclSend", codes[0]))
                .and(done("ncclRecv", codes[1]));
        }
        // SAFETY: started above.
        let ended = done("ncclGroupEnd", unsafe { (nccl.group_end)() });
        posted.and(ended)
    }
}

impl Drop for Nccl {
    /// Aborts instead of destroying, which would wait for the others.
    fn drop(&mut self) {
        let comm = self.state().comm.take();
        let all_well = self.cause.get().is_none() && !thread::panicking();
        if let (Some(comm), Ok(())) = (comm, self.device.enter()) {
            // SAFETY: a live communicator, not used anywhere else.
            unsafe {
                match all_well {
                    true => (self.device.nccl.comm_destroy)(comm.0),
                    false => (self.device.nccl.comm_abort)(comm.0),
                };
            }
        }
    }
}

impl Group for Nccl {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error> {
        let sequence = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call::of(&collective, sequence, self.rank, self.size);
        let call = call.map_err(|error| self.fail(&mut self.state(), error))?;
        self.collective(call, collective, deadline)
    }

    fn send_data(&self, data: Data<'_>, to: Rank, tag: u32, _: Deadline) -> Result<(), Error> {
        Err(self.no_messages(Kind::Send { to, tag }, data.dtype(), data.len()))
    }

    fn recv_data(&self, into: DataMut<'_>, from: Rank, tag: u32, _: Deadline) -> Result<(), Error> {
        Err(self.no_messages(Kind::Recv { from, tag }, into.dtype(), into.len()))
    }

    /// Bytes of the calls' arrays: the traffic of NCCL's algorithms is unknown.
    fn traffic(&self) -> Traffic {
        Traffic {
            sent: Bytes(self.sent.load(Ordering::Relaxed)),
            received: Bytes(self.received.load(Ordering::Relaxed)),
        }
    }

    /// NCCL chooses by itself.
    fn tuning(&self) -> Tuning {
        Tuning::default()
    }

    /// Every rank contributes an id; a part uses that of its first rank.
    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        let member = members(self, color, key, deadline)?;
        let (call, rank) = (member.call, self.rank);
        let library = |code| Error::Library {
            call,
            rank,
            backend: NAME,
            code,
        };
        let of = |error: OpenError| match error {
            OpenError::Call { code, .. } => library(code),
            _ => library(-1),
        };
        let own = unique_id(&self.device).map_err(of)?.0;
        let mut all = vec![0_u8; own.len() * self.size as usize];
        (self as &dyn Group).all_gather(&own, &mut all, deadline)?;
        let first = member.ranks.first().map_or(0, |rank| rank.0 as usize);
        let id = all.as_chunks::<128>().0[first];
        let size = u32::try_from(member.ranks.len()).unwrap_or(self.size);
        let device = Arc::clone(&self.device);
        let part = Self::start(device, member.rank, size, UniqueId(id), deadline);
        part.map(|part| Box::new(part) as Box<dyn Group>)
            .map_err(|error| match error {
                NcclJoinError::Open(error) => of(error),
                NcclJoinError::Meeting(error) => error,
                NcclJoinError::Plaintext
                | NcclJoinError::Others
                | NcclJoinError::Meet { .. }
                | NcclJoinError::Late => Error::Timeout { call, rank },
            })
    }
}
