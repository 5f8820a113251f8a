//! `paceline launch` as a user calls it: what ranks are given, what comes back, and what is left
//! when something dies.
//!
//! Other machines are this one ([`common::hosts`]). With PACELINE_TEST_SSHD=1 a real server on a
//! free port is used besides ([`sshd`]).
//!
//! Processes are looked up in `/proc`, so the tests are for Linux.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod endings;
mod given;
mod mpi;
mod sshd;
mod streams;
mod usage;
mod wires;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command};

use crate::common::hosts::{LaunchOutput, SshHosts, finish};
use crate::common::until;

impl SshHosts {
    /// `paceline launch` with `args`, its streams piped.
    fn launch(&self, args: &[&str]) -> Command {
        self.paceline(&[&["launch"], args].concat())
    }

    fn run_launch(&self, args: &[&str]) -> LaunchOutput {
        finish(self.launch(args).spawn().unwrap())
    }

    /// Hosts `a` and `b` by ssh, in this order, `ranks` of them.
    fn hostfile(&self, ranks: usize) -> String {
        let hosts = ["a", "b"].iter().cycle().take(ranks).enumerate();
        let hosts: Vec<String> = hosts
            .map(|(rank, host)| format!(r#"{{"ssh": "{host}", "ips": ["10.0.0.{rank}"]}}"#))
            .collect();
        let path = self.path("hosts.json");
        fs::write(&path, format!("[{}]", hosts.join(","))).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Waits until no temporary file is left.
    fn assert_clean(&self) {
        let left = || -> Vec<_> {
            let entries = fs::read_dir(self.path("tmp")).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect()
        };
        until("temporary files are removed", || left().is_empty());
    }
}

/// Writes to a command's standard input, and closes it.
fn feed(child: &mut Child, bytes: &[u8]) {
    child.stdin.take().unwrap().write_all(bytes).unwrap();
}

/// Waits until none of the processes whose ids are in `files` lives.
fn assert_gone(files: &[PathBuf]) {
    for file in files {
        let id = fs::read_to_string(file).unwrap();
        let id = id.trim();
        until(&format!("process {id} of {} ends", file.display()), || {
            !lives(id)
        });
    }
}

/// Whether a process runs; one that only waits to be reaped does not.
fn lives(id: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .map(|(_, rest)| rest.starts_with('Z'));
    state == Some(false)
}
