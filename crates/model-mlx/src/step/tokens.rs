//! The tokens that the ranks of a tensor split choose together. Each rank then computes the next
//! step before the leader's caller has read them.
//!
//! ```text
//! greedy rows    each rank's largest logits --> all ranks                       one exchange
//! drawn rows     logits --> leader, whose device draws --> tokens --> all ranks     two
//! ```
//!
//! A single device draws, since devices may round sums otherwise. A rank sends whether it
//! [needs no page](super::Cache::is_in_lanes) for the next step with its part.

use paceline_mlx::Array;
use paceline_model::{Error, Links, Logits};

use super::results::RankStep;
use super::{Step, StepLogits, rows_after};

/// Stands for a token that only the leader's caller can choose.
const UNCHOSEN: u32 = u32::MAX;

/// How a step's tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChosenBy {
    Ranks,
    Leader,
}

impl Step<'_> {
    /// `None` where rows need the leader's caller, and none is drawn.
    pub(super) fn chosen_by(&self) -> Option<ChosenBy> {
        if !self.parts.model.shares_steps() {
            return None;
        }
        let all: Vec<Logits> = self.batch.sequences.iter().map(|s| s.logits).collect();
        let is_drawn = |logits: &Logits| matches!(logits, Logits::Drawn(_));
        match all.iter().any(is_drawn) {
            true => Some(ChosenBy::Leader),
            false => all.iter().all(is_chosen).then_some(ChosenBy::Ranks),
        }
    }

    /// Brings the largest logit of each row to all ranks, which have `own (R, n)` of the vocabulary
    /// each. Sets the tokens, and at the leader the logits, with NaN elsewhere. No tokens where a
    /// row has logits that are no numbers.
    pub(super) fn gather_largest(
        &mut self,
        (own, captured): (&Array, Option<&Array>),
        done: &mut RankStep,
    ) -> Result<(), Error> {
        let model = self.parts.model;
        let own = StepLogits::new(self.parts.stream, own.clone(), &self.batch.requests())?;
        let own = own.with_captured(captured.cloned());
        self.evaluate(&own)?;
        own.read_captured(&mut done.captured)?;
        let own = own.largest()?.expect("ranks with enough of the vocabulary");
        model.counters.logit_bytes.add(8 * own.len() as u64);
        let first = model.shard.vocab().start as u32;
        let row = |(place, logit): (u32, f32)| [first + place, logit.to_bits()];
        let words: Vec<u32> = own.into_iter().flat_map(row).collect();
        let ranks = model.shard.vocab_by_rank().len();
        let parts = self.exchange_words(&words, &vec![words.len(); ranks], done)?;
        let Some(largest) = largest_of_ranks(&parts) else {
            return Ok(());
        };
        if model.shard.leads() {
            let vocab = model.config.vocab;
            done.logits.clear();
            done.logits.resize(largest.len() * vocab, f32::NAN);
            let rows = done.logits.chunks_exact_mut(vocab).zip(&largest);
            for (row, (token, logit)) in rows {
                // A token beyond is of a rank with another model; the next plan is refused.
                let own = row.get_mut(*token as usize);
                own.into_iter().for_each(|own| *own = *logit);
            }
        }
        done.tokens = Some(largest.into_iter().map(|(token, _)| token).collect());
        Ok(())
    }

    /// Has the leader's device draw tokens from the gathered logits. All other logits are NaN then.
    /// Sets the tokens of all ranks. There are none where the leader's caller needs a row, or where
    /// a row has no largest number.
    pub(super) fn draw(&self, done: &mut RankStep) -> Result<(), Error> {
        let (model, n) = (self.parts.model, self.batch.logit_rows());
        let leads = model.shard.leads();
        let tokens = match leads {
            true => self.drawn(&mut done.logits)?,
            false => Vec::new(),
        };
        if !self.batch.sequences.iter().all(|s| is_chosen(&s.logits)) {
            return Ok(());
        }
        let of_rank = |rank| if rank == 0 { n } else { 0 };
        let ranks = model.shard.vocab_by_rank().len();
        let counts: Vec<usize> = (0..ranks).map(of_rank).collect();
        let parts = self.exchange_words(&tokens, &counts, done)?;
        let tokens = parts.into_iter().next().unwrap_or_default();
        done.tokens = Some(tokens).filter(|tokens| !tokens.contains(&UNCHOSEN));
        Ok(())
    }

    /// The tokens of `logits (R, V)`, in which logits that other ranks kept are NaN. Those of other
    /// tokens are NaN then. No tokens where a row is not drawn.
    fn drawn(&self, logits: &mut Vec<f32>) -> Result<Vec<u32>, Error> {
        let (stream, rows) = (self.parts.stream, self.batch.logit_rows());
        let missing = logits.iter_mut().filter(|logit| logit.is_nan());
        missing.for_each(|logit| *logit = f32::NEG_INFINITY);
        let shape = [rows as i32, self.parts.model.config.vocab as i32];
        let all = stream.array_f32(logits, &shape)?;
        let own = StepLogits::new(stream, all, &self.batch.requests())?;
        let watch = self.parts.watch;
        watch.during_part(rows, || stream.eval(own.arrays()))?;
        let bytes = own.read(stream, logits)?;
        self.parts.model.counters.logit_bytes.add(bytes);
        let rows = logits.chunks_exact(shape[1] as usize);
        let chosen = own.host_tokens()?.into_iter().zip(rows);
        let chosen = chosen.map(|(token, row)| {
            let is_alone = row.iter().filter(|logit| !logit.is_nan()).count() == 1;
            if is_alone { token } else { UNCHOSEN }
        });
        Ok(chosen.collect())
    }

    /// Brings the words of each rank of the stage to all of them, `counts` of each. Sets whether
    /// the next step [may begin pages](RankStep::may_begin).
    fn exchange_words(
        &self,
        own: &[u32],
        counts: &[usize],
        done: &mut RankStep,
    ) -> Result<Vec<Vec<u32>>, Error> {
        let may_begin = self.parts.cache.is_in_lanes(&rows_after(self.batch));
        let words = own.iter().copied().chain([u32::from(may_begin)]);
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        let counts: Vec<usize> = counts.iter().map(|words| 4 * (words + 1)).collect();
        let mut all = vec![0; counts.iter().sum()];
        let links = self.parts.model.links.as_deref();
        let links: &Links = links.expect("a rank with a part of the vocabulary has links");
        links.gather_parts(&bytes, &mut all, &counts)?;
        let mut words = all
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_le_bytes(*word));
        let parts = counts.iter().map(|n| words.by_ref().take(n / 4).collect());
        let mut parts: Vec<Vec<u32>> = parts.collect();
        let flags: Vec<_> = parts.iter_mut().map(Vec::pop).collect();
        done.may_begin = flags.iter().all(|flag| *flag == Some(1));
        Ok(parts)
    }
}

/// Whether ranks can choose the token behind a row.
const fn is_chosen(logits: &Logits) -> bool {
    matches!(logits, Logits::Best | Logits::None | Logits::Drawn(_))
}

/// The token with the largest logit of each row, the first among equals, and that logit. Of each
/// rank, `parts` are the token and the logit of each row, of its part of the vocabulary. `None` for
/// logits that are no numbers.
fn largest_of_ranks(parts: &[Vec<u32>]) -> Option<Vec<(u32, f32)>> {
    let pairs = |part: &[u32]| {
        let pairs = part.as_chunks::<2>().0.iter();
        let pairs = pairs.map(|[token, logit]| (*token, f32::from_bits(*logit)));
        pairs.collect::<Vec<_>>()
    };
    let (first, others) = parts.split_first()?;
    let mut largest = pairs(first);
    let mut is_finite = largest.iter().all(|(_, logit)| logit.is_finite());
    for part in others {
        for (largest, other) in largest.iter_mut().zip(pairs(part)) {
            is_finite &= other.1.is_finite();
            if other.1 > largest.1 {
                *largest = other;
            }
        }
    }
    is_finite.then_some(largest)
}
