//! The search for a placement ([`solve`]): generates candidates, predicts each in full and selects
//! the best by the objective.
//!
//! Candidates are single pipelines, replicas, and disaggregated prefill. The dynamic programmes and
//! integer programs that generate them are in the other modules of this folder.

use super::classes::{ClassCounts, Classes};
use super::exact::{self, Combine, ExactPipeline, GroupType};
use super::groups::{NodeGroup, RangeLoad, splits};
use super::large;
use crate::cost::Costs;
use crate::placement::{Pipeline, Placement, Split};
use crate::predict::{Prediction, predict};
use crate::{Error, Objective, advice};

/// Settings of the search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    pub objective: Objective,
    /// Relative difference that is not worth another node.
    pub tolerance: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            objective: Objective::Latency,
            // Half of the median error of predictions on held-out rows.
            tolerance: 0.02,
        }
    }
}

/// Ways to place a model that people have names for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlacementFamily {
    OneNode,
    /// Layers cut among single nodes.
    Pipeline,
    /// Every layer split.
    Tensor,
    /// Stages, with tensor parallelism in some of them.
    TensorPipeline,
    /// Experts dealt out, in one or several stages.
    Expert,
    /// Several copies.
    Replicas,
    /// Prompts on other nodes than answers.
    PrefillApart,
}

/// A placement with what it will do.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacementCandidate {
    /// The nodes and the layers that each computes.
    pub placement: Placement,
    /// Predicted figures.
    pub prediction: Prediction,
    /// The way it is placed.
    pub family: PlacementFamily,
    /// Smaller is better; what the objective compares.
    pub score: f64,
}

/// Result of the search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchOutcome {
    /// The placement to take.
    pub best: PlacementCandidate,
    /// The best of every other family, best first.
    pub alternatives: Vec<PlacementCandidate>,
    /// Placements that were predicted.
    pub considered: usize,
    /// Whether all sequences of groups and cuts were covered.
    pub exact: bool,
}

/// Steps that the exact programme may take: half a second on one core of the test machine. All
/// numbers of replicas together have half as many, and so have all ways to compute prompts apart.
const EXACT_WORK: f64 = 3e8;

/// Sets of nodes that may be groups: as many as the work limit lets through for any model.
const MOST_SETS: f64 = 4096.0;

/// Placements of each dynamic programme that are predicted in full.
const PREDICTED: usize = 48;

/// The best placement for the objective.
///
/// # Errors
/// [`Error::Infeasible`] with the smallest changes; [`Error::MissingFact`] for energy without known
/// watts.
pub fn solve(costs: &Costs<'_>, options: &Options) -> Result<SearchOutcome, Error> {
    let classes = Classes::of(costs.cluster, &costs.network);
    let mut search = Search {
        costs,
        options,
        classes,
        found: Vec::new(),
        exact: true,
        missing: None,
    };
    let totals = search.classes.totals();
    search.whole(&totals, true);
    search.replicas(&totals);
    search.prefill_apart(&totals);
    search.finish()
}

struct Search<'a, 'c> {
    costs: &'a Costs<'c>,
    options: &'a Options,
    classes: Classes,
    found: Vec<PlacementCandidate>,
    exact: bool,
    missing: Option<Error>,
}

impl Search<'_, '_> {
    fn weights(&self, prompt: bool, replicas: u32) -> RangeLoad {
        let batch = f64::from(self.costs.workload.concurrency) / f64::from(replicas);
        RangeLoad {
            prompt,
            batch: batch.max(1.0),
        }
    }

