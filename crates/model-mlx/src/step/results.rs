//! The end of a step: logits, tokens that ranks exchange, or the residual for the next stage.

use paceline_mlx::{Array, Dtype};
use paceline_model::{Batch, Error, Links, Logits};

use super::{Step, StepLogits, Way};

/// Results of a rank's step.
#[derive(Debug, Default)]
pub(crate) struct RankStep {
    /// Rows of logits; at the leader.
    pub(crate) rows: usize,
    /// `(R, V)`; at the leader.
    pub(crate) logits: Vec<f32>,
    /// The tokens of a greedy step, which all ranks of a tensor split have.
    pub(crate) tokens: Option<Vec<u32>>,
}

impl Step<'_> {
    /// Submits `logits` and the cache to the device.
    pub(crate) fn submit(&mut self, logits: &StepLogits) -> Result<(), Error> {
        self.settle()?;
        let cache = self.parts.cache.arrays().into_iter();
        let all = logits.arrays().into_iter().chain(cache);
        let submit = || self.parts.stream.submit(all);
        Ok(self.parts.watch.during_part(self.batch.rows(), submit)?)
    }

    /// Logits of the wanted rows, where this rank has the whole head and there are some. They are
    /// still to be evaluated.
    pub(crate) fn logits(&self) -> Result<Option<StepLogits>, Error> {
        let model = self.parts.model;
        if model.shard.vocab().len() < model.config.vocab {
            return Ok(None);
        }
        let of = |all| StepLogits::new(self.parts.stream, all, &self.batch.requests());
        self.head_rows()?.map(of).transpose()
    }

    /// Evaluates `logits` and the cache.
    pub(crate) fn evaluate(&mut self, logits: &StepLogits) -> Result<(), Error> {
        // The residual too: others may still read what ranks exchanged.
        let residual = self.residual.clone();
        let all = logits.arrays().into_iter().chain([&residual]);
        let all: Vec<&Array> = all.collect();
        self.eval(&all)
    }

    /// Logits `(R, V)` of the wanted rows, of this rank's part of the vocabulary. `None` without
    /// such rows, and at other stages than the last.
    fn head_rows(&self) -> Result<Option<Array>, Error> {
        let Some((norm, head)) = &self.parts.weights.head else {
            return Ok(None);
        };
        let mut wanted = Vec::new();
        self.batch.wanted(&mut wanted);
        let (n, all) = (wanted.len(), self.residual.shape()[0] as usize);
        if n == 0 {
            return Ok(None);
        }
        let rows = if n == all {
            self.residual.clone()
        } else {
            let wanted: Vec<u32> = wanted.iter().map(|row| *row as u32).collect();
            let wanted = self.parts.stream.array_u32(&wanted, &[n as i32])?;
            self.parts.stream.take(&self.residual, &wanted, 0)?
        };
        let normed = self.normed(&rows, norm)?;
        self.capped(self.product(head, &normed)?).map(Some)
    }

    /// Ends a step without [`logits`](Self::logits). Sends the residual stream (T, C) to the next
    /// stage, or gathers logits (R, V) in `rows` with the other ranks of the last stage.
    pub(crate) fn finish(&mut self, rows: Vec<f32>) -> Result<RankStep, Error> {
        let mut done = RankStep {
            logits: rows,
            ..RankStep::default()
        };
        if self.parts.weights.head.is_none() {
            return self.send_residual().map(|()| done);
        }
        // The residual too: others may still read what ranks exchanged.
        let residual = self.residual.clone();
        let Some(own) = self.head_rows()? else {
            // Alone, only keys and values are of use.
            let links = self.parts.model.links.as_ref();
            let all: Vec<&Array> = links.map(|_| &residual).into_iter().collect();
            self.eval(&all)?;
            return Ok(done);
        };
        if self.parts.model.shares_steps() && is_greedy(self.batch) {
            done.tokens = self.gather_largest(&own, &mut done.logits)?;
        }
        if done.tokens.is_none() {
            let own = self.parts.stream.rows_f32(&own)?;
            self.eval(&[&own, &residual])?;
            self.parts.model.counters.logit_bytes.add(own.n_bytes());
            self.gather(own.as_f32()?, &mut done.logits)?;
        }
        let leads = self.parts.model.shard.leads();
        done.rows = if leads { self.batch.logit_rows() } else { 0 };
        Ok(done)
    }

    fn send_residual(&mut self) -> Result<(), Error> {
        let (model, stream) = (self.parts.model, self.parts.stream);
        let rows = stream.rows_f32(&self.residual)?;
        self.eval(&[&rows])?;
        let links = model.links.as_ref();
        let links = links.expect("an earlier stage has links");
        links.send_residual(&model.shard, rows.as_f32()?)?;
        let way = Way::of_residual(stream, model.dtype)?;
        let bytes = rows.n_bytes() as usize * model.shard.targets().count();
        model.exchanged.add(way, bytes);
        Ok(())
    }

    /// Brings the largest logit of each row to all ranks, which have `own (R, n)` of the vocabulary
    /// each. The tokens, and at the leader `logits (R, V)`, with NaN elsewhere. `None` where a row
    /// has logits that are no numbers.
    fn gather_largest(
        &mut self,
        own: &Array,
        logits: &mut Vec<f32>,
    ) -> Result<Option<Vec<u32>>, Error> {
        let model = self.parts.model;
        let own = StepLogits::new(self.parts.stream, own.clone(), &self.batch.requests())?;
        self.evaluate(&own)?;
        let own = own.largest()?.expect("ranks with enough of the vocabulary");
        model.counters.logit_bytes.add(8 * own.len() as u64);
        let links = model.links.as_ref();
        let links = links.expect("a rank with a part of the vocabulary has links");
        let first = model.shard.vocab().start as u32;
        let row = |(place, logit): (u32, f32)| [first + place, logit.to_bits()];
        let words = own.into_iter().flat_map(row);
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        let counts = vec![bytes.len(); links.stage.size() as usize];
        let mut all = vec![0; bytes.len() * counts.len()];
        links.gather_parts(&bytes, &mut all, &counts)?;
        let Some(largest) = largest_of_ranks(&all, bytes.len()) else {
            return Ok(None);
        };
        if model.shard.leads() {
            let vocab = model.config.vocab;
            logits.clear();
            logits.resize(largest.len() * vocab, f32::NAN);
            let rows = logits.chunks_exact_mut(vocab).zip(&largest);
            rows.for_each(|(row, (token, logit))| row[*token as usize] = *logit);
        }
        Ok(Some(largest.into_iter().map(|(token, _)| token).collect()))
    }

    /// `cap * tanh(z / cap)` of logits, where the model has a cap; in f32.
    fn capped(&self, logits: Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let Some(cap) = self.parts.model.config.softcap else {
            return Ok(logits);
        };
        let cap = stream.scalar(cap, Dtype::F32)?;
        let share = stream.divide(&stream.astype(&logits, Dtype::F32)?, &cap)?;
        Ok(stream.multiply(&cap, &stream.tanh(&share)?)?)
    }

    /// Brings the ranks' logits together at the leader.
    fn gather(&self, own: &[f32], logits: &mut Vec<f32>) -> Result<(), Error> {
        let (shard, vocab) = (&self.parts.model.shard, self.parts.model.config.vocab);
        let links = self.parts.model.links.as_ref();
        let links = links.expect("a rank with a part of the vocabulary has links");
        let rows = self.batch.logit_rows();
        logits.resize(if shard.leads() { rows * vocab } else { 0 }, 0.0);
        let mut scratch = vec![0.0; Links::logits_room(shard, rows)];
        links.gather_logits(shard, &self.batch.extents(), own, logits, &mut scratch)
    }
}

