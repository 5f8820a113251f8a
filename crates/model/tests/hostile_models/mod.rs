//! Configurations and weights that lie: an error that names the field or tensor, no panic, no
//! allocation beyond what the file can hold.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

mod gguf;
mod hf;
mod mutated;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use crate::common::try_load;
use paceline_base::KernelClass;
use paceline_tensor::Kernels;

/// The system's allocator, which remembers the largest request of each thread.
struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Largest single allocation while a model is refused: the files here take half a megabyte.
const ALLOCATION_LIMIT: usize = 1 << 20;

/// The text of the error that loading `path` must give.
fn refusal(path: &Path, title: &str) -> String {
    // One thread: no allocation is another's, and thousands of refusals make none.
    let kernels = Arc::new(Kernels::new(1).unwrap());
    LARGEST.set(0);
    let result = try_load(path, KernelClass::CpuF32, &kernels);
    let largest = LARGEST.get();
    assert!(
        largest <= ALLOCATION_LIMIT,
        "{title}: allocated {largest} bytes at once"
    );
    match result {
        Ok(_) => panic!("{title}: was loaded"),
        Err(error) => error.to_string(),
    }
}

/// Asserts that loading `path` is refused with an error of moderate length that says `expected`.
fn check(path: &Path, title: &str, expected: &str) {
    let text = refusal(path, title);
    assert!(
        text.contains(expected),
        "{title}: {text:?} has no {expected:?}"
    );
    assert!(text.len() < 1000, "{title}: {text:?}");
}
