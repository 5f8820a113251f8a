//! Jobs for programs: results with their texts, and figures of the run.
//!
//! [`Runs`] runs jobs on one [`JobWorkers`] one after the other, with an optional journal, and
//! counts the bytes that they read. [`Columns`] makes tasks of files. Each result serialises to the
//! fields of its JSON object and has a text of lines.

mod results;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

use crate::clusters::{self, Clusters};
use crate::expr::COLUMNS;
use crate::groupby::Grouping;
use crate::hist::Bins;
use crate::kmeans::Centroids;
use crate::reduce::Op;
use crate::sort::{Sort, Sorted};
use crate::topk::Pick;
use crate::{
    BlockMap, DeviceChoice, Dtype, Error, FileSink, InputFile, InputSource, JobProgress, JobSpec,
    JobWorkers, Journal, Kind, PartialResult, ResultValue,
};

pub use results::{Estimate, Grouped, Histogram, ReductionResult, TopValues};

/// Most bytes of a file with a WGSL function that are read: more are refused by their number.
const FUNCTION_BYTES_MAX: u64 = 1 << 20;

/// Receives the progress of jobs, one job after the other.
pub trait Watcher {
    fn begin(&mut self, task: &JobSpec);

    /// Progress of the latest job.
    fn on_progress(&mut self, progress: JobProgress);

    /// The job that began last is over, well or not.
    fn end(&mut self);
}

/// Inputs that are taken value by value, and what is computed of each row first.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// Files of the same length.
    pub inputs: Vec<InputFile>,
    /// An expression of each row.
    pub map: Option<String>,
    /// A WGSL function of each row.
    pub wgsl: Option<String>,
    /// How that function reads rows nearby. The inputs are then not flat.
    pub block: Option<BlockMap>,
}

impl Columns {
    /// A task over them.
    pub fn task(&self, kind: Kind) -> JobSpec {
        let mut task = JobSpec::of_files(self.inputs.clone(), kind);
        task.map.clone_from(&self.map);
        task.wgsl.clone_from(&self.wgsl);
        task.block = self.block;
        task
    }

    /// Type of the values that are computed with.
    pub fn dtype(&self) -> Dtype {
        self.task(Kind::Reduce(Op::Count)).dtype()
    }

    /// The text of a file with a WGSL function.
    pub fn function(path: &Path) -> Result<String, Error> {
        let wrong = |source| Error::file("read", path, source);
        let file = File::open(path).map_err(wrong)?;
        let mut text = String::new();
        let read = file.take(FUNCTION_BYTES_MAX).read_to_string(&mut text);
        read.map_err(wrong)?;
        Ok(text)
    }

    /// The task that finds the best of them, which `k` and `smallest` choose.
    pub fn best(&self, k: u32, smallest: bool) -> JobSpec {
        let mut task = self.task(Kind::Reduce(Op::Count));
        task.kind = Kind::TopK(Pick {
            k,
            largest: !smallest,
            dtype: task.dtype(),
        });
        task
    }
}

/// The task that reduces `inputs`, keys and values, by `op` for each key.
pub fn grouped(inputs: [InputFile; 2], op: Op) -> JobSpec {
    let grouping = Grouping {
        op,
        keys: inputs[0].dtype,
        values: inputs[1].dtype,
    };
    JobSpec::of_files(inputs.into(), Kind::GroupBy(grouping))
}

/// The task that reduces by `op`, for each key, an expression of all pairs of rows with that key.
/// Its `x` is the left value, `y` the right one. `inputs` are keys and values of the left table,
/// then of the right one.
pub fn joined(inputs: [InputFile; 4], op: Op, pair: String) -> JobSpec {
    let grouping = Grouping {
        op,
        keys: inputs[0].dtype,
        values: Dtype::F64,
    };
    let mut task = JobSpec::of_files(inputs.into(), Kind::Join(grouping));
    task.map = Some(pair);
    task
}

/// The task that estimates the mean of an expression over `samples` random points of `seed`.
pub fn random(expr: String, seed: u64, samples: u64) -> JobSpec {
    JobSpec {
        origin: InputSource::Random {
            seed,
            samples,
            columns: COLUMNS.len() as u32,
        },
        map: Some(expr),
        wgsl: None,
        block: None,
        kind: Kind::Reduce(Op::Var),
    }
}

/// The file next to `out` that holds a result until it is whole.
fn part_of(out: &Path) -> PathBuf {
    let mut part = out.to_owned().into_os_string();
    part.push(".part");
    part.into()
}

/// A file of an expression's results that is to be written.
#[derive(Clone, Debug)]
pub struct Writing {
    task: JobSpec,
    part: PathBuf,
    out: PathBuf,
    rows: u64,
}

