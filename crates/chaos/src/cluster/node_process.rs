//! A node of the tested cluster: its processes, its folder, and faults of both.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{DirEntryExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context as _, Result, bail, ensure};
use paceline_cluster::nodes::agent::local;
use paceline_process::Process;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::super::memory::MemoryCgroup;
use super::super::spaces::Spaces;
use super::super::streams::ApiEndpoint;
use super::super::{ProgramPaths, spaces};
use super::{ASK_LIMIT, FLAP_LIMIT, MODEL, ROT_EVERY, STARVE_LIMIT, until};

pub(super) struct NodeProcess {
    pub(super) name: String,
    pub(super) home: PathBuf,
    /// Words before the node's command, which enter its namespaces.
    pub(super) around: Vec<String>,
    pub(super) api: ApiEndpoint,
    pub(super) control: u16,
    pub(super) process: Option<Process>,
    /// A fault hits it in this round.
    pub(super) is_hit: bool,
    pub(super) leaves: bool,
}

impl NodeProcess {
    pub(super) fn new(folder: &Path, number: usize, spaces: Option<&Spaces>) -> Result<Self> {
        let name = format!("n{number}");
        let home = folder.join(&name);
        fs::create_dir(&home)?;
        let space = spaces.map(|spaces| spaces.open(number)).transpose()?;
        Ok(Self {
            name,
            home,
            around: spaces.map_or_else(Vec::new, |spaces| {
                spaces.around(number, &folder.join(MODEL))
            }),
            api: ApiEndpoint {
                port: free_port()?,
                space: space.map(Arc::new),
            },
            control: free_port()?,
            process: None,
            is_hit: false,
            leaves: false,
        })
    }

    /// Waits for a leaving node to end.
    ///
    /// # Errors
    /// The node has no process, or its process does not end within `limit`.
    pub(super) fn end_left(&mut self, limit: Duration) -> Result<()> {
        if !std::mem::take(&mut self.leaves) {
            return Ok(());
        }
        let name = format!("{} leaves", self.name);
        let process = self.process.as_mut().context("it was not started")?;
        until(limit, &name, || Ok(process.has_ended()))?;
        self.process = None;
        Ok(())
    }

    /// Path of the file that fills its disk.
    pub(super) fn filler(&self) -> PathBuf {
        self.home.join("filler")
    }

    /// Writes until its disk is full.
    pub(super) fn fill(&self) -> Result<()> {
        let mut file = File::create(self.filler())?;
        let piece = vec![0; 1 << 20];
        while file.write_all(&piece).is_ok() {}
        // The last write may have been too long for the remaining space.
        while file.write_all(&piece[..512]).is_ok() {}
        Ok(())
    }

    /// Its copies of models' files, whole and partial, by inode: a copy may have both names.
    pub(super) fn copies(&self) -> BTreeMap<u64, PathBuf> {
        let entries = fs::read_dir(self.home.join("copies")).into_iter().flatten();
        let files = entries.flatten().map(|entry| (entry.ino(), entry.path()));
        let is_copy = |(_, file): &(u64, PathBuf)| {
            let ending = file.extension().unwrap_or_default();
            ending == "gguf" || ending == "shard"
        };
        files.filter(is_copy).collect()
    }

    /// Kills its workers, and changes its copies before others read them. A running worker would
    /// see the change at once, unlike a fault of the disk.
    pub(super) fn damage(&self, change: impl Fn(&File) -> io::Result<()>) -> Result<()> {
        let copies = self.copies();
        let workers = self.workers()?;
        signal(&workers, Signal::KILL)?;
        until(FLAP_LIMIT, "a worker ends", || {
            Ok(!workers
                .iter()
                .any(|pid| is_worker(pid.as_raw_nonzero().get())))
        })?;
        for copy in copies.values() {
            let file = File::options().read(true).write(true).open(copy);
            let changed = file.and_then(|file| change(&file));
            changed.with_context(|| format!("cannot damage {}", copy.display()))?;
        }
        Ok(())
    }

