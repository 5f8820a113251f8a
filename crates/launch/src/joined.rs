//! Programs and connections on machines that have joined a cluster: what `ssh` gives, by nodes.
//!
//! ```text
//! standard streams ── near ══ a connection between two nodes ══ far ── program, or socket there
//! ```
//! [`near`] runs on the machine of the person, [`far`] is started by the other machine's node, and
//! only where its owner allows that. The connection is encrypted by the nodes. Either end closes
//! it; [`far`] then ends its program.
//!
//! A frame is a byte of [`FrameKind`], the length of its payload as 4 bytes, little endian, and the
//! payload. The first frame is the request.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_process::{Ending, Process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// Most bytes of a frame's payload; a node forwards 64 KiB at a time.
const FRAME_BYTES_MAX: usize = 64 << 10;

/// Most bytes of a request: 128 KiB is the longest single argument of Linux.
const REQUEST_BYTES_MAX: usize = 256 << 10;

/// Time for a program to exit after its connection is lost. The node gives [`far`] two seconds.
const GRACE: Duration = Duration::from_millis(1500);

/// Poll interval for the end of a program.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Longest wait for the last output of a program that has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Longest wait for a socket of the other machine to accept.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// The variable of a program with the path of the paceline that started it.
pub const PROGRAM_VARIABLE: &str = "PACELINE_BINARY";

/// The request for the other machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Runs a program with its arguments.
    Run(Vec<String>),
    /// Connects to a TCP port of the loopback interface.
    Port(u16),
    /// Connects to a Unix socket.
    Socket(PathBuf),
}

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A frame of an unknown kind, too long, or of another direction.
    #[error("the other machine sent a frame of kind {kind} with {bytes} bytes, which is unknown")]
    Frame {
        /// Its first byte.
        kind: u8,
        bytes: usize,
    },
    /// The first frame is not a request.
    #[error("the first frame is no request")]
    NoRequest,
    #[error("the connection to the other machine ended")]
    Lost,
    /// The program cannot be started there, or the socket not be reached.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum FrameKind {
    /// A [`Request`] as JSON.
    Request = 1,
    /// Bytes for the program; none for the end of its input.
    Input = 2,
    /// Bytes of standard output.
    Output = 3,
    /// Bytes of standard error.
    Errors = 4,
    /// An [`Ending`] as JSON: the last frame.
    Ended = 5,
    /// Why nothing was started, as text: the last frame.
    Refused = 6,
}

