//! Steps that are submitted before the tokens of the step before are read. Answers are the
//! same, few bytes go to the host, and the host works while the device does.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::common::places::{PATIENCE, places};
use crate::common::tiny::Tiny;
use crate::hang::build;
use crate::pages::Shelf;
use crate::slow::{FILE, LOG, again};
use crate::{apart, library, mlx_rank, options, try_mlx};
use paceline_base::{BlockType, KernelClass, SplitMix64};
use paceline_comm::Deadline;
use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, Config, FollowOutcome, LoadedModel, Logits,
    ModelFamily, ModelSource, PageName, PersistedPage, Split, TokenDraw,
};
use paceline_model_mlx::{MlxCounts, MlxModel};
use paceline_tensor::PAGE;

/// Sequences at the same time, and pages of each.
const SEQUENCES: usize = 3;
const PAGES: usize = 2;

/// Decode steps on the device with a queue.
const STEPS: usize = 9;

fn model(path: &Path, library: &Path) -> Arc<MlxModel> {
    Arc::new(try_mlx(path, options(library, KernelClass::MlxF32)).unwrap())
}

fn reserve(model: &Arc<MlxModel>) -> Box<dyn Compute> {
    let size = BatchSize {
        rows: 128,
        logit_rows: SEQUENCES,
        sequences: SEQUENCES,
        context: PAGES * PAGE,
    };
    let model: Arc<dyn LoadedModel> = Arc::clone(model) as _;
    model.reserve(size, SEQUENCES * PAGES * PAGE).unwrap()
}

/// Place and bits of the largest logit. Logits that stayed on the device are NaN.
fn largest(row: &[f32]) -> (u32, u32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, logit) in (0..).zip(row) {
        if *logit > best.1 {
            best = (token, *logit);
        }
    }
    (best.0, best.1.to_bits())
}

/// A sequence of a schedule: its pages, and the tokens that no step has had yet.
struct Sequence {
    pages: Vec<u32>,
    position: usize,
    pending: Vec<u32>,
    logits: Logits,
}

impl Sequence {
    fn in_batch(&self) -> BatchSequence<'_> {
        let end = self.position + self.pending.len();
        BatchSequence::plain(
            &self.pending,
            self.position,
            &self.pages[..end.div_ceil(PAGE)],
            self.logits,
        )
    }

    /// Appends a token.
    fn take(&mut self, token: u32) {
        self.position += self.pending.len();
        self.pending = vec![token];
        if let Logits::Drawn(draw) = &mut self.logits {
            *draw = draw.next();
        }
    }
}

const DRAWN: Logits = Logits::Drawn(TokenDraw {
    temperature: 1.5,
    top_k: 20,
    top_p: 0.9,
    ..TokenDraw::LARGEST
});

/// A step of all sequences: the token of each, with the bits of its logit.
fn forward(compute: &mut dyn Compute, sequences: &mut [Sequence]) -> Vec<(u32, u32)> {
    let batch: Vec<_> = sequences.iter().map(Sequence::in_batch).collect();
    let rows = compute.forward(&Batch::new(&batch)).unwrap();
    let best = (0..rows).map(|i| largest(compute.logits_mut(i)));
    let best: Vec<(u32, u32)> = best.collect();
    let each = sequences.iter_mut().zip(&best);
    each.for_each(|(sequence, (token, _))| sequence.take(*token));
    best
}

/// A schedule of sequences that begin, pause and end at random.
struct Schedule {
    random: SplitMix64,
    free: VecDeque<u32>,
    sequences: Vec<Sequence>,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        Self {
            random: SplitMix64::new(seed),
            free: (0..(SEQUENCES * PAGES) as u32).collect(),
            sequences: Vec::new(),
        }
    }

    /// A step that asks for `logits`: the largest logit of each sequence, with its place.
    fn step(&mut self, compute: &mut dyn Compute, logits: Logits) -> Vec<(u32, u32)> {
        if self.sequences.len() < SEQUENCES && self.random.below(8) == 0
            || self.sequences.is_empty()
        {
            let prompt = 1 + self.random.below(70);
            let random = &mut self.random;
            self.sequences.push(Sequence {
                pages: self.free.drain(..PAGES).collect(),
                position: 0,
                pending: (0..prompt).map(|_| random.below(300) as u32).collect(),
                logits,
            });
        }
        if self.random.below(12) == 0 {
            self.sequences.rotate_left(1); // another order of the same sequences
        }
        let best = forward(compute, &mut self.sequences);
        let (random, free) = (&mut self.random, &mut self.free);
        self.sequences.retain(|s| {
            let ends = s.position + 1 == PAGES * PAGE || random.below(40) == 0;
            if ends {
                free.extend(&s.pages);
            }
            !ends
        });
        best
    }
}

