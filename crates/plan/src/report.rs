//! Questions to the planner and their answers, as text, as JSON and as a picture.
//!
//! ```
//! use paceline_plan::catalogue::short_cluster;
//! use paceline_plan::report::PlanRequest;
//! use paceline_plan::{Calibration, Catalogue, Workload};
//!
//! let catalogue = Catalogue::builtin()?;
//! let question = PlanRequest {
//!     clusters: vec![short_cluster("2 x mac-studio-m3-ultra-256 @ tb5-rdma", &catalogue)?],
//!     model: catalogue.model("Llama-3.1-8B")?.shape(4.5)?,
//!     calibration: Calibration::builtin()?,
//!     workload: Workload::ONE,
//!     options: Default::default(),
//!     hosted_usd: None,
//!     accepted: None,
//!     catalogue,
//! };
//! let costs = question.costs(&question.clusters[0])?;
//! let answer = question.answer(&costs, false)?;
//! assert!(answer.text(&question, &costs).contains("tok/s"));
//! # Ok::<(), paceline_plan::Error>(())
//! ```

mod compare;
mod hosted;
mod json;
mod layout;
mod svg;
mod validate;

use std::fmt::Write;

use serde_json::Value;

use crate::advice::{Sensitivity, sensitivity as changes_of};
use crate::catalogue::LinkKind;
use crate::drafts::{Drafted, drafted};
use crate::origin::PredictionBasis;
use crate::solver::{
    Options, PlacementCandidate, PlacementFamily, SearchOutcome, solve, stream_from_disk,
};
use crate::{Calibration, Catalogue, Cluster, Costs, Error, ModelShape, Objective, Workload};
use crate::{Placement, Prediction, predict};

pub use compare::Comparison;
pub use layout::label;
pub use validate::{scores, scores_json};

/// A question with everything looked up.
#[derive(Debug)]
pub struct PlanRequest {
    /// Machines and links that changes are tried with.
    pub catalogue: Catalogue,
    /// Constants of the engines.
    pub calibration: Calibration,
    /// The clusters in question; a plan is for the first.
    pub clusters: Vec<Cluster>,
    pub model: ModelShape,
    /// Requests, and how long they are.
    pub workload: Workload,
    /// The objective and the tolerance of the search.
    pub options: Options,
    /// Dollars that a hosted API asks for a million answer tokens.
    pub hosted_usd: Option<f64>,
    /// Accepted tokens of a draft of 8, to predict decoding with drafts.
    pub accepted: Option<f64>,
}

/// The best placement, others, and what would change it.
#[derive(Debug)]
pub struct PlanReport {
    /// Result of the solver.
    pub outcome: SearchOutcome,
    /// Changes of the cluster, each with its gain.
    pub changes: Vec<Sensitivity>,
    /// The published runs that its speed rests on, where it was not measured here.
    pub origin: Option<PredictionBasis>,
    /// Decoding with drafts, where that was asked.
    pub drafted: Option<Drafted>,
}

impl PlanRequest {
    /// Costs of the model on one of the clusters.
    ///
    /// # Errors
    /// A cluster or a workload that cannot be planned for.
    pub fn costs<'a>(&'a self, cluster: &'a Cluster) -> Result<Costs<'a>, Error> {
        if let Some(usd) = self.hosted_usd {
            hosted::check(usd)?;
        }
        Costs::new(cluster, &self.model, self.workload, &self.calibration)
    }

    /// The plan for `costs`. With `disk` a model that fits nowhere may read layers from disk for
    /// every token.
    ///
    /// # Errors
    /// [`Error::Infeasible`] with changes that each suffice.
    pub fn answer(&self, costs: &Costs<'_>, disk: bool) -> Result<PlanReport, Error> {
        let outcome = match (solve(costs, &self.options), disk) {
            (Err(Error::Infeasible(_)), true) => streamed(costs)?,
            (outcome, _) => outcome?,
        };
        let links = self.other_links()?;
        let changes = changes_of(costs, &self.calibration, &self.options, &outcome, &links)?;
        let placement = &outcome.best.placement;
        let origin = PredictionBasis::of(costs.cluster, placement, &self.calibration)?;
        let with = |accepted| drafted(costs, &placement.replicas[0], accepted);
        let drafted = self.accepted.map(with).transpose()?;
        Ok(PlanReport {
            outcome,
            changes,
            origin,
            drafted,
        })
    }

