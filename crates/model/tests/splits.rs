//! The same bits from any number of ranks. Splits of every family run over threads, each rank with
//! a shard of its own, against one rank that has it all.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

mod arriving;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::common::folders::token_keys;
use crate::common::places::{PATIENCE, Place, places};
use crate::common::scaled::{Layout, write};
use crate::common::schedule::bits;
use crate::common::tiny::Tiny;
use crate::common::toy::config_of;
use crate::common::{golden, test_model, write_toy};
use paceline_base::testing::long;
use paceline_base::{BlockType, KernelClass, Rank, SplitMix64};
use paceline_comm::Deadline;
use paceline_model::{
    Adapter, AdapterId, AdapterPair, Batch, BatchSequence, BatchSize, Config, Error, FollowOutcome,
    LayerRole, Links, LoadOptions, Logits, Model, ModelFamily, ModelSource, Nth, Split, StageKind,
    TopLogits, Workspace, split,
};
use paceline_tensor::{Kernels, KvType, PAGE};

/// Steps of two sequences: a long prompt in two chunks, then rows of both.
const STEPS: [[usize; 2]; 5] = [[70, 3], [30, 0], [1, 1], [1, 90], [1, 1]];

/// The wanted logits of the sequences, but for tests of that.
const WANTED: [Logits; 2] = [Logits::Last, Logits::All];

/// Input of every rank of a test.
#[derive(Clone, Copy)]
struct Case<'a> {
    path: &'a Path,
    class: KernelClass,
    tokens: &'a [Vec<u32>; 2],
    steps: &'a [[usize; 2]],
    overlap: bool,
    /// Storage of keys and values other than that of the class.
    kv: Option<KvType>,
    /// One for each sequence, or none at all.
    adapters: &'a [Adapter],
    /// Copies that the ranks of a split load in place of the file, by rank.
    holed: &'a [arriving::HoledModel],
}

impl<'a> Case<'a> {
    /// Class `cpu` without overlap and adapters.
    fn new(path: &'a Path, tokens: &'a [Vec<u32>; 2]) -> Self {
        Self {
            path,
            class: KernelClass::Cpu,
            tokens,
            steps: &STEPS,
            overlap: false,
            kv: None,
            adapters: &[],
            holed: &[],
        }
    }
}

/// A tiny model in a folder of its own, and tokens for it.
struct File {
    _dir: tempfile::TempDir,
    path: PathBuf,
    tiny: Tiny,
    tokens: [Vec<u32>; 2],
}

impl File {
    fn new(family: ModelFamily, block_type: BlockType) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        let tiny = Tiny::new(family, block_type);
        tiny.write(&path);
        Self {
            _dir: dir,
            path,
            tiny,
            tokens: tokens(tiny.vocab),
        }
    }

    fn llama() -> Self {
        Self::new(ModelFamily::Llama, BlockType::Q8_0)
    }

    fn case(&self) -> Case<'_> {
        Case::new(&self.path, &self.tokens)
    }

    fn config(&self) -> Config {
        Config::read(&ModelSource::open(&self.path).unwrap()).unwrap()
    }

    fn split(&self, kind: &str, ranks: u32) -> Split {
        Split::plan(&self.config(), kind.parse().unwrap(), ranks, &[]).unwrap()
    }
}

/// Results of a split.
struct Ran {
    /// The leader's.
    logits: Vec<Vec<u32>>,
    /// Of weights, by rank.
    bytes: Vec<u64>,
    /// By all ranks.
    sent: u64,
}

