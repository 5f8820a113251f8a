//! MLX under the same traits as the CPU: the same logits within a stated tolerance, splits of it,
//! and pipelines of both.
//!
//! Runs where `PACELINE_MLXC` names a `libmlxc`, which `cargo xtask mlx` builds.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

mod ahead;
mod alone;
#[path = "../../model/tests/common/mod.rs"]
mod common;
mod hang;
mod interrupted;
mod kv;
mod lanes;
mod pages;
mod quarter;
mod recurrent;
mod refused;
mod shares;
mod slots;
mod slow;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use common::compare::{relative_rms, worst_within};
use common::hf::{
    DELTA_FOLDERS, EXPERT_FOLDERS, FOLDERS, MLX_EXPERT_FOLDERS, MLX_FOLDERS, golden_logits,
};
use common::places::{PATIENCE, Place, places};
use common::runner::Runner;
use common::schedule::bits;
use common::tiny::Tiny;
use common::{golden, golden_json, ids, kernels, load, number, rows_of, test_model};
use paceline_base::testing::long;
use paceline_base::{BlockType, KernelClass, Rank};
use paceline_comm::Deadline;
use paceline_mlx::LibraryPaths;
use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, Config, Error, ExchangeBytes, FollowOutcome,
    LoadOptions, LoadedModel, Logits, Model, ModelFamily, ModelSource, Split, WindowPages,
    WindowPool,
};
use paceline_model_mlx::{MlxModel, MlxOptions, mlx_page_bytes};
use paceline_tensor::PAGE;
use paceline_weights::safetensors::Safetensors;

/// Where MLX is, or a line that says why a test is skipped.
fn library(test: &str) -> Option<PathBuf> {
    let found = std::env::var_os("PACELINE_MLXC").map(PathBuf::from);
    if found.is_none() {
        eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    }
    found
}

/// Set for the process that [`apart`] starts.
const APART: &str = "PACELINE_TEST_MLX_APART";

/// Runs the test of this name in a process of its own; in that process gives it [`library`]. MLX's
/// CPU build computes on one thread of a process, so that tests side by side wait for it.
fn apart(test: &str) -> Option<PathBuf> {
    let library = library(test)?;
    if std::env::var_os(APART).is_some() {
        return Some(library);
    }
    let mut process = Command::new(std::env::current_exe().unwrap());
    process
        .args([test, "--exact", "--nocapture"])
        .env(APART, "1");
    let output = process.output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    let passed = output.status.success() && out.contains("1 passed");
    assert!(passed, "{test} apart: {}, {out}", output.status);
    // The figures, without what the harness of that process says.
    let of_harness = |line: &&str| line.starts_with("running ") || line.starts_with("test ");
    let figures = out.lines().filter(|line| !of_harness(line));
    figures.for_each(|line| println!("{line}"));
    None
}

fn options(library: &Path, class: KernelClass) -> MlxOptions {
    MlxOptions {
        places: LibraryPaths {
            explicit: Some(library.to_path_buf()),
            ..LibraryPaths::default()
        },
        class,
        positions: 256,
        rows: 128,
        sequences: 2,
        kv: None,
        captures: Vec::new(),
        memory: None,
        patience: MlxOptions::PATIENCE,
        last_words: MlxOptions::LAST_WORDS,
    }
}

/// Loads what rank 0 of `split` has.
fn load_first(
    source: Arc<ModelSource>,
    split: &Split,
    options: MlxOptions,
) -> Result<MlxModel, Error> {
    MlxModel::load(
        source,
        split,
        Rank(0),
        (options, None),
        kernels(),
        |_, _| {},
    )
}

fn try_mlx(path: &Path, options: MlxOptions) -> Result<MlxModel, Error> {
    let source = Arc::new(ModelSource::open(path).unwrap());
    let split = Split::whole(&Config::read(&source).unwrap());
    load_first(source, &split, options)
}

