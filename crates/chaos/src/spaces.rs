//! Linux network namespaces, one for each node and all on one bridge. So a node can be disconnected
//! and have its own disk. Needs root and the programs `ip`, `unshare` and `mount`.

use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

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

/// Folders of the programs that make namespaces: not all users have them in their PATH.
pub(crate) const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// The namespaces of a cluster; they and their disks are removed on drop.
#[derive(Debug)]
pub(crate) struct Spaces {
    /// Names by node; the last one has the bridge.
    names: Vec<String>,
    disks: Vec<PathBuf>,
}

impl Spaces {
    /// Makes namespaces for `count` nodes.
    ///
    /// # Errors
    /// A failed system call.
    pub(crate) fn new(count: usize) -> Result<Self> {
        let own = std::process::id();
        let names = (0..=count).map(|number| format!("plc{own}n{number}"));
        let spaces = Self {
            names: names.collect(),
            disks: Vec::new(),
        };
        spaces.make(count).context("no network namespaces")?;
        Ok(spaces)
    }

    fn make(&self, count: usize) -> Result<()> {
        let bridge = &self.names[count];
        ip(&["netns", "add", bridge])?;
        ip(&["-n", bridge, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", bridge, "link", "set", "br0", "up"])?;
        for (number, host) in self.names[..count].iter().enumerate() {
            let (port, address) = (port(number), format!("{}/24", address(number)));
            ip(&["netns", "add", host])?;
            ip(&["-n", host, "link", "set", "lo", "up"])?;
            let pair = ["type", "veth", "peer", "name", "eth0", "netns", host];
            ip(&[&["-n", bridge, "link", "add", &port][..], &pair].concat())?;
            ip(&["-n", bridge, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", host, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", host, "link", "set", "eth0", "up"])?;
        }
        Ok(())
    }

    /// The words before a command that run it in a node's namespaces.
    pub(crate) fn around(&self, number: usize) -> Vec<String> {
        let enter = ["ip", "netns", "exec", &self.names[number]];
        let all = enter.into_iter().chain(UNSHARE);
        all.map(str::to_owned).collect()
    }

    /// Opens the file by which [`enter`] enters a node's network.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn open(&self, number: usize) -> Result<File> {
        let path = Path::new("/run/netns").join(&self.names[number]);
        File::open(&path).with_context(|| format!("cannot open {}", path.display()))
    }

    /// Disconnects a node, or connects it again.
    ///
    /// # Errors
    /// A failed system call.
    pub(crate) fn connect(&self, number: usize, connected: bool) -> Result<()> {
        let bridge = &self.names[self.names.len() - 1];
        let state = if connected { "up" } else { "down" };
        ip(&["-n", bridge, "link", "set", &port(number), state])
    }

    /// Mounts a memory disk of `bytes` bytes on a folder. It is this user's alone, as a node wants
    /// its home.
    ///
    /// # Errors
    /// A failed system call.
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
        for name in &self.names {
            let _ = ip(&["netns", "del", name]); // the first that failed has no others behind it
        }
    }
}

/// The address of a node.
pub(crate) fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 79, 0, number as u8 + 1) // 16 nodes at most
}

/// The bridge's end of a node's virtual cable.
fn port(number: usize) -> String {
    format!("p{number}")
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
///
/// # Errors
/// A failed system call.
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
