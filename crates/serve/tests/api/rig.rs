//! A server on a free port, ended when the test ends.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

use paceline_auth::keys::{KeyRole, Keys};
use paceline_engine::{Finish, Service};
use paceline_serve::{
    Config, HttpServer, MetricSample, ProcessMetrics, ServedModel, ServerHandle, TimeSource,
};
use serde_json::Value;

use crate::client::{TestResponse, connect, raw};
use crate::scripted::{Script, ScriptedService};
use crate::tiny;

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETE: &str = "/v1/completions";

pub(crate) const CLOCK: TimeSource = TimeSource {
    now: Instant::now,
    unix_s: || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs(),
};

/// A running server.
pub(crate) struct Rig {
    pub(crate) addr: SocketAddr,
    pub(crate) handle: ServerHandle,
    pub(crate) service: ScriptedService,
    thread: Option<JoinHandle<()>>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    /// With a scripted service that says "Hello, world" in four tokens.
    pub(crate) fn with(change: impl FnOnce(&mut Config)) -> Self {
        let hello = vec![(72, "Hello"), (44, ", "), (119, "wor"), (108, "ld")];
        let service = ScriptedService::new(Script::Say(hello, Finish::EndOfText));
        Self::start(change, tiny::model(), Arc::new(service.clone()), service)
    }

    /// With a scripted service behind the text side of `model`.
    pub(crate) fn of(model: ServedModel) -> Self {
        let service = ScriptedService::new(Script::Say(vec![(97, "ok")], Finish::EndOfText));
        Self::start(|_| {}, model, Arc::new(service.clone()), service)
    }

    pub(crate) fn over(service: Arc<dyn Service>, model: ServedModel) -> Self {
        let unused = ScriptedService::new(Script::Silence);
        Self::start(|_| {}, model, service, unused)
    }

    pub(crate) fn start(
        change: impl FnOnce(&mut Config),
        model: ServedModel,
        service: Arc<dyn Service>,
        scripted: ScriptedService,
    ) -> Self {
        let mut config = Config::new(0, CLOCK);
        change(&mut config);
        let server = HttpServer::bind(config, model, service).unwrap();
        Self::run(server, scripted)
    }

    /// With several models, each with a service of its own.
    pub(crate) fn several(models: Vec<(ServedModel, Arc<dyn Service>)>) -> Self {
        Self::several_with(|_| {}, models)
    }

    pub(crate) fn several_with(
        change: impl FnOnce(&mut Config),
        models: Vec<(ServedModel, Arc<dyn Service>)>,
    ) -> Self {
        let mut config = Config::new(0, CLOCK);
        change(&mut config);
        let shared = || MetricSample {
            name: "shared",
            help: "Of the node",
            labels: String::new(),
            value: 7.0,
        };
        config.facts = ProcessMetrics(Arc::new(move || vec![shared()]));
        let server = HttpServer::bind_all(config, models).unwrap();
        Self::run(server, ScriptedService::new(Script::Silence))
    }

    /// Runs a server that was bound otherwise.
    pub(crate) fn run(server: HttpServer, scripted: ScriptedService) -> Self {
        let (addr, handle) = (server.addresses()[0], server.handle());
        let thread = std::thread::spawn(move || server.run());
        Self {
            addr,
            handle,
            service: scripted,
            thread: Some(thread),
        }
    }

