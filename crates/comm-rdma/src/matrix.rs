//! The device matrix: JACCL's device file, which lists the devices between each pair of ranks.
//!
//! ```text
//! [[null,       "rdma_en5", ["rdma_en4", "rdma_en6"]],
//!  ["rdma_en5", null,       null                    ],
//!  [["rdma_en4", "rdma_en6"], null,  null           ]]
//! ```
//!
//! Row i has the devices of rank i, by the rank they lead to. An entry is null for none, a name, or
//! a list with one name for each cable.

use serde_json::Value;

/// Most cables of a link. JACCL allows four Thunderbolt cables between two machines. All messages
/// of a lane in flight must also fit the 64 bits of a state.
pub const CABLES_MAX: usize = 4;

/// Why a device matrix is invalid.
#[derive(Debug, thiserror::Error)]
pub enum MatrixError {
    #[error("device matrix: {0}")]
    Json(#[from] serde_json::Error),
    /// It is not a square list of rows.
    #[error("device matrix: row {row} is no list of {size} entries")]
    Row {
        /// The first such row; the number of rows if the whole is no list.
        row: usize,
        size: usize,
    },
    /// An entry is neither null, nor a name, nor a list of names.
    #[error("device matrix: entry {from}, {to} is neither null, nor a name, nor a list of names")]
    Entry { from: usize, to: usize },
    #[error("device matrix: rank {rank} has a cable to itself")]
    Diagonal { rank: usize },
    #[error("device matrix: rank {from} has {there} cables to rank {to}, which has {back} back")]
    OneEnd {
        from: usize,
        to: usize,
        there: usize,
        back: usize,
    },
    #[error("device matrix: rank {from} has {cables} cables to rank {to}, at most {CABLES_MAX}")]
    Cables {
        from: usize,
        to: usize,
        cables: usize,
    },
    #[error("device matrix: it is for {got} ranks, expected {expected}")]
    Size { expected: usize, got: usize },
}

/// The devices of every rank, by the rank they lead to. Every cable has two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    rows: Vec<Vec<Vec<String>>>,
}

impl Matrix {
    /// Parses a device file.
    ///
    /// # Errors
    /// Any [`MatrixError`] but `Size`.
    pub fn parse(json: &str) -> Result<Self, MatrixError> {
        let value: Value = serde_json::from_str(json)?;
        let rows = value.as_array().map_or(&[][..], Vec::as_slice);
        let size = rows.len();
        if !value.is_array() {
            return Err(MatrixError::Row { row: 0, size });
        }
        let mut read = Vec::new();
        for (from, row) in rows.iter().enumerate() {
            let entries = row.as_array().filter(|entries| entries.len() == size);
            let entries = entries.ok_or(MatrixError::Row { row: from, size })?;
            let names = |(to, entry)| names(entry).ok_or(MatrixError::Entry { from, to });
            read.push(
                entries
                    .iter()
                    .enumerate()
                    .map(names)
                    .collect::<Result<_, _>>()?,
            );
        }
        Self::new(read)
    }

    /// The matrix with these rows.
    pub fn new(rows: Vec<Vec<Vec<String>>>) -> Result<Self, MatrixError> {
        let size = rows.len();
        if let Some(row) = rows.iter().position(|row| row.len() != size) {
            return Err(MatrixError::Row { row, size });
        }
        for (from, row) in rows.iter().enumerate() {
            for (to, devices) in row.iter().enumerate() {
                let (there, back) = (devices.len(), rows[to][from].len());
                if from == to && there > 0 {
                    return Err(MatrixError::Diagonal { rank: from });
                }
                if there != back {
                    return Err(MatrixError::OneEnd {
                        from,
                        to,
                        there,
                        back,
                    });
                }
                if there > CABLES_MAX {
                    let cables = there;
                    return Err(MatrixError::Cables { from, to, cables });
                }
            }
        }
        Ok(Self { rows })
    }

    /// A full mesh over one device each: one adapter per machine, and a switch.
    pub fn switched(devices: &[String]) -> Self {
        let entry = |from: usize, to: usize| match from == to {
            true => Vec::new(),
            false => vec![devices[from].clone()],
        };
        let row = |from| (0..devices.len()).map(|to| entry(from, to)).collect();
        Self {
            rows: (0..devices.len()).map(row).collect(),
        }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.rows.len()
    }

    /// The devices of `from` that lead to `to`.
    pub fn devices(&self, from: usize, to: usize) -> &[String] {
        &self.rows[from][to]
    }

