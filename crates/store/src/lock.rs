//! File lock of a model, for one process at a time.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::Error;
use crate::disk;
use crate::progress::Cancel;

/// Poll interval of a waiting process.
const POLL: Duration = Duration::from_millis(100);

/// A held lock file; the system releases it on drop and when the process dies.
///
/// The file itself stays: after its removal, a waiter could lock a file that others no longer see.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    pub(crate) fn try_acquire(path: &Path) -> Result<Option<Self>, Error> {
        if let Some(dir) = path.parent() {
            disk::create_dir(dir)?;
        }
        let opened = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path);
        let file = opened.map_err(|error| Error::io("open", path, error))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            // Some network file systems have no locks; continues without one.
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {
                Ok(Some(Self { _file: file }))
            }
            Err(TryLockError::Error(error)) => Err(Error::io("lock", path, error)),
        }
    }

    /// Waits for the lock without a limit; calls `waiting` once if it is held.
    pub(crate) fn acquire(
        path: &Path,
        cancel: &Cancel,
        waiting: impl FnOnce(),
    ) -> Result<Self, Error> {
        if let Some(lock) = Self::try_acquire(path)? {
            return Ok(lock);
        }
        waiting();
        loop {
            cancel.check()?;
            thread::sleep(POLL);
            if let Some(lock) = Self::try_acquire(path)? {
                return Ok(lock);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_waits_until_the_first_lets_go_or_is_cancelled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/x.lock");
        let cancel = Cancel::default();
        let first = Lock::acquire(&path, &cancel, || panic!("it was free")).unwrap();
        assert!(Lock::try_acquire(&path).unwrap().is_none());

        thread::scope(|scope| {
            let (told, heard) = std::sync::mpsc::channel();
            let (path, cancel) = (&path, &cancel);
            let second = scope
                .spawn(move || Lock::acquire(path, cancel, || told.send(()).unwrap()).map(|_| ()));
            heard.recv().unwrap();
            drop(first);
            second.join().unwrap().unwrap();
        });

        let _held = Lock::acquire(&path, &cancel, || {}).unwrap();
        let stopped = Lock::acquire(&path, &cancel, || cancel.cancel());
        assert!(matches!(stopped, Err(Error::Cancelled)));
    }
}
