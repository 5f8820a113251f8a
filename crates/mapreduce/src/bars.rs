//! Speeds against plain loops over the same memory, in one run: with `PACELINE_TEST_LONG=1`.
//!
//! The two of a pair alternate over chunks of 2 MiB. The lower quartiles are compared, which other
//! programs on the machine disturb little. Figures: docs/measurements.md.

use std::hint::black_box;
use std::time::Duration;

use paceline_base::exact::ExactSum;
use paceline_base::testing::{Stopwatch, long};

use crate::hist::{BinCounts, Bins};
use crate::kmeans::{Assigned, Centroids};
use crate::philox::Philox;
use crate::{Values, sort, sum};

/// Values of a column: 256 MiB of f64, beyond any cache here.
const COLUMN: usize = 32 << 20;

const PIECE_BYTES: usize = 2 << 20;

fn took(f: impl FnOnce()) -> Duration {
    let watch = Stopwatch::start();
    f();
    watch.elapsed()
}

/// The share of the plain loop's speed that the other has; both take turns over `data`.
fn share<T>(
    name: &str,
    data: &[T],
    mut plain: impl FnMut(&[T]),
    mut other: impl FnMut(&[T]),
) -> f64 {
    let mut times = [Vec::new(), Vec::new()];
    let piece = PIECE_BYTES / size_of::<T>();
    for (number, piece) in data.chunks_exact(piece).enumerate() {
        // Each reads what the other has not just brought into the cache.
        match number % 2 {
            0 => times[0].push(took(|| plain(piece))),
            _ => times[1].push(took(|| other(piece))),
        }
    }
    let [plain, other] = times.map(|mut times| {
        times.sort();
        times[times.len() / 4].as_secs_f64()
    });
    let gb_s = PIECE_BYTES as f64 / 1e9;
    let share = plain / other;
    eprintln!(
        "{name}: {:.1} GB/s, plain {:.1} GB/s, share {share:.2}",
        gb_s / other,
        gb_s / plain
    );
    share
}

/// The compiler may vectorise it: 32 sums side by side.
fn plain_sum(values: &[f64]) {
    let mut lanes = [0.0; 32];
    for chunk in values.as_chunks::<32>().0 {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    black_box(lanes);
}

fn plain_read(values: &[[u8; 4]]) {
    let mut lanes = [0u32; 32];
    for chunk in values.as_chunks::<32>().0 {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane |= u32::from_le_bytes(*value);
        }
    }
    black_box(lanes);
}

#[test]
fn columns_beside_plain_loops() {
    if !long() {
        return;
    }
    let random = Philox::new(43);
    let value = |i: u64| (random.uniform(i, 0) - 0.5) * (40.0 * random.uniform(i, 1) - 20.0).exp2();
    let column: Vec<f64> = (0..COLUMN as u64).map(value).collect();
    let mut exact = ExactSum::new();
    let sums = share("exact sum", &column, plain_sum, |piece| {
        sum::add(&mut exact, piece)
    });
    let word = |i| (random.word(i, 2) as u32).to_le_bytes();
    let words: Vec<[u8; 4]> = (0..2 * COLUMN as u64).map(word).collect();
    let bins = Bins::new(0.0, (1u64 << 32) as f64, 256).unwrap();
    let mut counts = BinCounts::new(&bins);
    let hist = share("histogram of u32", &words, plain_read, |piece| {
        counts.take_raw(piece.as_flattened());
    });
    assert!(sums >= 0.35, "exact sum: {sums:.2} of a plain one");
    assert!(hist >= 0.2, "histogram: {hist:.2} of plain reads");
}

#[test]
fn an_iteration_of_kmeans() {
    if !long() {
        return;
    }
    let (random, rows, columns) = (Philox::new(44), 1_000_000, 16);
    let values = |n: u64, d| {
        (0..n * columns)
            .map(move |i| random.uniform(i, d))
            .collect()
    };
    let data: Vec<f64> = values(rows, 0);
    let centroids = Centroids {
        k: 64,
        columns: columns as u32,
        values: values(64, 1),
    };
    let best = (0..5).map(|_| {
        took(|| {
            let mut assigned = Assigned::new(&centroids);
            for block in data.chunks(1 << 15) {
                assigned.take(&Values::Floats(block), &centroids);
            }
            black_box(assigned.means(&centroids));
        })
    });
    let best = best.min().unwrap();
    eprintln!("k-means, 1 M rows of 16, 64 centroids: {best:.3?} an iteration");
    assert!(best <= Duration::from_millis(150), "{best:?}");
}

#[test]
fn a_sort_in_memory() {
    if !long() {
        return;
    }
    let random = Philox::new(45);
    let words = (0..50_000_000).map(|i| random.word(i, 0) as u32);
    let keys: Vec<[u8; 4]> = words.map(u32::to_le_bytes).collect();
    let best = (0..3).map(|_| {
        let mut own = keys.clone();
        took(|| sort::radix_sort(&mut own))
    });
    eprintln!("radix sort of 50 M u32: {:.3?}", best.min().unwrap());
}
