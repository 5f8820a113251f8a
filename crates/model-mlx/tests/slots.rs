//! Limits of memory: experts in fewer slots than there are experts, and layers read from disk. The
//! answers are those of the whole model.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::common::compare::{argmax, relative_rms};
use crate::common::kernels;
use crate::common::places::Place;
use crate::common::runner::Runner;
use crate::common::tiny::Tiny;
use crate::{apart, furthest, of_leader, options, ranks_by};
use paceline_base::{BlockType, Bytes, KernelClass, Rank};
use paceline_model::{
    Config, Error, LoadedModel, MemoryLimit, ModelFamily, ModelSource, PackedFile, Split,
};
use paceline_model_mlx::{MlxModel, MlxOptions};

/// Distance that another memory layout of the cache may make in f32.
const ROUNDED: f64 = 1e-5;

/// The model in `home` within `memory`, in class `mlx-f32`, with a packed file there.
fn load(library: &Path, home: &Path, memory: Option<Bytes>) -> Result<Arc<MlxModel>, Error> {
    let source = ModelSource::open(&home.join("model.gguf")).unwrap();
    let split = Split::whole(&Config::read(&source).unwrap());
    part((library, home), (&split, Rank(0)), memory, &[]).map(Arc::new)
}

/// A rank of it that captures the input of layers.
fn part(
    (library, home): (&Path, &Path),
    (split, rank): (&Split, Rank),
    memory: Option<Bytes>,
    captures: &[usize],
) -> Result<MlxModel, Error> {
    let path = home.join("model.gguf");
    let source = Arc::new(ModelSource::open(&path).unwrap());
    let name = format!("{split} {}", rank.0);
    let packed = PackedFile::open(&home.join("packed"), &path, &name, "1");
    let options = MlxOptions {
        memory: memory.map(MemoryLimit::Units),
        captures: captures.to_vec(),
        ..options(library, KernelClass::MlxF32)
    };
    let options = (options, Some(packed));
    MlxModel::load(source, split, rank, options, kernels(), |_, _| {})
}

/// The bytes that a model needs at least, and those of its units among them.
fn least(library: &Path, home: &Path) -> [u64; 2] {
    match load(library, home, Some(Bytes(1))) {
        Err(Error::StreamMemory { needed, units, .. }) => [needed.0, units.0],
        other => panic!("in a byte: {:?}", other.map(drop)),
    }
}

/// A runner and the logits of `tokens`.
fn answer(model: &Arc<MlxModel>, tokens: &[u32]) -> (Runner, Vec<Vec<f32>>) {
    let model: Arc<dyn LoadedModel> = Arc::clone(model) as _;
    let mut runner = Runner::of(model, 128);
    let rows = runner.all(tokens);
    (runner, rows)
}

#[test]
fn experts_in_slots_answer_as_the_whole_model() {
    let test = "slots::experts_in_slots_answer_as_the_whole_model";
    let Some(library) = apart(test) else {
        return;
    };
    for family in [ModelFamily::Qwen3Moe, ModelFamily::DeepSeek] {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("model.gguf");
        let tiny = Tiny {
            experts: 9,
            ..Tiny::new(family, BlockType::Q8_0)
        };
        tiny.write(&path);
        let [needed, units] = least(&library, home.path());
        let whole = load(&library, home.path(), None).unwrap();
        let of = whole.config().experts().expect("experts");
        let slots = (of.count / 3).max(of.used);
        let memory = needed + units / of.used as u64 * (slots - of.used) as u64;
        let within = load(&library, home.path(), Some(Bytes(memory))).unwrap();
        let layers = whole.config().layers.iter();
        let layers = layers.filter(|layer| layer.experts.is_some()).count() as u64;
        let tokens = tiny.tokens(40, 3);
        let (mut expected, rows) = answer(&whole, &tokens);
        let (mut got, own) = answer(&within, &tokens);
        let mut pairs: Vec<_> = rows.into_iter().zip(own).collect();
        let reads = within.counts().expert_reads;
        assert!(
            reads > 0 && reads <= layers * of.count as u64,
            "{reads} of a prompt"
        );
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
        // A cut file ends the step that needs the missing part, not the process.
        drop((whole, expected));
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() / 8).unwrap();
        let error = got.try_all(&tokens).unwrap_err().to_string();
        assert!(error.contains("model.gguf"), "{error}");
    }
}

