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

/// Rows after which cells are emptied: [`Cell`] has room for as many.
const CELL_ROWS: usize = 1 << 13;

/// Most by which a value's exponent may exceed a cell's unit: 53 bits of mantissa, 13 bits of rows
/// and a sign fit 127 bits.
const CELL_EXPONENTS: i32 = 58;

/// The exact sum of some values whose exponents are near each other.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    units: i128,
    /// Biased exponent of the unit; `None` before the first value.
    exponent: Option<i32>,
}

impl Cell {
    /// Adds a finite value, if the cell holds it. The sign of -0 is for a full sum.
    #[inline(always)]
    fn add(&mut self, value: f64) -> bool {
        let bits = value.to_bits();
        if bits == 1 << 63 {
            return false;
        }
        let exponent = (bits >> 52 & 0x7ff) as i32;
        let mantissa = bits & ((1 << 52) - 1) | u64::from(exponent > 0) << 52;
        let exponent = exponent.max(1);
        let unit = *self.exponent.get_or_insert(exponent - CELL_EXPONENTS / 2);
        let shift = exponent - unit;
        if !(0..=CELL_EXPONENTS).contains(&shift) {
            return false;
        }
        let units = i128::from(mantissa) << shift;
        self.units += if bits >> 63 == 0 { units } else { -units };
        true
    }

    fn empty_into(&mut self, sum: &mut ExactSum) {
        let Self { units, exponent } = std::mem::take(self);
        let Some(exponent) = exponent else {
            return;
        };
        let unit = exponent - 1075;
        sum.add_scaled((units as u32).into(), unit);
        sum.add_scaled(((units >> 32) as u32).into(), unit + 32);
        sum.add_scaled((units >> 64) as i64, unit + 64);
    }
}

/// Points that rows are compared with: `(k, d)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Centroids {
    /// Number of clusters.
    pub k: u32,
    pub columns: u32,
    /// Row by row.
    #[serde(with = "all_bits")]
    pub values: Vec<f64>,
}

/// Assignment of rows to clusters: counts and sums.
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

    /// Adds a block of whole rows.
    pub fn take(&mut self, values: &Values<'_>, centroids: &Centroids) {
        let mut room = Vec::new();
        let (values, lanes) = (values.nearest(&mut room), transposed(centroids));
        let rows = values.chunks_exact(self.columns as usize);
        let found = rows.map(|row| nearest(row, &lanes, centroids.k as usize));
        self.assign_all(values, found);
    }

    /// Adds a block of whole rows, given the nearest centroids and their squared distances that a
    /// device computed.
    pub(crate) fn add_nearest(&mut self, values: &[f64], found: &[(u32, f64)]) {
        let found = found
            .iter()
            .map(|(which, distance)| (*which as usize, *distance));
        self.assign_all(values, found);
    }

    fn assign_all(&mut self, values: &[f64], mut found: impl Iterator<Item = (usize, f64)>) {
        let columns = self.columns as usize;
        let mut cells = vec![Cell::default(); self.sums.len()];
        for rows in values.chunks(CELL_ROWS.saturating_mul(columns)) {
            for (row, (nearest, distance)) in rows.chunks_exact(columns).zip(&mut found) {
                self.assign(row, nearest, distance, &mut cells);
            }
            for (cell, sum) in cells.iter_mut().zip(&mut self.sums) {
                cell.empty_into(sum);
            }
        }
    }

    /// The nearest centroid of each row and its squared distance; a row without a finite distance
    /// has infinity.
    pub(crate) fn find(values: &[f64], centroids: &Centroids) -> Vec<(u32, f64)> {
        let lanes = transposed(centroids);
        let rows = values.chunks_exact(centroids.columns as usize);
        let found = rows.map(|row| nearest(row, &lanes, centroids.k as usize));
        found
            .map(|(which, distance)| (which as u32, distance))
            .collect()
    }

    fn assign(&mut self, row: &[f64], nearest: usize, distance: f64, cells: &mut [Cell]) {
        if !distance.is_finite() {
            self.skipped += 1;
            return;
        }
        self.rows[nearest] += 1;
        self.inertia.add(distance);
        let range = nearest * row.len()..(nearest + 1) * row.len();
        let sums = &mut self.sums[range.clone()];
        for ((cell, sum), value) in cells[range].iter_mut().zip(sums).zip(row) {
            if !cell.add(*value) {
                sum.add(*value);
            }
        }
    }

    /// Adds the assignment of other rows.
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

/// The nearest of `k` centroids, and its squared distance. Each lane keeps its nearest one.
#[inline(always)]
fn nearest_lanes(row: &[f64], lanes: &[[f64; LANES]], k: usize) -> (usize, f64) {
    let (mut best, mut group_of) = ([f64::INFINITY; LANES], [0u64; LANES]);
    for (group, centroids) in (0..).zip(lanes.chunks_exact(row.len())) {
        let mut sums = [0.0; LANES];
        for (x, coordinates) in row.iter().zip(centroids) {
            for i in 0..LANES {
                let difference = x - coordinates[i];
                sums[i] += difference * difference;
            }
        }
        for i in 0..LANES {
            let is_nearer = sums[i] < best[i];
            best[i] = if is_nearer { sums[i] } else { best[i] };
            group_of[i] = if is_nearer { group } else { group_of[i] };
        }
    }
    let least = best.iter().fold(f64::INFINITY, |a, b| a.min(*b));
    let mut nearest = u64::MAX;
    for i in 0..LANES {
        let centroid = group_of[i] * LANES as u64 + i as u64;
        let is_it = best[i] == least;
        nearest = nearest.min(if is_it { centroid } else { u64::MAX });
    }
    ((nearest as usize).min(k - 1), least)
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
    fn cells_have_the_sums_of_the_definition() {
        let random = Philox::new(13);
        let one = Centroids {
            k: 1,
            columns: 1,
            values: vec![0.0],
        };
        // From one size to all finite ones whose squares are finite.
        for range in [0.0, 50.0, 200.0, 1000.0] {
            let value = |i: u64| match i % 40 {
                0 => -0.0,
                1 => f64::from_bits(random.word(i, 2) >> 13),
                _ => {
                    let scale = ((random.uniform(i, 0) - 0.5) * range) as i32;
                    (random.uniform(i, 1) - 0.5) * 2f64.powi(scale)
                }
            };
            let rows: Vec<f64> = (0..30_000).map(value).collect();
            let mut defined = ExactSum::new();
            defined.extend(rows.iter().copied());
            let mut assigned = Assigned::new(&one);
            assigned.take(&Values::Floats(&rows), &one);
            assert_eq!(assigned.sums[0].to_bytes(), defined.to_bytes(), "{range}");
        }
        let (mut sum, mut assigned) = (ExactSum::new(), Assigned::new(&one));
        sum.extend([-0.0; 5]);
        assigned.take(&Values::Floats(&[-0.0; 5]), &one);
        assert_eq!(assigned.sums[0].to_bytes(), sum.to_bytes());
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
