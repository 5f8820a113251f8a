//! A sort as two jobs. Scatter partitions the values into buckets by splitters from a sample.
//! Gather sorts each bucket into its place in the output.
//!
//! Draws splitters again if a bucket exceeds the memory limit. With a journal, a killed sort
//! resumes in the half that it had reached.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Gather, Scatter, SortPlan, SpillStore};
use crate::{
    Error, FileSink, InputFile, JobProgress, JobSpec, JobWorkers, Journal, Kind, PartialResult,
};

/// Attempts to draw splitters before a bucket counts as too large.
const ATTEMPTS: u32 = 4;

/// A file that is to be sorted.
#[derive(Clone, Debug)]
pub struct Sort {
    /// Its values, rows of one.
    pub input: InputFile,
    /// The `.npy` file to write. `OUT.part` and `OUT.sort` lie next to it while the sort runs.
    pub out: PathBuf,
    /// Bytes of memory for all threads together.
    pub memory: u64,
    /// The journal of finished parts, to resume from.
    pub journal: Option<PathBuf>,
}

/// Result of a sort.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sorted {
    pub rows: u64,
    pub buckets: usize,
    /// Whether the values stayed in memory; else they were written and read once more.
    pub in_memory: bool,
}

impl Sort {
    /// Sorts. `watch` receives the progress of both halves of the sort.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Bucket`], [`Error::Gone`], and those of [`JobWorkers::run`].
    pub fn run(
        &self,
        crew: &mut JobWorkers,
        watch: &mut dyn FnMut(&JobSpec, JobProgress),
    ) -> Result<Sorted, Error> {
        let (input, width) = (&self.input, self.input.dtype.bytes() as u64);
        let shared = crew.is_processes() || self.journal.is_some();
        let plan = SortPlan::new(input.bytes(), width, crew.threads(), self.memory, shared)?;
        let machines = crew.machines();
        let spills = !plan.in_memory && machines == 0;
        let folder = spills.then(|| with_end(&self.out, "sort"));
        if let Some(folder) = &folder {
            let made = std::fs::create_dir_all(folder);
            made.map_err(|source| Error::file("make", folder, source))?;
        }
        let store = Arc::new(SpillStore::new(folder.as_deref()));
        let mut overfull = 0;
        for attempt in 0..ATTEMPTS {
            let mut scatter = match self.recorded(attempt) {
                Some(scatter) => scatter,
                None => plan.scatter(input, attempt, folder.clone())?,
            };
            // A resumed job may have other machines; not none, since it has kept no keys.
            if (scatter.machines > 0) != (machines > 0) {
                scatter.machines = machines;
            }
            let mut halves = Halves {
                sort: self,
                store: &store,
                attempt,
            };
            let counts = halves.scatter(&scatter, crew, watch)?;
            if let Some(bytes) = plan.overfull(&counts, width) {
                overfull = bytes;
                continue;
            }
            let rows = halves.gather(scatter.clone(), &counts, crew, watch)?;
            self.tidy(folder.as_deref())?;
            return Ok(Sorted {
                rows,
                buckets: scatter.buckets(),
                in_memory: plan.in_memory,
            });
        }
        self.tidy(folder.as_deref())?;
        Err(Error::Bucket {
            bytes: overfull,
            most: plan.bucket_bytes_max,
        })
    }

    /// The partition of a killed sort, perhaps planned for another number of threads.
    fn recorded(&self, attempt: u32) -> Option<Scatter> {
        let task = Journal::task_of(&self.journal("scatter", attempt)?)?;
        match task.kind {
            Kind::Scatter(scatter) => Some(scatter),
            _ => None,
        }
    }

    fn journal(&self, half: &str, attempt: u32) -> Option<PathBuf> {
        let journal = self.journal.as_ref()?;
        Some(match (half, attempt) {
            ("scatter", 0) => journal.clone(),
            _ => with_end(journal, &format!("{half}{attempt}")),
        })
    }

