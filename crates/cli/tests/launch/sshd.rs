//! A real `ssh` and a real server on this machine. Wants OpenSSH's server and an account that may
//! log in, so it runs only with PACELINE_TEST_SSHD=1.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{LaunchOutput, SshHosts, assert_gone, finish, until};

const SERVER: &str = "/usr/sbin/sshd";

/// A server for this world, with a key of its own and no others.
struct SshServer {
    child: Child,
}

impl Drop for SshServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl SshServer {
    /// Starts the server, and the world's `ssh` connects to it for hosts `one` and `two`. `None`,
    /// with a printed reason, if it is not requested or not possible.
    fn start(world: &SshHosts, test: &str) -> Option<Self> {
        if std::env::var_os("PACELINE_TEST_SSHD").is_none() {
            eprintln!("SKIPPED {test}: PACELINE_TEST_SSHD is not set");
            return None;
        }
        if !Path::new(SERVER).exists() {
            eprintln!("SKIPPED {test}: there is no {SERVER}");
            return None;
        }
        let folder = world.path("sshd");
        fs::create_dir(&folder).unwrap();
        fs::create_dir_all("/run/sshd").ok();
        for name in ["host", "user"] {
            let mut keygen = Command::new("ssh-keygen");
            keygen
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(folder.join(name));
            assert!(keygen.status().unwrap().success());
        }
        fs::copy(folder.join("user.pub"), folder.join("authorized")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let folder = folder.to_str().unwrap();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n\
             AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n\
             PasswordAuthentication no\nPermitRootLogin yes\n"
        );
        fs::write(world.path("sshd/config"), config).unwrap();
        let mut server = Command::new(SERVER);
        server
            .args(["-D", "-e", "-f"])
            .arg(world.path("sshd/config"));
        server.stderr(fs::File::create(world.path("sshd/log")).unwrap());
        let child = server.spawn().unwrap();
        until("the server listens", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        let ssh = format!(
            "#!/bin/sh\nfor word; do printf '%s\\t' \"$word\"; done >>{log}\necho >>{log}\n\
             exec /usr/bin/ssh -F none -p {port} -i {folder}/user -o IdentitiesOnly=yes \
             -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known \
             -o Hostname=127.0.0.1 \"$@\"\n",
            log = world.path("log").display()
        );
        world.replace_ssh(&ssh);
        Some(Self { child })
    }
}

fn hostfile(world: &SshHosts) -> String {
    let path = world.path("real.json");
    let text = r#"[{"ssh": "one", "ips": ["127.0.0.1"]}, {"ssh": "two", "ips": ["127.0.0.1"]},
                   {"ssh": "one", "ips": ["127.0.0.1"]}]"#;
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn connections(world: &SshHosts) -> usize {
    let log = fs::read_to_string(world.path("sshd/log")).unwrap();
    log.lines()
        .filter(|line| line.starts_with("Accepted publickey"))
        .count()
}

#[test]
fn real_sessions_run_and_end() {
    let world = SshHosts::new();
    let Some(_server) = SshServer::start(&world, "launch over a real sshd") else {
        return;
    };
    let hostfile = hostfile(&world);
    let folder = format!("D={}", world.path("here").display());
    let run = |script: &str| -> LaunchOutput {
        let args = [
            "--hostfile",
            &hostfile,
            "--env",
            &folder,
            "--grace",
            "1",
            "sh",
            "-c",
            script,
        ];
        let mut command = world.launch(&args);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        super::feed(&mut child, b"input");
        finish(child)
    };
    let ended = run("printf \"$MLX_RANK \"; cat; exit 0").ok();
    assert_eq!(ended.lines(), ["[0] 0 input", "[1] 1 ", "[2] 2 "]);
    assert_eq!(ended.stderr, "");
    assert_eq!(connections(&world), 2, "one a host");
    let ids: Vec<PathBuf> = (0..3)
        .map(|r| world.path(&format!("here/id.{r}")))
        .collect();
    let sleep = "cd $D; echo $$ >id.$MLX_RANK; sleep 1000";
    let ended = run(&format!(
        "if [ $MLX_RANK = 2 ]; then while ! [ -s $D/id.0 ] || ! [ -s $D/id.1 ]; do sleep 0.02; \
         done; echo $$ >$D/id.2; exit 9; fi; trap '' TERM; {sleep}"
    ));
    assert_eq!(ended.code, Some(9), "{ended:?}");
    assert!(ended.counted < Duration::from_secs(15), "{ended:?}");
    assert_gone(&ids);
    ids.iter().for_each(|id| fs::remove_file(id).unwrap());
    let args = ["--hostfile", &hostfile, "--env", &folder, "sh", "-c", sleep];
    let child = world.launch(&args).spawn().unwrap();
    until("all ranks run", || {
        ids.iter()
            .all(|id| fs::read(id).is_ok_and(|id| !id.is_empty()))
    });
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    finish(child);
    assert_gone(&ids);
}