/// A schedule's largest logits, and the counts of its steps.
fn run_alone(model: &Arc<MlxModel>, logits: Logits) -> (Vec<Vec<(u32, u32)>>, MlxCounts) {
    let mut compute = reserve(model);
    let before = model.counts();
    let steps = lead(&mut *compute, logits);
    let now = model.counts();
    let counts = MlxCounts {
        logit_bytes: now.logit_bytes - before.logit_bytes,
        steps_ahead: now.steps_ahead - before.steps_ahead,
        ..now
    };
    (steps, counts)
}

/// The tokens of a schedule, with the bits of their logits.
fn lead(compute: &mut dyn Compute, logits: Logits) -> Vec<Vec<(u32, u32)>> {
    let mut schedule = Schedule::new(5);
    (0..40).map(|_| schedule.step(compute, logits)).collect()
}

/// Runs `lead` at the leader of a tensor split over two ranks: its result, and the counts of each.
fn on_ranks<T: Send>(
    (path, library): (&Path, &Path),
    class: KernelClass,
    lead: impl Fn(&mut dyn Compute) -> T + Sync,
) -> (T, Vec<MlxCounts>) {
    let lead = &lead;
    let config = Config::read(&ModelSource::open(path).unwrap()).unwrap();
    let cut = Split::plan(&config, "tensor".parse().unwrap(), 2, &[]).unwrap();
    std::thread::scope(|scope| {
        let run = |place| {
            scope.spawn(move || {
                let model = mlx_rank(place, path, &[], options(library, class));
                let mut compute = reserve(&model);
                let found = model.shard().leads().then(|| lead(&mut *compute));
                match found {
                    Some(_) => compute.idle().unwrap(),
                    None => while compute.follow().unwrap() == FollowOutcome::Step {},
                }
                let deadline = Deadline::at(Instant::now() + PATIENCE);
                model.links().unwrap().world.barrier(deadline).unwrap();
                drop(compute); // awaits the last step ahead
                model.links().unwrap().world.barrier(deadline).unwrap();
                (found, model.counts())
            })
        };
        let threads: Vec<_> = places(&config, &cut).into_iter().map(run).collect();
        let all = threads.into_iter().map(|thread| thread.join().unwrap());
        let (found, counts): (Vec<_>, Vec<_>) = all.unzip();
        (found.into_iter().flatten().next().unwrap(), counts)
    })
}

/// Ranks of a tensor split have the tokens of a step without the leader's next plan. The schedule
/// ends and rearranges sequences, so that some of their steps are computed in vain.
#[test]
fn ranks_compute_the_next_step_before_its_plan() {
    let Some(library) = apart("ahead::ranks_compute_the_next_step_before_its_plan") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    // Whole products; states; lanes, where tokens are drawn and pages begin.
    for (family, class, logits) in [
        (ModelFamily::Llama, KernelClass::MlxExact, Logits::Best),
        (ModelFamily::Qwen35, KernelClass::MlxF32, Logits::Best),
        (ModelFamily::Llama, KernelClass::MlxF32, DRAWN),
    ] {
        Tiny::new(family, BlockType::Q8_0).write(&path);
        let run = |logits| on_ranks((&path, &library), class, |compute| lead(compute, logits));
        let (got, counts) = run(logits);
        let tokens = got.iter().map(Vec::len).sum::<usize>() as u64;
        println!("{} {class}: {tokens} tokens, {counts:?}", family.name());
        assert_eq!(counts[0].steps_ahead, counts[1].steps_ahead);
        assert!(counts[0].steps_ahead > 20, "{counts:?}");
        if logits == DRAWN {
            // A single device: other bits, the same tokens. Of each row, 42 places and logits.
            assert!(counts[0].logit_bytes < 2 * 42 * 8 * tokens, "{counts:?}");
            let expected = run_alone(&model(&path, &library), logits).0;
            assert_eq!(tokens_of(&got), tokens_of(&expected));
            continue;
        }
        let (expected, plain) = run(Logits::Last);
        assert!(got == expected, "{} {class}", family.name());
        assert!(plain.iter().all(|counts| counts.steps_ahead == 0));
        // Steps computed in vain are counted too.
        assert!(counts[0].logit_bytes < 2 * 8 * tokens, "{counts:?}");
    }
}

fn tokens_of(steps: &[Vec<(u32, u32)>]) -> Vec<u32> {
    steps.iter().flatten().map(|(token, _)| *token).collect()
}

/// The same schedule with whole logits has no step ahead.
#[test]
fn steps_ahead_give_the_same_bits() {
    let Some(library) = apart("ahead::steps_ahead_give_the_same_bits") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    // Lanes; windows and embeddings of layers; states.
    for family in [ModelFamily::Llama, ModelFamily::Gemma4, ModelFamily::Qwen35] {
        Tiny::new(family, BlockType::Q8_0).write(&path);
        let model = model(&path, &library);
        let (expected, plain) = run_alone(&model, Logits::Last);
        let (got, counts) = run_alone(&model, Logits::Best);
        assert_eq!(got, expected, "{}", family.name());
        let tokens = got.iter().map(Vec::len).sum::<usize>() as u64;
        println!("{}: {tokens} tokens, {counts:?}", family.name());
        assert_eq!(plain.steps_ahead, 0);
        assert!(counts.steps_ahead > 20, "{counts:?}");
        assert_eq!(counts.logit_bytes, 8 * tokens);
    }
}

