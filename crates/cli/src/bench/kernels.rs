//! `paceline bench kernels`: matrix products of every weight type, beside what the machine can do.

use std::path::PathBuf;
use std::time::Instant;

use paceline_base::{BlockType, Bytes};
use paceline_plan::draw::{Bar, Bars};
use paceline_tensor::limits::ReadLimit;
use paceline_tensor::stored::random::random_row;
use paceline_tensor::{
    Activations, Kernels, PackOptions, Packed, Precision, Product, StoredMatrix,
};
use serde::Serialize;

use super::limits::{integer_peak, read_limit};
use super::{Spread, quantile};
use crate::compute::ComputeArgs;
use crate::load;
use crate::output::{draw, print};

/// Different rows of a matrix; the others repeat them. A kernel does not notice.
const ROWS: usize = 64;

/// Rows of the matrix that many rows of activations meet: as many as a model's width, so that a run
/// takes some ms.
const PROMPT_ROWS: usize = 2048;

/// Arguments of `paceline bench kernels`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    compute: ComputeArgs,
    /// Weight types, such as Q8_0,Q4_K [default: all]
    #[arg(long, value_name = "A,B,..", value_delimiter = ',', value_parser = weight_type)]
    types: Vec<BlockType>,
    /// Columns of the matrix, rounded up to 256
    #[arg(long, value_name = "N", default_value_t = 2048,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    cols: u32,
    /// Size of the matrix in MiB: several times the last cache, or small to measure from it
    #[arg(long, value_name = "MIB", default_value_t = 192,
          value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    mib: u32,
    /// Rows of activations of the second product, as when a prompt is read
    #[arg(long, value_name = "N", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..=1 << 14))]
    prompt: u32,
    /// Measured runs, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Also write the speeds as a picture
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn weight_type(name: &str) -> Result<BlockType, String> {
    let mut all = BlockType::ALL.into_iter();
    all.find(|t| t.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| {
            format!(
                "types are {}",
                BlockType::ALL.map(BlockType::name).join(", ")
            )
        })
}

/// One weight type.
#[derive(Debug, Serialize)]
struct Row {
    r#type: &'static str,
    packed_bytes: u64,
    /// One row of activations: weights read per second.
    decode_gb_s: Spread,
    /// Of what plain reads reached just before; the median of the pairs.
    decode_of_read_limit: f64,
    /// Many rows: multiplications and additions per second.
    prompt_gop_s: Spread,
    /// Of the integer peak; nothing for floats.
    prompt_of_peak: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    instruction_set: &'static str,
    class: &'static str,
    threads: usize,
    cols: usize,
    prompt: u32,
    runs: u32,
    /// Plain reads of memory by all threads.
    read_limit_gb_s: Spread,
    /// Dot products of bytes on registers by all threads.
    integer_peak_gop_s: f64,
    rows: Vec<Row>,
}

/// Measures and prints.
///
/// # Errors
/// Memory that cannot be had.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let kernels = load::kernels(load::threads(args.compute, 1))?;
    let read = ReadLimit::new((args.mib as usize) << 20, kernels.pool())?;
    let types = match args.types.as_slice() {
        [] => &BlockType::GGUF,
        some => some,
    };
    let (mut rows, mut limits) = (Vec::new(), Vec::new());
    let peak = integer_peak(&kernels);
    for block_type in types {
        let mut bench = Bench::new(args, *block_type, &kernels)?;
        rows.push(bench.row(args, &read, peak, &mut limits));
    }
    let report = Report {
        instruction_set: kernels.instruction_set().name(),
        class: args.compute.class.unwrap_or_default().name(),
        threads: kernels.pool().threads(),
        cols: args.cols(),
        prompt: args.prompt,
        runs: args.runs,
        read_limit_gb_s: Spread::of(&limits),
        integer_peak_gop_s: peak / 1e9,
        rows,
    };
    draw(args.plot.as_deref(), || report.svg())?;
    print(&if args.json {
        serde_json::to_string(&report)?
    } else {
        report.table()
    })
}

impl Args {
    fn cols(&self) -> usize {
        (self.cols as usize).next_multiple_of(256)
    }
}

/// Matrices of one type, and activations for them.
struct Bench<'a> {
    kernels: &'a Kernels,
    /// Larger than the caches, and its activations and results.
    large: Packed,
    one: Activations,
    out: Vec<f32>,
    /// Of a model's size.
    small: Packed,
    many: Activations,
    many_out: Vec<f32>,
}

impl<'a> Bench<'a> {
    fn new(args: &Args, block_type: BlockType, kernels: &'a Kernels) -> anyhow::Result<Self> {
        let cols = args.cols();
        let some = random_row(block_type, ROWS * cols, 1);
        let repeats = ((args.mib as usize) << 20).div_ceil(some.len());
        let pack = |repeats: usize| {
            let stored = StoredMatrix {
                block_type,
                rows: ROWS * repeats,
                cols,
                bytes: &some.repeat(repeats),
            };
            Packed::new(stored, PackOptions::default(), kernels.pool())
        };
        let (large, small) = (pack(repeats)?, pack(PROMPT_ROWS / ROWS)?);
        let precision = Precision::of(args.compute.class.unwrap_or_default());
        let many = args.prompt as usize;
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

    fn row(&mut self, args: &Args, read: &ReadLimit, peak: f64, limits: &mut Vec<f64>) -> Row {
        let (mut rates, mut shares, mut ops) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=args.runs {
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
        Row {
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

/// `n` rows of waves to multiply with a matrix.
fn activations(n: usize, w: &Packed, precision: Precision, kernels: &Kernels) -> Activations {
    let mut x = kernels.activations(n, w.cols(), precision, [w]);
    kernels.fill_rows(&mut x, |t, row| {
        let wave = |(i, value): (usize, &mut f32)| *value = ((i + t) as f32 * 0.7).sin();
        row.iter_mut().enumerate().for_each(wave);
    });
    x
}

/// Seconds of a product.
fn product(kernels: &Kernels, weights: &Packed, x: &Activations, out: &mut [f32]) -> f64 {
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
    /// Weights read a second beside what plain reads reach.
    fn svg(&self) -> String {
        let row = |row: &Row| Bar {
            label: row.r#type.to_owned(),
            values: vec![Some(row.decode_gb_s.median)],
            note: format!("{:.0} % of plain reads", 100.0 * row.decode_of_read_limit),
        };
        let limit = Bar {
            label: "plain reads".to_owned(),
            values: vec![Some(self.read_limit_gb_s.median)],
            note: String::new(),
        };
        let bars = Bars {
            title: format!(
                "Weights read a second, GB/s: one row, {} kernels, {} threads",
                self.instruction_set, self.threads
            ),
            series: vec!["decode".to_owned()],
            rows: self.rows.iter().map(row).chain([limit]).collect(),
        };
        bars.svg()
    }

    fn table(&self) -> String {
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

impl Row {
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

#[cfg(test)]
mod tests {
    use super::weight_type;

    #[test]
    fn types_are_found_in_any_case_and_others_are_named() {
        assert_eq!(weight_type("q4_k").unwrap().name(), "Q4_K");
        assert!(weight_type("q9_0").unwrap_err().contains("Q8_0"));
    }
}
