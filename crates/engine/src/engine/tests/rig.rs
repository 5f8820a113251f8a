//! Test rig: an engine with invariants checked after every call, and the outcomes of its sequences.

use std::collections::BTreeMap;

use paceline_tensor::PAGE;

use super::tiny::TinyModel;
use crate::sequence::Sequence;
use crate::{
    Engine, EngineConfig, Error, Event, Finish, GenerationRequest, Reply, SequenceId, Snapshot,
    TokenLogprobs,
};

/// All events of a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SequenceOutcome {
    pub(super) prompt_reads: usize,
    /// Name of the numbers that read the prompt, where they are not the model's own.
    pub(super) read_by: Option<String>,
    /// Logprobs of the prompt from token 1 on.
    pub(super) scores: Option<Vec<TokenLogprobs>>,
    pub(super) tokens: Vec<u32>,
    pub(super) text: String,
    /// Per token.
    pub(super) logprobs: Vec<Option<TokenLogprobs>>,
    pub(super) finish: Option<Finish>,
    /// Recomputations with other bits.
    pub(super) continued: usize,
}

impl SequenceOutcome {
    fn add(&mut self, event: &Event) {
        assert_eq!(self.finish, None, "{event:?} after the end");
        match &event.reply {
            Reply::PromptRead {
                logprobs, read_by, ..
            } => {
                self.prompt_reads += 1;
                self.read_by.clone_from(read_by);
                self.scores.clone_from(logprobs);
            }
            Reply::Token {
                token,
                text,
                logprobs,
                ..
            } => {
                assert_eq!(self.prompt_reads, 1, "a token before the prompt was read");
                self.tokens.push(*token);
                self.logprobs.push(logprobs.clone());
                self.text.push_str(text);
            }
            Reply::Continued => self.continued += 1,
            Reply::Finished { text, reason, .. } => {
                self.text.push_str(text);
                self.finish = Some(*reason);
            }
            Reply::Failed(failure) => panic!("{failure}"),
        }
    }
}

pub(super) const fn id_of(event: &Event) -> SequenceId {
    event.id
}

#[derive(Debug)]
pub(super) struct Rig {
    pub(super) engine: Engine,
    pub(super) outcomes: BTreeMap<SequenceId, SequenceOutcome>,
    pub(super) n_steps: usize,
    /// Number of preemptions.
    pub(super) preemptions: usize,
    /// Whether sequences may run in another order than their ids.
    is_unordered: bool,
}

impl Rig {
    pub(super) fn new(tiny: &TinyModel, config: EngineConfig) -> Self {
        Self {
            engine: tiny.engine(config),
            outcomes: BTreeMap::new(),
            n_steps: 0,
            preemptions: 0,
            is_unordered: false,
        }
    }

    /// For requests that are not scheduled in order of arrival.
    pub(super) fn unordered(self) -> Self {
        Self {
            is_unordered: true,
            ..self
        }
    }

    pub(super) fn submit(&mut self, request: &GenerationRequest) -> SequenceId {
        self.try_submit(request).unwrap()
    }

    pub(super) fn try_submit(&mut self, request: &GenerationRequest) -> Result<SequenceId, Error> {
        let result = self.engine.submit(request.clone());
        self.added(result)
    }

    /// Continues a snapshot after a serialisation round trip. `past` is its outcome so far.
    pub(super) fn restore(&mut self, snapshot: &Snapshot, past: SequenceOutcome) -> SequenceId {
        self.is_unordered = true;
        let text = serde_json::to_string(snapshot).unwrap();
        let result = self.engine.restore(serde_json::from_str(&text).unwrap());
        let id = self.added(result).unwrap();
        self.outcomes.insert(id, past);
        id
    }

    fn added(&mut self, result: Result<SequenceId, Error>) -> Result<SequenceId, Error> {
        self.check();
        if let Ok(id) = result {
            let outcome = SequenceOutcome::default();
            assert!(
                self.outcomes.insert(id, outcome).is_none(),
                "{id:?} is used twice"
            );
        }
        result
    }

    pub(super) fn cancel(&mut self, id: SequenceId) {
        self.engine.cancel(id).unwrap();
        self.check();
    }

    /// Removes a sequence, with its outcome so far.
    pub(super) fn take(&mut self, id: SequenceId) -> (Snapshot, SequenceOutcome) {
        let snapshot = self.engine.take_snapshot(id).unwrap();
        self.check();
        (snapshot, self.outcomes.remove(&id).unwrap())
    }

