//! Stored measurements and corrections, in `measured.json` of paceline's home.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use paceline_comm::Backend;
use serde::{Deserialize, Serialize};

use super::Setting;
use super::probe::StepMeasurements;
use super::ranks::{GroupCost, LinkCost};

/// Raised when the measurements or the kernels' speed change, so that older figures are replaced.
/// Version 5: SmolLM2 decodes 1.4 times as fast as predicted by 4. Version 6: few rows. Version 7:
/// experts, and the model's own steps.
const VERSION: u32 = 7;

/// Most entries of each kind; more would indicate keys that should not be stored.
const MOST: usize = 1024;

/// Relative error of the uncorrected prediction above which a run marks the measurements as
/// doubted. The project's acceptance bars allow the same error. The host may have been slower
/// during the measurement, or be slower now.
const DOUBT: f64 = 0.2;

/// Weight of a new ratio in the stored one: half, so that one disturbed run does not decide.
const WEIGHT: f64 = 0.5;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct FactsFile {
    version: u32,
    /// By backend.
    wire: BTreeMap<String, LinkCost>,
    /// By model, number of ranks and backend.
    together: BTreeMap<String, GroupCost>,
    measured: BTreeMap<String, StepMeasurements>,
    /// Models whose measurements a run contradicted.
    doubted: BTreeSet<String>,
    /// Ratio of measured to predicted speed, by run.
    ratio: BTreeMap<String, f64>,
    /// Predicted speed with few keys that the ratio corrects, by run on this machine alone.
    #[serde(default)]
    base: BTreeMap<String, f64>,
    /// Decode tokens a second as last measured, by run.
    last: BTreeMap<String, f64>,
    /// Seconds until all nodes were ready, by run.
    load: BTreeMap<String, f64>,
    /// Bytes a second of the disk with the models.
    #[serde(default)]
    disk: Option<f64>,
    /// Reuse of experts in memory ([`paceline_plan::EXPERT_REUSE`]), by model.
    #[serde(default)]
    reuse: BTreeMap<String, f64>,
}

/// The content of the file, and its path.
#[derive(Clone, Debug)]
pub(super) struct FactsStore {
    path: PathBuf,
    file: FactsFile,
    changed: bool,
}

pub(super) fn key(setting: Setting<'_>) -> String {
    format!(
        "{} bytes, {} layers, {}, {} threads",
        setting.source.file_bytes().0,
        setting.config.layers.len(),
        setting.class,
        setting.threads
    )
}

impl FactsStore {
    /// Loads the measurements under `home`; empty if the file is missing or invalid.
    pub(super) fn load(home: &Path) -> Self {
        let path = home.join("measured.json");
        let text = std::fs::read(&path).unwrap_or_default();
        let file = serde_json::from_slice(&text).ok();
        let file = file.filter(|file: &FactsFile| file.version == VERSION && file.sound());
        Self {
            path,
            file: file.unwrap_or(FactsFile {
                version: VERSION,
                ..FactsFile::default()
            }),
            changed: false,
        }
    }

    /// An empty store that is never saved.
    pub(super) fn nowhere() -> Self {
        Self {
            path: PathBuf::new(),
            file: FactsFile::default(),
            changed: false,
        }
    }

    pub(super) fn measured(&self, key: &str) -> Option<StepMeasurements> {
        self.file.measured.get(key).copied()
    }

    pub(super) fn set_measured(&mut self, key: &str, measured: StepMeasurements) {
        self.changed |= keep(&mut self.file.measured, key, measured);
    }

    /// Drops the doubted measurements of a model; returns the seconds of its products.
    pub(super) fn forget(&mut self, key: &str) -> Option<f64> {
        if !self.file.doubted.remove(key) {
            return None;
        }
        self.changed = true;
        self.file.wire.clear();
        self.file.together.retain(|name, _| !name.starts_with(key));
        Some(self.file.measured.remove(key)?.products)
    }

    /// Divides a model's stored ratios over machines by `predictions`, the factor by which its
    /// predictions rose. Those of this machine alone have their own base.
    pub(super) fn rescale(&mut self, key: &str, predictions: f64) {
        let FactsFile { ratio, base, .. } = &mut self.file;
        let own = ratio.iter_mut().filter(|(name, _)| name.starts_with(key));
        for (_, ratio) in own.filter(|(name, _)| !base.contains_key(*name)) {
            *ratio /= predictions;
        }
    }

