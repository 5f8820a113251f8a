//! The golden tables: hashes of the tokens of answers, and of results of training and array jobs.
//!
//! A table is a file of `tests-data/golden/bits`, a row each: model, split, seed, adapter, grammar,
//! fault, SHA-256. The gate compares some rows of each table and a long run all. A change that is
//! meant to change an answer writes the tables anew and names the rows:
//!
//! ```text
//! PACELINE_GOLDEN=write cargo test --release -p paceline-cli --test all golden::
//! ```
//!
//! `PACELINE_TEST_BINARY=PATH` takes another paceline than the one built here. The folder's README
//! says which commit made the tables.

mod answers;
mod jobs;

use std::fmt::Write as _;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

/// Where a row comes from: the columns of a table before the hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RowOrigin {
    model: String,
    split: String,
    seed: String,
    adapter: String,
    grammar: String,
    fault: String,
}

/// A row: where the result comes from, and its hash.
type GoldenRow = (RowOrigin, String);

/// How many rows are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowSelection {
    /// The gate's part.
    Part,
    /// All rows, which a long run compares.
    All,
    /// All rows, which make the table anew.
    Write,
}

impl RowSelection {
    fn of_this_run() -> Self {
        match std::env::var("PACELINE_GOLDEN").as_deref() {
            Ok("write") => Self::Write,
            Ok(other) => panic!("PACELINE_GOLDEN is {other:?}, expected write"),
            Err(_) if paceline_base::testing::long() => Self::All,
            Err(_) => Self::Part,
        }
    }

    fn is_part(self) -> bool {
        self == Self::Part
    }
}

impl RowOrigin {
    /// The row's columns but the last; an empty one is a dash.
    fn columns(&self) -> String {
        let columns = [
            &self.model,
            &self.split,
            &self.seed,
            &self.adapter,
            &self.grammar,
            &self.fault,
        ];
        let columns = columns.map(|text| if text.is_empty() { "-" } else { text });
        columns.join("\t")
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Compares `rows` with the table `name`, or writes it.
///
/// # Panics
/// When a row is not in the table, has another hash, or (where all were computed) is missing.
fn check(name: &str, extent: RowSelection, rows: &[GoldenRow]) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/golden/bits");
    let path = PathBuf::from(folder).join(name).with_extension("tsv");
    let lines = rows
        .iter()
        .map(|(origin, hash)| format!("{}\t{hash}", origin.columns()));
    let lines: Vec<String> = lines.collect();
    if extent == RowSelection::Write {
        std::fs::write(&path, lines.join("\n") + "\n").unwrap();
        return;
    }
    let table = std::fs::read_to_string(&path).unwrap();
    let table: Vec<&str> = table.lines().collect();
    let other: Vec<&String> = lines
        .iter()
        .filter(|line| !table.contains(&line.as_str()))
        .collect();
    assert!(
        other.is_empty(),
        "{name}: {} of {} rows are not in {}: {other:#?}",
        other.len(),
        lines.len(),
        path.display()
    );
    if extent == RowSelection::All {
        assert_eq!(lines.len(), table.len(), "{name}: rows of the table");
    }
    assert!(lines.len() > 1, "{name}: nothing was compared");
}
