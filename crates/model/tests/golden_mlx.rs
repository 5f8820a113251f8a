//! Folders in MLX's quantised form against MLX (`tests-data/golden/mlx`, made by
//! `scripts/golden/mlx_quantised.py`).

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use crate::common::compare::{argmax, worst_within};
use crate::common::hf::{MLX_EXPERT_FOLDERS, MLX_FOLDERS};
use crate::common::runner::Runner;
use crate::common::{
    check_values, golden, golden_json, ids, kernels, load, numbers, rows_of, test_model,
};
use paceline_base::{BlockType, KernelClass};
use paceline_weights::hf::HfFolder;
use paceline_weights::safetensors::Safetensors;

/// MLX widens every scheme to the same numbers as we do, to the bit but for the sign of zero.
#[test]
fn every_scheme_decodes_as_in_mlx() {
    let folder = HfFolder::open(golden("mlx/dequant")).unwrap();
    let names = folder.names();
    let schemes: Vec<&str> = names
        .filter_map(|name| name.strip_suffix(".values"))
        .collect();
    assert_eq!(schemes.len(), 37); // 6 widths, 3 groups, 2 types of scales, and mxfp4
    let mut seen: Vec<BlockType> = Vec::new();
    for scheme in schemes {
        seen.push(check_values(&folder, scheme).0.block_type);
    }
    let mut mlx = BlockType::ALL.into_iter();
    assert!(
        mlx.all(|t| BlockType::GGUF.contains(&t) || seen.contains(&t) || t.is_decoded()),
        "types without a scheme"
    );
}

/// Compares logits at every position of the prompt with those of MLX in float32. Compares the
/// greedy continuation up to the first id that stands above the second by less than
/// `2 * tolerance`.
fn check(name: &str, class: KernelClass, tolerance: f64) {
    let json = golden_json(&format!("mlx/{name}.golden.json"));
    let (prompt, greedy) = (ids(&json, "prompt"), ids(&json, "greedy"));
    let model = load(&golden(&format!("mlx/{name}")), class, &kernels());
    let mut runner = Runner::new(model, prompt.len() + greedy.len());

    let file = golden(&format!("mlx/{name}.golden.safetensors"));
    let file = Safetensors::open(file).unwrap();
    let expected = rows_of(&file.tensor("logits").unwrap());
    let got = runner.all(&prompt);
    let worst = worst_within(&format!("{name} {class}"), &got, &expected, tolerance);
    println!("{name} {class}: logits within {worst:.3e}, tolerance {tolerance:.3e}");
    let gaps = numbers(&json, "greedy_gaps");
    let sure = gaps.iter().take_while(|gap| **gap > 2.0 * tolerance);
    let sure = sure.count();
    let got = runner.greedy(&prompt, greedy.len());
    assert_eq!(got[..sure], greedy[..sure], "{name} {class}, greedy");
}

/// The same operations in f32 in another order. They are up to 3.2e-5 apart in the models that
/// these were made from (`f64_matmul` of `golden_hf.rs`), here up to 8e-5.
#[test]
fn class_cpu_f32_agrees_with_mlx() {
    for name in MLX_FOLDERS.into_iter().chain(MLX_EXPERT_FOLDERS) {
        check(name, KernelClass::CpuF32, 2e-4);
    }
}

/// Activations of 15 bits, and keys and values in f16. The latter alone move logits of the models
/// that these were made from by up to 0.039 (`kv_f16`).
#[test]
fn class_cpu_agrees_but_for_its_roundings() {
    for name in MLX_FOLDERS.into_iter().chain(MLX_EXPERT_FOLDERS) {
        check(name, KernelClass::Cpu, 0.08);
    }
}

/// SmolLM2 by `mlx_lm.convert` takes each of 32 ids that MLX in float32 takes after a question. Ids
/// that stand above the second by less than the roundings of class `cpu` may move are left out.
#[test]
fn smollm2_in_mlx_form_goes_on_as_in_mlx() {
    const NAME: &str = "SmolLM2-135M-Instruct-mlx-4bit";
    /// Keys and values in f16 move SmolLM2's logits by up to 0.01 (`golden/numpy/smollm2.json`).
    const SURE: f64 = 0.04;
    let Some(golden) = test_model(NAME, &format!("{NAME}.golden.json")) else {
        return;
    };
    let text = std::fs::read_to_string(&golden).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (prompt, greedy) = (ids(&json, "prompt"), ids(&json, "greedy"));
    let model = load(&golden.with_file_name(NAME), KernelClass::Cpu, &kernels());
    let tokens = [prompt.clone(), greedy.clone()].concat();
    let logits = Runner::new(model, tokens.len()).all(&tokens);
    let mut sure = 0;
    for (i, gap) in numbers(&json, "greedy_gaps").iter().enumerate() {
        if *gap > SURE {
            let at = prompt.len() - 1 + i;
            assert_eq!(argmax(&logits[at]), greedy[i], "id {i}, gap {gap}");
            sure += 1;
        }
    }
    assert!(sure >= 28, "{sure} of {} ids are sure", greedy.len());
}
