//! Pages in a store that outlives the engine, and that may lose or refuse any of them.

use std::cell::Cell;
use std::collections::{BTreeMap, hash_map::DefaultHasher};
use std::hash::{Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};

use paceline_base::lock;
use paceline_model::{PageName, PageStore, PersistedPage};
use paceline_tensor::PAGE;
use proptest::prelude::*;

use super::requests::{SAMPLED, prompt, request};
use super::rig::{Rig, SequenceOutcome, alone};
use super::tiny::TinyModel;
use crate::{EngineConfig, GenerationRequest, SamplingParams, SequenceId};

const CONTEXT: usize = 5 * PAGE;

/// A store in memory that outlives engines. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Shelf(Arc<Mutex<State>>, ShelfKind);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum ShelfKind {
    #[default]
    Own,
    /// Sends its pages to other nodes, and has none.
    Giving,
    /// Has pages that ranks with other numbers have computed, and gives each once.
    Foreign,
}

impl Shelf {
    /// The same pages in a store of another kind.
    fn as_kind(&self, kind: ShelfKind) -> Self {
        Self(Arc::clone(&self.0), kind)
    }
}

#[derive(Debug, Default)]
struct State {
    pages: BTreeMap<(PageName, u32), Vec<u8>>,
    /// State of a random sequence that selects lost pages; 0 loses none.
    losses: u64,
    got: usize,
    lost: usize,
}

impl State {
    /// Whether the next page is lost: one in four, if losses are enabled.
    fn loses(&mut self) -> bool {
        self.losses = self.losses.wrapping_mul(6_364_136_223_846_793_005);
        let loses = self.losses >> 62 == 1;
        self.lost += usize::from(loses);
        loses
    }
}

impl PageStore for Shelf {
    fn name(&self, before: &PageName, tokens: &[u32]) -> PageName {
        let mut name = PageName::default();
        for (i, word) in name.0.iter_mut().enumerate() {
            let mut hasher = DefaultHasher::new();
            (i, before, tokens).hash(&mut hasher);
            *word = hasher.finish() as u32;
        }
        name
    }

    fn has(&self, page: &PersistedPage) -> bool {
        let is_there = lock(&self.0).pages.contains_key(&(page.name, page.pool));
        is_there && self.1 != ShelfKind::Giving
    }

    fn put(&mut self, page: &PersistedPage, bytes: &[u8]) {
        let mut state = lock(&self.0);
        if !state.loses() {
            let key = (page.name, page.pool);
            let before = state.pages.insert(key, bytes.to_vec());
            assert!(before.is_none_or(|before| before == bytes), "{page:?}");
        }
    }

    fn get(&mut self, page: &PersistedPage, into: &mut [u8]) -> bool {
        let mut state = lock(&self.0);
        if state.loses() {
            state.pages.remove(&(page.name, page.pool));
        }
        let Some(bytes) = state.pages.get(&(page.name, page.pool)) else {
            into.fill(0xff); // as in a file with a wrong checksum
            return false;
        };
        into.copy_from_slice(bytes);
        state.got += 1;
        if self.1 == ShelfKind::Foreign {
            state.pages.remove(&(page.name, page.pool));
        }
        true
    }

    fn forget(&mut self, page: &PersistedPage) {
        lock(&self.0).pages.remove(&(page.name, page.pool));
    }

    fn wants_known(&self) -> bool {
        self.1 == ShelfKind::Giving
    }

    fn read_by(&self) -> Option<String> {
        (self.1 == ShelfKind::Foreign).then(|| "other".to_owned())
    }
}

fn sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: 3 * CONTEXT,
        max_running: 4,
        max_waiting: 40,
        max_rows: 40,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

fn sampled(prompt: Vec<u32>, n: usize, seed: u64) -> GenerationRequest {
    request(prompt, n, SamplingParams { seed, ..SAMPLED })
}

fn rig(tiny: &TinyModel, config: EngineConfig, shelf: &Shelf) -> Rig {
    let mut rig = Rig::new(tiny, config.clone());
    rig.engine = tiny.engine(config).with_store(Box::new(shelf.clone()));
    rig
}