    /// All devices of a rank, each once, sorted.
    pub fn of(&self, rank: usize) -> Vec<&str> {
        let mut names: Vec<&str> = self.rows[rank]
            .iter()
            .flatten()
            .map(String::as_str)
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whether every rank has a cable to every other.
    pub fn is_mesh(&self) -> bool {
        let size = self.size();
        let mut pairs = (0..size).flat_map(|a| (0..a).map(move |b| (a, b)));
        pairs.all(|(a, b)| !self.rows[a][b].is_empty())
    }

    /// Whether it is a ring by JACCL's rule: as many cables to the next rank as to the previous
    /// one, on all ranks.
    pub fn is_ring(&self) -> bool {
        let size = self.size();
        let cables = if size > 1 { self.rows[0][1].len() } else { 0 };
        let both = |rank: usize| [(rank + 1) % size, (rank + size - 1) % size];
        cables > 0
            && (0..size).all(|r| {
                both(r)
                    .iter()
                    .all(|peer| self.rows[r][*peer].len() == cables)
            })
    }

    /// Whether there is no cable.
    pub fn is_bare(&self) -> bool {
        self.rows.iter().flatten().all(Vec::is_empty)
    }

    /// The matrix with the cables for which `is_kept` is true, by both ranks and the cable's index.
    pub(super) fn filtered(&self, is_kept: impl Fn(usize, usize, usize) -> bool) -> Self {
        let entry = |from: usize, to: usize| {
            let names = self.rows[from][to].iter().enumerate();
            let kept = names.filter(|(cable, _)| is_kept(from, to, *cable));
            kept.map(|(_, name)| name.clone()).collect()
        };
        let row = |from| (0..self.size()).map(|to| entry(from, to)).collect();
        Self {
            rows: (0..self.size()).map(row).collect(),
        }
    }

    /// The matrix of some of the ranks, in this order.
    pub fn part(&self, ranks: &[usize]) -> Self {
        let row = |from: &usize| {
            ranks
                .iter()
                .map(|to| self.rows[*from][*to].clone())
                .collect()
        };
        Self {
            rows: ranks.iter().map(row).collect(),
        }
    }

    /// Formats the matrix as a device file.
    pub fn to_json(&self) -> String {
        let entry = |devices: &Vec<String>| match devices.as_slice() {
            [] => Value::Null,
            [one] => Value::from(one.as_str()),
            more => Value::from(more.to_vec()),
        };
        let row = |row: &Vec<Vec<String>>| row.iter().map(entry).collect::<Value>();
        self.rows.iter().map(row).collect::<Value>().to_string()
    }
}

fn names(entry: &Value) -> Option<Vec<String>> {
    let name = |value: &Value| value.as_str().map(str::to_string);
    match entry {
        Value::Null => Some(Vec::new()),
        Value::String(name) => Some(vec![name.clone()]),
        Value::Array(list) => list.iter().map(name).collect(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_written_and_refused() {
        let text = r#"[[null,"a",["b","c"]],["d",null,null],[["e","f"],null,null]]"#;
        let matrix = Matrix::parse(text).unwrap();
        assert_eq!(matrix.to_json(), text);
        assert_eq!(matrix.devices(0, 2), ["b", "c"]);
        assert_eq!(matrix.of(0), ["a", "b", "c"]);
        assert!(!matrix.is_mesh() && !matrix.is_ring());
        assert_eq!(matrix.part(&[1, 0]).to_json(), r#"[[null,"d"],["a",null]]"#);
        for (text, error) in [
            ("[[", "device matrix: EOF"),
            ("{}", "device matrix: row 0 is no list of 0 entries"),
            ("[[null],[null]]", "device matrix: row 0 is no list of 2"),
            (r#"["a"]"#, "device matrix: row 0 is no list of 1"),
            (r#"[[null,3],["a",null]]"#, "device matrix: entry 0, 1"),
            (r#"[[null,[3]],["a",null]]"#, "device matrix: entry 0, 1"),
            (r#"[["a"]]"#, "device matrix: rank 0 has a cable to itself"),
            (
                r#"[[null,"a"],[null,null]]"#,
                "rank 0 has 1 cables to rank 1, which has 0",
            ),
            (
                r#"[[null,["a","b","c","d","e"]],[["a","b","c","d","e"],null]]"#,
                "5 cables to rank 1, at most 4",
            ),
        ] {
            let got = Matrix::parse(text).unwrap_err().to_string();
            assert!(got.contains(error), "{text}: {got}");
        }
    }

    #[test]
    fn meshes_and_rings_are_told_apart() {
        let ring =
            r#"[[null,"a",null,"b"],["a",null,"b",null],[null,"a",null,"b"],["a",null,"b",null]]"#;
        let ring = Matrix::parse(ring).unwrap();
        assert!(ring.is_ring() && !ring.is_mesh());
        let names: Vec<String> = ["x", "y", "z"].map(String::from).to_vec();
        let mesh = Matrix::switched(&names);
        assert!(mesh.is_ring() && mesh.is_mesh(), "three ranks are both");
        assert_eq!(
            mesh.to_json(),
            r#"[[null,"x","x"],["y",null,"y"],["z","z",null]]"#
        );
        assert!(!Matrix::parse("[[null]]").unwrap().is_ring());
    }
}
