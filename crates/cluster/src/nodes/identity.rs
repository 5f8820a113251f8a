//! A node's identity: a static key pair that lives as long as the node's home.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::NodeId;

/// Bytes of either half of a key pair on Curve25519.
const KEY_BYTES: usize = 32;

/// Why a file of secrets cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("reading {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("writing {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{}: {bytes} bytes, expected {expected}", path.display())]
    Malformed {
        path: PathBuf,
        bytes: usize,
        /// The length it should have.
        expected: usize,
    },
    #[error("{} has mode {mode:04o}, expected 0600: others could read it", path.display())]
    Mode { path: PathBuf, mode: u32 },
    /// A file or folder that another user may have planted.
    #[error("{} belongs to user {owner}, expected {expected}", path.display())]
    Owner {
        path: PathBuf,
        owner: u32,
        /// The user of this process.
        expected: u32,
    },
    #[error("{} has mode {mode:04o}: every user can replace its files", path.display())]
    Writable { path: PathBuf, mode: u32 },
    #[error("cannot draw random numbers: {0}")]
    Random(io::Error),
}

/// A node's key pair. Its private half never leaves the machine.
#[derive(Clone, derive_more::Debug)]
#[debug("Identity({})", self.id())]
pub struct Identity {
    private: Zeroizing<[u8; KEY_BYTES]>,
    public: [u8; KEY_BYTES],
}

impl Identity {
    /// A new one.
    pub fn random() -> Result<Self, Error> {
        let mut private = Zeroizing::new([0; KEY_BYTES]);
        getrandom::fill(&mut *private).map_err(|error| Error::Random(io::Error::other(error)))?;
        Ok(Self::of(private))
    }

    fn of(private: Zeroizing<[u8; KEY_BYTES]>) -> Self {
        let public = curve25519_dalek::MontgomeryPoint::mul_base_clamped(*private);
        Self {
            private,
            public: public.to_bytes(),
        }
    }

    /// Loads the identity from the file at `path`; creates it if there is none.
    ///
    /// # Errors
    /// The file cannot be read or written, or others can read it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if let Some(private) = read_secret(path)? {
            return Ok(Self::of(private));
        }
        let made = Self::random()?;
        write_secret(path, &*made.private)?;
        Ok(made)
    }

    /// The node's id, by which others know it.
    pub fn id(&self) -> NodeId {
        id_of(&self.public)
    }

    pub(crate) const fn public(&self) -> &[u8; KEY_BYTES] {
        &self.public
    }

    pub(crate) fn private(&self) -> &[u8; KEY_BYTES] {
        &self.private
    }
}

pub(crate) fn id_of(public: &[u8]) -> NodeId {
    let hash = Sha256::digest(public);
    NodeId(std::array::from_fn(|i| hash[i]))
}

/// The secret in a file, or `None` without a file.
pub(crate) fn read_secret<const N: usize>(
    path: &Path,
) -> Result<Option<Zeroizing<[u8; N]>>, Error> {
    let bad = |source| Error::Read {
        path: path.to_owned(),
        source,
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad(error)),
    };
    let facts = file.metadata().map_err(bad)?;
    check_owner(path, facts.uid())?;
    let mode = facts.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        let path = path.to_owned();
        return Err(Error::Mode { path, mode });
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(N + 1));
    file.take(N as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(bad)?;
    let secret = <[u8; N]>::try_from(bytes.as_slice()).map_err(|_| Error::Malformed {
        path: path.to_owned(),
        bytes: bytes.len(),
        expected: N,
    })?;
    Ok(Some(Zeroizing::new(secret)))
}

/// Checks that no other user can have planted files below `folder`: this user or root owns it, and
/// not everybody can write to it. A missing folder passes.
pub(crate) fn check_folder(folder: &Path) -> Result<(), Error> {
    let Ok(facts) = fs::metadata(folder) else {
        return Ok(());
    };
    if facts.uid() != 0 {
        check_owner(folder, facts.uid())?;
    }
    let mode = facts.permissions().mode() & 0o7777;
    match mode & 0o002 {
        0 => Ok(()),
        _ => Err(Error::Writable {
            path: folder.to_owned(),
            mode,
        }),
    }
}

fn check_owner(path: &Path, owner: u32) -> Result<(), Error> {
    let expected = rustix::process::geteuid().as_raw();
    match owner == expected {
        true => Ok(()),
        false => Err(Error::Owner {
            path: path.to_owned(),
            owner,
            expected,
        }),
    }
}

/// Writes a file that only its owner may read, atomically.
pub(crate) fn write_secret(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let new = path.with_extension("new");
    let write = || {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let options = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .clone();
        let mut file = options.open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(|source| Error::Write {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_outlives_its_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node/identity");
        let first = Identity::open(&path).unwrap();
        assert_eq!(Identity::open(&path).unwrap().id(), first.id());
        assert_ne!(Identity::random().unwrap().id(), first.id());
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let shown = format!("{first:?}");
        assert_eq!(shown, format!("Identity({})", first.id()));
    }

    #[test]
    fn files_that_are_none_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity");
        write_secret(&path, &[7; 31]).unwrap();
        assert!(matches!(
            Identity::open(&path),
            Err(Error::Malformed { bytes: 31, .. })
        ));
        write_secret(&path, &[7; 90]).unwrap();
        assert!(matches!(
            Identity::open(&path),
            Err(Error::Malformed { bytes: 33, .. })
        ));
        write_secret(&path, &[7; 32]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = Identity::open(&path).unwrap_err();
        assert!(matches!(error, Error::Mode { mode: 0o644, .. }), "{error}");
    }

    /// Expected values: a plain ladder in Python, by RFC 7748, section 5.
    #[test]
    fn what_another_user_could_plant_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, path) = (dir.path(), dir.path().join("identity"));
        check_folder(folder).unwrap();
        check_folder(&folder.join("missing")).unwrap();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o1777)).unwrap();
        let error = check_folder(folder).unwrap_err();
        assert!(
            matches!(error, Error::Writable { mode: 0o1777, .. }),
            "{error}"
        );
        Identity::open(&path).unwrap();
        // Only root can give a file away.
        if std::os::unix::fs::chown(&path, Some(65534), None).is_ok() {
            let error = Identity::open(&path).unwrap_err();
            assert!(
                matches!(error, Error::Owner { owner: 65534, .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn public_keys_are_those_of_x25519() {
        let public = Identity::of(Zeroizing::new([7; 32])).public;
        let expected = "13be4feaeaf204c7fd3358fc9c00721881d174278128227ec674f37f7fe97b6d";
        assert_eq!(paceline_base::hex(&public), expected);
    }
}
