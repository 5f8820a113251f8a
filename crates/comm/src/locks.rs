//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a holder panicked: what this crate guards is in order after each statement, or
/// fails by its own checks.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
