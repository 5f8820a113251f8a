//! A task with its inputs open: computes parts, block by block, on the CPU or on a device.
//!
//! Threads share one [`PartComputer`]; each has a [`Scratch`]. A block goes to the device where it
//! supports the task, else through the same functions on the CPU. Leases, merging and failures of
//! workers are not here but in [`JobWorkers`](crate::Crew).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use paceline_base::lock;

use crate::device::{self, BlockRows, Column, ComputeDevice, DeviceChoice, Lost};
use crate::expr::{ExprProgram, Registers};
use crate::join::{self, RightTable};
use crate::matmul;
use crate::parent::ParentConnection;
use crate::philox::Philox;
use crate::sink::{FileSink, Sink};
use crate::sort::{self, RangeStore, SpillStore};
use crate::task::{InputSource, JobSpec, Kind, PartialResult};
use crate::{
    BlockMap, Decoded, Dtype, Error, FileSource, InputFile, RowPartition, RowSource, Values,
};

/// Bytes that a thread reads at a time: with their decoded copy within a second-level cache.
const BLOCK_BYTES: u64 = 256 << 10;

/// Most inputs that are taken row by row.
const INPUTS_MAX: usize = crate::expr::COLUMNS.len();

impl JobSpec {
    /// Opens the inputs.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Changed`]; [`Error::Inputs`] and [`Error::Shapes`] when they do
    /// not fit the task; [`Error::Expression`].
    pub fn prepare(&self) -> Result<PartComputer, Error> {
        let program = self.check()?;
        let (sink, folder): (Option<Arc<dyn Sink>>, Option<&Path>) = match &self.kind {
            Kind::Write(path) | Kind::Product(path) => {
                (Some(Arc::new(FileSink::open(path)?)), None)
            }
            Kind::Gather(gather) => {
                let sink: Arc<dyn Sink> = Arc::new(FileSink::open(&gather.out)?);
                if gather.scatter.machines > 0 {
                    let folder = gather.out.parent().unwrap_or(Path::new("."));
                    let store = SpillStore::Ranges(RangeStore::new(folder)?);
                    return self.open(program, Some(sink), store);
                }
                (Some(sink), gather.scatter.folder.as_deref())
            }
            Kind::Scatter(scatter) => (None, scatter.folder.as_deref()),
            _ => (None, None),
        };
        self.open(program, sink, SpillStore::new(folder))
    }

    /// Opens the inputs, but no file that is written: that is done at the other end of `parent`.
    pub(crate) fn prepare_over(&self, line: &Arc<ParentConnection>) -> Result<PartComputer, Error> {
        let program = self.check()?;
        let sink: Arc<dyn Sink> = Arc::<ParentConnection>::clone(line);
        let store = match &self.kind {
            Kind::Gather(_) => SpillStore::Ranges(RangeStore::new(&spill_folder())?),
            _ => SpillStore::new(None),
        };
        self.open(program, Some(sink), store)
    }

    fn open(
        &self,
        program: Option<ExprProgram>,
        sink: Option<Arc<dyn Sink>>,
        store: SpillStore,
    ) -> Result<PartComputer, Error> {
        let sources = self.inputs().iter().map(InputFile::open);
        Ok(PartComputer {
            task: self.clone(),
            sources: sources.collect::<Result<_, _>>()?,
            program,
            sink,
            store: Arc::new(store),
            right: Mutex::default(),
        })
    }

