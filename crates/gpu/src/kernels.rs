//! Kernels over rows, as methods of a device.

use paceline_base::exact::ExactSum;
use wgpu::Buffer;

use crate::Error;
use crate::device::{Gpu, Kernel, KernelDispatch};
use crate::function::ScalarFunction;

pub(crate) const FLOAT: &str = include_str!("wgsl/float.wgsl");
const PHILOX: &str = include_str!("wgsl/philox.wgsl");
const BINS: &str = include_str!("wgsl/bins.wgsl");
const PRODUCTS: &str = include_str!("wgsl/products.wgsl");
const EXTREMES: &str = include_str!("wgsl/extremes.wgsl");
const HIST: &str = include_str!("wgsl/hist.wgsl");
const HIST_RAW: &str = include_str!("wgsl/hist_raw.wgsl");
const NEAREST: &str = include_str!("wgsl/nearest.wgsl");
const MATMUL: &str = include_str!("wgsl/matmul.wgsl");

/// Rows and columns of a workgroup's part of a product, as in the kernel.
const PRODUCT_SIDE: u64 = 16;

/// Rows of a workgroup that sums or compares, as in the kernels.
const ROWS_REDUCED: u64 = 256 * 64;

/// Rows of a workgroup that counts, as in the kernels.
const ROWS_COUNTED: u64 = 256 * 32;

/// Rows of a workgroup with a thread for each row.
pub(crate) const ROWS_EACH: u64 = 64;

/// Slices of a sum, and the exponent of the first one's unit, as in `bins.wgsl`.
const SUM: (usize, i32) = (136, -1074);

/// The same of products, as in `products.wgsl`.
const PRODUCT: (usize, i32) = (264, -2148);

/// Most operations of a submission of k-means: a second of a small chip.
const DISTANCES_MAX: u64 = 1 << 26;

/// A column of values.
#[derive(Clone, Copy, Debug)]
pub enum Column<'a> {
    /// `(n,)` values.
    Values(&'a [f64]),
    /// Random numbers from 0 to 1 by Philox 4x32-10, from the row's number and a dimension.
    Random { seed: u64, dimension: u32 },
}

/// The input rows of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct RowRange<'a> {
    /// Number of rows, from 1 to [`Gpu::rows_max`].
    pub count: u64,
    pub first: u64,
    pub columns: &'a [Column<'a>],
    /// Statements of WGSL that compute `value` of `x`, `y`, `z`, `w` and `i` by the functions of
    /// `wgsl/float.wgsl`. Never a user's text.
    pub map: Option<&'a str>,
}

/// The least and the greatest value, as integers in the order of the values, -0 before 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extremes {
    /// The least; above `greatest` if all values are NaN.
    pub least: u64,
    pub greatest: u64,
    /// Whether there is a NaN among the values.
    pub has_nan: bool,
}

/// A run of a kernel: its parameters, workgroups and size of result.
pub(crate) struct KernelRun<'a> {
    pub(crate) kernel: Kernel<'a>,
    pub(crate) params: &'a [u32],
    pub(crate) groups: u64,
    pub(crate) result_bytes: u64,
}

impl Gpu {
    /// The rows' values: their expression, or the first column.
    ///
    /// # Errors
    /// As of all calls: [`Error::Lost`], [`Error::Late`], [`Error::Bytes`], [`Error::Kernel`].
    pub fn values(&self, rows: &RowRange<'_>) -> Result<Vec<f64>, Error> {
        let _turn = self.turn();
        let (bytes, _) = self.mapped(rows, true)?;
        Ok(floats(&bytes))
    }

    /// The exact sum of the rows' values.
    pub fn sum(&self, rows: &RowRange<'_>) -> Result<ExactSum, Error> {
        let _turn = self.turn();
        let values = self.column(rows)?;
        let groups = rows.count.div_ceil(ROWS_REDUCED);
        let job = KernelRun {
            kernel: Kernel {
                entry: "sum",
                text: &[FLOAT, BINS],
            },
            params: &[rows.count as u32],
            groups,
            result_bytes: groups * 4 * (SUM.0 as u64 + 1),
        };
        Ok(total(&self.job(&job, &[&values])?, SUM))
    }

