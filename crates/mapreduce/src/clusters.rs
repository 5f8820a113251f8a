//! k-means as iterations of jobs, until no centroid moves.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use crate::kmeans::{Assigned, CELLS_MAX, Centroids};
use crate::philox::Philox;
use crate::{Decoded, Dtype, Error, Input, Kind, Partial, Source as _, Task, npy};

/// Clusters of rows.
#[derive(Clone, Debug, Serialize)]
pub struct Clusters {
    /// Means of their rows.
    pub centroids: Vec<Vec<f64>>,
    /// Numbers of their rows.
    pub counts: Vec<u64>,
    /// The sum of all rows' squared distances from their centroids before the last move.
    pub inertia: f64,
    /// Jobs that ran.
    pub iterations: u32,
    /// Whether no centroid moved at the end.
    pub settled: bool,
    /// Rows with NaN or infinities, which belong to no cluster.
    pub skipped: u64,
}

/// The first centroids: `k` different rows of `input`, drawn by `seed`, or those of the file
/// `init`.
///
/// # Errors
/// [`Error::Cells`], [`Error::Init`], [`Error::Drawn`]; a file that cannot be read.
pub fn first(input: &Input, k: u32, seed: u64, init: Option<&Path>) -> Result<Centroids, Error> {
    let columns = input.columns;
    let cells = columns.saturating_mul(k.into());
    if !(1..=CELLS_MAX).contains(&cells) {
        return Err(Error::Cells { k, columns });
    }
    match init {
        Some(path) => given(path, input, k),
        None => drawn(input, k, seed),
    }
}

/// Iterates until no centroid moves, at most `iterations` times; `run` runs a job. The clusters,
/// and their centroids as another run begins with them.
///
/// # Errors
/// The first error of `run`.
pub fn iterate<E>(
    input: &Input,
    mut centroids: Centroids,
    iterations: u32,
    mut run: impl FnMut(&Task) -> Result<Partial, E>,
) -> Result<(Clusters, Centroids), E> {
    let mut done = 0;
    let (assigned, settled) = loop {
        let kind = Kind::KMeans(centroids.clone());
        let task = Task::of_files(vec![input.clone()], kind);
        let Partial::KMeans(assigned) = run(&task)? else {
            unreachable!("rows are assigned");
        };
        let moved = assigned.means(&centroids);
        done += 1;
        let settled = moved == centroids;
        centroids = moved;
        if settled || done == iterations {
            break (assigned, settled);
        }
    };
    Ok((clusters(&centroids, &assigned, done, settled), centroids))
}

impl Clusters {
    /// A line for each cluster: its rows, and its centroid.
    pub fn text(&self) -> String {
        let line = |(count, centroid): (&u64, &Vec<f64>)| {
            let numbers: Vec<String> = centroid.iter().map(f64::to_string).collect();
            format!("{count}\t{}", numbers.join(" "))
        };
        let rows = self.counts.iter().zip(&self.centroids);
        rows.map(line).collect::<Vec<_>>().join("\n")
    }
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

fn given(path: &Path, input: &Input, k: u32) -> Result<Centroids, Error> {
    let init = Input::npy(path)?;
    if (init.rows, init.columns) != (u64::from(k), input.columns) {
        return Err(Error::Init {
            path: path.to_owned(),
            rows: init.rows,
            columns: init.columns,
            k,
            expected: input.columns,
        });
    }
    rows_of(&init, 0..init.rows)
}

/// `k` different rows, by random numbers.
fn drawn(input: &Input, k: u32, seed: u64) -> Result<Centroids, Error> {
    if u64::from(k) > input.rows {
        return Err(Error::Drawn {
            k,
            rows: input.rows,
        });
    }
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

fn rows_of(input: &Input, rows: impl IntoIterator<Item = u64>) -> Result<Centroids, Error> {
    let source = input.open()?;
    let mut bytes = vec![0; input.row_bytes() as usize];
    let (mut decoded, mut room) = (Decoded::default(), Vec::new());
    let mut values = Vec::new();
    for row in rows {
        source.read(row..row + 1, &mut bytes)?;
        let decoded = decoded.decode(input.dtype, &bytes);
        values.extend_from_slice(decoded.nearest(&mut room));
    }
    let columns = u32::try_from(input.columns).unwrap_or(u32::MAX); // CELLS_MAX at most
    Ok(Centroids {
        k: (values.len() / columns as usize) as u32,
        columns,
        values,
    })
}

/// Writes centroids to a .npy file.
///
/// # Errors
/// [`Error::File`].
pub fn write(path: &Path, centroids: &Centroids) -> Result<(), Error> {
    let shape = [centroids.k.into(), centroids.columns.into()];
    let mut bytes = npy::write(Dtype::F64, &shape);
    bytes.extend(
        centroids
            .values
            .iter()
            .flat_map(|value| value.to_le_bytes()),
    );
    std::fs::write(path, bytes).map_err(|source| Error::File {
        what: "write",
        path: path.to_owned(),
        source,
    })
}
