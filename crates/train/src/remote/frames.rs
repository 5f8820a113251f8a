//! Frames over a connection, with heartbeats.
//!
//! ```text
//! frame  kind (1 byte), length (u32, little-endian), bytes
//! h      far is there               m  a message, as JSON
//! f      a file: size (u64), name   d  bytes of that file
//! s      the model's name           n  far has no such model
//! e      the model is there: its name below far's folder
//! x      why far ends               b  a heartbeat
//! ```

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::{BEAT, LINE_BYTES_MAX};
use paceline_process::Program;

use crate::error::Error;
use crate::messages::{FromWorker, ToWorker};
use crate::stage::ModelStage;

/// Heartbeat timeout of a side: a slow connection needs a second for a frame.
const SILENCE: Duration = Duration::from_secs(5);

/// Additional time for the first heartbeat of a side: `ssh` connects, and a program loads from a
/// cold disk.
const FIRST: Duration = Duration::from_secs(25);

/// Bytes of a frame of a file: half a second at 1 Mbit/s.
const CHUNK_BYTES: usize = 64 << 10;

/// Most queued frames; then reading pauses.
const HELD_MAX: usize = 256;

/// Longest name of a file.
const NAME_BYTES_MAX: usize = 4096;

/// The sending direction. Clones share it.
#[derive(Clone)]
pub(super) struct FrameSender(Arc<Mutex<Box<dyn Write + Send>>>);

/// A connection with a thread that reads frames and one that sends heartbeats.
pub(super) struct FrameConnection {
    out: FrameSender,
    frames: Receiver<(u8, Vec<u8>)>,
    began: Instant,
    heard: Arc<Mutex<Instant>>,
    broken: Arc<Mutex<Option<String>>>,
    /// Ends with the connection.
    _other: Program,
}

impl FrameConnection {
    /// A connection to the program `other`.
    pub(super) fn new(mut other: Program) -> Result<Self, Error> {
        let from = other.take_output();
        let to = other.take_input();
        let to = to.ok_or_else(|| broken("its input is closed"))?;
        let (put, frames) = sync_channel(HELD_MAX);
        let began = Instant::now();
        let line = Self {
            out: FrameSender(Arc::new(Mutex::new(to))),
            frames,
            began,
            heard: Arc::new(Mutex::new(began + FIRST)),
            broken: Arc::default(),
            _other: other,
        };
        let reader = FrameReader {
            from,
            put,
            heard: Arc::clone(&line.heard),
            broken: Arc::clone(&line.broken),
        };
        let out = line.out();
        let beat = move || {
            while out.send(b'b', &[]).is_ok() {
                std::thread::sleep(BEAT);
            }
        };
        spawn("line", move || reader.run())?;
        spawn("beat", beat)?;
        Ok(line)
    }

    /// The next frame other than a heartbeat, if there is one within `wait`.
    ///
    /// # Errors
    /// [`Error::Line`] when the connection is broken or silent.
    pub(super) fn recv(&self, wait: Duration) -> Result<Option<(u8, Vec<u8>)>, Error> {
        match self.frames.recv_timeout(wait) {
            Ok((b'x', why)) => Err(broken(String::from_utf8_lossy(&why))),
            Ok(frame) => Ok(Some(frame)),
            Err(_) => self.check().map(|()| None),
        }
    }

    /// For how long it has been there.
    pub(super) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    fn check(&self) -> Result<(), Error> {
        if let Some(why) = &*lock(&self.broken) {
            return Err(broken(why));
        }
        match lock(&self.heard).elapsed() {
            silence if silence > SILENCE => Err(broken(format!("silent for {silence:.1?}"))),
            _ => Ok(()),
        }
    }

    /// Its way out.
    pub(super) fn out(&self) -> FrameSender {
        self.out.clone()
    }

    pub(super) fn send(&self, kind: u8, bytes: &[u8]) -> Result<(), Error> {
        self.out.send(kind, bytes)
    }

    pub(super) fn send_file(&self, path: &Path, name: &str) -> Result<(), Error> {
        self.out.send_file(path, name)
    }
}

impl FrameSender {
    pub(super) fn send(&self, kind: u8, bytes: &[u8]) -> Result<(), Error> {
        send(&mut **lock(&self.0), kind, bytes).map_err(broken)
    }

