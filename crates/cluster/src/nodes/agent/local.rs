//! The Unix socket by which programs of this home's user reach its node.
//!
//! ```text
//! client -> {"command":"nodes","arguments":{}}
//! node   <- {"progress":...}   any number
//! node   <- {"ok":...} or {"error":"..."}
//! ```
//! JSON, one object a line; one command a connection. The folder has mode 0700 and the socket 0600:
//! the file system controls access.
//!
//! Built in: `nodes`, `diagnostics`, `token`, `invite`, `join`, `leave`, `forget`, `cables`,
//! `trust`. The crate above adds its own by [`Agent::serve_local`].

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use paceline_base::{CallbackError, lock};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::ClusterKey;
use super::super::pairing::Code;
use super::accept::{ConnectionSlot, is_ready};
use super::files::NodeFolder;
use super::{Agent, CableTrust, Inner, SOCKET_PATH_MAX};

/// Most concurrent clients; further ones are closed.
const CLIENTS_MAX: usize = 64;

/// Longest line: the nodes of a large cluster.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// Time limit for a client to send its command, or to receive a line.
const CLIENT_LIMIT: Duration = Duration::from_secs(10);

/// Time after the start in which a node waits for an unknown command. The crates above register
/// theirs one after the other, which takes a second on a busy machine.
const STARTING: Duration = Duration::from_secs(5);

/// Receives a progress report; returns false once the client is gone.
pub type CommandProgress<'a> = dyn FnMut(Value) -> bool + 'a;

/// Handles a command, with its arguments and the receiver of progress reports.
pub trait Command:
    Fn(&Value, &mut CommandProgress<'_>) -> Result<Value, CallbackError> + Send + Sync + 'static
{
}

impl<F> Command for F where
    F: Fn(&Value, &mut CommandProgress<'_>) -> Result<Value, CallbackError> + Send + Sync + 'static
{
}

/// Commands of the crates above.
#[derive(Default)]
pub(super) struct Commands {
    known: Mutex<BTreeMap<String, Arc<dyn Command>>>,
    added: Condvar,
}

impl Commands {
    pub(super) fn add(&self, name: &str, command: Arc<dyn Command>) {
        lock(&self.known).insert(name.to_owned(), command);
        self.added.notify_all();
    }

    /// A command; waits for its registration until `deadline`.
    fn get(&self, name: &str, deadline: Instant) -> Option<Arc<dyn Command>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let known = lock(&self.known);
        let waited = self
            .added
            .wait_timeout_while(known, left, |known| !known.contains_key(name));
        let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
        known.get(name).cloned()
    }
}

#[derive(Serialize, Deserialize)]
struct CommandRequest {
    command: String,
    #[serde(default)]
    arguments: Value,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CommandReply {
    Progress(Value),
    Ok(Value),
    Error(String),
}

/// Reasons why the node gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("this machine's node does not run")]
    NotUp,
    #[error("{0}")]
    Refused(String),
    /// The node cannot be reached, or ends meanwhile.
    #[error("asking this machine's node at {}: {source}", path.display())]
    Broken { path: PathBuf, source: io::Error },
}

/// Sends a command to the node of a home; `progress` receives its reports. Waits up to `limit` for
/// each line.
///
/// # Errors
/// [`Error::NotUp`] if no node runs.
pub fn ask(
    home: &Path,
    command: &str,
    arguments: Value,
    limit: Duration,
    mut progress: impl FnMut(Value),
) -> Result<Value, Error> {
    ask_while(home, command, arguments, limit, |value| {
        progress(value);
        true
    })
}

/// As [`ask`], while `progress` returns true; null once it returns false.
pub fn ask_while(
    home: &Path,
    command: &str,
    arguments: Value,
    limit: Duration,
    mut progress: impl FnMut(Value) -> bool,
) -> Result<Value, Error> {
    let path = NodeFolder::new(home).socket();
    let stream = UnixStream::connect(&path).map_err(|source| match source.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => Error::NotUp,
        _ => broken(&path, source),
    })?;
    let command = command.to_owned();
    let request = CommandRequest { command, arguments };
    let exchanged = exchange(&stream, &request, limit, &mut progress);
    match exchanged.map_err(|source| broken(&path, source))? {
        CommandReply::Error(reason) => Err(Error::Refused(reason)),
        CommandReply::Ok(value) | CommandReply::Progress(value) => Ok(value),
    }
}

fn broken(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    Error::Broken { path, source }
}

fn exchange(
    stream: &UnixStream,
    request: &CommandRequest,
    limit: Duration,
    progress: &mut CommandProgress<'_>,
) -> io::Result<CommandReply> {
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(CLIENT_LIMIT))?;
    send(stream, request)?;
    let mut reader = BufReader::new(stream);
    loop {
        match serde_json::from_str(&read_line(&mut reader)?)? {
            CommandReply::Progress(value) => {
                if !progress(value) {
                    return Ok(CommandReply::Ok(Value::Null));
                }
            }
            last => return Ok(last),
        }
    }
}

