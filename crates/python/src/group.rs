//! A rank's handle, and the calls on it.
//!
//! Buffers are `(n,)` bytes of elements; Python handles shapes. Every call gets its deadline in
//! seconds from now and waits without the GIL.

use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::{
    Collective, Data, DataMut, Deadline, Dtype, ElementCounts, Error, Group, Reduce,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffer::{BufferView, dtype};
use crate::error::of_call;

/// Longest deadline: a caller that passes more than a year means "for ever". Sums of times stay far
/// from their limits.
const SECONDS_MAX: f64 = 3.2e7;

/// The instant `seconds` from now.
///
/// # Errors
/// `ValueError` if `seconds` is negative or not a number.
pub(crate) fn deadline(seconds: f64) -> PyResult<Deadline> {
    if seconds.is_nan() || seconds < 0.0 {
        let text = format!("the deadline is {seconds} s, expected 0 or more");
        return Err(PyValueError::new_err(text));
    }
    let left = Duration::from_secs_f64(seconds.min(SECONDS_MAX));
    Ok(Deadline::at(Instant::now() + left))
}

/// Decodes a reduction: 0 sum, 1 max, 2 min, 3 product.
fn reduce(number: u8) -> PyResult<Reduce> {
    const ALL: [Reduce; 4] = [Reduce::Sum, Reduce::Max, Reduce::Min, Reduce::Prod];
    let found = ALL.get(usize::from(number)).copied();
    found.ok_or_else(|| PyValueError::new_err(format!("no reduction has the number {number}")))
}

/// A rank's handle to a group. `paceline.distributed.Group` wraps it.
#[pyclass(frozen, name = "Group", module = "paceline._native")]
#[derive(Debug)]
pub(crate) struct PyGroup(Arc<dyn Group>);

impl PyGroup {
    pub(crate) fn new(group: Box<dyn Group>) -> Self {
        Self(group.into())
    }

    /// Makes a call without the GIL.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        seconds: f64,
        work: impl FnOnce(&dyn Group, Deadline) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let by = deadline(seconds)?;
        let done = py.detach(|| work(&*self.0, by));
        done.map_err(|error| of_call(py, error))
    }
}

#[pymethods]
impl PyGroup {
    fn rank(&self) -> u32 {
        self.0.rank().0
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    /// Bytes sent and received so far.
    fn traffic(&self) -> (u64, u64) {
        let traffic = self.0.traffic();
        (traffic.sent.0, traffic.received.0)
    }

    fn barrier(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        self.call(py, seconds, |group, by| group.run(Collective::Barrier, by))
    }

    /// Reduces `input` into `output`, which may be the same object.
    fn all_reduce(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        kind: (usize, u8),
        seconds: f64,
    ) -> PyResult<()> {
        let (dtype, op) = (dtype(kind.0)?, reduce(kind.1)?);
        let mut into = BufferView::writable(output, dtype)?;
        let from = match input.is(output) {
            true => None,
            false => Some(BufferView::of(input, dtype)?),
        };
        let own = from.as_ref().map(BufferView::bytes);
        let others: Vec<&BufferView> = from.iter().collect();
        let data = into.bytes_mut(&others)?;
        let len = own.map_or(data.len(), <[u8]>::len);
        same(len, data.len())?;
        self.call(py, seconds, move |group, by| {
            own.into_iter().for_each(|own| data.copy_from_slice(own));
            let data = DataMut::of_bytes(dtype, data);
            group.run(Collective::AllReduce { data, op }, by)
        })
    }

    /// Gathers `input`, of one length on all ranks, into `output`.
    fn all_gather(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        kind: usize,
        seconds: f64,
    ) -> PyResult<()> {
        self.pair(py, (input, output), kind, seconds, |input, output| {
            Collective::AllGather {
                counts: ElementCounts::Even(input.len()),
                input: Some(input),
                output,
            }
        })
    }

    /// Reduces `input` and gives this rank its part, the length of `output`.
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        kind: (usize, u8),
        seconds: f64,
    ) -> PyResult<()> {
        let op = reduce(kind.1)?;
        self.pair(py, (input, output), kind.0, seconds, |input, output| {
            Collective::ReduceScatter {
                counts: ElementCounts::Even(output.len()),
                input,
                output,
                op,
            }
        })
    }

