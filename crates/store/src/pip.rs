//! `pip download` of one wheel, as a child process.
//!
//! pip adds the user's index, proxy and certificates. Nothing is installed and no code of the wheel
//! runs (`--no-deps --only-binary :all:`). The child process has:
//! - an empty working folder;
//! - its own folder for temporary files, so that nothing stays when it is killed;
//! - its own process group, so that Ctrl-C reaches it only through us.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline_base::Bytes;
use paceline_process::{Ending, Process};

use crate::child::{code, confine, last_words, tail};
use crate::download::PullContext;
use crate::{Error, disk};

/// Poll interval of the child and its file's size.
const POLL: Duration = Duration::from_millis(100);

/// pip's word once an index has answered.
const ANSWERED: &str = "Collecting ";
/// Words of urllib3 in pip's output, each of a connection that was not made.
const UNREACHED: [&str; 4] = [
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ProxyError",
];

/// A wheel to download with pip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WheelRequest<'a> {
    /// `NAME==VERSION`.
    pub(crate) requirement: &'a str,
    /// Size of the wheel, if known.
    pub(crate) bytes: Option<Bytes>,
}

/// Downloads `wheel` into the empty folder `work`; returns the file's path.
pub(crate) fn download(
    wheel: WheelRequest<'_>,
    work: &Path,
    ctx: &mut PullContext<'_>,
) -> Result<PathBuf, Error> {
    let (target, temp, log) = (work.join("wheel"), work.join("tmp"), work.join("log"));
    disk::create_dir(&target)?;
    disk::create_dir(&temp)?;
    let since = Instant::now();
    let mut child = start(wheel, &target, &temp, &log, ctx)?;
    ctx.progress
        .start(wheel.requirement, wheel.bytes.map(|bytes| bytes.0), 0);
    let status = watch(&mut child, wheel, ([&target, &temp], &log), ctx);
    ctx.progress.finish();
    let status = status?;
    if !status.is_success() {
        return Err(explain((wheel, since), status, &log, ctx));
    }
    the_wheel(wheel, &target)
}

fn start(
    wheel: WheelRequest<'_>,
    target: &Path,
    temp: &Path,
    log: &Path,
    ctx: &PullContext<'_>,
) -> Result<Process, Error> {
    let fail = |error| Error::io("write", log, error);
    let out = File::create(log).map_err(fail)?;
    let err = out.try_clone().map_err(fail)?;
    let pip = &ctx.options.pip;
    let mut command = Command::new(&pip.program);
    command
        .args(&pip.args)
        .args([
            "download",
            "--disable-pip-version-check",
            "--no-input",
            "--progress-bar",
            "off",
        ])
        .args(["--no-deps", "--only-binary", ":all:", "-d"])
        .arg(target)
        .arg(wheel.requirement)
        .env("TMPDIR", temp)
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err);
    confine(&mut command, temp);
    Process::start(&mut command).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::PythonMissing {
            program: program(ctx),
        },
        _ => Error::io("start", Path::new(&pip.program), error),
    })
}

fn program(ctx: &PullContext<'_>) -> String {
    ctx.options.pip.program.to_string_lossy().into_owned()
}

/// Waits for the child, and reports the largest file's growth. Ends early where pip asks an index
/// and gets no answer: pip itself retries for over a minute.
fn watch(
    child: &mut Process,
    wheel: WheelRequest<'_>,
    (dirs, log): ([&Path; 2], &Path),
    ctx: &mut PullContext<'_>,
) -> Result<Ending, Error> {
    let (limit, reach) = (
        ctx.options.deadlines.pip_stall,
        ctx.options.deadlines.index_reach,
    );
    let (mut seen, mut moved, mut asking) = (0, Instant::now(), None::<Instant>);
    loop {
        let has_ended = child.has_ended();
        let size = dirs.iter().map(|dir| largest(dir, 3)).max().unwrap_or(0);
        if size > seen {
            // pip's temporary file may be a little larger than the wheel's record says.
            let most = wheel.bytes.map_or(u64::MAX, |bytes| bytes.0);
            ctx.progress
                .advance(size.min(most).saturating_sub(seen.min(most)));
            (seen, moved) = (size, Instant::now());
        }
        if has_ended {
            return Ok(child.reap());
        }
        if asking.is_none() && has_entry(dirs[1]) {
            asking = Some(Instant::now());
        }
        let waited = asking.map_or(Duration::ZERO, |since| since.elapsed());
        let is_answered = || tail(log).is_some_and(|text| text.contains(ANSWERED));
        if seen == 0 && waited >= reach && !is_answered() {
            return Err(unreachable(wheel, waited));
        }
        if moved.elapsed() >= limit {
            let requirement = wheel.requirement.to_owned();
            return Err(Error::PipStalled {
                requirement,
                after: limit,
            });
        }
        ctx.cancel.check()?;
        std::thread::sleep(POLL);
    }
}

/// Whether pip has made a temporary folder, as it does before it asks an index.
fn has_entry(temp: &Path) -> bool {
    fs::read_dir(temp).is_ok_and(|mut entries| entries.next().is_some())
}

/// Size of the largest file below `dir`, at most `depth` folders down.
fn largest(dir: &Path, depth: u32) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() && depth > 0 => largest(&entry.path(), depth - 1),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.map(size).max().unwrap_or(0)
}

fn unreachable(wheel: WheelRequest<'_>, after: Duration) -> Error {
    let requirement = wheel.requirement.to_owned();
    Error::PipUnreachable { requirement, after }
}

fn explain(
    (wheel, since): (WheelRequest<'_>, Instant),
    status: Ending,
    log: &Path,
    ctx: &PullContext<'_>,
) -> Error {
    let text = tail(log).unwrap_or_default();
    if text.contains("No module named pip") {
        return Error::PipMissing {
            program: program(ctx),
        };
    }
    if text.contains("No space left on device") {
        let path = log.parent().unwrap_or(log).to_path_buf();
        let free = Bytes((ctx.options.free_space)(&path).unwrap_or(0));
        return Error::DiskFull {
            path,
            needed: wheel.bytes.unwrap_or(Bytes(0)),
            free,
        };
    }
    if UNREACHED.iter().any(|word| text.contains(word)) {
        return unreachable(wheel, since.elapsed());
    }
    Error::PipFailed {
        requirement: wheel.requirement.to_owned(),
        status: code(status),
        log: last_words(&text),
    }
}

fn the_wheel(wheel: WheelRequest<'_>, dir: &Path) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(dir).map_err(|error| Error::io("list", dir, error))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut wheels: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "whl"))
        .collect();
    match (wheels.pop(), wheels.len()) {
        (Some(only), 0) => Ok(only),
        (last, others) => Err(Error::WheelCount {
            requirement: wheel.requirement.to_owned(),
            found: others + usize::from(last.is_some()),
        }),
    }
}
