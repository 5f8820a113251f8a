//! Ranks on slow devices that read their shares of the weights: a tensor split makes one answer
//! faster, and a device computes while its host makes the next part of the graph.
//!
//! The device is a library of this test (`crates/mlx/tests/fake/share.rs`).
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::common::places::places;
use crate::common::tiny::Tiny;
use crate::mlx_hang::build;
use crate::mlx_slow::FILE;
use crate::{library, rank};
use paceline_base::testing::Stopwatch;
use paceline_base::{BlockType, KernelClass};
use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, Config, FollowOutcome, Logits, ModelFamily,
    ModelSource, Split,
};
use paceline_tensor::PAGE;

/// The file with a byte for each wait for a device.
const LOG: &str = "PACELINE_SLOW_LOG";

/// Time of a step on one machine in ms, and ns of a crossing.
const USUAL: (f64, f64) = (240.0, 5000.0);

/// The same for a measurement: `"5 180000"`.
const TIMES: &str = "PACELINE_SLOW_TIMES";

/// Steps of a run, of which the fastest counts: a busy machine lengthens steps, and shortens none.
const STEPS: usize = 3;

fn step(compute: &mut dyn Compute, position: usize) {
    let sequence = BatchSequence {
        tokens: &[7],
        position,
        pages: &[0],
        windows: &[],
        adapter: 0,
        logits: Logits::Last,
    };
    let sequences = [sequence];
    let batch = Batch {
        sequences: &sequences,
    };
    assert_eq!(compute.forward(&batch).unwrap(), 1);
}

/// The least time of a decode step of this split over `ranks`; `steps` of them.
fn step_time((path, device): (&Path, &Path), (kind, ranks): (&str, u32), steps: usize) -> Duration {
    let config = Config::read(&ModelSource::open(path).unwrap()).unwrap();
    let split = Split::plan(&config, kind.parse().unwrap(), ranks, &[]).unwrap();
    let file = PathBuf::from(std::env::var_os(FILE).unwrap());
    let (ms, crossing_ns) = std::env::var(TIMES).map_or(USUAL, |text| {
        let (ms, crossing) = text.split_once(' ').unwrap();
        (ms.parse().unwrap(), crossing.parse().unwrap())
    });
    let kib = std::fs::metadata(path).unwrap().len() as f64 / 1024.0;
    let ready = Barrier::new(ranks as usize);
    std::thread::scope(|scope| {
        let (ready, file) = (&ready, &file);
        let run = |place| {
            scope.spawn(move || {
                let model = rank(place, path, KernelClass::MlxF32, device);
                let size = BatchSize::single(8, PAGE);
                let mut compute = Arc::clone(&model).reserve(size, PAGE).unwrap();
                ready.wait();
                if !model.shard().leads() {
                    let follow = |_| compute.follow().unwrap();
                    let all = (0..=steps).map(follow);
                    all.for_each(|it| assert_eq!(it, FollowOutcome::Step));
                    ready.wait();
                    return None;
                }
                step(&mut *compute, 0); // takes memory
                std::fs::write(file, format!("{} {crossing_ns}", ms * 1e6 / kib)).unwrap();
                let timed = |position| {
                    let watch = Stopwatch::start();
                    step(&mut *compute, position);
                    watch.elapsed()
                };
                let least = (1..=steps).map(timed).min();
                std::fs::remove_file(file).unwrap();
                ready.wait(); // no rank leaves before
                least
            })
        };
        let threads: Vec<_> = places(&config, &split).into_iter().map(run).collect();
        let mut all = threads.into_iter().filter_map(|it| it.join().unwrap());
        all.next().unwrap()
    })
}

/// Runs the test `name` in a process of its own on the slow devices, unless this is it. With the
/// model and the device where it is.
fn on_slow_devices(test: &str, name: &str, dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let mlx = library(test)?;
    if std::env::var_os(FILE).is_none() {
        crate::mlx_slow::again(name);
        return None;
    }
    let Some(device) = build::linked(dir, &mlx, "share.rs") else {
        eprintln!("SKIPPED {test}: no rustc");
        return None;
    };
    let path = dir.join("tiny.gguf");
    let tiny = Tiny {
        kv_heads: 4,
        ..Tiny::new(ModelFamily::Llama, BlockType::Q8_0)
    };
    tiny.write(&path);
    Some((path, device))
}

/// Two machines take half of the time of one and their exchanges, four a quarter.
#[test]
fn tensor_splits_of_slow_devices_are_faster() {
    let (test, name) = (
        "tensor splits of slow devices are faster",
        "mlx_shares::tensor_splits_of_slow_devices_are_faster",
    );
    let dir = tempfile::tempdir().unwrap();
    let Some((path, device)) = on_slow_devices(test, name, dir.path()) else {
        return;
    };
    let [one, two, four] = [1, 2, 4].map(|ranks| {
        let kind = if ranks == 1 { "pipeline" } else { "tensor" };
        step_time((&path, &device), (kind, ranks), STEPS).as_secs_f64()
    });
    println!(
        "a step on one machine {:.2} ms; over two {:.2} times as fast, over four {:.2}",
        one * 1e3,
        one / two,
        one / four
    );
    assert!(one / two >= 1.7, "{:.2}", one / two);
    assert!(one / four >= 3.0, "{:.2}", one / four);
}

/// Between two exchanges the host makes the next part of the graph while the device computes.
#[test]
fn the_next_part_is_made_while_a_device_computes() {
    let (test, name) = (
        "the next part is made while a device computes",
        "mlx_shares::the_next_part_is_made_while_a_device_computes",
    );
    let dir = tempfile::tempdir().unwrap();
    let Some((path, device)) = on_slow_devices(test, name, dir.path()) else {
        return;
    };
    let log = PathBuf::from(std::env::var_os(LOG).unwrap());
    step_time((&path, &device), ("tensor", 2), 1);
    let waits = std::fs::read_to_string(log).unwrap();
    assert_eq!(
        waits,
        "1".repeat(2 * 2 * 2),
        "two ranks, two layers, two exchanges"
    );
}