    /// Links to try in place of those that are there.
    fn other_links(&self) -> Result<Vec<LinkKind>, Error> {
        let kinds = ["tb5-rdma", "tb5-tcp", "roce-200g", "10gbe"];
        let link = |kind: &&str| self.catalogue.link(kind).cloned();
        kinds.iter().map(link).collect()
    }
}

/// The plan with layers from disk, as an outcome of its own.
fn streamed(costs: &Costs<'_>) -> Result<SearchOutcome, Error> {
    let (placement, prediction) = stream_from_disk(costs)?;
    Ok(SearchOutcome {
        best: PlacementCandidate {
            family: PlacementFamily::Pipeline,
            score: prediction.request_s,
            placement,
            prediction,
        },
        alternatives: Vec::new(),
        considered: 1,
        exact: false,
    })
}

impl PlanReport {
    /// The whole report, for people.
    pub fn text(&self, question: &PlanRequest, costs: &Costs<'_>) -> String {
        plan(question, costs, self)
    }

    /// The plan, its alternatives and what would change it, for programs.
    pub fn json(&self, question: &PlanRequest, costs: &Costs<'_>) -> Value {
        json::plan(question, costs, self)
    }
}

fn plan(question: &PlanRequest, costs: &Costs<'_>, answer: &PlanReport) -> String {
    let mut text = heading(question, costs);
    let (outcome, changes) = (&answer.outcome, &answer.changes);
    let best = &outcome.best;
    let _ = writeln!(text, "\nplan: {}\n", layout::label(&best.placement));
    text.push_str(&layout::drawing(costs, &best.placement, &best.prediction));
    text.push('\n');
    text.push_str(&figures(question, costs, answer));
    text.push_str(&apart(costs, best));
    text.push_str(&alternatives(outcome, question.options.objective));
    text.push_str(&sensitivity(changes));
    let how = if outcome.exact {
        "every sequence of groups and cut"
    } else {
        "chosen orders"
    };
    let _ = write!(
        text,
        "\n{} placements predicted ({how})",
        outcome.considered
    );
    let _ = write!(text, "; engine constants: {}", engines(costs, best));
    text
}

fn heading(question: &PlanRequest, costs: &Costs<'_>) -> String {
    let model = costs.model;
    let workload = costs.workload;
    let bits = if (model.bits.experts - model.bits.rest).abs() > 0.05 {
        format!(
            "{:.2} bits experts, {:.2} rest",
            model.bits.experts, model.bits.rest
        )
    } else {
        format!("{:.2} bits", model.bits.rest)
    };
    let active = if model.moe.is_some() {
        format!(", {:.1} B active", model.active_params() / 1e9)
    } else {
        String::new()
    };
    let size = model.weight_bytes() / 1e9;
    format!(
        "{}: {:.1} B parameters{active}, {bits}, {size:.1} GB of weights\n\
         {}: {}; {} of {} + {} tokens, {} positions each; best {}\n",
        model.name,
        model.params() / 1e9,
        costs.cluster.name,
        count(costs.cluster.nodes.len(), "node"),
        count(workload.concurrency as usize, "request"),
        workload.prompt,
        workload.output,
        workload.context,
        objective(question.options.objective),
    )
}

/// `1 node`, `2 nodes`.
fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn objective(objective: Objective) -> &'static str {
    match objective {
        Objective::Latency => "latency",
        Objective::Throughput => "throughput",
        Objective::Energy => "energy",
        Objective::Nodes => "with fewest nodes",
    }
}

