//! Rates of products on a card, as shares of the rate at which it reads the same bytes. On software
//! they say nothing, so it is skipped by name.
//!
//!     cargo test --release -p paceline-gpu --features wgpu rates_of_products -- --nocapture

use paceline_base::SplitMix64;
use paceline_base::testing::Stopwatch;

use super::*;
use crate::tests::device;

/// The feed-forward of a model of 8 billion weights: outputs and inputs.
const ROWS: usize = 14336;
const COLS: usize = 4096;

/// Copies of the matrix, read in turn: 240 MB exceed the caches of every card.
const COPIES: usize = 8;

/// Products of a short and of a long run. Their difference has no launch and no reading in it.
const RUNS: [usize; 2] = [8, 72];

/// Trials of each; the fastest counts.
const TRIALS: usize = 5;

/// Reads words as the products do, and nothing else: 32 coalesced words a thread.
const READ: &str = "
@compute @workgroup_size(64)
fn read_all(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    var all = 0u;
    for (var i = 0u; i < 32u; i += 1u) {
        all ^= a[(group.x * 32u + i) * 64u + thread];
    }
    result[group.x * 64u + thread] = all;
    sign_off(thread);
}
";

/// Seconds that a step takes within a long run. `add` adds the kernels of step `i`.
fn seconds(on: &mut Session<'_>, add: impl Fn(&mut Session<'_>, usize)) -> f64 {
    (0..RUNS[1]).for_each(|i| add(on, i));
    let steps = std::mem::take(&mut on.steps);
    let small = on.room(1);
    // Buffers are cleared at their first use, which the first trial has.
    let mut run = |count: usize| {
        on.steps = steps[..steps.len() / RUNS[1] * count].to_vec();
        let watch = Stopwatch::start();
        on.read(&small);
        watch.elapsed().as_secs_f64()
    };
    let mut least = |count| {
        let trials = (0..TRIALS).map(|_| run(count));
        trials.fold(f64::INFINITY, f64::min)
    };
    let [short, long] = RUNS.map(&mut least);
    (long - short) / (RUNS[1] - RUNS[0]) as f64
}

/// A matrix of random bits: their values do not matter.
fn random_linear(gpu: &Gpu, stored: Stored) -> Linear {
    let mut random = SplitMix64::new(stored.seed);
    let mut filled = |words: usize| {
        let words: Vec<u32> = (0..words)
            .map(|_| random.next() as u32 & 0x3fff_ffff)
            .collect();
        gpu.filled(&bytes_of_words(&words)).unwrap()
    };
    let (weights, chunks) = (ROWS * COLS / 8, ROWS * COLS / 32);
    Linear {
        stored,
        weights: filled(weights),
        factors: filled(chunks + chunks / 8),
    }
}

#[test]
fn rates_of_products() {
    let Some(gpu) = device("rates_of_products") else {
        return;
    };
    if gpu.is_software() {
        eprintln!("SKIPPED rates_of_products: {} is software", gpu.label());
        return;
    }
    let stored = |seed| Stored {
        kind: Kind::Four,
        rows: ROWS,
        cols: COLS,
        leaf: 0,
        headers: 1,
        seed,
    };
    let linears: Vec<Linear> = (0..COPIES as u64)
        .map(|seed| random_linear(&gpu, stored(seed)))
        .collect();
    let mut on = Session::new(&gpu, Form::Dot4);
    let groups = ROWS * COLS / 8 / BLOCK / 32;
    let text = [&head(Kind::Four, Form::Dot4), FLOAT, SINGLE, LAYER, READ];
    let pipeline = gpu
        .pipeline(Kernel {
            entry: "read_all",
            text: &text,
        })
        .unwrap();
    let out = on.room(groups * BLOCK);
    let read = seconds(&mut on, |on, i| {
        let weights = linears[i % COPIES].weights.clone();
        let buffers = vec![(2, out.clone()), (3, weights)];
        on.steps.push(Step {
            pipeline: pipeline.clone(),
            buffers,
            groups,
        });
    });
    let bytes = (ROWS * COLS / 2) as f64;
    let rate = bytes / read;
    eprintln!("{} reads {:.0} GB/s: the rate", gpu.label(), rate / 1e9);
    for rows in [1, TILE] {
        let x: Vec<f32> = (0..rows as u64)
            .flat_map(|row| cases::activations(row, COLS))
            .collect();
        let x = on.filled(&x);
        let x = on.quantise(&x, rows, (COLS, 0));
        on.read(&x);
        for form in Form::ALL {
            on.form = form;
            let took = seconds(&mut on, |on, i| {
                on.product(&linears[i % COPIES], &x, rows, None);
            });
            // A stored block has 144 bytes for 256 weights.
            let share = bytes * 144.0 / 128.0 / took / rate;
            eprintln!(
                "{rows} rows, {form:?}: {:.1} us, {share:.2} of the rate",
                took * 1e6
            );
        }
    }
}
