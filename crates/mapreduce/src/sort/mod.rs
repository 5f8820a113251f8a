//! Sorting: values in the total order of their type, larger than memory and over processes.
//!
//! ```text
//! sample -> splitters     [ .. | s0 | .. | s1 | .. ]      buckets: between and equal to splitters
//! scatter, a part each    rows -> keys -> the part's keys, bucket by bucket      -> Store
//! gather, a bucket each   the bucket's keys of all parts -> radix sort -> values -> Sink
//! ```
//!
//! A *key* is a value's bits changed so that unsigned integers order as the values do. Integers
//! order by value, floats by IEEE 754's totalOrder (-NaN, -inf, ..., -0, 0, ..., inf, NaN). Equal
//! keys are equal bits, so a sorted file has the same bits however it was computed. A value that is
//! drawn as a splitter has a bucket of its own. That bucket is counted and never stored: many equal
//! values cost no memory. Source of the method: Frazer and McKellar, "Samplesort", JACM 1970.
//!
//! [`SortPlan`] chooses parts and buckets for a limit of memory. [`radix`] sorts a bucket.

mod job;
mod plan;
mod radix;
mod ranges;
mod split;
mod store;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use job::{Sort, Sorted};
pub use plan::{MEMORY_MIN, SortPlan};
pub(crate) use radix::sort as radix_sort;
pub use ranges::RangeStore;
pub(crate) use split::Splitters;
use store::BucketSpec;
pub use store::SpillStore;

use crate::{ComputeDevice, Dtype, Error, FileSource, Leases, RowPartition, RowSource as _, Sink};

/// Most splitters: a bucket's number fits 16 bits.
pub const SPLITTERS_MAX: usize = 1023;

/// Bytes that are read or written at a time.
const BLOCK_BYTES: usize = 1 << 18;

/// The first half of a sort: parts are cut into buckets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scatter {
    /// Type of the values.
    pub dtype: Dtype,
    /// Keys in ascending order.
    pub splitters: Vec<u64>,
    pub part_rows: u64,
    /// Folder of spilled parts; `None` in the memory of this process.
    pub folder: Option<PathBuf>,
    /// Machines that share no folder. Each scans the input again for its own buckets, so that a
    /// part is counted and not kept. 0 where all processes are on one machine.
    #[serde(default)]
    pub machines: u64,
}

/// The second half of a sort: buckets are sorted. Its rows are buckets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gather {
    /// The first half.
    pub scatter: Scatter,
    /// Number of parts of the first half.
    pub parts: u64,
    /// First row of each bucket, and the number of rows.
    pub starts: Vec<u64>,
    /// A `.npy` file that is there in full length.
    pub out: PathBuf,
}

impl Scatter {
    pub const fn buckets(&self) -> usize {
        2 * self.splitters.len() + 1
    }
}

impl Gather {
    /// The second half after a first half with `counts` rows per bucket.
    pub fn new(scatter: Scatter, parts: u64, counts: &[u64], out: PathBuf) -> Self {
        let ends = counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        Self {
            starts: std::iter::once(0).chain(ends).collect(),
            scatter,
            parts,
            out,
        }
    }

    /// The first bucket behind the range that a machine keeps with `bucket`.
    pub(crate) fn range_end(&self, bucket: u64) -> u64 {
        let ranges = Leases::segments(self.scatter.buckets() as u64, self.scatter.machines);
        let range = ranges.into_iter().find(|range| range.contains(&bucket));
        range.map_or(bucket + 1, |range| range.end)
    }

    pub(crate) fn rows(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Bytes of all values.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows() * self.scatter.dtype.bytes() as u64
    }

    fn bucket_spec(&self, bucket: usize) -> BucketSpec {
        BucketSpec {
            parts: self.parts,
            buckets: self.scatter.buckets(),
            bucket,
            width: self.scatter.dtype.bytes(),
        }
    }
}

/// Encoding of a type's bits as keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyEncoding {
    Unsigned,
    Signed,
    Float,
}

