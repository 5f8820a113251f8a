//! A graphics processor as a [`ComputeDevice`], by the crate `gpu`.

use std::sync::Mutex;

use paceline_base::exact::ExactSum;
use paceline_base::lock;
use paceline_gpu::{BlockFunction, Gpu, KeyWidth, Scalar, ScalarFunction, Software};

use super::{BlockRange, BlockRows, Column, ComputeDevice, Lost};
use crate::Error;
use crate::expr::{ExprProgram, wgsl};
use crate::hist::Bins;
use crate::kmeans::Centroids;

#[derive(Debug)]
pub(super) struct Graphics {
    gpu: Gpu,
    /// The function that was checked last, and its text.
    function: Mutex<Option<(String, ScalarFunction)>>,
    /// The same of a function over blocks, with its inputs' columns.
    block: Mutex<Option<(String, Vec<u64>, BlockFunction)>>,
}

impl Graphics {
    pub(super) fn open(software: bool) -> Result<Self, Error> {
        let software = match software {
            true => Software::Allowed,
            false => Software::Refused,
        };
        let gpu = Gpu::open(software).map_err(device)?;
        Ok(Self {
            gpu,
            function: Mutex::default(),
            block: Mutex::default(),
        })
    }

    /// Simulates the loss of the device.
    #[cfg(test)]
    pub(super) fn lose(&self) {
        self.gpu.lose();
    }

    fn with<T>(
        rows: &BlockRows<'_>,
        call: impl FnOnce(&paceline_gpu::RowRange<'_>) -> Result<T, paceline_gpu::Error>,
    ) -> Result<T, Lost> {
        let columns: Vec<paceline_gpu::Column<'_>> = rows.columns.iter().map(column).collect();
        let map = rows.program.map(wgsl::text);
        let map = match map {
            Some(None) => return Err(Lost("the expression has no form in WGSL".to_owned())),
            Some(text) => text,
            None => None,
        };
        let rows = paceline_gpu::RowRange {
            count: rows.count,
            first: rows.first,
            columns: &columns,
            map: map.as_deref(),
        };
        call(&rows).map_err(lost)
    }

    fn checked(&self, text: &str, columns: usize) -> Result<ScalarFunction, Lost> {
        let mut last = lock(&self.function);
        if let Some((known, function)) = &*last
            && known == text
        {
            return Ok(function.clone());
        }
        let function = function(text, columns).map_err(|error| Lost(error.to_string()))?;
        *last = Some((text.to_owned(), function.clone()));
        Ok(function)
    }

    fn checked_block(&self, text: &str, columns: &[u64]) -> Result<BlockFunction, Lost> {
        let mut last = lock(&self.block);
        if let Some((known, widths, function)) = &*last
            && (known.as_str(), &widths[..]) == (text, columns)
        {
            return Ok(function.clone());
        }
        let function = block_function(text, columns).map_err(|error| Lost(error.to_string()))?;
        *last = Some((text.to_owned(), columns.to_vec(), function.clone()));
        Ok(function)
    }
}

/// Parses and checks a user's function of `columns` columns.
pub(super) fn function(text: &str, columns: usize) -> Result<ScalarFunction, Error> {
    let function = ScalarFunction::parse(text).map_err(device)?;
    let got = function.arguments().len();
    match got == columns {
        true => Ok(function),
        false => Err(Error::Device {
            reason: format!(
                "the WGSL function has {got} arguments, but there are {columns} inputs"
            ),
        }),
    }
}

/// Parses and checks a user's function over blocks.
pub(super) fn block_function(text: &str, columns: &[u64]) -> Result<BlockFunction, Error> {
    let narrow = |columns: &u64| u32::try_from(*columns).unwrap_or(0);
    let columns: Vec<u32> = columns.iter().map(narrow).collect();
    BlockFunction::parse(text, &columns).map_err(device)
}

fn device(error: paceline_gpu::Error) -> Error {
    let reason = error.to_string();
    Error::Device { reason }
}

fn lost(error: paceline_gpu::Error) -> Lost {
    Lost(error.to_string())
}

const fn column<'a>(column: &Column<'a>) -> paceline_gpu::Column<'a> {
    match *column {
        Column::Values(values) => paceline_gpu::Column::Values(values),
        Column::Random { seed, dimension } => paceline_gpu::Column::Random { seed, dimension },
    }
}

