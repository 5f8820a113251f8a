//! Shells on other machines, by the system's `ssh`, and on this one.
//!
//! Every remote command of this crate is a script that a POSIX shell reads from its standard input.
//! So nothing needs quoting for the user's login shell, and arguments have no length limit. No
//! value appears in the other machine's process list.
//!
//! Machines of a cluster need no `ssh`: their nodes start the shell, where their owners allow it.
//!
//! `ssh` brings the user's configuration, keys and known hosts. It never prompts: a host that needs
//! a password is an error. Sessions share a connection if a folder for its socket is given. One
//! session leads, and the others join it, or connect by themselves when it has ended.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use paceline_process::{Ending, Process};

use crate::hostfile::is_here;

/// A shell that reads a script from standard input: bash for its `read -t`, if installed. It has no
/// inner quotes and no backslash, so every login shell accepts it.
const SHELL: &str = "if [ -x /bin/bash ]; then exec /bin/bash --norc; fi; exec /bin/sh";

/// Connection timeout: 10 s as with most tools; waking a sleeping host takes 3 to 5.
const CONNECT_S: u32 = 10;

/// Keepalive interval; the connection counts as lost after three intervals without a reply.
const ALIVE_S: u32 = 5;

/// Longest path of a socket: 103 bytes on macOS, less the 17 that `ssh` adds at first.
const SOCKET_BYTES_MAX: usize = 86;

/// Most output bytes of each stream: far above any machine's description of its ports.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Polling interval for the end of a process.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Starts shells on hosts, over `ssh`, by the nodes of a cluster, or here.
#[derive(Clone, Debug)]
pub struct SshClient {
    ssh: PathBuf,
    sockets: Option<PathBuf>,
    /// Ids of nodes by the names of their hosts.
    nodes: BTreeMap<String, String>,
}

/// A session's part in a shared connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// A connection of its own.
    Alone,
    /// Makes the shared connection of this number.
    Leads(usize),
    /// Joins the shared connection of this number.
    Joins(usize),
}

/// The output of a script, and how it ended.
#[derive(Debug)]
pub struct ScriptOutput {
    /// Standard output, at most 8 MiB of it.
    pub stdout: Vec<u8>,
    /// Standard error, likewise.
    pub stderr: Vec<u8>,
    /// How the shell or `ssh` ended.
    pub ending: Ending,
}

/// Why a script did not complete.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `ssh` or the shell cannot be started.
    #[error("cannot start {}: {source}", program.display())]
    Start {
        program: PathBuf,
        source: std::io::Error,
    },
    #[error("no answer within {limit:?}")]
    Late { limit: Duration },
}

impl SshClient {
    /// Uses the program `ssh`, a path or a name on the search path. `sockets` is a folder that only
    /// the user can enter. If its name is too long for a socket, connections are not shared.
    pub fn new(ssh: impl Into<PathBuf>, sockets: Option<&Path>) -> Self {
        let fits = |folder: &&Path| folder.as_os_str().len() + "/c4096".len() <= SOCKET_BYTES_MAX;
        Self {
            ssh: ssh.into(),
            sockets: sockets.filter(fits).map(Path::to_owned),
            nodes: BTreeMap::new(),
        }
    }

    /// Has the nodes of a cluster start the shells of their hosts: `nodes` are ids by host.
    /// `program` is paceline, whose command `programs` reaches them.
    pub fn by_nodes(program: PathBuf, nodes: BTreeMap<String, String>) -> Self {
        Self {
            ssh: program,
            sockets: None,
            nodes,
        }
    }

    /// The command that starts a shell on `host`, with no streams set up.
    pub fn shell(&self, host: &str, sharing: Sharing) -> Command {
        if is_here(host) {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", SHELL]);
            return command;
        }
        let mut command = Command::new(&self.ssh);
        if let Some(id) = self.nodes.get(host) {
            command.args(["programs", "--node", id, "--", "/bin/sh", "-c", SHELL]);
            return command;
        }
        command.arg("-T");
        for option in ["BatchMode=yes", "LogLevel=ERROR"] {
            command.args(["-o", option]);
        }
        command.args(["-o", &format!("ConnectTimeout={CONNECT_S}")]);
        command.args(["-o", &format!("ServerAliveInterval={ALIVE_S}")]);
        for option in self.sharing(sharing) {
            command.args(["-o", &option]);
        }
        command.args(["--", host, &format!("exec /bin/sh -c '{SHELL}'")]);
        command
    }

    fn sharing(&self, sharing: Sharing) -> Vec<String> {
        let (role, number) = match sharing {
            Sharing::Alone => ("no", None),
            Sharing::Leads(number) => ("yes", Some(number)),
            Sharing::Joins(number) => ("no", Some(number)),
        };
        match (number, &self.sockets) {
            (Some(number), Some(folder)) => {
                let folder = folder.display().to_string().replace('%', "%%");
                vec![
                    format!("ControlMaster={role}"),
                    format!("ControlPath={folder}/c{number}"),
                    "ControlPersist=no".to_owned(),
                ]
            }
            _ => vec!["ControlMaster=no".to_owned(), "ControlPath=none".to_owned()],
        }
    }

