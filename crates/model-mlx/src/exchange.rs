//! Gathers between the ranks of a stage, from and to the memory of MLX's arrays.
//!
//! ```text
//! segment:  mine (T, n_r)  --submitted-->  the device computes
//! meanwhile: the graph of the next segment is made over views of memory to come
//! settled:  mine's own memory  --group-->  received (sum of T n_r)  --> what the views read
//! ```
//!
//! A gather submits this rank's part and returns views of the memory that all parts will be in. The
//! exchange itself takes place before the next evaluation: see [`Step::settle`]. So the device
//! computes a segment while the host makes the graph of the next one.
//!
//! On CUDA the exchanges are operations of MLX's graph instead, where the C layer has groups. A
//! step is then submitted whole. Metal keeps the cut: it ends a command buffer that waits for a
//! peer for some 5 s.
//!
//! Values travel in the type of activations. They are copied for the exchange only where an array
//! is not one run of rows, or where the device has memory of its own. The driver copies that
//! memory. Such bytes are counted as *staged*. Residuals between stages are f32, since the stage
//! after may be another engine's. Residuals of other types are *converted*.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use paceline_base::{Bytes, lock};
use paceline_comm::{MemoryRegistration, Pages};
use paceline_mlx::{Array, Dtype, GraphGroup, Stream};
use paceline_model::{Error, ExchangeBytes, Links};

use super::step::Step;

/// Receive memory that is kept for reuse. It is for the inputs and outputs of both halves of a
/// layer, or a stage's residual and the sums of prefill and of decode.
const KEPT: usize = 4;

/// Shortest array that is registered with the ranks' groups. Devices copy shorter ones sooner than
/// they agree on a place. Apple's devices have some hundred registrations.
const REGISTERED_MIN: usize = 16 << 10;

/// Alignment of receive memory in bytes, and the unit of its length: a page of Apple silicon, four
/// of other processors. A registered page has no bytes of others.
const ALIGNED: usize = 16 << 10;

/// Memory that other ranks' values are received in, as arrays. RDMA devices write there in place.
#[derive(Debug, Default)]
pub(super) struct Receive {
    kept: Vec<Received>,
    /// The exchange whose parts the graph reads.
    pending: Option<Pending>,
    /// Values of the residual that the stage before is still to send.
    residual: Option<usize>,
    graph: Option<InGraph>,
}

/// The ranks of a stage as a group of MLX.
#[derive(Debug)]
struct InGraph {
    group: GraphGroup,
    /// Why an exchange failed.
    failure: Arc<Mutex<Option<Error>>>,
}

impl InGraph {
    /// `None` if the exchanges take place between parts of the graph.
    fn new(stream: &Stream, links: &Arc<Links>) -> Result<Option<Self>, Error> {
        let library = stream.library();
        let is_cuda = library.backend(stream.device())? == "cuda";
        if !is_cuda || links.stage.size() < 2 {
            return Ok(None);
        }
        let failure: Arc<Mutex<Option<Error>>> = Arc::default();
        let (told, links) = (Arc::clone(&failure), Arc::clone(links));
        let (rank, size) = (links.stage.rank().0, links.stage.size());
        let exchange = move |own: &[u8], all: &mut [u8]| {
            let counts = vec![own.len(); size as usize];
            let done = links.gather_parts(own, all, &counts);
            done.map_err(|error| *lock(&told) = Some(error)).is_ok()
        };
        let group = GraphGroup::new(library, (rank, size), Box::new(exchange));
        Ok(group.map(|group| Self { group, failure }))
    }

    /// The parts `(T, n)` of all ranks, each shaped like `mine`.
    fn gather(&self, stream: &Stream, mine: &Array, ranks: usize) -> Result<Vec<Array>, Error> {
        let all = self.group.all_gather(stream, mine)?;
        let [rows, columns] = mine.shape()[..] else {
            unreachable!("parts are matrices");
        };
        let part = |rank| stream.slice(&all, &[rank * rows, 0], &[(rank + 1) * rows, columns]);
        (0..ranks as i32).map(|rank| Ok(part(rank)?)).collect()
    }
}

/// An array whose values begin at a page.
#[derive(Debug)]
pub(super) struct Received {
    // Dropped in this order: no memory is freed while it is registered.
    _registration: Option<MemoryRegistration>,
    array: Array,
    /// Bytes before the first value.
    before: usize,
    /// Values.
    len: usize,
}

/// A gather whose exchange is still to take place.
#[derive(Debug)]
struct Pending {
    mine: Option<Array>,
    /// The other arrays that were submitted with it.
    submitted: Vec<Array>,
    /// Bytes of each rank's part.
    counts: Vec<usize>,
    dtype: Dtype,
}

