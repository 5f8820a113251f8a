//! Bridge: a process that forwards the control channel of a worker on another machine.
//!
//! ```text
//! parent ── socket ── bridge (its child) ── pipes ── ssh ── worker's standard input and output
//! ```
//! The parent sees an ordinary child: [`Workers`](crate::workers::Workers) starts the bridge, reads
//! the worker's messages and heartbeats from it, and ends it by closing the channel. When the
//! parent or the connection is lost, the worker's standard input ends, and with it the worker.
//!
//! The worker first prints a greeting line. The bridge skips all output of a login shell before it,
//! and sends nothing to the worker until it has arrived: some shells read ahead.
//!
//! [`join`] does the same for a worker at the other end of a socket, such as a node's connection to
//! another machine.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paceline_process::{Ending, Process, skip_to};

use crate::Error;
use crate::control::take_stdin;

/// Longest wait for the worker's first line: 10 s for a connection, and a program on a cold disk.
const GREETING_LIMIT: Duration = Duration::from_secs(30);

/// Poll interval for the exit of the shell.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Time for forwarding the last bytes of a worker that exited.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Most bytes forwarded at a time.
const PIECE_BYTES: usize = 64 << 10;

/// Runs `script` in `shell`, a command that starts a shell on `host`. The script must become a
/// worker that prints the line `greeting` first. Forwards the messages between the worker and the
/// parent of this process. Blocks until the shell exits, which is when the worker or the parent
/// ends.
///
/// # Errors
/// [`Error::NoControl`] when a person runs the program; [`Error::Remote`] when the shell cannot be
/// started, or the greeting does not come in 30 s. Messages of `ssh` go to standard error.
pub fn run(shell: &mut Command, host: &str, script: &str, greeting: &str) -> Result<Ending, Error> {
    let control = take_stdin().map_err(|source| Error::NoControl { source })?;
    let broken = |source| Error::Remote {
        host: host.to_owned(),
        source,
    };
    shell
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    let mut process = Process::start(shell).map_err(broken)?;
    let mut input = process.take_stdin().expect("standard input was piped");
    let mut output = process.take_stdout().expect("standard output was piped");
    // A shell that does not accept it has exited, which is detected next.
    let _ = input.write_all(script.as_bytes());
    let (sender, started) = channel();
    let greeted = Arc::new(AtomicBool::new(false));
    let (from, to) = (control.try_clone().map_err(broken)?, control);
    let (greeting, there) = (greeting.to_owned(), Arc::clone(&greeted));
    let reader = thread::spawn(move || {
        if skip_to(&mut output, &greeting) {
            there.store(true, Ordering::Relaxed);
            pass_worker(output, &sender, to);
        }
    });
    thread::spawn(move || pass_parent(from, &started, input));
    watch(&mut process, &reader, &greeted).ok_or_else(|| broken(ErrorKind::TimedOut.into()))
}

/// As [`run`], for a worker on `host` that is at the other end of `line` and prints the line
/// `greeting` first. Blocks until the line or the parent ends; whether that was the parent.
///
/// # Errors
/// [`Error::NoControl`] when a person runs the program; [`Error::Remote`] when the line ends before
/// the greeting, or nothing comes for 30 s.
pub fn join(line: UnixStream, host: &str, greeting: &str) -> Result<bool, Error> {
    let mut parent = take_stdin().map_err(|source| Error::NoControl { source })?;
    let broken = |source| Error::Remote {
        host: host.to_owned(),
        source,
    };
    let mut from = parent.try_clone().map_err(broken)?;
    let mut to = line.try_clone().map_err(broken)?;
    let mut worker = line;
    let start = Instant::now();
    let limited = worker.set_read_timeout(Some(GREETING_LIMIT));
    limited.map_err(broken)?;
    if !skip_to(&mut worker, greeting) {
        let is_late = start.elapsed() >= GREETING_LIMIT;
        let kind = if is_late {
            ErrorKind::TimedOut
        } else {
            ErrorKind::UnexpectedEof
        };
        return Err(broken(kind.into()));
    }
    worker.set_read_timeout(None).map_err(broken)?;
    let parent_gone = Arc::new(AtomicBool::new(false));
    let gone = Arc::clone(&parent_gone);
    thread::spawn(move || {
        copy(&mut from, &mut to);
        gone.store(true, Ordering::Relaxed);
        // Both directions: without a parent the worker's output is useless.
        let _ = to.shutdown(Shutdown::Both);
    });
    copy(&mut worker, &mut parent);
    Ok(parent_gone.load(Ordering::Relaxed))
}

/// Waits for the exit of the shell and the end of the worker's output; `None` if no greeting came
/// in time.
fn watch(process: &mut Process, reader: &JoinHandle<()>, greeted: &AtomicBool) -> Option<Ending> {
    let start = Instant::now();
    while !process.has_ended() {
        if !greeted.load(Ordering::Relaxed) && start.elapsed() >= GREETING_LIMIT {
            process.kill();
            return None;
        }
        thread::sleep(LOOK_EVERY);
    }
    let ended = Instant::now();
    while !reader.is_finished() && ended.elapsed() < LAST_WORDS {
        thread::sleep(LOOK_EVERY);
    }
    Some(process.reap())
}

/// Forwards the parent's messages after the greeting. Their end ends the worker.
fn pass_parent(mut from: UnixStream, started: &Receiver<()>, mut to: ChildStdin) {
    if started.recv().is_ok() {
        copy(&mut from, &mut to);
    }
}

/// Forwards the worker's messages after its greeting.
fn pass_worker(mut from: ChildStdout, started: &Sender<()>, mut to: UnixStream) {
    if started.send(()).is_ok() {
        copy(&mut from, &mut to);
    }
}

/// Forwards bytes as they arrive, until an end or an error of either side.
fn copy(from: &mut impl Read, to: &mut impl Write) {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match from.read(&mut piece) {
            Ok(count @ 1..) => {
                if to
                    .write_all(&piece[..count])
                    .and_then(|()| to.flush())
                    .is_err()
                {
                    return;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

/// A socket whose other end is forwarded to a program's standard input and output.
pub(crate) fn over(input: File, output: File) -> std::io::Result<UnixStream> {
    let (own, theirs) = UnixStream::pair()?;
    let (mut input, mut output) = (input, output);
    let (mut from, mut to) = (theirs.try_clone()?, theirs);
    let start = |name: &str, run: Box<dyn FnOnce() + Send>| {
        let builder = thread::Builder::new().name(name.to_owned());
        builder.spawn(run)
    };
    start(
        "bridge in",
        Box::new(move || {
            copy(&mut input, &mut to);
            // Both directions: without input there is no parent.
            let _ = to.shutdown(Shutdown::Both);
        }),
    )?;
    start("bridge out", Box::new(move || copy(&mut from, &mut output)))?;
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_both_ways_until_the_input_ends() {
        let (input, mut parent) = UnixStream::pair().unwrap();
        let (mut reader, output) = UnixStream::pair().unwrap();
        let file = |socket: UnixStream| File::from(std::os::fd::OwnedFd::from(socket));
        let mut own = over(file(input), file(output)).unwrap();
        parent.write_all(b"ping").unwrap();
        let mut got = [0; 4];
        own.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"ping");
        own.write_all(b"pong").unwrap();
        reader.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"pong");
        drop(parent);
        assert_eq!(own.read(&mut got).unwrap(), 0);
    }
}
