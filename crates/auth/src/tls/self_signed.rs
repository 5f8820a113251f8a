//! The self-signed certificate of a node.
//!
//! It signs nothing else, so a client that trusts it trusts this server and no other. Clients know
//! its fingerprint, so it is kept as long as possible. [`OwnCertificate::open`] verifies it with
//! rustls as a client would, for each needed name and a month ahead, and makes another only if that
//! fails.
//!
//! Two programs may make one in the same home at once. A key may then not match the certificate;
//! the next start notices and replaces both.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use paceline_base::hex;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{CertificateError, Error as TlsError, RootCertStore};

use super::Error;
use super::{TlsIdentity, provider, read_chain};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Validity of a certificate. Apple's systems reject more than 825 days
/// (<https://support.apple.com/en-us/103769>); both ends count, hence one less.
const VALID: Duration = Duration::from_secs(824 * 24 * 60 * 60);

/// Validity starts this long before creation, for clients with slow clocks.
const EARLIER: Duration = DAY;

/// Remaining validity at which a start makes a new certificate. Servers run for weeks.
const RENEW_BEFORE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Names in every certificate: the machine itself.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Host names and addresses of a server. Those that a certificate cannot have are omitted.
#[derive(Clone, Debug, Default)]
pub struct CertificateNames {
    /// A certificate must have all of these.
    pub needed: Vec<String>,
    /// Added to a new certificate, but no reason to make one.
    pub further: Vec<String>,
}

/// Why a new certificate was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenewalReason {
    /// There was none.
    First,
    /// The earlier one has expired, or will within a month.
    Expires,
    /// The earlier one is not for this name.
    Name(String),
    /// The earlier one, or its key, cannot be used.
    Unusable,
}

/// The self-signed certificate of a home.
#[derive(Debug)]
pub struct OwnCertificate {
    pub identity: TlsIdentity,
    /// The certificate, for clients to trust: `curl --cacert`.
    pub path: PathBuf,
    /// Why it was just made; `None` for an existing one.
    pub made: Option<RenewalReason>,
}

impl OwnCertificate {
    /// Opens the certificate of `folder`; makes a new one if it does not serve for `names`. The
    /// folder gets `cert.pem` of mode 0644 and `key.pem` of mode 0600.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Write`], [`Error::Make`].
    pub fn open(folder: &Path, names: &CertificateNames, now_unix_s: u64) -> Result<Self, Error> {
        let files = CertificateFiles::of(folder);
        let made = match files.open() {
            Ok(identity) => flaw(&identity.leaf, &names.needed, now_unix_s),
            Err(error) => Some(reason(error)?),
        };
        if made.is_some() {
            files.make(names, now_unix_s)?;
        }
        Ok(Self {
            identity: files.open()?,
            path: files.certificate,
            made,
        })
    }

    /// The certificate in `folder`, if valid for `host`.
    pub fn find(folder: &Path, host: &str, now_unix_s: u64) -> Option<PathBuf> {
        let path = CertificateFiles::of(folder).certificate;
        let chain = read_chain(&path).ok()?;
        let verdict = verify(chain.first()?, host, Duration::from_secs(now_unix_s));
        verdict
            .is_some_and(|verdict| verdict.is_ok())
            .then_some(path)
    }
}

/// The reason to replace an unusable identity; passes other errors on.
fn reason(error: Error) -> Result<RenewalReason, Error> {
    match error {
        Error::Read { path, source } if source.kind() == io::ErrorKind::NotFound => {
            let is_key = path.ends_with(KEY);
            Ok(if is_key {
                RenewalReason::Unusable
            } else {
                RenewalReason::First
            })
        }
        Error::Pem { .. } | Error::Pair { .. } => Ok(RenewalReason::Unusable),
        other => Err(other),
    }
}

/// Why a client that trusts the certificate would still reject it; `None` if it would not.
fn flaw(leaf: &CertificateDer<'_>, needed: &[String], now_unix_s: u64) -> Option<RenewalReason> {
    let soon = Duration::from_secs(now_unix_s).saturating_add(RENEW_BEFORE);
    match verify(leaf, LOCAL[0], soon) {
        Some(Ok(())) => {}
        Some(Err(TlsError::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        ))) => return Some(RenewalReason::Expires),
        _ => return Some(RenewalReason::Unusable),
    }
    let lacks = |name: &&String| verify(leaf, name, soon).is_some_and(|verdict| verdict.is_err());
    needed.iter().find(lacks).cloned().map(RenewalReason::Name)
}

/// Verifies the certificate for `name`, trusting only itself. `None` where no certificate can have
/// that name, or rustls cannot trust this one.
fn verify(leaf: &CertificateDer<'_>, name: &str, at: Duration) -> Option<Result<(), TlsError>> {
    let name = ServerName::try_from(name).ok()?;
    let mut roots = RootCertStore::empty();
    roots.add(leaf.clone()).ok()?;
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider());
    let verifier = verifier.build().ok()?;
    let now = UnixTime::since_unix_epoch(at);
    let verdict = verifier.verify_server_cert(leaf, &[], &name, &[], now);
    Some(verdict.map(drop))
}

const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";

