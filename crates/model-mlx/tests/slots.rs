//! Experts in fewer slots than there are experts: the answers of the whole model.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::sync::Arc;

use crate::common::compare::{argmax, relative_rms};
use crate::common::runner::Runner;
use crate::common::tiny::Tiny;
use crate::{apart, library, options, try_mlx};
use paceline_base::{BlockType, Bytes, KernelClass};
use paceline_model::{Error, LoadedModel, ModelFamily};
use paceline_model_mlx::MlxOptions;

/// Distance that another memory layout of the cache may make in f32.
const ROUNDED: f64 = 1e-5;

#[test]
fn experts_in_slots_answer_as_the_whole_model() {
    let test = "slots::experts_in_slots_answer_as_the_whole_model";
    let Some(library) = library(test) else {
        return;
    };
    if apart(test) {
        return;
    }
    for family in [ModelFamily::Qwen3Moe, ModelFamily::DeepSeek] {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("model.gguf");
        let tiny = Tiny::new(family, BlockType::Q8_0);
        tiny.write(&path);
        let load = |memory| {
            let options = options(&library, KernelClass::MlxF32);
            try_mlx(&path, MlxOptions { memory, ..options }).map(Arc::new)
        };
        let Err(Error::StreamMemory { needed, units, .. }) = load(Some(Bytes(1))) else {
            panic!("{} in a byte", family.name());
        };
        let whole = load(None).unwrap();
        let of = whole.config().experts().expect("experts");
        let slots = (of.count / 3).max(of.used);
        let memory = needed.0 + units.0 / of.used as u64 * (slots - of.used) as u64;
        let within = load(Some(Bytes(memory))).unwrap();
        let layers = whole.config().layers.iter();
        let layers = layers.filter(|layer| layer.experts.is_some()).count() as u64;
        let tokens = tiny.tokens(40, 3);
        let [mut expected, mut got] = [&whole, &within].map(|model| {
            let model: Arc<dyn LoadedModel> = Arc::clone(model) as _;
            Runner::of(model, 128)
        });
        let mut pairs: Vec<_> = expected
            .all(&tokens)
            .into_iter()
            .zip(got.all(&tokens))
            .collect();
        assert!(within.counts().expert_reads > 0);
        for at in 40..56 {
            let before = within.counts().expert_reads;
            let token = [tokens[at % 40]];
            pairs.push((expected.last(&token, at), got.last(&token, at)));
            let reads = within.counts().expert_reads - before;
            assert!(
                reads <= layers * of.used as u64,
                "{reads} reads of {layers} layers"
            );
        }
        for (expected, got) in &pairs {
            let far = relative_rms(got, expected);
            assert!(far < ROUNDED, "{}: {far:e}", family.name());
            assert_eq!(argmax(expected), argmax(got));
        }
        assert_eq!(whole.counts().expert_reads, 0);
    }
}
