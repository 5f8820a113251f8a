//! Linux network namespaces, one for each node and all on one switch. So a node can be
//! disconnected, links can be slow, and each node has its own disk. Needs root and the programs
//! `ip`, `unshare`, `mount` and `python3`, which runs the switch ([`SWITCH`]).

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use paceline_process::Process;

/// Namespaces of a node besides its network: its own processes and mounts. So it shares no memory
/// with other nodes, as on another machine.
const UNSHARE: [&str; 6] = [
    "unshare",
    "--pid",
    "--mount",
    "--fork",
    "--kill-child",
    "--mount-proc",
];

/// Words before a folder that is hidden, and a command.
const HIDE: [&str; 3] = [
    "sh",
    "-c",
    "mount -t tmpfs -o size=4k tmpfs \"$0\" && exec \"$@\"",
];

/// Folders of the programs that make namespaces: not all users have them in their PATH.
pub(crate) const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// The network between the namespaces, a program in Python. Scripts of measurements use it too.
const SWITCH: &str = include_str!("../../../scripts/bars/delay_net.py");

/// Time limit for the switch to start: an interpreter, 30 ms on an idle machine.
const SWITCH_LIMIT: Duration = Duration::from_secs(20);

/// The namespaces of a cluster; they and their disks are removed on drop.
#[derive(Debug)]
pub(crate) struct Spaces {
    /// Names by node.
    names: Vec<String>,
    disks: Vec<PathBuf>,
    /// Ends when its input is closed.
    switch: Option<(Process, ChildStdin)>,
}

/// A link from one node to another, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) delay_ms: u32,
    pub(crate) loss_percent: u32,
    /// 0 for no limit.
    pub(crate) rate_kbit_s: u32,
}

impl Link {
    /// As fast as this machine.
    pub(crate) const GOOD: Self = Self {
        delay_ms: 0,
        loss_percent: 0,
        rate_kbit_s: 0,
    };

    /// Nothing arrives.
    pub(crate) const CUT: Self = Self {
        loss_percent: 100,
        ..Self::GOOD
    };
}

impl Spaces {
    pub(crate) fn new(count: usize) -> Result<Self> {
        let own = std::process::id();
        let names = (0..count).map(|number| format!("plc{own}n{number}"));
        let mut spaces = Self {
            names: names.collect(),
            disks: Vec::new(),
            switch: None,
        };
        spaces.make().context("no network namespaces")?;
        Ok(spaces)
    }

    fn make(&mut self) -> Result<()> {
        for host in &self.names {
            ip(&["netns", "add", host])?;
            ip(&["-n", host, "link", "set", "lo", "up"])?;
        }
        self.start_switch()?;
        for (number, host) in self.names.iter().enumerate() {
            let address = format!("{}/24", address(number));
            ip(&["-n", host, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", host, "link", "set", "eth0", "mtu", "9000", "up"])?;
        }
        Ok(())
    }

    /// Starts the switch, which makes `eth0` of all nodes.
    fn start_switch(&mut self) -> Result<()> {
        let mut command = Command::new("python3");
        command.args(["-c", SWITCH, "0"]).args(&self.names);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let started = Process::start(command.stderr(Stdio::piped()));
        let mut switch = started.context("cannot run python3")?;
        let (last, begun) = (&self.names[self.names.len() - 1], Instant::now());
        while ip(&["-n", last, "link", "show", "eth0"]).is_err() {
            if switch.has_ended() {
                let mut said = String::new();
                if let Some(mut stderr) = switch.take_stderr() {
                    let _ = stderr.read_to_string(&mut said);
                }
                bail!("the switch {}: {}", switch.reap(), said.trim());
            }
            ensure!(begun.elapsed() < SWITCH_LIMIT, "the switch does not start");
            thread::sleep(Duration::from_millis(10));
        }
        let input = switch.take_stdin().context("the switch has no input")?;
        self.switch = Some((switch, input));
        Ok(())
    }

    /// The words before a command that run it in a node's namespaces. All nodes but the first see
    /// an empty folder at `hidden`.
    pub(crate) fn around(&self, number: usize, hidden: &Path) -> Vec<String> {
        let enter = ["ip", "netns", "exec", &self.names[number]];
        let all = enter.into_iter().chain(UNSHARE).map(str::to_owned);
        let hide = HIDE.map(str::to_owned).into_iter();
        let hide = hide.chain([hidden.display().to_string()]);
        all.chain(hide.filter(|_| number > 0)).collect()
    }

    /// Opens the file by which [`enter`] enters a node's network.
    pub(crate) fn open(&self, number: usize) -> Result<File> {
        let path = Path::new("/run/netns").join(&self.names[number]);
        File::open(&path).with_context(|| format!("cannot open {}", path.display()))
    }

    /// Pulls the cable of a node, or plugs it in.
    pub(crate) fn connect(&self, number: usize, connected: bool) -> Result<()> {
        let state = if connected { "on" } else { "off" };
        let host = &self.names[number];
        ip(&["-n", host, "link", "set", "dev", "eth0", "carrier", state])
    }

    /// Sets the link from one node to another.
    ///
    /// # Errors
    /// The switch has ended.
    pub(crate) fn set(&self, (from, to): (usize, usize), link: Link) -> Result<()> {
        let loss = f64::from(link.loss_percent) / 100.0;
        let (delay, rate) = (link.delay_ms, link.rate_kbit_s);
        let switch = self.switch.as_ref().context("there is no switch")?;
        let mut input = &switch.1;
        writeln!(input, "{from} {to} {delay} {loss} {rate}").context("the switch has ended")
    }

    /// Sets all links of a node, in both directions.
    ///
    /// # Errors
    /// The switch has ended.
    pub(crate) fn set_all(&self, number: usize, link: Link) -> Result<()> {
        let mut others = (0..self.names.len()).filter(|other| *other != number);
        others.try_for_each(|other| {
            self.set((number, other), link)?;
            self.set((other, number), link)
        })
    }

    /// Mounts a memory disk of `bytes` bytes on a folder. It is this user's alone, as a node wants
    /// its home.
    pub(crate) fn mount(&mut self, folder: &Path, bytes: u64) -> Result<()> {
        let options = format!("size={bytes},mode=700");
        let mut command = Command::new("mount");
        command
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(folder);
        run(&mut command)?;
        self.disks.push(folder.to_owned());
        Ok(())
    }
}

impl Drop for Spaces {
    fn drop(&mut self) {
        for disk in &self.disks {
            let _ = run(Command::new("umount").arg("-l").arg(disk));
        }
        self.switch = None;
        for name in &self.names {
            let _ = ip(&["netns", "del", name]); // the first that failed has no others behind it
        }
    }
}

pub(crate) fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 79, 0, number as u8 + 1) // 16 nodes at most
}

fn ip(args: &[&str]) -> Result<()> {
    run(Command::new("ip").args(args))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.env("PATH", PATH).output();
    let output = output.with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", said.trim());
    Ok(())
}

/// Makes the calling thread open its connections in a node's network from now on.
#[cfg(target_os = "linux")]
pub(crate) fn enter(space: &File) -> io::Result<()> {
    use std::os::fd::AsFd as _;

    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    Ok(move_into_link_name_space(
        space.as_fd(),
        Some(LinkNameSpaceType::Network),
    )?)
}

/// Other systems have no network namespaces.
#[cfg(not(target_os = "linux"))]
pub(crate) fn enter(_space: &File) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