impl Received {
    fn new(
        (stream, links): (&Stream, &Links),
        (len, dtype): (usize, Dtype),
    ) -> Result<Self, Error> {
        let bytes = (len * dtype.bytes()).next_multiple_of(ALIGNED);
        let n = (bytes + ALIGNED) / dtype.bytes();
        let zeros = vec![0; bytes + ALIGNED];
        let mut array = stream.array(&zeros, &[n as i32], dtype)?;
        // The driver moves the arrays of a device with memory of its own.
        if !stream.shares_memory()? {
            return Ok(Self {
                _registration: None,
                array,
                before: 0,
                len,
            });
        }
        let start = array.as_bytes()?.as_ptr().addr();
        let before = start.next_multiple_of(ALIGNED) - start;
        let is_registered = len * dtype.bytes() >= REGISTERED_MIN;
        let registration = is_registered.then(|| {
            // SAFETY: nothing reads a new array.
            let memory = unsafe { array.as_bytes_mut()? };
            // SAFETY: the array is dropped after it, and keeps its memory: MLX reuses none that
            // has a handle.
            let pages = unsafe { Pages::lent(&mut memory[before..before + bytes]) };
            Ok::<_, Error>(links.world.register_pages(&pages))
        });
        Ok(Self {
            _registration: registration.transpose()?.flatten(),
            array,
            before,
            len,
        })
    }

    /// Its values.
    ///
    /// # Safety
    /// As [`Array::as_bytes_mut`].
    pub(super) unsafe fn as_bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        let bytes = self.before..self.before + self.n_bytes();
        // SAFETY: the caller's promise.
        Ok(&mut unsafe { self.array.as_bytes_mut()? }[bytes])
    }

    /// As [`as_bytes_mut`](Self::as_bytes_mut), of values of `f32`.
    ///
    /// # Safety
    /// As [`Array::as_bytes_mut`].
    pub(super) unsafe fn as_f32_mut(&mut self) -> Result<&mut [f32], Error> {
        let first = self.before / Dtype::F32.bytes();
        let len = self.len;
        // SAFETY: the caller's promise.
        Ok(&mut unsafe { self.array.as_f32_mut()? }[first..first + len])
    }

    pub(super) fn n_bytes(&self) -> usize {
        self.len * self.array.dtype().bytes()
    }

    /// The values from `first` on, as many as `shape` has.
    pub(super) fn part(
        &self,
        stream: &Stream,
        first: usize,
        shape: [usize; 2],
    ) -> Result<Array, Error> {
        let start = self.before / self.array.dtype().bytes() + first;
        let stop = start + shape[0] * shape[1];
        let part = stream.slice(&self.array, &[start as i32], &[stop as i32])?;
        Ok(stream.reshape(&part, &shape.map(|n| n as i32))?)
    }
}

impl Receive {
    /// For the ranks of `links`, if there are others.
    pub(super) fn new(stream: &Stream, links: Option<&Arc<Links>>) -> Result<Self, Error> {
        let graph = links.map(|links| InGraph::new(stream, links));
        Ok(Self {
            graph: graph.transpose()?.flatten(),
            ..Self::default()
        })
    }

    /// Why an evaluation failed: an exchange within it, else what MLX says.
    pub(super) fn reason(&self, error: paceline_mlx::Error) -> Error {
        let graph = self.graph.as_ref();
        let failure = graph.and_then(|graph| lock(&graph.failure).take());
        failure.unwrap_or_else(|| error.into())
    }

    /// Memory of `len` values of this type; the last [`KEPT`] are kept.
    pub(super) fn memory(
        &mut self,
        of: (&Stream, &Links),
        (len, dtype): (usize, Dtype),
    ) -> Result<&mut Received, Error> {
        let fits = |kept: &Received| kept.len == len && kept.array.dtype() == dtype;
        if let Some(at) = self.kept.iter().position(fits) {
            return Ok(&mut self.kept[at]);
        }
        self.kept.truncate(KEPT - 1);
        self.kept.insert(0, Received::new(of, (len, dtype))?);
        Ok(&mut self.kept[0])
    }

    /// The residual `(rows, width)` that the stage before is still to send, in f32.
    pub(super) fn residual(
        &mut self,
        of: (&Stream, &Links),
        shape: [usize; 2],
    ) -> Result<Array, Error> {
        let len = shape[0] * shape[1];
        self.residual = Some(len);
        self.memory(of, (len, Dtype::F32))?.part(of.0, 0, shape)
    }

    /// Forgets the exchanges of a step that failed.
    pub(super) fn forget(&mut self) {
        (self.pending, self.residual) = (None, None);
    }
}

/// How bytes got to and from other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    InPlace,
    Converted,
    Staged,
}

impl Way {
    /// Of a residual that is `dtype` on this side and f32 on the wire.
    pub(super) fn of_residual(stream: &Stream, dtype: Dtype) -> Result<Self, Error> {
        let in_f32 = dtype == Dtype::F32;
        let way = if in_f32 {
            Self::InPlace
        } else {
            Self::Converted
        };
        Ok(way.on(stream)?)
    }

    /// The same of a device that may have memory of its own.
    fn on(self, stream: &Stream) -> Result<Self, paceline_mlx::Error> {
        Ok(if stream.shares_memory()? {
            self
        } else {
            Self::Staged
        })
    }
}

/// [`ExchangeBytes`] while it is counted.
#[derive(Debug, Default)]
pub(super) struct Tally([AtomicU64; 3]);