impl Case<'_> {
    fn size(&self) -> BatchSize {
        BatchSize {
            rows: 384,
            logit_rows: 192,
            sequences: 2,
            context: 8 * PAGE,
        }
    }

    fn load(&self, place: Place) -> Model {
        let Place { split, rank, links } = place;
        let holed = self.holed.get(rank.0 as usize);
        let whole = || ModelSource::open(self.path).unwrap();
        let source = holed.map_or_else(whole, arriving::HoledModel::open);
        let kernels = Arc::new(Kernels::new(1).unwrap());
        let options = LoadOptions { class: self.class };
        let config = config_of(&source).unwrap();
        let model = Model::load_config(&source, config, &split, rank, options, kernels, |_, _| {});
        let model = model.unwrap();
        let model = match model.lacks_token_keys() {
            true => model.with_token_keys(token_keys()).unwrap(),
            false => model,
        };
        let model = match self.kv {
            Some(kv) => model.with_kv(kv),
            None => model,
        };
        let model = model.with_adapters(&source, self.adapters).unwrap();
        match links {
            Some(mut links) => {
                links.overlap = self.overlap;
                model.link(links)
            }
            None => model,
        }
    }

    /// Leads through all steps; the bits of the logits of every step.
    fn lead(&self, model: &Model) -> Result<Vec<Vec<u32>>, Error> {
        self.lead_for(model, WANTED)
    }

    /// As [`lead`](Self::lead), with what is wanted of each sequence.
    fn lead_for(&self, model: &Model, wanted: [Logits; 2]) -> Result<Vec<Vec<u32>>, Error> {
        let mut ws = Workspace::new(model, self.size());
        let mut cache = model.whole_cache(16 * PAGE).unwrap();
        let pages = [[0, 2, 4, 6, 8, 10, 12, 14], [15, 13, 11, 9, 7, 5, 3, 1]];
        let mut done = [0; 2];
        let mut all = Vec::new();
        for step in self.steps {
            let sequence = |s: usize| BatchSequence {
                tokens: &self.tokens[s][done[s]..done[s] + step[s]],
                position: done[s],
                pages: &pages[s],
                windows: &[],
                adapter: if self.adapters.is_empty() {
                    0
                } else {
                    s as u32 + 1
                },
                logits: wanted[s],
            };
            let sequences: Vec<_> = (0..2).filter(|s| step[*s] > 0).map(sequence).collect();
            let batch = Batch::new(&sequences);
            let rows = model.forward(&batch, &mut ws, &mut cache)?;
            let vocab = model.config().vocab;
            all.push(
                (0..rows)
                    .flat_map(|i| bits(ws.logits_mut(i, vocab)))
                    .collect(),
            );
            (0..2).for_each(|s| done[s] += step[s]);
        }
        Ok(all)
    }

    /// Follows through all steps; an error when the leader ends before.
    fn follow(&self, model: &Model) -> Result<(), Error> {
        let mut ws = Workspace::new(model, self.size());
        let mut cache = model.whole_cache(16 * PAGE).unwrap();
        let mut steps = 0;
        while steps < self.steps.len() {
            steps += usize::from(model.follow(&mut ws, &mut cache)? == FollowOutcome::Step);
        }
        Ok(())
    }

    fn alone(&self) -> (Vec<Vec<u32>>, u64) {
        let config = config_of(&ModelSource::open(self.path).unwrap()).unwrap();
        let model = self.load(Place {
            split: Split::whole(&config),
            rank: Rank(0),
            links: None,
        });
        (self.lead(&model).unwrap(), model.weight_bytes().0)
    }

    fn split(&self, split: &Split) -> Ran {
        self.split_for(split, WANTED)
    }

    fn split_for(&self, split: &Split, wanted: [Logits; 2]) -> Ran {
        let config = config_of(&ModelSource::open(self.path).unwrap()).unwrap();
        std::thread::scope(|scope| {
            let rank = |place| {
                scope.spawn(move || {
                    let model = self.load(place);
                    let logits = if model.shard().leads() {
                        Some(self.lead_for(&model, wanted).unwrap())
                    } else {
                        self.follow(&model).unwrap();
                        None
                    };
                    // A rank that leaves ends the group for those that still compute.
                    let links = model.links().unwrap();
                    let sent = links.sent().0;
                    let deadline = Deadline::at(Instant::now() + PATIENCE);
                    links.world.barrier(deadline).unwrap();
                    (logits, model.weight_bytes().0, sent)
                })
            };
            let threads: Vec<_> = places(&config, split).into_iter().map(rank).collect();
            let ran = threads.into_iter().map(|thread| thread.join().unwrap());
            let ran: Vec<_> = ran.collect();
            Ran {
                bytes: ran.iter().map(|(_, bytes, _)| *bytes).collect(),
                sent: ran.iter().map(|(.., sent)| sent).sum(),
                logits: ran.into_iter().find_map(|(logits, ..)| logits).unwrap(),
            }
        })
    }

    fn check(&self, kinds: &[(&str, u32, &[u32])]) {
        let config = config_of(&ModelSource::open(self.path).unwrap()).unwrap();
        let (expected, whole) = self.alone();
        for (kind, ranks, shares) in kinds {
            let what = format!("{} {kind} over {ranks} by {shares:?}", self.path.display());
            let split = Split::plan(&config, kind.parse().unwrap(), *ranks, shares).unwrap();
            let Ran { logits, bytes, .. } = self.split(&split);
            assert_eq!(logits, expected, "{what}");
            // Toy models hold parts of blocks twice; with real shapes only replicated KV heads are.
            let (sum, most) = (bytes.iter().sum::<u64>(), bytes.iter().max().unwrap());
            let lean = whole < 50_000_000 || sum as f64 <= 1.1 * whole as f64;
            assert!(
                lean && (whole < 50_000_000 || *ranks == 1 || *most < whole),
                "{what}: {bytes:?} of {whole}"
            );
        }
    }
}

