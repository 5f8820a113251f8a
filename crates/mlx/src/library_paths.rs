//! Where the library is looked for.

use std::path::{Path, PathBuf};

/// File name of the C layer.
pub const LIBRARY_NAME: &str = if cfg!(target_os = "macos") {
    "libmlxc.dylib"
} else {
    "libmlxc.so"
};

/// Where Homebrew links libraries: Apple silicon, Intel, Linux.
const HOMEBREW: [&str; 3] = [
    "/opt/homebrew/lib",
    "/usr/local/lib",
    "/home/linuxbrew/.linuxbrew/lib",
];

/// Places to look in, in this order: [`explicit`](Self::explicit) and then no other, the program's
/// folder, the installed library, Homebrew's folders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryPaths {
    /// The library itself, or the folder it is in.
    pub explicit: Option<PathBuf>,
    /// The folder of the program.
    pub beside: Option<PathBuf>,
    /// The library of an MLX that was installed for this program.
    pub installed: Option<PathBuf>,
    /// File to note a hang of a GPU in, where its waits are [fast](crate::FAST_SYNC).
    pub hang_note: Option<PathBuf>,
}

impl LibraryPaths {
    /// Files to look for, best first.
    pub fn candidates(&self) -> Vec<PathBuf> {
        if let Some(path) = &self.explicit {
            return vec![if path.is_dir() {
                path.join(LIBRARY_NAME)
            } else {
                path.clone()
            }];
        }
        let beside = self.beside.iter().map(|folder| folder.join(LIBRARY_NAME));
        let homebrew = HOMEBREW
            .iter()
            .map(|folder| Path::new(folder).join(LIBRARY_NAME));
        let own = beside.chain(self.installed.clone());
        own.chain(homebrew).collect()
    }

    /// Whether a GPU hung whose waits are fast in this process.
    pub fn has_hung(&self) -> bool {
        self.hang_note.as_ref().is_some_and(|note| note.exists())
    }

    /// The candidates that are there.
    pub fn found(&self) -> Vec<PathBuf> {
        let mut all = self.candidates();
        all.retain(|path| is_there(path));
        all
    }
}

/// Whether something is at `path`, be it a link that leads nowhere: that is an error to be told,
/// not a place to pass over.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explicit_path_is_the_only_one() {
        let places = LibraryPaths {
            explicit: Some("/some/where/libmlxc.so".into()),
            beside: Some("/bin".into()),
            installed: Some("/home".into()),
            hang_note: None,
        };
        assert_eq!(
            places.candidates(),
            [PathBuf::from("/some/where/libmlxc.so")]
        );
    }

    #[test]
    fn beside_comes_before_installed_before_homebrew() {
        let places = LibraryPaths {
            explicit: None,
            beside: Some("/opt/paceline".into()),
            installed: Some("/home/mlx/libmlxc".into()),
            hang_note: None,
        };
        let candidates = places.candidates();
        assert_eq!(candidates[0], Path::new("/opt/paceline").join(LIBRARY_NAME));
        assert_eq!(candidates[1], Path::new("/home/mlx/libmlxc"));
        assert_eq!(
            candidates[2],
            Path::new("/opt/homebrew/lib").join(LIBRARY_NAME)
        );
    }

    #[test]
    fn an_explicit_folder_holds_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let places = LibraryPaths {
            explicit: Some(folder.path().into()),
            ..LibraryPaths::default()
        };
        assert_eq!(places.candidates(), [folder.path().join(LIBRARY_NAME)]);
        assert!(places.found().is_empty());
        std::fs::write(folder.path().join(LIBRARY_NAME), "").unwrap();
        assert_eq!(places.found(), places.candidates());
    }
}
