//! Tasks: a computation and its inputs, and the partial results of its parts.
//!
//! A [`JobSpec`] is plain data that the parent sends to its workers. A [`PartialResult`] merges
//! with others of its kind in any order to the same bits.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::groupby::{GroupTable, Grouping};
use crate::hist::{BinCounts, Bins};
use crate::kmeans::{Assigned, Centroids};
use crate::reduce::{Op, State};
use crate::sort::{Gather, Scatter};
use crate::topk::{Pick, Top};
use crate::{BlockMap, Dtype, Error, InputFile, Leases, RowPartition};

/// Most rows of a part of a product: the second matrix is read once for each.
const PRODUCT_ROWS_MAX: u64 = 240;

/// A job, as its workers get it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    pub origin: InputSource,
    /// An expression that is computed of each row first ([`expr`](crate::expr)).
    pub map: Option<String>,
    /// A WGSL function that is computed of each row instead, by a graphics processor
    /// ([`device`](crate::device)). Its floats have no promised bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wgsl: Option<String>,
    /// Set where that function is one over blocks, which reads rows nearby.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<BlockMap>,
    pub kind: Kind,
}

/// Source of values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum InputSource {
    /// Files, which are taken row by row.
    Files(Vec<InputFile>),
    /// Random numbers from 0 to 1: any of them can be computed by itself.
    Random {
        seed: u64,
        /// Number of rows.
        samples: u64,
        /// Number of columns, 1 to 4.
        columns: u32,
    },
}

/// The computation over the values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Kind {
    /// A number of all values.
    Reduce(Op),
    /// Counts of values in intervals.
    Hist(Bins),
    /// The largest or smallest values and their rows.
    TopK(Pick),
    /// The nearest centroid of each row, and the sums of each centroid's rows.
    KMeans(Centroids),
    /// A reduction for each key: the first input has the keys, the second the values.
    GroupBy(Grouping),
    /// The same of pairs of rows with equal keys. Inputs are keys and values of the left table,
    /// then of the right one.
    Join(Grouping),
    /// The values, written to a `.npy` file that is there in full length.
    Write(PathBuf),
    /// The product of two matrices, written to a `.npy` file that is there in full length.
    Product(PathBuf),
    /// The first half of a sort.
    Scatter(Scatter),
    /// The second half of a sort: its rows are buckets. Without inputs, unless machines that share
    /// no folder read the input again.
    Gather(Gather),
}

/// The result of a part. Merging two has no rounding and no order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PartialResult {
    Reduce(Box<State>),
    Hist(BinCounts),
    TopK(Top),
    KMeans(Box<Assigned>),
    GroupBy(GroupTable),
    /// Values written by [`Kind::Write`], [`Kind::Product`] and [`Kind::Gather`].
    Written(u64),
    /// Rows of each bucket, from [`Kind::Scatter`].
    Scattered(Vec<u64>),
}

impl PartialResult {
    /// Adds another part's result.
    ///
    /// # Panics
    /// If it is of another kind of task.
    pub fn merge(&mut self, other: Self) {
        match (self, other) {
            (Self::Reduce(own), Self::Reduce(other)) => own.merge(&other),
            (Self::Hist(own), Self::Hist(other)) => own.merge(&other),
            (Self::TopK(own), Self::TopK(other)) => own.merge(other),
            (Self::KMeans(own), Self::KMeans(other)) => own.merge(&other),
            (Self::GroupBy(own), Self::GroupBy(other)) => own.merge(other),
            (Self::Written(own), Self::Written(other)) => *own += other,
            (Self::Scattered(own), Self::Scattered(other)) => {
                own.iter_mut()
                    .zip(other)
                    .for_each(|(own, other)| *own += other);
            }
            (own, other) => panic!("results of two tasks: {own:?} and {other:?}"),
        }
    }

    /// Cuts it into results that each fit a message: some, and the rest. All merge to it.
    pub(crate) fn into_pieces(self) -> (Vec<Self>, Self) {
        match self {
            Self::GroupBy(groups) => {
                let (pieces, rest) = groups.into_pieces();
                let pieces = pieces.into_iter().map(Self::GroupBy);
                (pieces.collect(), Self::GroupBy(rest))
            }
            other => (Vec::new(), other),
        }
    }

    /// Whether it counts each of `rows` rows in one of a sort's buckets; true for other results.
    pub(crate) fn counts(&self, kind: &Kind, rows: u64) -> bool {
        match (self, kind) {
            (Self::Scattered(counts), Kind::Scatter(scatter)) => {
                let sum = counts.iter().copied().fold(0, u64::saturating_add);
                sum == rows && counts.len() == scatter.buckets()
            }
            _ => true,
        }
    }

    /// Whether it is of this kind of task.
    pub(crate) const fn is_of(&self, kind: &Kind) -> bool {
        matches!(
            (self, kind),
            (Self::Reduce(_), Kind::Reduce(_))
                | (Self::Hist(_), Kind::Hist(_))
                | (Self::TopK(_), Kind::TopK(_))
                | (Self::KMeans(_), Kind::KMeans(_))
                | (Self::GroupBy(_), Kind::GroupBy(_) | Kind::Join(_))
                | (
                    Self::Written(_),
                    Kind::Write(_) | Kind::Product(_) | Kind::Gather(_)
                )
                | (Self::Scattered(_), Kind::Scatter(_))
        )
    }
}

