//! Prediction layers of tiny models against `transformers`' layers.
//!
//! `scripts/golden/mtp_tiny.py` made the models and their golden values, `mtp_gguf.py` the same
//! layers as GGUF files.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_tensor::Kernels;
use paceline_weights::safetensors::Safetensors;

use super::NextTokenHead;
use crate::eagle::tests::{ALONE, HeadPass, golden, tokens, values};
use crate::{Config, DraftHead as _, ModelSource};

#[test]
fn prediction_layers_give_the_logits_of_transformers() {
    let names = ["deepseek-v3-bf16", "glm4moe-bf16", "qwen3next-bf16"];
    for (name, end) in names
        .into_iter()
        .flat_map(|name| [(name, ""), (name, ".gguf")])
    {
        let source = ModelSource::open(&golden(&format!("{name}-mtp{end}"))).unwrap();
        let config = Config::read(&source).unwrap();
        let kernels = Arc::new(Kernels::new(2).unwrap());
        let head = NextTokenHead::load(&source, KernelClass::CpuF32, kernels).unwrap();
        let head = head.unwrap();
        assert_eq!(head.captures(), [config.layers.len()], "{name}");
        let file = golden(&format!("{name}-mtp.golden.safetensors"));
        let file = Safetensors::open(file).unwrap();
        let (captured, logits) = (values(&file, "captured"), values(&file, "logits"));
        let tokens = tokens(&file, "tokens");
        let (rows, c, vocab) = (tokens.len() - 1, config.width, config.vocab);
        let mut compute = Arc::new(head).reserve(rows, 1, 128).unwrap();
        let pass = HeadPass {
            tokens: &tokens,
            captured: (&captured, c),
            logits: (&logits, vocab),
            chained: &values(&file, "chained.logits"),
        };
        pass.check(&mut *compute, |compute| {
            let mut all = vec![0.0; vocab];
            compute.write_logits(0, ALONE, &mut all);
            all
        });
    }
}
