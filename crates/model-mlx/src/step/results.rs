//! The end of a step: logits, tokens that ranks exchange, or the residual for the next stage.

use paceline_mlx::{Array, Dtype};
use paceline_model::backend::LogitExtent;
use paceline_model::{Error, Links, Logits};

use super::tokens::ChosenBy;
use super::{Step, StepLogits, Way};

/// Results of a rank's step.
#[derive(Debug, Default)]
pub(crate) struct RankStep {
    /// Rows of logits; at the leader.
    pub(crate) rows: usize,
    /// `(R, V)`; at the leader.
    pub(crate) logits: Vec<f32>,
    /// `(T, captures, C)`; at the leader.
    pub(crate) captured: Vec<f32>,
    /// The tokens of a step that chooses them, which all ranks of a tensor split have.
    pub(crate) tokens: Option<Vec<u32>>,
    /// Whether each of these ranks computes the next step without pages.
    pub(crate) may_begin: bool,
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
        let captured = self.captured_rows()?;
        let of = |all| {
            let logits = StepLogits::new(self.parts.stream, all, &self.batch.requests())?;
            Ok(logits.with_captured(captured))
        };
        self.head_rows()?.map(of).transpose()
    }

    /// `(T, captures C)` in f32; at the leader of a model that captures rows.
    fn captured_rows(&self) -> Result<Option<Array>, Error> {
        let parts: Vec<&Array> = self.captured().iter().collect();
        if parts.is_empty() || !self.parts.model.shard.leads() {
            return Ok(None);
        }
        let stream = self.parts.stream;
        Ok(Some(stream.rows_f32(&stream.concatenate(&parts, 1)?)?))
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
        let normed = if n == all {
            self.head_input((&self.residual, None), norm)?
        } else {
            let wanted: Vec<u32> = wanted.iter().map(|row| *row as u32).collect();
            let wanted = self.parts.stream.array_u32(&wanted, &[n as i32])?;
            let rows = self.parts.stream.take(&self.residual, &wanted, 0)?;
            self.head_input((&rows, Some(&wanted)), norm)?
        };
        self.capped(self.product(head, &normed)?).map(Some)
    }

    /// Ends a step without [`logits`](Self::logits), with the memory of `done`. Sends the residual
    /// stream (T, C) and captured rows to the next stage. Ranks of the last stage gather logits
    /// (R, V) instead.
    pub(crate) fn finish(&mut self, mut done: RankStep) -> Result<RankStep, Error> {
        (done.rows, done.tokens, done.may_begin) = (0, None, false);
        if self.parts.weights.head.is_none() {
            return self.send_residual().map(|()| done);
        }
        let captured = self.captured_rows()?;
        let Some(own) = self.head_rows()? else {
            // Alone, only keys and values are of use. Others may still read what ranks exchanged.
            let residual = self.residual.clone();
            let links = self.parts.model.links.as_ref();
            let all = links.map(|_| &residual).into_iter().chain(&captured);
            self.eval(&all.collect::<Vec<_>>())?;
            done.captured.clear();
            if let Some(captured) = &captured {
                done.captured.extend_from_slice(captured.as_f32()?);
            }
            return Ok(done);
        };
        let (stream, leads) = (self.parts.stream, self.parts.model.shard.leads());
        done.rows = if leads { self.batch.logit_rows() } else { 0 };
        let chosen_by = self.chosen_by();
        if chosen_by == Some(ChosenBy::Ranks) {
            self.gather_largest((&own, captured.as_ref()), &mut done)?;
            if done.tokens.is_some() {
                return Ok(done);
            }
        }
        let extents = self.batch.extents();
        let requests: Vec<Logits> = extents.iter().map(|extent| extent.request()).collect();
        let own = StepLogits::new(stream, own, &requests)?.with_captured(captured);
        self.evaluate(&own)?;
        own.read_captured(&mut done.captured)?;
        let mut rows = Vec::new();
        let bytes = own.read(stream, &mut rows)?;
        self.parts.model.counters.logit_bytes.add(bytes);
        self.gather((&rows, &extents), &mut done.logits)?;
        if chosen_by == Some(ChosenBy::Leader) {
            self.draw(&mut done)?;
        }
        Ok(done)
    }

    fn send_residual(&mut self) -> Result<(), Error> {
        let (model, stream) = (self.parts.model, self.parts.stream);
        let all = [&self.residual].into_iter().chain(self.captured());
        let all = all.chain(self.streams.late());
        let all = all.map(|part| stream.rows_f32(&stream.reshape(part, &[1, -1])?));
        let all = all.collect::<Result<Vec<_>, _>>()?;
        let rows = stream.concatenate(&all.iter().collect::<Vec<_>>(), 1)?;
        self.eval(&[&rows])?;
        let links = model.links.as_ref();
        let links = links.expect("an earlier stage has links");
        links.send_residual(&model.shard, rows.as_f32()?)?;
        let way = Way::of_residual(stream, model.dtype)?;
        let bytes = rows.n_bytes() as usize * model.shard.targets().count();
        model.exchanged.add(way, bytes);
        Ok(())
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
    fn gather(
        &self,
        (own, extents): (&[f32], &[LogitExtent]),
        logits: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let (shard, vocab) = (&self.parts.model.shard, self.parts.model.config.vocab);
        let links = self.parts.model.links.as_ref();
        let links = links.expect("a rank with a part of the vocabulary has links");
        let rows = self.batch.logit_rows();
        logits.resize(if shard.leads() { rows * vocab } else { 0 }, 0.0);
        let mut scratch = vec![0.0; Links::logits_room(shard, rows)];
        links.gather_logits(shard, extents, own, logits, &mut scratch)
    }
}
