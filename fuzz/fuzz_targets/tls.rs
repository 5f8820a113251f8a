//! Any bytes as the beginning of a TLS connection: an alert, a refusal or an end, and no panic in
//! the server.
#![no_main]

use std::net::SocketAddr;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use paceline_auth::tls::{CertificateNames, OwnCertificate, ServerProtocol};
use paceline_fuzz::{ask, serve};

static SERVER: LazyLock<SocketAddr> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("paceline-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the folder for temporary files can be written to");
    let own = OwnCertificate::open(&folder, &CertificateNames::default(), 1_700_000_000);
    let own = own.expect("a certificate can be made");
    std::fs::remove_dir_all(&folder).expect("it was made just now");
    serve(ServerProtocol::Tls(own.identity))
});

fuzz_target!(|bytes: &[u8]| ask(*SERVER, bytes));