fn send(mut stream: &UnixStream, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    stream.write_all(&text)
}

fn read_line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    reader.take(LINE_BYTES_MAX).read_line(&mut line)?;
    match line.ends_with('\n') {
        true => Ok(line),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
}

/// Listens at `path`; the caller holds the lock of the home, so an existing socket is stale.
pub(super) fn bind(path: &Path) -> Result<UnixListener, super::Error> {
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        let path = path.to_owned();
        return Err(super::Error::SocketPath { path });
    }
    let bind = || {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|source| super::Error::File {
        path: path.to_owned(),
        source,
    })
}

/// Serves clients until the agent stops, then removes the socket.
pub(super) fn serve(inner: &Arc<Inner>, agent: &Agent, listener: &UnixListener) {
    while !inner.is_stopped() {
        if !is_ready(listener) {
            continue;
        }
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        let Some(place) = ConnectionSlot::take(&inner.counts.local, CLIENTS_MAX) else {
            continue;
        };
        let agent = agent.clone();
        let answer = move || {
            let _place = place;
            // A lost client does not receive the answer.
            let _ = answer(&agent, &stream);
        };
        let _ = inner.spawn("client", answer);
    }
    let _ = fs::remove_file(inner.files.socket());
}

fn answer(agent: &Agent, stream: &UnixStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(CLIENT_LIMIT))?;
    stream.set_write_timeout(Some(CLIENT_LIMIT))?;
    let request = read_line(&mut BufReader::new(stream))?;
    // A lost client ends a command only if the command checks for it.
    let mut progress = |value| send(stream, &CommandReply::Progress(value)).is_ok();
    let outcome = match serde_json::from_str::<CommandRequest>(&request) {
        Ok(request) => execute(agent, &request, &mut progress),
        Err(error) => Err(format!("not a command: {error}").into()),
    };
    let reply = match outcome {
        Ok(value) => CommandReply::Ok(value),
        Err(error) => CommandReply::Error(describe(&*error)),
    };
    send(stream, &reply)
}

fn execute(
    agent: &Agent,
    request: &CommandRequest,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, CallbackError> {
    let arguments = &request.arguments;
    let text = |name: &str| arguments[name].as_str();
    let needed = |name: &str| text(name).ok_or_else(|| format!("the argument {name} is missing"));
    match request.command.as_str() {
        "nodes" => Ok(json!({
            "cluster": agent.cluster(),
            "nodes": agent.nodes_and_ways(),
            "problems": agent.problems(),
        })),
        "examine" => {
            let mut found = Vec::new();
            agent.examine(needed("peer")?, |finding| {
                progress(json!(finding));
                found.push(finding);
            });
            Ok(json!(found))
        }
        "token" => Ok(json!({ "token": *agent.token() })),
        "invite" => {
            let code = agent.invite()?;
            Ok(json!({ "code": code.shown(), "name": agent.inner.config.facts.name }))
        }
        "join" => {
            let joined = match text("code") {
                Some(code) => {
                    let code = Code::parse(code)?;
                    agent.join_by_code(&code, text("peer"))
                }
                None => {
                    let key = ClusterKey::from_token(needed("token")?);
                    agent.join(&key?)
                }
            };
            Ok(json!(joined?))
        }
        "leave" => Ok(agent.leave().map(|()| json!({}))?),
        "revoke" => {
            let told = agent.revoke(needed("node")?)?;
            Ok(json!(told))
        }
        "cables" => Ok(json!({ "cables": agent.cable_list() })),
        "trust" => {
            let trust = match arguments["remove"] == true {
                true => CableTrust::Untrusted,
                false => CableTrust::Trusted,
            };
            agent.trust_cable(needed("link")?, trust)?;
            Ok(json!({ "cables": agent.cable_list() }))
        }
        "forget" => {
            let id = agent.forget(needed("node")?)?;
            Ok(json!({ "id": id }))
        }
        other => {
            let deadline = agent.inner.start + STARTING;
            let command = agent.inner.commands.get(other, deadline);
            let unknown = || format!("the node has no command {other:?}; is it an older version?");
            command.ok_or_else(unknown)?(arguments, progress)
        }
    }
}

/// An error with its causes, on one line.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_added_late_is_waited_for() {
        let commands = Commands::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                commands.add(
                    "ps",
                    Arc::new(|_: &Value, _: &mut CommandProgress<'_>| Ok(json!(1))),
                );
            });
            let deadline = Instant::now() + Duration::from_secs(60);
            assert!(commands.get("ps", deadline).is_some());
        });
        assert!(commands.get("fly", Instant::now()).is_none());
    }
}
