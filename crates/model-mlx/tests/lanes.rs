//! Sequences whose pages interleave. Nothing is gathered, the decoding rows of a layer are one call
//! of attention, and the last layer computes the rows with logits.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::common::compare::relative_rms;
use crate::common::runner::Runner;
use crate::common::tiny::Tiny;
use crate::{apart, options, try_mlx};
use paceline_base::{BlockType, KernelClass};
use paceline_model::{Batch, BatchSequence, BatchSize, Compute, LoadedModel, Logits, ModelFamily};
use paceline_model_mlx::{MlxCounts, MlxModel, MlxOptions};
use paceline_tensor::{KvType, PAGE};

const SEQUENCES: usize = 8;
const PAGES: usize = 2;

/// Rows of each prompt that a step has, until sequence `s` has `60 + s`.
const CHUNK: usize = 23;

/// Decode steps, over the end of a page.
const DECODED: usize = 6;

/// A model's sequences: tokens, logits of each row alone, and interleaved pages.
struct Interleaved {
    model: Arc<MlxModel>,
    compute: Box<dyn Compute>,
    tokens: Vec<Vec<u32>>,
    expected: Vec<Vec<Vec<f32>>>,
    pages: Vec<Vec<u32>>,
}

impl Interleaved {
    fn new((path, tiny): (&Path, &Tiny), library: &Path, kv: Option<KvType>) -> Self {
        let options = options(library, KernelClass::MlxF32);
        let options = MlxOptions { kv, ..options };
        let model = Arc::new(try_mlx(path, options).unwrap());
        let weights: Arc<dyn LoadedModel> = Arc::clone(&model) as _;
        let tokens: Vec<Vec<u32>> = (0..SEQUENCES)
            .map(|s| tiny.tokens(60 + s + DECODED, s as u64))
            .collect();
        let alone = |tokens: &Vec<u32>| Runner::of(Arc::clone(&weights), 128).all(tokens);
        let size = BatchSize {
            rows: SEQUENCES * CHUNK,
            logit_rows: SEQUENCES,
            sequences: SEQUENCES,
            context: PAGES * PAGE,
        };
        let positions = SEQUENCES * PAGES * PAGE;
        let page = |s: usize, i: usize| (i * SEQUENCES + s) as u32;
        Self {
            compute: Arc::clone(&weights).reserve(size, positions).unwrap(),
            expected: tokens.iter().map(alone).collect(),
            pages: (0..SEQUENCES)
                .map(|s| (0..PAGES).map(|i| page(s, i)).collect())
                .collect(),
            tokens,
            model,
        }
    }

    /// Computes these rows of the sequences; the largest distance of their last logits.
    fn step(&mut self, rows: &[(usize, Range<usize>)]) -> f64 {
        let part = |(s, rows): &(usize, Range<usize>)| {
            BatchSequence::plain(
                &self.tokens[*s][rows.clone()],
                rows.start,
                &self.pages[*s],
                Logits::Last,
            )
        };
        let sequences: Vec<_> = rows.iter().map(part).collect();
        let batch = Batch::new(&sequences);
        assert_eq!(self.compute.forward(&batch).unwrap(), rows.len());
        let far = rows.iter().enumerate().map(|(i, (s, rows))| {
            let expected = &self.expected[*s][rows.end - 1];
            relative_rms(self.compute.logits_mut(i), expected)
        });
        far.fold(0.0, f64::max)
    }

    /// Prompts in chunks, then decode steps. The distance of their logits, and the counts of each.
    fn run(&mut self) -> (f64, MlxCounts, MlxCounts) {
        let (mut far, before) = (0.0f64, self.model.counts());
        for start in (0..60 + SEQUENCES).step_by(CHUNK) {
            let rows = (0..SEQUENCES).map(|s| (s, start..(60 + s).min(start + CHUNK)));
            let rows: Vec<_> = rows.filter(|(_, rows)| !rows.is_empty()).collect();
            far = far.max(self.step(&rows));
        }
        let read = self.model.counts();
        for i in 0..DECODED {
            let rows: Vec<_> = (0..SEQUENCES)
                .map(|s| (s, 60 + s + i..61 + s + i))
                .collect();
            far = far.max(self.step(&rows));
        }
        let decoded = self.model.counts();
        (far, difference(read, before), difference(decoded, read))
    }
}

fn difference(now: MlxCounts, before: MlxCounts) -> MlxCounts {
    MlxCounts {
        attentions: now.attentions - before.attentions,
        output_rows: now.output_rows - before.output_rows,
        gathers: now.gathers - before.gathers,
        ..now
    }
}

#[test]
fn interleaved_sequences_are_one_call_of_attention() {
    let Some(library) = apart("lanes::interleaved_sequences_are_one_call_of_attention") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for (family, kv) in [
        (ModelFamily::Llama, None),
        (ModelFamily::GptOss, None),   // windows and sinks
        (ModelFamily::DeepSeek, None), // latent attention, by sequence
        (ModelFamily::Llama, Some(KvType::Q4)),
        (ModelFamily::GptOss, Some(KvType::Q8)),
    ] {
        let tiny = Tiny {
            window: 8, // rings of 72 rows end between the decode steps
            ..Tiny::new(family, BlockType::Q8_0)
        };
        tiny.write(&path);
        let mut run = Interleaved::new((&path, &tiny), &library, kv);
        let (far, read, decoded) = run.run();
        let name = family.name();
        println!("{name} {kv:?}: within {far:.1e}, {read:?}, {decoded:?}");
        assert!(far < 1e-4, "{name} {kv:?}: {far:.1e}");
        // Three chunks of each prompt, whose last rows have logits.
        assert_eq!(read.output_rows, 3 * SEQUENCES as u64);
        assert_eq!(decoded.output_rows, (SEQUENCES * DECODED) as u64);
        if family == ModelFamily::Llama {
            assert_eq!(read.gathers, 0);
        }
        if family != ModelFamily::DeepSeek {
            let layers = run.model.config().layers.len() as u64;
            assert_eq!(decoded.gathers, 0);
            assert_eq!(decoded.attentions, layers * DECODED as u64);
        }
    }
}
