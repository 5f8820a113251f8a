//! Published releases: checksums, signature, and the files of an installation.
//!
//! ```text
//! SOURCE/SHA256SUMS           HASH  NAME, a line for each file
//! SOURCE/SHA256SUMS.minisig   its signature
//! SOURCE/paceline-VERSION-PLATFORM.tar.gz
//! PREFIX/lib/paceline/installed   the files that belong to the installation
//! ```
//! [`ReleaseSource`] reads a folder or an address, [`Release`] checks what it says, and [`Prefix`]
//! is the folder that `packaging/install.sh` filled. A file of a release is used only after its
//! SHA-256 fits a line of `SHA256SUMS`. That text must have the signature of the key that the
//! installation has, if it has one.

mod prefix;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use minisign_verify::{PublicKey, Signature};

pub use prefix::Prefix;

use crate::download::{self, DownloadSpec, PullContext};
use crate::hash::{hash_file, is_sha256};
use crate::http::HttpClient;
use crate::options::{Hub, PullOptions};
use crate::progress::{Cancel, PullProgress};

/// Name of the list of checksums.
const SUMS: &str = "SHA256SUMS";

const SIGNATURE: &str = "SHA256SUMS.minisig";

/// Most bytes of the two. A release has some thirty files of a hundred bytes a line.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// Why a release was not read, or not installed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Fetch(#[from] crate::Error),
    #[error("line {line} of SHA256SUMS is not `HASH  NAME`")]
    BadSums { line: usize },
    #[error("the release has no archive paceline-VERSION-{platform}.tar.gz")]
    NoArchive { platform: String },
    #[error("{path}: sha256 is {got}, expected {expected}", path = path.display())]
    Checksum {
        path: PathBuf,
        expected: String,
        got: String,
    },
    #[error("the release has no SHA256SUMS.minisig, and this installation has a key")]
    NoSignature,
    #[error("the signature of SHA256SUMS is not by this installation's key: {reason}")]
    Signature { reason: String },
    #[error("{path} is not a minisign public key: {reason}", path = path.display())]
    Key { path: PathBuf, reason: String },
    #[error("{program} was not installed by install.sh: {list} is missing",
            program = program.display(), list = list.display())]
    NotInstalled { program: PathBuf, list: PathBuf },
    #[error("{path}: not an archive of a release: {reason}", path = path.display())]
    Archive { path: PathBuf, reason: String },
    #[error("{text:?} is not a version such as 1.2.3")]
    Version { text: String },
    #[error("the new program does not run here: {reason}")]
    DoesNotRun { reason: String },
}

/// A version, such as 1.2.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
#[display("{}.{}.{}", self.0, self.1, self.2)]
pub struct Version(pub u32, pub u32, pub u32);

impl FromStr for Version {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parts: Option<Vec<u32>> = text.split('.').map(|part| part.parse().ok()).collect();
        match parts.as_deref() {
            Some([major, minor, patch]) => Ok(Self(*major, *minor, *patch)),
            _ => Err(Error::Version {
                text: text.to_owned(),
            }),
        }
    }
}

/// This machine's system and processor, as names of archives have them.
pub fn platform() -> String {
    match std::env::consts::OS {
        "macos" => "darwin-arm64".to_owned(),
        system => format!("{system}-{}", std::env::consts::ARCH),
    }
}

/// The key whose signature an installation demands.
#[derive(Clone, Debug)]
pub struct ReleaseKey(PublicKey);

impl ReleaseKey {
    /// Reads a public key of minisign.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Key`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = read_text(path)?;
        let key = PublicKey::decode(&text).map_err(|error| Error::Key {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Self(key))
    }

    fn check(&self, text: &str, signature: Option<&str>) -> Result<(), Error> {
        let refused = |error: minisign_verify::Error| Error::Signature {
            reason: error.to_string(),
        };
        let signature = Signature::decode(signature.ok_or(Error::NoSignature)?).map_err(refused)?;
        let checked = self.0.verify(text.as_bytes(), &signature, false);
        checked.map_err(refused)
    }
}

/// Where the files of a release are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseSource {
    Folder(PathBuf),
    /// An address, such as that of a release page's downloads.
    Address(String),
}

impl From<&str> for ReleaseSource {
    fn from(text: &str) -> Self {
        match text.starts_with("https://") || text.starts_with("http://") {
            true => Self::Address(text.to_owned()),
            false => Self::Folder(text.into()),
        }
    }
}

