//! Relay: passes the connections of a rank on to a rank that its machine cannot reach.
//!
//! ```text
//! rank that dials ==> listener on the owner's machine ==> address of the other rank
//! ```
//! The bytes are not read: both ends encrypt them with the group's key. A relay lasts until it is
//! dropped, which closes its connections.

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_base::lock;

/// Longest wait for the other rank's machine, as for a rank that dials it itself.
const DIAL_WAIT: Duration = Duration::from_millis(500);

/// Connections that a relay passes on in its life. A group has three for each pair, or a multiple
/// by its streams; further ones are strangers'.
const CONNECTIONS_MAX: usize = 256;

/// A listener whose connections are passed on to one address.
#[derive(Debug)]
pub(super) struct Relay {
    addr: SocketAddr,
    is_over: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    listening: Option<JoinHandle<()>>,
}

impl Relay {
    /// Listens at a port of `at` for connections to `to`.
    pub(super) fn start(at: IpAddr, to: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((at, 0))?;
        let mut relay = Self {
            addr: listener.local_addr()?,
            is_over: Arc::default(),
            streams: Arc::default(),
            listening: None,
        };
        let (is_over, streams) = (Arc::clone(&relay.is_over), Arc::clone(&relay.streams));
        let run = move || accept(&listener, to, &is_over, &streams);
        let thread = std::thread::Builder::new().name("relay".to_owned());
        relay.listening = Some(thread.spawn(run)?);
        Ok(relay)
    }

    /// Where it listens.
    pub(super) const fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // This ends the wait for the next connection; the address is this machine's.
        let is_woken = TcpStream::connect_timeout(&self.addr, DIAL_WAIT).is_ok();
        if let Some(listening) = self.listening.take().filter(|_| is_woken) {
            let _ = listening.join(); // it has no result
        }
        for stream in lock(&self.streams).drain(..) {
            let _ = stream.shutdown(Shutdown::Both); // fails if it is closed
        }
    }
}

/// Passes connections on until the relay is over.
fn accept(
    listener: &TcpListener,
    to: SocketAddr,
    is_over: &AtomicBool,
    streams: &Mutex<Vec<TcpStream>>,
) {
    while lock(streams).len() < 2 * CONNECTIONS_MAX {
        let come = listener.accept();
        if is_over.load(Ordering::SeqCst) {
            return;
        }
        match come {
            // A rank whose connection closes dials again.
            Ok((stream, _)) => drop(pass_on(stream, to, streams)),
            Err(_) => std::thread::sleep(DIAL_WAIT), // no descriptor is left
        }
    }
}

/// Connects to `to` and starts a thread for each direction.
fn pass_on(from: TcpStream, to: SocketAddr, streams: &Mutex<Vec<TcpStream>>) -> io::Result<()> {
    let onward = TcpStream::connect_timeout(&to, DIAL_WAIT)?;
    from.set_nodelay(true)?;
    onward.set_nodelay(true)?;
    let ends = [
        (from.try_clone()?, onward.try_clone()?),
        (onward.try_clone()?, from.try_clone()?),
    ];
    lock(streams).extend([from, onward]);
    for (source, sink) in ends {
        let thread = std::thread::Builder::new().name("relay".to_owned());
        thread.spawn(move || copy(source, sink))?;
    }
    Ok(())
}

/// Copies until either side ends, then closes both.
fn copy(mut source: TcpStream, mut sink: TcpStream) {
    let _ = io::copy(&mut source, &mut sink); // however it ends, both are closed
    let _ = source.shutdown(Shutdown::Both);
    let _ = sink.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Ipv4Addr;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn bytes_pass_both_ways_until_the_relay_is_dropped() {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let relay = Relay::start(HERE, listener.local_addr().unwrap()).unwrap();
        let mut dialler = TcpStream::connect(relay.addr()).unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        let mut got = [0; 4];
        dialler.write_all(b"plan").unwrap();
        accepted.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"plan");
        accepted.write_all(b"done").unwrap();
        dialler.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"done");
        drop(relay);
        assert_eq!(accepted.read(&mut got).unwrap_or(0), 0);
        assert_eq!(dialler.read(&mut got).unwrap_or(0), 0);
    }

    #[test]
    fn a_connection_to_a_rank_that_is_not_up_closes() {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let to = listener.local_addr().unwrap();
        drop(listener);
        let relay = Relay::start(HERE, to).unwrap();
        let mut dialler = TcpStream::connect(relay.addr()).unwrap();
        assert_eq!(dialler.read(&mut [0]).unwrap_or(0), 0);
    }
}
