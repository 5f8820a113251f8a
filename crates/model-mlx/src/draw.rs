//! Tokens that the device draws, so that the next step needs no host.
//!
//! ```text
//! logits (R, V) -> weights, 1 for the most probable token -> top-k, top-p, min-p
//!               -> running sums by token -> the first one above the random number of the row
//! ```
//!
//! Random numbers are those of the sequences, drawn ahead by the host
//! ([`TokenDraw::uniform`](paceline_model::TokenDraw)). Only the order of additions differs from
//! sampling on the host.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::{Error, TokenDraw};

/// Drawn tokens, perhaps still being computed.
#[derive(Debug)]
pub(super) struct DrawnTokens {
    /// `(R, 1)`
    pub(super) tokens: Array,
    /// `(R, 2)` in f32: the token's logit, and the largest of the row.
    logits: Array,
}

/// The draws of rows, as arrays.
struct Draws<'a> {
    stream: &'a Stream,
    draws: &'a [TokenDraw],
}

impl DrawnTokens {
    /// Of rows `(R, V)`.
    pub(super) fn new(stream: &Stream, all: &Array, draws: &[TokenDraw]) -> Result<Self, Error> {
        let own = Draws { stream, draws };
        let logits = own.without_forbidden(stream.astype(all, Dtype::F32)?)?;
        let best = stream.argmax(&logits, 1)?;
        let largest = stream.take_along(&logits, &best, 1)?;
        let tokens = match draws.iter().all(|draw| draw.scale().is_none()) {
            true => best,
            false => own.drawn(&own.kept(own.weights(&logits, &largest)?)?)?,
        };
        let chosen = stream.take_along(&logits, &tokens, 1)?;
        let logits = stream.contiguous(&stream.concatenate(&[&chosen, &largest], 1)?)?;
        Ok(Self { tokens, logits })
    }

    pub(super) const fn arrays(&self) -> [&Array; 2] {
        [&self.tokens, &self.logits]
    }

    pub(super) fn n_bytes(&self) -> u64 {
        self.arrays().into_iter().map(Array::n_bytes).sum()
    }

    /// Each row's token and its logit, once they are evaluated. `None` for a row that the host must
    /// see whole: its logits are not all numbers.
    pub(super) fn read(&self) -> Result<Vec<Option<(u32, f32)>>, Error> {
        let (pairs, _) = self.logits.as_f32()?.as_chunks::<2>();
        let each = self.tokens.to_u32()?.into_iter().zip(pairs);
        let row = |(token, [chosen, largest]): (u32, &[f32; 2])| {
            (chosen.is_finite() && largest.is_finite()).then_some((token, *chosen))
        };
        Ok(each.map(row).collect())
    }
}

