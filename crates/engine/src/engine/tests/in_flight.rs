//! Several in-flight batches, as in a pipeline: other ranks receive a batch before the leader
//! computes the one before it.

use std::collections::VecDeque;
use std::sync::Arc;

use paceline_model::{
    Batch, Compute, Error, FollowOutcome, LoadedModel as _, PageStore, PersistedPage, WindowPool,
};
use paceline_tensor::PAGE;
use proptest::prelude::*;

use super::requests::{endless, of_client, prompt};
use super::rig::Rig;
use super::tiny::TinyModel;
use super::windows::VirtualPipeline;
use crate::{EngineConfig, GenerationRequest, SequenceId};

pub(super) const CONTEXT: usize = 3 * PAGE;

/// Pools and pages.
type Written = Vec<(usize, u32)>;

/// A backend that checks that batches are computed in the order of announcement.
#[derive(Debug)]
struct Deep {
    inner: Box<dyn Compute>,
    depth: usize,
    most: usize,
    /// Adds virtual time to batches.
    line: Option<VirtualPipeline>,
    announced: VecDeque<(String, Written)>,
}

/// The pages that a batch writes.
fn written(batch: &Batch<'_>) -> Written {
    let mut all = Vec::new();
    for s in batch.sequences {
        let last = s.position + s.tokens.len() - 1;
        for index in s.position / PAGE..=last / PAGE {
            all.push((0, s.pages[index]));
            let windows = s.windows.iter().zip(1..);
            all.extend(windows.map(|(w, pool)| (pool, w.pages[index - w.first_page])));
        }
    }
    all
}

impl Compute for Deep {
    fn pages(&self) -> usize {
        self.inner.pages()
    }