    /// Runs a step. Every decoding sequence advances, is preempted, or leaves its row to another
    /// client.
    pub(super) fn step(&mut self) -> Vec<Event> {
        let ids = |s: &[Sequence]| s.iter().map(|s| s.id).collect::<Vec<_>>();
        let running = &self.engine.running;
        let decodes = |s: &&Sequence| s.computed > 0 && s.pending().len() == 1;
        let decoding: Vec<SequenceId> = running.iter().filter(decodes).map(|s| s.id).collect();
        let (running, idle) = (ids(running), self.engine.is_idle());
        let interruptions = self.engine.n_interruptions();
        let events = self.engine.step().unwrap();
        self.check();
        for event in &events {
            self.outcomes.entry(id_of(event)).or_default().add(event);
        }
        let is_preempted = |id: &SequenceId| self.engine.resuming.iter().any(|s| s.id == *id);
        self.preemptions += running.iter().filter(|id| is_preempted(id)).count();
        let is_withheld = |id: &SequenceId| {
            let running = &self.engine.running;
            running.iter().any(|s| s.id == *id && s.withheld)
        };
        // In a pipeline a step completes the rows of some sequences, and those of cancelled ones.
        let is_deep = self.engine.compute.depth() > 1;
        for id in decoding {
            let moved_on = events.iter().any(|event| id_of(event) == id);
            assert!(
                is_deep || moved_on || is_preempted(&id) || is_withheld(&id),
                "{id:?} was stalled"
            );
        }
        let is_interrupted = self.engine.n_interruptions() > interruptions;
        let idle = idle || is_interrupted;
        assert!(
            is_deep || idle || !self.engine.running.is_empty() || !events.is_empty(),
            "no progress"
        );
        self.n_steps += 1;
        events
    }

    /// Checks the invariants that hold between any two calls.
    fn check(&self) {
        let engine = &self.engine;
        let config = &engine.config;
        assert!(engine.running.len() <= config.max_running);
        assert!(engine.waiting.len() <= config.max_waiting);
        // One more preempted sequence may follow after the limit of restored ones is reached.
        assert!(engine.resuming.len() <= 2 * config.max_running + config.max_waiting);
        let queued = || engine.resuming.iter().chain(&engine.waiting);
        let mut ids: Vec<SequenceId> = engine
            .running
            .iter()
            .chain(queued())
            .map(|s| s.id)
            .collect();
        assert!(
            self.is_unordered || ids.is_sorted(),
            "{ids:?} are out of order"
        );
        let n = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), n, "a sequence is in two queues");
        assert!(queued().all(|s| s.pages.len() == 0 && s.computed == 0));
        for s in &engine.running {
            assert!(s.computed < s.tokens.len() && s.computed <= s.pages.len() * PAGE);
            assert!(s.tokens.len() <= config.context);
        }
        let running = engine.running.iter();
        let owners = running.map(|s| (&s.pages, &s.tokens[..s.computed]));
        engine.pages.check(owners);
    }

    /// The outcome of a request, and the tokens that the engine did not compute for it.
    pub(super) fn answer(&mut self, request: &GenerationRequest) -> (SequenceOutcome, u64) {
        let before = self.engine.n_reused();
        let id = self.submit(request);
        self.drain();
        let reused = self.engine.n_reused() - before;
        (self.outcomes.remove(&id).unwrap(), reused)
    }

    /// Compares these outcomes with those of the requests alone.
    pub(super) fn check_alone<'r>(
        &self,
        tiny: &TinyModel,
        ids: &[SequenceId],
        requests: impl IntoIterator<Item = &'r GenerationRequest>,
    ) {
        for (id, request) in ids.iter().zip(requests) {
            let expected = alone(tiny, request, self.engine.config.context);
            assert_eq!(self.outcomes[id], expected, "{:?}", request.adapter);
        }
    }

    /// Several steps.
    pub(super) fn steps(&mut self, n: usize) {
        (0..n).for_each(|_| drop(self.step()));
    }

    /// Steps until the engine is idle. Panics if that takes longer than computing every sequence
    /// alone, row by row, twice.
    pub(super) fn drain(&mut self) {
        let sequences = self.outcomes.len() + 1;
        let limit = self.n_steps + 2 * sequences * self.engine.config.context;
        while !self.engine.is_idle() {
            self.step();
            assert!(self.n_steps <= limit, "not at an end after {limit} steps");
        }
        assert_eq!(
            self.engine.pages.available(),
            self.engine.compute.pages(),
            "pages are lost"
        );
        assert_eq!(self.engine.step().unwrap(), []);
    }
}

/// The outcome of a single request, with the prompt in one chunk.
pub(super) fn alone(
    tiny: &TinyModel,
    request: &GenerationRequest,
    context: usize,
) -> SequenceOutcome {
    let mut rig = Rig::new(tiny, EngineConfig::single("tiny", context));
    let id = rig.submit(request);
    rig.drain();
    rig.outcomes.remove(&id).unwrap()
}