impl Draws<'_> {
    /// `(R, 1)` in f32.
    fn column(&self, of: impl Fn(&TokenDraw) -> f32) -> Result<Array, Error> {
        let values: Vec<f32> = self.draws.iter().map(of).collect();
        Ok(self.stream.array_f32(&values, &[values.len() as i32, 1])?)
    }

    /// 1 where `a < b` and else 0.
    fn is_less(&self, a: &Array, b: &Array) -> Result<Array, Error> {
        let stream = self.stream;
        Ok(stream.astype(&stream.less(a, b)?, Dtype::F32)?)
    }

    /// `logits (R, V)`, those of forbidden tokens at minus infinity.
    fn without_forbidden(&self, logits: Array) -> Result<Array, Error> {
        let (stream, n) = (self.stream, self.draws.len());
        let most = self.draws.iter().map(|draw| draw.forbidden.tokens().len());
        let most = most.max().unwrap_or(0);
        if most == 0 {
            return Ok(logits);
        }
        // A row with fewer names its first one again; a row without names token 0 and adds nothing.
        let (mut places, mut added) = (Vec::new(), Vec::new());
        for draw in self.draws {
            let tokens = draw.forbidden.tokens();
            let first = tokens.first();
            let place = |i: usize| tokens.get(i).or(first).copied().unwrap_or(0);
            places.extend((0..most).map(place));
            let value = first.map_or(0.0, |_| f32::NEG_INFINITY);
            added.extend(vec![value; most]);
        }
        let shape = [n as i32, most as i32];
        let places = stream.array_u32(&places, &shape)?;
        let added = stream.array_f32(&added, &shape)?;
        let changed = stream.add(&stream.take_along(&logits, &places, 1)?, &added)?;
        Ok(stream.put_along(&logits, &places, &changed, 1)?)
    }

    /// Weights of tokens, `(R, V)`: 1 for the largest logit. Rows that take it have 0 for others.
    fn weights(&self, logits: &Array, largest: &Array) -> Result<Array, Error> {
        let stream = self.stream;
        let scale = self.column(|draw| draw.scale().unwrap_or(f32::MAX))?;
        let apart = stream.subtract(logits, largest)?;
        Ok(stream.exp(&stream.multiply(&apart, &scale)?)?)
    }

    /// Weights, 0 outside of top-k, top-p and min-p.
    fn kept(&self, weights: Array) -> Result<Array, Error> {
        let is_cut = |draw: &TokenDraw| draw.top_k > 0 || draw.top_p < 1.0;
        let weights = match self.draws.iter().any(is_cut) {
            true => self.most_probable(&weights)?,
            false => weights,
        };
        if self.draws.iter().all(|draw| draw.min_p == 0.0) {
            return Ok(weights);
        }
        let below = self.is_less(&weights, &self.column(|draw| draw.min_p)?)?;
        let below = self.stream.multiply(&weights, &below)?;
        Ok(self.stream.subtract(&weights, &below)?)
    }

    /// Weights, 0 outside of top-k and then top-p. Of equal ones the lower token comes first.
    fn most_probable(&self, weights: &Array) -> Result<Array, Error> {
        let (stream, shape) = (self.stream, weights.shape());
        let (rows, vocab) = (shape[0], shape[1]);
        let order = stream.argsort(&stream.negative(weights)?, 1)?;
        let mut sorted = stream.take_along(weights, &order, 1)?;
        if self.draws.iter().any(|draw| draw.top_k > 0) {
            let places: Vec<f32> = (0..vocab).map(|place| place as f32).collect();
            let places = stream.array_f32(&places, &[1, vocab])?;
            let k = |draw: &TokenDraw| match draw.top_k {
                0 => f32::MAX,
                k => k as f32,
            };
            sorted = stream.multiply(&sorted, &self.is_less(&places, &self.column(k)?)?)?;
        }
        if self.draws.iter().any(|draw| draw.top_p < 1.0) {
            let sums = stream.running_sum(&sorted, 1)?;
            let all = stream.slice(&sums, &[0, vocab - 1], &[rows, vocab])?;
            let share = |draw: &TokenDraw| match draw.top_p < 1.0 {
                true => draw.top_p,
                false => f32::MAX,
            };
            let enough = stream.multiply(&all, &self.column(share)?)?;
            let before = stream.subtract(&sums, &sorted)?;
            sorted = stream.multiply(&sorted, &self.is_less(&before, &enough)?)?;
        }
        Ok(stream.put_along(weights, &order, &sorted, 1)?)
    }

    /// The token of each row, `(R, 1)`: the first whose sum of weights up to it is above the random
    /// share of all.
    fn drawn(&self, weights: &Array) -> Result<Array, Error> {
        let stream = self.stream;
        let zero = stream.scalar(0.0, Dtype::F32)?;
        // Tokens without weight are passed over, however a device rounds its sums.
        let sums = stream.running_sum(weights, 1)?;
        let sums = stream.multiply(&sums, &self.is_less(&zero, weights)?)?;
        let all = stream.take_along(&sums, &stream.argmax(&sums, 1)?, 1)?;
        let uniform = |draw: &TokenDraw| draw.scale().map_or(0.0, |_| draw.uniform());
        // Below the sum of all, as the share is below 1 by at least half of an f32's precision.
        let share = stream.multiply(&all, &self.column(uniform)?)?;
        Ok(stream.argmax(&self.is_less(&share, &sums)?, 1)?)
    }
}

#[cfg(test)]
mod tests {
    use paceline_base::SplitMix64;