impl Writing {
    /// Creates `OUT.part` next to `out`, unless `journal` has a job to resume.
    ///
    /// # Errors
    /// [`Error::PartGone`], [`Error::File`].
    pub fn new(columns: &Columns, out: PathBuf, journal: Option<&Path>) -> Result<Self, Error> {
        let task = columns.task(Kind::Write(part_of(&out)));
        Self::of(task, out, journal)
    }

    fn of(task: JobSpec, out: PathBuf, journal: Option<&Path>) -> Result<Self, Error> {
        let part = part_of(&out);
        let goes_on = journal.is_some_and(Path::exists);
        if goes_on && !part.exists() {
            return Err(Error::PartGone { path: part });
        }
        let rows = task.rows();
        if !goes_on {
            let shape = [rows, task.columns_written()];
            let has_columns = task.block.is_some() || matches!(task.kind, Kind::Product(_));
            let axes = if has_columns { 2 } else { 1 };
            FileSink::create(&part, Dtype::F64, &shape[..axes])?;
        }
        Ok(Self {
            task,
            part,
            out,
            rows,
        })
    }

    /// The same for the product of two matrices.
    pub fn product(
        matrices: [InputFile; 2],
        out: PathBuf,
        journal: Option<&Path>,
    ) -> Result<Self, Error> {
        let part = part_of(&out);
        let task = JobSpec::of_files(matrices.into(), Kind::Product(part));
        Self::of(task, out, journal)
    }

    pub const fn rows(&self) -> u64 {
        self.rows
    }
}

/// Workers that run jobs, and the totals so far.
#[expect(
    missing_debug_implementations,
    reason = "what hears how jobs go says nothing"
)]
pub struct Runs<'a> {
    crew: JobWorkers,
    device: DeviceChoice,
    journal: Option<PathBuf>,
    watcher: &'a mut dyn Watcher,
    start: Instant,
    bytes: u64,
}

impl<'a> Runs<'a> {
    /// Jobs on `workers`, which started at `start` with this choice of device. `journal` is the
    /// file for finished parts of a job.
    pub fn new(
        (crew, start): (JobWorkers, Instant),
        device: DeviceChoice,
        journal: Option<&Path>,
        watcher: &'a mut dyn Watcher,
    ) -> Self {
        Self {
            crew,
            device,
            journal: journal.map(Path::to_owned),
            watcher,
            start,
            bytes: 0,
        }
    }

    /// Sorts a file.
    pub fn sort(&mut self, sort: &Sort) -> Result<Sorted, Error> {
        self.bytes += sort.input.bytes();
        let (mut half, watcher) = (None, &mut *self.watcher);
        let sorted = sort.run(&mut self.crew, &mut |task, progress| {
            let is_second = matches!(task.kind, Kind::Gather(_));
            if half != Some(is_second) {
                half = Some(is_second);
                watcher.begin(task);
            }
            watcher.on_progress(progress);
        });
        self.watcher.end();
        sorted
    }

    /// Runs a job.
    pub fn run(&mut self, task: &JobSpec) -> Result<PartialResult, Error> {
        self.watcher.begin(task);
        self.bytes += task.bytes();
        let ran = self.run_watched(task);
        self.watcher.end();
        ran
    }

    fn run_watched(&mut self, task: &JobSpec) -> Result<PartialResult, Error> {
        let watcher = &mut *self.watcher;
        let mut hear = |progress| watcher.on_progress(progress);
        let Some(path) = &self.journal else {
            return self.crew.run(task, None, &mut hear);
        };
        task.prepare()?; // a wrong task leaves no file
        let part_rows = task.part_rows(self.crew.threads());
        let mut journal = Journal::open(path, task, part_rows)?;
        let partial = self.crew.run(task, Some(&mut journal), &mut hear)?;
        journal.remove()?;
        Ok(partial)
    }

    /// Runs a reduction.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run); [`Error::Empty`].
    ///
    /// # Panics
    /// If the task is no reduction.
    pub fn number(&mut self, task: &JobSpec) -> Result<ResultValue, Error> {
        match self.run(task)? {
            PartialResult::Reduce(state) => state.value(task.dtype()),
            other => unreachable!("a reduction gives {other:?}"),
        }
    }