/// Whether every sequence asks for its largest logit, or none.
fn is_greedy(batch: &Batch<'_>) -> bool {
    let mut sequences = batch.sequences.iter();
    sequences.all(|s| matches!(s.logits, Logits::Best | Logits::None))
}

/// The token with the largest logit of each row, the first among equals, and that logit. Each rank
/// has `n` bytes of `all`, in rank order. They are the token and the logit of each row, of its part
/// of the vocabulary. `None` for logits that are no numbers.
fn largest_of_ranks(all: &[u8], n: usize) -> Option<Vec<(u32, f32)>> {
    let pair = |bytes: &[u8; 8]| {
        let [token, logit] = [0, 4].map(|at| {
            let word = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
            u32::from_le_bytes(word)
        });
        (token, f32::from_bits(logit))
    };
    let mut ranks = all.chunks_exact(n).map(|part| part.as_chunks::<8>().0);
    let mut largest: Vec<(u32, f32)> = ranks.next()?.iter().map(pair).collect();
    let mut is_finite = largest.iter().all(|(_, logit)| logit.is_finite());
    for part in ranks {
        for (largest, other) in largest.iter_mut().zip(part.iter().map(pair)) {
            is_finite &= other.1.is_finite();
            if other.1 > largest.1 {
                *largest = other;
            }
        }
    }
    is_finite.then_some(largest)
}