    /// Sends a request of its own connection. `headers` end with line ends.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TestResponse {
        let (port, length) = (self.addr.port(), body.len());
        let host = if headers.contains("Host: ") {
            String::new()
        } else {
            format!("Host: localhost:{port}\r\n")
        };
        let text = format!(
            "{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}\
             Content-Length: {length}\r\n\r\n{body}"
        );
        raw(self.addr, text.as_bytes())
    }

    pub(crate) fn get(&self, path: &str) -> TestResponse {
        self.send("GET", path, "", "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> TestResponse {
        self.send("POST", path, "Content-Type: application/json\r\n", body)
    }

    /// A chat with more fields, written as JSON without the outer braces.
    pub(crate) fn chat(&self, fields: &str) -> TestResponse {
        self.post(CHAT, &chat_body(fields))
    }

    pub(crate) fn complete(&self, fields: &str) -> TestResponse {
        self.post(COMPLETE, &completion_body(fields))
    }

    /// Sends a chat on a connection of its own, and reads nothing.
    pub(crate) fn begin(&self, headers: &str, fields: &str) -> TcpStream {
        let mut stream = connect(self.addr);
        let bytes = chat_bytes(headers, fields);
        stream.write_all(bytes.as_bytes()).unwrap();
        stream
    }

    /// Waits for [`Server::run`] to return.
    pub(crate) fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.handle.shutdown();
        if let Some(thread) = self.thread.take() {
            let joined = thread.join();
            assert!(joined.is_ok() || std::thread::panicking());
        }
    }
}

/// Keys of a server, in a file of their own.
pub(crate) struct TestKeys {
    pub(crate) keys: Keys,
    pub(crate) path: PathBuf,
    _dir: tempfile::TempDir,
}

impl TestKeys {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        let keys = Keys::open(&path).unwrap();
        Self {
            keys,
            path,
            _dir: dir,
        }
    }

    /// Makes a key. Returns its secret, its header line, and its id.
    pub(crate) fn make(&mut self, name: &str, role: KeyRole) -> (String, String, String) {
        let (key, info) = self.keys.make(name, role, 1).unwrap();
        let header = bearer(&key);
        (key, header, info.id)
    }

    /// A server that asks for these keys.
    pub(crate) fn rig(&self, change: impl FnOnce(&mut Config)) -> Rig {
        Rig::with(|config| {
            config.access.keys = Some(self.path.clone());
            change(config);
        })
    }
}

/// The header line of a key.
pub(crate) fn bearer(key: &str) -> String {
    format!("Authorization: Bearer {key}\r\n")
}

/// A chat with these fields and header lines, as bytes of a connection that is kept.
pub(crate) fn chat_bytes(headers: &str, fields: &str) -> String {
    let body = chat_body(fields);
    let length = body.len();
    format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

pub(crate) fn chat_body(fields: &str) -> String {
    let comma = if fields.is_empty() { "" } else { "," };
    format!(r#"{{"model":"tiny","messages":[{{"role":"user","content":"hi"}}]{comma}{fields}}}"#)
}

pub(crate) fn completion_body(fields: &str) -> String {
    let comma = if fields.is_empty() { "" } else { "," };
    format!(r#"{{"model":"tiny","prompt":"hi"{comma}{fields}}}"#)
}

/// The prompt of the last request, as text without control tokens.
pub(crate) fn prompt_text(rig: &Rig) -> String {
    let prompt = rig.service.last().prompt;
    let bytes = prompt.iter().filter_map(|id| u8::try_from(*id).ok());
    String::from_utf8(bytes.collect()).unwrap()
}

/// Status, code and param of a refusal, and its message.
pub(crate) fn refusal(response: TestResponse) -> (u16, String, Option<String>, String) {
    let status = response.status;
    assert_eq!(response.header("content-type"), Some("application/json"));
    let body = response.json();
    let error = &body["error"];
    let text = |name: &str| error[name].as_str().map(str::to_owned);
    assert_eq!(
        error.as_object().map(serde_json::Map::len),
        Some(4),
        "{body}"
    );
    let (code, message) = (text("code"), text("message"));
    (
        status,
        code.unwrap_or_default(),
        text("param"),
        message.unwrap(),
    )
}

/// The chunks of a complete stream, without `[DONE]`.
pub(crate) fn chunks(response: TestResponse) -> Vec<Value> {
    assert_eq!(response.status, 200);
    let mut events = response.all_events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let parse = |event: &String| serde_json::from_str(event).unwrap();
    events.iter().map(parse).collect()
}
