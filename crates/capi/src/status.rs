//! Failures for C: a status, and a text that the thread can fetch.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use paceline_comm::Error as CallError;

/// Result of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacelineStatus {
    /// Success.
    Ok = 0,
    /// An argument is wrong: a null pointer, a length, a name.
    Invalid = 1,
    /// The deadline passed.
    Timeout = 2,
    /// Another rank ended, or was silent for too long.
    PeerLost = 3,
    /// The ranks made different calls.
    Mismatch = 4,
    /// The callback stopped the generation.
    Cancelled = 5,
    /// Any other failure: `paceline_last_error` has its text.
    Failed = 6,
}

/// A failure to report to C.
pub(crate) struct StatusError {
    pub(crate) status: PacelineStatus,
    pub(crate) text: String,
}

impl StatusError {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self {
            status: PacelineStatus::Invalid,
            text: text.into(),
        }
    }

    pub(crate) fn other(error: impl std::fmt::Display) -> Self {
        Self {
            status: PacelineStatus::Failed,
            text: error.to_string(),
        }
    }
}

impl From<CallError> for StatusError {
    fn from(error: CallError) -> Self {
        let status = match error {
            CallError::Timeout { .. } => PacelineStatus::Timeout,
            CallError::PeerLost { .. } | CallError::Silent { .. } => PacelineStatus::PeerLost,
            CallError::Mismatch { .. } => PacelineStatus::Mismatch,
            CallError::Length { .. } | CallError::NoSuchRank { .. } => PacelineStatus::Invalid,
            _ => PacelineStatus::Failed,
        };
        Self {
            status,
            text: error.to_string(),
        }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Text of this thread's last failure, empty before the first. It stays valid until the thread's
/// next call of this library.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_last_error() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

/// Version of the library, such as `0.1.0`.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Runs a call, stores the text of its failure, and catches panics.
pub(crate) fn guarded(work: impl FnOnce() -> Result<(), StatusError>) -> PacelineStatus {
    let done = catch_unwind(AssertUnwindSafe(work));
    let done =
        done.unwrap_or_else(|_| Err(StatusError::other("this is a bug of paceline: it panicked")));
    let Err(StatusError { status, text }) = done else {
        return PacelineStatus::Ok;
    };
    // In C a text ends at its first zero byte.
    let text = text.replace('\0', " ");
    LAST.set(CString::new(text).unwrap_or_default());
    status
}

/// Reads a C string.
///
/// # Safety
/// `text` is null or ends with a zero byte and lives through the call.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, StatusError> {
    if text.is_null() {
        return Err(StatusError::invalid(format!("{name} is null")));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    let told = |_| StatusError::invalid(format!("{name} is not UTF-8"));
    text.to_str().map_err(told)
}