impl fmt::Display for ReleaseSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

impl ReleaseSource {
    /// The checksums and their signature, unchecked.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Fetch`]. A missing signature is none.
    pub fn texts(&self, options: &PullOptions, cancel: &Cancel) -> Result<SignedSums, Error> {
        Ok(match self {
            Self::Folder(folder) => SignedSums {
                sums: read_text(&folder.join(SUMS))?,
                signature: match folder.join(SIGNATURE) {
                    path if path.exists() => Some(read_text(&path)?),
                    _ => None,
                },
            },
            Self::Address(address) => {
                let mut client = client(address, options)?;
                let mut text = |name: &str| fetch_text(&mut client, name, cancel);
                SignedSums {
                    sums: text(SUMS)?,
                    signature: match text(SIGNATURE) {
                        Err(Error::Fetch(crate::Error::NotFound { .. })) => None,
                        text => Some(text?),
                    },
                }
            }
        })
    }

    /// A file of the release, with its checked hash; from an address it comes into `folder`.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Fetch`], [`Error::Checksum`].
    pub fn fetch(
        &self,
        file: &ReleaseFile,
        folder: &Path,
        options: &PullOptions,
        (cancel, progress): (&Cancel, &mut dyn PullProgress),
    ) -> Result<PathBuf, Error> {
        match self {
            Self::Folder(own) => {
                let path = own.join(&file.name);
                file.check(&path, cancel)?;
                Ok(path)
            }
            Self::Address(address) => {
                let mut client = client(address, options)?;
                let wanted = DownloadSpec {
                    url: client.url(&file.name),
                    dir: folder.to_owned(),
                    file: file.name.clone(),
                    bytes: None,
                    sha256: Some(file.sha256.clone()),
                };
                let mut context = PullContext {
                    options,
                    cancel,
                    progress,
                };
                download::fetch(&mut client, &wanted, &mut context)?;
                Ok(folder.join(&file.name))
            }
        }
    }
}

/// A client for a release's address, without the hub's token.
fn client(address: &str, options: &PullOptions) -> Result<HttpClient, Error> {
    let hub = Hub {
        endpoint: address.to_owned(),
        token: None,
        ..options.hub.clone()
    };
    Ok(HttpClient::new(&hub, &options.deadlines)?)
}

