//! The numerics rule: a logit depends on the model, the tokens before it and the kernel class, to
//! the bit. Never on the chunk, the batch, the threads, the instruction set or the pages.
//!
//! Expected bits are those of one sequence alone, in one step, on one thread of the fastest
//! instruction set. Everything else runs as a schedule on scrambled pages that hold NaN before;
//! random schedules print their seed when they fail.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::Path;
use std::sync::Arc;

use crate::common::runner::Runner;
use crate::common::schedule::{Chunks, Expected, Mix, Schedule, bits};
use crate::common::tiny::Tiny;
use crate::common::{load, test_model, write_toy};
use paceline_base::testing::long;
use paceline_base::{BlockType, KernelClass, SplitMix64};
use paceline_model::{Model, ModelFamily};
use paceline_tensor::{InstructionSet, Kernels};

/// A model file, a class, and sequences with the bits that must follow each of their tokens.
struct Case<'a> {
    title: String,
    path: &'a Path,
    class: KernelClass,
    sequences: Vec<(Vec<u32>, Expected)>,
}

impl<'a> Case<'a> {
    fn new(path: &'a Path, class: KernelClass, sequences: Vec<Vec<u32>>, title: &str) -> Self {
        let title = format!("{title} {class}");
        let mut case = Case {
            title,
            path,
            class,
            sequences: Vec::new(),
        };
        let model = case.load(*InstructionSet::available().last().unwrap(), 1);
        let longest = sequences.iter().map(Vec::len).max().unwrap();
        let mut alone = Runner::new(model, longest);
        for tokens in sequences {
            let expected = alone.all(&tokens).iter().map(|row| bits(row)).collect();
            case.sequences.push((tokens, expected));
        }
        case
    }

    fn load(&self, set: InstructionSet, threads: usize) -> Model {
        let kernels = Arc::new(Kernels::with_set(set, threads).unwrap());
        load(self.path, self.class, &kernels)
    }

    /// The first `len` tokens of the first sequence alone, in chunks.
    fn in_chunks(&self, model: &Model, len: usize, chunk: usize) {
        let mix = Mix {
            sequences: 1,
            chunks: Chunks::Always(chunk),
            evict_every: 0,
        };
        let (tokens, expected) = &self.sequences[0];
        let title = format!("{}, {}, chunks of {chunk}", self.title, describe(model));
        Schedule::new(model, mix, [(&tokens[..len], expected)], 1).run(&title);
    }

    /// Every instruction set on 1 to 3 threads: the first `len` tokens in chunks, then all
    /// sequences in batches. The portable set is a hundred times slower: `slow` tokens in one
    /// length of chunks.
    fn on_every_set(&self, slow: (usize, usize), len: usize, chunks: impl Fn(usize) -> Vec<usize>) {
        for (i, set) in InstructionSet::available().iter().enumerate() {
            let model = self.load(*set, 1 + i % 3);
            if *set == InstructionSet::Scalar {
                self.in_chunks(&model, slow.0, slow.1);
                continue;
            }
            for chunk in chunks(i) {
                self.in_chunks(&model, len, chunk);
            }
            self.among_strangers(&model, 3, i as u64);
        }
    }

    /// All sequences, up to `most` in a step.
    fn among_strangers(&self, model: &Model, most: usize, seed: u64) {
        let mix = Mix {
            sequences: most,
            chunks: Chunks::UpTo(30),
            evict_every: 5,
        };
        let sequences = self
            .sequences
            .iter()
            .map(|(tokens, expected)| (&tokens[..], expected));
        let on = describe(model);
        let title = format!("{}, {on}, batch of {most}, seed {seed}", self.title);
        Schedule::new(model, mix, sequences, seed).run(&title);
    }
}

fn describe(model: &Model) -> String {
    let kernels = model.kernels();
    format!(
        "{} on {} threads",
        kernels.instruction_set().name(),
        kernels.pool().threads()
    )
}