    /// The exact sum of the products of two columns. With an expression or one column, the exact
    /// sum of squares of the rows' values.
    pub fn products(&self, rows: &RowRange<'_>) -> Result<ExactSum, Error> {
        let _turn = self.turn();
        let left = self.column(rows)?;
        let right = match rows.columns {
            [_, Column::Values(right), ..] if rows.map.is_none() => {
                self.filled(&bytes_of(right))?
            }
            _ => left.clone(),
        };
        let groups = rows.count.div_ceil(ROWS_REDUCED);
        let job = KernelRun {
            kernel: Kernel {
                entry: "dot",
                text: &[FLOAT, PRODUCTS],
            },
            params: &[rows.count as u32],
            groups,
            result_bytes: groups * 4 * (PRODUCT.0 as u64 + 1),
        };
        Ok(total(&self.job(&job, &[&left, &right])?, PRODUCT))
    }

    /// The least and the greatest of the rows' values.
    pub fn extremes(&self, rows: &RowRange<'_>) -> Result<Extremes, Error> {
        let _turn = self.turn();
        let values = self.column(rows)?;
        let groups = rows.count.div_ceil(ROWS_REDUCED);
        let job = KernelRun {
            kernel: Kernel {
                entry: "extremes",
                text: &[FLOAT, EXTREMES],
            },
            params: &[rows.count as u32],
            groups,
            result_bytes: groups * 20,
        };
        let words = words(&self.job(&job, &[&values])?);
        let mut all = Extremes {
            least: u64::MAX,
            greatest: 0,
            has_nan: false,
        };
        for group in words.as_chunks::<5>().0 {
            all.least = all.least.min(join(group[0], group[1]));
            all.greatest = all.greatest.max(join(group[2], group[3]));
            all.has_nan |= group[4] != 0;
        }
        Ok(all)
    }

    /// Counts the rows' values between two or more ascending edges. Bin `k` has `edges[k] <= x <
    /// edges[k + 1]`; the last bin includes its right edge. After the bins come the counts below,
    /// above, and of NaN.
    ///
    /// # Panics
    /// With fewer than two edges.
    pub fn hist(&self, rows: &RowRange<'_>, edges: &[f64]) -> Result<Vec<u32>, Error> {
        assert!(edges.len() > 1, "{} edges", edges.len());
        let _turn = self.turn();
        let values = self.column(rows)?;
        let keys: Vec<u8> = edges.iter().flat_map(|e| key(*e).to_le_bytes()).collect();
        let keys = self.filled(&keys)?;
        let bins = edges.len() as u64 - 1;
        let job = KernelRun {
            kernel: Kernel {
                entry: "hist",
                text: &[FLOAT, HIST],
            },
            params: &[rows.count as u32, bins as u32],
            groups: rows.count.div_ceil(ROWS_COUNTED),
            result_bytes: 4 * (bins + 3),
        };
        Ok(words(&self.job(&job, &[&values, &keys])?))
    }

    /// Counts of u32, little-endian, by their highest `bits` bits, from 1 to 12.
    ///
    /// # Panics
    /// With other bits, or without values.
    pub fn hist_raw(&self, values: &[u8], bits: u32) -> Result<Vec<u32>, Error> {
        assert!(
            (1..=12).contains(&bits) && !values.is_empty(),
            "{bits} bits"
        );
        let _turn = self.turn();
        let count = values.len() as u64 / 4;
        let job = KernelRun {
            kernel: Kernel {
                entry: "hist_raw",
                text: &[HIST_RAW],
            },
            params: &[count as u32, 32 - bits, 1 << bits],
            groups: count.div_ceil(ROWS_COUNTED),
            result_bytes: 4 << bits,
        };
        let values = self.filled(values)?;
        Ok(words(&self.job(&job, &[&values])?))
    }