/// The answer of a new engine with this store, and the tokens it did not compute.
fn after_a_restart(
    tiny: &TinyModel,
    wanted: &GenerationRequest,
    shelf: &Shelf,
) -> (SequenceOutcome, u64) {
    rig(tiny, sizes(), shelf).answer(wanted)
}

#[test]
fn a_prompt_is_not_computed_again_after_a_restart() {
    for tiny in [
        TinyModel::new(2),
        TinyModel::toy(2),
        TinyModel::delta_net(2),
    ] {
        let shelf = Shelf::default();
        let wanted = sampled(prompt(3 * PAGE + 9, 1), 20, 1);
        let expected = alone(&tiny, &wanted, CONTEXT);
        let (first, reused) = after_a_restart(&tiny, &wanted, &shelf);
        assert_eq!((first, reused), (expected.clone(), 0));
        let (again, reused) = after_a_restart(&tiny, &wanted, &shelf);
        assert_eq!((again, reused), (expected, 3 * PAGE as u64));
    }
}

/// A prefill engine also sends the pages that it has in its cache.
#[test]
fn pages_for_others_are_given_each_time() {
    for tiny in [
        TinyModel::new(2),
        TinyModel::toy(2),
        TinyModel::delta_net(2),
    ] {
        let shelf = Shelf::default();
        let config = EngineConfig {
            max_running: 1,
            ..sizes()
        };
        let mut rig = rig(&tiny, config, &shelf.as_kind(ShelfKind::Giving));
        let wanted = sampled(prompt(3 * PAGE + 9, 1), 20, 1);
        let read = GenerationRequest {
            max_tokens: 1,
            ..wanted.clone()
        };
        rig.submit(&read);
        rig.drain();
        lock(&shelf.0).pages.clear();
        rig.submit(&read);
        rig.drain();
        let expected = alone(&tiny, &wanted, CONTEXT);
        let decoded = after_a_restart(&tiny, &wanted, &shelf);
        assert_eq!(decoded, (expected, 3 * PAGE as u64));
    }
}

/// Pages with other numbers are neither shared nor stored: the next sequence computes its prompt.
/// A sequence that began with cached pages of its own takes them too, and names them.
#[test]
fn pages_with_other_numbers_are_for_their_sequence_alone() {
    for tiny in [TinyModel::new(2), TinyModel::toy(2)] {
        let shelf = Shelf::default();
        let wanted = sampled(prompt(3 * PAGE + 9, 1), 20, 1);
        let (own, _) = after_a_restart(&tiny, &wanted, &shelf);
        let mut rig = rig(&tiny, sizes(), &shelf.as_kind(ShelfKind::Foreign));
        let (first, reused) = rig.answer(&wanted);
        assert_eq!(first.read_by.as_deref(), Some("other"));
        assert_eq!((&first.tokens, reused), (&own.tokens, 3 * PAGE as u64));
        // Pages of windows that no row reads stay where they are.
        let stored = lock(&shelf.0).pages.keys().any(|(_, pool)| *pool == 0);
        assert!(!stored, "pages with other numbers are stored");
        assert_eq!(rig.answer(&wanted), (own.clone(), 0));
        // It finds its first pages in the cache, and the later ones in the store.
        let longer = sampled(prompt(4 * PAGE + 9, 1), 5, 1);
        let (expected, _) = after_a_restart(&tiny, &longer, &shelf);
        let (again, reused) = rig.answer(&longer);
        assert_eq!(again.read_by.as_deref(), Some("other"));
        assert_eq!((&again.tokens, reused), (&expected.tokens, 4 * PAGE as u64));
        assert_eq!(rig.answer(&wanted).1, 3 * PAGE as u64, "its own pages");
    }
}

