//! Sequences with adapters: in one batch, in the prefix cache, as snapshots.

use paceline_tensor::PAGE;

use super::requests::{SAMPLED, prompt, request};
use super::rig::{Rig, alone};
use super::tiny::{END, TinyModel};
use crate::{EngineConfig, Error, GenerationRequest, SamplingParams};

const CONTEXT: usize = 4 * PAGE;

fn sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: 4 * CONTEXT,
        max_running: 3,
        max_waiting: 20,
        max_rows: 40,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

/// A request for an adapter with the same prompt of two pages.
fn asked(adapter: Option<&str>, seed: u64) -> GenerationRequest {
    let sampling = SamplingParams {
        seed,
        logit_bias: vec![(END, -100.0)],
        ..SAMPLED
    };
    GenerationRequest {
        adapter: adapter.map(str::to_owned),
        logprobs: Some(2),
        ..request(prompt(2 * PAGE + 7, 1), 30, sampling)
    }
}

#[test]
fn one_batch_has_rows_of_several_adapters() {
    let tiny = TinyModel::adapted(2);
    let mut rig = Rig::new(&tiny, sizes());
    let all = [None, Some("a"), Some("b")].map(|adapter| asked(adapter, 3));
    let ids = all.each_ref().map(|request| rig.submit(request));
    rig.drain();
    rig.check_alone(&tiny, &ids, &all);
    let [base, a, b] = ids.map(|id| rig.outcomes[&id].logprobs.clone());
    assert!(base != a && base != b && a != b);
    assert_eq!(rig.engine.n_reused(), 0, "no keys are shared between them");

    // Again: each reuses its own pages.
    for request in &all {
        let expected = alone(&tiny, request, CONTEXT);
        assert_eq!(rig.answer(request), (expected, 2 * PAGE as u64));
    }
}

#[test]
fn a_snapshot_goes_on_with_its_adapter_only() {
    let (here, there) = (TinyModel::adapted(1), TinyModel::adapted(2));
    let request = asked(Some("b"), 5);
    let expected = alone(&here, &request, CONTEXT);
    let mut rig = Rig::new(&here, sizes());
    let id = rig.submit(&request);
    for _ in 0..12 {
        rig.step();
    }
    let snapshot = rig.engine.snapshot(id).unwrap();
    let mut other = Rig::new(&there, sizes());
    let copy = other.restore(&snapshot, rig.outcomes[&id].clone());
    other.drain();
    assert_eq!(other.outcomes[&copy], expected);
    let mut without = TinyModel::new(1).engine(sizes());
    let refused = without.restore(snapshot).unwrap_err();
    assert!(matches!(refused, Error::OtherAdapter), "{refused}");
    let refused = without.submit(request).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the model has no adapter \"b\" beside it"
    );
}
