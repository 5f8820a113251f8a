//! Sizes and limits of an engine, set by its owner.

use paceline_model::BatchSize;
use paceline_tensor::PAGE;

use serde::{Deserialize, Serialize};

use crate::ngram::DRAFT_ROWS;
use crate::{Error, StepTimeTarget};

/// Sizes of an engine; they determine the memory of its cache and buffers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// Identifies the weights (file hash, or alias): snapshots only fit an engine with the same
    /// value.
    pub model: String,
    /// Maximum tokens of a sequence, prompt and answer; 2 or more.
    pub context: usize,
    /// Positions of the cache, over all sequences; at least `context`.
    pub cache_positions: usize,
    /// Slots: sequences that run at the same time; 1 or more.
    pub max_running: usize,
    /// Maximum queued requests; 1 or more.
    pub max_waiting: usize,
    /// Maximum rows of a step: decode rows, then prompt chunks; at least `max_running`. More rows
    /// speed up prefill and increase the latency of other answers.
    pub max_rows: usize,
    /// Rows of a prompt that the slowest pipeline stage computes in the time of a step's fixed
    /// part. That is: reading weights, launching operations, waiting for the device.
    #[serde(default = "fixed_rows")]
    pub fixed_rows: usize,
    /// Limit of the step time while prompts are computed. Effective only if the owner reports step
    /// times ([`Engine::took`](crate::Engine::took)).
    pub pace: StepTimeTarget,
    /// Maximum draft tokens of a sequence per step; 0 disables drafts. They come from repetition in
    /// the text, or from a draft model ([`Engine::guess_with`](crate::Engine::guess_with)), where
    /// they pay. Answers do not depend on them.
    pub drafts: usize,
    /// Whether an interrupted answer fails if it would otherwise continue with different bits.
    #[serde(default)]
    pub strict: bool,
}

/// Default rows of a step. From 128 rows on, SmolLM2 and Gemma 3 270M prefill within a tenth of
/// full speed (two threads of an EPYC VM, November 2026). The default leaves room for more cores.
/// The buffers of an 8B model are some 300 KB a row.
const DEFAULT_ROWS: usize = 512;

/// Default of [`EngineConfig::fixed_rows`]: processors prefill within a tenth of full speed from
/// 128 rows on (see [`DEFAULT_ROWS`]).
const FIXED_ROWS: usize = 14;

/// Fewest prompt rows of a step of a pipeline, for the same reason. Shorter prompts are computed in
/// one step, so that they have the bits of one machine on engines whose bits depend on rows.
const STAGE_ROWS: usize = 128;

const fn fixed_rows() -> usize {
    FIXED_ROWS
}

/// Logit rows for prompt logprobs if drafts are disabled; otherwise the draft rows serve. Each is a
/// row of logits, 0.2 MB for SmolLM2 and 1 MB for Gemma 3.
const SCORED_ROWS: usize = 7;

/// Divisor of `max_rows` after a step that the device interrupted. Metal's limit is some 5 s and
/// depends on the GPU's other load, so half the rows would often be interrupted again.
const SMALLER: usize = 4;

/// Lower bound of `max_rows` after interruptions, unless more sequences run. Weights are read once
/// for all rows of a step, so fewer rows save hardly any time.
const LEAST_ROWS: usize = 8;

/// Largest accepted number of positions: far more than any machine holds (SmolLM2 would take 90
/// TiB), small enough that no size overflows 64 bits.
const MAX_POSITIONS: usize = 1 << 32;

impl EngineConfig {
    /// For one sequence of at most `context` positions.
    pub fn single(model: impl Into<String>, context: usize) -> Self {
        Self {
            model: model.into(),
            context,
            cache_positions: context,
            max_running: 1,
            max_waiting: 1,
            max_rows: DEFAULT_ROWS,
            fixed_rows: FIXED_ROWS,
            pace: StepTimeTarget::Auto,
            drafts: 0,
            strict: false,
        }
    }

    /// Reduces [`max_rows`](Self::max_rows) to a quarter, after a step that the device interrupted
    /// because it took too long. Returns `false` if steps are minimal already.
    pub fn shrink_rows(&mut self) -> bool {
        let least = self.max_running.max(LEAST_ROWS);
        if self.max_rows <= least {
            return false;
        }
        self.max_rows = (self.max_rows / SMALLER).max(least);
        true
    }