    /// Pipelines within `limit` for one copy, looked for in about `budget` steps.
    fn pipelines(&mut self, limit: &[u8], weights: RangeLoad, budget: f64) -> Vec<Pipeline> {
        let combines: &[Combine] = if self.costs.workload.concurrency > 1 {
            &[Combine::Sum, Combine::Max]
        } else {
            &[Combine::Sum]
        };
        let n = self.costs.model.layers;
        let affordable =
            |kinds: &[GroupType]| exact::work(limit, kinds, n) * combines.len() as f64 <= budget;
        self.exact &= states(limit) <= MOST_SETS;
        let mut level = Level::widest(limit);
        let mut kinds = self.kinds(limit, weights, level);
        while level != Level::Single && !affordable(&kinds) {
            self.exact = false;
            level = level.narrower();
            kinds = self.kinds(limit, weights, level);
        }
        let mut sets = vec![kinds];
        if level != Level::Single {
            sets.push(self.kinds(limit, weights, Level::Single));
        }
        let mut all = Vec::new();
        for kinds in &sets {
            if affordable(kinds) {
                let found = combines
                    .iter()
                    .map(|&combine| self.exact(limit, kinds, combine));
                all.extend(found.flatten());
            } else {
                self.exact = false;
            }
        }
        if !self.exact {
            all.extend(large::pipelines(self.costs, &self.classes, limit, weights));
        }
        // One group with everything, of every kind: the plain alternatives.
        let whole = sets[0]
            .iter()
            .filter(|kind| kind.group.reach.first() == Some(&n));
        all.extend(whole.map(|kind| Pipeline {
            stages: vec![kind.group.stage(0..n)],
        }));
        all
    }

    fn exact(&self, limit: &[u8], kinds: &[GroupType], combine: Combine) -> Vec<Pipeline> {
        let found = exact::solve(self.costs, &self.classes, limit, kinds, combine);
        let keep =
            |found: Vec<ExactPipeline>| found.into_iter().take(PREDICTED).map(|f| f.pipeline);
        keep(found).collect()
    }

    /// Kinds of groups within `limit`.
    fn kinds(&self, limit: &[u8], weights: RangeLoad, level: Level) -> Vec<GroupType> {
        let zero = vec![0; limit.len()];
        let mut kinds = Vec::new();
        for counts in level.counts(limit) {
            let nodes = self.classes.pick(&counts, &zero);
            if !self.costs.network.joins(&nodes) {
                continue;
            }
            for split in splits(self.costs, nodes.len()) {
                let group = NodeGroup::new(self.costs, nodes.clone(), split, weights);
                kinds.extend(group.map(|group| GroupType {
                    counts: counts.clone(),
                    group,
                }));
            }
        }
        kinds
    }

    fn whole(&mut self, totals: &[u8], prompt: bool) {
        let weights = self.weights(prompt, 1);
        for pipeline in self.pipelines(totals, weights, EXACT_WORK) {
            self.add(Placement::single(pipeline));
        }
    }

    /// Equal copies: each gets the same number of nodes of every class.
    fn replicas(&mut self, totals: &[u8]) {
        let nodes: u32 = totals.iter().map(|&n| u32::from(n)).sum();
        let most = nodes.min(self.costs.workload.concurrency).min(64);
        let budget = EXACT_WORK / 2.0 / f64::from(most);
        for copies in 2..=most {
            let n = u8::try_from(copies).unwrap_or(u8::MAX);
            let limit: ClassCounts = totals.iter().map(|&total| total / n).collect();
            if limit.iter().all(|&n| n == 0) {
                break;
            }
            let weights = self.weights(true, copies);
            for pipeline in self.pipelines(&limit, weights, budget).into_iter().take(8) {
                if let Some(placement) = self.copied(&pipeline, copies) {
                    self.add(placement);
                }
            }
        }
        self.each_alone();
    }

    /// `pipeline` and copies of it on other nodes of the same classes.
    fn copied(&self, pipeline: &Pipeline, copies: u32) -> Option<Placement> {
        let mut next: Vec<usize> = vec![0; self.classes.members.len()];
        let mut replicas = Vec::new();
        for _ in 0..copies {
            let mut copy = pipeline.clone();
            for member in copy.stages.iter_mut().flat_map(|stage| &mut stage.members) {
                let class = self.class_of(member.node)?;
                member.node = *self.classes.members[class].get(next[class])?;
                next[class] += 1;
            }
            replicas.push(copy);
        }
        Some(Placement::new(replicas, None))
    }