    pub(super) fn send_file(&self, path: &Path, name: &str) -> Result<(), Error> {
        let mut file = File::open(path).map_err(Error::file("read", path))?;
        let size = file.metadata().map_or(0, |about| about.len());
        self.send(b'f', &[&size.to_le_bytes()[..], name.as_bytes()].concat())?;
        let (mut left, mut buffer) = (size, vec![0; CHUNK_BYTES]);
        while left > 0 {
            let n = buffer
                .len()
                .min(usize::try_from(left).unwrap_or(usize::MAX));
            let read = file.read_exact(&mut buffer[..n]);
            read.map_err(Error::file("read", path))?;
            self.send(b'd', &buffer[..n])?;
            left -= n as u64;
        }
        Ok(())
    }
}

/// Reads frames until the connection ends.
struct FrameReader {
    from: Box<dyn Read + Send>,
    put: SyncSender<(u8, Vec<u8>)>,
    heard: Arc<Mutex<Instant>>,
    broken: Arc<Mutex<Option<String>>>,
}

impl FrameReader {
    fn run(mut self) {
        let why = loop {
            match read(&mut *self.from) {
                Ok(frame) => {
                    *lock(&self.heard) = Instant::now();
                    if frame.0 != b'b' && self.put.send(frame).is_err() {
                        return; // nobody takes them any more
                    }
                }
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    break "the other side ended".to_owned();
                }
                Err(error) => break error.to_string(),
            }
            // A full queue here is not silence of the other side.
            *lock(&self.heard) = Instant::now();
        };
        *lock(&self.broken) = Some(why);
    }
}

fn read(from: &mut dyn Read) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    if length > LINE_BYTES_MAX {
        let what = format!("a frame of {length} bytes, at most {LINE_BYTES_MAX} are allowed");
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    let mut bytes = Vec::new();
    from.take(length as u64).read_to_end(&mut bytes)?;
    match bytes.len() == length {
        true => Ok((kind, bytes)),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
}

fn send(to: &mut dyn Write, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
    to.write_all(&[&[kind][..], &length.to_le_bytes()].concat())?;
    to.write_all(bytes)?;
    to.flush()
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    let started = thread.spawn(run);
    started
        .map(drop)
        .map_err(|source| Error::Threads { threads: 1, source })
}

pub(super) fn broken(reason: impl ToString) -> Error {
    let reason = reason.to_string();
    Error::Line { reason }
}

/// Receives files from frames into a folder; each appears whole.
pub(super) struct FileReceiver {
    folder: PathBuf,
    open: Option<OpenFile>,
}

struct OpenFile {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    left: u64,
}

impl FileReceiver {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, open: None }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file begins.
    ///
    /// # Errors
    /// [`Error::Line`] for a name that leads out of the folder; [`Error::Files`].
    pub(super) fn begin(&mut self, frame: &[u8]) -> Result<(), Error> {
        let Some((size, name)) = frame.split_first_chunk::<8>() else {
            return Err(broken("a file without a size"));
        };
        let name = std::str::from_utf8(name).map_err(broken)?;
        if !is_inside(name) {
            return Err(broken(format!("a file called {name:?}")));
        }
        let path = self.folder.join(name);
        let temporary = path.with_extension("coming");
        let parent = path.parent().unwrap_or(&self.folder);
        std::fs::create_dir_all(parent).map_err(Error::file("make", parent))?;
        let file = File::create(&temporary).map_err(Error::file("make", &temporary))?;
        self.open = Some(OpenFile {
            file,
            temporary,
            path,
            left: u64::from_le_bytes(*size),
        });
        self.data(&[])
    }

    /// More of the file under way.
    ///
    /// # Errors
    /// [`Error::Line`] when there is none, or it exceeds its announced size.
    pub(super) fn data(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some(coming) = &mut self.open else {
            return Err(broken("bytes of no file"));
        };
        let left = coming.left.checked_sub(bytes.len() as u64);
        coming.left = left.ok_or_else(|| broken("more bytes of a file than it has"))?;
        let written = coming.file.write_all(bytes);
        written.map_err(Error::file("write", &coming.temporary))?;
        if coming.left == 0 {
            let renamed = std::fs::rename(&coming.temporary, &coming.path);
            renamed.map_err(Error::file("rename", &coming.temporary))?;
            self.open = None;
        }
        Ok(())
    }
}