    /// Left and right edges of bins for columns that have to be read for them. These are the least
    /// and greatest value, or half a unit around a sole one as NumPy has it. Two passes.
    ///
    /// # Errors
    /// The errors of [`number`](Self::number); [`Error::Edges`] of values with NaN or infinities.
    pub fn bounds(&mut self, columns: &Columns) -> Result<(f64, f64), Error> {
        let mut of = |op| self.number(&columns.task(Kind::Reduce(op)));
        let (low, high) = (of(Op::Min)?.as_f64(), of(Op::Max)?.as_f64());
        if !(high - low).is_finite() {
            return Err(Error::Edges { low, high });
        }
        Ok(match low == high {
            true => around(low),
            false => (low, high),
        })
    }

    /// Runs a histogram.
    ///
    /// # Panics
    /// If the task is none of `bins`.
    pub fn histogram(&mut self, task: &JobSpec, bins: &Bins) -> Result<Histogram, Error> {
        match self.run(task)? {
            PartialResult::Hist(counts) => Ok(Histogram::new(&counts, bins)),
            other => unreachable!("a histogram gives {other:?}"),
        }
    }

    /// Runs a task of [`Columns::best`].
    ///
    /// # Panics
    /// If the task is another.
    pub fn best(&mut self, task: &JobSpec) -> Result<TopValues, Error> {
        match self.run(task)? {
            PartialResult::TopK(top) => Ok(TopValues::new(top)),
            other => unreachable!("the best values are {other:?}"),
        }
    }

    /// Runs a task of [`grouped`], which reduces by `op`.
    ///
    /// # Panics
    /// If the task is another.
    pub fn grouped(&mut self, task: &JobSpec, op: Op) -> Result<Grouped, Error> {
        match self.run(task)? {
            PartialResult::GroupBy(groups) => Ok(Grouped::new(&groups, op)),
            other => unreachable!("groups are {other:?}"),
        }
    }

    /// Runs a task of [`random`] with this seed and number of samples.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run); [`Error::Empty`].
    ///
    /// # Panics
    /// If the task is another.
    pub fn estimate(&mut self, task: &JobSpec, seed: u64, samples: u64) -> Result<Estimate, Error> {
        let PartialResult::Reduce(state) = self.run(task)? else {
            unreachable!("a reduction");
        };
        Ok(Estimate {
            value: state.mean(),
            std_error: (state.value(Dtype::F64)?.as_f64() / samples as f64).sqrt(),
            seed,
        })
    }

    /// Clusters of rows, and their centroids as another run begins with them; as of
    /// [`clusters::iterate`].
    pub fn clusters(
        &mut self,
        input: &InputFile,
        first: Centroids,
        iterations: u32,
    ) -> Result<(Clusters, Centroids), Error> {
        clusters::iterate(input, first, iterations, |task| self.run(task))
    }

    /// Writes a file. It has its name only once it is whole; without a journal, nothing is left of
    /// a job that failed.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run); [`Error::Rename`].
    pub fn write(&mut self, writing: &Writing) -> Result<(), Error> {
        let Writing {
            task, part, out, ..
        } = writing;
        let ran = self.run(task);
        if ran.is_err() && self.journal.is_none() {
            let _ = std::fs::remove_file(part); // the error says more than that it stays
        }
        ran?;
        std::fs::rename(part, out).map_err(|source| Error::Rename {
            from: part.clone(),
            to: out.clone(),
            source,
        })
    }

    /// The figures of all jobs together, over `rows` rows. `limit` measures the gigabytes a second
    /// that this machine reads, given the jobs' bytes and threads.
    ///
    /// # Errors
    /// The first error of `limit`.
    pub fn end<E>(
        self,
        rows: u64,
        limit: impl FnOnce(u64, u64) -> Result<Option<f64>, E>,
    ) -> Result<Figures, E> {
        let (seconds, crew) = (self.start.elapsed().as_secs_f64(), self.crew);
        let (lost, threads, nodes) = (crew.lost(), crew.threads(), crew.nodes());
        let device = match (crew.is_processes(), crew.device()) {
            (false, None) => "cpu".to_owned(),
            (false, Some(label)) => label.to_owned(),
            (true, _) => self.device.name().to_owned(),
        };
        let (device_parts, node_threads) = (crew.device_parts(), crew.node_threads());
        drop(crew); // the machine is measured without the workers
        Ok(Figures {
            rows,
            gb_s: self.bytes as f64 / seconds / 1e9,
            machine_gb_s: limit(self.bytes, threads)?,
            seconds,
            nodes,
            threads: all_the_same(&node_threads),
            node_threads,
            device,
            device_parts,
            lost,
        })
    }
}

