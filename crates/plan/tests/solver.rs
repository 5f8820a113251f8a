//! The solver against brute force, and against the clock.

use std::time::Instant;

use crate::small::{WORK, mesh, model, node};
use paceline_plan::solver::{Options, PROGRAMS, solve};
use paceline_plan::{
    Bits, Calibration, Cluster, Costs, Error, Objective, Pipeline, PipelineStage, Placement, Split,
    Workload, predict,
};
use proptest::prelude::*;

/// Every sequence of disjoint groups and every cut: the least seconds of a request.
fn brute_force(costs: &Costs<'_>) -> Option<f64> {
    let mut best: Option<f64> = None;
    let mut stages = Vec::new();
    extend(costs, &mut stages, 0, 0, &mut best);
    best
}

fn extend(
    costs: &Costs<'_>,
    stages: &mut Vec<PipelineStage>,
    used: u32,
    next: u32,
    best: &mut Option<f64>,
) {
    if next == costs.model.layers {
        let placement = Placement::single(Pipeline {
            stages: stages.clone(),
        });
        let said = predict(costs, &placement).expect("valid");
        if said.fits() && best.is_none_or(|b| said.request_s < b) {
            *best = Some(said.request_s);
        }
        return;
    }
    for set in 1u32..1 << costs.cluster.nodes.len() {
        let nodes: Vec<usize> = (0..costs.cluster.nodes.len())
            .filter(|&n| set & 1 << n != 0)
            .collect();
        let alike = nodes
            .iter()
            .all(|&n| costs.cluster.nodes[n].bandwidth == costs.cluster.nodes[nodes[0]].bandwidth);
        // The solver deals unequal nodes unequal shares; even shares are tried among equal ones.
        if used & set != 0 || !alike || 12 % nodes.len() != 0 {
            continue;
        }
        for end in next + 1..=costs.model.layers {
            stages.push(PipelineStage::even(next..end, Split::Tensor, &nodes));
            extend(costs, stages, used | set, end, best);
            stages.pop();
        }
    }
}

fn strict() -> Options {
    Options {
        objective: Objective::Latency,
        tolerance: 0.0,
    }
}

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(48)
    }
}

proptest! {
    #![proptest_config(config())]

    /// With one kind of link the way back is the same for all pipelines: exact means exact.
    #[test]
    fn never_worse_than_brute_force(
        layers in 1u32..6,
        sizes in prop::collection::vec((1u32..6, 1u32..4), 1..4),
        alpha_us in prop::sample::select(vec![1.0, 50.0, 2000.0]),
    ) {
        let nodes = sizes.iter().enumerate();
        let nodes = nodes.map(|(i, &(m, b))| node(i, f64::from(m), f64::from(b) * 10e9)).collect();
        let cluster = mesh(nodes, |_, _| (alpha_us * 1e-6, 1e9));
        check(&cluster, layers, 1e-9)?;
    }

    /// With links of all kinds, up to one token's way back per token.
    #[test]
    fn near_brute_force_on_uneven_links(
        layers in 1u32..5,
        sizes in prop::collection::vec((1u32..6, 1u32..3), 2..4),
        alphas in prop::collection::vec(1.0f64..500.0, 9),
    ) {
        let nodes = sizes.iter().enumerate();
        let nodes = nodes.map(|(i, &(m, b))| node(i, f64::from(m), f64::from(b) * 10e9)).collect();
        let cluster = mesh(nodes, |a, b| (alphas[a * 3 + b] * 1e-6, 1e9));
        let back = f64::from(WORK.output) * (500e-6 + 1e-8);
        check(&cluster, layers, back)?;
    }
}

fn check(cluster: &Cluster, layers: u32, slack: f64) -> Result<(), TestCaseError> {
    let (model, calibration) = (model(layers), Calibration::builtin().expect("valid"));
    let costs = Costs::new(cluster, &model, WORK, &calibration).expect("valid");
    let expected = brute_force(&costs);
    match (solve(&costs, &strict()), expected) {
        (Ok(found), Some(expected)) => {
            prop_assert!(found.exact);
            found
                .best
                .placement
                .check(&model, cluster.nodes.len())
                .expect("valid");
            prop_assert!(found.best.prediction.fits());
            let got = found.best.prediction.request_s;
            prop_assert!(got <= expected + slack, "{got} against {expected}");
        }
        (Err(Error::Infeasible(_)), None) => {}
        // Uneven shares may fit where nothing that brute force tries does.
        (Ok(found), None) => prop_assert!(found.best.prediction.fits()),
        (other, expected) => prop_assert!(false, "{other:?} against {expected:?}"),
    }
    Ok(())
}

