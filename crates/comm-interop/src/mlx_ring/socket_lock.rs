//! Serialises the calls of one rank, which share the sockets.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use paceline_base::lock;
use paceline_comm::Deadline;
use paceline_comm::provider::now;

/// The lock of the sockets, with scratch memory for a call.
#[derive(Debug, Default)]
pub(super) struct SocketLock {
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: bool,
    scratch: Vec<u8>,
}

/// Exclusive use of the sockets, until dropped.
pub(super) struct SocketGuard<'a> {
    turns: &'a SocketLock,
    scratch: Vec<u8>,
}

impl SocketLock {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes the lock; `None` if another call holds it until the deadline.
    pub(super) fn lock(&self, deadline: Deadline) -> Option<SocketGuard<'_>> {
        let left = deadline.left(now());
        let waited = self
            .free
            .wait_timeout_while(self.state(), left, |state| state.taken);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.taken {
            return None;
        }
        state.taken = true;
        let scratch = std::mem::take(&mut state.scratch);
        drop(state);
        Some(SocketGuard {
            turns: self,
            scratch,
        })
    }
}

impl SocketGuard<'_> {
    /// Memory of `bytes` bytes with arbitrary contents.
    pub(super) fn scratch(&mut self, bytes: usize) -> &mut [u8] {
        self.scratch.resize(bytes, 0);
        &mut self.scratch
    }
}

impl Drop for SocketGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.taken = false;
        state.scratch = std::mem::take(&mut self.scratch);
        drop(state);
        self.turns.free.notify_one();
    }
}
