//! Weights that stay on the disk: the bits of the whole model, within the budget, and errors that
//! name the file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    let source = ModelSource::open(&path).expect("a model");
    let split = Split::whole(&Config::read(&source).expect("a configuration"));
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
        let answer = |model: Arc<Model>| {
            let mut runner = Runner::of(model, 128);
            let mut all = runner.all(&tokens);
            (40..60).for_each(|at| all.push(runner.last(&[tokens[at % 40]], at)));
            let bits = all.iter().flatten().map(|x| x.to_bits());
            bits.collect::<Vec<u32>>()
        };
        let expected = answer(Arc::new(whole));
        for round in 0..2 {
            let model = load(home.path(), Some(memory));
            let model = model.unwrap_or_else(|error| panic!("{}: {error}", family.name()));
            let model = Arc::new(model);
            assert!(
                answer(Arc::clone(&model)) == expected,
                "{} {round}",
                family.name()
            );
            let counts = model.stream_counts().expect("streamed");
            assert!(counts.most <= memory.0 && counts.misses > 0, "{counts:?}");
            let has_experts = matches!(family, ModelFamily::Qwen3Moe | ModelFamily::DeepSeek);
            assert_eq!(counts.guesses > 0, has_experts, "{counts:?}");
        }
    }
}

/// The packed file below `home`.
fn packed_file(home: &Path) -> Option<PathBuf> {
    let folder = fs::read_dir(home.join("packed")).ok()?.next()?.ok()?;
    let files = fs::read_dir(folder.path()).ok()?.flatten();
    let mut files = files.map(|file| file.path());
    files.find(|file| file.extension().is_some_and(|it| it == "packed"))
}

/// A step of one row.
fn step(model: &Model) -> Result<(), Error> {
    let size = BatchSize {
        rows: 1,
        logit_rows: 1,
        sequences: 1,
        context: 64,
    };
    let mut cache = model.new_cache(size, 64)?;
    let sequence = BatchSequence::plain(&[1], 0, &[0], Logits::Last);
    let batch = [sequence];
    let batch = Batch::new(&batch);
    let mut workspace = Workspace::new(model, size);
    model.forward(&batch, &mut workspace, &mut cache).map(drop)
}

#[test]
fn failed_reads_and_too_little_memory_are_named() {
    let home = tempfile::tempdir().unwrap();
    let tiny = Tiny::new(ModelFamily::Llama, BlockType::Q8_0);
    tiny.write(&home.path().join("model.gguf"));
    let error = load(home.path(), Some(Bytes(1))).unwrap_err().to_string();
    assert!(error.contains("are needed"), "{error}");
    for (harm, expected) in [("a changed bit", "other bytes"), ("a cut", "buffer")] {
        let model = load(home.path(), Some(Bytes(1 << 30))).unwrap();
        let path = packed_file(home.path()).expect("written");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let half = file.metadata().unwrap().len() / 2;
        if harm == "a cut" {
            file.set_len(half).unwrap();
        } else {
            let mut byte = [0];
            file.read_exact_at(&mut byte, half).unwrap();
            file.write_all_at(&[byte[0] ^ 1], half).unwrap();
        }
        for _ in 0..2 {
            let error = step(&model).unwrap_err().to_string();
            let is_named = error.contains(".packed") && error.contains(expected);
            assert!(is_named, "{harm}: {error}");
        }
        assert_eq!(
            packed_file(home.path()),
            None,
            "the next load writes another"
        );
    }
    step(&load(home.path(), Some(Bytes(1 << 30))).unwrap()).unwrap();
}
