//! Products of matrices that are larger than memory: `(m, k)` by `(k, n)`, rows of the first as
//! parts.
//!
//! A value is the sum of its products in the order of `k`, each product and each sum rounded to
//! f64. So it has the same bits for any cut, any number of threads and any CPU. Only tiles are in
//! memory. A graphics processor computes in f32, whose bits differ between devices.

use std::ops::Range;

use crate::device::{ComputeDevice, Lost};
use crate::sum::for_each_cpu;
use crate::{Decoded, Error, FileSource, RowPartition, RowSource as _, Sink, Values};

/// Rows of a register tile: with [`ACROSS`] columns 12 registers of AVX2.
const TALL: usize = 6;

/// Columns of a register tile.
const ACROSS: usize = 8;

/// Depth of a tile: with [`COLUMNS`] 2 MiB of the second matrix, a second-level cache.
const DEPTH: usize = 256;

/// Columns of a tile of the second matrix.
const COLUMNS: usize = 1024;

/// Most rows of a tile: the second matrix is read once for each.
const ROWS_MAX: usize = 240;

/// Most bytes of a thread's rows of the result.
const RESULT_BYTES_MAX: usize = 32 << 20;

/// Computes the rows of a part and writes them; how many values. `sources` are the two matrices.
///
/// # Errors
/// [`Error::File`]; [`Error::Device`] of a device that is lost, since the CPU gives other bits.
pub(crate) fn compute(
    sources: &[FileSource; 2],
    part: RowPartition,
    sink: &dyn Sink,
    device: Option<&dyn ComputeDevice>,
) -> Result<u64, Error> {
    let [left, right] = sources;
    let n = right.columns() as usize;
    let rows_max = (RESULT_BYTES_MAX / (8 * n).max(1)).clamp(1, ROWS_MAX);
    let end = part.start + part.rows;
    for start in (part.start..end).step_by(rows_max) {
        let rows = start..end.min(start + rows_max as u64);
        let mut result = vec![0.0; (rows.end - rows.start) as usize * n];
        for k in tiles(left.columns(), DEPTH) {
            let a = read(left, &rows, &k)?;
            for columns in tiles(right.columns(), COLUMNS) {
                let b = read(right, &k, &columns)?;
                let tile = Tile {
                    depth: (k.end - k.start) as usize,
                    first: columns.start as usize,
                    columns: (columns.end - columns.start) as usize,
                };
                match device {
                    None => tile.add(&a, &b, &mut result, n),
                    Some(device) => tile.add_by(device, &a, &b, &mut result, n)?,
                }
            }
        }
        sink.write(start * n as u64, &Values::Floats(&result))?;
    }
    Ok(part.rows * n as u64)
}

fn tiles(count: u64, of: usize) -> impl Iterator<Item = Range<u64>> {
    let starts = (0..count).step_by(of);
    starts.map(move |start| start..count.min(start + of as u64))
}

/// A tile of a matrix, row by row, as f64.
fn read(source: &FileSource, rows: &Range<u64>, columns: &Range<u64>) -> Result<Vec<f64>, Error> {
    let row_bytes = (columns.end - columns.start) as usize * source.dtype().bytes();
    let mut bytes = vec![0; row_bytes * (rows.end - rows.start) as usize];
    for (row, into) in rows.clone().zip(bytes.chunks_mut(row_bytes)) {
        source.read_columns(row, columns.start, into)?;
    }
    let (mut decoded, mut nearest) = (Decoded::default(), Vec::new());
    let values = decoded.decode(source.dtype(), &bytes);
    Ok(values.nearest(&mut nearest).to_vec())
}

/// Which part of a result a product of two tiles is added to.
struct Tile {
    depth: usize,
    /// First column of the result.
    first: usize,
    columns: usize,
}

impl Tile {
    /// Adds `a`, `(rows, depth)`, times `b`, `(depth, columns)`, to columns of `result`, `(rows,
    /// n)`.
    fn add(&self, a: &[f64], b: &[f64], result: &mut [f64], n: usize) {
        let panels: Vec<Vec<f64>> = (0..self.columns)
            .step_by(ACROSS)
            .map(|column| self.panel(b, column))
            .collect();
        let mut quads = vec![0.0; TALL * self.depth];
        for (rows, into) in a.chunks(TALL * self.depth).zip(result.chunks_mut(TALL * n)) {
            for (row, values) in rows.chunks(self.depth).enumerate() {
                for (k, value) in values.iter().enumerate() {
                    quads[k * TALL + row] = *value;
                }
            }
            for (panel, column) in panels.iter().zip((0..self.columns).step_by(ACROSS)) {
                let width = ACROSS.min(self.columns - column);
                let from = self.first + column;
                let mut sums = [[0.0; ACROSS]; TALL];
                for (sums, row) in sums.iter_mut().zip(into.chunks(n)) {
                    sums[..width].copy_from_slice(&row[from..from + width]);
                }
                add_products(&quads, panel, &mut sums);
                for (sums, row) in sums.iter().zip(into.chunks_mut(n)) {
                    row[from..from + width].copy_from_slice(&sums[..width]);
                }
            }
        }
    }

