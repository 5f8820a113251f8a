//! `paceline mapreduce sort`: values in ascending order.

use std::path::Path;

use paceline_cluster::machine;
use paceline_mapreduce::Dtype;
use paceline_mapreduce::sort::Sort;
use serde::Serialize;

use super::{JobArgs, SortArgs};

/// Memory when the system does not say how much is available.
const MEMORY: u64 = 1 << 30;

/// The object that `sort --json` prints.
#[derive(Serialize)]
struct Shown<'a> {
    out: &'a Path,
    dtype: Dtype,
    /// Buckets that were sorted, each by itself.
    buckets: usize,
    /// Bytes of memory for all nodes together.
    memory: u64,
    /// Whether the values stayed in memory; else they were written and read once more.
    in_memory: bool,
}

/// Runs it.
///
/// # Errors
/// What is wrong with the input, or became of the workers.
pub(super) fn sort(args: &SortArgs) -> anyhow::Result<()> {
    let input = args.job.input(&args.input)?.flat();
    let available = machine::memory().and_then(|memory| memory.available);
    let half = available.map_or(MEMORY, |available| available.0 / 2);
    let sort = Sort {
        input,
        out: JobArgs::place(&args.out),
        memory: args.memory.unwrap_or(half),
        journal: args.job.journal().map(Path::to_owned),
    };
    let mut running = args.job.start()?;
    let sorted = running.sort(&sort)?;
    let shown = Shown {
        out: &args.out,
        dtype: sort.input.dtype,
        buckets: sorted.buckets,
        memory: sort.memory,
        in_memory: sorted.in_memory,
    };
    let figures = running.end(sorted.rows)?;
    figures.print(args.job.json, shown, |shown| {
        shown.out.display().to_string()
    })
}

/// Bytes of a text such as `500M` or `2G`, in powers of 1024.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G', 'T']) {
        Some(digits) => (
            digits,
            10 * (1 + "KMGT".find(&text[digits.len()..]).unwrap_or(0)),
        ),
        None => (text, 0),
    };
    let number: Option<u64> = digits.parse().ok();
    let bytes = number.and_then(|number| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| "expected a number of bytes, as 500M or 2G".to_owned())
}

#[cfg(test)]
mod tests {
    use super::memory;

    #[test]
    fn memory_has_units() {
        for (text, bytes) in [
            ("17", Some(17)),
            ("3K", Some(3 << 10)),
            ("500M", Some(500 << 20)),
            ("1T", Some(1 << 40)),
            ("", None),
            ("G", None),
            ("-1M", None),
            ("99999999999T", None),
        ] {
            assert_eq!(memory(text).ok(), bytes, "{text}");
        }
    }
}