/// Sequences of `lens` tokens below `vocab`.
fn random_sequences(vocab: usize, lens: &[usize], seed: u64) -> Vec<Vec<u32>> {
    let mut random = SplitMix64::new(seed);
    let mut sequence = |&len| (0..len).map(|_| random.below(vocab) as u32).collect();
    lens.iter().map(&mut sequence).collect()
}

const FAMILIES: [(ModelFamily, BlockType); 4] = [
    (ModelFamily::Llama, BlockType::Q4_1),
    (ModelFamily::Qwen2, BlockType::Q8_0),
    (ModelFamily::Qwen3, BlockType::BF16),
    (ModelFamily::Gemma3, BlockType::Q6_K),
];

/// Families with states: short convolutions, Mamba 2 and gated delta nets in both orders of heads.
const DELTA_NETS: [(ModelFamily, BlockType, KernelClass); 5] = [
    (ModelFamily::Lfm2Moe, BlockType::Q4_K, KernelClass::Cpu),
    (ModelFamily::NemotronH, BlockType::Q8_0, KernelClass::Cpu),
    (ModelFamily::Qwen35, BlockType::Q4_K, KernelClass::Cpu),
    (ModelFamily::Qwen3Next, BlockType::BF16, KernelClass::CpuF32),
    (ModelFamily::Qwen35Moe, BlockType::Q8_0, KernelClass::CpuQ8),
];

/// Which rows an expert has in common changes nothing.
#[test]
fn experts_follow_the_rule() {
    let dir = tempfile::tempdir().unwrap();
    for (family, block_type) in [
        (ModelFamily::Mixtral, BlockType::Q4_K),
        (ModelFamily::Qwen2Moe, BlockType::Q5_0),
        (ModelFamily::Qwen3Moe, BlockType::BF16),
        (ModelFamily::GptOss, BlockType::MXFP4_SPLIT),
        (ModelFamily::Glm4Moe, BlockType::Q8_0),
        (ModelFamily::MiniMaxM2, BlockType::Q4_0),
        (ModelFamily::Dbrx, BlockType::Q5_0),
        (ModelFamily::DeepSeek, BlockType::Q4_1),
        (ModelFamily::DeepSeek, BlockType::BF16),
        (ModelFamily::Gemma4, BlockType::Q5_K),
    ] {
        let path = dir.path().join("experts.gguf");
        Tiny::new(family, block_type).write(&path);
        let sequences = random_sequences(300, &[200, 64, 90], 3);
        let title = format!("{family:?}");
        let case = Case::new(&path, KernelClass::Cpu, sequences, &title);
        let turn = |i: usize| if long() { 0..4 } else { i % 4..i % 4 + 1 };
        case.on_every_set((70, 7), 200, |i| [1, 3, 64, 200][turn(i)].to_vec());
    }
}

/// Cuts of a prompt, and states of other sequences in the batch, change nothing.
#[test]
fn delta_nets_follow_the_rule() {
    let dir = tempfile::tempdir().unwrap();
    for (family, block_type, class) in DELTA_NETS {
        let path = dir.path().join("delta.gguf");
        Tiny::new(family, block_type).write(&path);
        let sequences = random_sequences(300, &[200, 64, 130, 67], 3);
        let case = Case::new(&path, class, sequences, &format!("{family:?}"));
        case.on_every_set((70, 7), 200, |_| vec![1, 3, 63, 65, 200]);
    }
}

/// Layers that all differ.
#[test]
fn layers_that_differ_follow_the_rule() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("toy.gguf");
    write_toy(&path);
    for class in [KernelClass::Cpu, KernelClass::CpuF32] {
        let sequences = random_sequences(300, &[300, 64, 150, 129], 3);
        let case = Case::new(&path, class, sequences, "toy");
        case.on_every_set((130, 63), 300, |_| vec![1, 63, 64, 65, 200]);
    }
}

