//! Catches panics of libraries that parse untrusted files, and returns them as errors.
//!
//! The crates that read tokenizers and run chat templates panic on some malformed inputs. The
//! panic's message goes to the program's panic hook, which can skip it by [`are_caught`].

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static ARE_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread, at this moment, is one that becomes an error: a program's panic
/// hook need not report it.
pub fn are_caught() -> bool {
    ARE_CAUGHT.get()
}

/// Runs code of a library.
///
/// # Errors
/// The message of its panic. Nothing that `run` could change may be used after it, unless it is
/// right after any part of a run.
pub(crate) fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    let before = ARE_CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    ARE_CAUGHT.set(before);
    result.map_err(|panic| text(&*panic))
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a library panicked without a message")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panic hook can call `are_caught` and print nothing (`cli` does that).
    #[test]
    fn a_panic_is_an_error_that_a_hook_can_tell() {
        let result = catch::<()>(|| {
            assert!(are_caught());
            panic!("deep inside {}", 7);
        });
        assert_eq!(result, Err("deep inside 7".to_owned()));
        assert!(!are_caught());
    }
}
