//! The finished parts of a job, in a file, so that a killed job can be resumed.
//!
//! The file has a line of JSON for the job, then one for each part. A line is written whole and
//! synced. The last line of a killed job may be cut off, and is dropped. A file of another job, or
//! of inputs that changed since, is refused and not touched.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, JobSpec, PartialResult};

/// The first line.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct JournalHeader {
    task: JobSpec,
    part_rows: u64,
    /// Modification time of each input, in ns since 1970, where the system has it.
    written_ns: Vec<Option<u128>>,
}

/// The other lines.
#[derive(Debug, Serialize, Deserialize)]
struct JournalRecord {
    part: u64,
    partial: PartialResult,
}

/// The file of a job, and what it had when it was opened.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    part_rows: u64,
    pub(crate) done: Vec<(u64, PartialResult)>,
}

impl Journal {
    /// Opens the file of a job, or makes one for parts of `part_rows` rows. It has as many bytes
    /// as messages of all parts.
    ///
    /// # Errors
    /// [`Error::OtherJob`] when it is that of another; [`Error::File`].
    pub fn open(path: &Path, task: &JobSpec, part_rows: u64) -> Result<Self, Error> {
        let wrong = |source| Error::file("use", path, source);
        let open = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path);
        let mut file = open.map_err(wrong)?;
        let head = JournalHeader {
            task: task.clone(),
            part_rows,
            written_ns: written(task),
        };
        let mut journal = Self {
            path: path.to_owned(),
            file: file.try_clone().map_err(wrong)?,
            part_rows,
            done: Vec::new(),
        };
        if file.metadata().map_err(wrong)?.len() == 0 {
            journal.append(&head)?;
            return Ok(journal);
        }
        let kept = journal.read(&head)?;
        // Drops the unfinished line of a killed job.
        file.set_len(kept).map_err(wrong)?;
        file.seek(SeekFrom::End(0)).map_err(wrong)?;
        Ok(journal)
    }

    /// The job that a file is of; `None` when there is no file, or one of something else.
    pub(crate) fn task_of(path: &Path) -> Option<JobSpec> {
        let mut line = Vec::new();
        let file = File::open(path).ok()?;
        BufReader::new(file).read_until(b'\n', &mut line).ok()?;
        let head: JournalHeader = serde_json::from_slice(&line).ok()?;
        Some(head.task)
    }

    /// Reads what is done; how many bytes that is.
    fn read(&mut self, expected: &JournalHeader) -> Result<u64, Error> {
        let other = || Error::OtherJob {
            path: self.path.clone(),
        };
        let mut reader = BufReader::new(&self.file);
        let mut line = Vec::new();
        let mut kept = 0;
        let mut part_rows = None;
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line);
            let read = read.map_err(|source| Error::file("read", &self.path, source))?;
            if line.pop() != Some(b'\n') {
                break;
            }
            if part_rows.is_none() {
                let head: JournalHeader = serde_json::from_slice(&line).map_err(|_| other())?;
                if head.task != expected.task || head.written_ns != expected.written_ns {
                    return Err(other());
                }
                part_rows = Some(head.part_rows);
            } else {
                let line: JournalRecord = serde_json::from_slice(&line).map_err(|_| other())?;
                if !line.partial.is_of(&expected.task.kind) {
                    return Err(other());
                }
                self.done.push((line.part, line.partial));
            }
            kept += read as u64;
        }
        self.part_rows = part_rows.filter(|rows| *rows > 0).ok_or_else(other)?;
        Ok(kept)
    }

    /// Rows of a part: those of the job that made the file.
    pub const fn part_rows(&self) -> u64 {
        self.part_rows
    }

    /// Notes that a part is done.
    pub(crate) fn record_part(&mut self, part: u64, partial: &PartialResult) -> Result<(), Error> {
        self.append(&JournalRecord {
            part,
            partial: partial.clone(),
        })
    }

    fn append(&mut self, line: &impl Serialize) -> Result<(), Error> {
        let wrong = |source| Error::file("write", &self.path, source);
        let mut bytes = serde_json::to_vec(line).map_err(|error| wrong(error.into()))?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).map_err(wrong)?;
        self.file.sync_data().map_err(wrong)
    }

    /// Removes the file: the job is done.
    pub fn remove(self) -> Result<(), Error> {
        let removed = std::fs::remove_file(&self.path);
        removed.map_err(|source| Error::file("remove", &self.path, source))
    }
}

fn written(task: &JobSpec) -> Vec<Option<u128>> {
    let when = |path: &Path| {
        let modified = std::fs::metadata(path).ok()?.modified().ok()?;
        let since = modified.duration_since(std::time::UNIX_EPOCH).ok()?;
        Some(since.as_nanos())
    };
    task.inputs()
        .iter()
        .map(|input| when(&input.path))
        .collect()
}
