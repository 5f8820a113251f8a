//! Anonymous files that processes of this machine map together.
//!
//! On Linux these are sealed memfds, opened by peers through `/proc`. Elsewhere they are POSIX
//! shared memory objects.

use std::io;
use std::os::fd::OwnedFd;

/// A file of zeros of fixed size.
pub(crate) struct MemoryFile {
    pub(crate) file: OwnedFd,
    /// Name by which a peer opens it, while this value lives.
    pub(crate) name: String,
}

#[cfg(target_os = "linux")]
impl MemoryFile {
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        use rustix::fs::{MemfdFlags, fcntl_add_seals};
        use std::os::fd::AsRawFd;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("paceline", flags)?;
        rustix::fs::ftruncate(&file, bytes)?;
        fcntl_add_seals(&file, SEALS)?;
        let name = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok(Self { file, name })
    }

    /// Opens a file that another process named, for reading and writing.
    ///
    /// # Errors
    /// The system's error; [`NotFound`](io::ErrorKind::NotFound) if the name is no such file.
    pub(crate) fn open(name: &str) -> io::Result<OwnedFd> {
        if is_descriptor(name) {
            open_settled(name)
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    /// Opens a file by its descriptor in another process, for reading and writing.
    pub(crate) fn open_at(process: u32, descriptor: u32) -> Option<OwnedFd> {
        let name = format!("/proc/{process}/fd/{descriptor}");
        open_settled(&name).ok()
    }

    pub(crate) fn descriptor(&self) -> Option<u32> {
        use std::os::fd::AsRawFd;
        u32::try_from(self.file.as_raw_fd()).ok()
    }
}

/// Opens a file only if it is sealed memory. Otherwise a process that truncates it would crash
/// every process that maps it.
#[cfg(target_os = "linux")]
fn open_settled(name: &str) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, fcntl_get_seals};
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = rustix::fs::open(name, flags, Mode::empty())?;
    let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
    if sealed {
        Ok(file)
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Operations that are sealed for everyone, the file's owner included.
#[cfg(target_os = "linux")]
const SEALS: rustix::fs::SealFlags = rustix::fs::SealFlags::SHRINK
    .union(rustix::fs::SealFlags::GROW)
    .union(rustix::fs::SealFlags::SEAL);

/// Whether this is `/proc/NUMBER/fd/NUMBER`. A peer must not make this process open other files.
#[cfg(target_os = "linux")]
pub(crate) fn is_descriptor(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name
        .strip_prefix("/proc/")
        .and_then(|rest| rest.split_once("/fd/"));
    numbers.is_some_and(|(process, descriptor)| number(process) && number(descriptor))
}

#[cfg(not(target_os = "linux"))]
impl MemoryFile {
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        use rustix::fs::Mode;
        use rustix::shm::OFlags;
        let name = format!("/paceline-{:016x}", crate::join::random());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let file = rustix::shm::open(&name, flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, bytes)?;
        Ok(Self { file, name })
    }

    /// Opens an object that another process named. Its size can be set only once.
    pub(crate) fn open(name: &str) -> io::Result<OwnedFd> {
        use rustix::fs::Mode;
        if !name.starts_with("/paceline-") {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(rustix::shm::open(
            name,
            rustix::shm::OFlags::RDWR,
            Mode::empty(),
        )?)
    }

    /// Descriptors of other processes cannot be opened here.
    pub(crate) fn open_at(_process: u32, _descriptor: u32) -> Option<OwnedFd> {
        None
    }

    /// No other process could use it.
    pub(crate) fn descriptor(&self) -> Option<u32> {
        None
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for MemoryFile {
    fn drop(&mut self) {
        // The mappings stay valid; a name that is already unlinked is harmless.
        let _ = rustix::shm::unlink(&self.name);
    }
}
