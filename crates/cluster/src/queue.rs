//! Queue of received messages, with a bound per sender.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paceline_base::lock;

/// Most queued entries of a sender: far more than a working reader ever leaves.
pub(crate) const ENTRIES_MAX: usize = 4096;

/// Queued bytes of a sender after which it is not read further: a longest line always fits.
pub(crate) const BYTES_MAX: usize = crate::LINE_BYTES_MAX;

/// A queue with several senders, in order of arrival.
///
/// The queue itself refuses nothing: the reader of a socket checks [`Queue::is_full`] before it
/// reads more, so that a flood stays in the sender's process. A sender may therefore exceed its
/// bound by one read.
#[derive(Debug)]
pub(crate) struct Queue<E> {
    inner: Mutex<Inner<E>>,
    filled: Condvar,
}

#[derive(Debug)]
struct Inner<E> {
    entries: VecDeque<QueueEntry<E>>,
    senders: Vec<SenderUsage>,
    woken: bool,
}

#[derive(Debug)]
struct QueueEntry<E> {
    sender: usize,
    bytes: usize,
    content: E,
}

#[derive(Clone, Debug, Default)]
struct SenderUsage {
    entries: usize,
    bytes: usize,
    muted: bool,
}

impl<E> Queue<E> {
    pub(crate) fn new(senders: usize) -> Self {
        let inner = Inner {
            entries: VecDeque::new(),
            senders: vec![SenderUsage::default(); senders],
            woken: false,
        };
        Self {
            inner: Mutex::new(inner),
            filled: Condvar::new(),
        }
    }

    /// Appends a message of `bytes` bytes; drops it if the sender is muted.
    pub(crate) fn push(&self, sender: usize, bytes: usize, content: E) {
        let mut inner = self.lock();
        let held = &mut inner.senders[sender];
        if held.muted {
            return;
        }
        held.entries += 1;
        held.bytes += bytes;
        inner.entries.push_back(QueueEntry {
            sender,
            bytes,
            content,
        });
        self.filled.notify_one();
    }

    /// Appends an entry that must arrive, even if muted. For entries of a bounded number.
    pub(crate) fn push_verdict(&self, sender: usize, content: E) {
        let mut inner = self.lock();
        inner.senders[sender].entries += 1;
        inner.entries.push_back(QueueEntry {
            sender,
            bytes: 0,
            content,
        });
        self.filled.notify_one();
    }

    /// Takes the oldest entry, waiting for one up to `timeout` or a [`wake`](Self::wake). Returns
    /// true with it if this made room for its sender, which was full before.
    pub(crate) fn pop(&self, timeout: Duration) -> Option<(E, bool)> {
        let empty = |inner: &mut Inner<E>| inner.entries.is_empty() && !inner.woken;
        let waited = self.filled.wait_timeout_while(self.lock(), timeout, empty);
        let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inner.woken = false;
        let entry = inner.entries.pop_front()?;
        let held = &mut inner.senders[entry.sender];
        let was_full = held.is_full();
        held.entries -= 1;
        held.bytes -= entry.bytes;
        let room = was_full && !held.is_full();
        Some((entry.content, room))
    }

    /// Makes a waiting [`pop`](Self::pop), or the next one on an empty queue, return at once.
    pub(crate) fn wake(&self) {
        self.lock().woken = true;
        self.filled.notify_one();
    }

    /// Drops a sender's entries and unmutes it, for a new process of its rank.
    pub(crate) fn reset(&self, sender: usize) {
        let mut inner = self.lock();
        inner.entries.retain(|entry| entry.sender != sender);
        inner.senders[sender] = SenderUsage::default();
    }

    /// Drops messages of this sender from now on.
    pub(crate) fn mute(&self, sender: usize) {
        self.lock().senders[sender].muted = true;
    }

    /// Whether messages of this sender are dropped.
    pub(crate) fn is_muted(&self, sender: usize) -> bool {
        self.lock().senders[sender].muted
    }

    /// Whether the sender must wait.
    pub(crate) fn is_full(&self, sender: usize) -> bool {
        self.lock().senders[sender].is_full()
    }

    fn lock(&self) -> MutexGuard<'_, Inner<E>> {
        lock(&self.inner)
    }
}

impl SenderUsage {
    fn is_full(&self) -> bool {
        self.entries >= ENTRIES_MAX || self.bytes >= BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_in_order_and_senders_have_their_own_bound() {
        let queue = Queue::new(2);
        for i in 0..ENTRIES_MAX {
            assert!(!queue.is_full(0));
            queue.push(0, 1, i);
        }
        assert!(queue.is_full(0) && !queue.is_full(1));
        queue.push(1, BYTES_MAX, 7);
        assert!(queue.is_full(1));
        assert_eq!(queue.pop(Duration::ZERO), Some((0, true)), "room again");
        assert_eq!(queue.pop(Duration::ZERO), Some((1, false)));
        assert!(!queue.is_full(0));
        for _ in 2..ENTRIES_MAX {
            queue.pop(Duration::ZERO);
        }
        assert_eq!(queue.pop(Duration::MAX), Some((7, true)));
        assert_eq!(queue.pop(Duration::ZERO), None);
    }

    #[test]
    fn a_new_sender_starts_afresh_and_a_wake_is_seen_once() {
        let queue = Queue::new(2);
        queue.push(0, 5, "old");
        queue.push(1, 5, "other");
        queue.mute(0);
        queue.reset(0);
        queue.push(0, 5, "new");
        assert_eq!(queue.pop(Duration::ZERO), Some(("other", false)));
        assert_eq!(queue.pop(Duration::ZERO), Some(("new", false)));
        queue.wake();
        assert_eq!(queue.pop(Duration::MAX), None, "woken");
        assert_eq!(queue.pop(Duration::ZERO), None);
    }

    #[test]
    fn a_muted_sender_is_heard_no_more_but_judged() {
        let queue = Queue::new(1);
        queue.mute(0);
        queue.push(0, 1, "message");
        queue.push_verdict(0, "verdict");
        assert_eq!(queue.pop(Duration::ZERO), Some(("verdict", false)));
        assert_eq!(queue.pop(Duration::ZERO), None);
        assert!(queue.is_muted(0));
    }
}
