//! k-means: iterations of jobs until no centroid moves, from rows drawn by seed or from a file, and
//! the text of the result.

use std::collections::{BTreeSet, HashSet};
use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;

use serde::Serialize;

use crate::kmeans::{Assigned, CELLS_MAX, Centroids};
use crate::philox::Philox;
use crate::{Decoded, Dtype, Error, InputFile, JobSpec, Kind, PartialResult, RowSource as _, npy};

/// Bytes that are read at once where rows are looked through, if a row is not larger.
const BLOCK_BYTES: u64 = 1 << 20;

/// Clusters of rows.
#[derive(Clone, Debug, Serialize)]
pub struct Clusters {
    /// Means of their rows.
    pub centroids: Vec<Vec<f64>>,
    pub counts: Vec<u64>,
    /// The sum of all rows' squared distances from their centroids before the last move.
    pub inertia: f64,
    /// Jobs that ran.
    pub iterations: u32,
    /// Whether no centroid moved at the end.
    pub settled: bool,
    /// Rows that belong to no cluster: none, since a row without a distance is an error.
    pub skipped: u64,
}

/// The first centroids: `k` rows of `input` with different values, drawn by `seed`, or those of the
/// file `init`.
///
/// # Errors
/// [`Error::Cells`], [`Error::Init`], [`Error::Drawn`], [`Error::Distinct`]; [`Error::NoDistance`]
/// of `init`; a file that cannot be read.
pub fn first(
    input: &InputFile,
    k: u32,
    seed: u64,
    init: Option<&Path>,
) -> Result<Centroids, Error> {
    let columns = input.columns;
    let cells = columns.saturating_mul(k.into());
    if !(1..=CELLS_MAX).contains(&cells) {
        return Err(Error::Cells { k, columns });
    }
    match init {
        Some(path) => read_centroids(path, input, k),
        None => drawn(input, k, seed),
    }
}

