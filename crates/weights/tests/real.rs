//! Real models, where they are on this machine. Counts: the packages named in
//! `shared/reference/models.md`, read with the `gguf` package of Python.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use paceline_weights::gguf::Gguf;

/// The model called `file`, or `None` with a line that says why not.
fn model(test: &str, file: &str) -> Option<Gguf> {
    let dir = std::env::var_os("PACELINE_TEST_MODELS")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/paceline/test-models")));
    let path = dir.unwrap_or_default().join(file);
    if path.exists() {
        return Some(Gguf::open(path).unwrap());
    }
    eprintln!("SKIPPED {test}: {} is not there", path.display());
    None
}

/// Number of tensors of each storage type. Reads every tensor.
fn types(model: &Gguf) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for info in model.tensors() {
        let tensor = model.tensor(info.name()).unwrap();
        assert_eq!(Some(tensor.bytes.len()), info.range().map(|r| r.len()));
        *counts.entry(tensor.block_type.name()).or_default() += 1;
    }
    counts
}

fn parameters(model: &Gguf) -> usize {
    model.tensors().map(|t| t.values()).sum()
}

#[test]
fn smollm2() {
    let Some(model) = model("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf") else {
        return;
    };
    assert_eq!(model.file_bytes().0, 98_362_432);
    assert_eq!(model.tensors().len(), 272);
    assert_eq!(
        types(&model),
        BTreeMap::from([("F32", 61), ("Q4_1", 210), ("Q8_0", 1)])
    );
    assert_eq!(parameters(&model), 134_515_008);
    let metadata = model.metadata();
    assert_eq!(metadata.str("general.architecture").unwrap(), "llama");
    assert_eq!(metadata.u32("llama.block_count").unwrap(), 30);
    assert_eq!(metadata.u32("llama.embedding_length").unwrap(), 576);
    assert_eq!(
        metadata
            .f32("llama.attention.layer_norm_rms_epsilon")
            .unwrap(),
        1e-5
    );
    assert_eq!(
        metadata.strs("tokenizer.ggml.tokens").unwrap().len(),
        49_152
    );
    assert_eq!(
        metadata.strs("tokenizer.ggml.merges").unwrap().len(),
        48_900
    );
    assert_eq!(metadata.str("tokenizer.chat_template").unwrap().len(), 368);
    assert_eq!(
        model.tensor("token_embd.weight").unwrap().shape,
        [49_152, 576]
    );
    assert!(!model.has("output.weight"));
}

#[test]
fn gemma_3_270m() {
    let Some(model) = model("gemma_3_270m", "gemma-3-270m-q4_k_m.gguf") else {
        return;
    };
    assert_eq!(model.file_bytes().0, 253_113_024);
    assert_eq!(model.tensors().len(), 236);
    let expected = [
        ("F32", 109),
        ("Q4_K", 27),
        ("Q5_0", 81),
        ("Q6_K", 9),
        ("Q8_0", 10),
    ];
    assert_eq!(types(&model), BTreeMap::from(expected));
    assert_eq!(parameters(&model), 268_098_176);
    let metadata = model.metadata();
    assert_eq!(metadata.str("general.architecture").unwrap(), "gemma3");
    assert_eq!(metadata.u32("gemma3.block_count").unwrap(), 18);
    assert_eq!(
        metadata.strs("tokenizer.ggml.tokens").unwrap().len(),
        262_144
    );
    assert_eq!(
        metadata.f32s("tokenizer.ggml.scores").unwrap().len(),
        262_144
    );
    assert_eq!(
        metadata.i32s("tokenizer.ggml.token_type").unwrap().len(),
        262_144
    );
    assert_eq!(metadata.opt_str("tokenizer.chat_template").unwrap(), None);
}
