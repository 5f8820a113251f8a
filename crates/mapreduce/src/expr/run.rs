//! Programs over columns: each step is a loop over a run of rows that stay in the cache.

use super::{Binary, ExprProgram, ExprStep, Unary};
use crate::sum::for_each_cpu;

/// Rows of a run: a register is 4 KiB, so a dozen of them fit a first-level cache.
const RUN: usize = 512;

/// Room for the values of steps, used again for each run.
#[derive(Debug, Default)]
pub struct Registers(Vec<[f64; RUN]>);

impl ExprProgram {
    /// Computes the rows of `columns`, as many columns as the program was made for, each `(n,)`;
    /// `first_row` is the number of the first. Appends `n` values to `out`. Every row is computed
    /// by itself: results do not depend on how rows are cut into calls.
    ///
    /// # Panics
    /// If columns differ in length or are missing.
    pub fn run(
        &self,
        columns: &[&[f64]],
        first_row: u64,
        registers: &mut Registers,
        out: &mut Vec<f64>,
    ) {
        let rows = columns.first().map_or(0, |column| column.len());
        assert!(
            columns.iter().all(|column| column.len() == rows),
            "columns of one length"
        );
        registers.0.resize(self.steps.len(), [0.0; RUN]);
        for start in (0..rows).step_by(RUN) {
            let n = RUN.min(rows - start);
            for i in 0..self.steps.len() {
                let (done, rest) = registers.0.split_at_mut(i);
                let into = &mut rest[0];
                match self.steps[i] {
                    ExprStep::Column(number) => {
                        into[..n].copy_from_slice(&columns[number][start..start + n]);
                    }
                    ExprStep::Row => {
                        let first = first_row + start as u64;
                        let numbers = into.iter_mut().zip(first..);
                        numbers.for_each(|(value, row)| *value = row as f64);
                    }
                    step => compute(step, done, into),
                }
            }
            let result = registers.0.last().expect("a program has a step");
            out.extend(result[..n].iter().map(|value| one_nan(*value)));
        }
    }
}

/// Turns every NaN into one: its sign and payload differ between processors.
const fn one_nan(value: f64) -> f64 {
    if value.is_nan() { f64::NAN } else { value }
}

const fn truth(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}

#[inline(always)]
fn compute_run(step: ExprStep, done: &[[f64; RUN]], into: &mut [f64; RUN]) {
    match step {
        ExprStep::Constant(value) => into.fill(value),
        ExprStep::Column(_) | ExprStep::Row => {}
        ExprStep::Unary(op, a) => unary(op, &done[a], into),
        ExprStep::Binary(op, a, b) => binary(op, &done[a], &done[b], into),
        ExprStep::Select(condition, a, b) => {
            let (condition, a, b) = (&done[condition], &done[a], &done[b]);
            for i in 0..RUN {
                into[i] = if condition[i] != 0.0 { a[i] } else { b[i] };
            }
        }
    }
}

#[inline(always)]
fn map(a: &[f64; RUN], into: &mut [f64; RUN], f: impl Fn(f64) -> f64) {
    for i in 0..RUN {
        into[i] = f(a[i]);
    }
}

#[inline(always)]
fn unary(op: Unary, a: &[f64; RUN], into: &mut [f64; RUN]) {
    match op {
        Unary::Negate => map(a, into, |x| -x),
        Unary::Not => map(a, into, |x| 1.0 - x),
        Unary::Abs => map(a, into, f64::abs),
        Unary::Sqrt => map(a, into, f64::sqrt),
        Unary::Floor => map(a, into, f64::floor),
        Unary::Ceil => map(a, into, f64::ceil),
        Unary::Trunc => map(a, into, f64::trunc),
        Unary::Round => map(a, into, f64::round_ties_even),
        Unary::Exp => map(a, into, libm::exp),
        Unary::Log => map(a, into, libm::log),
        Unary::Sin => map(a, into, libm::sin),
        Unary::Cos => map(a, into, libm::cos),
        Unary::Tan => map(a, into, libm::tan),
        Unary::Atan => map(a, into, libm::atan),
        Unary::Tanh => map(a, into, libm::tanh),
    }
}

#[inline(always)]
fn zip(a: &[f64; RUN], b: &[f64; RUN], into: &mut [f64; RUN], f: impl Fn(f64, f64) -> f64) {
    for i in 0..RUN {
        into[i] = f(a[i], b[i]);
    }
}

/// The smaller, or NaN if one is; -0 before 0.
#[inline(always)]
fn smaller(a: f64, b: f64) -> f64 {
    if a < b || a.is_nan() || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

#[inline(always)]
fn binary(op: Binary, a: &[f64; RUN], b: &[f64; RUN], into: &mut [f64; RUN]) {
    match op {
        Binary::Add => zip(a, b, into, |x, y| x + y),
        Binary::Subtract => zip(a, b, into, |x, y| x - y),
        Binary::Multiply => zip(a, b, into, |x, y| x * y),
        Binary::Divide => zip(a, b, into, |x, y| x / y),
        Binary::Remainder => zip(a, b, into, libm::fmod),
        Binary::Power => zip(a, b, into, libm::pow),
        Binary::Min => zip(a, b, into, smaller),
        Binary::Max => zip(a, b, into, |x, y| -smaller(-x, -y)),
        Binary::Hypot => zip(a, b, into, libm::hypot),
        Binary::Less => zip(a, b, into, |x, y| truth(x < y)),
        Binary::LessEqual => zip(a, b, into, |x, y| truth(x <= y)),
        Binary::Equal => zip(a, b, into, |x, y| truth(x == y)),
        Binary::NotEqual => zip(a, b, into, |x, y| truth(x != y)),
        Binary::And => zip(a, b, into, |x, y| x * y),
        Binary::Or => zip(a, b, into, |x, y| truth(x + y != 0.0)),
    }
}

for_each_cpu!(
    compute(step: ExprStep, done: &[[f64; RUN]], into: &mut [f64; RUN]) -> (),
    compute_run(step, done, into),
    compute_run(step, done, into)
);
