//! Mixtures of experts over two nodes: the terms of a token added up by hand, and which split they
//! make the solver choose.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use crate::small::{WORK, mesh, model, node};
use paceline_plan::solver::{Options, PlacementFamily, solve};
use paceline_plan::{
    Caches, Calibration, Cluster, ClusterNode, Costs, ModelShape, Moe, Pipeline, Placement, Split,
    predict,
};

const LAYERS: u32 = 8;
/// Bytes a second of either node.
const BANDWIDTH: f64 = 1e9;
/// Bytes a second of the link: what exchanges cost is their latency.
const BETA: f64 = 1e12;

/// Bytes of a layer's attention and router, of an expert, of the keys and values of 40 positions,
/// and of the head. A weight has 8 bits, a cached value 16.
const COMMON: f64 = 1024.0 * 64.0 * 2.0 * 24.0 + 1024.0 * 16.0;
const ROUTER: f64 = 1024.0 * 16.0;
const EXPERT: f64 = 3.0 * 1024.0 * 512.0;
const CACHE: f64 = 40.0 * 2.0 * 12.0 * 64.0 * 2.0;
const HEAD: f64 = 1024.0 * 8192.0;

/// 4 of 16 experts are active: the busier of two ranks has 2, 3 or 4 in 784, 896 and 140 of 1820.
const BUSIER: f64 = (2.0 * 784.0 + 3.0 * 896.0 + 4.0 * 140.0) / 1820.0;

fn mixture() -> ModelShape {
    ModelShape {
        moe: Some(Moe {
            experts: 16,
            active: 4,
            shared: 0,
            ffn: 512,
            dense_layers: 0,
            every: 1,
            groups: 1,
        }),
        ..model(LAYERS)
    }
}

fn two_nodes(alpha: f64) -> Cluster {
    let one = |index| ClusterNode {
        rates: None, // memory alone counts
        ..node(index, 60.0, BANDWIDTH)
    };
    mesh(vec![one(0), one(1)], |_, _| (alpha, BETA))
}

/// Constants that cost nothing.
fn free() -> Calibration {
    let mut calibration = Calibration::builtin().unwrap();
    assert!(calibration.set("op.paceline-cpu", 1e-15));
    assert!(calibration.set("handover.own.tcp", 1e-15));
    calibration
}

/// Seconds of a token.
fn token(model: &ModelShape, split: Split, alpha: f64) -> f64 {
    let (cluster, calibration) = (two_nodes(alpha), free());
    let costs = Costs::new(&cluster, model, WORK, &calibration).unwrap();
    let placement = Placement::single(Pipeline::group(model.layers, split, &[0, 1]));
    1.0 / predict(&costs, &placement).unwrap().decode_tok_s
}

fn near(got: f64, expected: f64) {
    assert!((got / expected - 1.0).abs() < 1e-4, "{got}, not {expected}");
}

#[test]
fn a_token_costs_the_experts_of_the_busier_rank_and_its_exchanges() {
    let (alpha, n) = (1e-4, f64::from(LAYERS));
    let experts = n * (COMMON + CACHE + BUSIER * EXPERT) + HEAD / 2.0;
    let messages = alpha * (n + 1.0); // one a layer, and the logits
    let got = token(&mixture(), Split::Expert, alpha);
    near(got, experts / BANDWIDTH + messages);
    let attention = (COMMON - ROUTER + CACHE) / 2.0 + ROUTER;
    let tensor = n * (attention + BUSIER * EXPERT) + HEAD / 2.0;
    let messages = alpha * (2.0 * n + 1.0);
    let got = token(&mixture(), Split::Tensor, alpha);
    near(got, tensor / BANDWIDTH + messages);
}

