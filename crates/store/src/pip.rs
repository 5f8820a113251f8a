//! `pip download` of one wheel, as a child process.
//!
//! pip brings what this program does not know: the user's index, proxy and certificates. Nothing is
//! installed and nothing in the wheel is run (`--no-deps --only-binary :all:`). The child's only
//! changed surroundings are its folder for temporary files, so that nothing stays behind when it is
//! killed, and a process group of its own, so that Ctrl-C reaches it through us, once.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::catalogue::Wheel;
use crate::download::Context;
use crate::{Error, disk};

/// How often the child and the size of its file are looked at.
const POLL: Duration = Duration::from_millis(100);
/// How much of pip's last words is kept.
const LOG_BYTES: u64 = 4 << 10;
/// How many of its last lines are shown.
const LOG_LINES: usize = 4;

/// Downloads `wheel` into the empty folder `work` and returns the file's path.
pub(crate) fn download(
    wheel: &Wheel,
    work: &Path,
    ctx: &mut Context<'_>,
) -> Result<PathBuf, Error> {
    let (target, temp, log) = (work.join("wheel"), work.join("tmp"), work.join("log"));
    disk::create_dir(&target)?;
    disk::create_dir(&temp)?;
    let mut child = Running(start(wheel, &target, &temp, &log, ctx)?);
    ctx.progress
        .start(wheel.requirement, Some(wheel.bytes.0), 0);
    let status = watch(&mut child, wheel, [&target, &temp], ctx);
    ctx.progress.finish();
    let status = status?;
    if !status.success() {
        return Err(explain(wheel, status, &log, ctx));
    }
    the_wheel(wheel, &target)
}

fn start(
    wheel: &Wheel,
    target: &Path,
    temp: &Path,
    log: &Path,
    ctx: &Context<'_>,
) -> Result<Child, Error> {
    let fail = |error| Error::io("write", log, error);
    let out = File::create(log).map_err(fail)?;
    let err = out.try_clone().map_err(fail)?;
    let pip = &ctx.options.pip;
    let spawned = Command::new(&pip.program)
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
        .stderr(err)
        .process_group(0)
        .spawn();
    spawned.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::PythonMissing {
            program: program(ctx),
        },
        _ => Error::io("start", Path::new(&pip.program), error),
    })
}

fn program(ctx: &Context<'_>) -> String {
    ctx.options.pip.program.to_string_lossy().into_owned()
}

/// A child that does not outlive its guard.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        // The whole group: pip may have children of its own, and wrappers such as pyenv's are
        // shells. The group exists as long as its unreaped leader does.
        let group = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// Waits for the end, reporting the growth of the largest file.
fn watch(
    child: &mut Running,
    wheel: &Wheel,
    dirs: [&Path; 2],
    ctx: &mut Context<'_>,
) -> Result<ExitStatus, Error> {
    let limit = ctx.options.deadlines.pip_stall;
    let (mut seen, mut moved) = (0, Instant::now());
    loop {
        let ended = child.0.try_wait();
        let ended = ended.map_err(|error| Error::io("wait for", dirs[0], error))?;
        let size = dirs.iter().map(|dir| largest(dir, 3)).max().unwrap_or(0);
        if size > seen {
            // pip's temporary file may be a little larger than the wheel's record says.
            ctx.progress.advance(
                size.min(wheel.bytes.0)
                    .saturating_sub(seen.min(wheel.bytes.0)),
            );
            (seen, moved) = (size, Instant::now());
        }
        if let Some(status) = ended {
            return Ok(status);
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

fn explain(wheel: &Wheel, status: ExitStatus, log: &Path, ctx: &Context<'_>) -> Error {
    let text = tail(log).unwrap_or_default();
    if text.contains("No module named pip") {
        return Error::PipMissing {
            program: program(ctx),
        };
    }
    if text.contains("No space left on device") {
        let path = log.parent().unwrap_or(log).to_path_buf();
        let free = paceline_base::Bytes((ctx.options.free_space)(&path).unwrap_or(0));
        return Error::DiskFull {
            path,
            needed: wheel.bytes,
            free,
        };
    }
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
    Error::PipFailed {
        requirement: wheel.requirement.to_owned(),
        status: status
            .code()
            .map_or_else(|| status.to_string(), |code| code.to_string()),
        log: if last.is_empty() {
            "it said nothing".into()
        } else {
            last.join(" | ")
        },
    }
}

/// The last part of a log, safe to print.
fn tail(log: &Path) -> Option<String> {
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

fn the_wheel(wheel: &Wheel, dir: &Path) -> Result<PathBuf, Error> {
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
