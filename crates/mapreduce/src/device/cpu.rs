//! The definition of each call: this processor's own functions.

use paceline_base::exact::ExactSum;

use super::{BlockRows, Column, ComputeDevice, Lost};
use crate::expr::{ExprProgram, Registers};
use crate::hist::{BinCounts, Bins};
use crate::kmeans::{Assigned, Centroids};
use crate::philox::Philox;
use crate::{Values, reduce, sort, sum};

/// This processor. What other devices are compared with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

fn columns(rows: &BlockRows<'_>) -> Vec<Vec<f64>> {
    let column = |column: &Column<'_>| match column {
        Column::Values(values) => values.to_vec(),
        Column::Random { seed, dimension } => {
            let all = Philox::new(*seed);
            let numbers = rows.first..rows.first + rows.count;
            numbers.map(|row| all.uniform(row, *dimension)).collect()
        }
    };
    rows.columns.iter().map(column).collect()
}

fn mapped(rows: &BlockRows<'_>) -> Vec<f64> {
    let mut columns = columns(rows);
    let Some(program) = rows.program else {
        return columns.swap_remove(0);
    };
    let columns: Vec<&[f64]> = columns.iter().map(Vec::as_slice).collect();
    let mut out = Vec::new();
    program.run(&columns, rows.first, &mut Registers::default(), &mut out);
    out
}

fn sorted<const N: usize>(bytes: &mut [u8]) {
    let mut keys = bytes.as_chunks::<N>().0.to_vec();
    sort::radix_sort(&mut keys);
    bytes.copy_from_slice(keys.as_flattened());
}

impl ComputeDevice for Cpu {
    fn label(&self) -> &str {
        "cpu"
    }

    fn rows_max(&self, _row_bytes: u64) -> u64 {
        1 << 20
    }

    fn maps(&self, _program: &ExprProgram) -> bool {
        true
    }

    fn sorts(&self, _bytes: u64, width: usize) -> bool {
        matches!(width, 4 | 8)
    }

    fn values(&self, rows: &BlockRows<'_>) -> Result<Vec<f64>, Lost> {
        Ok(mapped(rows))
    }

    fn sum(&self, rows: &BlockRows<'_>) -> Result<ExactSum, Lost> {
        let mut total = ExactSum::new();
        sum::add(&mut total, &mapped(rows));
        Ok(total)
    }

    fn products(&self, rows: &BlockRows<'_>) -> Result<ExactSum, Lost> {
        let left = mapped(rows);
        let right = match rows.columns {
            [_, Column::Values(right), ..] if rows.program.is_none() => right.to_vec(),
            _ => left.clone(),
        };
        let mut total = ExactSum::new();
        sum::add_products(&mut total, &left, &right);
        Ok(total)
    }

    fn extremes(&self, rows: &BlockRows<'_>) -> Result<(i64, i64, bool), Lost> {
        Ok(reduce::extremes(&mapped(rows)))
    }

    fn hist(&self, rows: &BlockRows<'_>, bins: &Bins) -> Result<Vec<u32>, Lost> {
        let mut counts = BinCounts::new(bins);
        counts.take(&Values::Floats(&mapped(rows)));
        let all = counts.counts().iter().copied().chain(counts.outside());
        Ok(all.map(|count| count as u32).collect())
    }

    fn hist_raw(&self, words: &[u8], bins: u32) -> Result<Vec<u32>, Lost> {
        let shift = 32 - bins.trailing_zeros();
        let mut counts = vec![0; bins as usize];
        for word in words.as_chunks().0 {
            counts[(u32::from_le_bytes(*word) >> shift) as usize] += 1;
        }
        Ok(counts)
    }

    fn nearest(&self, values: &[f64], centroids: &Centroids) -> Result<Vec<(u32, f64)>, Lost> {
        Ok(Assigned::find(values, centroids))
    }

    fn sort(&self, keys: &mut [u8], width: usize) -> Result<(), Lost> {
        match width {
            4 => sorted::<4>(keys),
            _ => sorted::<8>(keys),
        }
        Ok(())
    }
}