fn tokens(vocab: usize) -> [Vec<u32>; 2] {
    [1, 2].map(|seed| {
        let mut random = SplitMix64::new(seed);
        (0..330).map(|_| random.below(vocab) as u32).collect()
    })
}

const TINY_SPLITS: [(&str, u32, &[u32]); 10] = [
    ("tensor", 1, &[]),
    ("tensor", 2, &[]),
    ("tensor", 2, &[3, 1]),
    ("tensor", 3, &[]),
    ("tensor", 4, &[]),
    ("pipeline", 2, &[]),
    ("pipeline", 2, &[1, 5]),
    ("2x2", 4, &[]),
    ("3x2", 6, &[1, 2, 1, 1, 1, 1]),
    ("auto", 3, &[]),
];

/// Of models with seven experts.
const EXPERT_SPLITS: [(&str, u32, &[u32]); 2] = [("experts", 2, &[]), ("experts", 3, &[1, 2, 1])];

/// Every second split, the first ones where `at` is even; all of them in a long run.
fn in_turns(at: usize) -> Vec<(&'static str, u32, &'static [u32])> {
    let all = TINY_SPLITS.into_iter().enumerate();
    let chosen = all.filter(|(i, _)| long() || i % 2 == at % 2);
    chosen.map(|(_, split)| split).collect()
}

/// A family, its storage type, the class, and whether halves of a step overlap.
type FamilyCase = (ModelFamily, BlockType, KernelClass, bool);

/// Checks each case with these steps over every second split, and over `more` by its place.
fn check_families(
    cases: &[FamilyCase],
    steps: &[[usize; 2]],
    more: impl Fn(usize) -> Vec<(&'static str, u32, &'static [u32])>,
) {
    for (at, (family, block_type, class, overlap)) in cases.iter().copied().enumerate() {
        let file = File::new(family, block_type);
        let case = Case {
            class,
            steps,
            overlap,
            ..file.case()
        };
        case.check(&[in_turns(at), more(at)].concat());
    }
}

/// Families and storage types: blocks of 32 and of 256, which heads cut within, and floats.
#[test]
fn every_family_gives_the_bits_of_one_rank() {
    use {BlockType as B, KernelClass as C, ModelFamily as F};
    let cases = [
        (F::Llama, B::Q4_1, C::Cpu, false),
        (F::Llama, B::Q4_K, C::CpuQ8, false),
        (F::Qwen2, B::Q6_K, C::Cpu, false),
        (F::Qwen3, B::BF16, C::Cpu, false),
        (F::Llama, B::BF16, C::CpuQ8, false),
        (F::Gemma3, B::Q5_K, C::Cpu, false),
        (F::Gemma3, B::Q8_0, C::CpuF32, false),
        (F::Gemma2, B::Q8_0, C::Cpu, false),
        (F::Mistral, B::Q8_0, C::Cpu, false),
        (F::SmolLm3, B::Q4_K, C::Cpu, false),
        (F::Granite, B::Q6_K, C::Cpu, false),
        (F::Olmo2, B::BF16, C::Cpu, false),
        (F::Phi3, B::Q5_K, C::Cpu, false),
    ];
    check_families(&cases, &STEPS, |_| Vec::new());
}