    fn class_of(&self, node: usize) -> Option<usize> {
        self.classes
            .members
            .iter()
            .position(|class| class.contains(&node))
    }

    /// A copy on every node that holds the model alone, unlike ones too.
    fn each_alone(&mut self) {
        let n = self.costs.model.layers;
        let weights = self.weights(true, 1);
        let fits = |&node: &usize| {
            let group = NodeGroup::new(self.costs, vec![node], Split::Whole, weights);
            group.is_some_and(|group| group.reach.first() == Some(&n))
        };
        let alone: Vec<usize> = (0..self.costs.cluster.nodes.len()).filter(fits).collect();
        let most = self.costs.workload.concurrency as usize;
        if alone.len() > 1 && most > 1 && alone.len() <= 64 {
            let one = |&node: &usize| Pipeline::group(n, Split::Whole, &[node]);
            let replicas = alone.iter().take(most).map(one).collect();
            self.add(Placement::new(replicas, None));
        }
    }

    /// Prompts on one node of each class, answers on the best of the others.
    fn prefill_apart(&mut self, totals: &[u8]) {
        let n = self.costs.model.layers;
        let budget = EXACT_WORK / 2.0 / totals.len() as f64;
        for class in 0..totals.len() {
            let node = self.classes.members[class][usize::from(totals[class]) - 1];
            if self.costs.speed(node).rates.is_none() {
                continue;
            }
            let mut limit = totals.to_vec();
            limit[class] -= 1;
            if limit.iter().all(|&n| n == 0) || totals.len() > 8 {
                continue;
            }
            let weights = self.weights(false, 1);
            for pipeline in self.pipelines(&limit, weights, budget).into_iter().take(4) {
                let prefill = Pipeline::group(n, Split::Whole, &[node]);
                self.add(Placement::new(vec![pipeline], Some(prefill)));
            }
        }
    }

    /// Predicts a placement and keeps it if it fits.
    fn add(&mut self, placement: Placement) {
        let Ok(prediction) = predict(self.costs, &placement) else {
            return;
        };
        if !prediction.fits() {
            return;
        }
        match score(self.costs, self.options.objective, &prediction) {
            Ok(score) => self.found.push(PlacementCandidate {
                family: family(&placement),
                placement,
                prediction,
                score,
            }),
            Err(error) => self.missing = Some(error),
        }
    }

    fn finish(mut self) -> Result<SearchOutcome, Error> {
        if let (true, Some(error)) = (self.found.is_empty(), self.missing) {
            return Err(error);
        }
        let considered = self.found.len();
        // A stable sort: equal candidates stay in the order in which they were made.
        self.found.sort_by(|a, b| a.score.total_cmp(&b.score));
        let Some(first) = self.found.first() else {
            return Err(Error::Infeasible(Box::new(advice::infeasible(
                self.costs,
                self.options,
            ))));
        };
        let near = first.score + first.score.abs() * self.options.tolerance;
        let nodes = |candidate: &PlacementCandidate| candidate.prediction.nodes.len();
        let close = self.found.iter().take_while(|c| c.score <= near);
        let best = close.min_by_key(|c| nodes(c)).unwrap_or(first).clone();
        let mut alternatives: Vec<PlacementCandidate> = Vec::new();
        for candidate in &self.found {
            let known = alternatives.iter().any(|a| a.family == candidate.family);
            if !known && candidate.family != best.family {
                alternatives.push(candidate.clone());
            }
        }
        Ok(SearchOutcome {
            best,
            alternatives,
            considered,
            exact: self.exact,
        })
    }
}

