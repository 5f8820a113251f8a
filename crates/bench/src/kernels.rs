//! Speed of matrix products of every weight type, compared with the machine's limits.

use std::time::Instant;

use paceline_base::{BlockType, Bytes, KernelClass};
use paceline_plan::draw::{Bar, BarChart};
use paceline_tensor::limits::ReadLimit;
use paceline_tensor::storage::random::random_row;
use paceline_tensor::{
    Activations, Error, Kernels, PackOptions, PackedMatrix, Precision, Product, StoredMatrix,
};
use serde::Serialize;

use crate::limits::{integer_peak, read_limit};
use crate::{Spread, quantile};

/// Distinct rows of a matrix; the others repeat them, which does not affect a kernel.
const ROWS: usize = 64;

/// Rows of the matrix in the product with many activation rows: a model's width, so that a run
/// takes some ms.
const PROMPT_ROWS: usize = 2048;

/// Settings of the measurement.
#[derive(Clone, Debug)]
pub struct KernelSpec {
    pub class: KernelClass,
    pub types: Vec<BlockType>,
    /// Columns of the matrix, a multiple of 256.
    pub cols: usize,
    /// Approximate bytes of the matrix: several times the last cache, or few to measure from the
    /// cache.
    pub bytes: usize,
    /// Rows of activations of the second product, as in prefill.
    pub prompt: u32,
    /// Number of measured runs, after one to warm up.
    pub runs: u32,
}

/// Results of a weight type.
#[derive(Debug, Serialize)]
struct KernelRow {
    r#type: &'static str,
    packed_bytes: u64,
    /// Weights read per second with a single row of activations.
    decode_gb_s: Spread,
    /// Fraction of the read limit measured just before; the median of the pairs.
    decode_of_read_limit: f64,
    /// With many rows: multiplications and additions per second.
    prompt_gop_s: Spread,
    /// Fraction of the integer peak; `None` for floats.
    prompt_of_peak: Option<f64>,
}

/// Results of the measurement.
#[derive(Debug, Serialize)]
pub struct Report {
    instruction_set: &'static str,
    class: &'static str,
    threads: usize,
    cols: usize,
    prompt: u32,
    runs: u32,
    /// Plain reads of memory by all threads.
    read_limit_gb_s: Spread,
    /// Dot products of bytes in registers by all threads.
    integer_peak_gop_s: f64,
    rows: Vec<KernelRow>,
}

/// Measures every type in turn.
pub fn measure(spec: &KernelSpec, kernels: &Kernels) -> Result<Report, Error> {
    let read = ReadLimit::new(spec.bytes, kernels.pool())?;
    let (mut rows, mut limits) = (Vec::new(), Vec::new());
    let peak = integer_peak(kernels);
    for block_type in &spec.types {
        let mut bench = MatrixBench::new(spec, *block_type, kernels)?;
        rows.push(bench.row(spec, &read, peak, &mut limits));
    }
    Ok(Report {
        instruction_set: kernels.instruction_set().name(),
        class: spec.class.name(),
        threads: kernels.pool().threads(),
        cols: spec.cols,
        prompt: spec.prompt,
        runs: spec.runs,
        read_limit_gb_s: Spread::of(&limits),
        integer_peak_gop_s: peak / 1e9,
        rows,
    })
}

/// Matrices of one type, and activations for them.
struct MatrixBench<'a> {
    kernels: &'a Kernels,
    /// Larger than the caches, and its activations and results.
    large: PackedMatrix,
    one: Activations,
    out: Vec<f32>,
    /// Of the size of a model's matrix.
    small: PackedMatrix,
    many: Activations,
    many_out: Vec<f32>,
}

impl<'a> MatrixBench<'a> {
    fn new(spec: &KernelSpec, block_type: BlockType, kernels: &'a Kernels) -> Result<Self, Error> {
        let cols = spec.cols;
        let some = random_row(block_type, ROWS * cols, 1);
        let repeats = spec.bytes.div_ceil(some.len());
        let pack = |repeats: usize| {
            let stored = StoredMatrix {
                block_type,
                rows: ROWS * repeats,
                cols,
                bytes: &some.repeat(repeats),
            };
            PackedMatrix::new(stored, PackOptions::default(), kernels.pool())
        };
        let (large, small) = (pack(repeats)?, pack(PROMPT_ROWS / ROWS)?);
        let precision = Precision::of(spec.class);
        let many = spec.prompt as usize;
        Ok(Self {
            one: activations(1, &large, precision, kernels),
            out: vec![0.0; large.rows()],
            many: activations(many, &small, precision, kernels),
            many_out: vec![0.0; many * small.rows()],
            kernels,
            large,
            small,
        })
    }