impl FrameKind {
    const ALL: [Self; 6] = [
        Self::Request,
        Self::Input,
        Self::Output,
        Self::Errors,
        Self::Ended,
        Self::Refused,
    ];

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Writes a frame and flushes.
fn write_frame(to: &mut impl Write, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut frame = Vec::with_capacity(5 + payload.len());
    frame.push(kind as u8);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(payload);
    to.write_all(&frame)?;
    to.flush()
}

/// Reads a frame of at most `bytes_max` bytes; `None` at the end of the stream.
fn read_frame(
    from: &mut impl Read,
    bytes_max: usize,
) -> Result<Option<(FrameKind, Vec<u8>)>, Error> {
    let mut head = [0; 5];
    if from.read_exact(&mut head).is_err() {
        return Ok(None); // also between two bytes of it: the other end is gone
    }
    let [kind, length @ ..] = head;
    let bytes = u32::from_le_bytes(length) as usize;
    let known = FrameKind::of(kind).filter(|_| bytes <= bytes_max);
    let known = known.ok_or(Error::Frame { kind, bytes })?;
    let mut payload = vec![0; bytes];
    match from.read_exact(&mut payload) {
        Ok(()) => Ok(Some((known, payload))),
        Err(_) => Ok(None),
    }
}

/// For fuzzing: reads frames to the end or to the first that lies, and each as a request.
pub(crate) fn read_all(mut bytes: &[u8]) {
    while let Ok(Some((kind, payload))) = read_frame(&mut bytes, FRAME_BYTES_MAX) {
        assert!(payload.len() <= FRAME_BYTES_MAX && FrameKind::of(kind as u8) == Some(kind));
        let _: Result<Request, _> = serde_json::from_slice(&payload);
    }
}

/// Sends `request` over `line`, the connection to the other machine. Forwards `input` there, and
/// `output` and `errors` from there, until the program ends or the socket closes. Returns how the
/// program ended.
///
/// Blocks. The thread that reads `input` stays until that ends too.
///
/// # Errors
/// [`Error::Refused`] with the other machine's reason, [`Error::Lost`], [`Error::Frame`], or a
/// closed output.
pub fn near(
    line: UnixStream,
    request: &Request,
    input: impl Read + Send + 'static,
    output: impl Write,
    errors: impl Write,
) -> Result<Ending, Error> {
    let mut to = line.try_clone()?;
    let text = serde_json::to_vec(request).expect("a request is JSON");
    write_frame(&mut to, FrameKind::Request, &text)?;
    thread::spawn(move || pump(input, &Mutex::new(to), FrameKind::Input));
    let ended = forward_answers(&line, output, errors);
    // The thread of the input has a handle too, and may wait for more.
    let _ = line.shutdown(Shutdown::Both);
    ended
}

/// Writes what the other machine sends, until the last frame.
fn forward_answers(
    mut from: &UnixStream,
    mut output: impl Write,
    mut errors: impl Write,
) -> Result<Ending, Error> {
    loop {
        match read_frame(&mut from, FRAME_BYTES_MAX)? {
            Some((FrameKind::Output, bytes)) => {
                output.write_all(&bytes)?;
                output.flush()?;
            }
            Some((FrameKind::Errors, bytes)) => errors.write_all(&bytes)?,
            Some((FrameKind::Ended, text)) => {
                return serde_json::from_slice(&text).map_err(|_| Error::Lost);
            }
            Some((FrameKind::Refused, text)) => {
                return Err(Error::Refused(String::from_utf8_lossy(&text).into_owned()));
            }
            Some((kind, bytes)) => {
                return Err(Error::Frame {
                    kind: kind as u8,
                    bytes: bytes.len(),
                });
            }
            None => return Err(Error::Lost),
        }
    }
}

/// Copies `from` into frames to its end, and sends an empty frame then if it is input.
fn pump(mut from: impl Read, to: &Mutex<impl Write>, kind: FrameKind) {
    let mut buffer = vec![0; FRAME_BYTES_MAX];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if write_frame(&mut *lock(to), kind, &buffer[..count]).is_err() {
            return;
        }
    }
    if kind == FrameKind::Input {
        // A connection that is gone needs no end of input.
        let _ = write_frame(&mut *lock(to), kind, &[]);
    }
}

/// Carries out the request that arrives on standard input, and forwards until it has ended. Called
/// by a process that a node starts for another machine. `memory_bytes_max` limits the private
/// memory of the program and of each of its children, on Linux.
///
/// # Errors
/// [`Error::NoRequest`], [`Error::Lost`], [`Error::Frame`], or the system's refusal of the limit.
pub fn far(memory_bytes_max: Option<u64>) -> Result<(), Error> {
    let mut from = io::stdin();
    let to = Arc::new(Mutex::new(io::stdout()));
    let Some((FrameKind::Request, text)) = read_frame(&mut from, REQUEST_BYTES_MAX)? else {
        return Err(Error::NoRequest);
    };
    let request = serde_json::from_slice(&text).map_err(|_| Error::NoRequest)?;
    if let Some(bytes) = memory_bytes_max {
        // Private writable memory: that of threads and libraries does not count, as in RLIMIT_AS.
        let limit = Rlimit {
            current: Some(bytes),
            maximum: Some(bytes),
        };
        setrlimit(Resource::Data, limit).map_err(io::Error::from)?;
    }
    let refused = |reason: String| {
        Ok(write_frame(
            &mut *lock(&to),
            FrameKind::Refused,
            reason.as_bytes(),
        )?)
    };
    match request {
        Request::Run(words) => match start(&words) {
            Ok(process) => run(process, from, &to, &has_hung_up),
            Err(reason) => refused(reason),
        },
        Request::Port(port) => {
            let address = (Ipv4Addr::LOCALHOST, port).into();
            match TcpStream::connect_timeout(&address, CONNECT_LIMIT) {
                Ok(stream) => {
                    let other = stream.try_clone()?;
                    let close = move || drop(other.shutdown(Shutdown::Write));
                    forward((stream.try_clone()?, stream), close, from, &to)
                }
                Err(error) => refused(format!("cannot connect to port {port} there: {error}")),
            }
        }
        Request::Socket(path) => match UnixStream::connect(&path) {
            Ok(stream) => {
                let other = stream.try_clone()?;
                let close = move || drop(other.shutdown(Shutdown::Write));
                forward((stream.try_clone()?, stream), close, from, &to)
            }
            Err(error) => refused(format!("cannot connect to {}: {error}", path.display())),
        },
    }
}

