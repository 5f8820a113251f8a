//! Python ranks as child processes.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_comm::Deadline;
use tempfile::TempDir;

/// Longer than any ring of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);

/// Serialises rings: MLX spins a thread for every socket.
static ONE_RING: Mutex<()> = Mutex::new(());

pub(super) fn one_ring() -> MutexGuard<'static, ()> {
    lock(&ONE_RING)
}

pub(super) fn patient() -> Deadline {
    Deadline::at(Instant::now() + PATIENCE)
}

/// The Python with MLX; prints why a test is skipped if there is none.
pub(super) fn python(test: &str) -> Option<PathBuf> {
    let found = std::env::var_os("PACELINE_MLX_PYTHON").map(PathBuf::from);
    if found.is_none() {
        eprintln!("SKIPPED {test}: no Python with mlx (cargo xtask mlx-ring makes one)");
    }
    found
}

pub(super) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/mlx_ring")
        .join(name)
}

/// A ring's addresses, and its hostfile in MLX's form.
pub(super) struct Hosts {
    pub(super) addrs: Vec<Vec<SocketAddr>>,
    /// Hold the ports until their ranks start.
    pub(super) listeners: Vec<Vec<TcpListener>>,
    pub(super) folder: TempDir,
}

impl Hosts {
    pub(super) fn new(size: usize, connections: usize) -> Self {
        let listen = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let listeners: Vec<Vec<TcpListener>> = (0..size)
            .map(|_| (0..connections).map(listen).collect())
            .collect();
        let addr = |listener: &TcpListener| listener.local_addr().unwrap();
        let addrs: Vec<Vec<_>> = listeners
            .iter()
            .map(|own| own.iter().map(addr).collect())
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let hosts = Self {
            addrs,
            listeners,
            folder,
        };
        let rank = |own: &Vec<SocketAddr>| {
            let own: Vec<String> = own.iter().map(|addr| format!("\"{addr}\"")).collect();
            format!("[{}]", own.join(", "))
        };
        let ranks: Vec<String> = hosts.addrs.iter().map(rank).collect();
        std::fs::write(hosts.file(), format!("[{}]", ranks.join(", "))).unwrap();
        hosts
    }

    pub(super) fn file(&self) -> PathBuf {
        self.folder.path().join("hosts.json")
    }

    /// Releases the ports of `rank`, for a rank that binds them itself.
    pub(super) fn release(&mut self, rank: usize) {
        self.listeners[rank].clear();
    }

    /// Starts a Python rank. Its output goes to a file, which is printed if it fails.
    pub(super) fn start(
        &mut self,
        python: &Path,
        rank: usize,
        script: &str,
        args: &[&str],
    ) -> Python {
        self.start_with(python, rank, script, args, &[])
    }

    /// [`Self::start`] with more environment.
    pub(super) fn start_with(
        &mut self,
        python: &Path,
        rank: usize,
        script: &str,
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Python {
        self.release(rank);
        let log = self.folder.path().join(format!("rank-{rank}.log"));
        let file = std::fs::File::create(&log).unwrap();
        let child = Command::new(python)
            .arg(self::script(script))
            .args(args)
            .env("MLX_RANK", rank.to_string())
            .env("MLX_HOSTFILE", self.file())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        Python {
            rank,
            child,
            log,
            hosts: None,
        }
    }
}

/// A Python rank; killed when dropped.
pub(super) struct Python {
    rank: usize,
    pub(super) child: Child,
    log: PathBuf,
    hosts: Option<Hosts>,
}

impl Python {
    /// Keeps the folder of its files until the process has ended.
    pub(super) fn keeping(mut self, hosts: Hosts) -> Self {
        self.hosts = Some(hosts);
        self
    }

    pub(super) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    pub(super) fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([name, &id]).status().unwrap();
        assert!(status.success());
    }

    /// The output of the process, after a successful exit.
    pub(super) fn finish(mut self) -> String {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let late = started.elapsed() > PATIENCE;
            assert!(!late, "rank {} does not end:\n{}", self.rank, self.log());
            thread::sleep(Duration::from_millis(10));
        };
        assert!(
            status.success(),
            "rank {}: {status}\n{}",
            self.rank,
            self.log()
        );
        self.log()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("-- rank {} said:\n{}", self.rank, self.log());
        }
    }
}