    /// Sends each rank its part of `input` and receives one from each. Parts have one length, or
    /// the lengths in `splits`: elements to each rank, and from each.
    #[pyo3(signature = (input, output, kind, seconds, splits=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        kind: usize,
        seconds: f64,
        splits: Option<(Vec<usize>, Vec<usize>)>,
    ) -> PyResult<()> {
        let dtype = dtype(kind)?;
        let from = BufferView::of(input, dtype)?;
        let mut into = BufferView::writable(output, dtype)?;
        let output = into.bytes_mut(&[&from])?;
        let input = Data::of_bytes(dtype, from.bytes());
        self.call(py, seconds, |group, by| {
            let each = ElementCounts::Even(input.len() / group.size() as usize);
            let given = splits.as_ref();
            let call = Collective::AllToAll {
                input,
                output: DataMut::of_bytes(dtype, output),
                sends: given.map_or(each, |(sends, _)| ElementCounts::Each(sends)),
                receives: given.map_or(each, |(_, receives)| ElementCounts::Each(receives)),
            };
            group.run(call, by)
        })
    }

    /// Overwrites `data` with the data of `root`.
    fn broadcast(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        root: u32,
        kind: usize,
        seconds: f64,
    ) -> PyResult<()> {
        let dtype = dtype(kind)?;
        let mut memory = BufferView::writable(data, dtype)?;
        let bytes = memory.bytes_mut(&[])?;
        self.call(py, seconds, move |group, by| {
            let data = DataMut::of_bytes(dtype, bytes);
            let root = Rank(root);
            group.run(Collective::Broadcast { data, root }, by)
        })
    }

    fn send(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        place: (u32, u32),
        kind: usize,
        seconds: f64,
    ) -> PyResult<()> {
        let dtype = dtype(kind)?;
        let memory = BufferView::of(data, dtype)?;
        let bytes = memory.bytes();
        self.call(py, seconds, move |group, by| {
            let (to, tag) = place;
            group.send_data(Data::of_bytes(dtype, bytes), Rank(to), tag, by)
        })
    }

    fn recv(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        place: (u32, u32),
        kind: usize,
        seconds: f64,
    ) -> PyResult<()> {
        let dtype = dtype(kind)?;
        let mut memory = BufferView::writable(data, dtype)?;
        let bytes = memory.bytes_mut(&[])?;
        self.call(py, seconds, move |group, by| {
            let (from, tag) = place;
            group.recv_data(DataMut::of_bytes(dtype, bytes), Rank(from), tag, by)
        })
    }

    /// Splits off the group of all ranks that pass this `color`, numbered by `key`.
    fn split(&self, py: Python<'_>, color: u32, key: u32, seconds: f64) -> PyResult<Self> {
        let part = self.call(py, seconds, |group, by| group.split(color, key, by))?;
        Ok(Self::new(part))
    }
}

impl PyGroup {
    /// Runs the collective that `make` builds from an input and an output.
    fn pair(
        &self,
        py: Python<'_>,
        buffers: (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
        kind: usize,
        seconds: f64,
        make: impl for<'a> FnOnce(Data<'a>, DataMut<'a>) -> Collective<'a> + Send,
    ) -> PyResult<()> {
        let dtype: Dtype = dtype(kind)?;
        let from = BufferView::of(buffers.0, dtype)?;
        let mut into = BufferView::writable(buffers.1, dtype)?;
        let output = into.bytes_mut(&[&from])?;
        let input = from.bytes();
        self.call(py, seconds, move |group, by| {
            let call = make(
                Data::of_bytes(dtype, input),
                DataMut::of_bytes(dtype, output),
            );
            group.run(call, by)
        })
    }
}

fn same(input: usize, output: usize) -> PyResult<()> {
    if input == output {
        return Ok(());
    }
    let text = format!("the output has {output} bytes, the input {input}");
    Err(PyValueError::new_err(text))
}