/// Rows that attend to the 24 positions of more than 100 that an indexer chooses. Splits and chunks
/// of other lengths have the last row's logits in common.
#[test]
fn selections_give_the_bits_of_one_rank() {
    let cuts: [(&str, u32, &[u32]); 4] = [
        ("tensor", 2, &[]),
        ("tensor", 4, &[]),
        ("pipeline", 2, &[2, 1]),
        ("2x2", 4, &[2, 2, 1, 1]),
    ];
    let folders = [
        ("glm-dsa-sparse-bf16", 4),
        ("deepseek-v4-bf16", 4),
        ("deepseek-v41-ngrams-bf16", 4),
        ("qwen4-ngrams-bf16", 4),
    ];
    let tokens = tokens(300);
    for (name, cut) in folders {
        let path = golden(&format!("hf/{name}"));
        let case = Case::new(&path, &tokens);
        case.check(&cuts[..cut]);
        let ends = |steps: &'static [[usize; 2]]| {
            let (logits, _) = Case { steps, ..case }.alone();
            logits.last().cloned()
        };
        let alike = ends(&[[70, 3], [33, 0]]);
        assert_eq!(ends(&[[20, 3], [10, 0], [73, 0]]), alike, "{name}");
        assert_eq!(ends(&[[103, 0]]), alike, "{name}");
    }
}

/// Every logit that may be among the 5 largest has the bits of one rank, over 1 to 4 ranks. Others
/// may be left out, and are not where nearly all may be among them.
#[test]
fn the_largest_logits_are_those_of_one_rank() {
    let file = File::llama();
    let case = file.case();
    let vocab = file.tiny.vocab;
    let (expected, _) = case.alone();
    for (kind, ranks) in [
        ("tensor", 1),
        ("tensor", 2),
        ("tensor", 3),
        ("tensor", 4),
        ("2x2", 4),
    ] {
        let split = file.split(kind, ranks);
        for (within, is_cut) in [(-10, ranks > 1), (20, false)] {
            let top = Logits::Top(TopLogits { n: 5, within });
            let Ran { logits, .. } = case.split_for(&split, [top, top.of_all_rows()]);
            for (got, expected) in logits.iter().zip(&expected) {
                assert_eq!(got.len(), expected.len());
                let rows = got.chunks(vocab).zip(expected.chunks(vocab));
                for (row, whole) in rows {
                    let left_out = left_out(row, whole, 5);
                    let is_any = left_out.is_some_and(|n| n > 0);
                    assert!(
                        left_out.is_some() && is_any == is_cut,
                        "{kind} over {ranks} within 2^{within}: {left_out:?} left out"
                    );
                }
            }
        }
    }
}

/// A random adapter of all matrices of a model, experts' too, or of those whose inputs ranks share.
fn adapter(config: &Config, rank: usize, all: bool) -> Adapter {
    let mut random = SplitMix64::new(rank as u64);
    let matrices = |layer: usize| {
        let (width, shape) = (config.width, &config.layers[layer]);
        let [q, kv] = [shape.heads, shape.kv_heads].map(|heads| heads * shape.head_dim);
        let sides = |parts: [LayerRole; 3], ffn: usize| {
            let [gate, up, down] = parts;
            [(down, width, ffn), (gate, ffn, width), (up, ffn, width)]
        };
        let mut found = vec![(LayerRole::AttentionOutput, width, q)];
        match shape.experts {
            None => found.extend(sides(
                [LayerRole::Gate, LayerRole::Up, LayerRole::Down],
                shape.ffn,
            )),
            Some(of) => {
                let count = of.count;
                let widths = (0..count).map(|_| of.width).chain([of.shared]);
                let each = widths.filter(|ffn| *ffn > 0).enumerate();
                found.extend(each.flat_map(|(index, ffn)| {
                    sides(LayerRole::of_expert(Nth { index, of: count }), ffn)
                }));
            }
        }
        found.extend([
            (LayerRole::Query, q, width),
            (LayerRole::Key, kv, width),
            (LayerRole::Value, kv, width),
        ]);
        found.truncate(if all { usize::MAX } else { 2 });
        found
    };
    let mut values = |n: usize| -> Vec<f32> {
        let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        (0..n).map(|_| 0.1 * unit(random.next())).collect()
    };
    let pairs = (0..config.layers.len()).flat_map(|layer| {
        let matrices = matrices(layer).into_iter();
        matrices.map(move |matrix| (layer, matrix))
    });
    let pairs = pairs.map(|(layer, (part, out, inputs))| AdapterPair {
        layer,
        part,
        rank,
        a: values(rank * inputs),
        b: values(out * rank),
    });
    Adapter {
        id: AdapterId {
            name: format!("of rank {rank}"),
            digest: [rank as u8; 32],
        },
        scale: 1.5,
        pairs: pairs.collect(),
    }
}

