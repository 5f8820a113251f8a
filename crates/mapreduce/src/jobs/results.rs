//! Results of jobs: fields of their JSON objects, and texts of a line an item.

use std::fmt::Display;

use serde::Serialize;

use crate::groupby::GroupTable;
use crate::hist::{BinCounts, Bins};
use crate::reduce::Op;
use crate::topk::Top;
use crate::{Dtype, ResultValue};

/// A reduction's result.
#[derive(Clone, Debug, Serialize)]
pub struct ReductionResult {
    pub op: &'static str,
    pub value: ResultValue,
    /// Type of the values that were reduced.
    pub dtype: Dtype,
}

/// Counts of values in intervals.
#[derive(Clone, Debug, Serialize)]
pub struct Histogram {
    /// Values in each bin.
    pub counts: Vec<u64>,
    /// Edges of the bins, one more than there are bins.
    pub edges: Vec<f64>,
    /// Values below the first bin.
    pub below: u64,
    /// Values above the last bin.
    pub above: u64,
    /// Values that are no number.
    pub nan: u64,
}

impl Histogram {
    pub(super) fn new(counts: &BinCounts, bins: &Bins) -> Self {
        let [below, above, nan] = counts.outside();
        Self {
            counts: counts.counts().to_vec(),
            edges: bins.edges(),
            below,
            above,
            nan,
        }
    }

    /// A line about values in no bin, if there are any.
    pub fn left_out(&self) -> Option<String> {
        let Self {
            below, above, nan, ..
        } = self;
        (below + above + nan > 0)
            .then(|| format!("in no bin: {nan} NaN, {below} below, {above} above"))
    }

    /// A line for each bin: its left edge, and its count.
    pub fn text(&self) -> String {
        lines(&self.edges, &self.counts)
    }
}

/// The largest or smallest values.
#[derive(Clone, Debug, Serialize)]
pub struct TopValues {
    /// The values, the best first.
    pub values: Vec<ResultValue>,
    /// The row of each.
    pub indices: Vec<u64>,
    /// Values that are no number, which are left out; no field of the object where there are none.
    #[serde(skip_serializing_if = "is_zero")]
    pub nan: u64,
}

const fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl TopValues {
    pub(super) fn new(top: Top) -> Self {
        let nan = top.nan();
        let (values, indices) = top.values().into_iter().unzip();
        Self {
            values,
            indices,
            nan,
        }
    }

    /// A line about values that are left out, if there are any.
    pub fn left_out(&self) -> Option<String> {
        (self.nan > 0).then(|| format!("left out: {} NaN", self.nan))
    }

    /// A line for each: the value, and its row.
    pub fn text(&self) -> String {
        lines(&self.values, &self.indices)
    }
}

/// A reduction for each key.
#[derive(Clone, Debug, Serialize)]
pub struct Grouped {
    /// Name of the reduction.
    pub op: &'static str,
    pub groups: usize,
    /// The keys, ascending.
    pub keys: Vec<i128>,
    /// The reduction of each.
    pub values: Vec<ResultValue>,
}

impl Grouped {
    pub(crate) fn new(groups: &GroupTable, op: Op) -> Self {
        let (keys, values): (Vec<i128>, Vec<ResultValue>) = groups.values().into_iter().unzip();
        Self {
            op: op.name(),
            groups: keys.len(),
            keys,
            values,
        }
    }

    /// A line for each key: itself, and its value.
    pub fn text(&self) -> String {
        lines(&self.keys, &self.values)
    }
}

/// The mean of an expression over random numbers.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    pub value: f64,
    /// Standard deviation of `value`.
    pub std_error: f64,
    pub seed: u64,
}

impl Estimate {
    /// The mean and its error.
    pub fn text(&self) -> String {
        format!("{:?} ± {:.1e}", self.value, self.std_error)
    }
}

/// A line for each pair of two columns.
fn lines(left: &[impl Display], right: &[impl Display]) -> String {
    let pairs = left.iter().zip(right);
    let lines: Vec<String> = pairs.map(|(a, b)| format!("{a}\t{b}")).collect();
    lines.join("\n")
}
