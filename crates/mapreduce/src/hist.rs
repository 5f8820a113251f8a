//! Histograms: how many values lie in each of some intervals of equal width.
//!
//! The edges are those of `numpy.linspace`. Bin `k` holds `edge[k] <= x < edge[k + 1]`, the last
//! one its right edge too, as `numpy.histogram` has it. Counts are integers, so they have no order.

use serde::{Deserialize, Serialize};

use crate::value::bits;
use crate::{Dtype, Values};

/// Most bins.
pub const BINS_MAX: u32 = 1 << 20;

/// Most bins that are counted in several tables at once, which have to stay in a cache.
const RAW_BINS_MAX: u32 = 4096;

/// Tables that are counted in turn, so that equal values that follow each other do not wait.
const TABLES: usize = 8;

/// Intervals of equal width.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bins {
    /// Left edge of the first.
    #[serde(with = "bits")]
    pub low: f64,
    /// Right edge of the last, above `low`.
    #[serde(with = "bits")]
    pub high: f64,
    /// Number of bins, from 1 to [`BINS_MAX`].
    pub count: u32,
}

impl Bins {
    /// Intervals between two finite numbers; `None` when there are none.
    pub fn new(low: f64, high: f64, count: u32) -> Option<Self> {
        let is_right = (high - low).is_finite() && low < high && (1..=BINS_MAX).contains(&count);
        is_right.then_some(Self { low, high, count })
    }

    /// Left edge of the first bin and right edge of the last that have all values of a type.
    /// `None` where the type has too many.
    pub fn of_type(dtype: Dtype) -> Option<(f64, f64)> {
        match dtype {
            Dtype::U32 => Some((0.0, 2f64.powi(32))),
            Dtype::U16 => Some((0.0, 65536.0)),
            Dtype::U8 | Dtype::Bool => Some((0.0, 256.0)),
            _ => None,
        }
    }

    /// All edges, one more than there are bins.
    pub fn edges(&self) -> Vec<f64> {
        let step = (self.high - self.low) / f64::from(self.count);
        let inner = (0..self.count).map(|k| f64::from(k) * step + self.low);
        inner.chain([self.high]).collect()
    }
}

/// Values in each bin, and those in none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BinCounts {
    bins: Bins,
    counts: Vec<u64>,
    below: u64,
    above: u64,
    nan: u64,
}

impl BinCounts {
    pub fn new(bins: &Bins) -> Self {
        Self {
            bins: *bins,
            counts: vec![0; bins.count as usize],
            below: 0,
            above: 0,
            nan: 0,
        }
    }

    /// Values in each bin.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Values below the first bin, above the last one, and NaN.
    pub const fn outside(&self) -> [u64; 3] {
        [self.below, self.above, self.nan]
    }

    pub const fn bins(&self) -> &Bins {
        &self.bins
    }

    /// Counts a block.
    pub fn take(&mut self, values: &Values<'_>) {
        let mut room = Vec::new();
        let edges = self.bins.edges();
        for value in values.nearest(&mut room) {
            self.count(*value, &edges);
        }
    }

    fn count(&mut self, value: f64, edges: &[f64]) {
        let Bins { low, high, count } = self.bins;
        if !(low..=high).contains(&value) {
            match value {
                _ if value.is_nan() => self.nan += 1,
                _ if value < low => self.below += 1,
                _ => self.above += 1,
            }
            return;
        }
        let last = count as usize - 1;
        let mut bin = ((value - low) / (high - low) * f64::from(count)) as usize;
        bin = bin.min(last);
        while value < edges[bin] {
            bin -= 1;
        }
        while bin < last && value >= edges[bin + 1] {
            bin += 1;
        }
        self.counts[bin] += 1;
    }

    /// Whether u32 values can be counted by their highest bits.
    pub(crate) fn counts_raw(&self) -> bool {
        let Bins { low, high, count } = self.bins;
        let is_whole = low == 0.0 && high == (1u64 << 32) as f64;
        is_whole && count.is_power_of_two() && (2..=RAW_BINS_MAX).contains(&count)
    }

    /// Counts a block of u32, which [`counts_raw`](Self::counts_raw) allows.
    pub(crate) fn take_raw(&mut self, bytes: &[u8]) {
        let count = self.counts.len();
        let shift = 32 - count.trailing_zeros();
        let mut tables = vec![0u32; count * TABLES];
        let (groups, rest) = bytes.as_chunks::<{ 4 * TABLES }>();
        for group in groups {
            for (i, value) in group.as_chunks::<4>().0.iter().enumerate() {
                let bin = (u32::from_le_bytes(*value) >> shift) as usize;
                tables[i * count + bin] += 1;
            }
        }
        for value in rest.as_chunks::<4>().0 {
            tables[(u32::from_le_bytes(*value) >> shift) as usize] += 1;
        }
        for table in tables.chunks(count) {
            for (total, more) in self.counts.iter_mut().zip(table) {
                *total += u64::from(*more);
            }
        }
    }

    /// Adds a device's counts: each bin, then the values below, above and NaN.
    pub(crate) fn take_counted(&mut self, counted: &[u32]) {
        for (own, more) in self.counts.iter_mut().zip(counted) {
            *own += u64::from(*more);
        }
        let outside = counted.get(self.counts.len()..).unwrap_or_default();
        let into = [&mut self.below, &mut self.above, &mut self.nan];
        for (own, more) in into.into_iter().zip(outside) {
            *own += u64::from(*more);
        }
    }

    /// Adds the counts of other values.
    pub fn merge(&mut self, other: &Self) {
        for (own, other) in self.counts.iter_mut().zip(&other.counts) {
            *own += other;
        }
        self.below += other.below;
        self.above += other.above;
        self.nan += other.nan;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Philox;

    #[test]
    fn edges_belong_to_the_bin_on_their_right() {
        let bins = Bins::new(0.0, 1.0, 10).unwrap();
        let mut counts = BinCounts::new(&bins);
        counts.take(&Values::Floats(&bins.edges()));
        assert_eq!(counts.counts(), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
        counts.take(&Values::Floats(&[-0.1, 1.1, f64::NAN, f64::INFINITY, -0.0]));
        assert_eq!(counts.outside(), [1, 2, 1]);
        assert_eq!(counts.counts()[0], 2);
        for (low, high, count) in [(1.0, 1.0, 3), (0.0, f64::NAN, 3), (0.0, 1.0, 0)] {
            assert_eq!(Bins::new(low, high, count), None);
        }
        assert_eq!(Bins::new(-f64::MAX, f64::MAX, 2), None);
    }

    #[test]
    fn raw_counts_are_those_of_decoded_values() {
        let random = Philox::new(9);
        let values: Vec<u32> = (0..10_007).map(|i| random.word(i, 0) as u32).collect();
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let floats: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
        for count in [2, 256, 4096] {
            let bins = Bins::new(0.0, (1u64 << 32) as f64, count).unwrap();
            let (mut raw, mut plain) = (BinCounts::new(&bins), BinCounts::new(&bins));
            assert!(raw.counts_raw());
            raw.take_raw(&bytes);
            plain.take(&Values::Floats(&floats));
            assert_eq!(raw, plain);
        }
    }
}