/// A number, or a dash where something it needs is not known.
fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Gain of separate nodes for prompts, compared with the same nodes for answers without them.
fn apart(costs: &Costs<'_>, best: &PlacementCandidate) -> String {
    let Some(alone) = without_prefill(costs, &best.placement) else {
        return String::new();
    };
    let said = &best.prediction;
    format!(
        "\nwithout nodes for prompts: first token {} s in place of {} s, decode {:.1} tok/s in \
         place of {:.1}\n",
        or_dash(alone.ttft_s, 2),
        or_dash(said.ttft_s, 2),
        alone.decode_tok_s,
        said.decode_tok_s,
    )
}

/// Prediction for a placement whose answers' nodes read the prompts too; `None` where they do.
fn without_prefill(costs: &Costs<'_>, placement: &Placement) -> Option<Prediction> {
    placement.prefill.as_ref()?;
    let alone = Placement {
        prefill: None,
        ..placement.clone()
    };
    predict(costs, &alone).ok()
}

/// The month of the oldest price among the machines of a prediction; `None` where one is undated.
fn price_date<'a>(
    question: &'a PlanRequest,
    costs: &Costs<'_>,
    said: &Prediction,
) -> Option<&'a str> {
    let dates = said.nodes.iter().map(|used| {
        let node = &costs.cluster.nodes[used.node];
        let known = question.catalogue.machine(&node.kind).ok()?;
        // A cluster file may state another price.
        let same = known.price_usd == node.price_usd;
        known.price_date.as_deref().filter(|_| same)
    });
    dates.collect::<Option<Vec<_>>>()?.into_iter().min()
}

fn figures(question: &PlanRequest, costs: &Costs<'_>, answer: &PlanReport) -> String {
    let (said, origin) = (&answer.outcome.best.prediction, &answer.origin);
    let date = price_date(question, costs, said).map(|date| format!(", of {date}"));
    let date = date.filter(|_| said.price_usd.is_some());
    let mut rows = vec![
        (
            "decode, one request",
            format!("{:.1} tok/s", said.decode_tok_s),
        ),
        (
            "decode, all requests",
            format!("{:.1} tok/s", said.throughput_tok_s),
        ),
    ];
    rows.extend(answer.drafted.map(|with| {
        let told = format!(
            "{:.1} tok/s, {:.2} tokens a step with drafts of {}",
            with.tok_s, with.per_step, with.depth
        );
        ("decode, with drafts", told)
    }));
    rows.extend([
        (
            "time to first token",
            format!("{} s", or_dash(said.ttft_s, 2)),
        ),
        (
            "prefill",
            format!("{} tok/s", or_dash(said.prefill_tok_s, 0)),
        ),
        ("whole request", format!("{:.1} s", said.request_s)),
        (
            "communication",
            format!("{:.0} % of a token", said.comm_share * 100.0),
        ),
        ("power", format!("{} W", or_dash(said.watts, 0))),
        (
            "energy",
            format!("{} J/token", or_dash(said.joules_per_token, 1)),
        ),
        (
            "price",
            format!(
                "{} USD{}",
                or_dash(said.price_usd, 0),
                date.unwrap_or_default()
            ),
        ),
        (
            "price per tok/s",
            format!("{} USD", or_dash(said.usd_per_tok_s(), 0)),
        ),
    ]);
    if let Some(origin) = origin {
        let [low, high] = origin.range(said.decode_tok_s);
        let range = format!("{low:.1} to {high:.1} tok/s");
        rows.splice(1..1, [("  range", range), ("  rests on", origin.summary())]);
    }
    if let Some(usd) = question.hosted_usd {
        rows.extend(hosted::rows(said, usd));
    }
    let line = |(name, value): &(&str, String)| format!("  {name:<21} {value}\n");
    rows.iter().map(line).collect()
}

fn alternatives(outcome: &SearchOutcome, objective: Objective) -> String {
    if outcome.alternatives.is_empty() {
        return String::new();
    }
    let mut text =
        String::from("\nalternatives                      tok/s   all    TTFT  nodes  why not\n");
    for other in &outcome.alternatives {
        let said = &other.prediction;
        let _ = writeln!(
            text,
            "  {:<30} {:>6.1} {:>6.1} {:>6}  {:>5}  {}",
            layout::label(&other.placement),
            said.decode_tok_s,
            said.throughput_tok_s,
            or_dash(said.ttft_s, 2),
            said.nodes.len(),
            lost(&outcome.best, other, objective),
        );
    }
    text
}