impl KeyEncoding {
    const fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => Self::Float,
            Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 => Self::Signed,
            _ => Self::Unsigned,
        }
    }

    /// The key of a value of `N` bytes.
    #[inline(always)]
    fn key<const N: usize>(self, value: [u8; N]) -> u64 {
        let (bits, sign, all) = (number(value), 1 << (8 * N - 1), u64::MAX >> (64 - 8 * N));
        match self {
            Self::Unsigned => bits,
            Self::Signed => bits ^ sign,
            Self::Float if bits & sign != 0 => bits ^ all,
            Self::Float => bits | sign,
        }
    }

    #[inline(always)]
    fn value<const N: usize>(self, key: u64) -> [u8; N] {
        let (sign, all) = (1 << (8 * N - 1), u64::MAX >> (64 - 8 * N));
        bytes(match self {
            Self::Unsigned => key,
            Self::Signed => key ^ sign,
            Self::Float if key & sign != 0 => key ^ sign,
            Self::Float => key ^ all,
        })
    }
}

/// The number of `N` bytes, little-endian.
#[inline(always)]
fn number<const N: usize>(value: [u8; N]) -> u64 {
    let mut all = [0; 8];
    all[..N].copy_from_slice(&value);
    u64::from_le_bytes(all)
}

/// The lowest `N` bytes of a number.
#[inline(always)]
fn bytes<const N: usize>(number: u64) -> [u8; N] {
    let mut some = [0; N];
    some.copy_from_slice(&number.to_le_bytes()[..N]);
    some
}

/// Calls a function with the bytes of a value as its constant.
macro_rules! of_width {
    ($dtype:expr, $function:ident($($arg:expr),*)) => {
        match $dtype.bytes() {
            1 => $function::<1>($($arg),*),
            2 => $function::<2>($($arg),*),
            4 => $function::<4>($($arg),*),
            _ => $function::<8>($($arg),*),
        }
    };
}
use of_width;

/// Cuts a part of `source` into buckets and stores it; rows of each bucket.
pub(crate) fn scatter(
    scatter: &Scatter,
    source: &FileSource,
    part: RowPartition,
    store: &SpillStore,
) -> Result<Vec<u64>, Error> {
    let (counts, keys) = keys_of(scatter, source, part.start..part.start + part.rows)?;
    if scatter.machines == 0 {
        store.put(part.id, &counts, keys)?;
    }
    Ok(counts)
}

/// Keys of rows, bucket by bucket, and the rows of each bucket.
fn keys_of(
    scatter: &Scatter,
    source: &FileSource,
    rows: std::ops::Range<u64>,
) -> Result<(Vec<u64>, Vec<u8>), Error> {
    of_width!(scatter.dtype, keys_of_width(scatter, source, rows))
}

fn keys_of_width<const N: usize>(
    scatter: &Scatter,
    source: &FileSource,
    rows: std::ops::Range<u64>,
) -> Result<(Vec<u64>, Vec<u8>), Error> {
    let order = KeyEncoding::of(scatter.dtype);
    let mut keys = vec![[0; N]; (rows.end - rows.start) as usize];
    let mut first = rows.start;
    for block in keys.chunks_mut(BLOCK_BYTES / N) {
        let rows = block.len() as u64;
        source.read(first..first + rows, block.as_flattened_mut())?;
        for value in block {
            *value = bytes(order.key(*value));
        }
        first += rows;
    }
    let splitters = Splitters::new(&scatter.splitters);
    let (counts, keys) = splitters.partition(keys);
    Ok((counts, keys.into_flattened()))
}

/// Sorts a bucket, on a device where it takes it, and writes it; how many rows it has.
///
/// # Errors
/// [`Error::File`]; [`Error::Changed`] when a part is not stored as it was.
pub(crate) fn gather(
    gather: &Gather,
    bucket: u64,
    (store, source): (&SpillStore, Option<&FileSource>),
    sink: &dyn Sink,
    device: Option<&dyn ComputeDevice>,
) -> Result<u64, Error> {
    of_width!(
        gather.scatter.dtype,
        gather_bucket(gather, bucket as usize, (store, source), sink, device)
    )
}