    /// Whether the inputs fit the task; the program of its expression.
    fn check(&self) -> Result<Option<ExprProgram>, Error> {
        let given = match &self.origin {
            InputSource::Files(inputs) => inputs.len(),
            InputSource::Random { columns, .. } => *columns as usize,
        };
        self.check_mapped()?;
        let is_join = matches!(self.kind, Kind::Join(_));
        let columns = if is_join { join::COLUMNS } else { given };
        let program = self
            .map
            .as_deref()
            .map(|text| ExprProgram::parse(text, columns));
        let expected = match self.is_mapped() && !is_join {
            // The expression is one column, from any number of inputs.
            true => given.clamp(1, INPUTS_MAX),
            false => self.kind.columns(),
        };
        if given != expected {
            return Err(Error::Inputs {
                task: self.kind.name(),
                expected,
                got: given,
            });
        }
        self.check_shapes()?;
        match (&self.wgsl, &self.block) {
            (None, _) => {}
            (Some(text), None) => device::check_function(text, given)?,
            (Some(text), Some(block)) => {
                let known = BlockMap::new(text, self.inputs(), block.halo, block.steps)?;
                if known != *block {
                    return Err(Error::Function {
                        task: self.kind.name(),
                    });
                }
            }
        }
        if let Kind::GroupBy(grouping) | Kind::Join(grouping) = &self.kind
            && !grouping.is_known()
        {
            return Err(Error::Grouping {
                op: grouping.op.name(),
                keys: grouping.keys,
                values: grouping.values,
            });
        }
        Ok(program.transpose()?)
    }

    fn check_mapped(&self) -> Result<(), Error> {
        let task = self.kind.name();
        let is_join = matches!(self.kind, Kind::Join(_)) && self.wgsl.is_none();
        if self.is_mapped() && !is_join && (self.kind.columns() != 1 || self.sorts()) {
            return Err(Error::Mapped { task });
        }
        let is_random = matches!(self.origin, InputSource::Random { .. });
        match &self.wgsl {
            Some(_) if self.map.is_some() || is_random => Err(Error::Function { task }),
            _ => Ok(()),
        }
    }

    const fn sorts(&self) -> bool {
        matches!(self.kind, Kind::Scatter(_) | Kind::Gather(_))
    }

    fn check_shapes(&self) -> Result<(), Error> {
        let [first, others @ ..] = self.inputs() else {
            return Ok(());
        };
        if let (Kind::Product(_), [second]) = (&self.kind, others) {
            return match second.rows == first.columns {
                true => Ok(()),
                false => Err(Error::Inner {
                    path: second.path.clone(),
                    got: second.rows,
                    expected: first.columns,
                }),
            };
        }
        if let (Kind::Join(_), [values, right, right_values]) = (&self.kind, others) {
            return first
                .paired_with(values)
                .and(right.paired_with(right_values));
        }
        let differs = |input: &&InputFile| {
            let is_row_by_row = self.block.is_some();
            input.rows != first.rows || !is_row_by_row && input.columns != first.columns
        };
        match others.iter().find(differs) {
            None => Ok(()),
            Some(other) => Err(Error::Shapes {
                path: other.path.clone(),
                got: other.rows.saturating_mul(other.columns),
                expected: first.rows.saturating_mul(first.columns),
            }),
        }
    }
}

/// A task whose inputs are open. Threads share it.
#[derive(Debug)]
pub struct PartComputer {
    task: JobSpec,
    sources: Vec<FileSource>,
    program: Option<ExprProgram>,
    sink: Option<Arc<dyn Sink>>,
    store: Arc<SpillStore>,
    /// The right table of a join, read by the first part.
    right: Mutex<Option<Arc<RightTable>>>,
}

/// Scratch of a thread: a device, and buffers that it uses again for each block.
#[derive(Debug, Default)]
pub struct Scratch {
    device: Option<Arc<dyn ComputeDevice>>,
    choice: DeviceChoice,
    /// Whether the device has computed a block of the last part.
    on_device: bool,
    bytes: Vec<u8>,
    decoded: [Decoded; INPUTS_MAX],
    random: [Vec<f64>; INPUTS_MAX],
    nearest: [Vec<f64>; INPUTS_MAX],
    mapped: Vec<f64>,
    registers: Registers,
}

impl Scratch {
    /// Scratch of a thread with an optional device.
    pub fn on(device: Option<Arc<dyn ComputeDevice>>, choice: DeviceChoice) -> Self {
        Self {
            device,
            choice,
            ..Self::default()
        }
    }

