//! Gathers between the ranks of a stage, from and to the memory of MLX's arrays.
//!
//! ```text
//! mine (T, n_r)  --evaluated-->  its own memory  --group-->  received (sum of T n_r)  --> views
//! ```
//!
//! Values travel in the type of activations. They are copied for the exchange only where an array
//! is not one run of rows, or where the device has memory of its own. The driver copies that
//! memory. Such bytes are counted as *staged*. Residuals between stages are f32, since the stage
//! after may be another engine's. Residuals of other types are *converted*.

use std::sync::atomic::{AtomicU64, Ordering};

use paceline_base::Bytes;
use paceline_comm::{MemoryRegistration, Pages};
use paceline_mlx::{Array, Dtype, Stream};

use super::step::Step;
use crate::compute::ExchangeBytes;
use crate::{Error, Links};

/// Receive arrays that are kept for reuse. They are the inputs and outputs of both halves of a
/// layer, or a stage's residual and the sums of prefill and of decode.
const KEPT: usize = 4;

/// Shortest array that is registered with the ranks' groups. Devices copy shorter ones sooner than
/// they agree on a place. Apple's devices have some hundred registrations.
const REGISTERED_MIN: usize = 16 << 10;

/// Memory that other ranks' values are received in, as arrays. RDMA devices write there in place.
#[derive(Debug, Default)]
pub(super) struct Receive(Vec<Received>);

#[derive(Debug)]
struct Received {
    // Dropped in this order: no memory is freed while it is registered.
    _registration: Option<MemoryRegistration>,
    array: Array,
}

impl Received {
    fn new(stream: &Stream, links: &Links, mut array: Array) -> Result<Self, Error> {
        // The driver moves the arrays of a device with memory of its own.
        let is_registered = array.n_bytes() as usize >= REGISTERED_MIN && stream.shares_memory()?;
        let registration = match is_registered {
            true => {
                // SAFETY: nothing reads a new array.
                let memory = unsafe { array.as_bytes_mut()? };
                // SAFETY: the array is dropped after it, and keeps its memory: MLX reuses none that
                // has a handle.
                let pages = unsafe { Pages::lent(memory) };
                links.world.register_pages(&pages)
            }
            false => None,
        };
        Ok(Self {
            _registration: registration,
            array,
        })
    }
}

impl Receive {
    /// The array of this shape and type; the last [`KEPT`] are kept.
    pub(super) fn array(
        &mut self,
        (stream, links): (&Stream, &Links),
        shape: &[i32],
        dtype: Dtype,
    ) -> Result<&mut Array, Error> {
        let fits =
            |Received { array, .. }: &Received| array.shape() == shape && array.dtype() == dtype;
        if let Some(at) = self.0.iter().position(fits) {
            return Ok(&mut self.0[at].array);
        }
        let n = shape.iter().product::<i32>() as usize;
        let array = stream.array(&vec![0; n * dtype.bytes()], shape, dtype)?;
        self.0.truncate(KEPT - 1);
        self.0.insert(0, Received::new(stream, links, array)?);
        Ok(&mut self.0[0].array)
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
    /// order.
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
        let stream = self.parts.stream;
        let mine = mine.map(|mine| stream.astype(mine, dtype)).transpose()?;
        let rows = self.batch.rows();
        let all = mine.iter().chain([&self.residual]).chain(self.aside());
        self.parts.watch.during(rows, || stream.eval(all))?;
        let (mine, way) = self.readable(mine)?;
        let own = mine.as_ref().map_or(Ok(&[][..]), Array::as_bytes)?;
        let counts = columns.iter().map(|n| n * rows * dtype.bytes());
        let counts: Vec<usize> = counts.collect();
        let values = rows * columns.iter().sum::<usize>();
        let memory = (stream, links);
        let all = self.parts.receive.array(memory, &[values as i32], dtype)?;
        // SAFETY: it is read by what `mine` and the residual were made of, just evaluated.
        links.gather_parts(own, unsafe { all.as_bytes_mut()? }, &counts)?;
        let received = all.n_bytes() as usize - own.len();
        self.parts.model.exchanged.add(way, own.len());
        let way = Way::InPlace.on(stream)?;
        self.parts.model.exchanged.add(way, received);
        let mut start = 0;
        let held = columns.iter().filter(|n| **n > 0);
        let parts = held.map(|n| {
            let stop = start + (rows * n) as i32;
            let part = stream.slice(all, &[start], &[stop])?;
            start = stop;
            Ok::<_, Error>(stream.reshape(&part, &[rows as i32, *n as i32])?)
        });
        parts.collect()
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
