//! Hints for errors of the HTTP server and the load generator.

use std::io::ErrorKind;

use paceline_auth::tls;
use paceline_load_generator as load_generator;
use paceline_serve::Error;

pub(super) fn hint(error: &Error) -> Option<String> {
    Some(match error {
        Error::Open { .. } => {
            "`paceline key api new NAME` makes a key, which lets in whoever has it; \
                               --no-keys lets in every machine that can reach the address"
                .into()
        }
        Error::Bind { addr, source } => match source.kind() {
            ErrorKind::AddrInUse => format!(
                "another program, perhaps another `paceline up`, listens on port {}: stop it, or \
                 take another port with --port N (0 takes a free one)",
                addr.port()
            ),
            ErrorKind::PermissionDenied => format!(
                "port {} is for the system's own programs: take one from 1024 on with --port N",
                addr.port()
            ),
            ErrorKind::AddrNotAvailable => {
                "--host is an address of this machine: 127.0.0.1 for programs on it, 0.0.0.0 for \
                 all its addresses"
                    .into()
            }
            _ => return None,
        },
        Error::Tls(error) => return hint_of_tls(error),
        Error::Keys(_) | Error::SetUp(_) => return None,
        Error::NoAddress | Error::Limit { .. } | Error::Name { .. } => {
            "`paceline up --help` explains the options".into()
        }
    })
}

pub(super) fn hint_of_tls(error: &tls::Error) -> Option<String> {
    match error {
        tls::Error::Pem { what, .. } => Some(format!(
            "a {what} in PEM form is text with lines of dashes; `openssl x509 -inform der` or \
             `openssl pkcs12` make it out of other forms"
        )),
        tls::Error::Pair { .. } => Some(
            "--tls-cert has the server's own certificate first, and --tls-key is its key".into(),
        ),
        _ => None,
    }
}

pub(super) fn hint_of_load(error: &load_generator::Error) -> Option<String> {
    Some(match error {
        load_generator::Error::NoServer { .. } => {
            "start it in another terminal: paceline up MODEL; with --url for another place".into()
        }
        load_generator::Error::NoModel { .. } => {
            "`paceline load MODEL` gives the server one".into()
        }
        load_generator::Error::Line { .. } | load_generator::Error::NoLengths => {
            "a line is the tokens of a prompt, a space, and those of its answer: 512 128".into()
        }
        load_generator::Error::Length { .. } => return None,
    })
}