    /// Whether the device has computed some of the last part.
    pub const fn on_device(&self) -> bool {
        self.on_device
    }
}

impl PartComputer {
    /// Keeps the parts of a sort in `store`, which both halves have.
    pub fn with_store(mut self, store: Arc<SpillStore>) -> Self {
        self.store = store;
        self
    }

    /// The destination of rows.
    pub(crate) fn into_sink(self) -> Option<Arc<dyn Sink>> {
        self.sink
    }

    /// Computes a part.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read or written.
    pub fn compute(
        &self,
        part: RowPartition,
        scratch: &mut Scratch,
    ) -> Result<PartialResult, Error> {
        scratch.on_device = false;
        if let Kind::Scatter(scatter) = &self.task.kind {
            let counts = sort::scatter(scatter, &self.sources[0], part, &self.store)?;
            return Ok(PartialResult::Scattered(counts));
        }
        if let (Kind::Gather(gather), Some(sink)) = (&self.task.kind, &self.sink) {
            let buckets = part.start..part.start + part.rows;
            let (sink, device) = (sink.as_ref(), scratch.device.as_deref());
            let from = (self.store.as_ref(), self.sources.first());
            let rows = buckets.map(|bucket| sort::gather(gather, bucket, from, sink, device));
            return Ok(PartialResult::Written(rows.sum::<Result<u64, Error>>()?));
        }
        if let (Kind::Product(_), Some(sink), Ok(sources)) =
            (&self.task.kind, &self.sink, self.sources[..].try_into())
        {
            let device = self.device_of(scratch);
            scratch.on_device = device.is_some();
            let written = matmul::compute(sources, part, sink.as_ref(), device.as_deref())?;
            return Ok(PartialResult::Written(written));
        }
        let mut partial = self.task.empty();
        let mut start = part.start;
        let end = part.start + part.rows;
        let device = self.device_of(scratch);
        let block_rows = self.block_rows(device.as_deref());
        while start < end {
            let rows = block_rows.min(end - start);
            self.block(
                start..start + rows,
                device.as_deref(),
                scratch,
                &mut partial,
            )?;
            start += rows;
        }
        Ok(partial)
    }

    /// The thread's device, if it computes this task.
    fn device_of(&self, scratch: &Scratch) -> Option<Arc<dyn ComputeDevice>> {
        let device = scratch.device.as_ref()?;
        let program = self.program.as_ref();
        let computes = scratch.choice.uses_device(&self.task, program)
            && program.is_none_or(|program| device.maps(program));
        computes.then(|| Arc::clone(device))
    }

    fn block_rows(&self, device: Option<&dyn ComputeDevice>) -> u64 {
        if let (Some(device), Some(block)) = (device, &self.task.block) {
            return block.block_rows(device, self.task.inputs());
        }
        if let Some(device) = device {
            let columns = self.task.inputs().iter().map(|input| input.columns).max();
            return device.rows_max(8 * columns.unwrap_or(1));
        }
        let widest = self.task.inputs().iter().map(InputFile::row_bytes).max();
        (BLOCK_BYTES / widest.unwrap_or(8).max(1)).max(1)
    }