    /// The nearest of `centroids` to each row of `values` and its squared distance, both of
    /// `columns` columns row by row. Ties go to the lowest; a row without a finite distance gets
    /// 0 and infinity.
    pub fn nearest(
        &self,
        values: &[f64],
        centroids: &[f64],
        columns: usize,
    ) -> Result<Vec<(u32, f64)>, Error> {
        let _turn = self.turn();
        let places = self.filled(&bytes_of(centroids))?;
        let k = centroids.len() / columns;
        let at_once = DISTANCES_MAX / centroids.len().max(1) as u64;
        let at_once = at_once.clamp(1, self.rows_max(8 * columns as u64)) as usize;
        let mut all = Vec::with_capacity(values.len() / columns);
        for some in values.chunks(at_once * columns) {
            let rows = some.len() as u64 / columns as u64;
            let job = KernelRun {
                kernel: Kernel {
                    entry: "nearest",
                    text: &[FLOAT, NEAREST],
                },
                params: &[rows as u32, columns as u32, k as u32],
                groups: rows.div_ceil(ROWS_EACH),
                result_bytes: 12 * rows,
            };
            let some = self.filled(&bytes_of(some))?;
            let words = words(&self.job(&job, &[&some, &places])?);
            let found = words.as_chunks::<3>().0.iter();
            all.extend(found.map(|[which, low, high]| (*which, f64::from_bits(join(*low, *high)))));
        }
        Ok(all)
    }

    /// The product of matrices `left`, `(m, depth)`, and `right`, `(depth, n)`: `(m, n)` in f32,
    /// without promised bits.
    ///
    /// # Panics
    /// Without values.
    pub fn matmul(&self, left: &[f32], right: &[f32], depth: usize) -> Result<Vec<f32>, Error> {
        assert!(depth > 0 && !left.is_empty(), "matrices without values");
        let _turn = self.turn();
        let (m, n) = ((left.len() / depth) as u64, (right.len() / depth) as u64);
        let across = n.div_ceil(PRODUCT_SIDE);
        let job = KernelRun {
            kernel: Kernel {
                entry: "matmul",
                text: &[MATMUL],
            },
            params: &[m as u32, depth as u32, n as u32, across as u32],
            groups: m.div_ceil(PRODUCT_SIDE) * across,
            result_bytes: 4 * m * n,
        };
        let bytes =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
        let (left, right) = (self.filled(&bytes(left))?, self.filled(&bytes(right))?);
        let product = words(&self.job(&job, &[&left, &right])?);
        Ok(product.into_iter().map(f32::from_bits).collect())
    }

    /// A user's function of each row: one column for each argument, `(n,)` words each.
    ///
    /// # Panics
    /// With another number of columns.
    pub fn function(
        &self,
        function: &ScalarFunction,
        columns: &[Vec<u32>],
    ) -> Result<Vec<u32>, Error> {
        assert_eq!(columns.len(), function.arguments().len(), "columns");
        let _turn = self.turn();
        let rows = columns.first().map_or(0, Vec::len) as u64;
        let kernel = function.kernel();
        let job = KernelRun {
            kernel: Kernel {
                entry: "function_of_user",
                text: &[&kernel],
            },
            params: &[rows as u32],
            groups: rows.div_ceil(ROWS_EACH),
            result_bytes: 4 * rows,
        };
        let bytes = |column: &Vec<u32>| column.iter().flat_map(|v| v.to_le_bytes()).collect();
        let buffers: Vec<Vec<u8>> = columns.iter().map(bytes).collect();
        let buffers: Result<Vec<Buffer>, Error> = buffers.iter().map(|b| self.filled(b)).collect();
        let buffers = buffers?;
        let buffers: Vec<&Buffer> = buffers.iter().collect();
        Ok(words(&self.job(&job, &buffers)?))
    }

    fn column(&self, rows: &RowRange<'_>) -> Result<Buffer, Error> {
        match (rows.map, rows.columns) {
            (None, [Column::Values(values), ..]) => self.filled(&bytes_of(values)),
            _ => Ok(self.mapped(rows, false)?.1),
        }
    }

