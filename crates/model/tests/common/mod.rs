//! Helpers that the tests of this crate share: golden files, models of this machine, and a runner
//! that feeds sequences to a model.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

pub(crate) mod compare;
pub(crate) mod folders;
pub(crate) mod gemma4;
pub(crate) mod hf;
pub(crate) mod places;
pub(crate) mod runner;
pub(crate) mod scaled;
pub(crate) mod schedule;
pub(crate) mod tiny;
pub(crate) mod toy;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::testing::from_package;
use paceline_base::{KernelClass, Rank};
use paceline_model::{Error, LoadOptions, Model, ModelSource, Split};
use paceline_tensor::Kernels;
use paceline_tensor::storage::dequantise;
use paceline_weights::gguf::testing::GgufWriter;
use paceline_weights::hf::HfFolder;
use paceline_weights::tensor::Tensor;
use serde_json::Value;

/// Threads of tests that are not about threads: the machines of CI have two cores.
pub(crate) const THREADS: usize = 2;

/// A file or folder of `tests-data/golden`.
pub(crate) fn golden(path: &str) -> PathBuf {
    from_package(env!("CARGO_MANIFEST_DIR"), "../../tests-data/golden").join(path)
}

pub(crate) fn golden_json(path: &str) -> Value {
    let path = golden(path);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The number at `json[path[0]][path[1]]...`.
pub(crate) fn number(json: &Value, path: &[&str]) -> f64 {
    let at = path.iter().fold(json, |json, key| &json[key]);
    at.as_f64()
        .unwrap_or_else(|| panic!("no number at {path:?}"))
}

/// The list of numbers called `key`.
pub(crate) fn numbers(json: &Value, key: &str) -> Vec<f64> {
    let list = json[key]
        .as_array()
        .unwrap_or_else(|| panic!("no list {key}"));
    list.iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The rows of a tensor of f32.
pub(crate) fn rows_of(tensor: &Tensor) -> Vec<Vec<f32>> {
    let values = tensor.bytes.as_chunks().0.iter();
    let values: Vec<f32> = values.map(|b| f32::from_le_bytes(*b)).collect();
    let rows = values.chunks_exact(tensor.cols());
    rows.map(<[f32]>::to_vec).collect()
}

/// A matrix of a folder with its values, which are to the bit the recorded `.values`, but for the
/// sign of zero.
pub(crate) fn check_values(folder: &HfFolder, module: &str) -> (Tensor, Vec<f32>) {
    let want = rows_of(&folder.tensor(&format!("{module}.values")).unwrap());
    let joined = folder.tensor(&format!("{module}.weight")).unwrap();
    assert_eq!(joined.shape, [want.len(), want[0].len()], "{module}");
    let got = decoded(&joined);
    let differ = got.iter().zip(want.iter().flatten()).enumerate();
    let first = differ.filter(|(_, (got, want))| got != want).take(3);
    let first: Vec<_> = first.collect();
    assert!(first.is_empty(), "{module}: first differences {first:?}");
    (joined, got)
}

/// All values of a tensor.
pub(crate) fn decoded(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![f32::NAN; tensor.rows() * tensor.cols()];
    dequantise(tensor.block_type, &tensor.bytes, &mut values);
    values
}

/// The list of token ids called `key`.
pub(crate) fn ids(json: &Value, key: &str) -> Vec<u32> {
    numbers(json, key).iter().map(|&id| id as u32).collect()
}

/// The model called `file` in the folder that `cargo xtask models` fills, or `None` with a line
/// that says why not.
pub(crate) fn test_model(test: &str, file: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("PACELINE_TEST_MODELS")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/paceline/test-models")));
    let path = dir.unwrap_or_default().join(file);
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED {test}: {} is not there", path.display());
    None
}

/// The kernels of this machine on [`THREADS`] threads.
pub(crate) fn kernels() -> Arc<Kernels> {
    Arc::new(Kernels::new(THREADS).unwrap())
}

/// Opens and loads the model at `path`.
pub(crate) fn try_load(
    path: &Path,
    class: KernelClass,
    kernels: &Arc<Kernels>,
) -> Result<Model, Error> {
    let source = ModelSource::open(path)?;
    let config = toy::config_of(&source)?;
    let split = Split::whole(&config);
    let (options, kernels) = (LoadOptions { class }, Arc::clone(kernels));
    let model = Model::load_config(
        &source,
        config,
        &split,
        Rank(0),
        options,
        kernels,
        |_, _| {},
    )?;
    match model.lacks_token_keys() {
        true => model.with_token_keys(folders::token_keys()),
        false => Ok(model),
    }
}

/// Writes a toy, of 300 tokens.
pub(crate) fn write_toy(path: &Path) {
    let tokens: Vec<String> = (0..300).map(|i| format!("t{i}")).collect();
    let file = GgufWriter::new().meta("general.architecture", "llama");
    toy::toy(file.meta("tokenizer.ggml.tokens", tokens), 300).write(path);
}

/// As [`try_load`], for a model that must load.
pub(crate) fn load(path: &Path, class: KernelClass, kernels: &Arc<Kernels>) -> Model {
    try_load(path, class, kernels).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
