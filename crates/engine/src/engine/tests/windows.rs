//! Several in-flight speculation windows of one sequence. They change no answer; the tests measure
//! their gain in virtual time over slow links.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::{Bytes, KernelClass};
use paceline_model::{
    Batch, BatchSize, Compute, Config, Error, FollowOutcome, Links, LoadedModel, Model, Shard,
    WindowPool,
};
use paceline_tensor::{Kernels, PAGE};
use proptest::prelude::*;

use super::draft_model::frozen;
use super::drafts::babble;
use super::in_flight::{CONTEXT, calls, disturb, rig_of, sizes};
use super::page_store::Shelf;
use super::requests::{SAMPLED, biased, mixed, prompt, request};
use super::rig::{Rig, SequenceOutcome, alone};
use super::tiny::{END, TinyModel, VOCAB};
use crate::{
    Draft, DraftCounts, DraftNetwork, EngineConfig, Finish, GenerationRequest, SamplingParams,
};

thread_local! {
    /// Virtual time of the test on this thread.
    static CLOCK: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

fn advance_to(time: Duration) {
    CLOCK.set(CLOCK.get().max(time));
}

fn virtual_now() -> Instant {
    frozen() + CLOCK.get()
}

/// A pipeline in virtual time; the leader is its last stage.
#[derive(Clone, Debug)]
pub(super) struct VirtualPipeline {
    /// Time of a message between two ranks.
    hop: Duration,
    /// Of a stage with one row, and of each further row.
    stage: Duration,
    row: Duration,
    /// When each stage before the leader's has computed all announced batches.
    free: Vec<Duration>,
    /// When the leader can start each in-flight batch, and how long that takes.
    due: VecDeque<(Duration, Duration)>,
}

impl VirtualPipeline {
    fn new(stages: usize, hop_ms: u64) -> Self {
        Self {
            hop: Duration::from_millis(hop_ms),
            stage: Duration::from_millis(2),
            row: Duration::from_micros(200),
            free: vec![Duration::ZERO; stages - 1],
            due: VecDeque::new(),
        }
    }

    /// Sends a plan from the leader; the residual follows it from stage to stage.
    pub(super) fn announce(&mut self, rows: usize) {
        let takes = self.stage + self.row * (rows as u32 - 1);
        let mut at = CLOCK.get();
        for free in &mut self.free {
            at = (at + self.hop).max(*free) + takes;
            *free = at;
        }
        self.due.push_back((at + self.hop, takes));
    }

    /// The leader computes its stage of the next batch.
    pub(super) fn arrive(&mut self) {
        let (due, takes) = self.due.pop_front().unwrap();
        advance_to(due);
        advance_to(CLOCK.get() + takes);
    }
}

/// A draft model with slow passes and some wrong draft tokens.
#[derive(Clone, Debug)]
struct FaultyDraft {
    model: Arc<Model>,
    /// Wrong draft tokens in a hundred.
    wrong: u64,
    seed: u64,
    pass: Duration,
}

impl FaultyDraft {
    fn draft(self, tiny: &TinyModel) -> Draft {
        Draft {
            network: DraftNetwork::Model {
                model: Arc::new(self),
                tokenizer: Arc::clone(&tiny.tokenizer),
            },
            now: virtual_now,
        }
    }

    /// The wrong draft token after `position`, if there is to be one.
    fn errs(&self, position: usize) -> Option<usize> {
        let mixed = (position as u64 ^ (self.seed << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let drawn = mixed >> 32;
        (drawn % 100 < self.wrong).then_some(drawn as usize / 100 % VOCAB)
    }
}

impl LoadedModel for FaultyDraft {
    fn config(&self) -> &Config {
        self.model.config()
    }

    fn shard(&self) -> &Shard {
        self.model.shard()
    }

    fn class(&self) -> KernelClass {
        self.model.class()
    }

    fn weight_bytes(&self) -> Bytes {
        self.model.weight_bytes()
    }

    fn kernels(&self) -> &Kernels {
        self.model.kernels()
    }

    fn device(&self) -> String {
        self.model.device()
    }

    fn links(&self) -> Option<&Arc<Links>> {
        self.model.links()
    }

    fn reserve(
        self: Arc<Self>,
        size: BatchSize,
        positions: usize,
    ) -> Result<Box<dyn Compute>, Error> {
        let passes = FaultyDraftPasses {
            inner: Arc::clone(&self.model).reserve(size, positions)?,
            of: self,
            wrong: Vec::new(),
        };
        Ok(Box::new(passes))
    }
}

#[derive(Debug)]
struct FaultyDraftPasses {
    inner: Box<dyn Compute>,
    of: Arc<FaultyDraft>,
    /// The wrong draft token of each sequence in the last pass.
    wrong: Vec<Option<usize>>,
}

impl Compute for FaultyDraftPasses {
    fn pages(&self) -> usize {
        self.inner.pages()
    }

    fn windows(&self) -> &[WindowPool] {
        self.inner.windows()
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<usize, Error> {
        advance_to(CLOCK.get() + self.of.pass);
        let ends = batch.sequences.iter().map(|s| s.position + s.tokens.len());
        self.wrong = ends.map(|end| self.of.errs(end)).collect();
        self.inner.forward(batch)
    }

    fn logits_mut(&mut self, i: usize) -> &mut [f32] {
        let logits = self.inner.logits_mut(i);
        if let Some(token) = self.wrong[i] {
            logits[token] = 1e4;
        }
        logits
    }

    fn idle(&mut self) -> Result<(), Error> {
        self.inner.idle()
    }

    fn follow(&mut self) -> Result<FollowOutcome, Error> {
        self.inner.follow()
    }
}

/// Runs a step and reports its duration to the engine.
fn timed_step(rig: &mut Rig) {
    let began = CLOCK.get();
    rig.step();
    let took = CLOCK.get().checked_sub(began);
    rig.engine.record_duration(took.unwrap());
}

const LONG: usize = 8 * PAGE;

/// A single stream over four stages with links of `hop_ms`, at most nine announced batches.
fn on_a_line(tiny: &TinyModel, drafts: usize, hop_ms: u64) -> Rig {
    let config = EngineConfig {
        cache_positions: LONG,
        drafts,
        ..EngineConfig::single("tiny", LONG)
    };
    rig_of(tiny, config, (4, 9), Some(VirtualPipeline::new(4, hop_ms)))
}

/// The outcome of a single request, its duration and draft counts. The last number is its maximum
/// of in-flight windows after a step: none without drafts.
fn answer(
    rig: &mut Rig,
    request: &GenerationRequest,
) -> (SequenceOutcome, Duration, DraftCounts, usize) {
    let (began, id) = (CLOCK.get(), rig.submit(request));
    let mut most = 0;
    while !rig.engine.is_idle() {
        timed_step(rig);
        let flights = rig.engine.running.iter().map(|s| s.n_in_flight);
        most = most.max(flights.max().unwrap_or(0));
    }
    rig.drain(); // no page is lost
    let took = CLOCK.get().checked_sub(began).unwrap();
    let outcome = rig.outcomes.remove(&id).unwrap();
    (outcome, took, rig.engine.draft_counters().totals(), most)
}

/// An answer of `n` tokens.
fn endless(sampling: SamplingParams, n: usize) -> GenerationRequest {
    let mut sampling = sampling;
    sampling.logit_bias.push((END, -100.0));
    request(prompt(20, 7), n, sampling)
}

/// An answer that repeats one token.
fn circle(n: usize) -> GenerationRequest {
    endless(biased(&[(5, 100.0)]), n)
}

/// Speed-up of a request by drafts; the answers are equal.
fn gain(
    tiny: &TinyModel,
    request: &GenerationRequest,
    hop_ms: u64,
    draft: Option<FaultyDraft>,
) -> (f64, usize) {
    let plain = answer(&mut on_a_line(tiny, 0, hop_ms), request);
    let mut rig = on_a_line(tiny, 8, hop_ms);
    if let Some(draft) = draft {
        rig.engine.set_draft_model(&draft.draft(tiny)).unwrap();
    }
    let guessed = answer(&mut rig, request);
    assert_eq!(plain.0, guessed.0);
    assert_eq!((plain.2, plain.3), (DraftCounts::default(), 0));
    (plain.1.div_duration_f64(guessed.1), guessed.3)
}

/// A draft model of a quarter of the size: its pass takes as long as one of four stages.
fn quarter(tiny: &TinyModel, wrong: u64, seed: u64) -> FaultyDraft {
    FaultyDraft {
        model: Arc::clone(&tiny.model),
        wrong,
        seed,
        pass: Duration::from_millis(2),
    }
}

/// Required speed-up for repetitive text at 25 ms: 3.
#[test]
fn repetitive_text_fills_slow_links_with_windows() {
    let tiny = TinyModel::new(1);
    let (gain, windows) = gain(&tiny, &circle(300), 25, None);
    assert!(gain >= 6.0, "{gain}");
    assert!(windows > 4, "{windows} under way");
    let mut rig = on_a_line(&tiny, 8, 25);
    let (outcome, _, guesses, _) = answer(&mut rig, &circle(300));
    // Most of the answer came in overlapping windows, with few wasted rows.
    assert_eq!(outcome.tokens.len(), 300);
    assert!(guesses.windows > 15, "{guesses:?}");
    assert!(rig.n_steps < 100, "{} steps", rig.n_steps);
    assert!(2 * guesses.right > guesses.checked, "{guesses:?}");
}

/// Required speed-up for a draft model of a quarter of the size at 25 ms: 1.3.
#[test]
fn a_draft_pays_over_slow_links() {
    let tiny = TinyModel::new(1);
    let sampled = SamplingParams { seed: 3, ..SAMPLED };
    for (sampling, seed) in [(SamplingParams::default(), 1), (sampled, 2)] {
        let request = endless(sampling, 200);
        let (gain, windows) = gain(&tiny, &request, 25, Some(quarter(&tiny, 35, seed)));
        assert!(gain >= 1.3 && windows > 1, "{gain}, {windows} under way");
    }
}

/// Required: 0.95 of the speed without drafts, over slow and fast links, for n-gram drafts and a
/// useless draft model.
#[test]
fn guesses_that_are_wrong_cost_little() {
    let tiny = TinyModel::new(1);
    let sampling = SamplingParams {
        temperature: 3.0,
        seed: 4,
        ..SAMPLED
    };
    let request = endless(sampling, 400);
    for hop_ms in [0, 25] {
        let by_text = gain(&tiny, &request, hop_ms, None).0;
        let by_draft = gain(&tiny, &request, hop_ms, Some(quarter(&tiny, 100, 5))).0;
        let gains = [by_text, by_draft];
        assert!(
            gains.iter().all(|gain| *gain >= 0.95),
            "{hop_ms} ms: {gains:?}"
        );
    }
}

/// A stream with several in-flight windows.
fn mid_flight(tiny: &TinyModel, request: &GenerationRequest) -> (Rig, crate::SequenceId) {
    let mut rig = on_a_line(tiny, 8, 25);
    let id = rig.submit(request);
    while rig.engine.running.first().is_none_or(|s| s.n_in_flight < 4) {
        timed_step(&mut rig);
        assert!(!rig.engine.is_idle(), "over with fewer windows");
    }
    (rig, id)
}

#[test]
fn an_answer_may_be_cancelled_moved_or_late_in_mid_flight() {
    let tiny = TinyModel::new(1);
    let whole = answer(&mut on_a_line(&tiny, 0, 25), &circle(300)).0;
    let (mut rig, id) = mid_flight(&tiny, &circle(300));
    rig.cancel(id);
    assert_eq!((rig.engine.n_running(), rig.engine.is_idle()), (0, false));
    rig.drain(); // which finds all pages free again
    assert!(rig.outcomes[&id].tokens.len() < 300);

    let (mut rig, id) = mid_flight(&tiny, &circle(300));
    let (snapshot, past) = rig.take(id);
    let id = rig.restore(&snapshot, past);
    rig.drain();
    assert_eq!(rig.outcomes[&id], whole);

    let (mut rig, id) = mid_flight(&tiny, &circle(300));
    let (due, before) = (rig.engine.elapsed, rig.outcomes[&id].tokens.len());
    rig.engine.running[0].due = Some(due);
    while !rig.engine.is_idle() {
        timed_step(&mut rig);
    }
    let outcome = &rig.outcomes[&id];
    assert_eq!(outcome.finish, Some(Finish::Deadline));
    // It ends when its in-flight rows complete, which may be its last tokens.
    let n = outcome.tokens.len();
    assert!(before < n && n < 300, "{before} {n}");
    assert_eq!(outcome.tokens[..], whole.tokens[..n]);
    assert_eq!(rig.engine.pages.available(), rig.engine.compute.pages());
}

/// Stages, further announced batches, draft tokens per window or 0, wrong ones in a hundred, seed.
type Pattern = (usize, usize, usize, u64, u64);

fn patterns() -> impl Strategy<Value = Pattern> {
    (2..5usize, 0..6usize, 0..9usize, 0..70u64, any::<u64>())
}

/// Costs at which drafts pay with half of the tokens right.
fn cheap(rig: &mut Rig) {
    let costs = &mut rig.engine.costs;
    (1..=64).for_each(|rows| costs.record(rows, Duration::from_millis(1)));
}

#[test]
fn windows_under_way_change_no_answer() {
    let windows = Cell::new(0);
    for tiny in [
        TinyModel::new(1),
        TinyModel::toy(1),
        TinyModel::delta_net(1),
    ] {
        let before = windows.get();
        let mut requests = mixed(&tiny);
        requests.extend((0..3).map(babble));
        let expected = requests.iter().map(|r| alone(&tiny, r, CONTEXT));
        let expected: Vec<SequenceOutcome> = expected.collect();
        let sizes_of = (1..4usize, 0..6usize, prop::bool::ANY, prop::bool::ANY);
        proptest!(ProptestConfig::with_cases(30), |(
            calls in calls(), pattern in patterns(), sizes_of in sizes_of
        )| {
            let (depth, more, drafts, wrong, seed) = pattern;
            let (max_running, pages, keeps, is_drafted) = sizes_of;
            let config = EngineConfig {
                cache_positions: CONTEXT + pages * PAGE,
                max_running,
                drafts,
                ..sizes()
            };
            let mut rig = rig_of(&tiny, config, (depth, depth + more), None).unordered();
            cheap(&mut rig);
            if keeps {
                rig.engine.compute.attach(Box::new(Shelf::default()));
            }
            if is_drafted {
                let draft = FaultyDraft { pass: Duration::ZERO, ..quarter(&tiny, wrong, seed) };
                rig.engine.set_draft_model(&draft.draft(&tiny)).unwrap();
            }
            let mut asked = Vec::new();
            for (which, steps, what) in calls {
                let which = which % requests.len();
                asked.push((rig.submit(&requests[which]), which));
                rig.steps(steps);
                disturb(&mut rig, &mut asked, (which, what));
            }
            rig.drain();
            for (id, which) in asked {
                prop_assert_eq!(&rig.outcomes[&id], &expected[which]);
            }
            windows.set(windows.get() + rig.engine.draft_counters().totals().windows);
        });
        assert!(windows.get() > before, "no window behind another");
    }
    // 40 runs of random cases have at least 588; a single model may have few.
    assert!(windows.get() > 150, "{} behind others", windows.get());
}