/// Pages that begin keep no step from being ahead: those of two sequences at once, and of a third
/// one earlier. The pages before them are stored meanwhile.
#[test]
fn steps_are_ahead_where_pages_begin() {
    let Some(library) = library("steps are ahead where pages begin") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    Tiny::new(ModelFamily::Llama, BlockType::Q8_0).write(&path);
    let model = model(&path, &library);
    let decoded = |compute: &mut dyn Compute, logits| {
        let mut sequences: Vec<Sequence> = [(20, 0), (20, 1), (40, 2)]
            .map(|(prompt, first)| Sequence {
                pages: vec![first, first + SEQUENCES as u32],
                position: 0,
                pending: (0..prompt).map(|i| (7 * i + first) % 300).collect(),
                logits,
            })
            .into();
        let step = |_| {
            let best = forward(compute, &mut sequences);
            let full = sequences.iter().filter(|s| s.position == PAGE);
            let full = full.map(|s| PersistedPage {
                name: PageName::default(),
                index: s.pages[0],
                pool: 0,
                page: s.pages[0],
            });
            let full: Vec<PersistedPage> = full.collect();
            if compute.store().is_some() {
                compute.persist_pages(&full).unwrap();
            }
            best
        };
        (0..=PAGE).map(step).collect::<Vec<_>>()
    };
    let alone = |logits| {
        let before = model.counts().steps_ahead;
        let mut compute = reserve(&model);
        let shelf = Shelf {
            pages: Arc::default(),
            kv: None,
        };
        compute.attach(Box::new(shelf.clone()));
        let answers = decoded(&mut *compute, logits);
        let pages = shelf.pages.lock().unwrap().clone();
        (answers, pages, model.counts().steps_ahead - before)
    };
    let (expected, expected_pages, _) = alone(Logits::Last);
    let (got, pages, ahead) = alone(Logits::Best);
    assert_eq!(got, expected);
    assert_eq!(pages.len(), SEQUENCES);
    assert!(pages == expected_pages);
    assert_eq!(ahead, PAGE as u64);
    let (expected, _, _) = alone(DRAWN);
    let at = (&*path, &*library);
    let (got, counts) = on_ranks(at, KernelClass::MlxF32, |compute| decoded(compute, DRAWN));
    assert_eq!(tokens_of(&got), tokens_of(&expected));
    assert!(
        counts.iter().all(|it| it.steps_ahead == PAGE as u64),
        "{counts:?}"
    );
}

/// Decodes [`STEPS`] tokens and drops the cache. Of each wait for the device: `1` where it has
/// another step to compute, else `0`; `s` for a wait for all of its work.
fn waits(model: &Arc<MlxModel>, logits: Logits) -> String {
    let log = std::env::var_os(LOG).unwrap();
    std::fs::write(&log, "").unwrap();
    let mut compute = reserve(model);
    let mut token = 7;
    for position in 0..STEPS {
        let tokens = [token];
        let sequence = BatchSequence::plain(&tokens, position, &[0], logits);
        let sequences = [sequence];
        let batch = Batch::new(&sequences);
        compute.forward(&batch).unwrap();
        token = largest(compute.logits_mut(0)).0;
    }
    drop(compute);
    std::fs::read_to_string(log).unwrap()
}

/// When a step's token is there, the device computes the next step already. The cache is dropped
/// when the device has computed the last one.
#[test]
fn a_host_works_while_the_device_computes() {
    let test = "a host works while the device computes";
    let Some(mlx) = library(test) else {
        return;
    };
    let Some(file) = std::env::var_os(FILE) else {
        return again("ahead::a_host_works_while_the_device_computes");
    };
    let dir = tempfile::tempdir().unwrap();
    let Some(device) = build::linked(dir.path(), &mlx, "queue.rs") else {
        return eprintln!("SKIPPED {test}: no rustc");
    };
    let path = dir.path().join("tiny.gguf");
    Tiny::new(ModelFamily::Llama, BlockType::Q8_0).write(&path);
    let model = model(&path, &device);
    std::fs::write(file, "").unwrap();
    let plain = waits(&model, Logits::Last);
    assert!(plain.chars().all(|wait| wait == '0'), "{plain}");
    let ahead = waits(&model, Logits::Best);
    println!("waits of {STEPS} steps: {ahead}");
    assert!(
        ahead.len() > STEPS && ahead.ends_with(&format!("{}s", "1".repeat(STEPS - 2))),
        "{ahead}"
    );
}
