//! Repair of a file of the user's store, from other nodes or the hub.

use std::io;
use std::path::PathBuf;

use paceline_cluster::nodes::agent::Agent;
use serde::{Deserialize, Serialize};

use super::ModelCopies;
use super::repair::{RepairReport, RootOrigin, ranges};
use crate::fleet::roots::KnownRoot;
use crate::workers::host::ModelName;
use paceline_store::storage::{FileSystem, OpenMode, Storage as _};
use paceline_store::verified::checksums::Checksums;
use paceline_store::verified::damage::{Count, compare};
use paceline_store::verified::tree::{Tree, shown};

/// A file of the user's store, by the store's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFile {
    /// Name of its model, for messages.
    pub model: String,
    pub path: PathBuf,
    /// SHA-256 in hexadecimal digits.
    pub sha256: String,
    pub bytes: u64,
}

/// The part of a file that was damaged and is right again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MendedFile {
    #[serde(flatten)]
    pub mended: RepairReport,
    /// Its byte ranges, for messages.
    pub ranges: String,
}

impl ModelCopies {
    /// Compares all bytes of a file with its hash tree. Fetches damaged ranges from other nodes or
    /// the hub, and writes them in place, also beyond the end of a cut file. Returns what was
    /// wrong; `None` for an intact file. `count` as of [`check`](Self::check).
    ///
    /// # Errors
    /// No hash tree of the file is known; the damaged bytes, and why no source supplied them.
    pub(in crate::fleet) fn mend_stored(
        &self,
        agent: &Agent,
        file: &StoredFile,
        count: &Count<'_>,
    ) -> Result<Option<MendedFile>, String> {
        let model = &ModelName {
            name: file.model.clone(),
            sha256: file.sha256.clone(),
            manifest: false,
        };
        let failed = |error: io::Error| format!("{}: {error}", file.path.display());
        let (tree, known) = self.tree_of_stored((agent, model), file).map_err(failed)?;
        let opened = FileSystem.open(&file.path, OpenMode::Read);
        let all = std::iter::once(0..tree.groups.count()).collect();
        let wrong = opened.and_then(|opened| compare(&*opened, &tree, all, count));
        let wrong = wrong.map_err(failed)?;
        if wrong.is_empty() {
            return Ok(None);
        }
        let ranges = ranges(tree.groups, &wrong);
        let place = (file.path.as_path(), &tree);
        let mended = self.mend((agent, model), place, (known, wrong), count)?;
        Ok(Some(MendedFile { mended, ranges }))
    }

    /// The hash tree by the checksums next to the file, else by a signed root and another node's
    /// leaves.
    fn tree_of_stored(
        &self,
        (agent, model): (&Agent, &ModelName),
        file: &StoredFile,
    ) -> io::Result<(Tree, RootOrigin)> {
        let known = Checksums::read_of(&file.path, file.bytes)?;
        if let Some(Checksums { tree, .. }) = known.filter(|it| it.sha256 == file.sha256) {
            let rooted = KnownRoot {
                bytes: file.bytes,
                header: file.bytes, // no part of it is asked for
                root: shown(tree.root()),
                weights: 0,
                by: None,
            };
            return Ok((tree, (rooted, None)));
        }
        let unknown = || io::Error::other("no node knows its hash tree");
        let known = self.root(agent, model).ok_or_else(unknown)?;
        let tree = self.leaves(agent, model, (&known.0, known.1));
        Ok((tree.map_err(io::Error::other)?, known))
    }
}
