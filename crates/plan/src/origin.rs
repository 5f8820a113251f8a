//! The basis of a prediction: published runs with the same engines, and their range around it.
//!
//! An engine that was not measured here has constants fitted on published runs. Those runs also say
//! how good a prediction is: each reached a multiple of what is predicted for it.

use std::collections::BTreeSet;

use crate::calibration::family;
use crate::publications::{BUILTIN, Published, PublishedRow};
use crate::validate::{Scored, validate};
use crate::{Backend, Calibration, Catalogue, Cluster, Error, Placement};

/// Published runs below which a range says nothing. Constants meet the few runs on which they were
/// fitted: all three of `mlx-experts` within 2 %.
const RUNS_MIN: usize = 5;

/// The origin of the decode speed that is predicted for a placement.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictionBasis {
    /// Engines whose constants apply, in order of names.
    pub engines: Vec<String>,
    /// Complete published runs of these engines, of one request each.
    pub runs: usize,
    /// Whether one of these runs used a machine of the placement.
    pub same_machine: bool,
    /// The least multiple of its prediction that a run reached.
    pub low: f64,
    pub high: f64,
}

impl PredictionBasis {
    /// The basis of a prediction for `placement`. `None` where its engines have too few published
    /// runs, such as engines that were measured here.
    ///
    /// # Errors
    /// [`Error::Toml`] when a file in the tree is broken.
    pub fn of(
        cluster: &Cluster,
        placement: &Placement,
        calibration: &Calibration,
    ) -> Result<Option<Self>, Error> {
        let nodes = placement.nodes();
        let nodes = || nodes.iter().map(|node| &cluster.nodes[*node]);
        let engines: BTreeSet<&str> = nodes().map(|node| node.engine.as_str()).collect();
        let machines: BTreeSet<&str> = nodes().map(|node| family(&node.kind)).collect();
        let published = Published::from_toml(BUILTIN, "published.toml")?;
        let catalogue = published.catalogue()?;
        let mut rows = validate(&published, calibration)?.rows;
        rows.retain(|scored| {
            let row = &scored.row;
            let is_decode = row.metric == "decode_tok_s" && row.concurrency == "1";
            let engine = calibration.engine_of(&row.framework, is_of_processors(row, &catalogue));
            row.complete && is_decode && engines.contains(engine.name.as_str())
        });
        let reached: Vec<f64> = rows.iter().filter_map(reached).collect();
        if reached.len() < RUNS_MIN {
            return Ok(None);
        }
        let is_same = |scored: &Scored| {
            let mut kinds = scored.row.hardware.iter();
            kinds.any(|machine| machines.contains(family(&machine.kind)))
        };
        Ok(Some(Self {
            engines: engines.into_iter().map(str::to_owned).collect(),
            runs: reached.len(),
            same_machine: rows.iter().any(is_same),
            low: reached.iter().copied().fold(f64::INFINITY, f64::min),
            high: reached.iter().copied().fold(0.0, f64::max),
        }))
    }

    /// Range of speeds that the runs support, where `tok_s` is predicted.
    pub fn range(&self, tok_s: f64) -> [f64; 2] {
        [self.low * tok_s, self.high * tok_s]
    }

    /// The runs, for people.
    pub fn summary(&self) -> String {
        let machines = match self.same_machine {
            true => "",
            false => ", none on such machines",
        };
        format!(
            "{} published runs of {}{machines}",
            self.runs,
            self.engines.join(", ")
        )
    }
}

/// Published over predicted.
fn reached(scored: &Scored) -> Option<f64> {
    let said = scored.said.as_ref().ok()?;
    Some(scored.row.value / said.value)
}

/// Whether a run's machines are processors, for which engines have constants of their own.
fn is_of_processors(row: &PublishedRow, catalogue: &Catalogue) -> bool {
    let first = row.hardware.first();
    let entry = first.and_then(|machines| catalogue.machine(&machines.kind).ok());
    entry.is_some_and(|entry| entry.backend() == Ok(Backend::Cpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pipeline;
    use crate::catalogue::short_cluster;

    fn origin(cluster: &str) -> Option<PredictionBasis> {
        let cluster = short_cluster(cluster, &Catalogue::builtin().unwrap()).unwrap();
        let placement = Placement::single(Pipeline::even(4, &[0]));
        PredictionBasis::of(&cluster, &placement, &Calibration::builtin().unwrap()).unwrap()
    }

    #[test]
    fn a_mac_rests_on_the_runs_of_exo() {
        let known = origin("1 x mac-studio-m3-ultra-512").unwrap();
        assert_eq!(known.engines, ["exo-1"]);
        assert!(known.same_machine && known.runs >= RUNS_MIN, "{known:?}");
        assert!(known.low < 1.0 && known.high > 1.0, "{known:?}");
        assert!(!known.summary().contains("none"), "{}", known.summary());
        let new = origin("1 x mac-studio-m5-ultra-256").unwrap();
        let same = (new.low, new.high, new.runs);
        assert_eq!(same, (known.low, known.high, known.runs));
        assert!(
            new.summary().ends_with("none on such machines"),
            "{}",
            new.summary()
        );
    }

    #[test]
    fn what_was_measured_here_rests_on_nothing_else() {
        assert_eq!(origin("1 x vm-2core"), None);
    }
}
