//! Weights that stay on the disk: the bits of the whole model, within the budget, and errors that
//! name the file.

use std::fs;
use std::path::Path;

use crate::common::kernels;
use crate::common::runner::Runner;
use crate::common::tiny::Tiny;
use paceline_base::{BlockType, Bytes, KernelClass, Rank};
use paceline_model::{
    Batch, BatchSequence, BatchSize, Config, Error, LoadOptions, Logits, MemoryLimit, Model,
    ModelFamily, ModelSource, PackedFile, Split, Workspace,
};

fn load(home: &Path, memory: Option<Bytes>) -> Result<Model, Error> {
    let path = home.join("model.gguf");
    let source = ModelSource::open(&path).unwrap();
    let split = Split::whole(&Config::read(&source).unwrap());
    let options = LoadOptions {
        class: KernelClass::Cpu,
    };
    let Some(memory) = memory else {
        return Model::load(&source, options, kernels(), |_, _| {});
    };
    let packed = PackedFile::open(&home.join("packed"), &path, "whole", "1");
    let part = (&split, Rank(0));
    Model::load_streamed(
        &source,
        part,
        (options, packed),
        MemoryLimit::Units(memory),
        kernels(),
        |_, _| {},
    )
}

/// Layers and experts, while the file is made and when it is there.
#[test]
fn streamed_weights_give_the_bits_of_the_whole_model() {
    for (family, share) in [
        (ModelFamily::Llama, 75),
        (ModelFamily::Gemma3, 60),
        (ModelFamily::Qwen3Moe, 60),
        (ModelFamily::DeepSeek, 70),
    ] {
        let home = tempfile::tempdir().unwrap();
        let tiny = Tiny::new(family, BlockType::Q8_0);
        tiny.write(&home.path().join("model.gguf"));
        let tokens = tiny.tokens(40, 3);
        let whole = load(home.path(), None).unwrap();
        let memory = Bytes(whole.weight_bytes().0 * share / 100);
        let answer = |model: Model| {
            let mut runner = Runner::new(model, 128);
            let mut all = runner.all(&tokens);
            (40..60).for_each(|at| all.push(runner.last(&[tokens[at % 40]], at)));
            let bits = all.iter().flatten().map(|x| x.to_bits());
            bits.collect::<Vec<u32>>()
        };
        let expected = answer(whole);
        for round in 0..2 {
            let model = load(home.path(), Some(memory));
            let model = model.unwrap_or_else(|error| panic!("{}: {error}", family.name()));
            let counts = model.stream_counts().expect("streamed");
            assert!(counts.most <= memory.0);
            assert!(answer(model) == expected, "{} {round}", family.name());
        }
    }
}

#[test]
fn a_damaged_file_and_too_little_memory_are_named() {
    let home = tempfile::tempdir().unwrap();
    let tiny = Tiny::new(ModelFamily::Llama, BlockType::Q8_0);
    tiny.write(&home.path().join("model.gguf"));
    let error = load(home.path(), Some(Bytes(1))).unwrap_err().to_string();
    assert!(error.contains("are needed"), "{error}");
    let folder = fs::read_dir(home.path().join("packed")).unwrap().next();
    let folder = folder.unwrap().unwrap().path();
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    let file = files
        .into_iter()
        .find(|file| file.extension().is_some_and(|it| it == "packed"));
    let file = file.expect("made");
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let model = load(home.path(), Some(Bytes(1 << 30))).unwrap();
    let size = BatchSize {
        rows: 1,
        logit_rows: 1,
        sequences: 1,
        context: 64,
    };
    let mut cache = model.new_cache(size, 64).unwrap();
    let mut workspace = Workspace::new(&model, size);
    let sequence = BatchSequence {
        tokens: &[1],
        position: 0,
        pages: &[0],
        windows: &[],
        adapter: 0,
        logits: Logits::Last,
    };
    let batch = Batch {
        sequences: &[sequence],
    };
    let error = model
        .forward(&batch, &mut workspace, &mut cache)
        .unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains(".packed") && error.contains("other bytes"),
        "{error}"
    );
}
