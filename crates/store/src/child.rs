//! External programs: start, watch, stop, and the last lines of output.
//!
//! Each program has its own process group, so that Ctrl-C reaches it only through us, and all its
//! children end with it. Each runs in a folder of ours: in the user's, Python would import a folder
//! `pip/` as pip, and cargo would read a `.cargo/config.toml`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::Error;
use crate::progress::Cancel;

/// Poll interval.
const POLL: Duration = Duration::from_millis(50);
/// Maximum bytes of output kept for errors.
const LOG_BYTES: u64 = 4 << 10;
/// Maximum last lines in an error.
const LOG_LINES: usize = 4;

/// A child that is killed when dropped.
#[derive(Debug)]
pub(crate) struct ToolProcess(Child);

impl ToolProcess {
    /// Starts `command` in a process group of its own.
    pub(crate) fn start(mut command: Command) -> std::io::Result<Self> {
        command.process_group(0).spawn().map(Self)
    }

    /// The exit status, if it has ended.
    pub(crate) fn try_wait(&mut self) -> std::io::Result<Option<ExitStatus>> {
        self.0.try_wait()
    }
}

impl Drop for ToolProcess {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        // Kills the whole group: the program may have children, and wrappers such as pyenv's are
        // shells. The group exists as long as its unreaped leader does.
        let group = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// Runs `command` in `folder`, which only we write to, and makes Python import only installed
/// modules, not from its working folder. This is Python's option `-P`, which versions before 3.11
/// lack and whose variable they ignore.
pub(crate) fn confine(command: &mut Command, folder: &Path) {
    command.current_dir(folder).env("PYTHONSAFEPATH", "1");
}

/// Runs `command` to its end, stdout into the file `out`, stderr into the file `log`.
///
/// # Errors
/// [`Error::ToolMissing`], [`Error::ToolFailed`] with its last lines, [`Error::ToolStalled`] after
/// `limit`, and what the cancel flag says.
pub(crate) fn run(
    mut command: Command,
    (out, log): (&Path, &Path),
    limit: Duration,
    cancel: &Cancel,
) -> Result<(), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let create = |path: &Path| File::create(path).map_err(|error| Error::io("write", path, error));
    command
        .stdin(Stdio::null())
        .stdout(create(out)?)
        .stderr(create(log)?);
    let mut child = ToolProcess::start(command).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::ToolMissing {
            program: program.clone(),
        },
        _ => Error::io("start", Path::new(&program), error),
    })?;
    let status = wait(&mut child, &program, limit, cancel)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::ToolFailed {
        program,
        status: code(status),
        log: last_words(&tail(log).unwrap_or_default()),
    })
}

fn wait(
    child: &mut ToolProcess,
    program: &str,
    limit: Duration,
    cancel: &Cancel,
) -> Result<ExitStatus, Error> {
    let start = Instant::now();
    loop {
        let ended = child.try_wait();
        let ended = ended.map_err(|error| Error::io("wait for", Path::new(program), error))?;
        if let Some(status) = ended {
            return Ok(status);
        }
        if start.elapsed() >= limit {
            return Err(Error::ToolStalled {
                program: program.to_owned(),
                after: limit,
            });
        }
        cancel.check()?;
        std::thread::sleep(POLL);
    }
}

/// An exit status as a number, or as the system's text.
pub(crate) fn code(status: ExitStatus) -> String {
    status
        .code()
        .map_or_else(|| status.to_string(), |code| code.to_string())
}

/// The last lines of an output, joined.
pub(crate) fn last_words(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
    if last.is_empty() {
        "it said nothing".into()
    } else {
        last.join(" | ")
    }
}

/// The last part of a log, safe to print.
pub(crate) fn tail(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES)))
        .ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes).ok()?;
    let printable = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    Some(
        String::from_utf8_lossy(&bytes)
            .chars()
            .map(printable)
            .collect(),
    )
}
