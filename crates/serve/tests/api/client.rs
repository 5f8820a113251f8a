//! A small HTTP client that sends exactly the given bytes and reads events one by one.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longest wait for anything from the server: its answers are instant, the machine may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct TestResponse {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    body: ResponseBody,
}

enum ResponseBody {
    Sized(std::io::Take<BufReader<TcpStream>>),
    Chunked(BufReader<TcpStream>),
}

pub(crate) fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends the bytes on a connection of their own and reads the head of the response.
pub(crate) fn raw(addr: SocketAddr, bytes: &[u8]) -> TestResponse {
    let mut stream = connect(addr);
    // The server may refuse before it has read everything.
    let _ = stream.write_all(bytes);
    receive(stream)
}

pub(crate) fn receive(stream: TcpStream) -> TestResponse {
    let mut reader = BufReader::new(stream);
    let status = line(&mut reader);
    let status = status
        .split(' ')
        .nth(1)
        .expect("a status line")
        .parse()
        .unwrap();
    let mut headers = Vec::new();
    loop {
        let line = line(&mut reader);
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let body = match length {
        Some((_, length)) => ResponseBody::Sized(reader.take(length.parse().unwrap())),
        None if headers.iter().any(|(name, _)| name == "transfer-encoding") => {
            ResponseBody::Chunked(reader)
        }
        None => ResponseBody::Sized(reader.take(0)),
    };
    TestResponse {
        status,
        headers,
        body,
    }
}

fn line(reader: &mut impl BufRead) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

impl TestResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The next piece of the body; empty at its end.
    fn piece(&mut self) -> Vec<u8> {
        let mut piece = Vec::new();
        match &mut self.body {
            ResponseBody::Sized(reader) => drop(reader.read_to_end(&mut piece).unwrap()),
            ResponseBody::Chunked(reader) => {
                let length = line(reader);
                let length = usize::from_str_radix(&length, 16).unwrap_or(0);
                piece.resize(length, 0);
                reader.read_exact(&mut piece).unwrap();
                line(reader);
            }
        }
        piece
    }

    pub(crate) fn text(mut self) -> String {
        let mut all = Vec::new();
        loop {
            let piece = self.piece();
            if piece.is_empty() {
                return String::from_utf8(all).unwrap();
            }
            all.extend(piece);
        }
    }

    /// Checks that it is a 200; `what` was asked.
    pub(crate) fn ok(self, what: &str) {
        let status = self.status;
        let text = self.text();
        assert_eq!(status, 200, "{what}: {text}");
    }

    pub(crate) fn json(self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The events that arrive next, without comments; `None` at the end.
    pub(crate) fn events(&mut self) -> Option<Vec<String>> {
        let piece = self.piece();
        if piece.is_empty() {
            return None;
        }
        let text = String::from_utf8(piece).unwrap();
        assert!(text.ends_with("\n\n"), "events are not cut: {text:?}");
        let events = text
            .split_terminator("\n\n")
            .filter(|event| !event.starts_with(':'));
        let data = |event: &str| {
            let data = event.lines().find_map(|line| line.strip_prefix("data: "));
            data.expect(event).to_owned()
        };
        Some(events.map(data).collect())
    }

    /// The events that arrive next with their ids; `None` at the end.
    pub(crate) fn numbered(&mut self) -> Option<Vec<(String, String)>> {
        let piece = String::from_utf8(self.piece()).unwrap();
        let field = |event: &str, name: &str| {
            let mut lines = event.lines();
            let found = lines.find_map(|line| line.strip_prefix(name));
            found.unwrap_or_default().to_owned()
        };
        let events = piece.split_terminator("\n\n");
        let events = events.filter(|event| !event.starts_with(':'));
        let events = events.map(|event| (field(event, "id: "), field(event, "data: ")));
        (!piece.is_empty()).then(|| events.collect())
    }

    /// The events of the next piece that have a number before their data; `None` at the end.
    pub(crate) fn pieces_with_ids(&mut self) -> Option<Vec<String>> {
        let piece = self.piece();
        let text = String::from_utf8(piece).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
        (!text.is_empty()).then(|| lines.map(str::to_owned).collect())
    }

    pub(crate) fn all_events(mut self) -> Vec<String> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        std::iter::from_fn(|| self.events()).flatten().collect()
    }
}
