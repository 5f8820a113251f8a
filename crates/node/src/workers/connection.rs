//! Message connections between the owner of an instance and the hosts of its workers.
//!
//! The owner and the host use the trait alone: `fleet` implements it over the cluster's encrypted
//! channels, and [`pair`] inside one process.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use paceline_base::{AwakeTime, lock};
use paceline_comm::Starvation;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message in bytes, as between a parent and its children on one machine.
pub const MESSAGE_BYTES_MAX: usize = paceline_cluster::LINE_BYTES_MAX;

/// Queue length of a connection inside this process: its reader does nothing else.
const HELD_MAX: usize = 1024;

/// Longest wait for the reader of a connection inside this process, as for a child that does not
/// read.
const WRITE_LIMIT: Duration = Duration::from_millis(1500);

/// The connection is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ConnectionError {
    /// The reason, such as `the connection is closed`.
    pub reason: String,
}

impl ConnectionError {
    pub fn new(reason: impl fmt::Display) -> Self {
        let reason = reason.to_string();
        Self { reason }
    }
}

/// Messages in both directions, in order and each once; between machines authenticated and
/// encrypted. All methods may be called from any thread; one thread receives.
pub trait MessageConnection: Send + Sync + fmt::Debug {
    /// Sends a message. Waits a bounded time if the receiver is behind.
    ///
    /// # Errors
    /// [`ConnectionError`].
    fn send(&self, message: &[u8]) -> Result<(), ConnectionError>;

    /// The next message, of at most [`MESSAGE_BYTES_MAX`]; nothing after `wait`.
    ///
    /// # Errors
    /// [`ConnectionError`].
    fn receive(&self, wait: Duration) -> Result<Option<Vec<u8>>, ConnectionError>;

    /// Closes both directions; a call that waits returns.
    fn close(&self);

    /// This end's address, at which the other machine reaches this one; `None` inside a process.
    fn own_addr(&self) -> Option<SocketAddr>;
}

/// Measures how long a connection has been silent. Time in which the reader itself was suspended
/// hardly counts: see [`Awake`].
#[derive(Debug)]
pub(crate) struct SilenceTimer {
    awake: AwakeTime,
    so_far: Duration,
    wait: Duration,
    looked: Instant,
    starvation: Starvation,
}

impl SilenceTimer {
    /// Starts at `now`, for a reader that polls about every `wait`.
    pub(crate) fn new(now: Instant, wait: Duration) -> Self {
        Self {
            awake: AwakeTime::new(now, 2 * wait),
            so_far: Duration::ZERO,
            wait,
            looked: now,
            starvation: Starvation::new(now),
        }
    }

    /// A message arrived.
    pub(crate) fn heard(&mut self, now: Instant) {
        self.awake.tick(now);
        (self.so_far, self.looked) = (Duration::ZERO, now);
    }

    /// No message until `now`; returns the silence so far.
    pub(crate) fn pass(&mut self, now: Instant) -> Duration {
        self.starvation.fired(self.looked + self.wait, now);
        self.looked = now;
        self.so_far += self.awake.tick(now);
        self.so_far
    }

    /// As [`pass`](Self::pass), where the silence exceeds `limit`, which is longer while this
    /// machine is starved.
    pub(crate) fn exceeds(&mut self, limit: Duration, now: Instant) -> Option<Duration> {
        let silence = self.pass(now);
        (silence > self.starvation.stretched(limit, now)).then_some(silence)
    }
}

/// Sends a value as JSON.
pub(crate) fn send_message(
    line: &dyn MessageConnection,
    message: &impl Serialize,
) -> Result<(), ConnectionError> {
    let bytes = serde_json::to_vec(message).map_err(ConnectionError::new)?;
    match bytes.len() {
        0..=MESSAGE_BYTES_MAX => line.send(&bytes),
        n => Err(ConnectionError::new(format!(
            "a message of {n} bytes, but {MESSAGE_BYTES_MAX} is the most"
        ))),
    }
}

/// Receives a value as JSON.
pub(crate) fn receive_message<T: DeserializeOwned>(
    line: &dyn MessageConnection,
    wait: Duration,
) -> Result<Option<T>, ConnectionError> {
    let message = line.receive(wait)?;
    let read = |bytes: Vec<u8>| serde_json::from_slice(&bytes);
    message.map(read).transpose().map_err(ConnectionError::new)
}

