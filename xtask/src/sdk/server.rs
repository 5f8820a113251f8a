//! `paceline up` for the clients: two nodes, SmolLM2, a key, a free port.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{process, repo};

/// Reading 100 MB of weights twice and joining takes a second.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Time between the end of the shell's standard input and its own end. The server has 10 s to end
/// by itself; responses in flight have 5 s of them.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Runs its arguments until standard input ends, then ends them, at last by force. Its status is
/// theirs. The shell must not hold stderr, whose end says that the server is gone.
const UNTIL_STDIN_ENDS: &str = r#"
"$@" & server=$!
exec 2>/dev/null
cat >/dev/null
kill "$server"
(sleep 10; kill -9 "$server") & late=$!
wait "$server"
status=$?
kill "$late"
exit "$status"
"#;

/// A server that answers. Dropping it ends it.
#[derive(Debug)]
pub(super) struct TestServer {
    /// `http://127.0.0.1:PORT`.
    pub(super) url: String,
    /// The model's name in the API.
    pub(super) model: String,
    /// The one key that it takes; empty where it takes everyone.
    pub(super) key: String,
    /// The program and the model's file; not of the scripted one.
    pub(super) program: Option<(PathBuf, PathBuf)>,
    /// The shell around it, or itself.
    shell: Child,
}

impl TestServer {
    /// Starts `binary` with `model`, in a home of its own below `target`, named for `clients`.
    ///
    /// # Errors
    /// When it ends early or does not listen in time; the message has its last words.
    pub(super) fn start(clients: &str, binary: &Path, model: &Path) -> Result<TestServer> {
        let home = repo::root().join("target/xtask/sdk-home").join(clients);
        // Left from an earlier run, if at all.
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home).with_context(|| format!("create {}", home.display()))?;
        let key = make_key(binary, &home)?;
        let name = model.file_stem().context("the model's file has no name")?;
        let mut command = Command::new("sh");
        command.args(["-c", UNTIL_STDIN_ENDS, "sh"]).arg(binary);
        command.args([
            "up",
            "--no-beacons",
            "--nodes",
            "2",
            "--port",
            "0",
            "--model",
        ]);
        command.arg(model).env("PACELINE_HOME", &home);
        let shell = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("start a shell")?;
        let mut server = TestServer {
            url: String::new(),
            model: name.to_string_lossy().into_owned(),
            key,
            program: Some((binary.to_owned(), model.to_owned())),
            shell,
        };
        server.url = server.address(clients)?;
        Ok(server)
    }

    /// Starts the example `scripted` of `crates/serve`, which ends when its standard input does.
    ///
    /// # Errors
    /// When it ends early or does not listen in time; the message has its last words.
    pub(super) fn scripted(program: &Path) -> Result<TestServer> {
        let mut command = Command::new(program);
        let shell = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let mut server = TestServer {
            url: String::new(),
            model: "tiny".to_owned(),
            key: String::new(),
            program: None,
            shell,
        };
        server.url = server.address("scripted")?;
        Ok(server)
    }

    /// Waits for the line that says where it listens. A thread keeps reading, into the log.
    fn address(&mut self, clients: &str) -> Result<String> {
        let said = self.shell.stderr.take().context("stderr is a pipe")?;
        let path = process::log_path(&format!("sdk-server-{clients}"));
        let log = File::create(&path).with_context(|| format!("write {}", path.display()))?;
        let (found, address) = channel();
        std::thread::spawn(move || read(said, log, &found));
        match address.recv_timeout(START_LIMIT) {
            Ok(address) => Ok(address),
            Err(RecvTimeoutError::Timeout) => {
                bail!(
                    "the server does not listen after {} s",
                    START_LIMIT.as_secs()
                )
            }
            Err(RecvTimeoutError::Disconnected) => {
                let said = fs::read_to_string(&path).unwrap_or_default();
                bail!("the server ended: {}", said.trim())
            }
        }
    }

    /// Ends the server as a signal does; what is wrong with how it ended, if anything.
    pub(super) fn end(mut self) -> Option<String> {
        match self.close() {
            Ok(()) => None,
            Err(error) => Some(format!("{error:#}")),
        }
    }

    fn close(&mut self) -> Result<()> {
        drop(self.shell.stdin.take());
        let deadline = Instant::now() + END_LIMIT;
        loop {
            if let Some(status) = self.shell.try_wait()? {
                ensure!(status.success(), "the server ended with {status}");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        // After `end` there is nothing left to wait for, and elsewhere an error is on its way.
        let _ = self.close();
    }
}

/// Copies the server's output into `log` and sends the address once it is printed.
fn read(said: impl Read, mut log: File, found: &Sender<String>) {
    for line in BufReader::new(said).lines().map_while(Result::ok) {
        let _ = writeln!(log, "{line}");
        if let Some(address) = line.strip_prefix("listening on ") {
            let _ = found.send(address.to_owned());
        }
    }
}

/// Makes a key in a fresh home; the server requires one from then on.
fn make_key(binary: &Path, home: &Path) -> Result<String> {
    let mut command = Command::new(binary);
    command.args(["key", "api", "new", "sdk"]);
    let output = command.env("PACELINE_HOME", home).output();
    let output = output.with_context(|| format!("start {}", binary.display()))?;
    ensure!(
        output.status.success(),
        "no key: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let key = String::from_utf8(output.stdout).context("the key is not UTF-8")?;
    Ok(key.trim().to_owned())
}