/// A value as an argument has it: the nearest float, or the integer part within the type's range.
const fn word(value: f64, of: Scalar) -> u32 {
    match of {
        Scalar::F32 => (value as f32).to_bits(),
        Scalar::I32 => value as i32 as u32,
        Scalar::U32 => value as u32,
    }
}

fn number(word: u32, of: Scalar) -> f64 {
    match of {
        Scalar::F32 => f64::from(f32::from_bits(word)),
        Scalar::I32 => f64::from(word as i32),
        Scalar::U32 => f64::from(word),
    }
}

impl ComputeDevice for Graphics {
    fn label(&self) -> &str {
        self.gpu.label()
    }

    fn rows_max(&self, row_bytes: u64) -> u64 {
        self.gpu.rows_max(row_bytes)
    }

    fn maps(&self, program: &ExprProgram) -> bool {
        wgsl::text(program).is_some()
    }

    fn sorts(&self, bytes: u64, width: usize) -> bool {
        matches!(width, 4 | 8) && self.gpu.sorts(bytes)
    }

    fn values(&self, rows: &BlockRows<'_>) -> Result<Vec<f64>, Lost> {
        Self::with(rows, |rows| self.gpu.values(rows))
    }

    fn sum(&self, rows: &BlockRows<'_>) -> Result<ExactSum, Lost> {
        Self::with(rows, |rows| self.gpu.sum(rows))
    }

    fn products(&self, rows: &BlockRows<'_>) -> Result<ExactSum, Lost> {
        Self::with(rows, |rows| self.gpu.products(rows))
    }

    fn extremes(&self, rows: &BlockRows<'_>) -> Result<(i64, i64, bool), Lost> {
        let extremes = Self::with(rows, |rows| self.gpu.extremes(rows))?;
        let signed = |key: u64| (key ^ 1 << 63) as i64;
        Ok((
            signed(extremes.least),
            signed(extremes.greatest),
            extremes.has_nan,
        ))
    }

    fn hist(&self, rows: &BlockRows<'_>, bins: &Bins) -> Result<Vec<u32>, Lost> {
        let edges = bins.edges();
        Self::with(rows, |rows| self.gpu.hist(rows, &edges))
    }

    fn hist_raw(&self, words: &[u8], bins: u32) -> Result<Vec<u32>, Lost> {
        let bits = bins.trailing_zeros();
        self.gpu.hist_raw(words, bits).map_err(lost)
    }

    fn nearest(&self, values: &[f64], centroids: &Centroids) -> Result<Vec<(u32, f64)>, Lost> {
        let columns = centroids.columns as usize;
        let found = self.gpu.nearest(values, &centroids.values, columns);
        found.map_err(lost)
    }

    fn sort(&self, keys: &mut [u8], width: usize) -> Result<(), Lost> {
        let words = match width {
            4 => KeyWidth::One,
            _ => KeyWidth::Two,
        };
        self.gpu.sort(keys, words).map_err(lost)
    }

    fn partition(&self, partitions: &[u32], bits: u32) -> Result<Vec<u32>, Lost> {
        self.gpu.partition(partitions, bits).map_err(lost)
    }

    fn matmul(&self, left: &[f32], right: &[f32], depth: usize) -> Result<Vec<f32>, Lost> {
        self.gpu.matmul(left, right, depth).map_err(lost)
    }

    fn block(
        &self,
        text: &str,
        inputs: &[Vec<f32>],
        columns: &[u64],
        range: BlockRange,
    ) -> Result<Vec<f32>, Lost> {
        let function = self.checked_block(text, columns)?;
        let inputs: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
        let range = paceline_gpu::BlockRange {
            first: range.first,
            count: range.count,
            loaded_first: range.loaded_first,
            loaded: range.loaded,
            rows: range.rows,
        };
        self.gpu.block(&function, &inputs, range).map_err(lost)
    }

    fn function(&self, text: &str, columns: &[&[f64]]) -> Result<Vec<f64>, Lost> {
        let function = self.checked(text, columns.len())?;
        let words =
            |(column, of): (&&[f64], &Scalar)| column.iter().map(|v| word(*v, *of)).collect();
        let arguments = columns.iter().zip(function.arguments());
        let words: Vec<Vec<u32>> = arguments.map(words).collect();
        let results = self.gpu.function(&function, &words).map_err(lost)?;
        let result = function.result();
        Ok(results
            .into_iter()
            .map(|word| number(word, result))
            .collect())
    }
}
