//! Prediction layers of tiny models against `transformers`' layers.
//!
//! `scripts/golden/mtp_tiny.py` made the models and their golden values.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_tensor::Kernels;
use paceline_weights::safetensors::Safetensors;

use super::NextTokenHead;
use crate::eagle::tests::{check, golden, tokens, values};
use crate::{Config, DraftHead as _, HeadRows, ModelSource};

/// Seen up to 2e-6.
const TOLERANCE: f32 = 1e-4;

/// A pass in parts of several lengths, over a page's border, and one more token with the layer's
/// own output as its feature.
#[test]
fn prediction_layers_give_the_logits_of_transformers() {
    for name in ["deepseek-v3-bf16", "glm4moe-bf16", "qwen3next-bf16"] {
        let source = ModelSource::open(&golden(&format!("{name}-mtp"))).unwrap();
        let config = Config::read(&source).unwrap();
        let kernels = Arc::new(Kernels::new(2).unwrap());
        let head = NextTokenHead::load(&source, KernelClass::CpuF32, kernels).unwrap();
        let head = head.unwrap();
        assert_eq!(head.captures(), [config.layers.len()], "{name}");
        let file = golden(&format!("{name}-mtp.golden.safetensors"));
        let file = Safetensors::open(file).unwrap();
        let (captured, logits) = (values(&file, "captured"), values(&file, "logits"));
        let tokens = tokens(&file);
        let (rows, c, vocab) = (tokens.len() - 1, config.width, config.vocab);
        let mut compute = Arc::new(head).reserve(rows, 1, 128).unwrap();
        let (mut got, mut from) = (vec![0.0; vocab], 0);
        for end in [1, 3, 66, rows] {
            let part = HeadRows {
                tokens: &tokens[from..end],
                features: &captured[from * c..end * c],
                position: from,
                pages: &[1, 0],
            };
            compute.forward(&[part], true).unwrap();
            compute.write_logits(0, &mut got);
            check(&got, &logits[(end - 1) * vocab..end * vocab], TOLERANCE);
            from = end;
        }
        let features = compute.output(0).to_vec();
        let part = HeadRows {
            tokens: &tokens[rows..],
            features: &features,
            position: rows,
            pages: &[1, 0],
        };
        compute.forward(&[part], false).unwrap();
        compute.write_logits(0, &mut got);
        check(&got, &values(&file, "chained.logits"), TOLERANCE);
    }
}
