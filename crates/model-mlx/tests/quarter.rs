//! Golden folders of families whose tiny models have no GGUF files: several residual streams, rows
//! that attend to chosen pools or blocks, compressed keys. The same logits from splits as from one
//! rank, and from sequences that share steps as from each alone.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::ops::Range;
use std::sync::Arc;

use crate::common::compare::{largest, relative_rms};
use crate::common::golden;
use crate::common::runner::Runner;
use crate::{apart, furthest, mlx, split};
use paceline_base::KernelClass;
use paceline_model::{Batch, BatchSequence, BatchSize, Config, Logits, ModelSource, Split};
use paceline_tensor::PAGE;

/// Folders, and the distance of logits that sums in another order may give, relative to their size.
/// DeepSeek V4.1 rounds keys to 4 bits, so that a last bit may become a step of one.
const FOLDERS: [(&str, f64); 8] = [
    ("minimax-m3-bf16", 1e-4),
    ("minimax-m3-blocks-bf16", 1e-4),
    ("gemma3n-bf16", 1e-4),
    ("qwen4-bf16", 1e-4),
    ("glm5-next-bf16", 1e-4),
    ("kimi-k3-bf16", 1e-4),
    ("deepseek-v4-bf16", 1e-4),
    ("deepseek-v41-bf16", 1e-2),
];

#[test]
fn splits_of_this_quarters_families_agree_with_one_rank() {
    use KernelClass::{CpuF32, MlxF32};
    let Some(library) = apart("quarter::splits_of_this_quarters_families_agree_with_one_rank")
    else {
        return;
    };
    for (name, tolerance) in FOLDERS {
        let path = golden(&format!("hf/{name}"));
        let config = Config::read(&ModelSource::open(&path).unwrap()).unwrap();
        let run = |kind: &str, classes: &[KernelClass]| split(&path, kind, classes, &library);
        let alone = run("pipeline", &[MlxF32]);
        for kind in ["pipeline", "tensor", "experts"] {
            let plan = Split::plan(&config, kind.parse().unwrap(), 2, &[]);
            if let Err(error) = plan {
                println!("{name} {kind} of 2: {error}");
                continue;
            }
            let far = furthest(&run(kind, &[MlxF32; 2]), &alone);
            println!("{name} {kind} of 2: {far:.1e}");
            let most = if kind == "pipeline" { 0.0 } else { tolerance };
            assert!(far <= most, "{name} {kind}: {far:.1e}");
        }
        if Split::plan(&config, "pipeline".parse().unwrap(), 2, &[]).is_ok() {
            let naive = run("pipeline", &[CpuF32]);
            let far = furthest(&run("pipeline", &[CpuF32, MlxF32]), &naive);
            println!("{name} [cpu-f32, mlx-f32]: {far:.1e} from cpu-f32");
            assert!(
                far <= 10.0 * tolerance,
                "{name} [cpu-f32, mlx-f32]: {far:.1e}"
            );
        }
    }
}

/// Three sequences on pages that interleave: prompts in chunks, a draft that is taken back,
/// decoding rows over the end of a page.
#[test]
fn sequences_of_this_quarters_families_share_steps() {
    const SEQUENCES: usize = 3;
    const TOKENS: usize = 90;
    let Some(library) = apart("quarter::sequences_of_this_quarters_families_share_steps") else {
        return;
    };
    for (name, tolerance) in FOLDERS {
        let model = mlx(
            &library,
            &golden(&format!("hf/{name}")),
            KernelClass::MlxF32,
        );
        let token = |s: usize, i: usize| ((i * 37 + s * 11 + 5) % 300) as u32;
        let tokens = |s| (0..TOKENS).map(|i| token(s, i)).collect::<Vec<_>>();
        let all: Vec<Vec<u32>> = (0..SEQUENCES).map(tokens).collect();
        let alone = |tokens: &Vec<u32>| Runner::of(Arc::clone(&model), TOKENS).all(tokens);
        let expected: Vec<Vec<Vec<f32>>> = all.iter().map(alone).collect();
        let size = BatchSize {
            rows: SEQUENCES * TOKENS,
            logit_rows: SEQUENCES,
            sequences: SEQUENCES,
            context: 2 * PAGE,
        };
        let positions = SEQUENCES * 2 * PAGE;
        let mut compute = Arc::clone(&model).reserve(size, positions).unwrap();
        let pages = |s: usize| [s as u32, (SEQUENCES + s) as u32];
        let pages: Vec<[u32; 2]> = (0..SEQUENCES).map(pages).collect();
        let guess: Vec<u32> = (0..6).collect();
        let mut far = Vec::new();
        let mut step = |ranges: &[Range<usize>], guess: Option<&[u32]>| {
            let part = |(s, range): (usize, &Range<usize>)| {
                let own = guess.unwrap_or(&all[s][range.clone()]);
                BatchSequence::plain(own, range.start, &pages[s], Logits::Last)
            };
            let parts: Vec<_> = ranges.iter().enumerate().map(part).collect();
            let rows = compute.forward(&Batch::new(&parts)).unwrap();
            assert_eq!(rows, SEQUENCES);
            for (s, range) in ranges.iter().enumerate().filter(|_| guess.is_none()) {
                let own = &expected[s][range.end - 1];
                far.push(relative_rms(compute.logits_mut(s), own));
            }
        };
        let ends = |from: usize, to: usize| -> Vec<Range<usize>> {
            let end = |to: usize, s: usize| if to == 0 { 0 } else { (to + s).min(TOKENS) };
            (0..SEQUENCES).map(|s| end(from, s)..end(to, s)).collect()
        };
        step(&ends(0, 41), None);
        step(&ends(41, 60), None);
        step(&ends(60, 66), Some(&guess));
        (60..70).for_each(|i| step(&ends(i, i + 1), None));
        step(&ends(70, 85), None);
        let worst = largest(far.iter().copied());
        println!("{name}: sequences together within {worst:.1e} of each alone");
        assert!(worst <= tolerance, "{name}: {worst:.1e}");
    }
}
