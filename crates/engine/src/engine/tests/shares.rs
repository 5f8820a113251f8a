//! Fairness on a simulated machine: one client with many streams, others with one each.

use paceline_tensor::PAGE;

use super::prefill_budget::Simulation;
use super::requests::{endless, of_client, prompt};
use super::rig::Rig;
use super::tiny::TinyModel;
use crate::{EngineConfig, GenerationRequest, SequenceId};

const CONTEXT: usize = 8 * PAGE;

/// Maximum running sequences, the default of `up`.
const RUNNING: usize = 32;

/// The client with many streams.
const GREEDY: u64 = 99;

fn sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: (RUNNING + 1) * CONTEXT,
        max_running: RUNNING,
        max_waiting: 100,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

/// An answer of exactly `n` tokens for `client`.
fn stream(client: u64, prompt: Vec<u32>, n: usize) -> GenerationRequest {
    GenerationRequest {
        order: of_client(client),
        ..endless(prompt, n)
    }
}

/// An engine in which the greedy client has `streams`, after the prefill of the running ones.
fn beside(tiny: &TinyModel, streams: u32) -> Simulation {
    let mut simulation = Simulation::of(Rig::new(tiny, sizes()).unordered());
    for i in 0..streams {
        simulation.rig.submit(&stream(GREEDY, prompt(90, i), 400));
    }
    simulation.step();
    let reads = |rig: &Rig| rig.engine.running.iter().any(|s| !s.is_decoding());
    while reads(&simulation.rig) {
        simulation.step();
        assert!(simulation.rig.n_steps < 200, "prompts take long");
    }
    simulation
}

/// Latencies of `n` requests of four clients, sorted, in milliseconds. Each client sends the next
/// request a step after its last answer, when another sequence has its slot.
fn latencies(tiny: &TinyModel, seed: u32, streams: u32, n: usize) -> Vec<f64> {
    let mut simulation = beside(tiny, streams);
    let mut open: [Option<(SequenceId, f64)>; 4] = [None; 4];
    let (mut asked, mut took) = (seed, Vec::new());
    while took.len() < n {
        let rests: Vec<bool> = open.iter().map(Option::is_none).collect();
        simulation.step();
        for (client, (open, rests)) in (1..).zip(open.iter_mut().zip(rests)) {
            if rests {
                asked += 1;
                let request = stream(client, prompt(20, asked), 30);
                *open = Some((simulation.rig.submit(&request), simulation.now_ms));
            }
            let ended = open.filter(|(id, _)| simulation.rig.outcomes[id].finish.is_some());
            if let Some((_, since_ms)) = ended {
                took.push(simulation.now_ms - since_ms);
                *open = None;
            }
        }
    }
    took.sort_by(f64::total_cmp);
    took
}

/// 32 rows take twice as long as 4 on this machine, without prompts. There are more requests than
/// may pass a waiting one.
#[test]
fn many_streams_of_a_client_slow_others_little() {
    let tiny = TinyModel::new(1);
    for seed in [1000, 2000] {
        let quiet = latencies(&tiny, seed, 0, 80);
        let disturbed = latencies(&tiny, seed, 50, 80);
        let ratios = [40_usize, 79].map(|at| disturbed[at] / quiet[at]);
        assert!(ratios[0] < 1.6 && ratios[1] < 2.0, "{seed}: {ratios:?}");
    }
}

#[test]
fn requests_of_several_clients_get_places_at_once() {
    let tiny = TinyModel::new(1);
    let mut simulation = beside(&tiny, 50);
    let ids = [1_u64, 2, 3, 4].map(|client| {
        let request = stream(client, prompt(9, client as u32), 10);
        simulation.rig.submit(&request)
    });
    simulation.step();
    let running = &simulation.rig.engine.running;
    for id in ids {
        assert!(running.iter().any(|s| s.id == id), "{id:?} waits");
    }
}