    pub(super) fn wire(&self, backend: Backend) -> Option<LinkCost> {
        self.file.wire.get(backend.name()).copied()
    }

    pub(super) fn set_wire(&mut self, backend: Backend, wire: LinkCost) {
        self.file.wire.insert(backend.name().to_owned(), wire);
        self.changed = true;
    }

    pub(super) fn together(&self, key: &str) -> Option<GroupCost> {
        self.file.together.get(key).copied()
    }

    pub(super) fn set_together(&mut self, key: &str, together: GroupCost) {
        self.changed |= keep(&mut self.file.together, key, together);
    }

    pub(super) fn ratio(&self, key: &str) -> Option<f64> {
        self.file.ratio.get(key).copied()
    }

    /// The ratio for a run whose predicted speed with few keys is `base` now. Later measurements of
    /// the machine, perhaps under load, leave the corrected speed as it was.
    pub(super) fn ratio_to(&self, key: &str, base: f64) -> Option<f64> {
        let before = self.file.base.get(key).copied().unwrap_or(base);
        Some(self.ratio(key)? * before / base)
    }

    /// The last measured speed.
    pub(super) fn last(&self, key: &str) -> Option<f64> {
        self.file.last.get(key).copied()
    }

    pub(super) fn load_s(&self, key: &str) -> Option<f64> {
        self.file.load.get(key).copied()
    }

    pub(super) fn set_load(&mut self, key: &str, seconds: f64) {
        self.changed |= keep(&mut self.file.load, key, seconds);
    }

    pub(super) const fn disk(&self) -> Option<f64> {
        self.file.disk
    }

    pub(super) const fn set_disk(&mut self, bytes_s: f64) {
        (self.file.disk, self.changed) = (Some(bytes_s), true);
    }

    pub(super) fn reuse(&self, model: &str) -> Option<f64> {
        self.file.reuse.get(model).copied()
    }

    /// Moves a model's reuse of experts towards that of a run; returns what is stored.
    pub(super) fn learn_reuse(&mut self, model: &str, reuse: f64) -> f64 {
        let kept = self.reuse(model).unwrap_or(reuse);
        let next = kept.powf(1.0 - WEIGHT) * reuse.powf(WEIGHT);
        self.changed |= keep(&mut self.file.reuse, model, next);
        next
    }

    /// Stores a run's speed and moves the ratio towards that run. `model` is the part of `key` that
    /// names the model and its setting. `base` is the predicted speed with few keys.
    pub(super) fn learn(
        &mut self,
        (model, key): (&str, &str),
        measured: f64,
        (predicted, base): (f64, f64),
    ) {
        let ratio = measured / predicted;
        if ratio.ln().abs() > DOUBT.ln_1p() && self.file.doubted.len() < MOST {
            self.file.doubted.insert(model.to_owned());
        }
        if let Some(kept) = self.ratio_to(key, base) {
            self.file.ratio.insert(key.to_owned(), kept);
        }
        self.correct(key, measured, predicted);
        if self.file.ratio.contains_key(key) {
            self.file.base.insert(key.to_owned(), base);
        }
    }

    /// As [`learn`](Self::learn), without a doubt of this machine's measurements.
    pub(super) fn correct(&mut self, key: &str, measured: f64, predicted: f64) {
        let ratio = measured / predicted;
        let kept = self.ratio(key).unwrap_or(ratio);
        let next = kept.powf(1.0 - WEIGHT) * ratio.powf(WEIGHT);
        if keep(&mut self.file.ratio, key, next.clamp(0.01, 100.0)) {
            self.changed |= keep(&mut self.file.last, key, measured);
        }
    }

    /// Writes the file if something changed. Ignores a home that cannot be written: the next run
    /// measures again.
    pub(super) fn save(&mut self) {
        if !std::mem::take(&mut self.changed) || self.path.as_os_str().is_empty() {
            return;
        }
        let Ok(text) = serde_json::to_vec_pretty(&self.file) else {
            return;
        };
        let Some(folder) = self.path.parent() else {
            return;
        };
        let part = self
            .path
            .with_extension(format!("{}.part", std::process::id()));
        let _ = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&part, text))
            .and_then(|()| std::fs::rename(&part, &self.path));
    }
}

/// Inserts an entry unless it is new and there are [`MOST`]. Says whether it did.
fn keep<T>(entries: &mut BTreeMap<String, T>, key: &str, value: T) -> bool {
    let has_room = entries.len() < MOST || entries.contains_key(key);
    if has_room {
        entries.insert(key.to_owned(), value);
    }
    has_room
}

