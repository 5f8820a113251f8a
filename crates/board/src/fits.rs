//! Models that fit this machine or a cluster, with speed and split.
//!
//! Speeds are the planner's predictions for one request with a short prompt. No model is downloaded
//! for them.

use std::cmp::Ordering;

use paceline_plan::report;
use paceline_plan::solver::{Options, solve};
use paceline_plan::{Calibration, Catalogue, Cluster, Costs, Error, ModelShape, Workload};
use paceline_store::{Catalogue as Names, usual_names};
use serde_json::{Value, json};

#[derive(Debug)]
struct CandidateModel {
    name: String,
    shape: ModelShape,
    /// Whether its hub location was verified.
    checked: bool,
    /// Its architecture, if unsupported.
    uncomputed: Option<&'static str>,
}

/// A candidate with the planner's prediction.
#[derive(Debug)]
pub struct FitRow {
    candidate: CandidateModel,
    /// `None` if it does not fit or is unsupported.
    fit: Option<FitPrediction>,
}

#[derive(Debug)]
struct FitPrediction {
    decode_tok_s: f64,
    split: String,
    nodes: usize,
}

/// All models of known shape, smallest first.
fn candidates(catalogue: &Catalogue) -> Result<Vec<CandidateModel>, Error> {
    let mut all = Vec::new();
    let known = Names::BUILTIN.iter().filter_map(|model| {
        let bits = 8.0 * model.bytes.0 as f64;
        Some((
            model.alias,
            model.shape?,
            StoredBits::File(bits),
            true,
            None,
        ))
    });
    let usual = usual_names().iter().filter_map(|usual| {
        let shape = usual.shape.as_deref()?;
        Some((
            usual.name.as_str(),
            shape,
            StoredBits::EachWeight(usual.bits),
            usual.checked.is_some(),
            usual.uncomputed.as_deref(),
        ))
    });
    for (name, shape, bits, checked, uncomputed) in known.chain(usual) {
        let entry = catalogue.model(shape)?;
        let each = match bits {
            StoredBits::EachWeight(bits) => bits,
            StoredBits::File(bits) => bits / entry.shape(8.0)?.params(),
        };
        all.push(CandidateModel {
            name: name.to_owned(),
            shape: entry.stored(each)?,
            checked,
            uncomputed,
        });
    }
    all.sort_by(|a, b| a.shape.weight_bytes().total_cmp(&b.shape.weight_bytes()));
    Ok(all)
}

/// Size of a model's file.
enum StoredBits {
    EachWeight(f64),
    File(f64),
}

/// Predictions for all models of known shape, smallest first.
///
/// # Errors
/// The planner's error about the cluster.
pub fn rows(
    cluster: &Cluster,
    catalogue: &Catalogue,
    calibration: &Calibration,
) -> Result<Vec<FitRow>, Error> {
    let row = |candidate: CandidateModel| -> Result<FitRow, Error> {
        let costs = Costs::new(cluster, &candidate.shape, Workload::ONE, calibration)?;
        let fit = match solve(&costs, &Options::default()) {
            Ok(outcome) if candidate.uncomputed.is_none() => Some(FitPrediction {
                decode_tok_s: outcome.best.prediction.decode_tok_s,
                split: report::label(&outcome.best.placement),
                nodes: outcome.best.placement.nodes().len(),
            }),
            Ok(_) | Err(Error::Infeasible(_)) => None,
            Err(error) => return Err(error),
        };
        Ok(FitRow { candidate, fit })
    };
    candidates(catalogue)?.into_iter().map(row).collect()
}

/// Tokens a second that a reader does not wait for: twice the usual 250 words a minute, at 1.3
/// tokens a word.
const READ_TOK_S: f64 = 10.0;

/// Uses of models, in the order of the table.
const USES: [&str; 3] = ["chat", "coding", "thinking"];

impl FitRow {
    /// Index of its use, by its name.
    fn use_at(&self) -> usize {
        match self.candidate.name.as_str() {
            name if name.contains("coder") => 1,
            name if name.contains("r1:") => 2,
            _ => 0,
        }
    }

    /// Whether it answers as fast as people read.
    fn is_fluent(&self) -> bool {
        let fit = self.fit.as_ref();
        fit.is_some_and(|fit| fit.decode_tok_s >= READ_TOK_S)
    }

    /// Sorts by use, then the largest that is fluent, then the fastest that fits, then the others.
    fn rank(&self, other: &Self) -> Ordering {
        let speed = |row: &Self| row.fit.as_ref().map_or(0.0, |fit| fit.decode_tok_s);
        let bytes = |row: &Self| row.candidate.shape.weight_bytes();
        let by_use = self.use_at().cmp(&other.use_at());
        let by_fluency = other.is_fluent().cmp(&self.is_fluent());
        by_use.then(by_fluency).then(match self.is_fluent() {
            true => bytes(other).total_cmp(&bytes(self)),
            false => speed(other).total_cmp(&speed(self)),
        })
    }
}

/// The best model of each use, with the use: the first of its rows, where that is fluent.
pub(crate) fn recommended(rows: &[FitRow]) -> Vec<(&str, &'static str)> {
    let best = |(at, of): (usize, &&'static str)| {
        let own = rows.iter().filter(|row| row.use_at() == at);
        let first = own.min_by(|a, b| a.rank(b)).filter(|row| row.is_fluent())?;
        Some((first.candidate.name.as_str(), *of))
    };
    USES.iter().enumerate().filter_map(best).collect()
}

