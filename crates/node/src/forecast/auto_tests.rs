//! `--split auto` on drawn networks: what is predicted chooses, and what is measured corrects.
//!
//! Facts are measured with errors. A token takes what the planner says for the true facts, times an
//! error of each split. Retransmissions, which no fact knows, come on top.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use paceline_base::{Bytes, KernelClass};
use paceline_comm::Backend;
use paceline_model::{Config, ModelSource, Split, SplitKind};
use paceline_plan::split_selection::{Event, SplitEstimate, SplitSelector};

use super::facts::FactsStore;
use super::machines::{MachineLink, Machines, RemoteMachine, exchanges};
use super::probe::StepMeasurements;
use super::{Forecast, Setting};

/// Clusters drawn (issue 54).
const DRAWS: u64 = 1000;

/// Tokens of the answers of each.
const TOKENS: usize = 600;

/// Shortest time after which TCP sends a lost segment again.
const RETRANSMIT_S: f64 = 0.2;

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Draw(u64);

impl Draw {
    /// Evenly in 0..1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Between the two, evenly in their logarithm.
    fn between(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.unit())
    }

    /// A factor of at most `error` up or down.
    fn off(&mut self, error: f64) -> f64 {
        self.between(1.0 / (1.0 + error), 1.0 + error)
    }
}

/// A small model.
fn model() -> (ModelSource, Config) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/hf");
    let source = ModelSource::open(&golden.join("llama-rope3-sharded")).unwrap();
    let mut config = Config::read(&source).unwrap();
    for layer in &mut config.layers {
        layer.ffn = 64 * config.ffn_leaf; // as much as can be shared
    }
    config.layers = config.layers.iter().cycle().take(16).copied().collect();
    (source, config)
}

fn forecast((source, config): &(ModelSource, Config), layer_s: f64) -> Forecast {
    let measured = StepMeasurements {
        products: layer_s,
        other: layer_s / 20.0,
        key: 1e-8,
        head: layer_s,
        step: 1e-5,
        few_row: layer_s,
        prompt_row: layer_s,
        experts: 0.0,
        few_expert: 0.0,
        prompt_expert: 0.0,
    };
    let setting = Setting {
        source,
        config,
        class: KernelClass::Cpu,
        threads: 1,
        backend: Backend::Tcp,
    };
    let facts = FactsStore::nowhere();
    Forecast::of(facts, setting, measured, BTreeMap::new(), None)
}

/// Machines of unlike speed, and links of unlike delay and bandwidth.
fn machines(draw: &mut Draw) -> Machines {
    let n = 2 + (draw.unit() * 3.0) as usize;
    let machine = |(i, speed): (usize, f64)| RemoteMachine {
        name: format!("n{i}"),
        memory: Bytes(1 << 40),
        reads: speed,
        computes: speed,
        device: None,
    };
    let speeds: Vec<f64> = (0..n).map(|_| draw.between(0.25, 4.0)).collect();
    let (delay, rate) = (draw.between(0.05e-3, 0.2), draw.between(1e6, 1e10));
    let pairs = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
    let way = |(a, b)| MachineLink {
        a,
        b,
        round_trip: 2.0 * delay * draw.off(1.0),
        bytes_per_s: rate * draw.off(1.0),
    };
    Machines {
        all: speeds.into_iter().enumerate().map(machine).collect(),
        on_mlx: vec![false; n],
        wide: false,
        of_rank: (0..n).collect(),
        ways: pairs.map(way).collect(),
    }
}

/// The same as they are measured.
fn measured(machines: &Machines, draw: &mut Draw) -> Machines {
    let mut seen = machines.clone();
    for machine in &mut seen.all {
        machine.reads *= draw.off(0.1);
        machine.computes *= draw.off(0.1);
    }
    for way in &mut seen.ways {
        way.round_trip *= draw.off(0.15);
        way.bytes_per_s *= draw.off(0.3);
    }
    seen
}

/// Uses the splits that `--split auto` uses for [`TOKENS`] tokens. Returns the speed of the
/// last as a fraction of the best one's.
fn auto(model: &(ModelSource, Config), seed: u64) -> f64 {
    let mut draw = Draw(seed);
    let forecast = forecast(model, draw.between(0.05e-3, 10e-3));
    let config = &model.1;
    let truth = machines(&mut draw);
    let seen = measured(&truth, &mut draw);
    let (ranked, refused) = forecast.ranked(config, SplitKind::Auto, &seen);
    assert!(
        refused.is_empty() && ranked.len() > 1,
        "{seed}: {refused:?}"
    );
    let loss = if draw.unit() < 0.5 {
        0.0
    } else {
        draw.between(1e-4, 0.02)
    };
    let slowest = truth.ways.iter().map(|way| way.round_trip);
    let again = slowest.fold(RETRANSMIT_S, f64::max);
    let mut token_s = |split: &Split| {
        let said = forecast.across(config, split, &truth).unwrap();
        let computed = draw.off(0.15) / said.decode_tok_s;
        computed + exchanges(split) as f64 * loss * again
    };
    let all_s: Vec<f64> = ranked.iter().map(|it| token_s(&it.split)).collect();
    // As `PreparedModel::steer_among`: the first, and those with fewer exchanges.
    let least = exchanges(&ranked[0].split);
    let is_used = |i: &usize| *i == 0 || exchanges(&ranked[*i].split) < least;
    let used: Vec<usize> = (0..ranked.len()).filter(is_used).collect();
    let tokens_s: Vec<f64> = used.iter().map(|i| all_s[*i]).collect();
    let change = Duration::from_secs_f64(20.0 * tokens_s[0]); // so that minutes are few tokens
    let said = used.iter().map(|i| SplitEstimate {
        tok_s: ranked[*i].prediction.decode_tok_s,
        key_s: 0.0,
        change,
    });
    let mut selector = SplitSelector::new(&said.collect::<Vec<_>>(), 0).unwrap();
    let mut now = Duration::ZERO;
    selector.step(now, Event::Opened);
    for _ in 0..TOKENS {
        let gap = tokens_s[selector.at()] * draw.off(0.1);
        let next = now + Duration::from_secs_f64(gap);
        let due = selector.due().filter(|due| *due < next);
        now = due.unwrap_or(next);
        let event = match due {
            Some(_) => Event::Waited,
            None => Event::Token {
                further: 0,
                at: now,
            },
        };
        if selector.step(now, event).is_some() {
            now += change;
            selector.step(now, Event::Changed(change));
        }
    }
    let best = all_s.iter().copied().fold(f64::INFINITY, f64::min);
    best / tokens_s[selector.at()]
}

#[test]
fn auto_is_near_the_best_split_on_any_network() {
    let model = model();
    let drawn = (0..DRAWS).map(|seed| (auto(&model, seed), seed));
    let mut ratios: Vec<(f64, u64)> = drawn.collect();
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    let near = ratios.iter().filter(|(ratio, _)| *ratio >= 0.9).count() as u64;
    assert!(
        near >= DRAWS * 95 / 100,
        "{near} of {DRAWS}: {:?}",
        &ratios[..60]
    );
    assert!(
        ratios[0].0 > 0.5,
        "speed as a part of the best, and the seed: {:?}",
        ratios[0]
    );
}
