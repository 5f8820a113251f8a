//! Paths of the store.

use std::path::{Path, PathBuf};

use crate::name::EntryName;

/// Paceline's folder, usually `~/.paceline`.
///
/// ```text
/// HOME/models/<model>/paceline.json        the record; present when the model is complete
/// HOME/models/<model>/<files>
/// HOME/models/<model>/<file>.partial       a download that can be resumed
/// HOME/models/<model>/<file>.partial.json  what it must be resumed against
/// HOME/models/.locks/<model>.lock          held while a process works on the model
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    root: PathBuf,
}

impl Home {
    /// Uses `root`; creates nothing yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The parent of the models' folders.
    pub fn models_dir(&self) -> PathBuf {
        self.root.join("models")
    }

    pub(crate) fn entry_dir(&self, name: &EntryName) -> PathBuf {
        self.models_dir().join(name.dir_name())
    }

    pub(crate) fn lock_path(&self, name: &EntryName) -> PathBuf {
        // Escaped names have up to 255 bytes; the suffix must not exceed that.
        let mut file = name.dir_name();
        file.truncate(250);
        self.models_dir().join(".locks").join(file + ".lock")
    }
}