fn fetch_text(client: &mut HttpClient, name: &str, cancel: &Cancel) -> Result<String, Error> {
    let url = client.url(name);
    let response = client.get(&url, &[], cancel)?;
    client.check_status(&response, &url)?;
    let bytes = response.read_all(TEXT_BYTES_MAX, cancel)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn read_text(path: &Path) -> Result<String, Error> {
    let failed = |source| Error::File {
        path: path.to_owned(),
        source,
    };
    let bytes = fs::metadata(path).map_err(failed)?.len();
    if bytes > TEXT_BYTES_MAX as u64 {
        return Err(failed(io::ErrorKind::FileTooLarge.into()));
    }
    fs::read_to_string(path).map_err(failed)
}

/// The text of `SHA256SUMS`, and that of its signature.
#[derive(Clone, Debug)]
pub struct SignedSums {
    pub sums: String,
    pub signature: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleaseFile {
    pub name: String,
    /// Lower-case hex.
    pub sha256: String,
}

impl ReleaseFile {
    /// Compares the hash of the file at `path`.
    pub fn check(&self, path: &Path, cancel: &Cancel) -> Result<(), Error> {
        let got = hash_file(path, cancel, |_| {})?.1.hex();
        match got == self.sha256 {
            true => Ok(()),
            false => Err(Error::Checksum {
                path: path.to_owned(),
                expected: self.sha256.clone(),
                got,
            }),
        }
    }
}

/// The checked list of a release's files.
#[derive(Clone, Debug)]
pub struct Release {
    files: BTreeMap<String, String>,
}

impl Release {
    /// Checks the signature by `key`, if there is a key, and reads the list.
    ///
    /// # Errors
    /// [`Error::NoSignature`], [`Error::Signature`], [`Error::BadSums`].
    pub fn checked(texts: &SignedSums, key: Option<&ReleaseKey>) -> Result<Self, Error> {
        if let Some(key) = key {
            key.check(&texts.sums, texts.signature.as_deref())?;
        }
        let lines = texts.sums.lines().zip(1..);
        let entry = |(line, number): (&str, usize)| {
            let parts = line.split_once("  ");
            let parts = parts.filter(|(hash, name)| is_sha256(hash) && is_plain(name));
            let (hash, name) = parts.ok_or(Error::BadSums { line: number })?;
            Ok((name.to_owned(), hash.to_owned()))
        };
        let files = lines.map(entry).collect::<Result<_, Error>>()?;
        Ok(Self { files })
    }

    /// The archive for a platform, with the version that its name states.
    ///
    /// # Errors
    /// [`Error::NoArchive`], [`Error::Version`].
    pub fn archive(&self, platform: &str) -> Result<(Version, ReleaseFile), Error> {
        let tail = format!("-{platform}.tar.gz");
        let found = self.files.iter().find_map(|(name, sha256)| {
            let version = name.strip_prefix("paceline-")?.strip_suffix(&tail)?;
            // Other archives of the release have a word in the version's place.
            let is_program = version.starts_with(|c: char| c.is_ascii_digit());
            is_program.then_some((version, name, sha256))
        });
        let (version, name, sha256) = found.ok_or_else(|| Error::NoArchive {
            platform: platform.to_owned(),
        })?;
        let file = ReleaseFile {
            name: name.clone(),
            sha256: sha256.clone(),
        };
        Ok((version.parse()?, file))
    }
}

/// Whether `name` is the name of a file and no path.
fn is_plain(name: &str) -> bool {
    let is_sane = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    !name.is_empty() && !name.starts_with('.') && name.chars().all(is_sane)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key, and its signature of the text `test`: those of minisign-verify's documentation.
    const KEY: &str = "untrusted comment: a key\n\
        RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\n";
    const OF_TEST: &str = "untrusted comment: signature from minisign secret key\n\
        RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8\
        KLzZwo=\n\
        trusted comment: timestamp:1633700835\tfile:test\tprehashed\n\
        wLMDjy9FLAuxZ3q4NlEvkgtyhrr0gtTu6KC4KBJdITbbOeAi1zBIYo0v4iTgt8jJpIidRJnp94ABQkJAgAooBQ==\n";

    fn key() -> ReleaseKey {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), KEY).unwrap();
        ReleaseKey::read(file.path()).unwrap()
    }

    #[test]
    fn only_the_keys_own_signature_of_these_bytes_counts() {
        let key = key();
        assert!(key.check("test", Some(OF_TEST)).is_ok());
        let changed = key.check("tesu", Some(OF_TEST));
        assert!(
            matches!(changed, Err(Error::Signature { .. })),
            "{changed:?}"
        );
        let missing = key.check("test", None);
        assert!(matches!(missing, Err(Error::NoSignature)), "{missing:?}");
        for cut in 0..OF_TEST.len() - 1 {
            let cut = key.check("test", Some(&OF_TEST[..cut]));
            assert!(matches!(cut, Err(Error::Signature { .. })), "{cut:?}");
        }
    }

    #[test]
    fn a_list_names_plain_files_with_hashes() {
        let list = |sums: &str| {
            let sums = sums.to_owned();
            let signature = None;
            Release::checked(&SignedSums { sums, signature }, None)
        };
        let hash = "a".repeat(64);
        let good = format!(
            "{hash}  paceline-0.2.0-linux-x86_64.tar.gz\n{hash}  \
             paceline-mlx-layer-0.2.0-darwin-arm64.tar.gz\n"
        );
        let (version, file) = list(&good).unwrap().archive("linux-x86_64").unwrap();
        assert_eq!(
            (version, &*file.sha256, &*file.name),
            (
                Version(0, 2, 0),
                &*hash,
                "paceline-0.2.0-linux-x86_64.tar.gz"
            )
        );
        let layer = list(&good).unwrap().archive("darwin-arm64");
        assert!(matches!(layer, Err(Error::NoArchive { .. })), "{layer:?}");
        for bad in ["", "a  b", &format!("{hash} b"), &format!("{hash}  ../b")] {
            let read = list(&format!("{good}{bad}\n"));
            assert!(matches!(read, Err(Error::BadSums { line: 3 })), "{bad}");
        }
    }

    #[test]
    fn versions_are_ordered_by_their_numbers() {
        let version = |text: &str| text.parse::<Version>().unwrap();
        assert!(version("0.10.0") > version("0.9.9"));
        assert!("0.1".parse::<Version>().is_err());
    }
}