impl FactsFile {
    /// Whether all numbers are possible measurements.
    fn sound(&self) -> bool {
        let (measured, ranks) = (|| self.measured.values(), || self.together.values());
        let parts = measured().flat_map(|m| {
            let rows = [m.few_row, m.prompt_row, m.few_expert, m.prompt_expert];
            rows.into_iter()
                .chain([m.other, m.key, m.head, m.step, m.experts])
        });
        let mut times = parts
            .chain(ranks().flat_map(|t| [t.synced, t.head, t.turns, t.hop]))
            .chain(self.wire.values().map(|wire| wire.wake))
            .chain(self.load.values().chain(self.last.values()).copied());
        let factors = [&self.ratio, &self.base, &self.reuse].into_iter();
        let mut positive = factors
            .flat_map(BTreeMap::values)
            .copied()
            .chain(self.disk)
            .chain(measured().map(|m| m.products))
            .chain(ranks().map(|t| t.free))
            .chain(self.wire.values().map(|wire| wire.bytes_per_s));
        times.all(|x| x.is_finite() && x >= 0.0) && positive.all(|x| x.is_finite() && x > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_learned_is_kept_and_damage_is_forgotten() {
        let home = tempfile::tempdir().unwrap();
        let mut facts = FactsStore::load(home.path());
        facts.learn(("a", "a"), 5.0, (10.0, 10.0));
        facts.learn(("a", "a"), 5.0, (10.0, 10.0));
        facts.set_load("a", 2.0);
        facts.save();
        let again = FactsStore::load(home.path());
        assert!((again.ratio("a").unwrap() - 0.5).abs() < 1e-12);
        assert_eq!((again.last("a"), again.load_s("a")), (Some(5.0), Some(2.0)));
        let damaged = |ratio: f64, last: f64| {
            let entry = |value| BTreeMap::from([("a".to_owned(), value)]);
            let file = FactsFile {
                version: VERSION,
                ratio: entry(ratio),
                last: entry(last),
                ..FactsFile::default()
            };
            serde_json::to_string(&file).unwrap()
        };
        let (negative, absurd) = (damaged(-1.0, 5.0), damaged(1.0, -5.0));
        for text in ["", "{", &negative, &absurd, "{\"version\": 2}"] {
            std::fs::write(home.path().join("measured.json"), text).unwrap();
            assert_eq!(FactsStore::load(home.path()).ratio("a"), None, "{text}");
        }
    }

    #[test]
    fn facts_that_a_run_contradicts_are_measured_again() {
        let known = StepMeasurements {
            products: 2.0,
            other: 1.0,
            key: 1.0,
            head: 1.0,
            step: 1.0,
            few_row: 1.0,
            prompt_row: 1.0,
            experts: 0.0,
            few_expert: 0.0,
            prompt_expert: 0.0,
        };
        let mut facts = FactsStore::nowhere();
        facts.set_measured("a", known);
        facts.learn(("a", "a, 2 nodes"), 11.0, (10.0, 10.0));
        assert_eq!(facts.forget("a"), None, "10 % is no contradiction");
        facts.learn(("a", "a, 2 nodes"), 5.0, (10.0, 10.0));
        facts.correct("a, over b", 5.0, 10.0);
        assert_eq!(facts.forget("a"), Some(2.0));
        assert_eq!(facts.measured("a"), None);
        assert_eq!(facts.forget("a"), None, "once");
        // Measurements of twice the speed: the stored correction still gives the same tokens a
        // second.
        facts.rescale("a", 2.0);
        assert!((facts.ratio("a, over b").unwrap() / 0.25 - 1.0).abs() < 1e-12);
    }

    #[test]
    fn measurements_under_load_leave_the_corrected_speed() {
        let mut facts = FactsStore::nowhere();
        facts.learn(("a", "a, 1 nodes"), 220.0, (200.0, 200.0));
        let speed = |facts: &FactsStore, base| facts.ratio_to("a, 1 nodes", base).unwrap() * base;
        // The products took twice as long, all else fourteen times.
        facts.rescale("a", 0.5);
        assert!((speed(&facts, 14.0) - 220.0).abs() < 1e-9);
        facts.learn(("a", "a, 1 nodes"), 220.0, (14.0, 14.0));
        assert!((speed(&facts, 14.0) - 220.0).abs() < 1e-9);
    }
}
