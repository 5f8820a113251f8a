//! k-means: rows are assigned to the nearest centroid, and centroids are means of their rows.
//!
//! A distance is defined as the sum over the columns, in their order, of squared differences, all
//! in f64; ties go to the lowest centroid. Sums of rows are exact, so centroids depend neither on
//! parts nor on threads. Lanes are centroids: each lane adds in the defined order.

use paceline_base::exact::{ExactSum, Ratio};
use serde::{Deserialize, Serialize};

use crate::Values;
use crate::sum::for_each_cpu;
use crate::value::{all_bits, all_exact, exact};

/// Most centroids times columns: sums of 1.1 kB each.
pub const CELLS_MAX: u64 = 1 << 16;

/// Centroids whose distances are computed together.
const LANES: usize = 16;

/// Points that rows are compared with: `(k, d)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Centroids {
    /// How many.
    pub k: u32,
    /// Columns of each.
    pub columns: u32,
    /// Row by row.
    #[serde(with = "all_bits")]
    pub values: Vec<f64>,
}

/// How rows were assigned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assigned {
    columns: u32,
    rows: Vec<u64>,
    #[serde(with = "all_exact")]
    sums: Vec<ExactSum>,
    #[serde(with = "exact")]
    inertia: ExactSum,
    skipped: u64,
}

impl Assigned {
    /// Of no rows.
    pub fn new(centroids: &Centroids) -> Self {
        let cells = centroids.k * centroids.columns;
        Self {
            columns: centroids.columns,
            rows: vec![0; centroids.k as usize],
            sums: vec![ExactSum::new(); cells as usize],
            inertia: ExactSum::new(),
            skipped: 0,
        }
    }

    /// Rows of each centroid.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Rows without a distance: those with NaN or infinities.
    pub const fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The sum of all rows' squared distances, rounded once.
    pub fn inertia(&self) -> f64 {
        self.inertia.value()
    }

    /// Takes a block of whole rows in.
    pub fn take(&mut self, values: &Values<'_>, centroids: &Centroids) {
        let mut room = Vec::new();
        let columns = self.columns as usize;
        let lanes = transposed(centroids);
        for row in values.nearest(&mut room).chunks_exact(columns) {
            let (nearest, distance) = nearest(row, &lanes, centroids.k as usize);
            if !distance.is_finite() {
                self.skipped += 1;
                continue;
            }
            self.rows[nearest] += 1;
            self.inertia.add(distance);
            let sums = &mut self.sums[nearest * columns..][..columns];
            sums.iter_mut()
                .zip(row)
                .for_each(|(sum, value)| sum.add(*value));
        }
    }

    /// Takes in how other rows were assigned.
    pub fn merge(&mut self, other: &Self) {
        for (own, other) in self.rows.iter_mut().zip(&other.rows) {
            *own += other;
        }
        for (own, other) in self.sums.iter_mut().zip(&other.sums) {
            own.merge(other);
        }
        self.inertia.merge(&other.inertia);
        self.skipped += other.skipped;
    }

    /// The means of the rows of each centroid, rounded once; one without rows stays where it was.
    pub fn means(&self, before: &Centroids) -> Centroids {
        let mut after = before.clone();
        let columns = self.columns as usize;
        for (i, (value, sum)) in after.values.iter_mut().zip(&self.sums).enumerate() {
            let rows = self.rows[i / columns];
            if rows > 0 {
                *value = Ratio::of(sum).over(rows).value();
            }
        }
        after
    }
}

/// Coordinates of [`LANES`] centroids side by side, column by column; absent ones are infinitely
/// far away.
fn transposed(centroids: &Centroids) -> Vec<[f64; LANES]> {
    let (k, columns) = (centroids.k as usize, centroids.columns as usize);
    let mut lanes = vec![[f64::INFINITY; LANES]; k.div_ceil(LANES) * columns];
    for (i, value) in centroids.values.iter().enumerate() {
        let (centroid, column) = (i / columns, i % columns);
        lanes[centroid / LANES * columns + column][centroid % LANES] = *value;
    }
    lanes
}

/// The nearest of `k` centroids, and its squared distance.
#[inline(always)]
fn nearest_lanes(row: &[f64], lanes: &[[f64; LANES]], k: usize) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    for (group, centroids) in lanes.chunks_exact(row.len()).enumerate() {
        let mut sums = [0.0; LANES];
        for (x, coordinates) in row.iter().zip(centroids) {
            for i in 0..LANES {
                let difference = x - coordinates[i];
                sums[i] += difference * difference;
            }
        }
        let least = sums
            .iter()
            .fold(f64::INFINITY, |a, b| if *b < a { *b } else { a });
        if least < best.1 {
            let lane = sums.iter().position(|sum| *sum == least).unwrap_or(0);
            best = (group * LANES + lane, least);
        }
    }
    (best.0.min(k - 1), best.1)
}

for_each_cpu!(
    nearest(row: &[f64], lanes: &[[f64; LANES]], k: usize) -> (usize, f64),
    nearest_lanes(row, lanes, k),
    nearest_lanes(row, lanes, k)
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Philox;

    #[test]
    fn rows_go_to_the_nearest_and_ties_to_the_lowest() {
        let random = Philox::new(8);
        for (k, columns) in [(1, 1), (3, 5), (16, 2), (17, 16), (64, 3)] {
            let grid = |i: usize, d| (random.uniform(i as u64, d) * 8.0).floor();
            let centroids = Centroids {
                k: k as u32,
                columns: columns as u32,
                values: (0..k * columns).map(|i| grid(i, 0)).collect(),
            };
            let rows: Vec<f64> = (0..500 * columns).map(|i| grid(i, 1)).collect();
            let mut expected = vec![0; k];
            let mut inertia = 0.0;
            for row in rows.chunks(columns) {
                let distance =
                    |c: &[f64]| -> f64 { row.iter().zip(c).map(|(x, y)| (x - y) * (x - y)).sum() };
                let all: Vec<f64> = centroids.values.chunks(columns).map(distance).collect();
                let least = all.iter().copied().fold(f64::INFINITY, f64::min);
                expected[all.iter().position(|d| *d == least).unwrap()] += 1;
                inertia += least;
            }
            let mut assigned = Assigned::new(&centroids);
            assigned.take(&Values::Floats(&rows), &centroids);
            assert_eq!(assigned.rows(), expected);
            assert_eq!(assigned.inertia(), inertia);
        }
    }

    #[test]
    fn rows_without_a_distance_are_counted_apart() {
        let centroids = Centroids {
            k: 2,
            columns: 1,
            values: vec![0.0, 10.0],
        };
        let mut assigned = Assigned::new(&centroids);
        let rows = [f64::NAN, 9.0, f64::INFINITY, 1.0, 2.0];
        assigned.take(&Values::Floats(&rows), &centroids);
        assert_eq!((assigned.rows(), assigned.skipped()), (&[2, 1][..], 2));
        assert_eq!(assigned.means(&centroids).values, [1.5, 9.0]);
    }
}