/// Figures that every job's JSON object has.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    pub rows: u64,
    /// Read rate of all nodes together.
    pub gb_s: f64,
    /// Memory read rate of this machine; `None` for jobs too short to compare.
    pub machine_gb_s: Option<f64>,
    /// From the workers' start to their end.
    pub seconds: f64,
    /// Processes that computed.
    pub nodes: u32,
    /// Threads of each node; `None` where they differ or a node has not said it.
    pub threads: Option<usize>,
    /// Threads of each node, this machine's first, or in the order of the hosts; `None` of one that
    /// has not said it.
    pub node_threads: Vec<Option<usize>>,
    /// The device: cpu, or its name; of several nodes, the choice that they were given.
    pub device: String,
    /// Parts with at least one block computed by a device.
    pub device_parts: u64,
    /// Workers that were lost on the way, or left out because of their inputs.
    pub lost: u32,
}

impl Figures {
    /// A JSON object of the fields of `result` and of these figures.
    ///
    /// # Errors
    /// A result that is no object.
    pub fn json<T: Serialize>(&self, result: &T) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct Both<'a, T> {
            #[serde(flatten)]
            result: &'a T,
            #[serde(flatten)]
            figures: &'a Figures,
        }
        serde_json::to_string(&Both {
            result,
            figures: self,
        })
    }

    /// The line about them.
    pub fn line(&self) -> String {
        let limit = self.machine_gb_s.map_or(String::new(), |limit| {
            format!(" (memory of this machine: {limit:.1} GB/s)")
        });
        let Self {
            rows,
            seconds,
            gb_s,
            ..
        } = self;
        // Jobs that draw numbers read next to nothing.
        let read = match *gb_s < 0.005 {
            true => String::new(),
            false => format!(", {gb_s:.2} GB/s{limit}"),
        };
        format!("{rows} rows in {seconds:.2} s{read}")
    }
}

/// The number that all nodes have said.
fn all_the_same(threads: &[Option<usize>]) -> Option<usize> {
    let first = threads.first().copied().flatten()?;
    threads.iter().all(|it| *it == Some(first)).then_some(first)
}

/// Edges for equal values: a half to each side, as NumPy has it. From 2^52 on a half is lost or
/// gives equal edges; there the sides are as wide as [`BINS_MAX`](crate::hist::BINS_MAX) bins need.
fn around(value: f64) -> (f64, f64) {
    const EXACT: f64 = (1u64 << 52) as f64;
    let side = match value.abs() < EXACT {
        true => 0.5,
        false => value.abs() / (1u64 << 32) as f64,
    };
    ((value - side).max(f64::MIN), (value + side).min(f64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::npy;

    struct Silent;

    impl Watcher for Silent {
        fn begin(&mut self, _: &JobSpec) {}
        fn on_progress(&mut self, _: JobProgress) {}
        fn end(&mut self) {}
    }

    #[test]
    fn equal_values_have_edges() {
        assert_eq!(around(5.0), (4.5, 5.5));
        for value in [2f64.powi(53), -1e300, f64::MAX, f64::MIN] {
            let (low, high) = around(value);
            let bins = Bins::new(low, high, crate::hist::BINS_MAX).unwrap();
            assert!(bins.edges().is_sorted_by(|a, b| a < b), "{value}");
        }
    }

    #[test]
    fn nan_is_counted_and_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.npy");
        let values = [1.0, f64::NAN, 3.0, 9.0, -f64::NAN];
        let mut bytes = npy::write(Dtype::F64, &[values.len() as u64]);
        bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        std::fs::write(&path, bytes).unwrap();
        let columns = Columns {
            inputs: vec![InputFile::npy(&path).unwrap().flat()],
            ..Columns::default()
        };
        let mut watcher = Silent;
        let crew = (JobWorkers::here(2), Instant::now());
        let mut runs = Runs::new(crew, DeviceChoice::Cpu, None, &mut watcher);

        let bins = Bins::new(0.0, 4.0, 2).unwrap();
        let task = columns.task(Kind::Hist(bins));
        let histogram = runs.histogram(&task, &bins).unwrap();
        assert_eq!((histogram.nan, &histogram.counts[..]), (2, &[1, 1][..]));
        let told = histogram.left_out().unwrap();
        assert_eq!(told, "in no bin: 2 NaN, 0 below, 1 above");
        let error = runs.bounds(&columns).unwrap_err().to_string();
        assert!(error.contains("from NaN to NaN"), "{error}");

        for smallest in [false, true] {
            let best = runs.best(&columns.best(2, smallest)).unwrap();
            assert_eq!((best.values.len(), best.nan), (2, 2));
            assert_eq!(best.left_out().unwrap(), "left out: 2 NaN");
        }
        let whole = Histogram {
            counts: vec![1],
            edges: vec![0.0, 1.0],
            below: 0,
            above: 0,
            nan: 0,
        };
        assert_eq!(whole.left_out(), None);
    }
}
