//! A number of all values: sums, means, variances, extremes.
//!
//! Sums are exact ([`paceline_base::exact`]), and what follows from them is rounded once. The mean
//! is the f64 nearest to the true mean of the values, the variance that nearest to their true
//! variance. Integers of any size are summed as integers.

use paceline_base::exact::{ExactSum, Ratio};
use serde::{Deserialize, Serialize};

use crate::order::{float, key};
use crate::value::{ResultValue, digits, exact};
use crate::{Dtype, Error, Values, sum};

paceline_base::named_enum! {
    /// The reduction of a column.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Op {
        /// The sum, rounded once; of integers, the integer.
        Sum = "sum",
        /// The sum over the number of values, rounded once.
        Mean = "mean",
        /// The smallest value; NaN if there is one, and -0 before 0.
        Min = "min",
        /// The largest value; NaN if there is one, and 0 before -0.
        Max = "max",
        /// The variance: the mean square of the distance from the mean, rounded once.
        Var = "var",
        /// The square root of that.
        Std = "std",
        /// The sum of products of two columns, rounded once.
        Dot = "dot",
        /// The number of values.
        Count = "count",
    }
}

impl Op {
    /// Number of columns that it takes.
    pub const fn inputs(self) -> usize {
        if matches!(self, Self::Dot) { 2 } else { 1 }
    }

    pub(crate) const fn sums(self) -> bool {
        matches!(self, Self::Sum | Self::Mean | Self::Var | Self::Std)
    }

    pub(crate) const fn squares(self) -> bool {
        matches!(self, Self::Var | Self::Std)
    }

    pub(crate) const fn extremes(self) -> bool {
        matches!(self, Self::Min | Self::Max)
    }
}

/// A device's results for a block's values, as far as the reduction needs them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reduced {
    /// Number of values.
    pub(crate) rows: u64,
    /// Their sum, or that of the products.
    pub(crate) sum: Option<ExactSum>,
    pub(crate) squares: Option<ExactSum>,
    /// The least and the greatest key of all but NaN, and whether there is a NaN.
    pub(crate) extremes: Option<(i64, i64, bool)>,
}

/// The smallest and the largest value: of floats by `order::key`, of integers as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Extremes {
    #[serde(with = "digits")]
    min: i128,
    #[serde(with = "digits")]
    max: i128,
}

/// Facts about the values so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    op: Op,
    rows: u64,
    /// The sum, or that of the products.
    #[serde(with = "exact")]
    sum: ExactSum,
    #[serde(with = "exact")]
    squares: ExactSum,
    extremes: Option<Extremes>,
    has_nan: bool,
}

impl State {
    pub fn new(op: Op) -> Self {
        Self {
            op,
            rows: 0,
            sum: ExactSum::new(),
            squares: ExactSum::new(),
            extremes: None,
            has_nan: false,
        }
    }

    /// Number of values.
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// Adds a block of each input; `dtype` is the first one's.
    pub fn take(&mut self, columns: &[Values<'_>], dtype: Dtype) {
        let first = &columns[0];
        self.rows += first.len() as u64;
        if self.op.sums() {
            add(&mut self.sum, first);
        }
        if self.op.squares() {
            add_products(&mut self.squares, first, first);
        }
        if self.op.extremes() {
            self.take_extremes(first, dtype);
        }
        if self.op == Op::Dot {
            add_products(&mut self.sum, first, &columns[1]);
        }
    }

    /// Adds a device's result for a block; `dtype` is the first column's.
    pub(crate) fn take_reduced(&mut self, reduced: &Reduced, dtype: Dtype) {
        self.rows += reduced.rows;
        if let Some(sum) = &reduced.sum {
            self.sum.merge(sum);
        }
        if let Some(squares) = &reduced.squares {
            self.squares.merge(squares);
        }
        if let Some(keys) = reduced.extremes {
            self.take_keys(keys, dtype);
        }
    }

    fn take_extremes(&mut self, values: &Values<'_>, dtype: Dtype) {
        match values {
            Values::Floats(floats) => self.take_keys(extremes(floats), dtype),
            Values::Wide(wide) => {
                let both = wide.iter().min().copied().zip(wide.iter().max().copied());
                if let Some((min, max)) = both {
                    self.widen(Extremes { min, max });
                }
            }
        }
    }

    fn take_keys(&mut self, (min, max, has_nan): (i64, i64, bool), dtype: Dtype) {
        self.has_nan |= has_nan;
        let value = |key: i64| match dtype.is_integer() {
            true => float(key) as i128,
            false => i128::from(key),
        };
        if min <= max {
            self.widen(Extremes {
                min: value(min),
                max: value(max),
            });
        }
    }

    fn widen(&mut self, other: Extremes) {
        let own = self.extremes.unwrap_or(other);
        self.extremes = Some(Extremes {
            min: own.min.min(other.min),
            max: own.max.max(other.max),
        });
    }

    /// Adds the state of other values.
    pub fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        self.sum.merge(&other.sum);
        self.squares.merge(&other.squares);
        self.has_nan |= other.has_nan;
        if let Some(extremes) = other.extremes {
            self.widen(extremes);
        }
    }

