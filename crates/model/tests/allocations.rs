//! A decode step allocates nothing: every buffer is made when the model is loaded.
//!
//! Alone in its file, because it counts what all threads of the process allocate.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::load;
use common::tiny::Tiny;
use paceline_base::{BlockType, KernelClass};
use paceline_model::{Batch, BatchSequence, BatchSize, Logits, Model, ModelFamily, Workspace};
use paceline_tensor::{Kernels, KvCache, PAGE, ThreadPool};

/// The system's allocator, counted.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Decodes one token of two sequences.
fn step(model: &Model, position: usize, ws: &mut Workspace, cache: &mut KvCache) {
    let pages = [[0u32, 1, 2, 3], [7, 6, 5, 4]];
    let sequences = [0, 1].map(|s| BatchSequence::plain(&[1], position, &pages[s], Logits::Last));
    let batch = Batch::new(&sequences);
    assert_eq!(model.forward(&batch, ws, cache).unwrap(), 2);
}

/// Waits until every thread of the pool runs: starting, a thread allocates. Each takes one task and
/// holds it until all have one.
fn all_started(pool: &ThreadPool) {
    let started = AtomicUsize::new(0);
    pool.run(pool.threads(), &|_| {
        started.fetch_add(1, Ordering::Relaxed);
        while started.load(Ordering::Relaxed) < pool.threads() {
            std::thread::yield_now();
        }
    });
}

/// Allocations of 100 decode steps across borders of pages, after two to warm up.
fn allocations(path: &std::path::Path, threads: usize) -> usize {
    let kernels = Arc::new(Kernels::new(threads).unwrap());
    all_started(kernels.pool());
    let model = load(path, KernelClass::Cpu, &kernels);
    let mut cache = model.whole_cache(8 * PAGE).unwrap();
    let size = BatchSize {
        rows: 2,
        logit_rows: 2,
        sequences: 2,
        context: 4 * PAGE,
    };
    let mut ws = Workspace::new(&model, size);
    (0..2).for_each(|position| step(&model, position, &mut ws, &mut cache));
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (2..102).for_each(|position| step(&model, position, &mut ws, &mut cache));
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

#[test]
fn a_decode_step_allocates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for family in [
        ModelFamily::Llama,
        ModelFamily::Qwen2,
        ModelFamily::Qwen3,
        ModelFamily::Gemma3,
        ModelFamily::GptOss,
        ModelFamily::Glm4Moe,
        ModelFamily::MiniMaxM2,
        ModelFamily::Dbrx,
        ModelFamily::DeepSeek,
        ModelFamily::Qwen35,
        ModelFamily::Qwen35Moe,
    ] {
        let path = dir.path().join("model.gguf");
        Tiny::new(family, BlockType::Q4_K).write(&path);
        for threads in [1, 3] {
            let count = allocations(&path, threads);
            assert_eq!(count, 0, "{family:?} on {threads} threads, 100 steps");
        }
    }
}
