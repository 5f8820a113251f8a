//! A step that the system interrupts on the GPU. Its error differs from others, and the same
//! sequence computed again has the same logits.
//!
//! The device is a library of this test (`crates/mlx/tests/fake/interrupt.rs`), the process this
//! test's own program, started again.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::common::tiny::Tiny;
use crate::hang::build;
use crate::load_first;
use paceline_base::{BlockType, KernelClass};
use paceline_mlx::LibraryPaths;
use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, Config, Error, LoadedModel, Logits, ModelFamily,
    ModelSource, Split,
};
use paceline_model_mlx::MlxOptions;

/// Where the process finds the model; set for it alone.
const MODEL: &str = "PACELINE_INTERRUPT_MODEL";
/// The library that interrupts.
const SHIM: &str = "PACELINE_INTERRUPT_LIBRARY";
/// The file whose presence makes it interrupt.
const FILE: &str = "PACELINE_INTERRUPT";

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// Reads a prompt into the first page; its logits.
fn read(compute: &mut dyn Compute) -> Result<Vec<f32>, Error> {
    let sequence = BatchSequence::plain(&[1, 2, 3], 0, &[0], Logits::Last);
    compute.forward(&Batch {
        sequences: &[sequence],
    })?;
    Ok(compute.logits_mut(0).to_vec())
}

fn load(model: &Path, library: PathBuf) -> Result<Box<dyn Compute>, Error> {
    let source = Arc::new(ModelSource::open(model)?);
    let split = Split::whole(&Config::read(&source)?);
    let options = MlxOptions {
        places: LibraryPaths {
            explicit: Some(library),
            ..LibraryPaths::default()
        },
        class: KernelClass::Mlx,
        positions: 64,
        rows: 8,
        sequences: 1,
        kv: None,
        captures: Vec::new(),
        memory: None,
        patience: Duration::from_secs(60),
        last_words: Duration::from_secs(60),
    };
    let model = load_first(source, &split, options)?;
    Arc::new(model).reserve(BatchSize::single(8, 64), 64)
}

/// The process that the test below starts; nothing without its variables.
#[test]
fn the_process_whose_step_is_interrupted() {
    let (Some(model), Some(library)) = (variable(MODEL), variable(SHIM)) else {
        return;
    };
    let mut compute = load(&model, library).unwrap();
    let expected = read(&mut *compute).unwrap();
    std::fs::write(variable(FILE).unwrap(), "").unwrap();
    let error = read(&mut *compute).unwrap_err();
    assert!(error.is_interrupted(), "{error}");
    assert_eq!(read(&mut *compute).unwrap(), expected);
}

#[test]
fn an_interrupted_step_can_be_computed_again() {
    let test = "an interrupted step can be computed again";
    let Some(mlx) = variable("PACELINE_MLXC") else {
        return eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    };
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("tiny.gguf");
    Tiny::new(ModelFamily::Llama, BlockType::Q8_0).write(&model);
    let Some(library) = build::linked(dir.path(), &mlx, "interrupt.rs") else {
        return eprintln!("SKIPPED {test}: no rustc");
    };
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args([
        "--exact",
        "interrupted::the_process_whose_step_is_interrupted",
    ]);
    process.env(MODEL, model).env(SHIM, library);
    let output = process.env(FILE, dir.path().join("now")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}