/// Two sequences with an adapter each in one batch: over splits as on one rank, and each as alone.
#[test]
fn adapters_give_the_bits_of_one_rank() {
    for (at, (family, block_type, class)) in [
        (ModelFamily::Llama, BlockType::Q4_1, KernelClass::Cpu),
        (ModelFamily::Qwen3, BlockType::BF16, KernelClass::CpuQ8),
        (ModelFamily::Gemma3, BlockType::Q8_0, KernelClass::CpuF32),
        (ModelFamily::Qwen2Moe, BlockType::Q8_0, KernelClass::Cpu),
        (
            ModelFamily::GptOss,
            BlockType::MXFP4_SPLIT,
            KernelClass::CpuF32,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let file = File::new(family, block_type);
        let (tiny, config) = (&file.tiny, file.config());
        let adapters = [adapter(&config, 3, true), adapter(&config, 16, at == 1)];
        let case = Case {
            class,
            adapters: &adapters,
            ..file.case()
        };
        let mut splits = in_turns(at);
        if config.experts().is_some() {
            splits.push(("experts", 2, &[]));
        }
        case.check(&splits);
        let (mixed, _) = case.alone();
        let first = STEPS.map(|[rows, _]| [rows, 0]);
        let alone = |adapters| Case {
            steps: &first,
            adapters,
            ..case
        };
        let (with, _) = alone(&adapters).alone();
        let (base, _) = alone(&[]).alone();
        for (step, mixed) in mixed.iter().enumerate() {
            assert_eq!(mixed[..tiny.vocab], with[step], "{} {step}", family.name());
            assert_ne!(with[step], base[step], "{} {step}", family.name());
        }
    }
}

/// Halves of a step that overlap, one within the sequence of the other adapter.
#[test]
fn adapters_give_the_same_bits_in_overlapped_halves() {
    let file = File::llama();
    let case = Case {
        steps: &[[230, 90], [1, 1]],
        overlap: true,
        adapters: &[
            adapter(&file.config(), 4, true),
            adapter(&file.config(), 5, false),
        ],
        ..file.case()
    };
    case.check(&[("tensor", 2, &[])]);
}

#[test]
fn adapters_of_another_shape_are_refused_by_name() {
    let file = File::llama();
    let config = file.config();
    let good = adapter(&file.config(), 4, true);
    good.check(&config).unwrap();
    let refused = |change: fn(&mut AdapterPair), said: &str| {
        let mut bad = good.clone();
        change(&mut bad.pairs[0]);
        let error = bad.check(&config).unwrap_err().to_string();
        assert!(error.starts_with("adapter of rank 4: "), "{error}");
        assert!(error.contains(said), "{error}");
    };
    refused(|pair| pair.layer = 2, "has no such matrix");
    refused(|pair| pair.part = LayerRole::FfnNorm, "has no such matrix");
    refused(|pair| pair.rank = 0, "of rank 0");
    refused(|pair| pair.part = LayerRole::Down, "matrix is [256, 512]");
    refused(|pair| pair.b[7] = f32::NAN, "infinite or NaN");
}

/// How many logits of the `whole` row `got` lacks; `None` if one of the `n` largest is among them,
/// or others have other bits.
fn left_out(got: &[u32], whole: &[u32], n: usize) -> Option<usize> {
    let value = |bits: &u32| f32::from_bits(*bits);
    let lacks = |(got, logit): &(&u32, &u32)| got != logit;
    let lacking: Vec<_> = got.iter().zip(whole).filter(lacks).collect();
    let is_small = |logit: &u32| whole.iter().filter(|x| value(x) > value(logit)).count() >= n;
    let is_right = |(got, logit): &(&u32, &u32)| value(got).is_nan() && is_small(logit);
    lacking.iter().all(is_right).then_some(lacking.len())
}

/// Experts are shared over the ranks of a stage; some ranks of many have none of a layer. By
/// default each family has one storage type.
#[test]
fn experts_give_the_bits_of_one_rank() {
    use {BlockType as B, KernelClass as C, ModelFamily as F};
    let mut cases = vec![
        (F::Mixtral, B::Q4_K, C::Cpu, true),
        (F::Qwen2Moe, B::Q8_0, C::CpuQ8, false),
        (F::Qwen3Moe, B::Q6_K, C::Cpu, true),
        (F::Qwen3Moe, B::F16, C::CpuF32, false),
        (F::GptOss, B::MXFP4_SPLIT, C::Cpu, true),
        (F::Dbrx, B::Q4_1, C::Cpu, false),
        (F::Glm4Moe, B::Q5_K, C::CpuQ8, true),
        (F::MiniMaxM2, B::Q4_K, C::Cpu, false),
        (F::MiniMaxM2, B::F32, C::CpuF32, true),
        (F::DeepSeek, B::Q8_0, C::Cpu, false),
        (F::DeepSeek, B::Q5_1, C::CpuQ8, true),
        (F::DeepSeek, B::F16, C::CpuF32, false),
        (F::Gemma4, B::Q4_K, C::Cpu, true),
        (F::Gemma4, B::BF16, C::CpuF32, false),
    ];
    if long() {
        let others = cases.clone().into_iter();
        cases.extend(others.map(|(family, held, class, overlap)| (family, held, class, !overlap)));
    } else {
        cases.dedup_by_key(|case| case.0.name());
    }
    let more = |at: usize| vec![("tensor", 8, &[][..]), EXPERT_SPLITS[at % 2]];
    check_families(&cases, &[[200, 3], [30, 0], [1, 1], [90, 150]], more);
}

/// Where ranks share the experts alone, nothing is exchanged for the attention.
#[test]
fn ranks_that_share_experts_exchange_once_a_layer() {
    let file = File::new(ModelFamily::Qwen3Moe, BlockType::Q8_0);
    let config = file.config();
    let (rows, steps) = (70, [[70, 0]]);
    let case = Case {
        steps: &steps,
        ..file.case()
    };
    let [tensor, experts] = ["tensor", "experts"].map(|kind| case.split(&file.split(kind, 2)));
    assert_eq!(experts.logits, tensor.logits);
    // Each rank sent the other a root, `(rows, width)` of f32, or more of them, for each layer.
    let least = (2 * config.layers.len() * rows * config.width * 4) as u64;
    let saved = tensor.sent.checked_sub(experts.sent);
    assert!(
        saved >= Some(least),
        "{saved:?} of {least}: {} and {}",
        tensor.sent,
        experts.sent
    );
}

/// Value heads are shared over the ranks of a stage, in either order; each has the key heads that
/// its own need.
#[test]
fn delta_nets_give_the_bits_of_one_rank() {
    use {BlockType as B, KernelClass as C, ModelFamily as F};
    let steps = [[189, 3], [30, 0], [1, 1], [1, 190], [1, 1]];
    let more: [(&str, u32, &[u32]); 2] = [("tensor", 8, &[]), ("tensor", 3, &[5, 1, 2])];
    let dense = [
        (F::Qwen35, B::Q4_K, C::Cpu, false),
        (F::Qwen35, B::Q8_0, C::CpuF32, true),
    ];
    check_families(&dense, &steps, |_| more.to_vec());
    let with_experts = [
        (F::Qwen3Next, B::Q6_K, C::Cpu, true),
        (F::Qwen35Moe, B::BF16, C::CpuQ8, false),
        (F::NemotronH, B::Q8_0, C::Cpu, true),
        (F::Lfm2Moe, B::Q4_K, C::Cpu, false),
    ];
    check_families(&with_experts, &steps, |_| {
        [&more[..], &EXPERT_SPLITS].concat()
    });
}

/// Layers that all differ, over 1 to 4 nodes in all ways that stages may be cut.
#[test]
fn layers_that_differ_give_the_bits_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("toy.gguf");
    write_toy(&path);
    let tokens = tokens(300);
    for (class, overlap) in [(KernelClass::Cpu, false), (KernelClass::CpuF32, true)] {
        let case = Case {
            class,
            steps: &[[200, 3], [30, 0], [1, 1], [1, 190], [1, 1]],
            overlap,
            ..Case::new(&path, &tokens)
        };
        case.check(&[
            ("tensor", 2, &[]),
            ("tensor", 2, &[3, 1]),
            ("tensor", 3, &[]),
            ("tensor", 4, &[]),
            ("pipeline", 2, &[]),
            ("pipeline", 3, &[1, 5, 1]),
            ("2x2", 4, &[]),
        ]);
    }
}