/// Times are printed and not asserted, since they depend on what else runs:
/// `cargo test --release -p paceline-plan --test all solver::sixteen -- --nocapture`.
fn timed(cluster: &Cluster, layers: u32, workload: Workload, bar_s: u32) {
    let (model, calibration) = (model(layers), Calibration::builtin().expect("valid"));
    let start = Instant::now();
    let costs = Costs::new(cluster, &model, workload, &calibration).expect("valid");
    let found = solve(&costs, &Options::default()).expect("valid");
    let took = start.elapsed();
    eprintln!(
        "{} nodes x {layers}: {took:?} of {bar_s} s, exact {}, {PROGRAMS}",
        cluster.nodes.len(),
        found.exact
    );
    found
        .best
        .placement
        .check(&model, cluster.nodes.len())
        .expect("valid");
    assert!(found.best.prediction.fits());
    let again = solve(&costs, &Options::default()).expect("valid");
    assert_eq!(found.best.placement, again.best.placement);
}

#[test]
fn sixteen_nodes_and_a_hundred_are_planned_the_same_way_twice() {
    let many = Workload {
        concurrency: 16,
        ..WORK
    };
    let unlike = |n: usize| {
        let all = (0..n)
            .map(|i| node(i, 10.0 + (i % 7) as f64, (10 + i) as f64 * 1e9))
            .collect();
        mesh(all, |a, b| ((5 + (a * 7 + b * 3) % 90) as f64 * 1e-6, 1e9))
    };
    let alike = |n: usize| {
        mesh((0..n).map(|i| node(i, 12.0, 2e10)).collect(), |_, _| {
            (5e-6, 1e9)
        })
    };
    // Three kinds: neither few sets nor all alike, and as many numbers of replicas as requests.
    let kinds = |n: usize| {
        let all = (0..n)
            .map(|i| node(i, 14.0, (1 + i * 3 / n) as f64 * 1e10))
            .collect();
        mesh(all, |_, _| (5e-6, 1e9))
    };
    timed(&kinds(16), 128, many, 1);
    timed(&kinds(100), 128, many, 10);
    for workload in [WORK, many] {
        timed(&alike(16), 128, workload, 1);
        timed(&unlike(16), 128, workload, 1);
        timed(&unlike(10), 96, workload, 2);
        timed(&unlike(100), 128, workload, 10);
        timed(&alike(100), 128, workload, 10);
    }
}

#[test]
fn an_idle_slow_node_stays_out() {
    let nodes = vec![node(0, 40.0, 1e11), node(1, 40.0, 1e9)];
    let cluster = mesh(nodes, |_, _| (1e-3, 1e8));
    let (model, calibration) = (model(16), Calibration::builtin().unwrap());
    let costs = Costs::new(&cluster, &model, WORK, &calibration).unwrap();
    let found = solve(&costs, &strict()).unwrap();
    assert_eq!(found.best.placement.nodes(), [0]);
}

#[test]
fn what_does_not_fit_is_refused_with_changes_that_help() {
    let nodes = vec![node(0, 4.0, 1e10), node(1, 4.0, 1e10)];
    let cluster = mesh(nodes, |_, _| (1e-5, 1e9));
    let (model, calibration) = (model(40), Calibration::builtin().unwrap());
    let costs = Costs::new(&cluster, &model, WORK, &calibration).unwrap();
    let Err(Error::Infeasible(why)) = solve(&costs, &strict()) else {
        panic!("fits")
    };
    assert!(why.need > why.have, "{why}");
    let mut kinds = Vec::new();
    for change in &why.changes {
        match change {
            paceline_plan::PlanChange::Bits { bits } => {
                let mut smaller = model.clone();
                smaller.bits = Bits::uniform(*bits);
                let costs = Costs::new(&cluster, &smaller, WORK, &calibration).unwrap();
                solve(&costs, &strict()).expect("fits with fewer bits");
                kinds.push("bits");
            }
            paceline_plan::PlanChange::Nodes { count, .. } => {
                let grown = paceline_plan::advice::grown(&cluster, *count);
                let costs = Costs::new(&grown, &model, WORK, &calibration).unwrap();
                solve(&costs, &strict()).expect("fits with more nodes");
                kinds.push("nodes");
            }
            paceline_plan::PlanChange::Memory { .. } => kinds.push("memory"),
            _ => {}
        }
    }
    assert_eq!(kinds, ["bits", "nodes", "memory"]);
}
