//! A program with its standard input and output, wherever it runs.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Ending, Process};

/// Most bytes of a line between a program and its owner: far longer than any report of ours.
pub const MESSAGE_BYTES_MAX: u64 = 1 << 20;

/// Most bytes that a login shell may print before a program's greeting.
const NOISE_BYTES_MAX: usize = 64 << 10;

/// Poll interval for the end of a program.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Time between the end of the input and the kill when a program is dropped. `ssh` forwards its
/// last input within one round trip.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A program and its standard streams. Dropping it closes its input. A process of this machine is
/// killed if it does not end within half a second; a program elsewhere ends by itself.
///
/// It runs here ([`start`](Self::start)), behind a shell such as that of `ssh`
/// ([`by_shell`](Self::by_shell)), or at the other end of a socket
/// ([`connected`](Self::connected)).
pub struct Program {
    input: Option<Box<dyn Write + Send>>,
    output: BufReader<Box<dyn Read + Send>>,
    process: Option<Process>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program")
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

impl Program {
    /// Starts `command` on this machine, with pipes as input and output.
    ///
    /// # Errors
    /// The system's error, such as a missing program.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::start(command)?;
        let input = process.take_stdin().expect("standard input was piped");
        let output = process.take_stdout().expect("standard output was piped");
        Ok(Self {
            input: Some(Box::new(input)),
            output: buffered(output),
            process: Some(process),
        })
    }

    /// Starts `shell`, which becomes a program by running `script`. The program prints the line
    /// `greeting` first; all output before it, such as a login shell's, is skipped at the first
    /// read.
    ///
    /// # Errors
    /// The system's error. A shell that does not greet ends the output at the first read.
    pub fn by_shell(shell: &mut Command, script: &str, greeting: &str) -> io::Result<Self> {
        let mut program = Self::start(shell)?;
        program.send(script.as_bytes())?;
        let output = program.take_output();
        program.output = buffered(Greeted {
            output,
            greeting: Some(greeting.to_owned()),
        });
        Ok(program)
    }

    /// The program at the other end of a socket.
    ///
    /// # Errors
    /// The system has no further handle of the socket.
    pub fn connected(stream: UnixStream) -> io::Result<Self> {
        Ok(Self {
            input: Some(Box::new(stream.try_clone()?)),
            output: buffered(stream),
            process: None,
        })
    }

    /// The program that started this one, over this process's own standard input and output.
    pub fn parent() -> Self {
        Self {
            input: Some(Box::new(io::stdout())),
            output: buffered(io::stdin()),
            process: None,
        }
    }

    /// Reads a line of the program's standard output, of at most [`MESSAGE_BYTES_MAX`] bytes;
    /// empty at its end.
    ///
    /// # Errors
    /// The connection's error, or text that is no UTF-8.
    pub fn receive_line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        (&mut self.output)
            .take(MESSAGE_BYTES_MAX)
            .read_line(&mut line)?;
        Ok(line)
    }

    /// Takes the output, to read it elsewhere.
    pub fn take_output(&mut self) -> Box<dyn Read + Send> {
        Box::new(std::mem::replace(&mut self.output, buffered(io::empty())))
    }

    /// Takes the input, to write it elsewhere; later sends fail. `None` if it was closed or taken.
    pub fn take_input(&mut self) -> Option<Box<dyn Write + Send>> {
        self.input.take()
    }

    /// Writes a line to the program's standard input and flushes.
    pub fn send_line(&mut self, line: &str) -> io::Result<()> {
        self.send(format!("{line}\n").as_bytes())
    }

    /// Writes `bytes` to the program's standard input and flushes.
    ///
    /// # Errors
    /// The program's or the connection's end; also after [`close_input`](Self::close_input).
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let input = self.input.as_mut();
        let input = input.ok_or(io::ErrorKind::BrokenPipe)?;
        input.write_all(bytes)?;
        input.flush()
    }

    /// Closes the program's standard input.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Closes the input and waits for the end of a process of this machine, which is killed after
    /// `limit`. `None` for a program elsewhere.
    pub fn end_within(&mut self, limit: Duration) -> Option<Ending> {
        self.close_input();
        let process = self.process.as_mut()?;
        let began = Instant::now();
        while !process.has_ended() {
            if began.elapsed() >= limit {
                process.kill();
                break;
            }
            thread::sleep(LOOK_EVERY);
        }
        Some(process.reap())
    }

    /// Waits for the end of a process of this machine; `None` for a program elsewhere.
    pub fn wait(&mut self) -> Option<Ending> {
        self.process.as_mut().map(Process::reap)
    }
}