/// A layer and those that use its cache stay in one stage.
#[test]
fn layers_that_share_a_cache_are_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("toy.gguf");
    write_toy(&path);
    let config = config_of(&ModelSource::open(&path).unwrap()).unwrap();
    let error = Split::plan(&config, "pipeline".parse().unwrap(), 4, &[]).unwrap_err();
    assert_eq!(
        error,
        split::Error::Stages {
            stages: 4,
            layers: 3
        }
    );
    let stages = [(0..1, vec![1]), (1..5, vec![1])];
    let stages = stages.map(|(layers, shares)| (StageKind::Tensor, layers, shares));
    let error = Split::of_stages(&config, stages).unwrap_err();
    assert_eq!(error, split::Error::Shared { layer: 1 });
}

/// Prompts of several blocks in one, or in two halves, one computed while the other's sums are
/// exchanged.
#[test]
fn long_prompts_give_the_bits_of_one_rank_with_overlap_and_without() {
    let cases = [
        (ModelFamily::Llama, false),
        (ModelFamily::Llama, true),
        (ModelFamily::Gemma3, true),
    ];
    let cases = cases.map(|(family, overlap)| (family, BlockType::Q5_1, KernelClass::Cpu, overlap));
    check_families(&cases, &[[200, 100], [1, 27], [100, 190]], |_| Vec::new());
}