    /// Computes the expression of each row; `read` copies the values to the host.
    fn mapped(&self, rows: &RowRange<'_>, read: bool) -> Result<(Vec<u8>, Buffer), Error> {
        let kernel = map_kernel(rows);
        let pipeline = self.pipeline(Kernel {
            entry: "map",
            text: &[FLOAT, PHILOX, &kernel],
        })?;
        let first = [rows.first as u32, (rows.first >> 32) as u32];
        let params = self.filled(&bytes_of_words(&[rows.count as u32, first[0], first[1]]))?;
        let (done, values) = (self.room(4)?, self.room(8 * rows.count)?);
        let mut inputs = Vec::new();
        for (binding, column) in (3..).zip(rows.columns) {
            if let Column::Values(values) = column {
                inputs.push((binding, self.filled(&bytes_of(values))?));
            }
        }
        let mut buffers = vec![(0, &params), (1, &done), (2, &values)];
        buffers.extend(inputs.iter().map(|(binding, buffer)| (*binding, buffer)));
        let step = KernelDispatch {
            pipeline: &pipeline,
            buffers: &buffers,
            groups: rows.count.div_ceil(ROWS_EACH) as u32,
        };
        // Signatures are checked even where the values stay on the device.
        let wanted = if read { &values } else { &done };
        let bytes = self.execute(&[step], &done, wanted)?;
        Ok((bytes, values))
    }

    pub(crate) fn job(&self, job: &KernelRun<'_>, inputs: &[&Buffer]) -> Result<Vec<u8>, Error> {
        let pipeline = self.pipeline(job.kernel)?;
        let params = self.filled(&bytes_of_words(job.params))?;
        let (done, result) = (self.room(4)?, self.room(job.result_bytes)?);
        let mut buffers = vec![(0, &params), (1, &done), (2, &result)];
        buffers.extend((3..).zip(inputs.iter().copied()));
        let step = KernelDispatch {
            pipeline: &pipeline,
            buffers: &buffers,
            groups: job.groups as u32,
        };
        self.execute(&[step], &done, &result)
    }
}

/// The text of a kernel that computes an expression of each row.
fn map_kernel(rows: &RowRange<'_>) -> String {
    let (mut bindings, mut columns) = (String::new(), String::new());
    let names = ["x", "y", "z", "w"].iter().zip(rows.columns);
    for (binding, (name, column)) in (3..).zip(names) {
        match column {
            Column::Values(_) => {
                bindings += &format!(
                    "@group(0) @binding({binding}) var<storage, read> column_{name}: \
                     array<vec2<u32>>;\n"
                );
                columns += &format!("let {name} = column_{name}[id.x];\n");
            }
            Column::Random { seed, dimension } => {
                let (low, high) = (*seed as u32, seed >> 32);
                columns += &format!(
                    "let {name} = uniform_of(vec2<u32>({low}u, {high}u), sample, {dimension}u);\n"
                );
            }
        }
    }
    let body = rows.map.unwrap_or("let value = x;");
    format!(
        "@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<vec2<u32>>;
{bindings}
@compute @workgroup_size(64)
fn map(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {{
if id.x < params[0] {{
let sample = add64(vec2<u32>(id.x, 0u), vec2<u32>(params[1], params[2]));
let i = f_whole(sample);
{columns}{body}
result[id.x] = f_plain(value);
}}
if thread == 0u {{ atomicAdd(&done[0], 1u); }}
}}
"
    )
}

/// Adds the sums of workgroups. Each has its slices, then its flags.
fn total(bytes: &[u8], (slices, unit): (usize, i32)) -> ExactSum {
    let words = words(bytes);
    let mut totals = vec![0i64; slices];
    let mut seen = 0;
    for group in words.chunks_exact(slices + 1) {
        for (total, word) in totals.iter_mut().zip(group) {
            *total += i64::from(*word as i32);
        }
        seen |= group[slices];
    }
    let mut sum = ExactSum::new();
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0];
    for (bit, value) in special.into_iter().enumerate() {
        if seen >> bit & 1 == 1 {
            sum.note(value);
        }
    }
    for (slice, total) in (0..).zip(totals) {
        if total != 0 {
            sum.add_scaled(total, unit + 16 * slice);
        }
    }
    sum
}

/// Orders like values do, the zeros equal, as `key_of` in `float.wgsl`.
const fn key(value: f64) -> u64 {
    let bits = value.to_bits();
    let sign = 1 << 63;
    match bits & sign {
        _ if value == 0.0 => sign,
        0 => bits | sign,
        _ => !bits,
    }
}

const fn join(low: u32, high: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

fn bytes_of(values: &[f64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    let all = bytes.as_chunks().0.iter();
    all.map(|value| f64::from_le_bytes(*value)).collect()
}

pub(crate) fn bytes_of_words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    let all = bytes.as_chunks().0.iter();
    all.map(|word| u32::from_le_bytes(*word)).collect()
}
