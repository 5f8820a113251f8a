//! Locks whose holder may have panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even after a holder panicked. For values that are consistent after each
/// statement, or whose users check them. A panic then ends only its own thread.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_holder_leaves_the_value_to_others() {
        let mutex = Mutex::new(1);
        let holder = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            *lock(&mutex) = 2;
            let _held = lock(&mutex);
            panic!("on purpose");
        }));
        assert!(holder.is_err() && mutex.is_poisoned());
        *lock(&mutex) += 1;
        assert_eq!(*lock(&mutex), 3);
    }
}
