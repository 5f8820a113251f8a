//! Predictions within a limit of memory: the disk's rate, and how often steps choose the same
//! experts.

use std::path::Path;
use std::time::Instant;

use paceline_base::Bytes;
use paceline_model::{Config, Split};

use super::facts::FactsStore;
use super::{Forecast, Result};

/// Facts that reads of weights while steps compute depend on.
#[derive(Clone, Debug)]
pub(super) struct StreamFacts {
    /// Memory of each machine.
    pub(super) memory: Bytes,
    /// Bytes a second that the disk reads.
    pub(super) disk: f64,
    /// Key of the model without a limit of memory.
    pub(super) model: String,
    /// Its reuse of experts ([`paceline_plan::EXPERT_REUSE`]), once an answer showed it.
    pub(super) reuse: Option<f64>,
}

/// Reuse of experts that an answer may show. With 0.05 a twentieth of them in memory has 0.86 of
/// those that are chosen; with 2 it has few.
const REUSE: [f64; 2] = [0.05, 2.0];

/// Measures the disk with the model at `path`, and stores its rate in `home` for
/// [`Forecast::stream`]. Blocks for a tenth of a second on an NVMe disk. Does nothing for a small
/// or unreadable model.
pub fn measure_disk(home: &Path, path: &Path) {
    let began = Instant::now();
    if let Some(read) = paceline_model::read_sample(path) {
        let mut facts = FactsStore::load(home);
        facts.set_disk(read as f64 / began.elapsed().as_secs_f64());
        facts.save();
    }
}

impl Forecast {
    /// Predicts speeds on machines that have `memory` each for the model, and read what does not
    /// fit from disks as fast as this machine's. Nothing changes before that was
    /// [measured](measure_disk). Measured answers correct these predictions alone.
    pub fn stream(&mut self, memory: Bytes) {
        let Some(disk) = self.facts.disk() else {
            return;
        };
        let model = self.key.clone();
        self.key += &format!(", within {}", memory.0);
        self.stream = Some(StreamFacts {
            memory,
            disk,
            reuse: self.facts.reuse(&model),
            model,
        });
    }

    /// Whether the ranks of `split` read experts from disk, and nothing is known of their reuse.
    pub fn lacks_reuse(&self, config: &Config, split: &Split) -> bool {
        let reuse = self.stream.as_ref().map(|own| own.reuse);
        reuse == Some(None) && self.reads_experts(config, split)
    }

    fn reads_experts(&self, config: &Config, split: &Split) -> bool {
        let placement = self.streamed(config, split);
        let placement = placement.filter(|_| self.shape.moe.is_some());
        let stages = placement.iter().flat_map(|it| &it.replicas);
        let mut members = stages.flat_map(|it| &it.stages).flat_map(|it| &it.members);
        members.any(|member| member.streamed > 0)
    }

    /// Basis of predictions where experts are read from disk.
    pub fn reuse_told(&self, config: &Config) -> Option<&'static str> {
        let is_read = self.reads_experts(config, &Split::whole(config));
        let stream = self.stream.as_ref().filter(|_| is_read)?;
        Some(match stream.reuse {
            Some(_) => "experts on disk: reused as in this machine's answers",
            None => {
                "experts on disk: as if all were chosen equally often, until a first load \
                 measures their reuse"
            }
        })
    }

    /// Stores the reuse of experts that a short answer with `keys` in the cache shows. Stores no
    /// other correction, so that the first answer to a user counts in full.
    pub fn rehearsed(&mut self, config: &Config, split: &Split, (keys, tok_s): (u32, f64)) {
        self.learn_reuse(tok_s, |own| own.facts_at(config, split, keys));
        self.facts.save();
    }

    /// Stores the reuse of experts with which `said`, the prediction of a run, is its `measured`
    /// speed. Predictions within other limits of memory then have it too. A run that is faster
    /// than any reuse explains has the most; one that is slower changes nothing.
    pub(super) fn learn_reuse(&mut self, measured: f64, said: impl Fn(&Self) -> Result<f64>) {
        let with = |own: &mut Self, reuse: Option<f64>| {
            own.stream.as_mut()?.reuse = reuse;
            said(own).ok()
        };
        let before = self.stream.as_ref().and_then(|stream| stream.reuse);
        let [mut low, mut high] = REUSE;
        let ends = [low, high].map(|reuse| with(self, Some(reuse)));
        let explains = matches!(ends, [Some(most), Some(least)] if least < measured.min(most));
        for _ in 0..16 {
            let middle = (low * high).sqrt();
            match with(self, Some(middle)).is_some_and(|said| said > measured) {
                true => low = middle,
                false => high = middle,
            }
        }
        let Some(stream) = &mut self.stream else {
            return;
        };
        stream.reuse = match explains {
            true => Some(self.facts.learn_reuse(&stream.model, (low * high).sqrt())),
            false => before,
        };
    }
}