    /// `(depth, ACROSS)` values of `b` from a column on, zeros behind its last one.
    fn panel(&self, b: &[f64], column: usize) -> Vec<f64> {
        let mut panel = vec![0.0; self.depth * ACROSS];
        let width = ACROSS.min(self.columns - column);
        for (into, row) in panel.chunks_mut(ACROSS).zip(b.chunks(self.columns)) {
            into[..width].copy_from_slice(&row[column..column + width]);
        }
        panel
    }

    /// The same by a device, in f32.
    fn add_by(
        &self,
        device: &dyn ComputeDevice,
        a: &[f64],
        b: &[f64],
        result: &mut [f64],
        n: usize,
    ) -> Result<(), Error> {
        let narrow = |values: &[f64]| values.iter().map(|value| *value as f32).collect();
        let (a, b): (Vec<f32>, Vec<f32>) = (narrow(a), narrow(b));
        let product = device.matmul(&a, &b, self.depth);
        let product = product.map_err(|Lost(reason)| Error::Device { reason })?;
        for (row, from) in result.chunks_mut(n).zip(product.chunks(self.columns)) {
            let into = row[self.first..].iter_mut();
            into.zip(from)
                .for_each(|(sum, value)| *sum = f64::from(*sum as f32 + value));
        }
        Ok(())
    }
}

for_each_cpu!(
    add_products(a: &[f64], b: &[f64], sums: &mut [[f64; ACROSS]; TALL]) -> (),
    add_lanes(a, b, sums),
    add_lanes(a, b, sums)
);

/// Adds the products of `a`, `(k, TALL)`, and `b`, `(k, ACROSS)`, in the order of `k`. Nothing is
/// fused, so that a CPU without FMA gives the same bits.
#[inline(always)]
fn add_lanes(a: &[f64], b: &[f64], sums: &mut [[f64; ACROSS]; TALL]) {
    let mut all = *sums;
    let steps = a
        .as_chunks::<TALL>()
        .0
        .iter()
        .zip(b.as_chunks::<ACROSS>().0);
    for (a, b) in steps {
        for (sums, a) in all.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    *sums = all;
}

#[cfg(test)]
mod tests {
    use crate::philox::Philox;
    use crate::{Dtype, Error, FileSink, InputFile, JobSpec, JobWorkers, Kind, npy};

    /// Shapes about the sizes of tiles; the definition is three loops.
    #[test]
    fn products_have_the_bits_of_the_definition() {
        let home = tempfile::tempdir().unwrap();
        let matrix = |name: &str, rows: u64, columns: u64| {
            let random = Philox::new(rows * 31 + columns);
            let values: Vec<f64> = (0..rows * columns)
                .map(|i| random.uniform(i, 0) - 0.4)
                .collect();
            let mut bytes = npy::write(Dtype::F64, &[rows, columns]);
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            let path = home.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            (InputFile::npy(&path).unwrap(), values)
        };
        for (m, k, n) in [(1, 1, 1), (7, 300, 1030), (251, 2, 9), (5, 0, 3), (3, 4, 0)] {
            let ((left, a), (right, b)) = (matrix("a", m, k), matrix("b", k, n));
            let mut expected = vec![0.0; (m * n) as usize];
            for (at, sum) in expected.iter_mut().enumerate() {
                let (i, j) = (at / n as usize, at % n as usize);
                for l in 0..k as usize {
                    *sum += a[i * k as usize + l] * b[l * n as usize + j];
                }
            }
            let out = home.path().join("out");
            for threads in [1, 3] {
                FileSink::create(&out, Dtype::F64, &[m, n]).unwrap();
                let inputs = vec![left.clone(), right.clone()];
                let task = JobSpec::of_files(inputs, Kind::Product(out.clone()));
                JobWorkers::here(threads)
                    .run(&task, None, &mut |_| {})
                    .unwrap();
                let bytes = std::fs::read(&out).unwrap();
                let values = &bytes[bytes.len() - 8 * expected.len()..];
                let values = values
                    .as_chunks()
                    .0
                    .iter()
                    .map(|it| f64::from_le_bytes(*it));
                assert!(
                    values.eq(expected.iter().copied()),
                    "{m} {k} {n}, {threads} threads"
                );
            }
        }
        let (left, right) = (matrix("a", 2, 3).0, matrix("b", 2, 3).0);
        let task = JobSpec::of_files(vec![left, right], Kind::Product(home.path().join("out")));
        let refused = JobWorkers::here(1).run(&task, None, &mut |_| {});
        assert!(matches!(
            refused,
            Err(Error::Inner {
                got: 2,
                expected: 3,
                ..
            })
        ));
    }
}