    use super::*;
    use paceline_model::ForbiddenTokens;

    /// The token by loops, in f64.
    fn expected(row: &[f32], draw: &TokenDraw) -> u32 {
        let is_forbidden = |token: usize| draw.forbidden.tokens().contains(&(token as u32));
        let allowed = |(token, logit): (usize, &f32)| match is_forbidden(token) {
            true => f64::NEG_INFINITY,
            false => f64::from(*logit),
        };
        let logits: Vec<f64> = row.iter().enumerate().map(allowed).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let Some(scale) = draw.scale() else {
            return logits.iter().position(|logit| *logit == largest).unwrap() as u32;
        };
        let mut weights: Vec<f64> = logits
            .iter()
            .map(|logit| ((logit - largest) * f64::from(scale)).exp())
            .collect();
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
        if draw.top_k > 0 {
            let out = order.split_off(row.len().min(draw.top_k as usize));
            out.into_iter().for_each(|token| weights[token] = 0.0);
        }
        let enough = weights.iter().sum::<f64>() * f64::from(draw.top_p);
        let mut before = 0.0;
        for token in order {
            let own = weights[token];
            if draw.top_p < 1.0 && before >= enough || own < f64::from(draw.min_p) {
                weights[token] = 0.0;
            }
            before += own;
        }
        let share = weights.iter().sum::<f64>() * f64::from(draw.uniform());
        let mut sum = 0.0;
        let above = weights.iter().position(|weight| {
            sum += weight;
            sum > share
        });
        above.unwrap() as u32
    }

    /// Rows of one call differ in their parameters; many logits are equal.
    #[test]
    fn the_device_draws_the_tokens_of_loops() {
        const VOCAB: usize = 300;
        const ROWS: usize = 64;
        let Some(stream) = crate::test_stream("draws of mlx") else {
            return;
        };
        let mut random = SplitMix64::new(7);
        let values = ROWS * VOCAB;
        let rows: Vec<f32> = (0..values).map(|_| random.below(60) as f32 / 8.0).collect();
        let any = |i: usize| TokenDraw {
            temperature: [0.0, 0.3, 1.0, 1.7][i % 4],
            top_k: [0, 1, 5, 40, 1000][i % 5],
            top_p: [1.0, 0.9, 0.5][i % 3],
            min_p: [0.0, 0.1][i % 2],
            seed: 11 * i as u64,
            draws: i as u64 % 7,
            forbidden: ForbiddenTokens::new(&[3, 5, i as u32][..i % 4]).unwrap(),
        };
        let plain = |i: usize| TokenDraw {
            temperature: 0.8,
            seed: i as u64,
            ..TokenDraw::LARGEST
        };
        let draws: [Vec<TokenDraw>; 2] =
            [(0..ROWS).map(any).collect(), (0..ROWS).map(plain).collect()];
        for draws in draws {
            let all = stream
                .array_f32(&rows, &[ROWS as i32, VOCAB as i32])
                .unwrap();
            let drawn = DrawnTokens::new(&stream, &all, &draws).unwrap();
            stream.eval(drawn.arrays()).unwrap();
            let got = drawn.read().unwrap();
            let parts = rows.chunks(VOCAB).zip(&draws).zip(got);
            for (i, ((row, draw), got)) in parts.enumerate() {
                let token = expected(row, draw);
                assert_eq!(got, Some((token, row[token as usize])), "row {i}: {draw:?}");
            }
        }
    }

    /// A row without a largest logit goes to the host.
    #[test]
    fn rows_without_numbers_are_not_drawn() {
        let Some(stream) = crate::test_stream("draws of mlx") else {
            return;
        };
        let mut rows = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|of| [of; 8]);
        rows[1][3] = 1.0;
        let all = stream.array_f32(rows.as_flattened(), &[3, 8]).unwrap();
        let draw = TokenDraw {
            temperature: 1.0,
            ..TokenDraw::LARGEST
        };
        let drawn = DrawnTokens::new(&stream, &all, &[draw; 3]).unwrap();
        stream.eval(drawn.arrays()).unwrap();
        assert_eq!(drawn.read().unwrap(), [None; 3]);
    }
}