impl Tally {
    pub(super) fn add(&self, way: Way, bytes: usize) {
        self.0[way as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> ExchangeBytes {
        let [in_place, converted, staged] =
            [0, 1, 2].map(|way| Bytes(self.0[way].load(Ordering::Relaxed)));
        ExchangeBytes {
            in_place,
            converted,
            staged,
        }
    }
}

impl Step<'_> {
    /// Gathers the parts of all ranks of the stage, in `dtype`. `mine` is this rank's
    /// `(T, columns[rank])`, none for no columns. Returns the parts that are not empty, in rank
    /// order. Their values arrive when the step [settles](Self::settle).
    ///
    /// The parts read memory that the next exchange writes, so values made of them have to be
    /// evaluated before it. They are, as part of the next exchange's `mine`, of the residual or of
    /// the arrays that are set aside.
    pub(super) fn gather_columns(
        &mut self,
        links: &Links,
        mine: Option<&Array>,
        columns: &[usize],
        dtype: Dtype,
    ) -> Result<Vec<Array>, Error> {
        self.settle()?;
        let (stream, rows) = (self.parts.stream, self.batch.rows());
        let mine = mine.map(|mine| stream.astype(mine, dtype)).transpose()?;
        let is_even = columns.iter().all(|n| *n == columns[0]);
        if let (Some(graph), Some(mine), true) = (&self.parts.receive.graph, &mine, is_even) {
            let (model, own) = (self.parts.model, mine.n_bytes() as usize);
            let way = Way::InPlace.on(stream)?;
            model.exchanged.add(way, own * columns.len());
            return graph.gather(stream, mine, columns.len());
        }
        let others = std::iter::once(&self.residual).chain(self.aside());
        let submitted: Vec<Array> = others.chain(self.captured()).cloned().collect();
        let all = mine.iter().chain(&submitted);
        let watch = self.parts.watch;
        watch.during_part(rows, || stream.submit(all))?;
        let counts = columns.iter().map(|n| n * rows * dtype.bytes());
        let values = rows * columns.iter().sum::<usize>();
        let receive = &mut *self.parts.receive;
        receive.pending = Some(Pending {
            mine,
            submitted,
            counts: counts.collect(),
            dtype,
        });
        let all = receive.memory((stream, links), (values, dtype))?;
        let mut start = 0;
        let held = columns.iter().filter(|n| **n > 0);
        let parts = held.map(|n| {
            let part = all.part(stream, start, [rows, *n]);
            start += rows * n;
            part
        });
        parts.collect()
    }

    /// Receives the residual of the stage before, if that is still to be done.
    fn take_residual_in(&mut self) -> Result<(), Error> {
        let Some(len) = self.parts.receive.residual.take() else {
            return Ok(());
        };
        let (model, stream) = (self.parts.model, self.parts.stream);
        let links = model.links.as_ref().expect("a later stage has links");
        let rows = self
            .parts
            .receive
            .memory((stream, links), (len, Dtype::F32))?;
        // SAFETY: what read it was evaluated at the end of the step before.
        links.receive_residual(&model.shard, unsafe { rows.as_f32_mut()? })?;
        let way = Way::of_residual(stream, model.dtype)?;
        model.exchanged.add(way, rows.n_bytes());
        Ok(())
    }

    /// Waits for this rank's part of the last gather and exchanges it, if that is still to be done.
    /// Receives the residual of the stage before first. Every evaluation of a step's arrays begins
    /// with this.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        self.take_residual_in()?;
        let Some(pending) = self.parts.receive.pending.take() else {
            return Ok(());
        };
        let Pending {
            mine,
            submitted,
            counts,
            dtype,
        } = pending;
        let links = self.parts.model.links.as_ref();
        let links = links.expect("ranks that gather have links");
        let (stream, rows) = (self.parts.stream, self.batch.rows());
        let wait = || stream.wait(mine.iter().chain(&submitted));
        self.parts.watch.during(rows, wait)?;
        let (mine, way) = self.readable(mine)?;
        let own = mine.as_ref().map_or(Ok(&[][..]), Array::as_bytes)?;
        let values = counts.iter().sum::<usize>() / dtype.bytes();
        let all = self
            .parts
            .receive
            .memory((stream, links), (values, dtype))?;
        let received = all.n_bytes() - own.len();
        // SAFETY: it is read by what `mine` and the others were made of, just evaluated.
        links.gather_parts(own, unsafe { all.as_bytes_mut()? }, &counts)?;
        self.parts.model.exchanged.add(way, own.len());
        let way = Way::InPlace.on(stream)?;
        self.parts.model.exchanged.add(way, received);
        Ok(())
    }

    /// An array whose memory can be read as rows: `mine` itself where it is one run of them.
    fn readable(&self, mine: Option<Array>) -> Result<(Option<Array>, Way), Error> {
        let stream = self.parts.stream;
        match mine {
            Some(array) if !array.is_rows() => {
                let copy = stream.contiguous(&array)?;
                let rows = self.batch.rows();
                self.parts.watch.during(rows, || stream.eval([&copy]))?;
                Ok((Some(copy), Way::Staged))
            }
            mine => Ok((mine, Way::InPlace.on(stream)?)),
        }
    }
}
