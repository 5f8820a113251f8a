//! A paceline that reaches other machines. They are this one: a stand-in for `ssh` on PATH
//! (`tests-data/topology/ssh`) runs commands in a fresh session and environment.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use paceline_base::testing::Stopwatch;

use super::collect;

/// A world of its own: temporary files, a folder to be in, and a stand-in for `ssh`. A further
/// folder holds one for each host, `a` and `b`.
pub(crate) struct SshHosts {
    dir: tempfile::TempDir,
}

impl SshHosts {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = Self { dir };
        for name in ["bin", "tmp", "here", "hosts/a", "hosts/b"] {
            fs::create_dir_all(world.path(name)).unwrap();
        }
        symlink(tests_data("ssh"), world.path("bin/ssh")).unwrap();
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Puts a script in the place of the stand-in.
    pub(crate) fn replace_ssh(&self, script: &str) {
        let path = self.path("bin/ssh");
        fs::remove_file(&path).unwrap();
        write_program(&path, script);
    }

    /// paceline in its folder, its streams piped and nothing on standard input.
    pub(crate) fn paceline(&self, args: &[&str]) -> Command {
        let bin = self.path("bin");
        let path = format!(
            "{}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            bin.display()
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        command
            .env_clear()
            .env("PATH", path)
            .env("HOME", self.path("here"))
            .env("TMPDIR", self.path("tmp"))
            .env("FAKE_SSH_HOSTS", self.path("hosts"))
            .env("FAKE_SSH_LOG", self.path("log"))
            .current_dir(self.path("here"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }
}

pub(crate) fn tests_data(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/topology");
    folder.join(name).canonicalize().unwrap()
}

pub(crate) fn write_program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct LaunchOutput {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
    /// The time that it took, less what the machine withheld.
    pub(crate) counted: Duration,
}

/// Waits for the end of a command.
pub(crate) fn finish(child: Child) -> LaunchOutput {
    let watch = Stopwatch::start();
    let start = Instant::now();
    let output = collect(child);
    let took = start.elapsed();
    LaunchOutput {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        took,
        counted: watch.without_withheld(took),
    }
}

impl LaunchOutput {
    /// Lines of standard output, sorted: ranks run side by side.
    pub(crate) fn lines(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }

    /// Fails unless it went well.
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }
}
