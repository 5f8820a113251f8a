//! Lines of bytes to programs that other machines' nodes start.

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use anyhow::bail;
use paceline_cluster::nodes::agent::local;
use serde_json::json;

use crate::home;

/// Longest wait for the own node to lead to another one.
const LEAD_LIMIT: Duration = Duration::from_secs(15);

/// A node that says nothing for so long is gone; it says something five times a second.
const SILENCE: Duration = Duration::from_secs(5);

/// A line to the program that the node `id` starts for `service`, one of `paceline_node::tunnel`.
/// It ends with either program and with either node.
///
/// # Errors
/// What the own node says, and what the system says.
pub(crate) fn to_node(id: &str, service: &'static str) -> anyhow::Result<UnixStream> {
    let home = home::folder()?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("line");
    let listener = UnixListener::bind(&path)?;
    listener.set_nonblocking(true)?;
    let arguments = json!({ "node": id, "socket": path });
    let ask = move || local::ask_while(&home, service, arguments, SILENCE, |_| true);
    let led = std::thread::spawn(ask);
    let began = Instant::now();
    let stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(_) if led.is_finished() => match led.join() {
                Ok(Err(error)) => return Err(error.into()),
                _ => bail!("the own node leads nowhere"),
            },
            Err(_) if began.elapsed() < LEAD_LIMIT => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error.into()),
        }
    };
    stream.set_nonblocking(false)?;
    Ok(stream)
}
