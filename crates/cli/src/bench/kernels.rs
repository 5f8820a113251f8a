//! `paceline bench kernels`: matrix products of weight types, compared with the machine's
//! limits.

use std::path::PathBuf;

use paceline_base::BlockType;
use paceline_bench::kernels::{KernelSpec, measure};

use crate::compute::ComputeArgs;
use crate::load;
use crate::output::{draw, print};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    compute: ComputeArgs,
    /// Weight types, such as Q8_0,Q4_K [default: all of GGUF with kernels of their own]
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

/// Measures and prints.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let kernels = load::kernels(load::threads(args.compute, 1))?;
    let report = measure(&args.spec(), &kernels)?;
    draw(args.plot.as_deref(), || report.svg())?;
    print(&if args.json {
        serde_json::to_string(&report)?
    } else {
        report.table()
    })
}

impl Args {
    fn spec(&self) -> KernelSpec {
        KernelSpec {
            class: self.compute.class.unwrap_or_default(),
            types: match self.types.as_slice() {
                [] => {
                    let all = BlockType::GGUF.into_iter();
                    all.filter(|t| !t.is_decoded()).collect()
                }
                some => some.to_vec(),
            },
            cols: (self.cols as usize).next_multiple_of(256),
            bytes: (self.mib as usize) << 20,
            prompt: self.prompt,
            runs: self.runs,
        }
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