/// Dense layers, experts with biases, delta nets and latent attention, while the file is made and
/// when it is there. Each layer is read once a step. A damaged file is named, and made again.
#[test]
fn layers_on_disk_answer_as_the_whole_model() {
    let test = "slots::layers_on_disk_answer_as_the_whole_model";
    let Some(library) = apart(test) else {
        return;
    };
    for (family, block_type) in [
        (ModelFamily::Llama, BlockType::Q8_0),
        (ModelFamily::GptOss, BlockType::MXFP4_SPLIT),
        (ModelFamily::Qwen35, BlockType::F32),
    ] {
        let home = tempfile::tempdir().unwrap();
        let tiny = Tiny {
            layers: 24,
            ..Tiny::new(family, block_type)
        };
        tiny.write(&home.path().join("model.gguf"));
        let tokens = tiny.tokens(40, 3);
        let [needed, units] = least(&library, home.path());
        let memory = Some(Bytes(needed));
        let whole = load(&library, home.path(), None).unwrap();
        let (mut runner, mut expected) = answer(&whole, &tokens);
        (40..44).for_each(|at| expected.push(runner.last(&tokens[at - 40..at - 39], at)));
        // All layers pass through one block; then three blocks, and some layers stay.
        for more in [0, 3 * units / 2] {
            let within = load(&library, home.path(), Some(Bytes(needed + more))).unwrap();
            let reads = || within.stream_counts().unwrap().expect("layers on disk");
            let (mut runner, mut got) = answer(&within, &tokens);
            let before = reads();
            (40..44).for_each(|at| got.push(runner.last(&tokens[at - 40..at - 39], at)));
            assert!(got == expected, "{} {more}", family.name());
            let (all, layers) = (reads(), whole.config().layers.len() as u64);
            let steps = all.hits + all.misses - before.hits - before.misses;
            let is_right = (more == 0) == (steps == 4 * layers) && steps <= 4 * layers;
            assert!(is_right, "{}: {all:?}", family.name());
            assert!(all.read > before.read && all.most <= all.budget, "{all:?}");
        }
        for (harm, reason) in [("a changed bit", "other bytes"), ("a cut", "buffer")] {
            let within = load(&library, home.path(), memory).unwrap();
            let mut runner = Runner::of(Arc::clone(&within) as Arc<dyn LoadedModel>, 128);
            let path = packed_file(home.path()).expect("written");
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let half = file.metadata().unwrap().len() / 2;
            let mut byte = [0];
            file.read_exact_at(&mut byte, half).unwrap();
            match harm {
                "a cut" => file.set_len(half).unwrap(),
                _ => file.write_all_at(&[byte[0] ^ 1], half).unwrap(),
            }
            for _ in 0..2 {
                let error = runner.try_all(&tokens).unwrap_err().to_string();
                let is_named = error.contains(".packed") && error.contains(reason);
                assert!(is_named, "{harm}: {error}");
            }
            drop(runner);
            assert!((within as Arc<dyn LoadedModel>).unlinked().is_none());
            assert_eq!(
                packed_file(home.path()),
                None,
                "the next load writes another"
            );
        }
    }
}

/// Each rank in as little memory as it can: experts in slots, layers on disk.
#[test]
fn ranks_within_limits_answer_as_the_whole_model() {
    let test = "slots::ranks_within_limits_answer_as_the_whole_model";
    let Some(library) = apart(test) else {
        return;
    };
    for (family, layers, kinds) in [
        (
            ModelFamily::Qwen3Moe,
            2,
            &["tensor", "experts", "pipeline"][..],
        ),
        (ModelFamily::Llama, 24, &["tensor", "pipeline"]),
    ] {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("model.gguf");
        let tiny = Tiny {
            layers,
            experts: 9, // more than three on each rank
            ..Tiny::new(family, BlockType::Q8_0)
        };
        tiny.write(&path);
        let at = (&*library, home.path());
        let expected = crate::split(&path, "pipeline", &[KernelClass::MlxF32], &library);
        for kind in kinds {
            let loaded = Mutex::new(Vec::new());
            let load = |place: Place| {
                let own = (&place.split, place.rank);
                let needed = match part(at, own, Some(Bytes(1)), &[1, layers]) {
                    Err(Error::StreamMemory { needed, .. }) => needed,
                    other => panic!("in a byte: {:?}", other.map(drop)),
                };
                let model = part(at, own, Some(needed), &[1, layers]).unwrap();
                let model = Arc::new(model.link(place.links.unwrap()));
                loaded.lock().unwrap().push(Arc::clone(&model));
                model as Arc<dyn LoadedModel>
            };
            let rows = of_leader(ranks_by((&path, kind, 2), load));
            let far = furthest(&rows, &expected);
            println!("{} {kind}: {far:.1e}", family.name());
            assert!(far < 1e-4, "{} {kind}: {far:.1e}", family.name());
            for model in loaded.into_inner().unwrap() {
                let layers = model.stream_counts().unwrap().unwrap_or_default();
                let reads = model.counts().expert_reads + layers.read;
                assert!(reads > 0, "{} {kind}: a rank has all", family.name());
            }
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