    fn block(
        &self,
        rows: std::ops::Range<u64>,
        device: Option<&dyn ComputeDevice>,
        scratch: &mut Scratch,
        partial: &mut PartialResult,
    ) -> Result<(), Error> {
        if let (Kind::Join(_), PartialResult::GroupBy(groups), Some(program)) =
            (&self.task.kind, &mut *partial, &self.program)
        {
            scratch.on_device = device.is_some();
            let left = (&self.sources[0], &self.sources[1]);
            let right = self.right(device)?;
            return join::join(left, &rows, &right, program, groups, device);
        }
        if let (Some(device), Some(text), Some(block)) = (device, &self.task.wgsl, &self.task.block)
        {
            let values = block.compute(text, device, &self.sources, &rows)?;
            scratch.on_device = true;
            let values = [Values::Floats(&values)];
            return self.take(&values, rows.start * block.columns, partial);
        }
        if let Some(device) = device
            && self.block_on(device, &rows, scratch, partial)?
        {
            scratch.on_device = true;
            return Ok(());
        }
        if self.task.wgsl.is_some() {
            return Err(Error::Device {
                reason: "a WGSL function needs a graphics processor: --device gpu".to_owned(),
            });
        }
        let Scratch {
            bytes,
            decoded,
            random,
            nearest,
            mapped,
            registers,
            ..
        } = scratch;
        if self.count_raw(&rows, bytes, partial)? {
            return Ok(());
        }
        let mut values = Vec::with_capacity(INPUTS_MAX);
        for (source, decoded) in self.sources.iter().zip(decoded) {
            read(source, &rows, bytes)?;
            values.push(decoded.decode(source.dtype(), bytes));
        }
        if let InputSource::Random { seed, columns, .. } = self.task.origin {
            let all = Philox::new(seed);
            for (column, numbers) in (0..columns).zip(random) {
                numbers.clear();
                numbers.extend(rows.clone().map(|row| all.uniform(row, column)));
                values.push(Values::Floats(numbers));
            }
        }
        if let Some(program) = &self.program {
            let columns: Vec<&[f64]> = values
                .iter()
                .zip(nearest)
                .map(|(v, n)| v.nearest(n))
                .collect();
            mapped.clear();
            let columns_of_row = self.sources.first().map_or(1, RowSource::columns).max(1);
            program.run(&columns, rows.start * columns_of_row, registers, mapped);
            values = vec![Values::Floats(mapped)];
        }
        self.take(&values, rows.start, partial)
    }

    /// The right table of a join. One thread reads it, the others wait.
    fn right(&self, device: Option<&dyn ComputeDevice>) -> Result<Arc<RightTable>, Error> {
        let mut right = lock(&self.right);
        if right.is_none() {
            let read = RightTable::read(&self.sources[2], &self.sources[3], device)?;
            *right = Some(Arc::new(read));
        }
        Ok(Arc::clone(right.as_ref().expect("it was read")))
    }

    /// Gives a block to a device; whether that has computed it. A device that is lost has not, and
    /// this thread computes the block.
    fn block_on(
        &self,
        device: &dyn ComputeDevice,
        rows: &std::ops::Range<u64>,
        scratch: &mut Scratch,
        partial: &mut PartialResult,
    ) -> Result<bool, Error> {
        let Scratch { bytes, decoded, .. } = scratch;
        if let (PartialResult::Hist(counts), [source]) = (&mut *partial, &self.sources[..])
            && !self.task.is_mapped()
            && source.dtype() == Dtype::U32
            && counts.counts_raw()
        {
            read(source, rows, bytes)?;
            let counted = device.hist_raw(bytes, counts.bins().count);
            return Ok(counted.map(|counted| counts.take_counted(&counted)).is_ok());
        }
        if let (PartialResult::GroupBy(groups), [keys, values]) = (&mut *partial, &self.sources[..])
        {
            let keys = join::whole(keys, rows)?;
            let order = join::partitioned(&keys, Some(device));
            read(values, rows, bytes)?;
            let values = decoded[0].decode(values.dtype(), bytes);
            let keys: Vec<i128> = order.iter().map(|row| keys[*row as usize].into()).collect();
            let mut room = Decoded::default();
            groups.take(&Values::Wide(&keys), &room.ordered(&values, &order));
            return Ok(true);
        }
        let mut columns = Vec::with_capacity(INPUTS_MAX);
        for (source, decoded) in self.sources.iter().zip(decoded) {
            read(source, rows, bytes)?;
            match decoded.decode(source.dtype(), bytes) {
                Values::Floats(values) => columns.push(Column::Values(values)),
                Values::Wide(_) => return Ok(false),
            }
        }
        if let InputSource::Random {
            seed, columns: n, ..
        } = self.task.origin
        {
            columns.extend((0..n).map(|dimension| Column::Random { seed, dimension }));
        }
        if let Some(text) = &self.task.wgsl {
            let mapped = function(device, text, &columns)?;
            self.take(&[Values::Floats(&mapped)], rows.start, partial)?;
            return Ok(true);
        }
        let is_wide = self.sources.iter().any(|source| source.columns() != 1);
        let takes_rows = matches!(partial, PartialResult::KMeans(_)) && self.program.is_none();
        if is_wide && !takes_rows {
            return Ok(false);
        }
        let block = BlockRows {
            count: rows.end - rows.start,
            first: rows.start,
            columns: &columns,
            program: self.program.as_ref(),
        };
        match device::take(device, &block, &self.task, partial) {
            Ok(true) => return Ok(true),
            Ok(false) if self.program.is_some() => {}
            Ok(false) | Err(Lost(_)) => return Ok(false),
        }
        let Ok(mapped) = device.values(&block) else {
            return Ok(false);
        };
        self.take(&[Values::Floats(&mapped)], rows.start, partial)?;
        Ok(true)
    }