fn gather_bucket<const N: usize>(
    gather: &Gather,
    bucket: usize,
    (store, source): (&SpillStore, Option<&FileSource>),
    sink: &dyn Sink,
    device: Option<&dyn ComputeDevice>,
) -> Result<u64, Error> {
    let (start, end) = (gather.starts[bucket], gather.starts[bucket + 1]);
    let order = KeyEncoding::of(gather.scatter.dtype);
    if bucket % 2 == 1 {
        let value = order.value::<N>(gather.scatter.splitters[bucket / 2]);
        fill(value, start..end, sink)?;
        return Ok(end - start);
    }
    let mut keys = vec![[0; N]; (end - start) as usize];
    let into = keys.as_flattened_mut();
    match (store, source) {
        (SpillStore::Ranges(ranges), Some(source)) => {
            ranges.collect(gather, source, bucket as u64, into)?;
        }
        _ => store.collect(&gather.bucket_spec(bucket), into)?,
    }
    sort_keys(&mut keys, device);
    let mut first = start;
    for block in keys.chunks_mut(BLOCK_BYTES / N) {
        for key in &mut *block {
            *key = order.value(number(*key));
        }
        sink.write_bytes(first, block.as_flattened())?;
        first += block.len() as u64;
    }
    Ok(end - start)
}

/// Sorts keys. The CPU and every device give the same order.
fn sort_keys<const N: usize>(keys: &mut Vec<[u8; N]>, device: Option<&dyn ComputeDevice>) {
    let bytes = size_of_val(&keys[..]) as u64;
    let device = device.filter(|device| device.sorts(bytes, N));
    let sorted = device.is_some_and(|device| device.sort(keys.as_flattened_mut(), N).is_ok());
    if !sorted {
        radix::sort(keys);
    }
}

/// Writes one value to many rows.
fn fill<const N: usize>(
    value: [u8; N],
    rows: std::ops::Range<u64>,
    sink: &dyn Sink,
) -> Result<(), Error> {
    let count = rows.end - rows.start;
    let block = vec![value; count.min((BLOCK_BYTES / N) as u64) as usize];
    for first in rows.clone().step_by(block.len().max(1)) {
        let some = (rows.end - first).min(block.len() as u64) as usize;
        sink.write_bytes(first, block[..some].as_flattened())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_values_and_come_back() {
        let floats = [
            f64::from_bits(u64::MAX), // -NaN
            f64::NEG_INFINITY,
            f64::MIN,
            -1.0,
            -5e-324,
            -0.0,
            0.0,
            5e-324,
            1.0,
            f64::INFINITY,
            f64::NAN,
        ];
        assert!(floats.is_sorted_by(|a, b| a.total_cmp(b).is_lt()));
        let keys = floats.map(|value| KeyEncoding::Float.key(value.to_le_bytes()));
        assert!(keys.is_sorted_by(|a, b| a < b));
        for (value, key) in floats.iter().zip(keys) {
            assert_eq!(KeyEncoding::Float.value(key), value.to_le_bytes());
        }
        let singles = [-f32::NAN, -2.5, -0.0, 0.0, 1e-40, f32::INFINITY];
        let keys = singles.map(|value| KeyEncoding::Float.key(value.to_le_bytes()));
        assert!(keys.is_sorted_by(|a, b| a < b) && keys.iter().all(|key| *key >> 32 == 0));
        for (value, key) in singles.iter().zip(keys) {
            assert_eq!(KeyEncoding::Float.value(key), value.to_le_bytes());
        }
        let bytes = [i8::MIN, -1, 0, 1, i8::MAX];
        let keys = bytes.map(|value| KeyEncoding::Signed.key(value.to_le_bytes()));
        assert!(keys.is_sorted_by(|a, b| a < b));
        for (value, key) in bytes.iter().zip(keys) {
            assert_eq!(KeyEncoding::Signed.value(key), value.to_le_bytes());
        }
    }
}
