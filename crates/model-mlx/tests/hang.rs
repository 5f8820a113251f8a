//! A device that hangs, and keeps the process from ending in order: the error names it, and
//! the process ended all the same.
//!
//! The device is a library of this test (`crates/mlx/tests/fake/hang.rs`), the process this test's
//! own program, started again.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

#[path = "../../mlx/tests/fake/build.rs"]
pub(crate) mod build;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::common::tiny::Tiny;
use crate::load_first;
use paceline_base::{BlockType, KernelClass};
use paceline_mlx::LibraryPaths;
use paceline_model::{
    Batch, BatchSequence, BatchSize, Config, Error, LoadedModel, Logits, ModelFamily, ModelSource,
    Split,
};
use paceline_model_mlx::MlxOptions;

/// Longest wait for the process, which takes a second.
const LIMIT: Duration = Duration::from_secs(60);

/// Where the process finds the model; set for it alone.
const MODEL: &str = "PACELINE_HANG_MODEL";
/// The library that hangs.
const SHIM: &str = "PACELINE_HANG_LIBRARY";
/// The file that a hang is noted in.
const NOTE: &str = "PACELINE_HANG_NOTE";
/// The file whose presence makes it hang.
const FILE: &str = "PACELINE_HANG";
/// Set where it hangs before it has a cache.
const EARLY: &str = "PACELINE_HANG_EARLY";

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// Loads the model and runs one step, on which the device hangs, if it does not hang before.
fn step(model: &Path, library: PathBuf) -> Result<usize, Error> {
    let source = Arc::new(ModelSource::open(model)?);
    let split = Split::whole(&Config::read(&source)?);
    let options = MlxOptions {
        places: LibraryPaths {
            explicit: Some(library),
            hang_note: variable(NOTE),
            ..LibraryPaths::default()
        },
        class: KernelClass::Mlx,
        positions: 64,
        rows: 8,
        sequences: 1,
        kv: None,
        captures: Vec::new(),
        memory: None,
        patience: Duration::from_millis(200),
        last_words: Duration::from_millis(500),
    };
    let model = load_first(source, &split, options)?;
    let model: Arc<dyn LoadedModel> = Arc::new(model);
    let hang = || std::fs::write(variable(FILE).unwrap(), "").unwrap();
    if variable(EARLY).is_some() {
        hang();
    }
    let mut compute = model.reserve(BatchSize::single(8, 64), 64)?;
    hang();
    let sequence = BatchSequence::plain(&[1, 2, 3], 0, &[0], Logits::Last);
    compute.forward(&Batch {
        sequences: &[sequence],
    })
}

/// The process that the test below starts; nothing without its variables.
#[test]
fn the_process_whose_device_hangs() {
    let (Some(model), Some(library)) = (variable(MODEL), variable(SHIM)) else {
        return;
    };
    let error = step(&model, library).unwrap_err();
    eprintln!("error: {error}");
    // In order, which the device does not let happen.
    std::process::exit(0);
}

#[test]
fn a_process_whose_device_hangs_is_ended() {
    let test = "a process whose device hangs is ended";
    let Some(mlx) = variable("PACELINE_MLXC") else {
        return eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    };
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("tiny.gguf");
    Tiny::new(ModelFamily::Llama, BlockType::Q8_0).write(&model);
    let Some(library) = build::linked(dir.path(), &mlx, "hang.rs") else {
        return eprintln!("SKIPPED {test}: no rustc");
    };
    for is_early in [false, true] {
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args([
            "--exact",
            "hang::the_process_whose_device_hangs",
            "--nocapture",
        ]);
        process.env(MODEL, &model).env(SHIM, &library);
        if is_early {
            process.env(EARLY, "1");
        }
        let (hang, note) = (dir.path().join("hang"), dir.path().join("note"));
        process.env(FILE, &hang).env(NOTE, &note);
        let output = finish(process.stdout(Stdio::null()).stderr(Stdio::piped()));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.contains("error: ") && said.contains("evaluation"),
            "{said}"
        );
        assert_eq!(output.status.code(), Some(1), "{said}");
        let told = std::fs::read_to_string(&note).unwrap();
        assert!(said.contains(told.trim()), "{told} of {said}");
        for file in [hang, note] {
            std::fs::remove_file(file).unwrap();
        }
    }
}

/// Runs `process` to its end; kills it when that does not come.
fn finish(process: &mut Command) -> Output {
    let child = process.spawn().unwrap();
    let id = child.id();
    let (done, end) = channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = end.recv_timeout(LIMIT) else {
        let _ = Command::new("kill").args(["-9", &id.to_string()]).status();
        panic!("the process did not end");
    };
    output.unwrap()
}