/// Iterates until no centroid moves, at most `iterations` times; `run` runs a job. The clusters,
/// and their centroids as another run begins with them.
///
/// # Errors
/// The first error of `run`; [`Error::NoDistance`].
pub fn iterate<E: From<Error>>(
    input: &InputFile,
    mut centroids: Centroids,
    iterations: u32,
    mut run: impl FnMut(&JobSpec) -> Result<PartialResult, E>,
) -> Result<(Clusters, Centroids), E> {
    let mut done = 0;
    let (assigned, settled) = loop {
        let kind = Kind::KMeans(centroids.clone());
        let task = JobSpec::of_files(vec![input.clone()], kind);
        let PartialResult::KMeans(assigned) = run(&task)? else {
            unreachable!("rows are assigned");
        };
        if assigned.skipped() > 0 {
            return Err(without_distance(input, &centroids, assigned.skipped()).into());
        }
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

fn read_centroids(path: &Path, input: &InputFile, k: u32) -> Result<Centroids, Error> {
    let init = InputFile::npy(path)?;
    if (init.rows, init.columns) != (u64::from(k), input.columns) {
        return Err(Error::Init {
            path: path.to_owned(),
            rows: init.rows,
            columns: init.columns,
            k,
            expected: input.columns,
        });
    }
    let centroids = rows_of(&init, 0..init.rows)?;
    let rows = centroids.values.chunks(centroids.columns as usize);
    let is_wrong = |row: &[f64]| row.iter().any(|value| !value.is_finite());
    let count = rows.clone().filter(|row| is_wrong(row)).count() as u64;
    match (0..).zip(rows).find(|(_, row)| is_wrong(row)) {
        None => Ok(centroids),
        Some((row, values)) => Err(no_distance(&init, row, values, count)),
    }
}

/// `k` rows with different values, by random numbers. Rows are drawn by their numbers first. A row
/// that equals one before it then gives way to a row that was not drawn.
fn drawn(input: &InputFile, k: u32, seed: u64) -> Result<Centroids, Error> {
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
    let drawn = rows_of(input, rows.iter().copied())?;
    let (mut known, mut first_equal) = (HashSet::new(), None);
    let values = drawn.values.chunks(drawn.columns as usize);
    let all: Vec<u64> = rows.iter().copied().collect();
    for (row, values) in all.into_iter().zip(values) {
        if !known.insert(key(values)) {
            rows.remove(&row);
            first_equal.get_or_insert(row);
        }
    }
    let Some(first_equal) = first_equal else {
        return Ok(drawn);
    };
    replace(input, k, first_equal, (&mut known, &mut rows))?;
    match rows.len() == k as usize {
        true => rows_of(input, rows),
        false => Err(Error::Distinct {
            k,
            rows: known.len() as u64,
        }),
    }
}

/// Adds rows with values that are not `known` until there are `k`: the next ones from row `from`
/// on, then those before it. At most one pass.
fn replace(
    input: &InputFile,
    k: u32,
    from: u64,
    (known, rows): (&mut HashSet<Vec<u64>>, &mut BTreeSet<u64>),
) -> Result<(), Error> {
    for range in [from..input.rows, 0..from] {
        each_block(input, range, |start, values| {
            for (row, values) in (start..).zip(values.chunks(input.columns as usize)) {
                if rows.len() == k as usize {
                    return Break(());
                }
                if known.insert(key(values)) {
                    rows.insert(row);
                }
            }
            Continue(())
        })?;
    }
    Ok(())
}

/// Equal for rows without a distance between them: 0 and -0 are the same.
fn key(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| (value + 0.0).to_bits()).collect()
}

/// The error about `rows` rows that have no distance to a centroid. Reads up to the first of them.
fn without_distance(input: &InputFile, centroids: &Centroids, rows: u64) -> Error {
    let mut found = None;
    let read = each_block(input, 0..input.rows, |start, values| {
        let mut nearest = Assigned::find(values, centroids).into_iter();
        let Some(first) = nearest.position(|(_, distance)| !distance.is_finite()) else {
            return Continue(());
        };
        let columns = input.columns as usize;
        let values = &values[first * columns..(first + 1) * columns];
        found = Some(no_distance(input, start + first as u64, values, rows));
        Break(())
    });
    match (read, found) {
        (Err(error), _) => error,
        (Ok(()), Some(error)) => error,
        (Ok(()), None) => Error::Changed {
            path: input.path.clone(),
        },
    }
}

fn no_distance(input: &InputFile, row: u64, values: &[f64], rows: u64) -> Error {
    let has = |is: fn(f64) -> bool| values.iter().any(|value| is(*value));
    Error::NoDistance {
        path: input.path.clone(),
        row,
        what: match (has(f64::is_nan), has(f64::is_infinite)) {
            (true, _) => "NaN",
            (false, true) => "an infinity",
            (false, false) => "numbers whose squares are too large",
        },
        rows,
    }
}

/// Reads blocks of rows in their order until `visit` ends it, which gets a block's first row and
/// values.
fn each_block(
    input: &InputFile,
    rows: std::ops::Range<u64>,
    mut visit: impl FnMut(u64, &[f64]) -> ControlFlow<()>,
) -> Result<(), Error> {
    let source = input.open()?;
    let (mut decoded, mut room) = (Decoded::default(), Vec::new());
    let block = (BLOCK_BYTES / input.row_bytes()).max(1);
    let mut start = rows.start;
    while start < rows.end {
        let end = rows.end.min(start + block);
        let mut bytes = vec![0; ((end - start) * input.row_bytes()) as usize];
        source.read(start..end, &mut bytes)?;
        let decoded = decoded.decode(input.dtype, &bytes);
        if visit(start, decoded.nearest(&mut room)).is_break() {
            return Ok(());
        }
        start = end;
    }
    Ok(())
}

fn rows_of(input: &InputFile, rows: impl IntoIterator<Item = u64>) -> Result<Centroids, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::JobWorkers;

    fn file(folder: &Path, name: &str, rows: &[[f64; 2]]) -> InputFile {
        let path = folder.join(name);
        let mut bytes = npy::write(Dtype::F64, &[rows.len() as u64, 2]);
        bytes.extend(rows.as_flattened().iter().flat_map(|x| x.to_le_bytes()));
        std::fs::write(&path, bytes).unwrap();
        InputFile::npy(&path).unwrap()
    }

    fn run(input: &InputFile, first: Centroids) -> Result<Clusters, Error> {
        let mut crew = JobWorkers::here(2);
        let job = |task: &JobSpec| crew.run(task, None, &mut |_| {});
        iterate(input, first, 20, job).map(|(clusters, _)| clusters)
    }

    #[test]
    fn rows_without_a_distance_are_refused_by_their_number() {
        let folder = tempfile::tempdir().unwrap();
        for (bad, what) in [
            ([1.0, f64::NAN], "has NaN"),
            ([f64::NEG_INFINITY, 1.0], "has an infinity"),
            ([1e200, 1.0], "has numbers whose squares are too large"),
        ] {
            let mut rows: Vec<[f64; 2]> = (0..50).map(|i| [f64::from(i), 1.0]).collect();
            (rows[7], rows[31]) = (bad, bad);
            let input = file(folder.path(), "bad.npy", &rows);
            let centroids = Centroids {
                k: 2,
                columns: 2,
                values: vec![3.0, 1.0, 30.0, 1.0],
            };
            let error = run(&input, centroids).unwrap_err().to_string();
            assert!(error.contains(&format!("row 7 {what}")), "{error}");
            assert!(error.contains("in all: 2"), "{error}");
        }
        let input = file(folder.path(), "k.npy", &[[1.0, f64::NAN], [2.0, 3.0]]);
        let drawn = first(&input, 2, 0, None).unwrap();
        let error = run(&input, drawn).unwrap_err().to_string();
        assert!(error.contains("k.npy: row 0 has NaN"), "{error}");
        let input = file(folder.path(), "good.npy", &[[1.0, 2.0], [3.0, 4.0]]);
        file(folder.path(), "init.npy", &[[1.0, 2.0], [f64::NAN, 4.0]]);
        let init = folder.path().join("init.npy");
        let error = first(&input, 2, 0, Some(&init)).unwrap_err().to_string();
        assert!(error.contains("init.npy: row 1 has NaN"), "{error}");
    }

    #[test]
    fn first_centroids_differ_and_are_drawn_as_before_where_all_rows_do() {
        let folder = tempfile::tempdir().unwrap();
        // 0 and -0 are no two values; 97 of 100 rows are equal.
        let mut rows = vec![[0.0, 1.0]; 100];
        (rows[3], rows[50], rows[98]) = ([2.0, 2.0], [-0.0, 1.0], [5.0, 5.0]);
        let input = file(folder.path(), "equal.npy", &rows);
        for seed in 0..20 {
            let first = first(&input, 3, seed, None).unwrap();
            let mut all: Vec<&[f64]> = first.values.chunks(2).collect();
            all.sort_by(|a, b| a.partial_cmp(b).unwrap());
            assert_eq!(all, [[0.0, 1.0], [2.0, 2.0], [5.0, 5.0]], "{seed}");
            let clusters = run(&input, first).unwrap();
            assert!(clusters.counts.iter().all(|count| *count > 0), "{seed}");
        }
        let error = first(&input, 4, 0, None).unwrap_err();
        assert!(
            matches!(error, Error::Distinct { k: 4, rows: 3 }),
            "{error}"
        );
        // Commit e1291a57 gives the same: its clusters after one iteration have 80, 10, 9 and 1
        // rows.
        let rows: Vec<[f64; 2]> = (0..100).map(|i| [f64::from(i), 0.5]).collect();
        let input = file(folder.path(), "different.npy", &rows);
        let drawn = first(&input, 4, 5, None).unwrap();
        let drawn: Vec<f64> = drawn.values.into_iter().step_by(2).collect();
        assert_eq!(drawn, [77.0, 81.0, 98.0, 99.0]);
    }
}
