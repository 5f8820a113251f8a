//! Any bytes as an HTTP connection, or as the body of a request in one of the dialects. The server
//! gives an answer or an end, and does not panic.
#![no_main]

use std::net::SocketAddr;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use paceline_auth::tls::ServerProtocol;
use paceline_fuzz::{ask, serve};

/// Paths of requests with a body. The first byte of the input chooses one; beyond the list the
/// rest of the input is all that the client sends.
const PATHS: [&str; 12] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
];

static SERVER: LazyLock<SocketAddr> = LazyLock::new(|| serve(ServerProtocol::Plain));

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let Some(path) = PATHS.get(usize::from(*choice)) else {
        return ask(*SERVER, rest);
    };
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        *SERVER,
        rest.len()
    );
    ask(*SERVER, &[head.as_bytes(), rest].concat());
});
