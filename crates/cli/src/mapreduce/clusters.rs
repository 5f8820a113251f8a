//! `paceline mapreduce kmeans`: iterations until no centroid moves.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, ensure};
use paceline_mapreduce::kmeans::{Assigned, CELLS_MAX, Centroids};
use paceline_mapreduce::philox::Philox;
use paceline_mapreduce::{Decoded, Dtype, Input, Kind, Partial, Source as _, Task, npy};
use serde::Serialize;

use super::KmeansArgs;

/// What `kmeans --json` prints.
#[derive(Serialize)]
struct Clusters {
    centroids: Vec<Vec<f64>>,
    counts: Vec<u64>,
    /// The sum of all rows' squared distances from their centroids before the last move.
    inertia: f64,
    iterations: u32,
    /// Whether no centroid moved at the end.
    settled: bool,
    /// Rows with NaN or infinities, which belong to no cluster.
    skipped: u64,
}

/// Runs it.
///
/// # Errors
/// What is wrong with the input, or became of the workers.
pub(super) fn kmeans(args: &KmeansArgs) -> anyhow::Result<()> {
    ensure!(!args.job.resumes(), "--resume is for jobs of one pass");
    let input = args.job.input(&args.input)?;
    let cells = input.columns.saturating_mul(args.k.into());
    ensure!(
        (1..=CELLS_MAX).contains(&cells),
        "{} centroids of {} columns: expected 1 to {CELLS_MAX} numbers in all",
        args.k,
        input.columns
    );
    let mut centroids = match &args.init {
        Some(path) => given(path, &input, args.k)?,
        None => drawn(&input, args.k, args.seed)?,
    };
    let mut running = args.job.start()?;
    let mut iterations = 0;
    let (assigned, settled) = loop {
        let kind = Kind::KMeans(centroids.clone());
        let task = Task::of_files(vec![input.clone()], kind);
        let Partial::KMeans(assigned) = running.run(&task)? else {
            unreachable!("rows are assigned");
        };
        let moved = assigned.means(&centroids);
        iterations += 1;
        let settled = moved == centroids;
        centroids = moved;
        if settled || iterations == args.iterations {
            break (assigned, settled);
        }
    };
    if let Some(out) = &args.out {
        write(out, &centroids)?;
    }
    let clusters = clusters(&centroids, &assigned, iterations, settled);
    let figures = running.end(input.rows)?;
    figures.print(args.job.json, clusters, |clusters| {
        let line = |(count, centroid): (&u64, &Vec<f64>)| {
            let numbers: Vec<String> = centroid.iter().map(f64::to_string).collect();
            format!("{count}\t{}", numbers.join(" "))
        };
        let rows = clusters.counts.iter().zip(&clusters.centroids);
        rows.map(line).collect::<Vec<_>>().join("\n")
    })
}

fn clusters(
    centroids: &Centroids,
    assigned: &Assigned,
    iterations: u32,
    settled: bool,
) -> Clusters {
    let rows = centroids.values.chunks(centroids.columns as usize);
    Clusters {
        centroids: rows.map(<[f64]>::to_vec).collect(),
        counts: assigned.rows().to_vec(),
        inertia: assigned.inertia(),
        iterations,
        settled,
        skipped: assigned.skipped(),
    }
}

fn given(path: &Path, input: &Input, k: u32) -> anyhow::Result<Centroids> {
    let init = Input::npy(path)?;
    ensure!(
        (init.rows, init.columns) == (u64::from(k), input.columns),
        "{} has {} rows of {} columns, expected {k} of {}",
        path.display(),
        init.rows,
        init.columns,
        input.columns
    );
    rows_of(&init, 0..init.rows)
}

/// `k` different rows, by random numbers.
fn drawn(input: &Input, k: u32, seed: u64) -> anyhow::Result<Centroids> {
    ensure!(
        u64::from(k) <= input.rows,
        "{k} clusters of {} rows",
        input.rows
    );
    let random = Philox::new(seed);
    let mut rows = BTreeSet::new();
    // Floyd's sampling: each step adds one row.
    for last in input.rows - u64::from(k)..input.rows {
        let drawn = ((u128::from(random.word(last, 0)) * u128::from(last + 1)) >> 64) as u64;
        if !rows.insert(drawn) {
            rows.insert(last);
        }
    }
    rows_of(input, rows)
}

fn rows_of(input: &Input, rows: impl IntoIterator<Item = u64>) -> anyhow::Result<Centroids> {
    let source = input.open()?;
    let mut bytes = vec![0; input.row_bytes() as usize];
    let (mut decoded, mut room) = (Decoded::default(), Vec::new());
    let mut values = Vec::new();
    for row in rows {
        source.read(row..row + 1, &mut bytes)?;
        let decoded = decoded.decode(input.dtype, &bytes);
        values.extend_from_slice(decoded.nearest(&mut room));
    }
    let columns = u32::try_from(input.columns)?;
    Ok(Centroids {
        k: (values.len() / columns as usize) as u32,
        columns,
        values,
    })
}

fn write(path: &Path, centroids: &Centroids) -> anyhow::Result<()> {
    let shape = [centroids.k.into(), centroids.columns.into()];
    let mut bytes = npy::write(Dtype::F64, &shape);
    bytes.extend(
        centroids
            .values
            .iter()
            .flat_map(|value| value.to_le_bytes()),
    );
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}