    /// The result, of values of type `dtype`.
    ///
    /// # Errors
    /// [`Error::Empty`] for what no values have: only `sum`, `dot` and `count` are 0 then.
    pub fn value(&self, dtype: Dtype) -> Result<ResultValue, Error> {
        if self.rows == 0 && !matches!(self.op, Op::Sum | Op::Dot | Op::Count) {
            return Err(Error::Empty(self.op.name()));
        }
        let extreme = |pick: fn(&Extremes) -> i128| match &self.extremes {
            _ if self.has_nan => ResultValue::Float(f64::NAN),
            Some(both) if dtype.is_integer() => ResultValue::Int(pick(both)),
            Some(both) => ResultValue::Float(float(pick(both) as i64)),
            None => ResultValue::Float(f64::NAN),
        };
        Ok(match self.op {
            Op::Count => ResultValue::Int(self.rows.into()),
            Op::Min => extreme(|both| both.min),
            Op::Max => extreme(|both| both.max),
            Op::Mean => ResultValue::Float(self.mean()),
            Op::Var => ResultValue::Float(self.var()),
            Op::Std => ResultValue::Float(self.var().sqrt()),
            Op::Sum | Op::Dot => match self.sum.to_i128() {
                Some(whole) if dtype.is_integer() => ResultValue::Int(whole),
                _ => ResultValue::Float(self.sum.value()),
            },
        })
    }

    /// The mean of a sum's values, rounded once.
    ///
    /// # Panics
    /// Without values.
    pub fn mean(&self) -> f64 {
        let special = self.sum.special();
        special.unwrap_or_else(|| Ratio::of(&self.sum).over(self.rows).value())
    }

    /// (n * sum of squares - square of the sum) / n^2.
    fn var(&self) -> f64 {
        if self.squares.special().is_some() {
            return f64::NAN;
        }
        let squares = Ratio::of(&self.squares).times(self.rows);
        let square = Ratio::of(&self.sum).squared();
        squares
            .minus(&square)
            .over(self.rows)
            .over(self.rows)
            .value()
    }
}

fn add(sum: &mut ExactSum, values: &Values<'_>) {
    match values {
        Values::Floats(floats) => sum::add(sum, floats),
        Values::Wide(wide) => wide.iter().for_each(|value| {
            let (low, high) = (*value as i64 & 0xffff_ffff, (value >> 32) as i64);
            sum.add_scaled(low, 0);
            sum.add_scaled(high, 32);
        }),
    }
}

fn add_products(sum: &mut ExactSum, a: &Values<'_>, b: &Values<'_>) {
    if let (Values::Floats(a), Values::Floats(b)) = (a, b) {
        return sum::add_products(sum, a, b);
    }
    // Halves of integers are f64 values, and so are floats with a low half of zero.
    let halves = |values: &Values<'_>, i: usize| match values {
        Values::Floats(floats) => [floats[i], 0.0],
        Values::Wide(wide) => {
            let low = (wide[i] & 0xffff_ffff) as f64;
            [((wide[i] >> 32) as f64) * (1u64 << 32) as f64, low]
        }
    };
    for i in 0..a.len() {
        for x in halves(a, i) {
            for y in halves(b, i) {
                if x != 0.0 && y != 0.0 {
                    sum.add_product(x, y);
                }
            }
        }
    }
}

/// The least and greatest key of all values but NaN, and whether there is a NaN. Without values
/// the least is greater.
fn extremes_lanes(values: &[f64]) -> (i64, i64, bool) {
    let (mut min, mut max, mut nan) = ([i64::MAX; 32], [i64::MIN; 32], [false; 32]);
    let (chunks, rest) = values.as_chunks::<32>();
    let mut last = [f64::NAN; 32];
    last[..rest.len()].copy_from_slice(rest);
    let take = |chunk: &[f64; 32], min: &mut [i64; 32], max: &mut [i64; 32]| {
        for i in 0..32 {
            let (low, high) = match chunk[i].is_nan() {
                true => (i64::MAX, i64::MIN),
                false => (key(chunk[i]), key(chunk[i])),
            };
            min[i] = min[i].min(low);
            max[i] = max[i].max(high);
        }
    };
    for chunk in chunks {
        take(chunk, &mut min, &mut max);
        for i in 0..32 {
            nan[i] |= chunk[i].is_nan();
        }
    }
    take(&last, &mut min, &mut max);
    let has_nan = nan.contains(&true) || rest.iter().any(|value| value.is_nan());
    let (min, max) = (min.into_iter().min(), max.into_iter().max());
    (min.unwrap_or(i64::MAX), max.unwrap_or(i64::MIN), has_nan)
}

sum::for_each_cpu!(
    pub(crate) extremes(values: &[f64]) -> (i64, i64, bool),
    extremes_lanes(values),
    extremes_lanes(values)
);

/// The exact sum of a column, rounded once.
pub fn exact_sum(values: &[f64]) -> f64 {
    let mut sum = ExactSum::new();
    sum::add(&mut sum, values);
    sum.value()
}

/// The f64 nearest to the mean of a column; `None` for no values.
pub fn exact_avg(values: &[f64]) -> Option<f64> {
    column(Op::Mean, values)
}

/// The f64 nearest to the variance of a column, over all values; `None` for no values.
pub fn exact_var(values: &[f64]) -> Option<f64> {
    column(Op::Var, values)
}

/// The sum of the products of two columns, rounded once.
///
/// # Panics
/// If their lengths differ.
pub fn exact_dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = ExactSum::new();
    sum::add_products(&mut sum, a, b);
    sum.value()
}

fn column(op: Op, values: &[f64]) -> Option<f64> {
    let mut state = State::new(op);
    state.take(&[Values::Floats(values)], Dtype::F64);
    state.value(Dtype::F64).ok().map(ResultValue::as_f64)
}
