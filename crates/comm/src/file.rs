//! Files without a place in the file system, which processes of this machine map together.
//!
//! On Linux they are anonymous (memfd), their size is settled, and peers open them through `/proc`;
//! elsewhere they are POSIX shared memory objects.

use std::io;
use std::os::fd::OwnedFd;

/// A file of zeros, whose size nobody can change.
pub(crate) struct File {
    pub(crate) file: OwnedFd,
    /// How a peer opens it, while this value lives.
    pub(crate) name: String,
}

#[cfg(target_os = "linux")]
impl File {
    /// Creates a file of so many bytes.
    ///
    /// # Errors
    /// What the system says when it has none.
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

    /// Opens what another process named, to read and write.
    ///
    /// # Errors
    /// What the system says; [`NotFound`](io::ErrorKind::NotFound) for what is no such file.
    pub(crate) fn open(name: &str) -> io::Result<OwnedFd> {
        if is_descriptor(name) {
            open_settled(name)
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    /// Opens a file by its descriptor in another process, to read and write.
    pub(crate) fn open_at(process: u32, descriptor: u32) -> Option<OwnedFd> {
        let name = format!("/proc/{process}/fd/{descriptor}");
        open_settled(&name).ok()
    }

    /// Its descriptor in this process.
    pub(crate) fn descriptor(&self) -> Option<u32> {
        use std::os::fd::AsRawFd;
        u32::try_from(self.file.as_raw_fd()).ok()
    }
}

/// Opens a file if it is memory whose size is settled. Were it not, a process that cuts it short
/// would end all that have it mapped.
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

/// Operations that nobody may do to such a file any more, its owner included.
#[cfg(target_os = "linux")]
const SEALS: rustix::fs::SealFlags = rustix::fs::SealFlags::SHRINK
    .union(rustix::fs::SealFlags::GROW)
    .union(rustix::fs::SealFlags::SEAL);

/// Whether this is `/proc/NUMBER/fd/NUMBER`: a peer is not to make this process open other files.
#[cfg(target_os = "linux")]
pub(crate) fn is_descriptor(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name
        .strip_prefix("/proc/")
        .and_then(|rest| rest.split_once("/fd/"));
    numbers.is_some_and(|(process, descriptor)| number(process) && number(descriptor))
}

#[cfg(not(target_os = "linux"))]
impl File {
    /// Creates a file of so many bytes.
    ///
    /// # Errors
    /// What the system says when it has none.
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        use rustix::fs::Mode;
        use rustix::shm::OFlags;
        let name = format!("/paceline-{:016x}", crate::join::random());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let file = rustix::shm::open(&name, flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, bytes)?;
        Ok(Self { file, name })
    }

    /// Opens what another process named. The size of such an object can be set only once.
    ///
    /// # Errors
    /// As on Linux.
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

    /// There is no way to descriptors of other processes.
    pub(crate) fn open_at(_process: u32, _descriptor: u32) -> Option<OwnedFd> {
        None
    }

    /// Nobody else could use it.
    pub(crate) fn descriptor(&self) -> Option<u32> {
        None
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for File {
    fn drop(&mut self) {
        // The mappings stay; a name that is gone already is no loss.
        let _ = rustix::shm::unlink(&self.name);
    }
}