impl Kind {
    /// The name used in errors.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Reduce(op) => op.name(),
            Self::Hist(_) => "hist",
            Self::TopK(_) => "topk",
            Self::KMeans(_) => "kmeans",
            Self::GroupBy(_) => "groupby",
            Self::Join(_) => "join",
            Self::Write(_) => "map",
            Self::Product(_) => "matmul",
            Self::Scatter(_) | Self::Gather(_) => "sort",
        }
    }

    /// Number of columns that it takes.
    pub(crate) const fn columns(&self) -> usize {
        match self {
            Self::Reduce(op) => op.inputs(),
            Self::GroupBy(_) | Self::Product(_) => 2,
            Self::Join(_) => 4,
            Self::Gather(gather) => (gather.scatter.machines > 0) as usize,
            _ => 1,
        }
    }
}

impl JobSpec {
    /// A job over files, without an expression.
    pub const fn of_files(inputs: Vec<InputFile>, kind: Kind) -> Self {
        Self {
            origin: InputSource::Files(inputs),
            map: None,
            wgsl: None,
            block: None,
            kind,
        }
    }

    /// The inputs; none for random numbers.
    pub fn inputs(&self) -> &[InputFile] {
        match &self.origin {
            InputSource::Files(inputs) => inputs,
            InputSource::Random { .. } => &[],
        }
    }

    /// Type of the values that are computed with: that of the first input, or of the expression.
    pub fn dtype(&self) -> Dtype {
        match self.inputs().first() {
            Some(input) if !self.is_mapped() => input.dtype,
            _ => Dtype::F64,
        }
    }

    /// Rows that are cut into parts.
    pub fn rows(&self) -> u64 {
        if let Kind::Gather(gather) = &self.kind {
            return gather.scatter.buckets() as u64;
        }
        match &self.origin {
            InputSource::Files(inputs) => inputs.first().map_or(0, |input| input.rows),
            InputSource::Random { samples, .. } => *samples,
        }
    }

    /// Fingerprint of all inputs.
    pub fn fingerprint(&self) -> Result<u64, Error> {
        let all = self.inputs().iter().map(InputFile::fingerprint);
        all.reduce(|a, b| Ok(a?.rotate_left(7) ^ b?))
            .unwrap_or(Ok(0))
    }

    /// Rows of its file that a part writes; none when it writes no file.
    pub(crate) fn rows_written_by(&self, part: RowPartition) -> std::ops::Range<u64> {
        let end = part.start + part.rows;
        match &self.kind {
            Kind::Write(_) | Kind::Product(_) => {
                let columns = self.columns_written();
                part.start * columns..end * columns
            }
            Kind::Gather(gather) => gather.starts[part.start as usize]..gather.starts[end as usize],
            _ => 0..0,
        }
    }

    /// Values that it writes for each row.
    pub(crate) fn columns_written(&self) -> u64 {
        match (&self.kind, self.inputs()) {
            (Kind::Product(_), [_, right]) => right.columns,
            _ => self.block.map_or(1, |block| block.columns),
        }
    }

    /// Type of the values that it writes.
    pub(crate) const fn dtype_written(&self) -> Dtype {
        match &self.kind {
            Kind::Gather(gather) => gather.scatter.dtype,
            _ => Dtype::F64,
        }
    }

    /// Rows of a part, when `threads` threads in all compute it.
    pub fn part_rows(&self, threads: u64) -> u64 {
        let rows = Leases::part_rows(self.rows(), threads);
        match &self.kind {
            Kind::Scatter(scatter) => scatter.part_rows,
            Kind::Gather(_) => 1,
            Kind::Product(_) => {
                let even = self.rows().div_ceil((4 * threads).max(1));
                even.clamp(1, PRODUCT_ROWS_MAX)
            }
            _ => match self.block {
                Some(block) => block.part_rows(self.rows(), threads),
                None => rows,
            },
        }
    }

    /// Bytes that are read.
    pub fn bytes(&self) -> u64 {
        if let Kind::Gather(gather) = &self.kind {
            return gather.bytes();
        }
        self.inputs().iter().map(InputFile::bytes).sum()
    }

    /// The result of no rows.
    pub fn empty(&self) -> PartialResult {
        match &self.kind {
            Kind::Reduce(op) => PartialResult::Reduce(Box::new(State::new(*op))),
            Kind::Hist(bins) => PartialResult::Hist(BinCounts::new(bins)),
            Kind::TopK(pick) => PartialResult::TopK(Top::new(*pick)),
            Kind::KMeans(centroids) => PartialResult::KMeans(Box::new(Assigned::new(centroids))),
            Kind::GroupBy(grouping) | Kind::Join(grouping) => {
                PartialResult::GroupBy(GroupTable::new(*grouping))
            }
            Kind::Write(_) | Kind::Product(_) | Kind::Gather(_) => PartialResult::Written(0),
            Kind::Scatter(scatter) => PartialResult::Scattered(vec![0; scatter.buckets()]),
        }
    }

    /// Whether something is computed of each row first.
    pub(crate) const fn is_mapped(&self) -> bool {
        self.map.is_some() || self.wgsl.is_some()
    }
}
