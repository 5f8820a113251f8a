//! Sharding: turns a placement into the part of the model that each worker holds.
//!
//! ```text
//! --split, --shares --asked--.
//!                             Placement --Cut::new--> leaves of each rank --Job--> workers
//! the planner ---------------'                        whole numbers                check them
//! ```
//! An instance executes one pipeline of a [`Placement`]. Its owner rounds the shares once, in
//! [`PlannedSplit::new`]. The same [`Split`] is predicted, displayed, and sent to workers.

use std::ops::Range;

use paceline_model::{Config, Split, SplitKind, StageKind, split};
use paceline_plan::{Pipeline, PipelineStage, Placement, Split as Sharing, StageMember};

use crate::Error;

/// Largest denominator of exact shares: `--shares 1000,1` has 1,001.
const PARTS_MAX: u32 = 4096;

/// Denominator of all other shares, such as a planner's. The rounding error is at most a millionth;
/// the finest sum of a known model has 4,096 leaves.
const PARTS: f64 = (1 << 20) as f64;

/// A placement, its split of the model, and its predicted speed.
#[derive(Clone, Debug)]
pub struct PlannedSplit {
    pub placement: Placement,
    /// Split of the model by the placement.
    pub split: Split,
    /// Predicted decode tokens a second; `None` without measurements.
    pub tok_s: Option<f64>,
}

impl PlannedSplit {
    /// Rounds the shares of `placement` to whole leaves. Rank i is on its i-th node.
    ///
    /// # Errors
    /// [`Error::Placement`] for a placement that instances do not support, [`Error::Split`] for a
    /// pipeline that does not fit this model or leaves a rank without work.
    pub fn new(config: &Config, placement: Placement, tok_s: Option<f64>) -> Result<Self, Error> {
        let stages = executed(&placement)?.stages.iter().map(|stage| {
            let layers = stage.layers.start as usize..stage.layers.end as usize;
            let kind = match stage.split {
                Sharing::Expert => StageKind::Experts,
                Sharing::Whole | Sharing::Tensor => StageKind::Tensor,
            };
            (kind, layers, weights(&stage.members))
        });
        let split = Split::of_stages(config, stages)?;
        Ok(Self {
            placement,
            split,
            tok_s,
        })
    }
}

/// The placement of `--nodes`, `--split` and `--shares`; no shares mean equal ones.
///
/// # Errors
/// The values contradict each other or do not fit the model.
pub fn asked(
    config: &Config,
    kind: SplitKind,
    nodes: u32,
    shares: &[u32],
) -> Result<Placement, split::Error> {
    let split = Split::plan(config, kind, nodes, shares)?;
    let mut first = 0;
    let stages = split.each_stage().zip(split.kinds());
    let stages = stages.map(|((layers, shares), kind)| {
        let stage = stage(kind, &layers, shares, first);
        first += shares.len();
        stage
    });
    let stages = stages.collect();
    Ok(Placement::single(Pipeline { stages }))
}

/// The splits of a model over 1 to `most` nodes with equal shares, each once; with expert
/// parallelism if it has experts.
pub fn ways(config: &Config, most: u32) -> Vec<(SplitKind, Split)> {
    let kinds = [SplitKind::Tensor, SplitKind::Pipeline, SplitKind::Experts];
    let (tensor, pipeline) = (2, 2);
    let grids = [
        SplitKind::Grid { tensor, pipeline },
        SplitKind::GridOfExperts { tensor, pipeline },
    ];
    let all = (1..=most).flat_map(|n| {
        let grids = grids.into_iter().filter(move |_| n == 4);
        kinds.into_iter().chain(grids).map(move |kind| (n, kind))
    });
    let mut ways: Vec<(SplitKind, Split)> = Vec::new();
    for (nodes, kind) in all {
        let Ok(split) = Split::plan(config, kind, nodes, &[]) else {
            continue;
        };
        let same = |way: &Split| way.ranks() == nodes && way.to_string() == split.to_string();
        if !ways.iter().any(|(_, way)| same(way)) {
            ways.push((kind, split));
        }
    }
    ways
}

/// A stage on nodes from `first` on.
fn stage(kind: StageKind, layers: &Range<usize>, shares: &[u32], first: usize) -> PipelineStage {
    let all: f64 = shares.iter().copied().map(f64::from).sum();
    let member = |(node, share): (usize, &u32)| StageMember {
        node,
        share: f64::from(*share) / all,
        streamed: 0,
    };
    PipelineStage {
        layers: layers.start as u32..layers.end as u32,
        split: match (shares.len(), kind) {
            (1, _) => Sharing::Whole,
            (_, StageKind::Tensor) => Sharing::Tensor,
            (_, StageKind::Experts) => Sharing::Expert,
        },
        members: (first..).zip(shares).map(member).collect(),
    }
}

fn executed(placement: &Placement) -> Result<&Pipeline, Error> {
    let refuse = |part| Err(Error::Placement { part });
    let [pipeline] = &placement.replicas[..] else {
        return refuse("another number of replicas");
    };
    if placement.prefill.is_some() {
        return refuse("a node for prompts alone");
    }
    Ok(pipeline)
}

/// The shares of a stage as whole numbers: the smallest exact ones, if they are small enough.
fn weights(members: &[StageMember]) -> Vec<u32> {
    let parts = |all: f64| members.iter().map(move |member| member.share * all);
    let is_whole = |part: f64| part.round() >= 1.0 && (part - part.round()).abs() < 1e-6;
    let known = (1..=PARTS_MAX).find(|all| parts(f64::from(*all)).all(is_whole));
    let all = known.map_or(PARTS, f64::from);
    parts(all)
        .map(|part| part.round().max(1.0) as u32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights_of(shares: &[u32]) -> Vec<u32> {
        weights(&stage(StageKind::Tensor, &(0..1), shares, 0).members)
    }

    #[test]
    fn shares_that_were_asked_for_are_found_again() {
        let thirds = [1, 1, 1];
        for shares in [&[1][..], &thirds, &[3, 1], &[1, 2, 5, 1], &[1000, 1]] {
            assert_eq!(weights_of(shares), shares);
        }
        for n in 1..=64 {
            assert_eq!(weights_of(&vec![1; n]), vec![1; n]);
            let uneven: Vec<u32> = (0..n as u32).map(|rank| 1 + rank * 7 % 13).collect();
            assert_eq!(weights_of(&uneven), uneven);
        }
        assert_eq!(weights_of(&[2, 4]), [1, 2], "the least");
        assert_eq!(weights_of(&[4_000_000_000, 1]), [1 << 20, 1], "not nothing");
    }

    #[test]
    fn shares_of_a_planner_are_rounded_finely() {
        let share = [0.377_123_4, 0.622_876_6];
        let members = share.map(|share| StageMember {
            node: 0,
            share,
            streamed: 0,
        });
        let weights = weights(&members);
        let all: u32 = weights.iter().sum();
        for (weight, share) in weights.iter().zip(share) {
            assert!((f64::from(*weight) / f64::from(all) - share).abs() < 2e-6);
        }
    }

    #[test]
    fn what_no_instance_executes_is_refused() {
        let one = || Pipeline::group(4, Sharing::Tensor, &[0, 1]);
        for sharing in [Sharing::Tensor, Sharing::Expert] {
            let pipeline = Pipeline::group(4, sharing, &[0, 1]);
            assert!(executed(&Placement::single(pipeline)).is_ok());
        }
        for (placement, part) in [
            (Placement::new(vec![one(), one()], None), "replicas"),
            (
                Placement::new(vec![one()], Some(one())),
                "for prompts alone",
            ),
        ] {
            let error = executed(&placement).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
