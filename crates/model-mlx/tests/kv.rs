//! Keys and values of 8 and 4 bits: near those of activations, the same bits for every step and
//! page, and refused by name.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::Path;
use std::sync::Arc;

use crate::common::compare::{largest, relative_rms};
use crate::common::runner::Runner;
use crate::common::tiny::Tiny;
use crate::{apart, options, try_mlx};
use paceline_base::{BlockType, KernelClass};
use paceline_model::{Error, LoadedModel, ModelFamily};
use paceline_model_mlx::{MlxModel, MlxOptions};
use paceline_tensor::KvType;

fn load(
    (library, path): (&Path, &Path),
    (class, kv): (KernelClass, Option<KvType>),
) -> Result<MlxModel, Error> {
    let options = options(library, class);
    try_mlx(path, MlxOptions { kv, ..options })
}

/// Windows, heads with gates in models of delta nets, and experts with sinks. A position's bits
/// depend on its own values alone: chunks and scattered pages give the same logits.
#[test]
fn quantised_keys_and_values_stay_near() {
    let test = "kv::quantised_keys_and_values_stay_near";
    let Some(library) = apart(test) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for family in [
        ModelFamily::Llama,
        ModelFamily::Gemma3,
        ModelFamily::GptOss,
        ModelFamily::Qwen35,
    ] {
        let tiny = Tiny::new(family, BlockType::Q8_0);
        tiny.write(&path);
        let tokens = tiny.tokens(150, 3);
        let of = |kv| load((&library, &path), (KernelClass::MlxF32, kv));
        let whole: Arc<dyn LoadedModel> = Arc::new(of(None).unwrap());
        let expected = Runner::of(whole, tokens.len()).all(&tokens);
        let mut distances = Vec::new();
        for kv in [KvType::Q8, KvType::Q4] {
            let model = match of(Some(kv)) {
                Err(Error::KvEngine { .. }) => {
                    println!("{} {}: refused", family.name(), kv.name());
                    continue;
                }
                model => Arc::new(model.unwrap()) as Arc<dyn LoadedModel>,
            };
            let rows = Runner::of(Arc::clone(&model), tokens.len()).all(&tokens);
            let far = rows.iter().zip(&expected).map(|(a, b)| relative_rms(a, b));
            let far = largest(far);
            println!("{} {}: {far:.1e}", family.name(), kv.name());
            distances.push(far);
            let mut scattered = Runner::on_pages(model, tokens.len(), vec![3, 0, 5]);
            scattered.last(&tokens[..100], 0);
            let row = scattered.last(&tokens[100..], 100);
            let far = relative_rms(&row, &rows[tokens.len() - 1]);
            assert!(far < 1e-4, "{} on other pages: {far:.1e}", family.name());
        }
        // Of random weights, whose attention and routes turn at once.
        if let [eight, four] = distances[..] {
            let is_near = eight > 0.0 && eight < 0.15 && eight < four && four < 1.2;
            assert!(is_near, "{}: {eight:.1e} {four:.1e}", family.name());
        }
    }
    Tiny::new(ModelFamily::DeepSeek, BlockType::Q8_0).write(&path);
    let error = load((&library, &path), (KernelClass::Mlx, Some(KvType::Q8)));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("q8: latent attention"), "{error}");
}