fn mlx(library: &Path, path: &Path, class: KernelClass) -> Arc<dyn LoadedModel> {
    let model = try_mlx(path, options(library, class));
    Arc::new(model.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

/// The largest distance to `transformers`' logits, at most `tolerance`.
fn distance(name: &str, rows: &[Vec<f32>], tolerance: f64) -> f64 {
    worst_within(name, rows, &golden_logits(name), tolerance)
}

/// Folders with a memory of n-grams.
const NOT_ON_MLX: [&str; 2] = ["deepseek-v41-ngrams-bf16", "qwen4-ngrams-bf16"];

/// The folders that MLX computes.
fn computed<const N: usize>(folders: [&'static str; N]) -> impl Iterator<Item = &'static str> {
    folders
        .into_iter()
        .filter(|name| !NOT_ON_MLX.contains(name))
}

/// Class `mlx-f32` rounds sums of f32 in another order, as `transformers` with products in f64
/// does: a few times that distance, as for class `cpu-f32`.
#[test]
fn class_mlx_f32_agrees_with_transformers() {
    let Some(library) = library("class mlx-f32 agrees with transformers") else {
        return;
    };
    let more = computed(EXPERT_FOLDERS).chain(computed(DELTA_FOLDERS));
    for name in computed(FOLDERS).chain(more) {
        let json = golden_json(&format!("hf/{name}.golden.json"));
        let (prompt, greedy) = (ids(&json, "prompt"), ids(&json, "greedy"));
        let tolerance = 8.0 * number(&json, &["max_abs_diff", "f64_matmul"]);
        let model = mlx(
            &library,
            &golden(&format!("hf/{name}")),
            KernelClass::MlxF32,
        );
        let mut runner = Runner::of(model, prompt.len() + greedy.len());
        let worst = distance(name, &runner.all(&prompt), tolerance);
        println!("{name} mlx-f32: logits within {worst:.3e}, tolerance {tolerance:.3e}");
        assert_eq!(runner.greedy(&prompt, greedy.len()), greedy, "{name}");
    }
}

/// Class `mlx` rounds every activation to the type of the weights: 8 bits of bfloat16, 11 of f16.
/// Relative to the logits' size, errors of 2^-8 that add up like a random walk over a hundred
/// roundings are some 4 %. Seen: 6 % of bfloat16 in these models of random weights.
#[test]
fn class_mlx_agrees_within_the_rounding_of_activations() {
    let Some(library) = library("class mlx agrees with transformers") else {
        return;
    };
    for name in computed(FOLDERS) {
        let json = golden_json(&format!("hf/{name}.golden.json"));
        let prompt = ids(&json, "prompt");
        let model = mlx(&library, &golden(&format!("hf/{name}")), KernelClass::Mlx);
        let rows = Runner::of(model, prompt.len()).all(&prompt);
        let tolerance = match name {
            _ if name.contains("bf16") => 0.15,
            _ if name.contains("f16") => 0.02,
            _ => 1e-5,
        };
        let pairs = rows.iter().zip(golden_logits(name));
        let worst =
            common::compare::largest(pairs.map(|(got, expected)| relative_rms(got, &expected)));
        println!("{name} mlx: logits within {worst:.3e} of their size");
        assert!(
            worst <= tolerance,
            "{name}: {worst:.3e}, at most {tolerance:.1e}"
        );
    }
}

/// The same of layers with experts and states. A rounded activation may turn a choice of experts,
/// which moves all of a row. So the row in the middle is held to the rounding.
#[test]
fn class_mlx_agrees_within_the_rounding_of_activations_with_experts() {
    let Some(library) = apart("class_mlx_agrees_within_the_rounding_of_activations_with_experts")
    else {
        return;
    };
    for name in computed(EXPERT_FOLDERS).chain(computed(DELTA_FOLDERS)) {
        let json = golden_json(&format!("hf/{name}.golden.json"));
        let prompt = ids(&json, "prompt");
        let model = mlx(&library, &golden(&format!("hf/{name}")), KernelClass::Mlx);
        let rows = Runner::of(model, prompt.len()).all(&prompt);
        let pairs = rows.iter().zip(golden_logits(name));
        let mut far: Vec<f64> = pairs
            .map(|(got, expected)| relative_rms(got, &expected))
            .collect();
        far.sort_by(f64::total_cmp);
        let middle = far[far.len() / 2];
        println!("{name} mlx: the middle row within {middle:.3e} of its size");
        let tolerance = match name {
            // Keys of 4 bits: mlx-lm's pass in bf16 is 0.365 from its own in f32.
            "deepseek-v41-bf16" => 0.4,
            _ if name.contains("bf16") || name.contains("mxfp4") => 0.15,
            _ => 1e-4,
        };
        assert!(middle <= tolerance, "{name}: {middle:.3e}");
    }
}

/// The folders of `tests-data/golden/mlx`, which MLX itself has computed in float32: the same
/// kernels on the same groups.
#[test]
fn folders_that_mlx_quantised_give_its_logits() {
    let Some(library) = library("folders that mlx quantised give its logits") else {
        return;
    };
    for name in MLX_FOLDERS.into_iter().chain(MLX_EXPERT_FOLDERS) {
        let json = golden_json(&format!("mlx/{name}.golden.json"));
        let prompt = ids(&json, "prompt");
        let file = golden(&format!("mlx/{name}.golden.safetensors"));
        let file = Safetensors::open(file).unwrap();
        let expected = rows_of(&file.tensor("logits").unwrap());
        let model = mlx(
            &library,
            &golden(&format!("mlx/{name}")),
            KernelClass::MlxF32,
        );
        let rows = Runner::of(model, prompt.len()).all(&prompt);
        let far = furthest(&rows, &expected);
        println!("{name} mlx-f32: logits within {far:.3e} of their size");
        assert!(far <= 1e-4, "{name}: {far:.3e}");
    }
}

/// SmolLM2 by `mlx_lm.convert`: of the 32 ids that `mlx_lm.generate` gives after a question, the
/// first few, or all that are asked for.
#[test]
fn smollm2_goes_on_as_mlx_lm_does() {
    const NAME: &str = "SmolLM2-135M-Instruct-mlx-4bit";
    /// Ids by default and in a long run, unless `PACELINE_MLX_TOKENS` says how many: MLX's CPU
    /// build does a few rows a second.
    const TOKENS: [usize; 2] = [4, 32];
    let test = "smollm2_goes_on_as_mlx_lm_does";
    let golden = test_model(test, &format!("{NAME}.golden.json"));
    let (Some(golden), Some(library)) = (golden, apart(test)) else {
        return;
    };
    let text = std::fs::read_to_string(&golden).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (prompt, generated) = (ids(&json, "prompt"), ids(&json, "generated"));
    let model = mlx(&library, &golden.with_file_name(NAME), KernelClass::Mlx);
    let count = std::env::var("PACELINE_MLX_TOKENS").ok();
    let usual = TOKENS[usize::from(long())];
    let count = count.map_or(usual, |text| text.parse().unwrap());
    let mut runner = Runner::of(model, prompt.len() + count);
    assert_eq!(runner.greedy(&prompt, count), generated[..count]);
}

/// GGUF's blocks that MLX can hold are held exactly; of the others, 8 bits a weight are left. The
/// weights here are random bits, whose blocks are wider than real ones: 9 % seen over six layers.
#[test]
fn blocks_of_gguf_files_give_the_logits_of_naive() {
    let Some(library) = library("blocks of gguf files on mlx") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for (family, block_type, tolerance) in [
        (ModelFamily::Llama, BlockType::F32, 1e-5),
        (ModelFamily::Llama, BlockType::Q4_0, 1e-5),
        (ModelFamily::Qwen2, BlockType::Q4_1, 1e-5),
        (ModelFamily::Qwen3, BlockType::Q8_0, 1e-5),
        (ModelFamily::Gemma3, BlockType::Q8_0, 1e-5),
        (ModelFamily::Llama, BlockType::F16, 1e-5),
        (ModelFamily::Qwen3, BlockType::Q4_K, 0.02),
        (ModelFamily::Gemma3, BlockType::Q6_K, 0.2),
        (ModelFamily::Mixtral, BlockType::Q5_1, 1e-4),
        (ModelFamily::Qwen2Moe, BlockType::Q4_1, 1e-4),
        (ModelFamily::Qwen3Moe, BlockType::Q4_0, 1e-4),
        (ModelFamily::GptOss, BlockType::MXFP4_SPLIT, 1e-4),
        (ModelFamily::Glm4Moe, BlockType::Q5_0, 1e-4),
        (ModelFamily::MiniMaxM2, BlockType::Q8_0, 1e-4),
        (ModelFamily::Dbrx, BlockType::Q8_0, 1e-4),
        (ModelFamily::DeepSeek, BlockType::Q8_0, 1e-4),
        (ModelFamily::DeepSeek, BlockType::Q5_1, 1e-4), // keys and values expanded by one matrix
        (ModelFamily::Qwen3Next, BlockType::F32, 1e-4),
        (ModelFamily::Qwen35, BlockType::Q8_0, 1e-4),
        (ModelFamily::Qwen35Moe, BlockType::Q4_0, 1e-4),
        (ModelFamily::Gemma4, BlockType::Q8_0, 1e-4),
        (ModelFamily::Lfm2, BlockType::Q8_0, 1e-4),
        (ModelFamily::Lfm2Moe, BlockType::Q4_0, 1e-4),
        (ModelFamily::NemotronH, BlockType::Q8_0, 1e-4),
    ] {
        let tiny = Tiny::new(family, block_type);
        tiny.write(&path);
        let tokens = tiny.tokens(100, 3);
        let naive = load(&path, KernelClass::CpuF32, &kernels());
        let expected = Runner::new(naive, tokens.len()).all(&tokens);
        let model = mlx(&library, &path, KernelClass::MlxF32);
        let got = Runner::of(model, tokens.len()).all(&tokens);
        let pairs = got.iter().zip(&expected);
        let worst = common::compare::largest(pairs.map(|(a, b)| relative_rms(a, b)));
        println!(
            "{} {block_type}: logits within {worst:.3e} of their size",
            family.name()
        );
        assert!(
            worst <= tolerance,
            "{} {block_type}: {worst:.3e}",
            family.name()
        );
    }
}

/// A gemma, whose windows end inside of pages, in float weights, and its tokens.
fn gemma(dir: &Path) -> (PathBuf, Vec<u32>) {
    let path = dir.join("gemma.gguf");
    let tiny = Tiny::new(ModelFamily::Gemma3, BlockType::Q8_0);
    tiny.write(&path);
    (path, tiny.tokens(150, 5))
}

#[test]
fn the_same_bits_run_after_run_and_on_any_pages() {
    let Some(library) = apart("the_same_bits_run_after_run_and_on_any_pages") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (path, tokens) = gemma(dir.path());
    let model = mlx(&library, &path, KernelClass::Mlx);
    let run = |pages: &[u32]| {
        let model = Arc::clone(&model);
        let mut runner = Runner::on_pages(model, tokens.len(), pages.to_vec());
        let mut rows = vec![runner.last(&tokens[..100], 0)];
        for i in 100..tokens.len() {
            rows.push(runner.last(&tokens[i..=i], i));
        }
        rows.iter().map(|row| bits(row)).collect::<Vec<_>>()
    };
    let first = run(&[0, 1, 2]);
    assert_eq!(run(&[0, 1, 2]), first);
    assert_eq!(run(&[3, 0, 5]), first, "gathered pages");
    assert_eq!(run(&[4, 5, 6]), first, "other pages");
}

/// Batches and chunks, for which the numerics rule holds on the CPU and not on MLX: measured, and
/// bounded.
#[test]
fn batches_and_chunks_stay_within_rounding() {
    let Some(library) = apart("batches_and_chunks_stay_within_rounding") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (path, tokens) = gemma(dir.path());
    for class in [KernelClass::Mlx, KernelClass::MlxF32] {
        let model = mlx(&library, &path, class);
        let runner = || Runner::of(Arc::clone(&model), tokens.len());
        let whole = runner().all(&tokens);
        let mut single = runner();
        let mut worst = 0.0f64;
        for (i, expected) in whole.iter().enumerate() {
            let row = single.last(&tokens[i..=i], i);
            worst = worst.max(relative_rms(&row, expected));
        }
        println!("{class}: rows alone within {worst:.3e} of rows together");
        assert!(worst < 1e-4, "{class}: {worst:.3e}");
    }
}

/// The arrays of a cache grow when a step needs later pages than they have. Answers stay the same,
/// those of pages that were copied too.
#[test]
fn a_cache_that_grows_gives_the_same_bits() {
    let Some(library) = apart("a_cache_that_grows_gives_the_same_bits") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for family in [
        ModelFamily::Llama,
        ModelFamily::DeepSeek,
        ModelFamily::Qwen35,
    ] {
        let tiny = Tiny::new(family, BlockType::Q8_0);
        tiny.write(&path);
        let tokens = tiny.tokens(200, 5);
        let model = mlx(&library, &path, KernelClass::MlxF32);
        let run = |pages: &[u32]| {
            let model = Arc::clone(&model);
            let mut runner = Runner::on_pages(model, tokens.len(), pages.to_vec());
            let chunks = [0..60, 60..130, 130..131, 131..199, 199..200];
            let rows = chunks.map(|chunk| runner.last(&tokens[chunk.clone()], chunk.start));
            rows.map(|row| bits(&row))
        };
        // Arrays begin with 128 pages.
        let grown = match family {
            ModelFamily::Qwen35 => [1, 0, 3, 2], // its states have few pages
            _ => [1, 150, 700, 2],
        };
        assert_eq!(run(&grown), run(&[0, 1, 2, 3]), "{}", family.name());
    }
}

/// A sequence whose windowed layers release the pages that no later row sees, and take the pages
/// again that were released longest ago.
struct Windowed {
    compute: Box<dyn Compute>,
    pages: Vec<u32>,
    kinds: Vec<WindowedKind>,
}

/// Pages of a kind of windowed layers.
struct WindowedKind {
    pool: WindowPool,
    first_page: usize,
    pages: Vec<u32>,
    free: VecDeque<u32>,
}

impl WindowedKind {
    fn new(pool: WindowPool) -> Self {
        Self {
            pool,
            first_page: 0,
            pages: Vec::new(),
            free: (0..pool.pages as u32).collect(),
        }
    }

    fn extend(&mut self, rows: &std::ops::Range<usize>) {
        let first = self.pool.first_page(rows.start);
        let released = self.pages.drain(..first - self.first_page);
        self.free.extend(released);
        self.first_page = first;
        let all = rows.end.div_ceil(PAGE) - first;
        let taken = self.free.drain(..all - self.pages.len());
        self.pages.extend(taken);
    }
}

impl Windowed {
    /// Of up to `positions` tokens, `rows` of them in a step. Windows have pages for `sequences`.
    fn new(
        model: Arc<dyn LoadedModel>,
        rows: usize,
        (positions, sequences): (usize, usize),
    ) -> Self {
        let size = BatchSize {
            logit_rows: rows,
            sequences,
            ..BatchSize::single(rows, positions)
        };
        let compute = model.reserve(size, positions).unwrap();
        let kinds = compute.windows().iter().copied();
        Self {
            kinds: kinds.map(WindowedKind::new).collect(),
            pages: (0..positions.div_ceil(PAGE) as u32).collect(),
            compute,
        }
    }

    /// Logits after each of `tokens`, which begin at `position`.
    fn step(&mut self, tokens: &[u32], position: usize) -> Vec<Vec<f32>> {
        let rows = position..position + tokens.len();
        self.kinds.iter_mut().for_each(|kind| kind.extend(&rows));
        let windows = self.kinds.iter().map(|kind| WindowPages {
            first_page: kind.first_page,
            pages: &kind.pages,
        });
        let windows: Vec<WindowPages<'_>> = windows.collect();
        let sequence = BatchSequence {
            tokens,
            position,
            pages: &self.pages,
            windows: &windows,
            adapter: 0,
            logits: Logits::All,
        };
        let sequences = [sequence];
        let batch = Batch {
            sequences: &sequences,
        };
        let rows = self.compute.forward(&batch).unwrap();
        let row = |i| self.compute.logits_mut(i).to_vec();
        (0..rows).map(row).collect()
    }
}

/// A conversation of many windows gives the same bits on fewer pages than it has, and the logits of
/// `cpu-f32`, which keeps all positions here.
#[test]
fn windowed_layers_keep_their_window_alone() {
    const TOKENS: usize = 640;
    /// Rows of the first steps; the last 70 are one at a time.
    const ROWS: usize = 60;
    let Some(library) = apart("windowed_layers_keep_their_window_alone") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for family in [ModelFamily::Gemma3, ModelFamily::GptOss] {
        let tiny = Tiny::new(family, BlockType::Q8_0);
        tiny.write(&path);
        let tokens = tiny.tokens(TOKENS, 3);
        let naive = load(&path, KernelClass::CpuF32, &kernels());
        let expected = Runner::new(naive, TOKENS).all(&tokens);
        let model = mlx(&library, &path, KernelClass::MlxF32);
        // All pages of a conversation at most, and those that a few windows have.
        let run = |sequences, pages: usize| {
            let sizes = (TOKENS, sequences);
            let mut windowed = Windowed::new(Arc::clone(&model), ROWS, sizes);
            let [kind] = &windowed.kinds[..] else {
                panic!("one window");
            };
            assert_eq!(kind.pool.pages, pages);
            let mut rows = Vec::new();
            let (prompt, answer) = tokens.split_at(TOKENS - 70);
            for chunk in prompt.chunks(ROWS).chain(answer.chunks(1)) {
                rows.extend(windowed.step(chunk, rows.len()));
            }
            rows
        };
        let got = run(1, 6);
        let name = family.name();
        assert!(got == run(3, 10), "{name}: other bits on more pages");
        let far = furthest(&got, &expected);
        println!("{name} mlx-f32 on 6 pages of a window: {far:.1e} of the logits' size");
        assert!(far <= 2e-4, "{name}: {far:.1e}");
    }
}

/// Two sequences of a batch, the second on pages of the first for what both begin with.
#[test]
fn sequences_share_pages_and_steps() {
    let Some(library) = library("mlx sequences share pages") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (path, tokens) = gemma(dir.path());
    let model = mlx(&library, &path, KernelClass::MlxF32);
    let mut other = tokens.clone();
    other[70] = (other[70] + 1) % 300;
    let alone = |tokens: &[u32]| Runner::of(Arc::clone(&model), 150).all(tokens);
    let expected = [alone(&tokens), alone(&other)];

    let size = BatchSize {
        rows: 200,
        logit_rows: 200,
        sequences: 2,
        context: 150,
    };
    let mut compute = Arc::clone(&model).reserve(size, 6 * PAGE).unwrap();
    let pages = [[2, 0, 4], [2, 5, 1]];
    let part = |s: usize, range: std::ops::Range<usize>| {
        BatchSequence::plain(
            &[&tokens, &other][s][range.clone()],
            range.start,
            &pages[s],
            Logits::Last,
        )
    };
    for (batch, ends) in [
        (vec![part(0, 0..64)], vec![(0, 63)]),
        (
            vec![part(1, 64..100), part(0, 64..65)],
            vec![(1, 99), (0, 64)],
        ),
        (
            vec![part(0, 65..150), part(1, 100..150)],
            vec![(0, 149), (1, 149)],
        ),
    ] {
        let rows = compute.forward(&Batch { sequences: &batch }).unwrap();
        assert_eq!(rows, ends.len());
        for (row, (s, position)) in ends.into_iter().enumerate() {
            let far = relative_rms(compute.logits_mut(row), &expected[s][position]);
            assert!(far < 1e-4, "sequence {s} at {position}: {far:.1e}");
        }
    }
}

/// Layers whose input ranks capture: before and behind a stage. None of several residual streams.
fn captures_of(config: &Config) -> Vec<usize> {
    match config.streams {
        Some(_) => Vec::new(),
        None => vec![1, config.layers.len()],
    }
}

/// A rank on the CPU or on MLX, as its place says. It captures rows before and behind a stage.
fn rank(place: Place, path: &Path, class: KernelClass, library: &Path) -> Arc<dyn LoadedModel> {
    let source = ModelSource::open(path).unwrap();
    let captures = captures_of(&Config::read(&source).unwrap());
    if class.is_mlx() {
        return mlx_rank(place, path, &captures, options(library, class));
    }
    let Place { split, rank, links } = place;
    let options = LoadOptions { class };
    let model = Model::load_shard(&source, &split, rank, options, kernels(), |_, _| {});
    let model = model.unwrap().with_captures(&captures);
    Arc::new(model.link(links.unwrap()))
}

fn mlx_rank(place: Place, path: &Path, captures: &[usize], options: MlxOptions) -> Arc<MlxModel> {
    let Place { split, rank, links } = place;
    let source = Arc::new(ModelSource::open(path).unwrap());
    let options = MlxOptions {
        captures: captures.to_vec(),
        ..options
    };
    let model = MlxModel::load(source, &split, rank, (options, None), kernels(), |_, _| {});
    Arc::new(model.unwrap().link(links.unwrap()))
}

/// Logits of a prompt of 66 in two chunks and 2 decode steps, from ranks of these classes.
fn split(path: &Path, kind: &str, classes: &[KernelClass], library: &Path) -> Vec<Vec<f32>> {
    of_leader(ranks(path, kind, classes, library))
}

fn of_leader(ranks: Vec<(Option<Vec<Vec<f32>>>, ExchangeBytes)>) -> Vec<Vec<f32>> {
    ranks.into_iter().find_map(|(logits, _)| logits).unwrap()
}

/// Logits and captured rows that the leader computed, and bytes that each rank exchanged, in rank
/// order.
fn ranks(
    path: &Path,
    kind: &str,
    classes: &[KernelClass],
    library: &Path,
) -> Vec<(Option<Vec<Vec<f32>>>, ExchangeBytes)> {
    ranks_by((path, kind, classes.len()), |place| {
        let class = classes[place.rank.0 as usize];
        rank(place, path, class, library)
    })
}

/// As [`ranks`], each of them loaded by `load`.
fn ranks_by(
    (path, kind, n): (&Path, &str, usize),
    load: impl Fn(Place) -> Arc<dyn LoadedModel> + Sync,
) -> Vec<(Option<Vec<Vec<f32>>>, ExchangeBytes)> {
    let config = Config::read(&ModelSource::open(path).unwrap()).unwrap();
    let kind = kind.parse().unwrap();
    let cut = Split::plan(&config, kind, n as u32, &[]).unwrap();
    let tokens: Vec<u32> = (0..68).map(|i| i * 37 % config.vocab as u32).collect();
    let chunks = [0..50, 50..66, 66..67, 67..68];
    let lead = |compute: &mut dyn Compute| {
        let step = |range: std::ops::Range<usize>| {
            let sequence = BatchSequence {
                tokens: &tokens[range.clone()],
                position: range.start,
                pages: &[1, 0],
                windows: &[],
                adapter: 0,
                logits: if range.start == 0 {
                    Logits::None
                } else {
                    Logits::Last
                },
            };
            let rows = compute
                .forward(&Batch {
                    sequences: &[sequence],
                })
                .unwrap();
            let logits = (rows > 0).then(|| compute.logits_mut(0).to_vec());
            let captured = compute.captured().to_vec();
            let each = captures_of(&config).len() * config.width;
            assert_eq!(captured.len(), range.len() * each);
            let captured = Some(captured).filter(|rows| !rows.is_empty());
            logits.into_iter().chain(captured)
        };
        chunks
            .clone()
            .into_iter()
            .flat_map(step)
            .collect::<Vec<_>>()
    };
    let (load, lead) = (&load, &lead);
    std::thread::scope(|scope| {
        let run = |place: Place| {
            scope.spawn(move || {
                let model = load(place);
                let size = BatchSize::single(64, 96);
                let mut compute = Arc::clone(&model).reserve(size, 2 * PAGE).unwrap();
                let logits = if model.shard().leads() {
                    compute.idle().unwrap();
                    Some(lead(&mut *compute))
                } else {
                    assert_eq!(compute.follow().unwrap(), FollowOutcome::Idle);
                    (0..4).for_each(|_| assert_eq!(compute.follow().unwrap(), FollowOutcome::Step));
                    None
                };
                let deadline = Deadline::at(Instant::now() + PATIENCE);
                model.links().unwrap().world.barrier(deadline).unwrap();
                (logits, model.exchanged())
            })
        };
        let places = places(&config, &cut).into_iter();
        let threads: Vec<_> = places.map(run).collect();
        let all = threads.into_iter().map(|thread| thread.join().unwrap());
        all.collect()
    })
}

fn furthest(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    assert_eq!(a.len(), b.len());
    common::compare::largest(a.iter().zip(b).map(|(a, b)| relative_rms(a, b)))
}

/// Class `mlx-f32` shows faults of every family's splits: its sums differ by their order alone.
#[test]
fn splits_agree_with_one_rank() {
    use KernelClass::{Cpu, Mlx, MlxF32};
    /// Stages compute the bits of one rank.
    const SAME: f64 = 0.0;
    /// Of sums in f32 in another order, relative to the logits' size: 3.5e-6 over all families.
    const SUMS: f64 = 1e-5;
    /// Class `mlx` rounds the ranks' parts to f16 before it adds them: 3e-3 (granite) to 2.2e-2
    /// (olmo2) seen where class `mlx-f32` is within 4e-6.
    const HALVES: f64 = 3e-2;
    let Some(library) = apart("splits_agree_with_one_rank") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for family in ModelFamily::DENSE {
        let (path, name) = (dir.path().join(family.name()), family.name());
        Tiny::new(family, BlockType::Q8_0).write(&path);
        let run = |kind: &str, classes: &[KernelClass]| split(&path, kind, classes, &library);
        let agree = |class: KernelClass, splits: &[(&str, usize, f64)]| {
            let alone = run("pipeline", &[class]);
            for (kind, ranks, tolerance) in splits {
                let far = furthest(&run(kind, &vec![class; *ranks]), &alone);
                println!("{name} {class} {kind} of {ranks}: {far:.1e}");
                assert!(far <= *tolerance, "{name} {class} {kind}: {far:.1e}");
            }
        };
        let (stages, tensor) = (("pipeline", 2, SAME), ("tensor", 2, SUMS));
        let more = [("tensor", 3, SUMS), ("2x2", 4, SUMS)];
        if family == ModelFamily::Llama {
            agree(MlxF32, &[stages, tensor, more[0], more[1]]);
            agree(Mlx, &[stages, ("tensor", 2, HALVES)]);
        } else if family == ModelFamily::Gemma3 || long() {
            agree(MlxF32, &[stages, tensor]);
        } else {
            agree(MlxF32, &[tensor]);
            continue;
        }
        let naive = run("pipeline", &[KernelClass::CpuF32]);
        let orders = [[Cpu, MlxF32], [MlxF32, Cpu]];
        for classes in orders.into_iter().take(if long() { 2 } else { 1 }) {
            let far = furthest(&run("pipeline", &classes), &naive);
            println!("{name} {classes:?}: {far:.1e} from cpu-f32");
            assert!(far <= 5e-3, "{name} {classes:?}: {far:.1e}");
        }
    }
}

/// Experts, latent attention, states and layers of many sizes. Two stages give the bits of one
/// rank. Two ranks of a stage give its logits but for the order of their sums, also those
/// that share experts alone. A stage on the CPU
/// gives those of class `cpu-f32`.
#[test]
fn splits_of_every_kind_of_layer_agree_with_one_rank() {
    use KernelClass::{CpuF32, MlxF32};
    let Some(library) = apart("splits_of_every_kind_of_layer_agree_with_one_rank") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let tiny = [
        ModelFamily::Qwen3Moe,
        ModelFamily::GptOss,
        ModelFamily::MiniMaxM2,
        ModelFamily::DeepSeek,
        ModelFamily::Qwen35Moe,
        ModelFamily::Gemma4,
        ModelFamily::Lfm2Moe,
        ModelFamily::NemotronH,
    ];
    let tiny = tiny.into_iter().map(|family| {
        let path = dir.path().join(family.name());
        Tiny::new(family, BlockType::Q8_0).write(&path);
        (family.name(), path)
    });
    let folders = ["kimi-linear-bf16"];
    let folders = folders.map(|name| (name, golden(&format!("hf/{name}"))));
    for (name, path) in tiny.chain(folders) {
        let run = |kind: &str, classes: &[KernelClass]| split(&path, kind, classes, &library);
        let alone = run("pipeline", &[MlxF32]);
        let stages = run("pipeline", &[MlxF32; 2]);
        assert_eq!(stages, alone, "{name}: pipeline of 2");
        let kinds = ["tensor", "experts"].map(|kind| {
            let all = ranks(&path, kind, &[MlxF32; 2], &library);
            let moved: u64 = all.iter().map(|(_, moved)| moved.in_place.0).sum();
            let rows = all.into_iter().find_map(|(rows, _)| rows).unwrap();
            let far = furthest(&rows, &alone);
            println!("{name} {kind} of 2: {far:.1e}, {moved} bytes exchanged");
            assert!(far <= 1e-4, "{name} {kind}: {far:.1e}");
            moved
        });
        // A layer whose attention every rank computes has one exchange less.
        assert!(kinds[1] < kinds[0], "{name}: {kinds:?}");
        let naive = run("pipeline", &[CpuF32]);
        let far = furthest(&run("pipeline", &[CpuF32, MlxF32]), &naive);
        println!("{name} [cpu-f32, mlx-f32]: {far:.1e} from cpu-f32");
        assert!(far <= 1e-4, "{name} [cpu-f32, mlx-f32]: {far:.1e}");
    }
}

/// The model reports weights in another form than the file's, and a device that is a test bed.
#[test]
fn what_the_owner_should_know_is_told() {
    let Some(library) = library("mlx tells what it converts") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for (block_type, told) in [
        (BlockType::Q8_0, None),
        (
            BlockType::Q4_K,
            Some("mlx has no form for Q4_K: 16 matrices are held as 4 bits in groups of 32"),
        ),
        (
            BlockType::Q6_K,
            Some("mlx has no form for Q6_K: 16 matrices are held as 8 bits in groups of 32"),
        ),
    ] {
        Tiny::new(ModelFamily::Llama, block_type).write(&path);
        let model = try_mlx(&path, options(&library, KernelClass::Mlx)).unwrap();
        let on_cpu = model.device().contains(" cpu");
        let bed = model.notes().iter().any(|note| note.contains("test bed"));
        assert_eq!(bed, on_cpu, "{}: {:?}", model.device(), model.notes());
        let found = model.notes().iter().find(|note| note.contains("no form"));
        match (found, told) {
            (Some(note), Some(told)) => assert!(note.starts_with(told), "{note}"),
            (found, told) => assert_eq!(found.is_some(), told.is_some(), "{block_type}"),
        }
    }
}

/// The promise of class `mlx-exact`: the bits of one rank and of rows alone, for any batch, chunks
/// and split.
#[test]
fn class_mlx_exact_gives_the_same_bits_over_batches_and_splits() {
    /// Of a batch: enough for MLX to take other kernels for all together.
    const ROWS: usize = 20;
    let Some(library) = apart("class_mlx_exact_gives_the_same_bits_over_batches_and_splits") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for (family, block_type) in [
        (ModelFamily::Llama, BlockType::Q8_0),
        (ModelFamily::Qwen2, BlockType::F32),
        (ModelFamily::Gemma3, BlockType::Q4_0),
    ] {
        let name = format!("{} {block_type}", family.name());
        let tiny = Tiny::new(family, block_type);
        tiny.write(&path);
        let run = |kind, n| split(&path, kind, &[KernelClass::MlxExact; 4][..n], &library);
        let alone = run("pipeline", 1);
        let all = [("tensor", 3), ("tensor", 2)];
        let some = if block_type == BlockType::Q8_0 { 2 } else { 1 };
        for (kind, ranks) in all.into_iter().take(some) {
            let same = run(kind, ranks) == alone;
            assert!(same, "{name}: {kind} of {ranks} differs from one rank");
        }
        let tokens = tiny.tokens(ROWS, 3);
        let model = mlx(&library, &path, KernelClass::MlxExact);
        let runner = || Runner::of(Arc::clone(&model), tokens.len());
        let mut single = runner();
        for (i, row) in runner().all(&tokens).iter().enumerate() {
            let own = single.last(&tokens[i..=i], i);
            assert!(own == *row, "{name}: position {i} differs in a batch");
        }
        println!("{name} mlx-exact: the same bits");
    }
}

/// Where the device shares the machine's memory, nothing is copied for an exchange. Residuals of
/// another type than f32 are converted, since the next stage may be another engine's.
#[test]
fn exchanges_read_and_write_the_arrays_own_memory() {
    use KernelClass::{Mlx, MlxExact, MlxF32};
    let Some(library) = apart("exchanges_read_and_write_the_arrays_own_memory") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    Tiny::new(ModelFamily::Llama, BlockType::Q8_0).write(&path);
    let config = Config::read(&ModelSource::open(&path).unwrap()).unwrap();
    // 68 rows, sent and received, of each half of a layer; halves in class mlx.
    let halves = (68 * config.width * 2 * 2 * 2 * config.layers.len()) as u64;
    let exchanged = |kind, class| {
        let ranks = ranks(&path, kind, &[class; 2], &library).into_iter();
        ranks.map(|(_, moved)| [moved.in_place.0, moved.converted.0, moved.staged.0])
    };
    assert!(exchanged("tensor", Mlx).all(|moved| moved == [halves, 0, 0]));
    assert!(exchanged("tensor", MlxF32).all(|moved| moved == [2 * halves, 0, 0]));
    for [in_place, converted, staged] in exchanged("tensor", MlxExact) {
        assert_eq!([converted, staged], [0, 0]);
        assert!(in_place > halves, "inputs too: {in_place} against {halves}");
    }
    let residual = (68 * config.width * 4) as u64;
    assert!(exchanged("pipeline", MlxF32).all(|moved| moved == [residual, 0, 0]));
    assert!(exchanged("pipeline", Mlx).all(|moved| moved == [0, residual, 0]));
}

#[test]
fn what_does_not_fit_is_refused_with_the_figures() {
    let Some(library) = library("a model that does not fit mlx's device") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = gemma(dir.path());
    let mut options = options(&library, KernelClass::Mlx);
    options.positions = 1 << 36;
    let failed = try_mlx(&path, options.clone()).unwrap_err();
    let error = failed.to_string();
    assert!(
        error.starts_with("mlx: ") && error.contains("cache"),
        "{error}"
    );
    assert!(error.contains("the memory of device"), "{error}");
    let Error::DevicePositions { fitting, .. } = failed else {
        panic!("{error}");
    };
    options.positions = fitting;
    try_mlx(&path, options.clone()).unwrap();
    options.positions += PAGE;
    let error = try_mlx(&path, options).unwrap_err();
    assert!(matches!(error, Error::DevicePositions { fitting: same, .. } if same == fitting));
}

/// Positions cost what the class keeps of them; layers with a window keep an eighth of their pages.
/// Gemma has five of them and one without.
#[test]
fn positions_of_a_long_context_have_their_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for (family, class, bytes) in [
        (ModelFamily::Llama, KernelClass::Mlx, 2 * 2 * 2 * 32 * 2),
        (ModelFamily::Llama, KernelClass::MlxF32, 2 * 2 * 2 * 32 * 4),
        (ModelFamily::Gemma3, KernelClass::Mlx, 13 * 2 * 128 * 4 / 8),
    ] {
        Tiny::new(family, BlockType::Q8_0).write(&path);
        let config = Config::read(&ModelSource::open(&path).unwrap()).unwrap();
        let page = mlx_page_bytes(&config, class, None);
        assert_eq!(page, PAGE * bytes, "{} {class}", family.name());
    }
}
