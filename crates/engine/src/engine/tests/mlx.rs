//! The engine on MLX: tokens that the device draws, and pages in a store.

use std::sync::Arc;
use std::time::Duration;

use paceline_model_mlx::MlxModel;
use paceline_tensor::PAGE;
use paceline_text::grammar::{Constraint, Grammar};

use super::draft_head::babbling;
use super::page_store::Shelf;
use super::requests::{SAMPLED, prompt, request};
use super::rig::{Rig, SequenceOutcome};
use super::tiny::{END, TinyModel};
use crate::{Draft, Engine, EngineConfig, GenerationRequest, SamplingParams};

const TOKENS: usize = 60;

/// Sampled requests, and a greedy one that may not end.
fn requests() -> Vec<GenerationRequest> {
    let params = [
        SAMPLED,
        SamplingParams {
            top_k: 5,
            ..SAMPLED
        },
        SamplingParams {
            top_p: 0.8,
            temperature: 0.7,
            ..SAMPLED
        },
        SamplingParams {
            top_k: 20,
            top_p: 0.9,
            min_p: 0.1,
            ..SAMPLED
        },
        SamplingParams::default(),
    ];
    let of = |(i, params): (usize, SamplingParams)| {
        let seed = 5 + i as u64;
        let params = SamplingParams { seed, ..params };
        GenerationRequest {
            min_tokens: TOKENS,
            ..request(prompt(40, i as u32), TOKENS, params)
        }
    };
    params.into_iter().enumerate().map(of).collect()
}

/// A model on MLX, and the same on the CPU.
struct OnMlx {
    tiny: TinyModel,
    model: Arc<MlxModel>,
}

impl OnMlx {
    /// `None` where there is no MLX.
    fn new(test: &str) -> Option<Self> {
        let Some(mlxc) = std::env::var_os("PACELINE_MLXC") else {
            eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc");
            return None;
        };
        Some(Self {
            tiny: TinyModel::new(1),
            model: Arc::new(TinyModel::on_mlx(mlxc.into())),
        })
    }

    /// An engine of its own.
    fn rig(&self, drafts: usize, store: Option<&Shelf>) -> Rig {
        let config = EngineConfig {
            drafts,
            ..EngineConfig::single("tiny", 256)
        };
        let mut rig = Rig::new(&self.tiny, config.clone());
        let tokenizer = Arc::clone(&self.tiny.tokenizer);
        let mut engine = Engine::new(Arc::clone(&self.model) as _, tokenizer, config).unwrap();
        if let Some(store) = store {
            engine = engine.with_store(Box::new(store.clone()));
        }
        rig.engine = engine;
        rig
    }

    /// The outcome of a request in an engine of its own, and the tokens that it did not compute.
    fn answer(&self, request: &GenerationRequest, store: Option<&Shelf>) -> (SequenceOutcome, u64) {
        self.rig(0, store).answer(request)
    }
}

#[test]
fn mlx_draws_the_tokens_that_the_host_samples() {
    let Some(mlx) = OnMlx::new("tokens that mlx draws") else {
        return;
    };
    for request in requests() {
        let before = mlx.model.counts();
        let (drawn, _) = mlx.answer(&request, None);
        let counts = mlx.model.counts();
        // Log-probabilities need all logits, so the host samples.
        let request = GenerationRequest {
            logprobs: Some(0),
            ..request
        };
        let (sampled, _) = mlx.answer(&request, None);
        assert_eq!(drawn.tokens, sampled.tokens, "{request:?}");
        assert_eq!(drawn.tokens.len(), TOKENS);
        let bytes = counts.logit_bytes - before.logit_bytes;
        assert_eq!(bytes, 12 * TOKENS as u64);
        // All but the first, and those behind the end of a page.
        let ahead = counts.steps_ahead - before.steps_ahead;
        assert!(ahead >= TOKENS as u64 - 4, "{ahead}");
    }
}

/// Drafts of near classes follow accepted tokens and no clock, so that a run repeats its bits. A
/// head on the CPU reads rows that MLX captured, and has a draft in most steps.
#[test]
fn drafts_on_mlx_repeat_and_change_no_token() {
    let Some(mlx) = OnMlx::new("drafts on mlx") else {
        return;
    };
    let circle = SamplingParams {
        logit_bias: vec![(5, 100.0), (END, -100.0)],
        ..SamplingParams::default()
    };
    let circle = request(prompt(20, 7), TOKENS, circle);
    let (head, mut headed) = (babbling(&mlx.tiny.model, None), 0);
    for request in requests().into_iter().chain([circle.clone()]) {
        let run = |drafts, step_ms, head: Option<&Draft>| {
            let mut rig = mlx.rig(drafts, None);
            head.map_or(Ok(()), |head| rig.engine.set_draft_model(head))
                .unwrap();
            let id = rig.submit(&request);
            while !rig.engine.is_idle() {
                rig.step();
                rig.engine.record_duration(Duration::from_millis(step_ms));
            }
            let counts = rig.engine.draft_counters().totals();
            (rig.outcomes.remove(&id).unwrap(), counts)
        };
        let (plain, drafted) = (run(0, 1, None), run(8, 1, None));
        assert_eq!(drafted, run(8, 1000, None));
        assert_eq!(drafted.0.tokens, plain.0.tokens);
        let by_head = run(8, 1, Some(&head));
        assert_eq!(by_head, run(8, 1000, Some(&head)));
        assert_eq!(by_head.0.tokens, plain.0.tokens);
        headed += by_head.1.steps;
        assert!(
            request.sampling != circle.sampling || drafted.1.right > 30,
            "{:?}",
            drafted.1
        );
    }
    assert!(headed > 0, "no draft of the head");
}

/// A grammar that allows one token alone saves no step, since rows of a step change each other's
/// bits.
#[test]
fn forced_tokens_take_steps_on_mlx() {
    let Some(mlx) = OnMlx::new("forced tokens on mlx") else {
        return;
    };
    let grammar = Grammar::Regex("fghijklmfgh".to_owned());
    let mut rig = mlx.rig(0, None);
    let id = rig.submit(&GenerationRequest {
        constraint: Some(Constraint::whole(grammar)),
        ..request(prompt(20, 7), TOKENS, SAMPLED)
    });
    rig.drain();
    let answer = &rig.outcomes[&id];
    assert_eq!(answer.text, "fghijklmfgh");
    assert!(rig.n_steps >= answer.tokens.len(), "{}", rig.n_steps);
}

#[test]
fn mlx_reads_no_prompt_again_after_a_restart() {
    let Some(mlx) = OnMlx::new("prompts in a store of mlx") else {
        return;
    };
    let wanted = request(prompt(3 * PAGE + 9, 1), 20, SAMPLED);
    let (expected, _) = mlx.answer(&wanted, None);
    let shelf = Shelf::default();
    for reused in [0, 3 * PAGE as u64] {
        assert_eq!(
            mlx.answer(&wanted, Some(&shelf)),
            (expected.clone(), reused)
        );
    }
}