/// Seen by the frames of what is sent: halves are a message more for each sum, both ways.
#[test]
fn steps_are_cut_from_two_blocks_on_where_they_may() {
    let file = File::llama();
    let split = file.split("tensor", 2);
    let frames = |rows| {
        let sent = [false, true].map(|overlap| {
            let case = Case {
                steps: &[[rows, 0]],
                overlap,
                ..file.case()
            };
            case.split(&split).sent
        });
        sent[1] - sent[0]
    };
    assert_eq!([1, 129, 255].map(frames), [0; 3]);
    let [least, more] = [256, 330].map(frames);
    assert!(least > 0 && least == more, "{least} and {more}");
    assert!(
        least.is_multiple_of(2 * 2 * file.tiny.layers as u64),
        "{least}"
    );
}

/// An error of an exchange that overlaps the computing is the error of the step.
#[test]
fn a_rank_that_leaves_during_an_overlapped_step_is_named() {
    let file = File::llama();
    let case = Case {
        steps: &[[300, 0]],
        overlap: true,
        ..file.case()
    };
    let mut places = places(&file.config(), &file.split("tensor", 2));
    let (follower, leader) = (places.pop().unwrap(), places.pop().unwrap());
    // It receives the plan, and takes no part.
    let Links { world, stage, .. } = follower.links.unwrap();
    drop(stage);
    let error = case.lead(&case.load(leader)).unwrap_err();
    assert!(
        error.to_string().ends_with("rank 1 left the group"),
        "{error}"
    );
    drop(world);
}

