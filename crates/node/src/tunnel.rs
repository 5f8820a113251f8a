//! Bytes between a program on one machine and a program that another machine's node starts for it.
//!
//! ```text
//! program == its socket ==> own node == channel ==> other node == pipes ==> the program it starts
//! ```
//! Nodes pass the bytes on as they are. Both programs end, by the end of their input, when either
//! of them or a node does.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::local::{self, Progress};
use paceline_cluster::nodes::agent::{Agent, Channel};
use serde_json::{Value, json};

/// The service that starts a worker of a training.
pub const TRAIN: &str = "train";

/// The service that starts a rank of a measurement of collectives.
pub const BENCH: &str = "bench";

/// The service that starts a worker of an array job.
pub const ARRAYS: &str = "arrays";

const MESSAGE_BYTES: usize = 64 << 10;

/// How often a side that says nothing is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Longest time to open a channel.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// Longest wait for the own node to lead to another one.
const LEAD_LIMIT: Duration = Duration::from_secs(15);

/// A node that says nothing for so long is gone; it says something five times a second.
const SILENCE: Duration = Duration::from_secs(5);

/// How often a node that is to lead somewhere is looked for.
const LEAD_LOOK: Duration = Duration::from_millis(5);

/// How long a program has to put things in order when its input has ended.
const GRACE: Duration = Duration::from_secs(2);

/// Starts a program for each channel to `service`, which is [`TRAIN`], [`BENCH`] or [`ARRAYS`]:
/// `start` gives one whose standard input and output are pipes.
pub fn serve(
    agent: &Agent,
    service: &str,
    start: impl Fn() -> io::Result<Child> + Send + Sync + 'static,
) {
    agent.serve(service, move |channel| match start() {
        Ok(child) => join(&channel, child),
        Err(_) => channel.close(), // the other end sees a line that ended
    });
}

/// Passes bytes between a channel and a program until either ends, and ends the program.
fn join(channel: &Channel, mut child: Child) {
    let (input, output) = (child.stdin.take(), child.stdout.take());
    std::thread::scope(|scope| {
        if let Some(output) = output {
            scope.spawn(|| send(channel, output));
        }
        if let Some(input) = input {
            // Without a beat: a program that is gone closes the channel.
            receive(channel, input, &mut || true);
        }
        end(&mut child); // closes its output, so that the other thread ends too
    });
}

/// Waits for a program whose input has ended, and kills it when it does not end.
fn end(child: &mut Child) {
    let began = Instant::now();
    while began.elapsed() < GRACE {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(LOOK_EVERY / 10),
            _ => return,
        }
    }
    let _ = child.kill(); // fails where it has just ended
    let _ = child.wait();
}

/// Leads the program that listens at the socket `arguments` name to `service` of the node that they
/// name; for [`Agent::serve_local`]. Returns when either side has ended.
///
/// # Errors
/// A node or a socket that there is not.
pub fn lead(
    agent: &Agent,
    service: &str,
    arguments: &Value,
    progress: &mut Progress<'_>,
) -> Result<Value, String> {
    let text = |name: &str| arguments[name].as_str().unwrap_or_default();
    let node: NodeId = text("node").parse().map_err(|_| "no id of a node")?;
    let channel = agent.open(node, service, OPEN_LIMIT);
    let channel = channel.map_err(|error| error.to_string())?;
    let socket = UnixStream::connect(text("socket")).map_err(|error| error.to_string())?;
    let own = socket.try_clone().map_err(|error| error.to_string())?;
    std::thread::scope(|scope| {
        scope.spawn(|| send(&channel, own));
        receive(&channel, &socket, &mut || progress(Value::Null));
        channel.close();
        // The other thread's read ends with it.
        let _ = socket.shutdown(std::net::Shutdown::Both);
    });
    Ok(json!({}))
}

/// A line to the program that the node `id` starts for `service`, which is [`TRAIN`], [`BENCH`] or
/// [`ARRAYS`]. The node with its files at `home` leads there. The line ends with either program and
/// with either node. Blocks for up to 15 s.
///
/// # Errors
/// What that node says, or that it does not lead there in time.
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

/// From a stream into a channel, until either ends.
fn send(channel: &Channel, mut from: impl Read) {
    let mut buffer = vec![0; MESSAGE_BYTES];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if channel.send(&buffer[..n]).is_err() {
            break;
        }
    }
    channel.close();
}

/// From a channel into a stream, until either ends or `goes_on` says no, which is asked now and
/// then.
fn receive(channel: &Channel, mut to: impl Write, goes_on: &mut dyn FnMut() -> bool) {
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