/// One direction of a connection inside this process.
#[derive(Default)]
struct MemoryQueue {
    state: Mutex<(VecDeque<Vec<u8>>, bool)>,
    changed: Condvar,
}

impl MemoryQueue {
    /// Waits until `done` returns a value, the queue is closed, or `wait` is over.
    fn until<T>(
        &self,
        wait: Duration,
        mut done: impl FnMut(&mut VecDeque<Vec<u8>>) -> Option<T>,
    ) -> Result<Option<T>, ConnectionError> {
        let end = Instant::now().checked_add(wait);
        let mut state = lock(&self.state);
        loop {
            if let Some(value) = done(&mut state.0) {
                self.changed.notify_all();
                return Ok(Some(value));
            }
            if state.1 {
                return Err(ConnectionError::new("the line is closed"));
            }
            let left = end.map_or(wait, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(None);
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn close(&self) {
        lock(&self.state).1 = true;
        self.changed.notify_all();
    }
}

/// One end of a connection inside this process: see [`pair`].
#[derive(derive_more::Debug)]
#[debug("a line inside this process")]
pub struct MemoryConnection {
    out: Arc<MemoryQueue>,
    back: Arc<MemoryQueue>,
}

/// Both ends of a new connection inside this process.
pub fn pair() -> (MemoryConnection, MemoryConnection) {
    let (a, b) = (
        Arc::new(MemoryQueue::default()),
        Arc::new(MemoryQueue::default()),
    );
    let first = MemoryConnection {
        out: Arc::clone(&a),
        back: Arc::clone(&b),
    };
    (first, MemoryConnection { out: b, back: a })
}

impl MessageConnection for MemoryConnection {
    fn send(&self, message: &[u8]) -> Result<(), ConnectionError> {
        let closed = lock(&self.out.state).1;
        let put = |queue: &mut VecDeque<Vec<u8>>| {
            (!closed && queue.len() < HELD_MAX).then(|| queue.push_back(message.to_vec()))
        };
        let sent = self.out.until(WRITE_LIMIT, put)?;
        sent.ok_or_else(|| ConnectionError::new(format!("nothing was read within {WRITE_LIMIT:?}")))
    }

    fn receive(&self, wait: Duration) -> Result<Option<Vec<u8>>, ConnectionError> {
        self.back.until(wait, VecDeque::pop_front)
    }

    fn close(&self) {
        self.out.close();
        self.back.close();
    }

    fn own_addr(&self) -> Option<SocketAddr> {
        None
    }
}

impl Drop for MemoryConnection {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_in_order_and_a_closed_line_says_so() {
        let (a, b) = pair();
        assert_eq!(b.receive(Duration::from_millis(1)), Ok(None));
        a.send(b"one").unwrap();
        a.send(b"two").unwrap();
        a.close();
        assert!(a.send(b"three").is_err());
        let wait = Duration::from_secs(5);
        assert_eq!(b.receive(wait), Ok(Some(b"one".to_vec())));
        assert_eq!(b.receive(wait), Ok(Some(b"two".to_vec())));
        assert!(b.receive(wait).is_err());
    }

    #[test]
    fn silence_while_all_machines_slept_accuses_nobody() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut quiet = SilenceTimer::new(start, ms(200));
        assert_eq!(quiet.pass(start + ms(200)), ms(200));
        assert_eq!(quiet.pass(start + ms(450)), ms(450));
        let woken = start + ms(10_450);
        assert_eq!(
            quiet.pass(woken),
            ms(850),
            "ten seconds asleep count as two looks"
        );
        quiet.heard(woken + ms(10));
        assert_eq!(quiet.pass(woken + ms(210)), ms(200));
        for look in 2..9 {
            quiet.pass(woken + ms(10 + look * 200));
        }
        assert_eq!(quiet.pass(woken + ms(1810)), ms(1800), "it is silent");
    }

    #[test]
    fn a_line_that_nobody_reads_is_bounded() {
        let (a, _b) = pair();
        (0..HELD_MAX).for_each(|_| a.send(b"x").unwrap());
        assert!(a.send(b"x").unwrap_err().reason.contains("1.5s"));
    }
}
