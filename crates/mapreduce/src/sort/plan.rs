//! Partition of a sort within a limit of memory, and the sample that splitters are drawn from.

use std::path::PathBuf;

use super::{KeyEncoding, SPLITTERS_MAX, Scatter, of_width};
use crate::philox::Philox;
use crate::{Error, FileSource, InputFile, RowSource as _};

/// Values drawn for each splitter. With 64 the largest of 1,000 buckets has less than twice the
/// rows of the average.
const DRAWN_PER_SPLITTER: u64 = 64;

/// Seeds of the samples, counted from here: a sort that is done again draws the same.
const SEED: u64 = 36;

/// Most bytes of a part: what a lost worker costs.
const PART_BYTES_MAX: u64 = 64 << 20;

const PART_ROWS_MIN: u64 = 1 << 14;

/// Parts and buckets that a thread gets, so that all threads end together.
const TASKS_PER_THREAD: u64 = 4;

/// Least memory that a sort can be limited to.
pub const MEMORY_MIN: u64 = 4 << 20;

/// Partition of a sort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SortPlan {
    pub part_rows: u64,
    /// Intended number of buckets; equal values can make them fewer.
    pub buckets: u64,
    /// Most bytes of a bucket.
    pub bucket_bytes_max: u64,
    /// Whether the values stay in memory between the two halves.
    pub in_memory: bool,
}

impl SortPlan {
    /// For `bytes` bytes of values of `width` bytes, `threads` threads in all with `memory` bytes.
    /// `shared` processes have no memory in common. A thread has three times the bytes of a part,
    /// or twice those of a bucket. A sort in memory takes four times the bytes of all values.
    ///
    /// # Errors
    /// [`Error::Memory`] when that is too little.
    pub fn new(
        bytes: u64,
        width: u64,
        threads: u64,
        memory: u64,
        shared: bool,
    ) -> Result<Self, Error> {
        let even = bytes / (threads * TASKS_PER_THREAD).max(1);
        // The values, their buckets, and room to sort those in.
        let in_memory = !shared && bytes.saturating_mul(4) <= memory;
        let (part, bucket, most) = match in_memory {
            true if threads == 1 => (even, bytes, u64::MAX),
            true => (even, even, u64::MAX),
            false => {
                let most = memory / threads / 5 * 2;
                let part = even.min(PART_BYTES_MAX).min(memory / threads / 4);
                (part, even.min(most / 2), most)
            }
        };
        let buckets = bytes.div_ceil(bucket.max(1)).max(1);
        let enough = buckets <= SPLITTERS_MAX as u64 + 1;
        if memory < MEMORY_MIN || !(enough || in_memory) {
            return Err(Error::Memory {
                memory,
                needed: (bytes / SPLITTERS_MAX as u64)
                    .saturating_mul(5 * threads)
                    .max(MEMORY_MIN),
            });
        }
        Ok(Self {
            part_rows: (part / width).max(PART_ROWS_MIN),
            buckets: buckets.min(SPLITTERS_MAX as u64 + 1),
            bucket_bytes_max: most,
            in_memory,
        })
    }

    /// Draws splitters from a column. Each `attempt` draws others, and more of them.
    pub fn scatter(
        &self,
        input: &InputFile,
        attempt: u32,
        folder: Option<PathBuf>,
    ) -> Result<Scatter, Error> {
        let drawn = ((self.buckets - 1) * DRAWN_PER_SPLITTER) << (2 * attempt);
        let source = input.open()?;
        let mut keys = of_width!(
            input.dtype,
            draw(&source, drawn.min(4 * input.rows), attempt)
        )?;
        keys.sort_unstable();
        let count = keys.len() as u64;
        let places = (1..self.buckets).map(|i| (i * count / self.buckets) as usize);
        let mut splitters: Vec<u64> = places.filter_map(|at| keys.get(at).copied()).collect();
        splitters.dedup();
        Ok(Scatter {
            dtype: input.dtype,
            splitters,
            part_rows: self.part_rows,
            folder,
            machines: 0,
        })
    }

    /// The bytes of the largest bucket, if they are too many. `counts` are rows of buckets.
    pub fn overfull(&self, counts: &[u64], width: u64) -> Option<u64> {
        let largest = counts.iter().step_by(2).max().copied().unwrap_or(0) * width;
        (largest > self.bucket_bytes_max).then_some(largest)
    }
}

/// Keys of rows drawn at random.
fn draw<const N: usize>(source: &FileSource, count: u64, attempt: u32) -> Result<Vec<u64>, Error> {
    let random = Philox::new(SEED + u64::from(attempt));
    let order = KeyEncoding::of(source.dtype());
    let rows = source.rows();
    let key = |i| {
        let row = ((u128::from(random.word(i, 0)) * u128::from(rows)) >> 64) as u64;
        let mut value = [0; N];
        source.read(row..row + 1, &mut value)?;
        Ok(order.key(value))
    };
    (0..count).map(key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_keep_within_memory() {
        for bytes in [0, 1, 1000, 200 << 20, 8 << 30, 1 << 40] {
            for memory in [16 << 20, 1 << 30, 32 << 30] {
                for threads in [1, 2, 8, 128] {
                    let Ok(plan) = SortPlan::new(bytes, 4, threads, memory, true) else {
                        assert!(
                            bytes / memory > 1023 / 5 / threads.min(200),
                            "{bytes} {memory}"
                        );
                        continue;
                    };
                    assert!(!plan.in_memory);
                    let part = 4 * plan.part_rows;
                    assert!(threads * 3 * part <= memory.max(threads * 12 * PART_ROWS_MIN));
                    assert!(threads * 2 * plan.bucket_bytes_max <= memory);
                    assert!(bytes / plan.buckets <= plan.bucket_bytes_max / 2 + 1);
                }
            }
        }
        let buckets = |threads| {
            let plan = SortPlan::new(200 << 20, 4, threads, 1 << 30, false).unwrap();
            plan.in_memory.then_some(plan.buckets)
        };
        assert_eq!([1, 2].map(buckets), [Some(1), Some(8)]);
        assert!(SortPlan::new(1, 4, 1, 1 << 20, false).is_err());
    }
}