    pub(super) fn start(&mut self, program: &ProgramPaths, peer: Option<SocketAddr>) -> Result<()> {
        let log = File::options()
            .append(true)
            .create(true)
            .open(self.home.join("log"))?;
        let mut command = match self.around.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                // By its path: `own` would mean the wrapper program itself there.
                command.args(rest).arg(&program.file);
                command.env("PATH", spaces::PATH);
                command
            }
            None => Command::new(&program.own),
        };
        command
            .args(["up", "--no-beacons", "--name", &self.name])
            .args(["--port", &self.api.port.to_string()])
            .args(["--control-port", &self.control.to_string()])
            .env("PACELINE_HOME", &self.home)
            // A second Ctrl-C ends this program without destructors: nodes notice the end of their
            // input.
            .arg("--with-parent")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log);
        if let Some(peer) = peer {
            command.args(["--peer", &peer.to_string()]);
        }
        self.process = Some(Process::start(&mut command).context("cannot start a node")?);
        Ok(())
    }

    /// # Errors
    /// A node that ended, with the end of its log.
    pub(super) fn check(&mut self) -> Result<()> {
        let process = self.process.as_mut().context("it was not started")?;
        if !process.has_ended() {
            return Ok(());
        }
        let ending = process.reap();
        let log = fs::read_to_string(self.home.join("log")).unwrap_or_default();
        bail!("{} {ending}: {}", self.name, log.trim())
    }

    pub(super) fn request(&self, command: &str, arguments: Value) -> Result<Value, local::Error> {
        local::ask(&self.home, command, arguments, ASK_LIMIT, |_| {})
    }

    /// Its process; in namespaces the only child of the program that made them.
    pub(super) fn pid(&self) -> Result<Pid> {
        let process = self.process.as_ref().context("the node does not run")?;
        let started = Pid::from_raw(process.id().cast_signed());
        let started = started.context("a process without a number")?;
        if self.around.is_empty() {
            return Ok(started);
        }
        let child = children(started)?.first().copied();
        child.context("the node does not run in its namespaces")
    }

    pub(super) fn kill(&mut self) {
        self.process = None; // which kills it
    }

    /// Worker processes of the node.
    pub(super) fn workers(&self) -> Result<Vec<Pid>> {
        let mut found = children(self.pid()?)?;
        found.retain(|pid| is_worker(pid.as_raw_nonzero().get()));
        ensure!(!found.is_empty(), "{} has no worker", self.name);
        Ok(found)
    }
}

/// Child processes of a process.
pub(super) fn children(of: Pid) -> Result<Vec<Pid>> {
    let file = format!("/proc/{}/task", of.as_raw_nonzero());
    let mut found = Vec::new();
    for thread in fs::read_dir(&file).with_context(|| format!("cannot read {file}"))? {
        let children = thread?.path().join("children");
        let children = fs::read_to_string(children).unwrap_or_default(); // the thread ended
        let pids = children.split_whitespace();
        found.extend(pids.filter_map(|pid| Pid::from_raw(pid.parse().ok()?)));
    }
    Ok(found)
}

/// Flips a bit of every [`ROT_EVERY`] bytes of a file; the length and the time stay.
pub(super) fn rot(file: &File) -> io::Result<()> {
    let facts = file.metadata()?;
    for at in (0..facts.len()).step_by(ROT_EVERY as usize) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[byte[0] ^ 4], at)?;
    }
    file.set_modified(facts.modified()?)
}

/// Whether a child is a worker: neither ended nor the interpreter of a chat template.
pub(super) fn is_worker(pid: i32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    !line.is_empty() && !line.ends_with(b"\0template\0")
}

/// Denies processes further memory, and waits until the kernel has killed them.
///
/// # Errors
/// A failed system call; processes that survive, which are then killed.
pub(super) fn starve(pids: &[Pid]) -> Result<()> {
    let group = MemoryCgroup::new()?;
    group.take(pids).context("cannot bound a worker's memory")?;
    let what = "the kernel kills a worker without memory";
    let killed = until(STARVE_LIMIT, what, || Ok(group.is_empty()?));
    if killed.is_err() {
        let _ = signal(pids, Signal::KILL); // the group can be removed only without them
        until(STARVE_LIMIT, "a worker ends", || Ok(group.is_empty()?))?;
    }
    killed
}

pub(super) fn signal(pids: &[Pid], signal: Signal) -> Result<()> {
    for pid in pids {
        let sent = kill_process(*pid, signal).map_err(io::Error::from);
        sent.context("cannot send a signal")?;
    }
    Ok(())
}

/// A free port. Another program may take it before the node does, which then reports that.
pub(super) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