#[test]
fn chunks_threads_and_instruction_sets_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for (family, block_type) in FAMILIES {
        let path = dir.path().join(family.name());
        let tiny = Tiny::new(family, block_type);
        tiny.write(&path);
        let sequences = random_sequences(tiny.vocab, &[150], 2);
        let case = Case::new(&path, KernelClass::Cpu, sequences, family.name());
        for (set, threads) in configurations() {
            let model = case.load(set, threads);
            // A hundred times slower: as many tokens as fill a page and Gemma's window.
            let (len, chunks) = match set {
                InstructionSet::Scalar => (80, &[7, 80][..]),
                _ => (150, &[1, 7, 64, 150][..]),
            };
            let in_chunks = |chunk: &usize| case.in_chunks(&model, len, *chunk);
            chunks.iter().for_each(in_chunks);
        }
    }
}

/// Every instruction set on 1, 2 and 3 threads; the slow portable one on 3 only.
fn configurations() -> Vec<(InstructionSet, usize)> {
    let threads = |set| {
        if set == InstructionSet::Scalar {
            3..=3
        } else {
            1..=3
        }
    };
    let sets = InstructionSet::available().into_iter();
    sets.flat_map(|set| threads(set).map(move |n| (set, n)))
        .collect()
}

/// Lengths around pages of 64 and Gemma's window of 70, nine sequences.
const LENS: [usize; 9] = [150, 1, 63, 64, 65, 71, 97, 128, 30];

#[test]
fn strangers_and_evictions_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut fast = InstructionSet::available();
    if fast.len() > 1 {
        fast.retain(|set| *set != InstructionSet::Scalar); // a hundred times slower
    }
    for (i, (family, block_type)) in FAMILIES.into_iter().enumerate() {
        let path = dir.path().join(family.name());
        let tiny = Tiny::new(family, block_type);
        tiny.write(&path);
        let sequences = random_sequences(tiny.vocab, &LENS, 3);
        let case = Case::new(&path, KernelClass::Cpu, sequences, family.name());
        // The two fastest sets take turns.
        let models = [1, 2, 3].map(|threads| {
            let set = fast[fast.len() - 1 - (i + threads) % 2.min(fast.len())];
            case.load(set, threads)
        });
        for most in 1..=8 {
            case.among_strangers(&models[most % 3], most, most as u64);
        }
    }
}

/// Every storage type, families and configurations taking turns. By default a type has one class in
/// turn, in a long run all. `tensor` tests that kernels of a type agree on all instruction sets.
#[test]
fn every_storage_type_obeys() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let mut turns = configurations().into_iter().cycle();
    for (i, block_type) in BlockType::GGUF.into_iter().enumerate() {
        let tiny = Tiny::new(ModelFamily::DENSE[i % 4], block_type);
        tiny.write(&path);
        let classes = [KernelClass::Cpu, KernelClass::CpuQ8, KernelClass::CpuF32];
        let turn = if long() { 0..3 } else { i % 3..i % 3 + 1 };
        for class in classes[turn].iter().copied() {
            let sequences = random_sequences(tiny.vocab, &[80, 33, 65], i as u64);
            let title = format!("{} {block_type}", tiny.family.name());
            let case = Case::new(&path, class, sequences, &title);
            let (set, threads) = turns.next().expect("there is always scalar");
            case.among_strangers(&case.load(set, threads), 3, i as u64);
        }
    }
}

#[test]
fn smollm2_obeys() {
    const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let Some(path) = test_model("smollm2_obeys", FILE) else {
        return;
    };
    let sequences = random_sequences(49_152, &[140, 20, 66, 5], 4);
    let case = Case::new(&path, KernelClass::Cpu, sequences, "smollm2");
    // The tiny models take all threads; here each set takes one number in turn.
    let every = if long() { 1 } else { 4 };
    for (i, (set, threads)) in configurations().into_iter().enumerate().step_by(every) {
        let model = case.load(set, threads);
        if set == InstructionSet::Scalar {
            case.in_chunks(&model, 8, 5);
        } else {
            case.in_chunks(&model, 140, [1, 7, 64, 140][i % 4]);
            case.among_strangers(&model, 4, i as u64);
        }
    }
}