/// Behind four dense layers every second one is a mixture, in which the last rank has the shared
/// expert too. Dense ones share their feed-forward, with an exchange.
#[test]
fn dense_layers_and_shared_experts_are_dealt_as_the_engine_deals_them() {
    let mut model = mixture();
    model.moe = model.moe.map(|moe| Moe {
        shared: 1,
        dense_layers: 4,
        every: 2,
        ..moe
    });
    let mixtures: Vec<u32> = (0..LAYERS).filter(|i| model.is_moe(*i)).collect();
    assert_eq!(mixtures, [5, 7]);
    let busier = (70.0 * 5.0 + 448.0 * 4.0 + 784.0 * 3.0 + 448.0 * 3.0 + 70.0 * 4.0) / 1820.0;
    let dense = 3.0 * 1024.0 * 4096.0 / 2.0;
    let layers = 8.0 * (COMMON - ROUTER + CACHE) + 6.0 * dense + 2.0 * (ROUTER + busier * EXPERT);
    let got = token(&model, Split::Expert, 1e-4);
    near(got, (layers + HEAD / 2.0) / BANDWIDTH + 9e-4);
}

#[test]
fn the_solver_takes_experts_where_exchanges_cost_more_than_whole_attention() {
    let (model, calibration) = (mixture(), free());
    for (alpha, expected) in [
        (1e-6, PlacementFamily::Tensor),
        (1.9e-3, PlacementFamily::Expert),
        (1e-1, PlacementFamily::OneNode),
    ] {
        let cluster = two_nodes(alpha);
        let costs = Costs::new(&cluster, &model, WORK, &calibration).unwrap();
        let found = solve(&costs, &Options::default()).unwrap();
        assert_eq!(found.best.family, expected, "{alpha} s");
        let others = found.alternatives.iter();
        let worse = others.filter(|other| other.score * 1.02 < found.best.score);
        assert_eq!(worse.count(), 0, "{alpha} s");
    }
}

/// Many rows touch nearly all experts, each read once: their bytes are those of half the experts.
#[test]
fn batches_read_the_experts_they_touch_once() {
    let (model, calibration, cluster) = (mixture(), free(), two_nodes(1e-9));
    let seconds = |concurrency: u32| {
        let work = paceline_plan::Workload {
            concurrency,
            ..WORK
        };
        let costs = Costs::new(&cluster, &model, work, &calibration).unwrap();
        let placement = Placement::single(Pipeline::group(LAYERS, Split::Expert, &[0, 1]));
        let said = predict(&costs, &placement).unwrap();
        f64::from(concurrency) / said.throughput_tok_s
    };
    let caches = |rows: f64| f64::from(LAYERS) * rows * CACHE / BANDWIDTH;
    let rest = (f64::from(LAYERS) * COMMON + HEAD / 2.0) / BANDWIDTH;
    let experts = (seconds(64) - caches(64.0) - rest) * BANDWIDTH / f64::from(LAYERS) / EXPERT;
    let uneven = 1.0 + (BUSIER / 2.0 - 1.0) / 8.0; // by the root of 64
    near(experts, 8.0 * uneven);
}

#[test]
fn layers_with_states_read_these_and_no_keys() {
    let mut model = model(LAYERS);
    let plain = token(&model, Split::Tensor, 1e-9);
    model.caches = Caches {
        states: 6,
        state_bytes: 2e6,
        state_params: 1e6,
        ..Caches::default()
    };
    let attention = COMMON - ROUTER;
    // Six of eight layers: half of a state in place of 40 positions, 1e6 weights of attention's.
    let more = 6.0 * (1e6 - CACHE + 1e6 - attention) / 2.0 / BANDWIDTH;
    let got = token(&model, Split::Tensor, 1e-9);
    assert!(((got - plain) / more - 1.0).abs() < 1e-3, "{got} {plain}");
}

#[test]
fn mixtures_of_a_range_are_counted() {
    let mut model = mixture();
    for (dense_layers, every) in [(0, 1), (3, 1), (0, 2), (3, 2), (1, 3), (8, 1), (2, 8)] {
        model.moe = model.moe.map(|moe| Moe {
            dense_layers,
            every,
            ..moe
        });
        for (start, end) in [(0, 8), (0, 0), (2, 3), (3, 8), (5, 6), (7, 8), (0, 4)] {
            let counted = (start..end).filter(|i| model.is_moe(*i)).count();
            let range = start..end;
            assert_eq!(
                model.mixtures(&range) as usize,
                counted,
                "{range:?} {every}"
            );
        }
    }
    model.moe = model.moe.map(|moe| Moe { every: 0, ..moe });
    assert!(model.check().is_err());
}