    fn windows(&self) -> &[WindowPool] {
        self.inner.windows()
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn steps_max(&self) -> usize {
        self.most
    }

    fn announce(&mut self, batch: &Batch<'_>) -> Result<(), Error> {
        assert!(self.announced.len() < self.most, "too many under way");
        if let Some(line) = &mut self.line {
            line.announce(batch.rows());
        }
        let announced = (format!("{batch:?}"), written(batch));
        self.announced.push_back(announced);
        Ok(())
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<usize, Error> {
        let (announced, _) = self.announced.pop_front().unwrap();
        assert_eq!(format!("{batch:?}"), announced);
        self.line.iter_mut().for_each(VirtualPipeline::arrive);
        self.inner.forward(batch)
    }

    fn logits_mut(&mut self, i: usize) -> &mut [f32] {
        self.inner.logits_mut(i)
    }

    fn idle(&mut self) -> Result<(), Error> {
        assert!(self.announced.is_empty());
        self.inner.idle()
    }

    fn follow(&mut self) -> Result<FollowOutcome, Error> {
        self.inner.follow()
    }

    fn attach(&mut self, store: Box<dyn PageStore>) {
        self.inner.attach(store);
    }

    fn store(&self) -> Option<&dyn PageStore> {
        self.inner.store()
    }

    /// Other ranks have computed all announced batches when this message arrives.
    fn persist_pages(&mut self, pages: &[PersistedPage]) -> Result<(), Error> {
        for (_, written) in &self.announced {
            let is_kept = |(pool, page): &(usize, u32)| {
                pages
                    .iter()
                    .any(|p| (p.pool as usize, p.page) == (*pool, *page))
            };
            assert!(!written.iter().any(is_kept), "{pages:?} {written:?}");
        }
        self.inner.persist_pages(pages)
    }

    fn restore_pages(&mut self, pages: &[PersistedPage]) -> Result<usize, Error> {
        assert!(
            self.announced.is_empty(),
            "the leader would recall too early"
        );
        self.inner.restore_pages(pages)
    }
}

pub(super) fn sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: 3 * CONTEXT,
        max_running: 4,
        max_waiting: 100,
        max_rows: 40,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

fn rig(tiny: &TinyModel, config: EngineConfig, depth: usize) -> Rig {
    rig_of(tiny, config, (depth, depth), None)
}

/// A rig of `depth` stages, with at most `most` batches announced.
pub(super) fn rig_of(
    tiny: &TinyModel,
    config: EngineConfig,
    (depth, most): (usize, usize),
    line: Option<VirtualPipeline>,
) -> Rig {
    let mut rig = Rig::new(tiny, config.clone());
    let model = Arc::clone(&tiny.model);
    let inner = model.reserve(config.batch_size(), config.cache_positions);
    rig.engine.compute = Box::new(Deep {
        inner: inner.unwrap(),
        depth,
        most,
        line,
        announced: VecDeque::new(),
    });
    rig
}

#[test]
fn streams_are_dealt_to_the_batches_under_way() {
    let tiny = TinyModel::new(1);
    let mut rig = rig(&tiny, sizes(), 2);
    let wanted = [0, 1, 2, 3].map(|i| endless(prompt(9, i), 30));
    let ids = wanted.each_ref().map(|r| rig.submit(r));
    rig.steps(4); // prompts
    for _ in 0..20 {
        rig.step();
        assert_eq!(rig.engine.composition.decoding, 2);
        assert_eq!(rig.engine.in_flight.len(), 1);
    }
    rig.drain();
    rig.check_alone(&tiny, &ids, &wanted);
}

#[test]
fn chunks_of_one_prompt_follow_each_other() {
    let tiny = TinyModel::new(1);
    let mut rig = rig(&tiny, sizes(), 3);
    let wanted = endless(prompt(150, 1), 5); // four chunks
    let id = rig.submit(&wanted);
    for computed in [40, 80] {
        rig.step();
        assert_eq!(rig.engine.running[0].computed, computed);
        assert_eq!(rig.engine.in_flight.len(), 2);
    }
    rig.drain();
    assert_eq!(rig.n_steps, 4 + 4);
    rig.check_alone(&tiny, &[id], [&wanted]);
}

/// A step has room for the whole prompt, and the second stage would wait for all of it.
#[test]
fn a_prompt_is_cut_for_the_stages_of_a_pipeline() {
    let tiny = TinyModel::new(1);
    let sizes = EngineConfig {
        max_rows: 512,
        ..sizes()
    };
    let mut rig = rig(&tiny, sizes, 2);
    let wanted = endless(prompt(170, 1), 5);
    let id = rig.submit(&wanted);
    rig.step();
    assert_eq!(rig.engine.running[0].computed, 128);
    assert_eq!(rig.engine.in_flight.len(), 1);
    rig.drain();
    rig.check_alone(&tiny, &[id], [&wanted]);
}

/// Its chunks may be in consecutive batches, but others get their rows as well.
#[test]
fn a_long_prompt_takes_no_turn_of_others() {
    let tiny = TinyModel::new(1);
    let mut rig = rig(&tiny, sizes(), 2);
    let first = rig.submit(&endless(prompt(170, 9), 5)); // five chunks
    let others = [0, 1, 2].map(|i| rig.submit(&endless(prompt(3, i), 10)));
    rig.steps(3);
    assert_eq!(rig.outcomes[&first].prompt_reads, 0);
    for id in &others {
        assert_eq!(rig.outcomes[id].prompt_reads, 1, "{id:?}");
    }
    rig.drain();
}

#[test]
fn a_cancelled_sequence_keeps_its_pages_until_its_rows_are_computed() {
    let tiny = TinyModel::new(1);
    let mut rig = rig(&tiny, sizes(), 2);
    let id = rig.submit(&endless(prompt(150, 1), 5));
    rig.step();
    rig.cancel(id);
    assert!(rig.engine.cancel(id).is_err(), "it is over for its owner");
    let before = rig.engine.pages.available();
    assert!(before < rig.engine.compute.pages());
    rig.drain();
    assert_eq!(rig.engine.pages.available(), rig.engine.compute.pages());
    assert!(rig.outcomes[&id].tokens.is_empty());
}

/// The batch with rows of the preempted sequence completes first.
#[test]
fn a_client_with_many_requests_gives_way_in_a_pipeline() {
    let tiny = TinyModel::new(1);
    let config = EngineConfig {
        max_running: 2,
        ..sizes()
    };
    let mut rig = rig(&tiny, config, 2).unordered();
    let of = |client, seed, n| GenerationRequest {
        order: of_client(client),
        ..endless(prompt(9, seed), n)
    };
    let wanted = [of(1, 1, 60), of(1, 2, 60), of(2, 3, 5)];
    let mut ids: Vec<SequenceId> = wanted[..2].iter().map(|r| rig.submit(r)).collect();
    rig.steps(6);
    ids.push(rig.submit(&wanted[2]));
    rig.steps(20);
    let has_ended = |id: &SequenceId| rig.outcomes[id].finish.is_some();
    let ended: Vec<bool> = ids.iter().map(has_ended).collect();
    assert_eq!(ended, [false, false, true]);
    rig.drain();
    rig.check_alone(&tiny, &ids, &wanted);
}

/// A request, steps after it, and what happens to one that is open then.
type RequestCase = (usize, usize, u8);

pub(super) fn calls() -> impl Strategy<Value = Vec<RequestCase>> {
    prop::collection::vec((0..100usize, 0..15usize, 0..6u8), 1..25)
}

/// Cancels or moves one of the open requests; `asked` has the remaining ones.
pub(super) fn disturb(
    rig: &mut Rig,
    asked: &mut Vec<(SequenceId, usize)>,
    (at, what): (usize, u8),
) {
    let is_open = |(id, _): &&(SequenceId, usize)| rig.outcomes[id].finish.is_none();
    let open: Vec<_> = asked.iter().filter(is_open).copied().collect();
    let Some((id, which)) = open.get(at % open.len().max(1)).copied() else {
        return;
    };
    if what > 1 {
        return;
    }
    asked.retain(|(other, _)| *other != id);
    if what == 0 {
        return rig.cancel(id);
    }
    let (snapshot, past) = rig.take(id);
    asked.push((rig.restore(&snapshot, past), which));
}
