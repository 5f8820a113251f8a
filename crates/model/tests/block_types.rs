//! Tiny models of the storage types of 2025 and 2026 against `transformers`. compressed-tensors and
//! gguf-py decode their weights for it. `scripts/golden/block_types.py` made
//! `tests-data/golden/block_types.json` from the models that this test writes.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::{Path, PathBuf};

use crate::common::golden_json;
use crate::common::scaled::{Layout, write_one};
use crate::common::tiny::Tiny;
use crate::quant_models::check_classes;
use paceline_base::BlockType;
use paceline_model::ModelFamily;

const FOLDERS: [(&str, Layout); 6] = [
    ("fp8-tiles", Layout::Fp8Tiles),
    ("fp8-rows", Layout::Fp8Rows),
    ("fp8-whole", Layout::Fp8Whole),
    ("mxfp8", Layout::Mxfp8),
    ("nvfp4", Layout::Nvfp4),
    ("int4", Layout::Int4),
];

const FILES: [BlockType; 10] = [
    BlockType::IQ1_S,
    BlockType::IQ1_M,
    BlockType::IQ2_XXS,
    BlockType::IQ2_XS,
    BlockType::IQ2_S,
    BlockType::IQ3_XXS,
    BlockType::IQ3_S,
    BlockType::TQ1_0,
    BlockType::TQ2_0,
    BlockType::NVFP4,
];

/// Writes every model to `dir`, and returns their names with their paths.
fn write_all(dir: &Path) -> Vec<(String, PathBuf)> {
    let folders = FOLDERS.map(|(name, layout)| {
        write_one(&dir.join(name), layout);
        (name.to_owned(), dir.join(name))
    });
    let files = FILES.map(|block_type| {
        let name = format!("{block_type}.gguf");
        Tiny::new(ModelFamily::Qwen3, block_type).write(&dir.join(&name));
        (name.clone(), dir.join(name))
    });
    folders.into_iter().chain(files).collect()
}

/// Logits of the last position, and the NLL of each id of the prompt. `f64_matmul` is how far
/// products in float64 move a logit. Types that are decoded do not round activations to 8 bits, and
/// have the room for it all the same.
#[test]
fn types_with_scales_and_of_few_bits_have_the_logits_of_transformers() {
    if let Some(dir) = std::env::var_os("PACELINE_GOLDEN_MODELS") {
        write_all(Path::new(&dir)); // for the script
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let golden = golden_json("block_types.json");
    for (name, path) in write_all(dir.path()) {
        let json = &golden["models"][&name];
        let of = |what: &str| json["max_abs_diff"][what].as_f64().unwrap();
        check_classes(&path, json, 4.0 * of("f64_matmul"), of("act_q8"));
    }
}
