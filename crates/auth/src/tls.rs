//! TLS, for addresses that other machines reach.
//!
//! ```text
//! connection --first byte--> 0x16      handshake, then HTTP
//!                            other     on loopback HTTP, elsewhere a 400 that names https
//! ```
//!
//! A [`ServerProtocol`] is a server's protocol. An [`TlsIdentity`] is a certificate with its key:
//! from the user's files, or [`OwnCertificate`], which is generated once. Clients need no
//! certificates: API keys authenticate them. The crypto provider is named at each use, because
//! rustls panics where it has to choose among several.

mod error;
mod self_signed;
mod stream;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, Error as TlsError, RootCertStore, ServerConfig};

pub use error::Error;
pub use self_signed::{CertificateNames, OwnCertificate, RenewalReason};
pub use stream::{ClientStream, StallGuard};

/// First byte of a TLS connection: the type of a record with a handshake (RFC 8446, section 5.1).
/// No method of HTTP begins with it.
const HANDSHAKE: u8 = 0x16;

/// The ALPN protocol; clients that also offer HTTP/2 accept it.
const PROTOCOL: &[u8] = b"http/1.1";

/// Maximum file size of a certificate chain or a key. Chains have some 10 KB.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Time and bytes to read after rejecting plain HTTP. The bytes are twice the default body limit.
/// An immediate close could destroy the rejection in transit.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: u64 = 16 << 20;

/// A server's protocol.
#[derive(Clone, Debug, Default)]
pub enum ServerProtocol {
    /// Plain HTTP on all addresses.
    #[default]
    Plain,
    /// TLS. Loopback connections may use plain HTTP too, which never leaves the machine.
    TlsOffLoopback(TlsIdentity),
    Tls(TlsIdentity),
}

impl ServerProtocol {
    /// The URL scheme for clients of the address `bound`.
    pub fn scheme(&self, bound: SocketAddr) -> &'static str {
        match self {
            Self::Plain => "http",
            Self::TlsOffLoopback(_) if is_loopback(bound) => "http",
            Self::TlsOffLoopback(_) | Self::Tls(_) => "https",
        }
    }

    /// Detects the protocol of a new connection, and performs the TLS handshake. `patience` is the
    /// write timeout, see [`StallGuard`]. The caller sets the deadline of the whole.
    ///
    /// # Errors
    /// The client left, has no common TLS parameters, or was rejected for plain HTTP.
    pub async fn accept(&self, stream: TcpStream, patience: Duration) -> io::Result<ClientStream> {
        let (identity, may_be_plain) = match self {
            Self::Plain => return Ok(ClientStream::Plain(StallGuard::new(stream, patience))),
            Self::TlsOffLoopback(identity) => (identity, is_loopback(stream.local_addr()?)),
            Self::Tls(identity) => (identity, false),
        };
        let mut first = [0];
        if stream.peek(&mut first).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if first[0] == HANDSHAKE {
            let socket = StallGuard::new(stream, patience);
            let stream = identity.acceptor().accept(socket).await?;
            return Ok(ClientStream::Tls(Box::new(stream)));
        }
        if may_be_plain {
            return Ok(ClientStream::Plain(StallGuard::new(stream, patience)));
        }
        refuse(stream).await?;
        Err(io::ErrorKind::InvalidData.into())
    }
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Tells a plain HTTP client to use https.
async fn refuse(mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(refusal().as_bytes()).await?;
    stream.shutdown().await?;
    let mut rest = stream.take(LINGER_BYTES);
    let mut nowhere = tokio::io::sink();
    let read = tokio::io::copy(&mut rest, &mut nowhere);
    // The rejection is sent; the client's reaction does not matter.
    let _ = tokio::time::timeout(LINGER, read).await;
    Ok(())
}

fn refusal() -> String {
    let error = serde_json::json!({
        "message": "this address speaks HTTPS only: begin its URL with https://",
        "type": "invalid_request_error", "param": null, "code": "https_required",
    });
    let body = serde_json::json!({"error": error}).to_string();
    let length = body.len();
    format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}

/// A certificate chain and the key of its first certificate. Clones share one.
#[derive(Clone)]
pub struct TlsIdentity {
    config: Arc<ServerConfig>,
    leaf: CertificateDer<'static>,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.fingerprint())
    }
}