    /// Runs `script` on `host` to its end.
    ///
    /// # Errors
    /// [`Error::Start`]; [`Error::Late`] after `limit`: the script is then killed, a remote one by
    /// closing its connection.
    pub fn run_script(
        &self,
        host: &str,
        script: &str,
        limit: Duration,
    ) -> Result<ScriptOutput, Error> {
        let mut command = self.shell(host, Sharing::Alone);
        let (mut process, stdin) = start(&mut command)?;
        let stdout = gather(process.take_stdout());
        let stderr = gather(process.take_stderr());
        let script = script.to_owned();
        // A thread, since a shell that does not read must not delay the deadline.
        thread::spawn(move || write_all(stdin, &script));
        let start = Instant::now();
        while !process.has_ended() {
            if start.elapsed() >= limit {
                return Err(Error::Late { limit });
            }
            thread::sleep(LOOK_EVERY);
        }
        let ending = process.reap();
        // Streams still held open by other processes are abandoned.
        let last = Duration::from_secs(1);
        Ok(ScriptOutput {
            stdout: stdout.recv_timeout(last).unwrap_or_default(),
            stderr: stderr.recv_timeout(last).unwrap_or_default(),
            ending,
        })
    }
}

/// Starts `command` with all three streams piped.
pub(crate) fn start(command: &mut Command) -> Result<(Process, ChildStdin), Error> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = Process::start(command).map_err(|source| Error::Start {
        program: command.get_program().into(),
        source,
    })?;
    let stdin = process.take_stdin().expect("standard input was piped");
    Ok((process, stdin))
}

fn write_all(mut stdin: ChildStdin, script: &str) {
    // The exit of a shell is reported by its ending.
    let _ = stdin.write_all(script.as_bytes());
}

/// Reads a stream to its end in a thread.
fn gather(stream: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    let mut stream = stream.expect("the stream was piped");
    thread::spawn(move || {
        let mut kept = Vec::new();
        let mut buffer = [0; 8192];
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            let room = ANSWER_BYTES_MAX - kept.len();
            kept.extend_from_slice(&buffer[..count.min(room)]);
        }
        let _ = sender.send(kept);
    });
    receiver
}

/// `text` as one word of a POSIX shell.
pub fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        let args = command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned());
        args.collect()
    }

    #[test]
    fn sessions_share_a_connection() {
        let reach = SshClient::new("ssh", Some(Path::new("/tmp/50%x")));
        let leads = words(&reach.shell("studio", Sharing::Leads(3)));
        let joins = words(&reach.shell("studio", Sharing::Joins(3)));
        for (words, role) in [(&leads, "ControlMaster=yes"), (&joins, "ControlMaster=no")] {
            assert!(words.iter().any(|word| word == role), "{words:?}");
            let path = "ControlPath=/tmp/50%%x/c3".to_owned();
            assert!(words.contains(&path), "{words:?}");
            assert_eq!(words[words.len() - 3..][..2], ["--", "studio"]);
        }
        let alone = words(&reach.shell("studio", Sharing::Alone));
        assert!(alone.contains(&"ControlPath=none".to_owned()), "{alone:?}");
        let long = "/x".repeat(60);
        let unshared = SshClient::new("ssh", Some(Path::new(&long)));
        let words = words(&unshared.shell("studio", Sharing::Leads(0)));
        assert!(words.contains(&"ControlPath=none".to_owned()), "{words:?}");
    }

    #[test]
    fn scripts_run_here_without_ssh() {
        let reach = SshClient::new("/nonexistent/ssh", None);
        let limit = Duration::from_secs(20);
        let script = format!(
            "printf %s {}; echo oops >&2; exit 3",
            quote("it's $HOME\n\\n")
        );
        let answer = reach.run_script("127.0.0.1", &script, limit).unwrap();
        assert_eq!(answer.stdout, b"it's $HOME\n\\n");
        assert_eq!(answer.stderr, b"oops\n");
        assert_eq!(answer.ending, Ending::Code(3));
        let error = reach.run_script("elsewhere", "", limit).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot start /nonexistent/ssh: "),
            "{error}"
        );
    }

    #[test]
    fn a_script_that_takes_too_long_is_ended() {
        let start = Instant::now();
        let limit = Duration::from_millis(100);
        let error = SshClient::new("ssh", None)
            .run_script("localhost", "sleep 60; :", limit)
            .unwrap_err();
        assert!(matches!(error, Error::Late { .. }), "{error}");
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            start.elapsed()
        );
    }
}