fn buffered(output: impl Read + Send + 'static) -> BufReader<Box<dyn Read + Send>> {
    BufReader::new(Box::new(output))
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end_within(LAST_WORDS);
    }
}

/// Output behind a greeting.
struct Greeted {
    output: Box<dyn Read + Send>,
    greeting: Option<String>,
}

impl Read for Greeted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if let Some(greeting) = self.greeting.take()
            && !skip_to(&mut self.output, &greeting)
        {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.output.read(bytes)
    }
}

/// Reads up to and including a line; returns whether it came within the first 64 KiB. Reads byte by
/// byte, since the following bytes belong to another reader.
pub fn skip_to(from: &mut impl Read, greeting: &str) -> bool {
    let mut line = Vec::new();
    let mut byte = [0];
    for _ in 0..NOISE_BYTES_MAX {
        if !matches!(from.read(&mut byte), Ok(1)) {
            return false;
        }
        match byte[0] {
            b'\n' if line == greeting.as_bytes() => return true,
            b'\n' => line.clear(),
            other => line.push(other),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(program: &mut Program) -> String {
        let mut text = String::new();
        program.take_output().read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_program_answers_here_behind_a_shell_and_at_a_socket() {
        let mut here = Program::start(&mut Command::new("cat")).unwrap();
        here.send(b"one").unwrap();
        here.close_input();
        assert_eq!(text(&mut here), "one");
        assert_eq!(here.wait(), Some(Ending::Code(0)));

        let script = "echo motd; echo hello; echo ready; exec cat\n";
        let mut shell = Program::by_shell(&mut Command::new("/bin/sh"), script, "hello").unwrap();
        // Some shells read ahead, so input follows the greeting.
        assert_eq!(shell.receive_line().unwrap(), "ready\n");
        shell.send_line("two").unwrap();
        shell.close_input();
        assert_eq!(text(&mut shell), "two\n");

        let (own, mut other) = UnixStream::pair().unwrap();
        let mut far = Program::connected(own).unwrap();
        other.write_all(b"three").unwrap();
        drop(other);
        assert_eq!(text(&mut far), "three");
        assert_eq!(far.wait(), None);
    }

    #[test]
    fn a_shell_without_a_greeting_and_a_program_that_stays_are_ended() {
        let mut silent =
            Program::by_shell(&mut Command::new("/bin/sh"), "echo no\n exit 0\n", "yes").unwrap();
        silent.close_input();
        assert!(silent.receive_line().is_err());
        let mut stays = Program::start(Command::new("sleep").arg("600")).unwrap();
        let ending = stays.end_within(Duration::ZERO);
        assert_eq!(ending, Some(Ending::Signal(9)));
    }

    #[test]
    fn what_a_login_shell_prints_is_skipped() {
        let mut text = &b"Welcome!\nworker 2\n worker\nworker\n\n{}\n"[..];
        assert!(skip_to(&mut text, "worker"));
        assert_eq!(text, b"\n{}\n");
        assert!(!skip_to(&mut &b"worker"[..], "worker"));
        let noise = vec![b'x'; 2 * NOISE_BYTES_MAX];
        let mut noise = noise.as_slice();
        assert!(!skip_to(&mut noise, "worker"));
        assert_eq!(noise.len(), NOISE_BYTES_MAX);
    }
}
