//! A prompt on two stages of devices that wait for each other. A stage computes a chunk while the
//! next stage computes the chunk before. It has
//! the result only when that stage has the graph of the same chunk.
//!
//! The device is a library of this test (`crates/mlx/tests/fake/slow.rs`).
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::path::Path;
use std::sync::{Arc, Barrier};

use crate::common::places::places;
use crate::common::schedule::bits;
use crate::common::tiny::Tiny;
use crate::hang::build;
use crate::{library, rank};
use paceline_base::{BlockType, KernelClass};
use paceline_model::FollowOutcome::Step;
use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, Config, Logits, ModelFamily, ModelSource, Split,
};
use paceline_tensor::PAGE;

/// The file whose presence makes the device slow.
pub(crate) const FILE: &str = "PACELINE_SLOW";

/// The file that the device notes its waits in.
pub(crate) const LOG: &str = "PACELINE_SLOW_LOG";

/// Chunks of the prompt, and rows of a chunk.
const CHUNKS: usize = 10;
const ROWS: usize = 4;

fn with_chunk<T>(tokens: &[u32], chunk: usize, run: impl FnOnce(&Batch<'_>) -> T) -> T {
    let rows = chunk * ROWS..(chunk + 1) * ROWS;
    let sequence = BatchSequence::plain(
        &tokens[rows.clone()],
        rows.start,
        &[0],
        match chunk + 1 == CHUNKS {
            true => Logits::Last,
            false => Logits::None,
        },
    );
    run(&Batch::new(&[sequence]))
}

/// Reads the prompt with as many announced chunks as the model has stages; its logits.
fn lead(compute: &mut dyn Compute, tokens: &[u32]) -> Vec<f32> {
    let depth = compute.depth();
    let mut announced = 0;
    for chunk in 0..CHUNKS {
        while depth > 1 && announced < CHUNKS.min(chunk + depth) {
            with_chunk(tokens, announced, |batch| compute.announce(batch)).unwrap();
            announced += 1;
        }
        with_chunk(tokens, chunk, |batch| compute.forward(batch)).unwrap();
    }
    compute.logits_mut(0).to_vec()
}

/// Logits of the prompt, from `stages` that compute at the same time.
fn read(path: &Path, stages: u32, device: &Path, file: &Path) -> Vec<f32> {
    let config = Config::read(&ModelSource::open(path).unwrap()).unwrap();
    let split = Split::plan(&config, "pipeline".parse().unwrap(), stages, &[]).unwrap();
    let tokens: Vec<u32> = (0..(CHUNKS * ROWS) as u32).map(|i| i * 37 % 300).collect();
    let ready = Barrier::new(stages as usize);
    std::thread::scope(|scope| {
        let (tokens, ready) = (&tokens, &ready);
        let run = |place| {
            scope.spawn(move || {
                let model = rank(place, path, KernelClass::MlxF32, device);
                let size = BatchSize::single(ROWS, PAGE);
                let mut compute = Arc::clone(&model).reserve(size, PAGE).unwrap();
                ready.wait();
                if !model.shard().leads() {
                    (0..CHUNKS).for_each(|_| assert_eq!(compute.follow().unwrap(), Step));
                    return None;
                }
                if stages > 1 {
                    std::fs::write(file, CHUNKS.to_string()).unwrap();
                }
                Some(lead(&mut *compute, tokens))
            })
        };
        let threads: Vec<_> = places(&config, &split).into_iter().map(run).collect();
        let mut all = threads.into_iter().filter_map(|it| it.join().unwrap());
        all.next().unwrap()
    })
}

/// Two stages of a prompt in 10 chunks take 11 of the 20 half steps that one machine takes. Only
/// the first chunk of the first stage and the last one of the second are computed alone.
#[test]
fn a_prompt_fills_the_stages_of_slow_devices() {
    let test = "a prompt fills the stages of slow devices";
    let Some(mlx) = library(test) else {
        return;
    };
    if std::env::var_os(FILE).is_none() {
        return again("slow::a_prompt_fills_the_stages_of_slow_devices");
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(device) = build::linked(dir.path(), &mlx, "slow.rs") else {
        return eprintln!("SKIPPED {test}: no rustc");
    };
    let path = dir.path().join("tiny.gguf");
    let tiny = Tiny {
        layers: 4,
        ..Tiny::new(ModelFamily::Llama, BlockType::Q8_0)
    };
    tiny.write(&path);
    let file = std::env::var_os(FILE).unwrap();
    let run = |stages| read(&path, stages, &device, Path::new(&file));
    let (one, two) = (run(1), run(2));
    assert_eq!(bits(&two), bits(&one));
}

/// Runs the test `name` in a process whose only library of MLX is the slow one.
pub(crate) fn again(name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut process = std::process::Command::new(std::env::current_exe().unwrap());
    process.args([name, "--exact", "--nocapture"]);
    process.env(FILE, dir.path().join("slow"));
    process.env(LOG, dir.path().join("log"));
    let output = process.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    let passed = output.status.success() && said.contains("1 passed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(passed, "{}: {said}{error}", output.status);
}