/// Range of groups to search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// Every set of nodes.
    All,
    /// Sets of one class, and all nodes together.
    Alike,
    /// Powers of two of one class.
    Doubling,
    /// Single nodes.
    Single,
}

impl Level {
    /// With too many sets, only nodes of one class form groups.
    fn widest(limit: &[u8]) -> Self {
        if states(limit) <= MOST_SETS {
            Self::All
        } else {
            Self::Alike
        }
    }

    const fn narrower(self) -> Self {
        match self {
            Self::All => Self::Alike,
            Self::Alike => Self::Doubling,
            Self::Doubling | Self::Single => Self::Single,
        }
    }

    /// Numbers of nodes of each class in the groups of this level.
    fn counts(self, limit: &[u8]) -> Vec<ClassCounts> {
        let zero = vec![0; limit.len()];
        let alike = |wanted: &dyn Fn(u8) -> bool| {
            let mut all = Vec::new();
            for (class, &max) in limit.iter().enumerate() {
                for n in (1..=max.min(64)).filter(|&n| wanted(n)) {
                    let mut counts = zero.clone();
                    counts[class] = n;
                    all.push(counts);
                }
            }
            all
        };
        match self {
            Self::All => subsets(limit),
            Self::Alike => {
                let mut all = alike(&|_| true);
                let total: u32 = limit.iter().map(|&n| u32::from(n)).sum();
                if !all.contains(&limit.to_vec()) && total <= 64 {
                    all.push(limit.to_vec());
                }
                all
            }
            Self::Doubling => alike(&|n| n.is_power_of_two()),
            Self::Single => alike(&|n| n == 1),
        }
    }
}

fn states(limit: &[u8]) -> f64 {
    limit.iter().map(|&n| f64::from(n) + 1.0).product()
}

/// Every count vector from one node to `limit`, fewest of the first class first.
fn subsets(limit: &[u8]) -> Vec<ClassCounts> {
    let mut all = vec![vec![]];
    for &max in limit {
        let longer = |counts: &ClassCounts| {
            let counts = counts.clone();
            (0..=max).map(move |n| [counts.as_slice(), &[n]].concat())
        };
        all = all.iter().flat_map(longer).collect();
    }
    all.retain(|counts| (1..=64).contains(&counts.iter().map(|&n| u32::from(n)).sum::<u32>()));
    all.sort_by_key(|counts| counts.iter().map(|&n| u32::from(n)).sum::<u32>());
    all
}

/// The name of the way that a placement is placed.
pub(crate) fn family(placement: &Placement) -> PlacementFamily {
    let first = &placement.replicas[0];
    let any = |split| first.stages.iter().any(|stage| stage.split == split);
    if placement.prefill.is_some() {
        PlacementFamily::PrefillApart
    } else if placement.replicas.len() > 1 {
        PlacementFamily::Replicas
    } else if any(Split::Expert) {
        PlacementFamily::Expert
    } else {
        match (any(Split::Tensor), first.stages.len()) {
            (true, 1) => PlacementFamily::Tensor,
            (true, _) => PlacementFamily::TensorPipeline,
            (false, 1) => PlacementFamily::OneNode,
            (false, _) => PlacementFamily::Pipeline,
        }
    }
}

/// Smaller is better.
pub(crate) fn score(
    costs: &Costs<'_>,
    objective: Objective,
    said: &Prediction,
) -> Result<f64, Error> {
    Ok(match objective {
        Objective::Latency => said.request_s,
        Objective::Throughput => 1.0 / said.throughput_tok_s,
        Objective::Nodes => said.nodes.len() as f64 * 1e9 + said.request_s,
        Objective::Energy => said.joules_per_token.ok_or_else(|| {
            let unknown = said.nodes.iter().find(|node| node.watts.is_none());
            let node = unknown.map_or(0, |node| node.node);
            Error::MissingFact {
                node: costs.cluster.nodes[node].name.clone(),
                fact: "idle or load power",
            }
        })?,
    })
}
