//! A program under a deadline: its lines as they come, and how it ended.

use std::io::{self, BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use paceline_process::Process;

/// Interval of looking for the end of the program, its deadline, and the caller's signal.
const POLL: Duration = Duration::from_millis(20);

/// Wait for the last lines of a program that ended. A child of its own may keep the output open.
const LAST_LINES: Duration = Duration::from_secs(1);

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Exited(paceline_process::Ending),
    /// It was killed at the deadline.
    Late,
    /// It was killed because the caller has enough.
    Cancelled,
}

/// A program that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub ending: Ending,
    /// Its error message, else the last line of its standard error; may be empty.
    pub complaint: String,
}

impl Ended {
    /// Whether it ended by itself with code 0.
    pub fn succeeded(&self) -> bool {
        matches!(self.ending, Ending::Exited(status) if status.is_success())
    }

    /// The end in words, with the complaint.
    pub fn reason(&self) -> String {
        let ending = match self.ending {
            Ending::Exited(status) => status.to_string(),
            Ending::Late => "not over in time".to_owned(),
            Ending::Cancelled => "cancelled".to_owned(),
        };
        match self.complaint.as_str() {
            "" => ending,
            complaint => format!("{ending}: {complaint}"),
        }
    }
}

enum Line {
    Result(String),
    Complaint(String),
}

/// Runs `command` until it ends, `until` is past, or `is_cancelled`. `see` receives the lines of
/// its standard output. Its standard input stays open and empty, so that it can end with this
/// process.
pub fn run(
    command: &mut Command,
    until: Instant,
    is_cancelled: &dyn Fn() -> bool,
    see: &mut dyn FnMut(&str),
) -> io::Result<Ended> {
    let piped = command.stdin(Stdio::piped());
    let piped = piped.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Process::start(piped)?;
    let lines = lines(&mut process)?;
    let mut complaint = String::new();
    let mut take = |line| match line {
        Line::Result(line) => see(&line),
        // A hint of this program comes behind its error.
        Line::Complaint(line) if !complaint.starts_with("error: ") => complaint = line,
        Line::Complaint(_) => {}
    };
    let ending = loop {
        match lines.recv_timeout(POLL) {
            Ok(line) => take(line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL),
        }
        if process.has_ended() {
            while let Ok(line) = lines.recv_timeout(LAST_LINES) {
                take(line);
            }
            break Ending::Exited(process.reap());
        }
        if is_cancelled() {
            break Ending::Cancelled;
        }
        if Instant::now() >= until {
            break Ending::Late;
        }
    };
    Ok(Ended { ending, complaint })
}

/// The lines of both outputs, as they come.
fn lines(process: &mut Process) -> io::Result<Receiver<Line>> {
    let (sender, receiver) = channel();
    let stdout = process.take_stdout().expect("piped");
    let stderr = process.take_stderr().expect("piped");
    read(stdout, sender.clone(), Line::Result)?;
    read(stderr, sender, Line::Complaint)?;
    Ok(receiver)
}

fn read(
    output: impl Read + Send + 'static,
    sender: Sender<Line>,
    of: fn(String) -> Line,
) -> io::Result<()> {
    let pass_on = move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if !line.trim().is_empty() && sender.send(of(line)).is_err() {
                return; // nobody waits for it any more
            }
        }
    };
    let thread = thread::Builder::new().name("output".to_owned());
    thread.spawn(pass_on).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, until: Instant, is_cancelled: bool) -> (Ended, Vec<String>) {
        let mut lines = Vec::new();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let mut see = |line: &str| lines.push(line.to_owned());
        let ended = run(&mut command, until, &|| is_cancelled, &mut see).unwrap();
        (ended, lines)
    }

    fn far() -> Instant {
        Instant::now() + Duration::from_secs(600)
    }

    #[test]
    fn lines_codes_and_signals_arrive() {
        let (ended, lines) = shell("echo one; echo why >&2; echo two; exit 3", far(), false);
        assert_eq!(lines, ["one", "two"]);
        assert_eq!(ended.reason(), "exited with code 3: why");
        let (ended, _) = shell("kill -ABRT $$", far(), false);
        assert!(
            ended.reason().starts_with("was ended by SIGABRT"),
            "{ended:?}"
        );
        assert!(!ended.succeeded());
        assert!(shell("exit 0", far(), false).0.succeeded());
    }

    #[test]
    fn a_program_is_ended_at_its_deadline_and_when_the_caller_has_enough() {
        let (ended, _) = shell("exec sleep 600", Instant::now(), false);
        assert_eq!(ended.ending, Ending::Late);
        let (ended, _) = shell("exec sleep 600", far(), true);
        assert_eq!(ended.ending, Ending::Cancelled);
    }
}