    fn row(
        &mut self,
        spec: &KernelSpec,
        read: &ReadLimit,
        peak: f64,
        limits: &mut Vec<f64>,
    ) -> KernelRow {
        let (mut rates, mut shares, mut ops) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=spec.runs {
            let (limit, rate, op) = (read_limit(read, self.kernels), self.decode(), self.prompt());
            if round > 0 {
                limits.push(limit / 1e9);
                rates.push(rate / 1e9);
                shares.push(rate / limit);
                ops.push(op / 1e9);
            }
        }
        let prompt_gop_s = Spread::of(&ops);
        let integers = self.large.reads_integers();
        KernelRow {
            r#type: self.large.block_type().name(),
            packed_bytes: self.large.bytes().0,
            decode_gb_s: Spread::of(&rates),
            decode_of_read_limit: quantile(&shares, 0.5),
            prompt_of_peak: integers.then_some(prompt_gop_s.median * 1e9 / peak),
            prompt_gop_s,
        }
    }

    /// Bytes of weights per second with one row of activations.
    fn decode(&mut self) -> f64 {
        let time = product(self.kernels, &self.large, &self.one, &mut self.out);
        self.large.bytes().0 as f64 / time
    }

    /// Operations per second with many rows.
    fn prompt(&mut self) -> f64 {
        let time = product(self.kernels, &self.small, &self.many, &mut self.many_out);
        (2 * self.many_out.len() * self.small.cols()) as f64 / time
    }
}

/// `n` rows of sine waves as activations.
fn activations(n: usize, w: &PackedMatrix, precision: Precision, kernels: &Kernels) -> Activations {
    let mut x = kernels.activations(n, w.cols(), precision, [w]);
    kernels.fill_rows(&mut x, |t, row| {
        let wave = |(i, value): (usize, &mut f32)| *value = ((i + t) as f32 * 0.7).sin();
        row.iter_mut().enumerate().for_each(wave);
    });
    x
}

fn product(kernels: &Kernels, weights: &PackedMatrix, x: &Activations, out: &mut [f32]) -> f64 {
    let start = Instant::now();
    let product = Product {
        weights,
        first_col: 0,
        out,
    };
    kernels.products(x, [product]);
    start.elapsed().as_secs_f64()
}

impl Report {
    /// Weight bytes read per second, compared with plain reads.
    pub fn svg(&self) -> String {
        let row = |row: &KernelRow| Bar {
            label: row.r#type.to_owned(),
            values: vec![Some(row.decode_gb_s.median)],
            note: format!("{:.0} % of plain reads", 100.0 * row.decode_of_read_limit),
        };
        let limit = Bar {
            label: "plain reads".to_owned(),
            values: vec![Some(self.read_limit_gb_s.median)],
            note: String::new(),
        };
        let bars = BarChart {
            title: format!(
                "Weights read a second, GB/s: one row, {} kernels, {} threads",
                self.instruction_set, self.threads
            ),
            series: vec!["decode".to_owned()],
            rows: self.rows.iter().map(row).chain([limit]).collect(),
        };
        bars.svg()
    }

    /// The rows as a text table.
    pub fn table(&self) -> String {
        let head = format!(
            "{} kernels, class {}, {} threads, {} columns; {} runs, median (p10 .. p90)\n\
             read limit {} GB/s, integer peak {:.0} Gop/s\n\
             {:8}{:>10}  {:>24}{:>10}  {:>26}{:>9}",
            self.instruction_set,
            self.class,
            self.threads,
            self.cols,
            self.runs,
            self.read_limit_gb_s.text(),
            self.integer_peak_gop_s,
            "type",
            "packed",
            "decode GB/s",
            "of limit",
            format!("{} rows Gop/s", self.prompt),
            "of peak",
        );
        self.rows
            .iter()
            .fold(head, |text, row| text + "\n" + &row.text())
    }
}

impl KernelRow {
    fn text(&self) -> String {
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        format!(
            "{:8}{:>10}  {:>24}{:>10}  {:>26}{:>9}",
            self.r#type,
            Bytes(self.packed_bytes).to_string(),
            self.decode_gb_s.text(),
            percent(self.decode_of_read_limit),
            self.prompt_gop_s.text(),
            self.prompt_of_peak.map_or_else(String::new, percent),
        )
    }
}
