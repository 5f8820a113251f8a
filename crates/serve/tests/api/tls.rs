//! TLS over real sockets: rustls clients, and clients that speak something else.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use paceline_auth::tls::{CertificateNames, OwnCertificate, ServerProtocol};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::client::{connect, raw};
use crate::rig::{CLOCK, Rig, chat_bytes, refusal};
use crate::scripted::Script;

/// A server that speaks TLS only, and what it speaks with.
fn rig(folder: &Path) -> (Rig, OwnCertificate) {
    let own = own(folder);
    let identity = own.identity.clone();
    (
        Rig::with(|config| config.wire = ServerProtocol::Tls(identity)),
        own,
    )
}

fn own(folder: &Path) -> OwnCertificate {
    OwnCertificate::open(folder, &CertificateNames::default(), (CLOCK.unix_s)()).unwrap()
}

/// A client's side of a connection to `localhost` that trusts the certificate in `trusted` only.
fn client(addr: SocketAddr, trusted: &Path, name: &'static str) -> TlsRig {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(trusted).unwrap();
    roots.add(certificate).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from(name).unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    StreamOwned::new(connection, connect(addr))
}

type TlsRig = StreamOwned<ClientConnection, TcpStream>;

fn get(headers: &str) -> String {
    format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n")
}

fn chat(fields: &str) -> String {
    chat_bytes("Connection: close\r\n", fields)
}

/// Sends `request` and reads to the end, which the server must announce.
fn ask(mut stream: TlsRig, request: &str) -> io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn clients_that_trust_the_certificate_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, own) = rig(dir.path());
    for name in ["localhost", "127.0.0.1"] {
        for (request, expected) in [
            (get(""), "\"tiny\""),
            (chat(""), "Hello, world"),
            (chat(r#""stream":true"#), "[DONE]"),
        ] {
            let text = ask(client(rig.addr, &own.path, name), &request).unwrap();
            assert!(text.starts_with("HTTP/1.1 200"), "{name}: {text}");
            assert!(text.contains(expected), "{name}: {text}");
        }
    }
}

#[test]
fn pages_of_the_server_have_https_origins() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, own) = rig(dir.path());
    for (origin, status) in [("https://localhost", "200"), ("http://localhost", "403")] {
        let request = get(&format!("Origin: {origin}\r\n"));
        let text = ask(client(rig.addr, &own.path, "localhost"), &request).unwrap();
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{text}");
    }
}

#[test]
fn clients_refuse_another_certificate_and_another_name() {
    let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let ((rig, right), wrong) = (rig(one.path()), own(two.path()));
    for (trusted, name, expected) in [
        (&wrong.path, "localhost", "UnknownIssuer"),
        (&right.path, "llm.example.org", "not valid for name"),
    ] {
        let error = ask(client(rig.addr, trusted, name), &get("")).unwrap_err();
        assert!(error.to_string().contains(expected), "{name}: {error}");
    }
    assert!(rig.service.requests().is_empty());
    // The server still answers.
    ask(client(rig.addr, &right.path, "localhost"), &get("")).unwrap();
}

#[test]
fn plain_http_is_told_to_use_https() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, _) = rig(dir.path());
    for request in [
        get(""),
        chat(&format!(r#""user":"{}""#, "x".repeat(1 << 18))),
    ] {
        let (status, code, _, message) = refusal(raw(rig.addr, request.as_bytes()));
        assert_eq!((status, code.as_str()), (400, "https_required"));
        assert!(message.contains("https://"), "{message}");
    }
    assert!(rig.service.requests().is_empty());
}

#[test]
fn loopback_speaks_both_where_only_the_network_wants_tls() {
    let dir = tempfile::tempdir().unwrap();
    let own = own(dir.path());
    let identity = own.identity.clone();
    let rig = Rig::with(|config| config.wire = ServerProtocol::TlsOffLoopback(identity));
    rig.chat("").ok("plain");
    let text = ask(client(rig.addr, &own.path, "localhost"), &chat("")).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[test]
fn a_handshake_has_a_deadline_and_keeps_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let own = own(dir.path());
    let identity = own.identity.clone();
    let rig = Rig::with(|config| {
        config.wire = ServerProtocol::Tls(identity);
        config.limits.connections = 2;
        config.times.headers = Duration::from_secs(1);
    });
    let silent = |bytes: &[u8]| {
        let mut stream = connect(rig.addr);
        stream.write_all(bytes).unwrap();
        stream
    };
    // Nothing, the beginning of a handshake, and one that says how long it is and then stops.
    let held = [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00"].map(silent);
    let text = ask(client(rig.addr, &own.path, "localhost"), &get("")).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    for mut stream in held {
        // Closed or reset, before the client's own patience ends.
        let read = stream.read(&mut [0]);
        let waited = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        assert!(!matches!(&read, Err(error) if waited(error)), "{read:?}");
    }
}

#[test]
fn what_is_no_handshake_ends_its_own_connection() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, own) = rig(dir.path());
    let mut stream = connect(rig.addr);
    stream.write_all(b"\x16\x03\x01\x00\x04junk").unwrap();
    let mut rest = Vec::new();
    // An alert, if anything.
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.len() < 100, "{rest:?}");
    ask(client(rig.addr, &own.path, "localhost"), &get("")).unwrap();
}

#[test]
fn a_client_that_leaves_stops_its_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, own) = rig(dir.path());
    rig.service.script(Script::Endless);
    let mut stream = client(rig.addr, &own.path, "localhost");
    let request = chat(r#""stream":true"#);
    stream.write_all(request.as_bytes()).unwrap();
    let mut some = [0; 200];
    stream.read_exact(&mut some).unwrap();
    drop(stream);
    rig.service.wait("cancelling", |_, cancelled, replying| {
        (cancelled, replying) == (1, 0)
    });
}

#[test]
fn a_client_that_reads_nothing_loses_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let own = own(dir.path());
    let identity = own.identity.clone();
    let rig = Rig::with(|config| {
        config.wire = ServerProtocol::Tls(identity);
        config.times.stalled_write = Duration::from_millis(300);
        // Not what ends it here.
        config.limits.unread_replies = 1 << 20;
    });
    rig.service.script(Script::Endless);
    let mut stream = client(rig.addr, &own.path, "localhost");
    let request = chat(r#""stream":true"#);
    stream.write_all(request.as_bytes()).unwrap();
    rig.service.wait("cancelling", |_, cancelled, replying| {
        (cancelled, replying) == (1, 0)
    });
}

#[test]
fn a_client_that_has_said_all_gets_its_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, own) = rig(dir.path());
    let mut stream = client(rig.addr, &own.path, "localhost");
    stream.write_all(chat("").as_bytes()).unwrap();
    stream.conn.send_close_notify();
    let text = ask(stream, "").unwrap();
    assert!(text.contains("Hello, world"), "{text}");
}
