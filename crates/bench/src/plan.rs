//! The planner's predictions for local nodes, compared with their measured speed.

use serde::Serialize;

use crate::{Spread, quantile};

/// The runs of one split of the model, one for each round.
#[derive(Clone, Debug)]
pub struct SplitRuns {
    /// Nodes that compute the model together.
    pub nodes: u32,
    pub split: String,
    /// Decode tokens per second, predicted before each run.
    pub predicted: Vec<f64>,
    pub measured: Vec<f64>,
}

/// A split of the model.
#[derive(Debug, Serialize)]
pub struct SplitRow {
    nodes: u32,
    split: String,
    /// Decode tokens per second, from facts measured before each run, without results of any run.
    /// Their spread comes from the machine's own variation.
    predicted: Spread,
    measured: Spread,
    /// Relative error of the medians: predicted over measured, less 1.
    error: f64,
    /// The planner's choice among splits over as many nodes.
    chosen: bool,
    /// Measured speed over the best with as many nodes; the median of the rounds.
    of_best: f64,
}

impl SplitRuns {
    /// The median prediction of all rounds.
    fn expected(&self) -> f64 {
        quantile(&self.predicted, 0.5)
    }

    fn row(&self, all: &[Self]) -> SplitRow {
        let rivals = || all.iter().filter(|way| way.nodes == self.nodes);
        let best = |round: usize| rivals().map(|way| way.measured[round]).fold(0.0, f64::max);
        let shares: Vec<f64> = (0..self.measured.len())
            .map(|round| self.measured[round] / best(round))
            .collect();
        let (predicted, measured) = (Spread::of(&self.predicted), Spread::of(&self.measured));
        let chosen = rivals().all(|way| self.expected() >= way.expected());
        SplitRow {
            nodes: self.nodes,
            split: self.split.clone(),
            error: predicted.median / measured.median - 1.0,
            predicted,
            measured,
            chosen,
            of_best: quantile(&shares, 0.5),
        }
    }
}

/// A row for each split. All have a run of every round, and at least one.
pub fn rows(all: &[SplitRuns]) -> Vec<SplitRow> {
    all.iter().map(|way| way.row(all)).collect()
}

/// A target of the project, and the result of these runs.
#[derive(Debug, Serialize)]
pub struct AccuracyTarget {
    what: &'static str,
    /// Largest permitted error.
    limit: f64,
    worst: f64,
    kept: bool,
}

impl AccuracyTarget {
    /// Formats the target as a line.
    pub fn line(&self) -> String {
        format!(
            "\n{}: {}, worst {:.0} % of {:.0} %",
            self.what,
            if self.kept { "kept" } else { "MISSED" },
            100.0 * self.worst,
            100.0 * self.limit,
        )
    }
}

/// The targets that apply to these rows.
pub fn bars(rows: &[SplitRow]) -> Vec<AccuracyTarget> {
    let off = |row: &SplitRow| row.error.abs();
    let slower = |row: &SplitRow| 1.0 / row.of_best - 1.0;
    let bar = |what, limit, counts: &dyn Fn(&SplitRow) -> bool, size: &dyn Fn(&SplitRow) -> f64| {
        let sizes: Vec<f64> = rows.iter().filter(|row| counts(row)).map(size).collect();
        let worst = sizes.iter().copied().reduce(f64::max)?;
        let kept = worst <= limit;
        Some(AccuracyTarget {
            what,
            limit,
            worst,
            kept,
        })
    };
    let all = [
        bar("predicted, 1-2 nodes", 0.20, &|row| row.nodes <= 2, &off),
        bar("predicted, 3-4 nodes", 0.30, &|row| row.nodes > 2, &off),
        bar(
            "auto slower than the best fixed split",
            0.15,
            &|row| row.chosen && row.nodes > 1,
            &slower,
        ),
    ];
    all.into_iter().flatten().collect()
}

/// The rows as a text table.
pub fn table(rows: &[SplitRow]) -> String {
    let head = format!(
        "decode, tokens a second: median (p10 .. p90)\n{:>5}  {:<10}{:>24}{:>24}{:>8}{:>9}",
        "nodes", "split", "predicted", "measured", "error", "of best"
    );
    rows.iter().fold(head, |text, row| {
        text + &format!(
            "\n{:>5}  {:<10}{:>24}{:>24}{:>6.0} %{:>7.0} %{}",
            row.nodes,
            row.split,
            row.predicted.text(),
            row.measured.text(),
            100.0 * row.error,
            100.0 * row.of_best,
            if row.chosen { "  chosen" } else { "" },
        )
    })
}