    /// Prompt rows of a step with `stages` stages, for prompts of `prompt` tokens together: fewer
    /// than the most, so that later stages start early.
    ///
    /// With s stages, chunks of c rows, a fixed part of k rows and p tokens, a prompt takes
    /// (p / c + s - 1) * (c + k). The least is at c = sqrt(p * k / (s - 1)). The result is the
    /// nearest power of two: times differ by 6 % at most, and small changes of a measured k change
    /// no chunk.
    pub(crate) fn stage_rows(&self, prompt: usize, stages: usize) -> usize {
        if stages < 2 {
            return self.max_rows;
        }
        let best = (prompt * self.fixed_rows / (stages - 1)).max(1);
        let power = (best as f64).log2() / 2.0;
        let rows = 1_usize << (power.round() as u32).min(usize::BITS / 2);
        rows.max(STAGE_ROWS).min(self.max_rows)
    }

    /// Maximum sequences in the resuming queue; further snapshots are refused.
    pub(crate) const fn max_resuming(&self) -> usize {
        self.max_running.saturating_add(self.max_waiting)
    }

    /// Pages of the cache.
    pub(crate) const fn pages(&self) -> usize {
        self.cache_positions.div_ceil(PAGE)
    }

    /// Maximum sequences of a step: each has a page.
    fn step_sequences(&self) -> usize {
        self.max_running.min(self.pages())
    }

    /// Maximum draft tokens of a step, over all sequences.
    const fn draft_rows(&self) -> usize {
        match self.drafts {
            0 => 0,
            _ => DRAFT_ROWS,
        }
    }

    /// Additional rows of a step with logits, for drafts or prompt logprobs.
    pub(crate) const fn spare_logit_rows(&self) -> usize {
        let drafts = self.draft_rows();
        if drafts > SCORED_ROWS {
            drafts
        } else {
            SCORED_ROWS
        }
    }

    /// Maximum rows of a step: each has a position.
    pub(crate) fn step_rows(&self) -> usize {
        self.max_rows.min(self.pages() * PAGE)
    }

    /// The largest step.
    pub(crate) fn batch_size(&self) -> BatchSize {
        BatchSize {
            rows: self.step_rows(),
            logit_rows: self.step_sequences() + self.spare_logit_rows(),
            sequences: self.step_sequences(),
            context: self.context,
        }
    }

    /// # Errors
    /// [`Error::Config`] for the first invalid size.
    pub(crate) fn check(&self) -> Result<(), Error> {
        check(self.context >= 2, "context", self.context, "2 or more")?;
        let positions = self.cache_positions;
        let fits = positions <= MAX_POSITIONS;
        check(fits, "cache_positions", positions, "at most 2^32")?;
        let fits = self.pages() >= self.context.div_ceil(PAGE);
        check(fits, "cache_positions", positions, "at least the context")?;
        check(self.max_running > 0, "max_running", 0, "1 or more")?;
        check(self.max_waiting > 0, "max_waiting", 0, "1 or more")?;
        let fits = self.max_rows >= self.max_running;
        check(fits, "max_rows", self.max_rows, "at least max_running")
    }
}

fn check(
    fits: bool,
    setting: &'static str,
    got: usize,
    expected: &'static str,
) -> Result<(), Error> {
    if fits {
        return Ok(());
    }
    Err(Error::Config {
        setting,
        got,
        expected,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times in rows: of all possible chunks the chosen one is nearly the best.
    #[test]
    fn chunks_fill_the_stages() {
        for (k, stages) in [4, 14, 40, 200]
            .into_iter()
            .flat_map(|k| [1, 2, 3, 8].map(|n| (k, n)))
        {
            let sizes = EngineConfig {
                fixed_rows: k,
                ..EngineConfig::single("", 8192)
            };
            for prompt in [1_usize, 64, 512, 2000, 8192] {
                let time = |rows: usize| (prompt.div_ceil(rows) + stages - 1) * (rows + k);
                let chosen = sizes.stage_rows(prompt, stages);
                let best = (STAGE_ROWS..=sizes.max_rows).map(time).min().unwrap();
                let ratio = time(chosen) as f64 / best as f64;
                let is_whole = stages == 1 || prompt <= STAGE_ROWS;
                assert!(
                    ratio < 1.15 || is_whole,
                    "{k} {stages} {prompt}: {chosen}, {ratio}"
                );
                assert!(
                    !is_whole || chosen >= prompt.min(sizes.max_rows),
                    "{prompt}: {chosen}"
                );
            }
        }
        let chunk = |prompt| EngineConfig::single("", 8192).stage_rows(prompt, 2);
        assert_eq!([100, 2000, 4000, 8192].map(chunk), [128, 128, 256, 256]);
    }
}