impl TlsIdentity {
    /// Reads a chain, the server's own certificate first, and the certificate's key (PKCS #8,
    /// PKCS #1 or SEC 1), both in PEM form.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Pem`], and [`Error::Pair`] for a key of another
    /// certificate.
    pub fn from_files(certificate: &Path, key: &Path) -> Result<Self, Error> {
        let (chain, private) = (read_chain(certificate)?, read_key(key)?);
        Self::new(chain, private).map_err(|source| Error::Pair {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            source,
        })
    }

    fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, TlsError> {
        let leaf = chain.first().ok_or(TlsError::NoCertificatesPresented)?;
        let leaf = leaf.clone();
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions()?;
        let mut config = builder.with_no_client_auth().with_single_cert(chain, key)?;
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        let config = Arc::new(config);
        Ok(Self { config, leaf })
    }

    /// SHA-256 of the certificate, as browsers and `openssl x509 -fingerprint -sha256` show it:
    /// `AB:CD:...`.
    pub fn fingerprint(&self) -> String {
        let digest = Sha256::digest(&self.leaf);
        let bytes: Vec<String> = digest.iter().map(|byte| format!("{byte:02X}")).collect();
        bytes.join(":")
    }

    fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }
}

/// Settings of a client that trusts the certificates in the file, else the public authorities.
///
/// # Errors
/// [`Error::Read`], [`Error::Pem`], [`Error::Trust`].
pub fn client_config(certificates: Option<&Path>) -> Result<Arc<ClientConfig>, Error> {
    let mut roots = RootCertStore::empty();
    match certificates {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            let chain = read_chain(path)?.into_iter();
            let added = chain
                .map(|it| roots.add(it))
                .collect::<Result<Vec<()>, _>>();
            let path = path.to_owned();
            added.map_err(|source| Error::Trust { path, source })?;
        }
    }
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.map_err(Error::SetUp)?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let text = read(path)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let failed = |source| pem_error(path, "certificate", source);
    let chain = chain.map_err(failed)?;
    if chain.is_empty() {
        return Err(failed(pem::Error::NoItemsFound));
    }
    Ok(chain)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    let key = PrivateKeyDer::from_pem_slice(&read(path)?);
    key.map_err(|source| pem_error(path, "private key", source))
}

fn pem_error(path: &Path, what: &'static str, source: pem::Error) -> Error {
    let path = path.to_owned();
    Error::Pem { path, what, source }
}

/// Reads at most [`MAX_FILE_BYTES`]; a truncated file is not valid PEM.
fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Read {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    let read = file.take(MAX_FILE_BYTES).read_to_end(&mut bytes);
    read.map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn urls_name_what_is_spoken() {
        let dir = tempfile::tempdir().unwrap();
        let own =
            OwnCertificate::open(dir.path(), &CertificateNames::default(), 1_800_000_000).unwrap();
        let (mixed, all) = (
            ServerProtocol::TlsOffLoopback(own.identity.clone()),
            ServerProtocol::Tls(own.identity),
        );
        for (bound, by_mixed) in [
            ("127.0.0.1:1", "http"),
            ("[::1]:1", "http"),
            ("[::ffff:127.0.0.1]:1", "http"),
            ("0.0.0.0:1", "https"),
            ("[::]:1", "https"),
            ("192.168.1.5:1", "https"),
        ] {
            assert_eq!(ServerProtocol::Plain.scheme(addr(bound)), "http", "{bound}");
            assert_eq!(mixed.scheme(addr(bound)), by_mixed, "{bound}");
            assert_eq!(all.scheme(addr(bound)), "https", "{bound}");
        }
    }

    #[test]
    fn bad_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let names = CertificateNames::default();
        let [one, two] = ["one", "two"].map(|name| dir.path().join(name));
        for folder in [&one, &two] {
            OwnCertificate::open(folder, &names, 1_800_000_000).unwrap();
        }
        let (certificate, key) = (one.join("cert.pem"), two.join("key.pem"));
        let error = |certificate: &Path, key: &Path| {
            let error = TlsIdentity::from_files(certificate, key).unwrap_err();
            (error.to_string(), error)
        };
        let (text, pair) = error(&certificate, &key);
        assert!(matches!(pair, Error::Pair { .. }), "{pair:?}");
        assert!(text.contains("two/key.pem"), "{text}");
        let (text, swapped) = error(&key, &certificate);
        assert!(matches!(swapped, Error::Pem { .. }), "{swapped:?}");
        assert!(text.contains("two/key.pem: no certificate"), "{text}");
        let (_, none) = error(&dir.path().join("none"), &key);
        assert!(matches!(none, Error::Read { .. }), "{none:?}");
    }
}
