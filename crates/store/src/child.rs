//! External programs: start, watch, stop, and the last lines of output.
//!
//! Each program has its own process group, so that Ctrl-C reaches it only through us, and all its
//! children end with it. Each runs in a folder of ours: in the user's, Python would import a folder
//! `pip/` as pip, and cargo would read a `.cargo/config.toml`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline_process::{Ending, Process};

use crate::Error;
use crate::progress::Cancel;

const POLL: Duration = Duration::from_millis(50);
/// Maximum bytes of output kept for errors.
const LOG_BYTES: u64 = 4 << 10;
/// Maximum last lines in an error.
const LOG_LINES: usize = 4;

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
    let mut child = Process::start(&mut command).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::ToolMissing {
            program: program.clone(),
        },
        _ => Error::io("start", Path::new(&program), error),
    })?;
    let ending = wait(&mut child, &program, limit, cancel)?;
    if ending.is_success() {
        return Ok(());
    }
    Err(Error::ToolFailed {
        program,
        status: code(ending),
        log: last_words(&tail(log).unwrap_or_default()),
    })
}

fn wait(
    child: &mut Process,
    program: &str,
    limit: Duration,
    cancel: &Cancel,
) -> Result<Ending, Error> {
    let start = Instant::now();
    loop {
        if child.has_ended() {
            return Ok(child.reap());
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

/// An exit code as a number, or another end in words.
pub(crate) fn code(ending: Ending) -> String {
    match ending {
        Ending::Code(code) => code.to_string(),
        other => other.to_string(),
    }
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