/// Paths of the certificate and its key.
struct CertificateFiles {
    folder: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl CertificateFiles {
    fn of(folder: &Path) -> Self {
        Self {
            certificate: folder.join(CERTIFICATE),
            key: folder.join(KEY),
            folder: folder.to_owned(),
        }
    }

    fn open(&self) -> Result<TlsIdentity, Error> {
        TlsIdentity::from_files(&self.certificate, &self.key)
    }

    fn make(&self, names: &CertificateNames, now_unix_s: u64) -> Result<(), Error> {
        let key = KeyPair::generate().map_err(Error::Make)?;
        let params = params(names, &key, now_unix_s).map_err(Error::Make)?;
        let certificate = params.self_signed(&key).map_err(Error::Make)?;
        let made = fs::create_dir_all(&self.folder);
        made.map_err(|source| write_error(&self.folder, source))?;
        self.write(&self.key, &key.serialize_pem(), 0o600)?;
        self.write(&self.certificate, &certificate.pem(), 0o644)
    }

    /// Writes a temporary file in the same folder and renames it.
    fn write(&self, path: &Path, text: &str, mode: u32) -> Result<(), Error> {
        let write = || -> io::Result<()> {
            let mut file = tempfile::Builder::new()
                .permissions(Permissions::from_mode(mode))
                .tempfile_in(&self.folder)?;
            file.write_all(text.as_bytes())?;
            // Independent of the umask.
            file.as_file()
                .set_permissions(Permissions::from_mode(mode))?;
            file.as_file().sync_all()?;
            file.persist(path).map(drop).map_err(|error| error.error)
        };
        write().map_err(|source| write_error(path, source))
    }
}

fn write_error(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    Error::Write { path, source }
}

/// Fields of the certificate: as Apple requires of servers, and not an authority. rustls accepts no
/// authority's certificate as a server's. Each key has its own subject; clients that look up
/// issuers by name would else try the wrong key.
fn params(
    names: &CertificateNames,
    key: &KeyPair,
    now_unix_s: u64,
) -> Result<CertificateParams, rcgen::Error> {
    let given = names.needed.iter().chain(&names.further);
    let all = LOCAL.into_iter().chain(given.map(String::as_str));
    let all: BTreeSet<&str> = all
        .filter(|name| ServerName::try_from(*name).is_ok())
        .collect();
    let all: Vec<String> = all.into_iter().map(str::to_owned).collect();
    let mut params = CertificateParams::new(all)?;
    let mut subject = DistinguishedName::new();
    let digest = Sha256::digest(key.public_key_raw());
    subject.push(
        DnType::CommonName,
        format!("paceline {}", hex(&digest[..4])),
    );
    params.distinguished_name = subject;
    params.is_ca = IsCa::ExplicitNoCa;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let begin = Duration::from_secs(now_unix_s).saturating_sub(EARLIER);
    params.not_before = rcgen::date_time_ymd(1970, 1, 1) + begin;
    params.not_after = params.not_before + VALID;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn names(needed: &[&str]) -> CertificateNames {
        CertificateNames {
            needed: needed.iter().map(|name| (*name).to_owned()).collect(),
            further: vec!["studio.local".into(), "not a name".into(), "büro".into()],
        }
    }

    fn open(folder: &Path, needed: &[&str], now: u64) -> OwnCertificate {
        OwnCertificate::open(folder, &names(needed), now).unwrap()
    }

    #[test]
    fn it_is_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("tls");
        let first = open(&folder, &["192.0.2.1"], NOW);
        assert_eq!(first.made, Some(RenewalReason::First));
        assert_eq!(first.path, folder.join("cert.pem"));
        let print = first.identity.fingerprint();
        assert_eq!(print.len(), 32 * 3 - 1, "{print}");
        // A missing purpose is a reason only where that purpose is needed.
        for needed in [
            &["192.0.2.1"][..],
            &[],
            &["studio.local", "::1"],
            &["no name"],
        ] {
            let again = open(&folder, needed, NOW + 1000);
            assert_eq!(
                (again.made, again.identity.fingerprint()),
                (None, print.clone())
            );
        }
    }

    #[test]
    fn it_is_made_anew_when_clients_would_refuse_it() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path(), &["192.0.2.1"], NOW);
        let moved = open(dir.path(), &["192.0.2.1", "2001:db8::1"], NOW);
        assert_eq!(moved.made, Some(RenewalReason::Name("2001:db8::1".into())));
        assert_ne!(moved.identity.fingerprint(), first.identity.fingerprint());
        let named = open(dir.path(), &["llm.example.org"], NOW);
        assert_eq!(
            named.made,
            Some(RenewalReason::Name("llm.example.org".into()))
        );
        let last = NOW + (VALID - EARLIER - RENEW_BEFORE).as_secs();
        assert_eq!(open(dir.path(), &[], last - 10).made, None);
        assert_eq!(
            open(dir.path(), &[], last + 10).made,
            Some(RenewalReason::Expires)
        );
        fs::remove_file(dir.path().join("key.pem")).unwrap();
        assert_eq!(
            open(dir.path(), &[], last + 10).made,
            Some(RenewalReason::Unusable)
        );
        fs::write(dir.path().join("cert.pem"), "cut off").unwrap();
        assert_eq!(
            open(dir.path(), &[], last + 10).made,
            Some(RenewalReason::Unusable)
        );
        assert_eq!(open(dir.path(), &[], last + 10).made, None);
    }

    #[test]
    fn only_the_certificate_is_for_others_to_read() {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path(), &[], NOW);
        for (name, expected) in [("cert.pem", 0o644), ("key.pem", 0o600)] {
            let mode = fs::metadata(dir.path().join(name)).unwrap().permissions();
            assert_eq!(mode.mode() & 0o777, expected, "{name}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn clients_of_this_machine_find_it() {
        let dir = tempfile::tempdir().unwrap();
        let find = |host, now| OwnCertificate::find(dir.path(), host, now);
        assert_eq!(find("localhost", NOW), None);
        let path = open(dir.path(), &["192.0.2.1"], NOW).path;
        for host in ["localhost", "192.0.2.1", "studio.local"] {
            assert_eq!(find(host, NOW), Some(path.clone()), "{host}");
        }
        assert_eq!(find("llm.example.org", NOW), None);
        assert_eq!(find("localhost", NOW + VALID.as_secs()), None);
    }
}
