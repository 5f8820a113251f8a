//! Models of every storage type: small random ones made here, and those of
//! `scripts/models/quant_models.py` against the numpy reference.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::path::Path;

use crate::common::compare::{largest, log_probability, relative_rms};
use crate::common::runner::Runner;
use crate::common::tiny::Tiny;
use crate::common::{golden_json, ids, kernels, load, number, numbers, test_model};
use paceline_base::{BlockType, KernelClass};
use paceline_model::ModelFamily;
use serde_json::Value;

/// How far a class may be from `cpu-f32` on a [`Tiny`] model for each of its layers. The distance
/// is the root of the mean square over all logits, in units of that of the logits.
///
/// Keys and values in f16 move a model of floats by up to 0.03 % a layer, and activations rounded
/// to 15 bits add little. Seen: up to 0.045 %.
///
/// Rounding to 8 bits moves the input of a product by 0.5 % of its size. That is uniform over steps
/// of 1/127 of the largest of 32 values, about 2.2 standard deviations. Four products in a row,
/// gated ones twice, make 1 % of that. Seen: 0.1 to 1.1 %.
///
/// Rounding to bf16 moves it by 0.1 % of each value. Seen: 0.2 to 0.3 %.
const fn tolerance(block_type: BlockType, class: KernelClass) -> f64 {
    match class {
        KernelClass::CpuQ8 if !block_type.is_float() => 0.015,
        KernelClass::CpuQ8 if matches!(block_type, BlockType::BF16) => 0.005,
        KernelClass::Cpu | KernelClass::CpuQ8 => 0.001,
        KernelClass::CpuF32 | KernelClass::Mlx | KernelClass::MlxF32 | KernelClass::MlxExact => 0.0,
    }
}

/// Random models of every type and family against the f32 dequantised reference.
#[test]
fn classes_agree_with_f32_for_every_storage_type() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for block_type in BlockType::GGUF {
        for family in ModelFamily::DENSE {
            let tiny = Tiny::new(family, block_type);
            tiny.write(&path);
            let tokens = tiny.tokens(40, 1);
            let logits = |class| {
                let model = load(&path, class, &kernels());
                Runner::new(model, tokens.len()).all(&tokens).concat()
            };
            let reference = logits(KernelClass::CpuF32);
            for class in [KernelClass::Cpu, KernelClass::CpuQ8] {
                let distance = relative_rms(&logits(class), &reference);
                let title = format!("{} {block_type} {class}", family.name());
                let most = tiny.layers as f64 * tolerance(block_type, class);
                println!("{title}: {distance:.2e}, tolerance {most:.0e}");
                assert!(distance <= most, "{title}: {distance:.2e} (relative RMS)");
            }
        }
    }
}

/// Logits at chosen ids of the last position, and the NLL of the prompt's ids.
fn check_recorded(path: &Path, json: &Value, class: KernelClass, tolerance: f64) {
    let title = format!("{} {class}", path.file_name().unwrap().display());
    let prompt = ids(json, "prompt");
    let mut runner = Runner::new(load(path, class, &kernels()), prompt.len());
    let logits = runner.all(&prompt);
    let last = &logits[prompt.len() - 1];

    let recorded = ["top", "logits"]
        .into_iter()
        .flat_map(|list| json[list].as_array().unwrap());
    let distance = |entry: &Value| {
        let id = number(entry, &["id"]) as usize;
        (f64::from(last[id]) - number(entry, &["logit"])).abs()
    };
    let logit = largest(recorded.map(distance));
    let ours = (1..prompt.len()).map(|i| -log_probability(&logits[i - 1], prompt[i]));
    let nlls = ours.zip(numbers(json, "nlls")).map(|(a, b)| (a - b).abs());
    let nll = largest(nlls);
    println!("{title}: logits within {logit:.2e}, NLL within {nll:.2e}, tolerance {tolerance:.2e}");
    assert!(
        logit <= tolerance,
        "{title}: logits {logit:.2e} apart, at most {tolerance:.2e}"
    );
    // A log-probability moves by at most twice what the logits move by.
    assert!(
        nll <= 2.0 * tolerance,
        "{title}: NLL {nll:.2e} apart, at most twice {tolerance:.2e}"
    );
}

/// All classes. `f32_tolerance` bounds the effect of other orders of f32 sums. The other classes
/// round keys, values and activations besides. They do so in about the way of the reference's runs
/// that were recorded (`tests-data/golden/README.md`), and twice their distance is allowed. A step
/// of 15 bits is a 128th of one of 8; `q8` is the amount by which these move logits.
pub(crate) fn check_classes(path: &Path, json: &Value, f32_tolerance: f64, q8: f64) {
    let kv = number(json, &["max_abs_diff", "kv_f16"]);
    for (class, rounded) in [
        (KernelClass::CpuF32, 0.0),
        (KernelClass::Cpu, kv + q8 / 128.0),
        (KernelClass::CpuQ8, kv + q8),
    ] {
        check_recorded(path, json, class, f32_tolerance + 2.0 * rounded);
    }
}

/// Two layers, logits of a standard deviation of 0.5: f32 differences up to 2e-6 seen.
#[test]
fn every_storage_type_agrees_with_numpy() {
    let golden = golden_json("quant_models.json");
    let types = golden["types"].as_object().unwrap();
    assert_eq!(types.len(), 15);
    for (name, json) in types {
        let test = format!("every_storage_type_agrees_with_numpy, {name}");
        if let Some(path) = test_model(&test, json["file"].as_str().unwrap()) {
            check_classes(&path, json, 1e-5, rounding_to_eight(types, name));
        }
    }
}

/// Amount by which activations of 8 bits move logits. For BF16 weights they are rounded to bf16,
/// which the reference's runs do not do. That moves each by 0.1 %, where 8 bits move the same
/// model's by 0.5 % of 32.
fn rounding_to_eight(types: &serde_json::Map<String, Value>, name: &str) -> f64 {
    let recorded = |name: &str| number(&types[name], &["max_abs_diff", "act_q8"]);
    if name == "BF16" {
        recorded("Q8_0") / 4.0
    } else {
        recorded(name)
    }
}

/// Up to 30 layers and logits up to 25: f32 differences up to 4e-5 seen.
#[test]
fn real_models_agree_with_numpy() {
    for name in ["smollm2", "gemma3"] {
        let golden = golden_json(&format!("numpy/{name}.json"));
        let json = &golden["short"];
        let test = format!("real_models_agree_with_numpy, {name}");
        if let Some(path) = test_model(&test, json["file"].as_str().unwrap()) {
            let q8 = number(json, &["max_abs_diff", "act_q8"]);
            check_classes(&path, json, 2e-4, q8);
        }
    }
}
