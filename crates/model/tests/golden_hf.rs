//! Tiny Hugging Face folders against what `transformers` computes with them
//! (`tests-data/golden/hf`, made by `scripts/golden/hf_tiny.py`).
//!
//! The unit test `step::tests` finds the first layer that differs.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use crate::common::compare::{max_abs_diff, worst_within};
use crate::common::hf::{DELTA_FOLDERS, EXPERT_FOLDERS, FOLDERS, golden_logits, golden_tensor};
use crate::common::runner::Runner;
use crate::common::{golden, golden_json, ids, kernels, load, number};
use paceline_base::KernelClass;

/// Compares logits at every position and the greedy continuation. `tolerance` bounds the distance
/// of a logit; where first and second are further apart than twice that, the first must agree.
fn check(name: &str, class: KernelClass, tolerance: f64) {
    let json = golden_json(&format!("hf/{name}.golden.json"));
    let (prompt, greedy) = (ids(&json, "prompt"), ids(&json, "greedy"));
    let model = load(&golden(&format!("hf/{name}")), class, &kernels());
    let mut runner = Runner::new(model, prompt.len() + greedy.len());

    let got = runner.all(&prompt);
    let what = format!("{name} {class}");
    let worst = worst_within(&what, &got, &golden_logits(name), tolerance);
    println!("{name} {class}: logits within {worst:.3e}, tolerance {tolerance:.3e}");
    assert_eq!(runner.greedy(&prompt, greedy.len()), greedy, "{what}");
}

/// Checks a class in all folders, within `factor` of a distance that was recorded of each.
fn check_all(class: KernelClass, factor: f64, recorded: &str) {
    let folders = FOLDERS.into_iter().chain(EXPERT_FOLDERS);
    for name in folders.chain(DELTA_FOLDERS) {
        let json = golden_json(&format!("hf/{name}.golden.json"));
        let distance = number(&json, &["max_abs_diff", recorded]);
        check(name, class, factor * distance);
    }
}

/// `transformers` and we do the same operations in f32 in another order, as its own run with
/// products in f64 does. Distances are of that size, several times it for the worst logit.
#[test]
fn class_cpu_f32_agrees_with_transformers() {
    check_all(KernelClass::CpuF32, 4.0, "f64_matmul");
}

/// Float weights are used as stored, so class `cpu` differs by its f16 keys and values alone. The
/// recorded distance is that of one such run; ours rounds slightly different numbers.
#[test]
fn class_cpu_agrees_but_for_keys_and_values_in_f16() {
    check_all(KernelClass::Cpu, 2.0, "kv_f16");
}

/// The golden logits are those of the chunked form, these of the recurrent one; the distance of
/// either from float64 is the measure of both.
#[test]
fn delta_nets_agree_with_the_recurrent_form_too() {
    for name in DELTA_FOLDERS {
        let json = golden_json(&format!("hf/{name}.golden.json"));
        let tolerance = 4.0 * number(&json, &["max_abs_diff", "f64_matmul"]);
        let prompt = ids(&json, "prompt");
        let folder = golden(&format!("hf/{name}"));
        let model = load(&folder, KernelClass::CpuF32, &kernels());
        let got = Runner::new(model, prompt.len()).all(&prompt);
        let expected = golden_tensor(name, "logits.recurrent");
        let pairs = got.iter().zip(&expected);
        let worst = pairs.map(|(got, expected)| max_abs_diff(got, expected));
        let worst = worst.fold(0.0, f64::max);
        println!("{name}: recurrent form within {worst:.3e}, tolerance {tolerance:.3e}");
        assert!(worst <= tolerance, "{name}: {worst:.3e} of {tolerance:.3e}");
    }
}
