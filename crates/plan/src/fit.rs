//! Fits the constants to the `fit` rows: maximum a posteriori with log-normal priors.
//!
//! The fit minimises a sum of squares with three kinds of terms:
//!
//! - ln(predicted / published) / s over the complete `fit` rows, where s is 0.04, 0.08 or 0.2 for
//!   confidence high, medium, low;
//! - ln of communication shares where they are published;
//! - ln(value / prior) / spread over the constants.
//!
//! The method is Levenberg-Marquardt on the logarithms, with derivatives by differences. There is
//! no randomness, so the same rows give the same constants.

use crate::publications::{Published, PublishedRow};
use crate::{Calibration, Catalogue, Error};

/// Relative noise of published numbers by confidence: what repeated sets of one benchmark differ
/// by (0.04 on idle machines, 0.08 where an input was inferred).
fn noise(row: &PublishedRow) -> f64 {
    match row.confidence.as_str() {
        "high" => 0.04,
        "medium" => 0.08,
        _ => 0.2,
    }
}

/// Noise of a published share of communication: two digits are given.
const SHARE_NOISE: f64 = 0.05;

/// The constants of `start` moved to the `fit` rows of `published`.
///
/// # Errors
/// Faults of the catalogue.
pub fn fit(published: &Published, start: &Calibration) -> Result<Calibration, Error> {
    let catalogue = published.catalogue()?;
    let rows: Vec<&PublishedRow> = published
        .rows
        .iter()
        .filter(|row| row.complete && row.split == "fit")
        .collect();
    let problem = FitProblem {
        rows,
        catalogue,
        names: start.parameters().map(|p| p.name.clone()).collect(),
        priors: start
            .parameters()
            .map(|p| (p.prior.ln(), p.spread))
            .collect(),
        start: start.clone(),
    };
    let best = problem.minimise();
    Ok(problem.constants(&best))
}

struct FitProblem<'a> {
    rows: Vec<&'a PublishedRow>,
    catalogue: Catalogue,
    names: Vec<String>,
    priors: Vec<(f64, f64)>,
    start: Calibration,
}

impl FitProblem<'_> {
    fn constants(&self, logs: &[f64]) -> Calibration {
        let mut constants = self.start.clone();
        for (name, log) in self.names.iter().zip(logs) {
            constants.set(name, log.exp());
        }
        constants
    }

    fn residuals(&self, logs: &[f64]) -> Vec<f64> {
        let constants = self.constants(logs);
        let mut all: Vec<f64> = self
            .priors
            .iter()
            .zip(logs)
            .map(|((prior, spread), log)| (log - prior) / spread)
            .collect();
        for row in &self.rows {
            let Ok(said) = row.predict(&self.catalogue, &constants, None) else {
                continue;
            };
            all.push((said.value / row.value).ln() / noise(row));
            if let Some(share) = row.comm_share {
                all.push((said.comm_share / share).ln() / SHARE_NOISE);
            }
        }
        all
    }

    fn minimise(&self) -> Vec<f64> {
        const STEPS: usize = 60;
        const STEP: f64 = 1e-4; // of a logarithm; predictions are smooth in it
        let mut logs: Vec<f64> = self.priors.iter().map(|prior| prior.0).collect();
        let mut now = self.residuals(&logs);
        let mut damping = 1e-3;
        for _ in 0..STEPS {
            let columns: Vec<Vec<f64>> = (0..logs.len())
                .map(|i| {
                    let mut moved = logs.clone();
                    moved[i] += STEP;
                    let there = self.residuals(&moved);
                    there
                        .iter()
                        .zip(&now)
                        .map(|(a, b)| (a - b) / STEP)
                        .collect()
                })
                .collect();
            let Some(change) = step(&columns, &now, damping) else {
                break;
            };
            let next: Vec<f64> = logs.iter().zip(&change).map(|(log, d)| log - d).collect();
            let there = self.residuals(&next);
            let gain = squares(&now) - squares(&there);
            if gain > 0.0 {
                (logs, now) = (next, there);
                damping = (damping * 0.3).max(1e-9);
                if gain < 1e-10 {
                    break;
                }
            } else {
                damping *= 10.0;
            }
        }
        logs
    }
}

fn squares(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum()
}

/// Solves (J'J + damping diag(J'J)) d = J'r by Cholesky; `None` when it is not positive definite,
/// which the priors rule out.
fn step(columns: &[Vec<f64>], residuals: &[f64], damping: f64) -> Option<Vec<f64>> {
    let n = columns.len();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let mut l = vec![vec![0.0; n]; n];
    for i in 0..n {
        for j in 0..=i {
            let mut sum = dot(&columns[i], &columns[j]);
            if i == j {
                sum *= 1.0 + damping;
            }
            sum -= dot(&l[i][..j], &l[j][..j]);
            l[i][j] = if i == j {
                Some(sum).filter(|s| *s > 0.0)?.sqrt()
            } else {
                sum / l[j][j]
            };
        }
    }
    let mut d: Vec<f64> = columns
        .iter()
        .map(|column| dot(column, residuals))
        .collect();
    for i in 0..n {
        d[i] = (d[i] - dot(&l[i][..i], &d[..i])) / l[i][i];
    }
    for i in (0..n).rev() {
        let below: f64 = (i + 1..n).map(|k| l[k][i] * d[k]).sum();
        d[i] = (d[i] - below) / l[i][i];
    }
    Some(d)
}
