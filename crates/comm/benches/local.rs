//! Time per call of the in-process group: `cargo bench -p paceline-comm --bench local`.
//!
//! All ranks call in a loop, as in decoding. Rank 0 times each size in batches. The median batch is
//! printed with the 10th and 90th percentile, in microseconds per call. The harness is written by
//! hand because criterion brings forty crates and a C file for what is one loop here.

#![allow(clippy::print_stdout, reason = "a bench reports on standard output")]

use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::{Deadline, Error, Group, Reduce, local};

const BATCHES: usize = 101;
/// Calls are batched until a batch moves about this many bytes (or has 100 calls), so that it
/// lasts long enough for the clock.
const BATCH_BYTES: usize = 4 << 20;

type CollectiveFn = fn(&dyn Group, &mut Buffers, Deadline) -> Result<(), Error>;

struct Buffers {
    input: Vec<f32>,
    gathered: Vec<f32>,
    counts: Vec<usize>,
}

const CALLS: [(&str, CollectiveFn); 4] = [
    ("barrier", |group, _, by| group.barrier(by)),
    ("all_gather_v", |group, b, by| {
        group.all_gather_v(&b.input, &mut b.gathered, &b.counts, by)
    }),
    ("all_reduce", |group, b, by| {
        group.all_reduce(&mut b.input, Reduce::Max, by)
    }),
    ("send+recv", |group, b, by| {
        let peer = Rank((group.rank().0 + 1) % group.size());
        let before = Rank((group.rank().0 + group.size() - 1) % group.size());
        group.send(&b.input, peer, 0, by)?;
        group.recv(&mut b.input, before, 0, by)
    }),
];

fn main() {
    println!(
        "{:<14}{:>6}{:>12}{:>10}{:>10}{:>10}",
        "call", "ranks", "bytes", "p10", "p50", "p90"
    );
    for size in [2, 4] {
        for (name, call) in CALLS {
            for bytes in [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20] {
                if name != "barrier" || bytes == 64 {
                    let us = measure(size, bytes, call);
                    let [p10, p50, p90] = [10, 50, 90].map(|p| us[us.len() * p / 100]);
                    println!("{name:<14}{size:>6}{bytes:>12}{p10:>10.2}{p50:>10.2}{p90:>10.2}");
                }
            }
        }
    }
}

/// Sorted microseconds per call, one entry per batch.
fn measure(size: u32, bytes: usize, call: CollectiveFn) -> Vec<f64> {
    let deadline = Deadline::at(Instant::now() + Duration::from_secs(120));
    let threads: Vec<_> = local::ranks(size)
        .into_iter()
        .map(|rank| std::thread::spawn(move || batches(&rank, bytes, call, deadline)))
        .collect();
    let times = threads
        .into_iter()
        .map(|thread| thread.join().expect("a rank runs to its end"));
    let mut of_rank_0 = times
        .collect::<Vec<_>>()
        .swap_remove(0)
        .expect("no call fails");
    of_rank_0.sort_by(f64::total_cmp);
    of_rank_0
}

fn batches(
    group: &dyn Group,
    bytes: usize,
    call: CollectiveFn,
    by: Deadline,
) -> Result<Vec<f64>, Error> {
    let (length, size) = (bytes / 4, group.size() as usize);
    let mut buffers = Buffers {
        input: vec![1.0; length],
        gathered: vec![0.0; length * size],
        counts: vec![length; size],
    };
    let calls = (BATCH_BYTES / bytes).clamp(2, 100);
    (0..calls).try_for_each(|_| call(group, &mut buffers, by))?;
    let mut times = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let start = Instant::now();
        (0..calls).try_for_each(|_| call(group, &mut buffers, by))?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
    }
    group.barrier(by)?;
    Ok(times)
}