/// The rows as a table, by use, with a recommendation.
pub fn text(cluster: &Cluster, rows: &[FitRow]) -> String {
    let mut sorted: Vec<&FitRow> = rows.iter().collect();
    sorted.sort_by(|a, b| a.rank(b));
    let mut lines = vec![
        format!("on {}", cluster.name),
        format!(
            "{:20} {:9} {:>9} {:>7}  SPLIT",
            "NAME", "USE", "WEIGHTS", "TOK/S"
        ),
    ];
    for row in &sorted {
        let name = &row.candidate.name;
        let weights = paceline_base::Bytes(row.candidate.shape.weight_bytes() as u64).to_string();
        let (speed, how) = match (&row.fit, row.candidate.uncomputed) {
            (Some(fit), _) => (format!("{:.1}", fit.decode_tok_s), fit.split.clone()),
            (None, Some(architecture)) => {
                ("-".to_owned(), format!("{architecture}: not computed yet"))
            }
            (None, None) => ("-".to_owned(), "does not fit".to_owned()),
        };
        let of = USES[row.use_at()];
        lines.push(format!("{name:20} {of:9} {weights:>9} {speed:>7}  {how}"));
    }
    lines.push("Speeds are predicted, for one request with a short prompt.".to_owned());
    let unchecked = rows.iter().filter(|row| !row.candidate.checked).count();
    if unchecked > 0 {
        lines.push(format!(
            "{unchecked} of {} hub ids were not looked up yet.",
            rows.len()
        ));
    }
    let best = recommended(rows).into_iter();
    lines.extend(best.map(|(name, of)| format!("for {of}: {name}")));
    lines.join("\n")
}

pub fn json(cluster: &Cluster, rows: &[FitRow]) -> Value {
    let models: Vec<Value> = rows.iter().map(row_json).collect();
    json!({ "cluster": cluster.name, "nodes": cluster.nodes.len(), "models": models })
}

fn row_json(row: &FitRow) -> Value {
    json!({
        "name": row.candidate.name,
        "shape": row.candidate.shape.name,
        "weight_bytes": row.candidate.shape.weight_bytes() as u64,
        "checked": row.candidate.checked,
        "computed": row.candidate.uncomputed.is_none(),
        "fits": row.fit.is_some(),
        "predicted_decode_tok_s": row.fit.as_ref().map(|fit| fit.decode_tok_s),
        "split": row.fit.as_ref().map(|fit| &fit.split),
        "nodes": row.fit.as_ref().map(|fit| fit.nodes),
    })
}

#[cfg(test)]
mod tests {
    use paceline_model::ModelFamily;
    use paceline_plan::catalogue::short_cluster;

    use super::*;

    fn rows_of(cluster: &str) -> Vec<FitRow> {
        let catalogue = Catalogue::builtin().unwrap();
        let calibration = Calibration::builtin().unwrap();
        let cluster = short_cluster(cluster, &catalogue).unwrap();
        rows(&cluster, &catalogue, &calibration).unwrap()
    }

    #[test]
    fn every_name_has_a_shape_in_the_planners_catalogue() {
        let catalogue = Catalogue::builtin().unwrap();
        let all = candidates(&catalogue).unwrap();
        let without = ["nomic-embed-text"]; // makes vectors, not text
        assert_eq!(
            all.len() + without.len(),
            usual_names().len() + Names::BUILTIN.iter().count()
        );
        // Files of exactly known size.
        let smollm2 = all.iter().find(|c| c.name == "smollm2").unwrap();
        assert!((smollm2.shape.weight_bytes() / 98_362_432.0 - 1.0).abs() < 0.01);
    }

    #[test]
    fn only_models_of_no_family_are_called_uncomputed() {
        let uncomputed = usual_names()
            .iter()
            .filter_map(|usual| usual.uncomputed.as_deref());
        for architecture in uncomputed {
            assert!(
                ModelFamily::ALL
                    .iter()
                    .all(|family| family.name() != architecture),
                "{architecture}"
            );
        }
    }

    #[test]
    fn the_table_is_by_use_within_eighty_columns_and_recommends() {
        let of = |cluster: &str| {
            let catalogue = Catalogue::builtin().unwrap();
            let named = short_cluster(cluster, &catalogue).unwrap();
            text(&named, &rows_of(cluster))
        };
        let studio = of("mac-studio-m3-ultra-512");
        assert!(
            studio.lines().all(|line| line.chars().count() <= 80),
            "{studio}"
        );
        for start in ["\nfor chat: qwen", "\nfor coding: qwen"] {
            assert!(studio.contains(start), "{studio}");
        }
        let uses: Vec<&str> = studio
            .lines()
            .filter_map(|line| {
                USES.iter()
                    .find(|of| line[20.min(line.len())..].starts_with(&format!(" {of} ")))
            })
            .copied()
            .collect();
        assert!(
            uses.is_sorted_by_key(|of| USES.iter().position(|it| it == of)),
            "{uses:?}"
        );
        assert!(uses.len() > 40, "{studio}");
    }

    #[test]
    fn larger_clusters_fit_larger_models() {
        let fitting = |cluster: &str| -> Vec<String> {
            let rows = rows_of(cluster).into_iter().filter(|row| row.fit.is_some());
            rows.map(|row| row.candidate.name).collect()
        };
        let small = fitting("raspberry-pi-5-8");
        let large = fitting("2 x mac-studio-m3-ultra-512 @ tb5-rdma");
        assert!(small.iter().any(|name| name == "qwen3:4b"), "{small:?}");
        assert!(!small.iter().any(|name| name == "qwen3:32b"), "{small:?}");
        assert!(large.iter().any(|name| name == "qwen3:235b"), "{large:?}");
        assert!(small.iter().all(|name| large.contains(name)));
    }
}