/// Starts a program with all streams piped.
fn start(words: &[String]) -> Result<Process, String> {
    let (program, arguments) = words.split_first().ok_or("no program is named")?;
    let mut command = Command::new(program);
    command.args(arguments);
    if let Ok(own) = std::env::current_exe() {
        command.env(PROGRAM_VARIABLE, own);
    }
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Process::start(&mut command).map_err(|error| format!("cannot start {program}: {error}"))
}

/// Whether nobody holds the other end of standard input, also while bytes of it are unread.
fn has_hung_up() -> bool {
    let stdin = io::stdin();
    let mut polled = [PollFd::new(&stdin, PollFlags::empty())];
    let now = Timespec::default();
    matches!(poll(&mut polled, Some(&now)), Ok(1..)) && polled[0].revents().contains(PollFlags::HUP)
}

/// Forwards between a program and the connection until either ends. `is_lost` says whether the
/// connection has ended, even if the program does not read its input.
fn run(
    mut process: Process,
    mut from: impl Read + Send + 'static,
    to: &Arc<Mutex<impl Write + Send + 'static>>,
    is_lost: &dyn Fn() -> bool,
) -> Result<(), Error> {
    let mut input = process.take_stdin();
    let spawn_pump = |stream: Box<dyn Read + Send>, kind| {
        let to = Arc::clone(to);
        thread::spawn(move || pump(stream, &to, kind))
    };
    let output = process.take_stdout().expect("standard output was piped");
    let errors = process.take_stderr().expect("standard error was piped");
    let pumps = [
        spawn_pump(Box::new(output), FrameKind::Output),
        spawn_pump(Box::new(errors), FrameKind::Errors),
    ];
    let reader = thread::spawn(move || {
        while let Ok(Some((FrameKind::Input, bytes))) = read_frame(&mut from, FRAME_BYTES_MAX) {
            if bytes.is_empty() {
                input = None;
            } else if let Some(open) = &mut input
                && open.write_all(&bytes).is_err()
            {
                input = None; // a program may close its input and continue
            }
        }
    });
    let mut lost = None;
    while !process.has_ended() {
        let is_lost = reader.is_finished() || is_lost();
        if is_lost && lost.get_or_insert_with(Instant::now).elapsed() >= GRACE {
            return Err(Error::Lost); // drops the process, which ends its group
        }
        thread::sleep(LOOK_EVERY);
    }
    wait_for(&pumps, LAST_WORDS);
    let ending = serde_json::to_vec(&process.reap()).expect("an ending is JSON");
    Ok(write_frame(&mut *lock(to), FrameKind::Ended, &ending)?)
}

/// Forwards between a socket and the connection until the socket's other end closes, or the
/// connection is lost. `close` ends the direction to the socket.
fn forward(
    (mut from_socket, mut to_socket): (impl Read, impl Write + Send + 'static),
    close: impl FnOnce() + Send + 'static,
    mut from: impl Read + Send + 'static,
    to: &Mutex<impl Write>,
) -> Result<(), Error> {
    thread::spawn(move || {
        while let Ok(Some((FrameKind::Input, bytes))) = read_frame(&mut from, FRAME_BYTES_MAX) {
            if bytes.is_empty() || to_socket.write_all(&bytes).is_err() {
                break;
            }
        }
        close();
    });
    pump(&mut from_socket, to, FrameKind::Output);
    let ending = serde_json::to_vec(&Ending::Code(0)).expect("an ending is JSON");
    Ok(write_frame(&mut *lock(to), FrameKind::Ended, &ending)?)
}

/// Waits until threads have ended, for at most `limit`.
fn wait_for(threads: &[JoinHandle<()>], limit: Duration) {
    let began = Instant::now();
    while !threads.iter().all(JoinHandle::is_finished) && began.elapsed() < limit {
        thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_lie_are_refused() {
        let mut frame = Vec::new();
        write_frame(&mut frame, FrameKind::Output, b"abc").unwrap();
        let read = |bytes: &[u8]| read_frame(&mut &bytes[..], 3);
        let whole = read(&frame).unwrap();
        assert_eq!(whole, Some((FrameKind::Output, b"abc".to_vec())));
        for cut in 0..frame.len() {
            assert!(matches!(read(&frame[..cut]), Ok(None)), "{cut}");
        }
        for (kind, length) in [(0, 0), (7, 0), (255, 1), (3, 4), (2, u32::MAX)] {
            let mut lie = vec![kind];
            lie.extend(length.to_le_bytes());
            let error = read(&lie).unwrap_err();
            assert!(matches!(error, Error::Frame { .. }), "{kind} {length}");
        }
    }
}