    /// Adds the values of a block to `partial`; `first` is the number of its first row.
    fn take(
        &self,
        values: &[Values<'_>],
        first: u64,
        partial: &mut PartialResult,
    ) -> Result<(), Error> {
        match partial {
            PartialResult::Reduce(state) => state.take(values, self.task.dtype()),
            PartialResult::Hist(counts) => counts.take(&values[0]),
            PartialResult::TopK(top) => top.take(&values[0], first),
            PartialResult::GroupBy(groups) => groups.take(&values[0], &values[1]),
            PartialResult::KMeans(assigned) => match &self.task.kind {
                Kind::KMeans(centroids) => assigned.take(&values[0], centroids),
                _ => unreachable!("a partial is made by its task"),
            },
            PartialResult::Written(count) => {
                let sink = self.sink.as_ref().expect("it is open");
                *count += sink.write(first, &values[0])?;
            }
            PartialResult::Scattered(_) => unreachable!("parts of a sort have no blocks"),
        }
        Ok(())
    }

    /// Counts values of a histogram without decoding them, where that is the same; whether it was.
    fn count_raw(
        &self,
        rows: &std::ops::Range<u64>,
        bytes: &mut Vec<u8>,
        partial: &mut PartialResult,
    ) -> Result<bool, Error> {
        let (PartialResult::Hist(counts), None, [source]) =
            (partial, &self.program, &self.sources[..])
        else {
            return Ok(false);
        };
        if source.dtype() != Dtype::U32 || !counts.counts_raw() {
            return Ok(false);
        }
        read(source, rows, bytes)?;
        counts.take_raw(bytes);
        Ok(true)
    }
}

/// Folder for the keys of a machine that shares none with its parent: that for temporary files, but
/// `/tmp` is memory on many systems.
fn spill_folder() -> PathBuf {
    let large = Path::new("/var/tmp");
    match std::env::temp_dir() {
        folder if folder == Path::new("/tmp") && large.is_dir() => large.to_owned(),
        folder => folder,
    }
}

/// A user's function of columns, which nothing but the device computes.
fn function(
    device: &dyn ComputeDevice,
    text: &str,
    columns: &[Column<'_>],
) -> Result<Vec<f64>, Error> {
    let values = columns.iter().filter_map(|column| match column {
        Column::Values(values) => Some(*values),
        Column::Random { .. } => None,
    });
    let values: Vec<&[f64]> = values.collect();
    let computed = device.function(text, &values);
    computed.map_err(|Lost(reason)| Error::Device { reason })
}

fn read(
    source: &FileSource,
    rows: &std::ops::Range<u64>,
    bytes: &mut Vec<u8>,
) -> Result<(), Error> {
    let row_bytes = source.columns() * source.dtype().bytes() as u64;
    bytes.resize(((rows.end - rows.start) * row_bytes) as usize, 0);
    source.read(rows.clone(), bytes)
}