/// Reads `bytes` as frames of the other machine, for fuzzing: it returns for any bytes. No file
/// that they name leads out of the folder.
pub(crate) fn parse(mut bytes: &[u8]) {
    let folder = Path::new("/folder");
    let stays = |name: &str| {
        let path = folder.join(name);
        let climbs = path.components().any(|part| part == Component::ParentDir);
        assert!(path.starts_with(folder) && !climbs, "{name:?}");
    };
    let stage = ModelStage { index: 1, of: 3 };
    while let Ok((kind, frame)) = read(&mut bytes) {
        if let Some((_, name)) = frame.split_first_chunk::<8>()
            && let Ok(name) = std::str::from_utf8(name)
            && kind == b'f'
            && is_inside(name)
        {
            stays(name);
        }
        if let Ok(message) = serde_json::from_slice::<ToWorker>(&frame) {
            message.needs(stage).iter().for_each(|name| stays(name));
        }
        if let Ok(message) = serde_json::from_slice::<FromWorker>(&frame) {
            message
                .output_files(stage)
                .iter()
                .for_each(|name| stays(name));
        }
    }
}

/// Whether a name is `FOLDER/FILE`, both plain.
pub(super) fn is_inside(name: &str) -> bool {
    let parts: Vec<Component<'_>> = Path::new(name).components().collect();
    let is_plain = |part: &Component<'_>| matches!(part, Component::Normal(_));
    name.len() <= NAME_BYTES_MAX && parts.len() == 2 && parts.iter().all(is_plain)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn lines() -> (FrameConnection, FrameConnection) {
        let (a, b) = UnixStream::pair().unwrap();
        let connect = |stream| FrameConnection::new(Program::connected(stream).unwrap()).unwrap();
        (connect(a), connect(b))
    }

    #[test]
    fn files_arrive_whole_and_messages_in_order() {
        let (here, there) = lines();
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        let path = folder.path().join("from");
        std::fs::write(&path, &bytes).unwrap();
        std::fs::write(folder.path().join("empty"), []).unwrap();
        here.send_file(&path, "3/roots-0-1-2").unwrap();
        here.send_file(&folder.path().join("empty"), "3/none")
            .unwrap();
        here.send(b'm', b"then this").unwrap();
        let mut files = FileReceiver::new(folder.path().join("to"));
        loop {
            match there.recv(Duration::from_secs(10)).unwrap().unwrap() {
                (b'f', frame) => files.begin(&frame).unwrap(),
                (b'd', frame) => files.data(&frame).unwrap(),
                (kind, frame) => {
                    assert_eq!((kind, frame.as_slice()), (b'm', &b"then this"[..]));
                    break;
                }
            }
        }
        let got = |name: &str| std::fs::read(folder.path().join("to").join(name)).unwrap();
        assert!(got("3/roots-0-1-2") == bytes && got("3/none").is_empty());
        assert!(files.data(b"more").is_err());
        drop(here);
        there.send(b'x', b"the disk is full").unwrap();
    }

    #[test]
    fn names_that_lead_elsewhere_and_lengths_that_lie_are_refused() {
        for name in ["x", "../x", "/etc/x", "a/../x", "a/b/c", "./x", ""] {
            assert!(!is_inside(name), "{name}");
        }
        assert!(is_inside("12/params-0") && is_inside(crate::messages::ANSWERS_FILE));
        let folder = tempfile::tempdir().unwrap();
        let mut files = FileReceiver::new(folder.path().to_owned());
        assert!(files.begin(b"short").is_err());
        files
            .begin(&[&2u64.to_le_bytes()[..], b"a/b"].concat())
            .unwrap();
        assert!(files.data(b"abc").is_err());
        let mut long: &[u8] = &[b'm', 255, 255, 255, 255];
        assert_eq!(read(&mut long).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn an_end_and_its_reason_are_told() {
        let (here, there) = lines();
        here.send(b'x', b"no such model").unwrap();
        let error = there.recv(Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.contains("no such model"), "{error}");
        let mut ends: (&[u8], Vec<u8>) = (b"m", Vec::new());
        assert_eq!(
            read(&mut ends.0).unwrap_err().kind(),
            ErrorKind::UnexpectedEof
        );
        send(&mut ends.1, b'm', b"ab").unwrap();
        assert_eq!(ends.1, [b'm', 2, 0, 0, 0, b'a', b'b']);
    }
}
