//! Estimates the gain of a draft length from measured times. Pure.

use crate::chain::{Pipeline, ProposerStats};
use crate::ngram::{Costs, DraftCandidate, DraftLimits, depths};

/// Measured times of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct GainEstimate<'a> {
    /// Seconds of a step without drafts, above 0.
    pub(super) plain: f64,
    /// Seconds of a draft pass.
    pub(super) pass: f64,
    /// Whether a pass proposes a block for each sequence instead of a token.
    pub(super) is_block: bool,
    pub(super) bounds: DraftLimits,
    /// Times of verifying steps.
    pub(super) costs: &'a Costs,
    /// If speculation windows of a sequence may overlap.
    pub(super) pipeline: Option<Pipeline<'a>>,
}

impl GainEstimate<'_> {
    /// The largest speed-up and the draft length of each sequence; 1 and zeros if none gains.
    pub(super) fn best(&self, each: &[DraftCandidate]) -> (f64, Vec<usize>) {
        let pass = self.pass / self.plain;
        let time = |deepest: usize| match self.is_block {
            true => pass,
            false => pass * deepest as f64,
        };
        let best = depths(each, self.bounds, self.costs, time);
        let (&[only], Some(pipeline)) = (each, self.pipeline) else {
            return best;
        };
        let shape = pipeline.best(ProposerStats {
            acceptance: only.acceptance,
            pass: self.pass,
        });
        let is_better = only.guesses > 0 && shape.windows > 1 && shape.gain > best.0;
        match is_better {
            true => (shape.gain, vec![only.guesses.min(shape.rows - 1)]),
            false => best,
        }
    }

    /// Additional seconds of a step with one draft token.
    pub(super) fn trial(&self) -> f64 {
        let decoding = self.bounds.decoding;
        let longer = self.costs.relative(decoding, decoding + 1) - 1.0;
        self.pass + self.plain * longer.max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(costs: &Costs, pass: f64, acceptance: f64, room: usize) -> (f64, usize) {
        best_of(costs, (pass, false), acceptance, room)
    }

    fn best_of(
        costs: &Costs,
        (pass, is_block): (f64, bool),
        acceptance: f64,
        room: usize,
    ) -> (f64, usize) {
        let bounds = DraftLimits {
            decoding: 1,
            most: 8,
            rows: 32,
        };
        let plain = costs.seconds(1).unwrap();
        let outlook = GainEstimate {
            plain,
            pass,
            is_block,
            bounds,
            costs,
            pipeline: None,
        };
        let guesses = room;
        let (gain, depths) = outlook.best(&[DraftCandidate {
            acceptance,
            guesses,
        }]);
        (gain, depths[0])
    }

    #[test]
    fn slow_links_want_deep_drafts_and_dear_rows_none() {
        let slow_links = Costs::of(&[(1, 0.1), (9, 0.11)]);
        let (gain, depth) = best(&slow_links, 0.002, 0.8, 16);
        assert!(gain > 3.0 && depth == 8, "{gain} {depth}");
        let (gain, depth) = best(&slow_links, 0.002, 0.4, 16);
        assert!((1.3..2.0).contains(&gain) && depth < 8, "{gain} {depth}");
        // A fast model, with rows as expensive as steps: no gain.
        let dear = Costs::of(&[(1, 0.01), (9, 0.09)]);
        assert_eq!(best(&dear, 0.0025, 0.8, 16), (1.0, 0));
        assert_eq!(best(&slow_links, 0.002, 0.0, 16), (1.0, 0));
        // A draft model as slow as its model.
        assert_eq!(best(&slow_links, 0.1, 0.7, 16), (1.0, 0));
        // A block takes one such pass, however long it is.
        let (gain, depth) = best_of(&slow_links, (0.1, true), 0.7, 16);
        assert!((1.3..1.6).contains(&gain) && depth == 8, "{gain} {depth}");
        assert_eq!(best(&slow_links, 0.002, 0.9, 3).1, 3, "no room for more");
    }
}
