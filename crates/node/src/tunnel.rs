//! Tunnel: a byte stream between a program on one machine and a program that another machine's node
//! starts for it.
//!
//! ```text
//! program == its socket ==> own node == channel ==> other node == pipes ==> the program it starts
//! ```
//! Nodes forward the bytes unchanged. When either program or a node ends, the other program sees
//! the end of its input and exits.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use paceline_base::CallbackError;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::local::{self, CommandProgress};
use paceline_cluster::nodes::agent::{Agent, ServiceChannel};
use paceline_process::Program;
use serde_json::{Value, json};

/// The service that starts a training worker.
pub const TRAIN: &str = "train";

/// The service that starts a rank of a collectives benchmark.
pub const BENCH: &str = "bench";

/// The service that starts a worker of an array job.
pub const ARRAYS: &str = "arrays";

/// The service that runs a user's program, or connects to one; only where the owner allows it.
pub const PROGRAMS: &str = "programs";

const MESSAGE_BYTES: usize = 64 << 10;

/// Poll interval of a silent side.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Longest time to open a channel.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// Longest wait for this machine's node to connect to another one.
const LEAD_LIMIT: Duration = Duration::from_secs(15);

/// Silence after which a node is lost; it sends a heartbeat five times a second.
const SILENCE: Duration = Duration::from_secs(5);

/// Poll interval of that wait.
const LEAD_LOOK: Duration = Duration::from_millis(5);

/// Time for a program to exit after the end of its input.
const GRACE: Duration = Duration::from_secs(2);

/// Starts a program for each channel to `service`, which is [`TRAIN`], [`BENCH`], [`ARRAYS`] or
/// [`PROGRAMS`].
pub fn serve(
    agent: &Agent,
    service: &str,
    start: impl Fn() -> io::Result<Program> + Send + Sync + 'static,
) {
    agent.serve(service, move |channel| match start() {
        Ok(program) => join(&channel, program),
        Err(_) => channel.close(), // the other end sees the closed channel
    });
}

/// Forwards bytes between a channel and a program until either ends, then ends the program.
fn join(channel: &ServiceChannel, mut program: Program) {
    let (input, output) = (program.take_input(), program.take_output());
    std::thread::scope(|scope| {
        scope.spawn(|| send(channel, output));
        if let Some(input) = input {
            // Without a heartbeat: a lost program closes the channel.
            receive(channel, input, &mut || true);
        }
        program.end_within(GRACE); // closes its output, which ends the other thread
    });
}

/// Connects the program listening at the socket in `arguments` to `service` of the node in
/// `arguments`; for [`Agent::serve_local`]. Returns when either side has ended.
///
/// # Errors
/// There is no such node or socket.
pub fn lead(
    agent: &Agent,
    service: &str,
    arguments: &Value,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, CallbackError> {
    let text = |name: &str| arguments[name].as_str().unwrap_or_default();
    let node: NodeId = text("node").parse().map_err(|_| "no id of a node")?;
    let channel = agent.open(node, service, OPEN_LIMIT)?;
    let socket = UnixStream::connect(text("socket"))?;
    bridge(&channel, &socket, &mut || progress(Value::Null))?;
    Ok(json!({}))
}

/// Forwards bytes between a channel and a socket until either ends, or `goes_on` returns false; it
/// is called regularly. Blocks, and takes one more thread.
///
/// # Errors
/// The system has no further handle of the socket.
pub fn bridge(
    channel: &ServiceChannel,
    socket: &UnixStream,
    goes_on: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    let own = socket.try_clone()?;
    std::thread::scope(|scope| {
        scope.spawn(|| send(channel, own));
        receive(channel, socket, goes_on);
        channel.close();
        // This ends the other thread's read.
        let _ = socket.shutdown(std::net::Shutdown::Both);
    });
    Ok(())
}

/// Connects to the program that the node `id` starts for `service`, through the node with its files
/// at `home`. The service is [`TRAIN`], [`BENCH`], [`ARRAYS`] or [`PROGRAMS`]. The connection ends
/// with either program or node. Blocks for up to 15 s.
///
/// # Errors
/// That node's reason, or a timeout.
pub fn line(home: &Path, id: &str, service: &'static str) -> io::Result<UnixStream> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("line");
    let listener = UnixListener::bind(&path)?;
    listener.set_nonblocking(true)?;
    let arguments = json!({ "node": id, "socket": path });
    let home = home.to_owned();
    let ask = move || local::ask_while(&home, service, arguments, SILENCE, |_| true);
    let led = std::thread::spawn(ask);
    let began = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(_) if led.is_finished() => {
                return Err(match led.join() {
                    Ok(Err(error)) => io::Error::other(error),
                    _ => io::Error::other("the own node leads nowhere"),
                });
            }
            Err(_) if began.elapsed() < LEAD_LIMIT => std::thread::sleep(LEAD_LOOK),
            Err(error) => return Err(error),
        }
    }
}

/// Copies from a stream into a channel, until either ends.
fn send(channel: &ServiceChannel, mut from: impl Read) {
    let mut buffer = vec![0; MESSAGE_BYTES];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if channel.send(&buffer[..n]).is_err() {
            break;
        }
    }
    channel.close();
}

/// Copies from a channel into a stream, until either ends or `goes_on` returns false; it is called
/// regularly.
fn receive(channel: &ServiceChannel, mut to: impl Write, goes_on: &mut dyn FnMut() -> bool) {
    let mut asked = Instant::now();
    while let Ok(message) = channel.recv(MESSAGE_BYTES, LOOK_EVERY) {
        if let Some(bytes) = message
            && to.write_all(&bytes).and_then(|()| to.flush()).is_err()
        {
            break;
        }
        if asked.elapsed() >= LOOK_EVERY {
            asked = Instant::now();
            if !goes_on() {
                break;
            }
        }
    }
}
