//! A client of HTTP/1.0, whose answers end with the connection and come in no chunks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// An answer.
#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

/// An answer as it comes.
pub(crate) struct StreamedResponse {
    lines: BufReader<TcpStream>,
}

/// Sends a request and waits for its answer; `None` for `body` asks with GET.
pub(crate) fn ask(port: u16, path: &str, body: Option<&Value>) -> HttpResponse {
    let mut stream = send(port, path, body);
    let status = stream.head();
    let mut text = String::new();
    stream.lines.read_to_string(&mut text).unwrap();
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    HttpResponse { status, body }
}

/// Sends a request whose answer is events.
pub(crate) fn stream(port: u16, path: &str, body: &Value) -> StreamedResponse {
    let mut stream = send(port, path, Some(body));
    assert_eq!(stream.head(), 200);
    stream
}

fn send(port: u16, path: &str, body: Option<&Value>) -> StreamedResponse {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_read_timeout(Some(super::PATIENCE)).unwrap();
    let (method, body) = match body {
        Some(body) => ("POST", body.to_string()),
        None => ("GET", String::new()),
    };
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    );
    socket.write_all(request.as_bytes()).unwrap();
    StreamedResponse {
        lines: BufReader::new(socket),
    }
}

impl StreamedResponse {
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.lines.read_line(&mut line).unwrap();
        (read > 0).then(|| line.trim_end().to_owned())
    }

    /// Reads up to the body; the status.
    fn head(&mut self) -> u16 {
        let first = self.line().unwrap();
        while self.line().is_some_and(|line| !line.is_empty()) {}
        first.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// The next event, `[DONE]` as a string; `None` at the end.
    pub(crate) fn event(&mut self) -> Option<Value> {
        loop {
            let line = self.line()?;
            if let Some(data) = line.strip_prefix("data: ") {
                let text = || Value::String(data.to_owned());
                return Some(serde_json::from_str(data).unwrap_or_else(|_| text()));
            }
        }
    }
}

/// Asks for `/health` until it has `status`; how long that took.
pub(crate) fn health(port: u16, status: u16) -> Duration {
    super::until("the server's health", || {
        ask(port, "/health", None).status == status
    })
}
