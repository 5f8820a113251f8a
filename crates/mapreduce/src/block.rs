//! A user's WGSL function over blocks of rows, which reads the rows around a row: stencils, n-body.
//!
//! A part reads its rows and the halo of all steps. Each step computes the rows that the later ones
//! need, fewer each time:
//! ```text
//! loaded   [ halo | halo |  rows of the part  | halo | halo ]
//! step 1          [ halo |  rows of the part  | halo ]
//! step 2                 [  rows of the part  ]
//! ```
//! So parts exchange nothing between steps; they compute each other's halos again. A value depends
//! on its row alone, not on the part.

use std::ops::Range;

use crate::device::{self, BlockRange, ComputeDevice, Lost};
use crate::halo::BlockMap;
use crate::{Decoded, Error, FileSource, InputFile, RowSource as _, Values};

/// Most rows of a call whose halo is everything: with 10^6 iterations for each it is 10^10.
const ROWS_MAX_OF_ALL: u64 = 1 << 14;

impl BlockMap {
    /// A function of inputs whose rows are their first axis.
    ///
    /// # Errors
    /// [`Error::Device`]: the function is refused, or cannot be computed in steps. A result of one
    /// step must have the columns of the first input, which the next step reads.
    pub fn new(text: &str, inputs: &[InputFile], halo: u64, steps: u32) -> Result<Self, Error> {
        let columns = device::check_block(text, &widths(inputs))?;
        let first = inputs.first().map_or(0, |input| input.columns);
        let rows = inputs.first().map_or(0, |input| input.rows);
        if i32::try_from(rows).is_err() {
            return Err(Error::Device {
                reason: format!("{rows} rows, expected at most {}", i32::MAX),
            });
        }
        if steps > 1 && halo == u64::MAX {
            return Err(Error::Device {
                reason: format!(
                    "{steps} steps that read all rows: each part would compute all of them; \
                     compute one step at a time"
                ),
            });
        }
        if steps > 1 && columns != first {
            return Err(Error::Device {
                reason: format!(
                    "rows of {columns} values cannot be the input of the next step, which has \
                     {first}"
                ),
            });
        }
        Ok(Self {
            halo,
            steps,
            columns,
        })
    }

    pub(crate) fn block_rows(self, device: &dyn ComputeDevice, inputs: &[InputFile]) -> u64 {
        let widest = inputs.iter().map(|input| input.columns).max().unwrap_or(1);
        // A quarter of what fits: a call for each value, and buffers for inputs and results.
        let most = device.rows_max(32 * widest.max(self.columns).max(1));
        match self.margin(self.steps) {
            u64::MAX => most.min(ROWS_MAX_OF_ALL),
            margin => most.saturating_sub(2 * margin.min(most)).max(most / 4),
        }
        .max(1)
    }

    /// The values of `rows`, computed by a device: `(rows, columns)`.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Device`], since nothing else computes it.
    pub(crate) fn compute(
        self,
        text: &str,
        device: &dyn ComputeDevice,
        sources: &[FileSource],
        rows: &Range<u64>,
    ) -> Result<Vec<f64>, Error> {
        let all = sources.first().map_or(0, FileSource::rows);
        let mut loaded = self.around(rows, self.steps, all);
        let inputs = sources.iter().map(|source| floats(source, &loaded));
        let mut inputs: Vec<Vec<f32>> = inputs.collect::<Result<_, _>>()?;
        let columns: Vec<u64> = sources.iter().map(FileSource::columns).collect();
        for left in (0..self.steps).rev() {
            let next = self.around(rows, left, all);
            let range = BlockRange {
                first: next.start,
                count: next.end - next.start,
                loaded_first: loaded.start,
                loaded: loaded.end - loaded.start,
                rows: all,
            };
            let computed = device.block(text, &inputs, &columns, range);
            let computed = computed.map_err(|Lost(reason)| Error::Device { reason })?;
            for (input, columns) in inputs.iter_mut().zip(&columns) {
                let at = |row: u64| ((row - loaded.start) * columns) as usize;
                *input = input[at(next.start)..at(next.end)].to_vec();
            }
            inputs[0] = computed;
            loaded = next;
        }
        Ok(inputs[0].iter().map(|value| f64::from(*value)).collect())
    }
}

pub(crate) fn widths(inputs: &[InputFile]) -> Vec<u64> {
    inputs.iter().map(|input| input.columns).collect()
}

/// Rows of a source as the nearest floats.
fn floats(source: &FileSource, rows: &Range<u64>) -> Result<Vec<f32>, Error> {
    let values = (rows.end - rows.start) * source.columns();
    let mut bytes = vec![0; values as usize * source.dtype().bytes()];
    source.read(rows.clone(), &mut bytes)?;
    let (mut decoded, mut nearest) = (Decoded::default(), Vec::new());
    let values: Values<'_> = decoded.decode(source.dtype(), &bytes);
    let values = values.nearest(&mut nearest);
    Ok(values.iter().map(|value| *value as f32).collect())
}