#[test]
fn every_storage_type_can_be_cut() {
    for block_type in BlockType::GGUF {
        let file = File::new(ModelFamily::Llama, block_type);
        let case = Case {
            steps: &STEPS[..3],
            ..file.case()
        };
        case.check(&[("tensor", 3, &[]), ("2x2", 4, &[])]);
    }
}

/// Tiles of FP8 that a rank's rows and columns cut, and rows of other layouts.
#[test]
fn folders_with_scales_can_be_cut() {
    let (dir, tokens) = (tempfile::tempdir().unwrap(), tokens(300));
    let layouts = [
        Layout::Fp8Tiles,
        Layout::Nvfp4,
        Layout::Int4,
        Layout::Fp8Tiles,
        Layout::Mxfp8,
    ];
    write(dir.path(), &layouts);
    let case = Case::new(dir.path(), &tokens);
    case.check(&[("tensor", 2, &[]), ("2x2", 4, &[])]);
}

/// Folders of MLX: groups of 32 and 64, which the leaves of a sum do not cut.
#[test]
fn folders_of_mlx_can_be_cut() {
    let tokens = tokens(300);
    for (name, class) in [
        ("llama-4bit", KernelClass::Cpu),
        ("llama-tied-mixed", KernelClass::CpuQ8),
        ("llama-2bit-sharded", KernelClass::Cpu),
        ("qwen2-8bit", KernelClass::Cpu),
        ("qwen3-mxfp4", KernelClass::Cpu),
        ("gemma3-5bit", KernelClass::CpuF32),
    ] {
        let path = golden(&format!("mlx/{name}"));
        let case = Case {
            class,
            ..Case::new(&path, &tokens)
        };
        case.check(&[("tensor", 2, &[]), ("pipeline", 3, &[]), ("2x2", 4, &[])]);
    }
}

/// Real shapes: four splits, in long runs ten.
#[test]
fn smollm2_gives_the_bits_of_one_rank() {
    let name = "smollm2_gives_the_bits_of_one_rank";
    let Some(path) = test_model(name, "SmolLM2-135M-Instruct.Q4_1.gguf") else {
        return;
    };
    let tokens = tokens(49000);
    let case = Case {
        steps: &STEPS[..3],
        ..Case::new(&path, &tokens)
    };
    case.check(&[
        ("tensor", 3, &[]),
        ("tensor", 8, &[]),
        ("pipeline", 3, &[]),
        ("2x2", 4, &[]),
    ]);
    if long() {
        case.check(&[
            ("tensor", 2, &[]),
            ("tensor", 4, &[]),
            ("tensor", 5, &[]),
            ("pipeline", 2, &[]),
            ("pipeline", 8, &[]),
            ("3x2", 6, &[]),
        ]);
    }
}

#[test]
fn keys_and_values_of_bytes_give_the_bits_of_one_rank() {
    for family in [ModelFamily::Llama, ModelFamily::Gemma3] {
        let file = File::new(family, BlockType::Q8_0);
        let case = Case {
            kv: Some(KvType::Q4),
            ..file.case()
        };
        assert_ne!(case.alone().0, file.case().alone().0, "{}", family.name());
        case.check(&[("tensor", 3, &[]), ("pipeline", 2, &[]), ("2x2", 4, &[])]);
    }
}

/// A leader that ends leaves no other rank hanging.
#[test]
fn followers_hear_of_a_leader_that_is_gone() {
    let file = File::llama();
    let case = file.case();
    let mut places = places(&file.config(), &file.split("tensor", 2));
    let (follower, leader) = (places.pop().unwrap(), places.pop().unwrap());
    std::thread::scope(|scope| {
        let follower = scope.spawn(|| case.follow(&case.load(follower)));
        let leader = case.load(leader);
        leader.idle().unwrap();
        drop(leader);
        let error = follower.join().unwrap().unwrap_err();
        assert!(
            error.to_string().ends_with("rank 0 left the group"),
            "{error}"
        );
    });
}
