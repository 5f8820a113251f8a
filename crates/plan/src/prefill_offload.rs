//! Disaggregated prefill: which ranks read a prompt, those that decode or those for prefill.
//!
//! ```text
//! here   |---- read ----| decode          n / here
//! there  |- ahead -|-- read --| decode    (ahead + n) / there + the rest that is read here
//! ```
//!
//! [`PrefillOffload`] has the prefill speed of both, predicted until measured, and chooses the one
//! with the earlier first token. Prefill here also delays the responses that are decoded meanwhile,
//! so a tie goes to the prefill ranks.
//!
//! Pure: times are arguments.

/// Tokens below which a prompt is read here: a KV transfer takes some milliseconds besides, and
/// shared prefixes come in pages of 64.
pub const LEAST: u32 = 256;

/// Weight of a new measurement in the estimate. The first one is the estimate.
const NEW: f64 = 0.3;

/// The interval of probes: each 16th prompt goes to the prefill ranks although prefill here is
/// faster. Without that, a speed that was low while those machines were busy would never be
/// measured again.
const TRY_EVERY: u32 = 16;

/// A speed in tokens a second, as believed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Speed {
    tok_s: Option<f64>,
    is_measured: bool,
}

impl Speed {
    const fn predicted(tok_s: Option<f64>) -> Self {
        Self {
            tok_s,
            is_measured: false,
        }
    }

    fn learn(&mut self, tokens: u32, seconds: f64) {
        let tok_s = f64::from(tokens) / seconds;
        if !(tok_s.is_finite() && tok_s > 0.0) {
            return;
        }
        let believed = self.tok_s.filter(|_| self.is_measured);
        self.tok_s = Some(believed.map_or(tok_s, |old| old + NEW * (tok_s - old)));
        self.is_measured = true;
    }

    fn seconds(self, tokens: u32) -> Option<f64> {
        self.tok_s.map(|tok_s| f64::from(tokens) / tok_s)
    }
}

/// Speeds, as far as known, of the two ways to read a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillOffload {
    here: Speed,
    there: Speed,
    /// Prompts read here since the last offloaded one.
    kept: u32,
    /// Tokens from which on all prompts go there.
    from: Option<u32>,
}

impl PrefillOffload {
    /// Tokens a second of prompts here and there, as predicted; `None` where nothing is known.
    pub const fn predicted(here: Option<f64>, there: Option<f64>) -> Self {
        Self {
            here: Speed::predicted(here),
            there: Speed::predicted(there),
            kept: 0,
            from: None,
        }
    }

    /// Offload prompts of at least `from` uncached tokens, and no others, regardless of measured
    /// speeds. `None` decides by the speeds of both.
    #[must_use]
    pub const fn with_least(self, from: Option<u32>) -> Self {
        Self { from, ..self }
    }

    /// Tokens a second of prompts here, as far as known.
    pub const fn here_tok_s(&self) -> Option<f64> {
        self.here.tok_s
    }

    /// The same at the prefill ranks, KV transfer included.
    pub const fn there_tok_s(&self) -> Option<f64> {
        self.there.tok_s
    }

    /// Records a prefill of `tokens` tokens here.
    pub fn read_here(&mut self, tokens: u32, seconds: f64) {
        self.here.learn(tokens, seconds);
    }

    /// Records a prefill of `tokens` tokens on the prefill ranks, KV transfer included.
    pub fn read_there(&mut self, tokens: u32, seconds: f64) {
        self.there.learn(tokens, seconds);
    }

    /// Seconds until `tokens` of a prompt, read there behind `ahead` tokens of others, are in the
    /// cache here. The figure is a multiple of the seconds that reading them here takes.
    pub fn ratio(&self, tokens: u32, ahead: u32) -> Option<f64> {
        let there = self.there.seconds(tokens.saturating_add(ahead))?;
        Some(there / self.here.seconds(tokens)?)
    }

    /// Whether to offload a prompt of `tokens` uncached tokens, with `ahead` tokens of others
    /// queued at the prefill ranks.
    pub fn is_offloaded(&mut self, tokens: u32, ahead: u32) -> bool {
        if let Some(from) = self.from {
            return tokens >= from;
        }
        if tokens < LEAST {
            return false;
        }
        let pays = self.ratio(tokens, ahead).is_none_or(|ratio| ratio <= 1.0);
        let tries = ahead == 0 && self.kept + 1 >= TRY_EVERY;
        self.kept = if pays || tries { 0 } else { self.kept + 1 };
        pays || tries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_go_where_they_are_read_sooner() {
        let mut readers = PrefillOffload::predicted(Some(100.0), Some(200.0));
        assert!(!readers.is_offloaded(LEAST - 1, 0));
        assert!(readers.is_offloaded(LEAST, 0));
        assert_eq!(readers.ratio(1000, 0), Some(0.5));
        assert!(readers.is_offloaded(1000, 1000), "as soon as here");
        assert!(
            !readers.is_offloaded(1000, 1001),
            "it would wait for too long"
        );
        let mut slow = PrefillOffload::predicted(Some(100.0), Some(50.0));
        assert!(!slow.is_offloaded(1000, 0));
        assert!(
            PrefillOffload::default().is_offloaded(1000, 0),
            "the user named them"
        );
        let mut all = slow.with_least(Some(64));
        assert!(all.is_offloaded(64, 9000) && !all.is_offloaded(63, 0));
    }

    #[test]
    fn what_prompts_took_counts_more_than_predictions() {
        let mut readers = PrefillOffload::predicted(Some(100.0), Some(200.0));
        readers.read_there(1000, 20.0);
        assert_eq!(readers.there_tok_s(), Some(50.0));
        assert!(!readers.is_offloaded(1000, 0));
        readers.read_there(1000, 5.0);
        let tok_s = readers.there_tok_s().unwrap();
        assert!((tok_s - 95.0).abs() < 1e-9, "{tok_s}");
        readers.read_here(1000, f64::NAN);
        readers.read_here(0, 1.0);
        assert_eq!(readers.here_tok_s(), Some(100.0));
    }

    #[test]
    fn a_slow_group_is_tried_again_now_and_then() {
        let mut slow = PrefillOffload::predicted(Some(100.0), Some(50.0));
        let went = (0..64).filter(|_| slow.is_offloaded(1000, 0)).count();
        assert_eq!(went, 4);
        assert!(
            (0..64).all(|_| !slow.is_offloaded(1000, 1)),
            "nobody waits for a try"
        );
    }
}
