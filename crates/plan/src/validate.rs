//! Predicted against published, set by set.

use std::collections::BTreeMap;

use paceline_base::median;

use crate::publications::{Published, PublishedRow, RowPrediction, Skip};
use crate::{Calibration, Error};

/// A row with what the model says.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    pub row: PublishedRow,
    /// The model's number, or why there is none.
    pub said: Result<RowPrediction, Skip>,
}

/// Errors of one set of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Set {
    /// `fit`, `held_out`, with the confidence.
    pub name: String,
    pub rows: usize,
    /// Rows that the model has no number for.
    pub skipped: usize,
    /// Median of absolute relative errors.
    pub median: f64,
    /// The largest ratio of predicted and published, whichever is larger, at least 1.
    pub worst: f64,
}

/// Two rows of one model and metric, at least one of them incomplete.
#[derive(Clone, Debug, PartialEq)]
pub struct Ordering {
    /// The row with the larger published number.
    pub more: String,
    pub less: String,
    /// Published ratio, above 1.
    pub published: f64,
    /// Predicted ratio; above 1 when the order is the same.
    pub predicted: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Every row, in file order.
    pub rows: Vec<Scored>,
    /// Sets of complete rows.
    pub sets: Vec<Set>,
    /// Orderings that incomplete rows give.
    pub orderings: Vec<Ordering>,
}

/// Bits assumed for rows that state none, which only give orderings.
const ASSUMED_BITS: f64 = 4.5;

/// Published numbers closer than this say nothing about order.
const NOISE: f64 = 1.1;

impl Scored {
    /// Predicted over published, minus one.
    pub fn error(&self) -> Option<f64> {
        let said = self.said.as_ref().ok()?;
        Some(said.value / self.row.value - 1.0)
    }
}

/// Scores all rows of a file.
///
/// # Errors
/// Only what is wrong with the catalogue; rows that cannot be predicted are in the report.
pub fn validate(published: &Published, calibration: &Calibration) -> Result<Report, Error> {
    let catalogue = published.catalogue()?;
    let rows: Vec<Scored> = published
        .rows
        .iter()
        .map(|row| {
            let bits = (!row.complete).then_some(ASSUMED_BITS);
            Scored {
                row: row.clone(),
                said: row.predict(&catalogue, calibration, bits),
            }
        })
        .collect();
    Ok(Report {
        sets: sets(&rows),
        orderings: orderings(&rows),
        rows,
    })
}

fn sets(rows: &[Scored]) -> Vec<Set> {
    let mut by_name: BTreeMap<String, Vec<&Scored>> = BTreeMap::new();
    for scored in rows.iter().filter(|scored| scored.row.complete) {
        let (split, confidence) = (&scored.row.split, &scored.row.confidence);
        by_name
            .entry(format!("{split}, all"))
            .or_default()
            .push(scored);
        by_name
            .entry(format!("{split}, {confidence}"))
            .or_default()
            .push(scored);
    }
    by_name
        .into_iter()
        .map(|(name, rows)| set(name, &rows))
        .collect()
}

fn set(name: String, rows: &[&Scored]) -> Set {
    let errors: Vec<f64> = rows.iter().filter_map(|scored| scored.error()).collect();
    let ratio = |error: &f64| (1.0 + error).max(1.0 / (1.0 + error));
    Set {
        name,
        rows: errors.len(),
        skipped: rows.len() - errors.len(),
        median: median(errors.iter().map(|error| error.abs()).collect()),
        worst: errors.iter().map(ratio).fold(1.0, f64::max),
    }
}

fn orderings(rows: &[Scored]) -> Vec<Ordering> {
    let comparable = |a: &PublishedRow, b: &PublishedRow| {
        a.model == b.model
            && a.metric == b.metric
            && a.concurrency == b.concurrency
            && !(a.complete && b.complete)
    };
    let mut found = Vec::new();
    for (i, a) in rows.iter().enumerate() {
        for b in &rows[i + 1..] {
            let (Ok(said_a), Ok(said_b)) = (&a.said, &b.said) else {
                continue;
            };
            if !comparable(&a.row, &b.row) {
                continue;
            }
            let (published, predicted) = (a.row.value / b.row.value, said_a.value / said_b.value);
            if published.max(1.0 / published) < NOISE {
                continue;
            }
            let more_first = published > 1.0;
            let flip = |ratio: f64| if more_first { ratio } else { 1.0 / ratio };
            let (more, less) = if more_first { (a, b) } else { (b, a) };
            found.push(Ordering {
                more: more.row.id.clone(),
                less: less.row.id.clone(),
                published: flip(published),
                predicted: flip(predicted),
            });
        }
    }
    found
}
