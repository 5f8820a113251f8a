//! Each objective picks another placement, and each is the best of all by its own figure.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use crate::small::{WORK, mesh, model, node};
use paceline_plan::solver::{Options, PlacementCandidate, PlacementFamily, solve};
use paceline_plan::{
    Calibration, Cluster, ClusterNode, Costs, Error, Objective, PlanChange, Prediction, Workload,
};

const ALL: [Objective; 4] = [
    Objective::Latency,
    Objective::Throughput,
    Objective::Energy,
    Objective::Nodes,
];

/// A fast node that burns, and four slow ones that do not; each holds the model.
fn hot_and_cool() -> Cluster {
    let hot = ClusterNode {
        load_w: Some(900.0),
        idle_w: Some(90.0),
        ..node(0, 40.0, 8e10)
    };
    let cool = |index| ClusterNode {
        load_w: Some(15.0),
        idle_w: Some(1.0),
        ..node(index, 40.0, 4e10)
    };
    let nodes = std::iter::once(hot).chain((1..5).map(cool)).collect();
    mesh(nodes, |_, _| (1e-6, 1e9)) // one activation is nothing to it, those of many requests are not
}

fn best(objective: Objective, cluster: &Cluster, workload: Workload) -> PlacementCandidate {
    let (model, calibration) = (model(16), Calibration::builtin().unwrap());
    let costs = Costs::new(cluster, &model, workload, &calibration).unwrap();
    let options = Options {
        objective,
        tolerance: 0.0,
    };
    solve(&costs, &options).unwrap().best
}

/// Smaller is better.
fn figure(objective: Objective, said: &Prediction) -> f64 {
    match objective {
        Objective::Latency => said.request_s,
        Objective::Throughput => 1.0 / said.throughput_tok_s,
        Objective::Energy => said.joules_per_token.unwrap(),
        Objective::Nodes => said.nodes.len() as f64,
    }
}

#[test]
fn each_objective_picks_its_own_placement_and_no_other_pick_beats_it() {
    let cluster = hot_and_cool();
    let many = Workload {
        concurrency: 64,
        ..WORK
    };
    let picks = ALL.map(|objective| best(objective, &cluster, many));
    for (i, objective) in ALL.into_iter().enumerate() {
        for (j, other) in picks.iter().enumerate() {
            let [own, theirs] = [&picks[i], other].map(|p| figure(objective, &p.prediction));
            assert!(own <= theirs * 1.000_001, "{objective:?}: {own} {theirs}");
            assert!(
                i == j || picks[i].placement != other.placement,
                "{objective:?} and {:?} pick {:?}",
                ALL[j],
                other.placement
            );
        }
    }
    let [latency, throughput, energy, nodes] = &picks;
    assert_eq!(latency.family, PlacementFamily::Tensor);
    assert_eq!(throughput.family, PlacementFamily::Replicas);
    assert!(!energy.placement.nodes().contains(&0), "the hot node");
    assert_eq!(nodes.placement.nodes(), [0], "the fastest that is enough");
}

/// Shares of a tensor stage follow the memories: the fast node has more of each layer.
#[test]
fn unequal_nodes_get_uneven_shares() {
    let nodes = vec![node(0, 40.0, 9e10), node(1, 40.0, 3e10)];
    let cluster = mesh(nodes, |_, _| (1e-7, 1e11));
    let found = best(Objective::Latency, &cluster, WORK);
    let stage = &found.placement.replicas[0].stages[0];
    let mut shares: Vec<(usize, f64)> = stage.members.iter().map(|m| (m.node, m.share)).collect();
    shares.sort_by_key(|share| share.0);
    assert_eq!(shares, [(0, 0.75), (1, 0.25)]);
}

/// Layers of a pipeline too: of 12 layers, with memory for ten on each, the fast node has ten.
#[test]
fn unequal_stages_get_uneven_layers() {
    let (mut small, calibration) = (model(12), Calibration::builtin().unwrap());
    small.vocab = 64; // ends take no layer's room
    let nodes = vec![node(0, 8.5, 9e10), node(1, 8.5, 3e10)];
    let cluster = mesh(nodes, |_, _| (1e-3, 1e8)); // too slow a wire for a tensor split
    let costs = Costs::new(&cluster, &small, WORK, &calibration).unwrap();
    let found = solve(&costs, &Options::default()).unwrap().best;
    let stages = &found.placement.replicas[0].stages;
    let layers = |node| {
        let mut own = stages.iter().filter(|s| s.nodes() == [node]);
        own.next().map(paceline_plan::PipelineStage::n_layers)
    };
    assert_eq!((layers(0), layers(1)), (Some(10), Some(2)), "{stages:?}");
}

/// Every proposed change is enough, and a step less is not: by context, requests, bits and nodes.
#[test]
fn the_changes_that_make_it_fit_are_the_smallest_of_their_kind() {
    let nodes = vec![node(0, 4.0, 1e10), node(1, 4.0, 1e10)];
    let cluster = mesh(nodes, |_, _| (1e-5, 1e9));
    let calibration = Calibration::builtin().unwrap();
    let model = model(6);
    let work = Workload {
        concurrency: 8,
        context: 1024,
        ..WORK
    };
    let solves = |cluster: &Cluster, bits: f64, work: Workload| {
        let mut model = model.clone();
        model.bits = paceline_plan::Bits::uniform(bits);
        let costs = Costs::new(cluster, &model, work, &calibration).unwrap();
        solve(&costs, &Options::default()).map(|_| ())
    };
    let Err(Error::Infeasible(why)) = solves(&cluster, 8.0, work) else {
        panic!("fits")
    };
    let mut kinds = Vec::new();
    for change in &why.changes {
        let (kind, enough, less) = match *change {
            PlanChange::Context { tokens } => {
                let with = |context| solves(&cluster, 8.0, Workload { context, ..work });
                ("context", with(tokens), with(tokens + 1))
            }
            PlanChange::Concurrency { requests } => {
                let with = |concurrency| {
                    solves(
                        &cluster,
                        8.0,
                        Workload {
                            concurrency,
                            ..work
                        },
                    )
                };
                ("requests", with(requests), with(requests + 1))
            }
            PlanChange::Bits { bits } => {
                let with = |bits| solves(&cluster, bits, work);
                ("bits", with(bits), with(bits + 0.25))
            }
            PlanChange::Nodes { count, .. } => {
                let with = |n| solves(&paceline_plan::advice::grown(&cluster, n), 8.0, work);
                ("nodes", with(count), with(count - 1))
            }
            PlanChange::Memory { .. } | PlanChange::Disk { .. } => continue,
        };
        assert!(enough.is_ok(), "{change:?}: {enough:?}");
        assert!(
            matches!(less, Err(Error::Infeasible(_))),
            "less than {change:?} is enough"
        );
        kinds.push(kind);
    }
    for kind in ["context", "requests", "nodes"] {
        assert!(kinds.contains(&kind), "{kind} is not in {:?}", why.changes);
    }
}