/// Simultaneous requests with one prompt wait for the one that restores it.
#[test]
fn a_prompt_of_many_is_recalled_once() {
    let tiny = TinyModel::new(1);
    let shelf = Shelf::default();
    let wanted = [0, 1, 2, 3].map(|seed| sampled(prompt(3 * PAGE + 2, 1), 20, seed));
    after_a_restart(&tiny, &wanted[0], &shelf);
    let mut rig = rig(&tiny, sizes(), &shelf);
    let ids = wanted.each_ref().map(|r| rig.submit(r));
    rig.drain();
    assert_eq!(rig.engine.n_reused(), 4 * 3 * PAGE as u64);
    assert_eq!(lock(&shelf.0).got, 3);
    rig.check_alone(&tiny, &ids, &wanted);
}

/// A prompt longer than the restore limit of a step, while another answer is generated.
#[test]
fn answers_go_on_while_a_long_prompt_is_recalled() {
    const LONG: usize = 60 * PAGE;
    for tiny in [TinyModel::new(1), TinyModel::delta_net(1)] {
        let config = EngineConfig {
            context: LONG + 2 * PAGE,
            cache_positions: 2 * LONG,
            max_rows: 512,
            ..sizes()
        };
        let shelf = Shelf::default();
        let long = sampled(prompt(LONG + 3, 1), 5, 1);
        let (expected, _) = rig(&tiny, config.clone(), &shelf).answer(&long);
        let mut rig = rig(&tiny, config, &shelf);
        let short = rig.submit(&sampled(prompt(10, 5), 60, 2));
        rig.steps(3);
        let id = rig.submit(&long);
        rig.steps(1); // the rig fails if an answer stalls
        assert_eq!(rig.engine.n_reused(), 32 * PAGE as u64);
        rig.drain();
        assert_eq!(rig.outcomes[&id], expected);
        assert!(rig.engine.n_reused() >= (LONG - 2 * PAGE) as u64);
        assert!(rig.outcomes[&short].finish.is_some());
    }
}

/// Requests share prefixes, and the engine is recreated at times. The caches are too small for all,
/// and the store loses some pages.
#[test]
fn no_answer_depends_on_what_a_store_has() {
    for tiny in [
        TinyModel::new(2),
        TinyModel::toy(2),
        TinyModel::delta_net(1),
    ] {
        let base = prompt(4 * PAGE, 1);
        let one = |i: usize| {
            let common = [10, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 7][i % 5];
            let own = prompt(20 * (i % 3) + 1, 90 + i as u32);
            sampled([&base[..common], &own].concat(), 30, i as u64)
        };
        let all = (0..15).map(|i| (one(i), alone(&tiny, &one(i), CONTEXT)));
        let all: Vec<(GenerationRequest, SequenceOutcome)> = all.collect();
        let calls =
            prop::collection::vec((0..15usize, 0..40usize, prop::bool::weighted(0.2)), 1..25);
        let config = ProptestConfig::with_cases(30);
        let reads = Cell::new(0);
        proptest!(config, |(calls in calls, losses in any::<u64>(), pages in 0..9usize)| {
            let shelf = Shelf::default();
            lock(&shelf.0).losses = losses | 1;
            let config = EngineConfig {
                cache_positions: CONTEXT + pages * PAGE,
                ..sizes()
            };
            let mut rig = rig(&tiny, config.clone(), &shelf);
            let mut asked = Vec::new();
            for (which, steps, restarts) in calls {
                if restarts {
                    rig.drain();
                    check(&rig, &mut asked, &all);
                    rig = self::rig(&tiny, config.clone(), &shelf);
                }
                asked.push((rig.submit(&all[which].0), which));
                rig.steps(steps);
            }
            rig.drain();
            check(&rig, &mut asked, &all);
            reads.set(reads.get() + lock(&shelf.0).got);
        });
        assert!(reads.get() > 30, "{}", reads.get());
    }
}

fn check(
    rig: &Rig,
    asked: &mut Vec<(SequenceId, usize)>,
    all: &[(GenerationRequest, SequenceOutcome)],
) {
    for (id, which) in asked.drain(..) {
        assert_eq!(rig.outcomes[&id], all[which].1, "{:?}", all[which].0);
    }
}
