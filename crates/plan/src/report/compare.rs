//! Clusters side by side.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{PlanRequest, count, hosted, json as plan_json, layout, or_dash, svg};
use crate::solver::{PlacementCandidate, solve};

/// A cluster and its plan, or why there is none.
#[derive(Debug)]
pub(super) struct ClusterRow {
    /// The cluster's name.
    pub(super) name: String,
    pub(super) nodes: usize,
    /// The placement that was found.
    pub(super) found: Result<PlacementCandidate, String>,
    json: Value,
}

/// Plans of one model on several clusters.
#[derive(Debug)]
pub struct Comparison<'a> {
    question: &'a PlanRequest,
    rows: Vec<ClusterRow>,
}

impl<'a> Comparison<'a> {
    /// Plans for every cluster of the question. A cluster without a plan says why.
    pub fn new(question: &'a PlanRequest) -> Self {
        let rows = question.clusters.iter().map(|c| row(question, c));
        Self {
            question,
            rows: rows.collect(),
        }
    }

    /// A table, for people.
    pub fn text(&self) -> String {
        table(self.question, &self.rows).trim_end().to_owned()
    }

    /// The comparison as one object, for programs.
    pub fn json(&self) -> Value {
        let rows: Vec<&Value> = self.rows.iter().map(|row| &row.json).collect();
        json!({ "model": self.question.model.name, "clusters": rows })
    }

    /// A picture as SVG text: bars of tokens a second.
    pub fn svg(&self) -> String {
        svg::bars(&self.question.model.name, &self.rows)
    }
}

fn row(question: &PlanRequest, cluster: &crate::Cluster) -> ClusterRow {
    let solved = question.costs(cluster).and_then(|costs| {
        let outcome = solve(&costs, &question.options)?;
        let mut json = plan_json::candidate(&costs, &outcome.best);
        if let Some(usd) = question.hosted_usd {
            json["hosted"] = hosted::json(&outcome.best.prediction, usd);
        }
        Ok((outcome.best, json))
    });
    let (found, json) = match solved {
        Ok((best, json)) => (Ok(best), json),
        Err(error) => (
            Err(error.to_string()),
            json!({ "error": error.to_string() }),
        ),
    };
    ClusterRow {
        name: cluster.name.clone(),
        nodes: cluster.nodes.len(),
        found,
        json: json!({ "cluster": cluster.name, "plan": json }),
    }
}

fn table(question: &PlanRequest, rows: &[ClusterRow]) -> String {
    let width = rows
        .iter()
        .map(|row| row.name.chars().count())
        .max()
        .unwrap_or(0)
        .max(7);
    let requests = count(question.workload.concurrency as usize, "request");
    let mut text = format!("{}, {requests}\n", question.model.name);
    // Months until the machines have cost as little as a hosted API.
    let months = |title: String| match question.hosted_usd {
        Some(_) => format!(" {title:>7}"),
        None => String::new(),
    };
    let _ = writeln!(
        text,
        "{:<width$}  {:<26} {:>6} {:>7} {:>6} {:>6} {:>6} {:>8} {:>7}{}",
        "cluster",
        "plan",
        "tok/s",
        "all",
        "TTFT",
        "W",
        "J/tok",
        "USD",
        "USD/t/s",
        months("months".to_owned())
    );
    for row in rows {
        match &row.found {
            Err(why) => {
                let _ = writeln!(text, "{:<width$}  no plan: {why}", row.name);
            }
            Ok(best) => {
                let said = &best.prediction;
                let used = said.nodes.len();
                let even = question
                    .hosted_usd
                    .and_then(|usd| hosted::break_even(said, usd));
                let label = layout::label(&best.placement);
                let of = if used < row.nodes {
                    format!(" ({used} of {})", row.nodes)
                } else {
                    String::new()
                };
                let _ = writeln!(
                    text,
                    "{:<width$}  {:<26} {:>6.1} {:>7.1} {:>6} {:>6} {:>6} {:>8} {:>7}{}",
                    row.name,
                    format!("{label}{of}"),
                    said.decode_tok_s,
                    said.throughput_tok_s,
                    or_dash(said.ttft_s, 2),
                    or_dash(said.watts, 0),
                    or_dash(said.joules_per_token, 1),
                    or_dash(said.price_usd, 0),
                    or_dash(said.usd_per_tok_s(), 0),
                    months(or_dash(even.map(|even| even.months), 1)),
                );
            }
        }
    }
    text
}
