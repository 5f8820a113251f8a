//! Ranks on slow devices that read their shares of the weights. A tensor split makes an answer
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
use crate::hang::build;
use crate::slow::{FILE, LOG};
use crate::{library, rank};
use paceline_base::testing::Stopwatch;
use paceline_base::{BlockType, KernelClass};
use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, Config, FollowOutcome, Logits, ModelFamily,
    ModelSource, Split,
};
use paceline_tensor::PAGE;

/// Time of a step on one machine in ms, and ns of a crossing.
const USUAL: (f64, f64) = (5.0, 5000.0);

/// The same for a measurement: `"240 180000"`.
const TIMES: &str = "PACELINE_SLOW_TIMES";

/// Steps of a run. The fastest is printed: a busy machine lengthens steps, and shortens none.
const STEPS: usize = 3;

/// Times of a run of [`STEPS`] decode steps.
struct Run {
    /// The least time of a step.
    least: Duration,
    /// The time of a step in ms by the clocks of the devices, which no load changes.
    counted_ms: f64,
    /// Whether a host made the next part of the graph, for each wait before an exchange.
    made_next: Vec<bool>,
}

fn step(compute: &mut dyn Compute, position: usize) {
    let sequence = BatchSequence::plain(&[7], position, &[0], Logits::Last);
    let sequences = [sequence];
    let batch = Batch::new(&sequences);
    assert_eq!(compute.forward(&batch).unwrap(), 1);
}

/// Decode steps of this split over `ranks`.
fn decode((path, device): (&Path, &Path), (kind, ranks): (&str, u32)) -> Run {
    let config = Config::read(&ModelSource::open(path).unwrap()).unwrap();
    let split = Split::plan(&config, kind.parse().unwrap(), ranks, &[]).unwrap();
    let [file, log] = [FILE, LOG].map(|name| PathBuf::from(std::env::var_os(name).unwrap()));
    let (ms, crossing_ns) = std::env::var(TIMES).map_or(USUAL, |text| {
        let (ms, crossing) = text.split_once(' ').unwrap();
        (ms.parse().unwrap(), crossing.parse().unwrap())
    });
    let kib = std::fs::metadata(path).unwrap().len() as f64 / 1024.0;
    let slow = format!("{} {crossing_ns} {ranks}", ms * 1e6 / kib);
    let ready = Barrier::new(ranks as usize);
    let least = std::thread::scope(|scope| {
        let (ready, file, slow) = (&ready, &file, &slow);
        let run = |place| {
            scope.spawn(move || {
                let model = rank(place, path, KernelClass::MlxF32, device);
                let size = BatchSize::single(8, PAGE);
                let mut compute = Arc::clone(&model).reserve(size, PAGE).unwrap();
                let leads = model.shard().leads();
                let mut forward = |position| match leads {
                    true => step(&mut *compute, position),
                    false => assert_eq!(compute.follow().unwrap(), FollowOutcome::Step),
                };
                ready.wait();
                forward(0); // takes memory
                if ready.wait().is_leader() {
                    std::fs::write(file, slow).unwrap();
                }
                ready.wait();
                let timed = |position| {
                    let watch = Stopwatch::start();
                    forward(position);
                    watch.elapsed()
                };
                let least = (1..=STEPS).map(timed).min();
                if ready.wait().is_leader() {
                    std::fs::remove_file(file).unwrap();
                }
                least.filter(|_| leads)
            })
        };
        let threads: Vec<_> = places(&config, &split).into_iter().map(run).collect();
        let mut all = threads.into_iter().filter_map(|it| it.join().unwrap());
        all.next().unwrap()
    });
    let text = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(log).unwrap();
    let waits = || text.lines().map(|line| line.split_once(' ').unwrap());
    let clocks = waits().map(|(_, ns)| ns.parse::<f64>().unwrap());
    let exchanges = waits().filter(|(mark, _)| *mark != "-");
    Run {
        least,
        counted_ms: clocks.fold(0.0, f64::max) / 1e6 / STEPS as f64,
        made_next: exchanges.map(|(mark, _)| mark == "1").collect(),
    }
}

/// Runs the test `name` in a process of its own on the slow devices, unless this is it. With the
/// model and the device where it is.
fn on_slow_devices(test: &str, name: &str, dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let mlx = library(test)?;
    if std::env::var_os(FILE).is_none() {
        crate::slow::again(name);
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

/// Two machines take half of the time of one and their exchanges, four a quarter. Ranks compute at
/// the same time: the devices wait for each other. Between two exchanges a host makes the next part
/// of the graph while its device computes.
#[test]
fn tensor_splits_of_slow_devices_are_faster() {
    let (test, name) = (
        "tensor splits of slow devices are faster",
        "shares::tensor_splits_of_slow_devices_are_faster",
    );
    let dir = tempfile::tempdir().unwrap();
    let Some((path, device)) = on_slow_devices(test, name, dir.path()) else {
        return;
    };
    let kinds = [("pipeline", 1), ("tensor", 2), ("tensor", 4)];
    let [one, two, four] = kinds.map(|split| decode((&path, &device), split));
    for (ranks, run, bar) in [(2, &two, 1.7), (4, &four, 3.0)] {
        let times = one.counted_ms / run.counted_ms;
        let timed = one.least.as_secs_f64() / run.least.as_secs_f64();
        println!(
            "over {ranks} {times:.2} times as fast as on one machine, by this clock {timed:.2}"
        );
        assert!(times >= bar, "over {ranks}: {times:.2}");
        let exchanges = ranks * 2 * 2 * STEPS; // two layers, two exchanges each
        assert_eq!(run.made_next, vec![true; exchanges], "over {ranks}");
    }
    println!("a step on one machine: {:.2?}", one.least);
}