    /// Removes parts and journals.
    fn tidy(&self, folder: Option<&Path>) -> Result<(), Error> {
        for attempt in 0..ATTEMPTS {
            for half in ["scatter", "gather"] {
                if let Some(journal) = self.journal(half, attempt) {
                    remove(&journal)?;
                }
            }
        }
        let Some(folder) = folder else {
            return Ok(());
        };
        let wrong = |source| Error::file("remove", folder, source);
        for entry in std::fs::read_dir(folder).map_err(wrong)? {
            let path = entry.map_err(wrong)?.path();
            if is_part(&path) {
                remove(&path)?;
            }
        }
        // A folder with a user's files in it stays.
        let _ = std::fs::remove_dir(folder);
        Ok(())
    }
}

struct Halves<'a> {
    sort: &'a Sort,
    store: &'a Arc<SpillStore>,
    attempt: u32,
}

impl Halves<'_> {
    /// Cuts all parts; rows of each bucket.
    fn scatter(
        &mut self,
        scatter: &Scatter,
        crew: &mut JobWorkers,
        watch: &mut dyn FnMut(&JobSpec, JobProgress),
    ) -> Result<Vec<u64>, Error> {
        let kind = Kind::Scatter(scatter.clone());
        let task = JobSpec::of_files(vec![self.sort.input.clone()], kind);
        match self.half("scatter", &task, crew, watch)? {
            PartialResult::Scattered(counts) => Ok(counts),
            other => unreachable!("parts give counts, not {other:?}"),
        }
    }

    /// Sorts all buckets; how many rows were written.
    fn gather(
        &mut self,
        scatter: Scatter,
        counts: &[u64],
        crew: &mut JobWorkers,
        watch: &mut dyn FnMut(&JobSpec, JobProgress),
    ) -> Result<u64, Error> {
        let (out, input) = (&self.sort.out, &self.sort.input);
        let part = with_end(out, "part");
        let journal = self.sort.journal("gather", self.attempt);
        create_part(&part, journal.as_deref(), input)?;
        let parts = input.rows.div_ceil(scatter.part_rows);
        let gather = Gather::new(scatter, parts, counts, part.clone());
        // Machines read the input again.
        let inputs = (gather.scatter.machines > 0).then(|| input.clone());
        let task = JobSpec::of_files(inputs.into_iter().collect(), Kind::Gather(gather));
        let PartialResult::Written(rows) = self.half("gather", &task, crew, watch)? else {
            unreachable!("buckets are written");
        };
        // Without its journal, a half that is killed here is done again, not taken as gone.
        if let Some(journal) = &journal {
            remove(journal)?;
        }
        let renamed = std::fs::rename(&part, out);
        renamed.map_err(|source| Error::file("make", out, source))?;
        Ok(rows)
    }

    fn half(
        &self,
        half: &'static str,
        task: &JobSpec,
        crew: &mut JobWorkers,
        watch: &mut dyn FnMut(&JobSpec, JobProgress),
    ) -> Result<PartialResult, Error> {
        let path = self.sort.journal(half, self.attempt);
        let part_rows = task.part_rows(crew.threads());
        let journal = path.map(|path| Journal::open(&path, task, part_rows));
        let mut journal = journal.transpose()?;
        let mut hear = |progress| watch(task, progress);
        crew.run_stored(task, self.store, journal.as_mut(), &mut hear)
    }
}

/// Makes the file of a result, unless a journal says that some of it is there.
fn create_part(part: &Path, journal: Option<&Path>, input: &InputFile) -> Result<(), Error> {
    match journal {
        Some(journal) if journal.exists() && part.exists() => Ok(()),
        Some(journal) if journal.exists() => Err(Error::Gone {
            path: part.to_owned(),
            journal: journal.to_owned(),
        }),
        _ => FileSink::create(part, input.dtype, &[input.rows]),
    }
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(end);
    name.into()
}

/// Whether a file is one that a store has made: `7.part` or, when a worker was killed, `7.1234`.
fn is_part(path: &Path) -> bool {
    let is_number = |text: Option<&OsStr>| {
        let text = text.and_then(OsStr::to_str);
        text.is_some_and(|text| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit()))
    };
    let end = path.extension();
    is_number(path.file_stem()) && (end == Some(OsStr::new("part")) || is_number(end))
}

fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("remove", path, source))
        }
        _ => Ok(()),
    }
}