/// Why `other` lost against `best`.
fn lost(best: &PlacementCandidate, other: &PlacementCandidate, objective: Objective) -> String {
    let (mine, theirs) = (&best.prediction, &other.prediction);
    let worse = (other.score / best.score - 1.0) * 100.0;
    let amount = match objective {
        Objective::Latency => format!("a request takes {worse:.0} % longer"),
        Objective::Throughput => {
            let share = 100.0 * theirs.throughput_tok_s / mine.throughput_tok_s;
            format!("{share:.0} % of the throughput")
        }
        Objective::Energy => format!("{worse:.0} % more energy a token"),
        Objective::Nodes if theirs.nodes.len() > mine.nodes.len() => {
            return format!(
                "{} nodes, {} are enough",
                theirs.nodes.len(),
                mine.nodes.len()
            );
        }
        Objective::Nodes => format!("{:.1} s a request", theirs.request_s),
    };
    if worse < 0.5 && theirs.nodes.len() > mine.nodes.len() {
        let more = theirs.nodes.len() - mine.nodes.len();
        return format!("no better, and {} more", count(more, "node"));
    }
    let because = because(best, other);
    format!("{amount}: {because}")
}

fn because(best: &PlacementCandidate, other: &PlacementCandidate) -> String {
    let (mine, theirs) = (&best.prediction, &other.prediction);
    let prompts = theirs
        .ttft_s
        .zip(mine.ttft_s)
        .map(|(theirs, mine)| (theirs, theirs - mine));
    let half = 0.5 * (theirs.request_s - mine.request_s);
    if let Some((ttft, _)) = prompts.filter(|&(_, more)| more > 0.0 && more > half) {
        return format!("the prompt takes {ttft:.2} s");
    }
    if theirs.comm_share > mine.comm_share + 0.05 {
        return format!(
            "communication is {:.0} % of a token",
            theirs.comm_share * 100.0
        );
    }
    match other.family {
        PlacementFamily::OneNode => "one memory reads all weights".to_owned(),
        PlacementFamily::Pipeline => "stages take turns, one memory reads at a time".to_owned(),
        PlacementFamily::Expert => {
            "attention is whole on every node, and the busiest has most experts".to_owned()
        }
        PlacementFamily::Replicas => "each request has only its copy's nodes".to_owned(),
        PlacementFamily::PrefillApart => "the prompt's nodes wait while answers run".to_owned(),
        PlacementFamily::Tensor | PlacementFamily::TensorPipeline => {
            if theirs.nodes.len() < mine.nodes.len() {
                "fewer memories read at a time".to_owned()
            } else {
                "every layer pays for its exchanges".to_owned()
            }
        }
    }
}

fn sensitivity(changes: &[Sensitivity]) -> String {
    let mut text = String::new();
    let shown: Vec<&Sensitivity> = changes
        .iter()
        .filter(|change| (change.gain - 1.0).abs() >= 0.005)
        .collect();
    if !shown.is_empty() {
        text.push_str("\nwhat would change it\n");
    }
    for change in shown {
        let _ = writeln!(
            text,
            "  {:<36} {:>8}  {:.1} tok/s",
            change.change,
            gain(change.gain),
            change.decode_tok_s
        );
    }
    text
}

/// `2.4x`, `+9 %` or `-12 %`.
fn gain(gain: f64) -> String {
    if gain >= 1.5 {
        format!("{gain:.1}x")
    } else {
        format!("{:+.0} %", (gain - 1.0) * 100.0)
    }
}

fn engines(costs: &Costs<'_>, best: &PlacementCandidate) -> String {
    let mut names: Vec<&str> = best
        .placement
        .nodes()
        .iter()
        .map(|&node| costs.engine(node).name.as_str())
        .collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}
