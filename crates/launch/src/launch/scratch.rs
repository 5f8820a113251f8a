//! The temporary folder of a launch, for ssh's sockets and mpirun's files.
//!
//! It is removed with the launch. A killed launch cannot remove its own, so the next one does.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, getuid, test_kill_process};
use tempfile::TempDir;

/// Prefix of the folders' names, before the id of the process and a hyphen. Short: the folder
/// contains sockets, whose paths are limited to some hundred bytes.
const PREFIX: &str = "paceline-";

/// Makes a folder for this launch, in the folder `all` for temporary files. Removes folders left by
/// killed launches of the same user.
pub fn folder(all: &Path) -> io::Result<TempDir> {
    for folder in left(all) {
        let _ = std::fs::remove_dir_all(folder); // somebody else may be at it
    }
    let prefix = format!("{PREFIX}{}-", std::process::id());
    tempfile::Builder::new().prefix(&prefix).tempdir_in(all)
}

/// Folders of ended processes.
fn left(all: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(all).into_iter().flatten().flatten();
    let is_left = |path: &PathBuf| {
        let owner = path.file_name().and_then(|name| owner(name.to_str()?));
        let own = path
            .symlink_metadata()
            .is_ok_and(|meta| meta.is_dir() && meta.uid() == getuid().as_raw());
        own && owner.is_some_and(|id| test_kill_process(id) == Err(Errno::SRCH))
    };
    entries.map(|entry| entry.path()).filter(is_left).collect()
}

/// The process in a folder's name.
fn owner(name: &str) -> Option<Pid> {
    let (id, _) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Pid::from_raw(id.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_processes_that_are_gone_are_found() {
        let all = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = child.id();
        child.wait().unwrap();
        let own = std::process::id();
        for name in [
            format!("paceline-{gone}-x"),
            format!("paceline-{own}-x"),
            "paceline-x".to_owned(),
            format!("other-{gone}-x"),
        ] {
            std::fs::create_dir(all.path().join(name)).unwrap();
        }
        assert_eq!(
            left(all.path()),
            [all.path().join(format!("paceline-{gone}-x"))]
        );
        assert!(owner("paceline-0-x").is_none() && owner("paceline--1-x").is_none());
    }
}
