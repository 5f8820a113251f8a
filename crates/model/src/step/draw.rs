//! A token that a step draws itself, from the logits of a row.

use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::batch::{Logits, TopLogits};
use crate::candidates::LogitExtent;

/// Most tokens of [`ForbiddenTokens`]. Models have up to seven that end an answer.
const FORBIDDEN_MAX: usize = 8;

/// How a step draws the token behind a row. The result is that of sampling on the host, but for
/// sums that another order of additions rounds otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenDraw {
    /// Divisor of the logits; 0 takes the largest.
    pub temperature: f32,
    /// Keeps this many most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the fewest most probable tokens whose probabilities sum to this.
    pub top_p: f32,
    /// Keeps tokens at least this probable, as a share of the most probable.
    pub min_p: f32,
    /// Seed of the sequence's random numbers.
    pub seed: u64,
    /// Random numbers that the sequence has used.
    pub draws: u64,
    pub forbidden: ForbiddenTokens,
}

/// Tokens that are not drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForbiddenTokens {
    n: usize,
    tokens: [u32; FORBIDDEN_MAX],
}

impl ForbiddenTokens {
    /// `None` for more than [`TokenDraw`] has room for.
    pub fn new(tokens: &[u32]) -> Option<Self> {
        let mut own = Self {
            n: tokens.len(),
            ..Self::default()
        };
        own.tokens.get_mut(..tokens.len())?.copy_from_slice(tokens);
        Some(own)
    }

    /// Ids of the forbidden tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.n]
    }
}

impl TokenDraw {
    /// Words of a draw in a plan.
    pub(crate) const WORDS: usize = 9 + FORBIDDEN_MAX;

    /// The largest logit, the first among equals.
    pub const LARGEST: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        draws: 0,
        forbidden: ForbiddenTokens {
            n: 0,
            tokens: [0; FORBIDDEN_MAX],
        },
    };

    /// The request to a step.
    pub fn request(self) -> Logits {
        match self.scale().is_none() && self.forbidden.n == 0 {
            true => Logits::Best,
            false => Logits::Drawn(self),
        }
    }

    /// The logits of a row that it needs.
    pub fn extent(&self) -> LogitExtent {
        let n = match self.scale() {
            None => 1,
            Some(_) if self.top_k == 0 => return LogitExtent::Whole,
            Some(_) => self.top_k as usize,
        };
        let top = TopLogits::of_draw(n.saturating_add(self.forbidden.n), self.temperature);
        top.map_or(LogitExtent::Whole, LogitExtent::Top)
    }

    /// The factor of logits; `None` where the largest is taken.
    pub fn scale(&self) -> Option<f32> {
        let scale = 1.0 / self.temperature;
        scale.is_finite().then_some(scale)
    }

    /// The draw of the token behind the drawn one.
    pub fn next(self) -> Self {
        let used = u64::from(self.scale().is_some());
        let draws = self.draws.wrapping_add(used);
        Self { draws, ..self }
    }

    /// Its random number: 24 bits in 0..1, the first ones of the number that a host takes.
    pub fn uniform(&self) -> f32 {
        let mut random = Pcg64Mcg::seed_from_u64(self.seed);
        random.advance(self.draws.into());
        (random.next_u64() >> 40) as f32 / (1u32 << 24) as f32
    }

    pub(crate) fn to_words(self) -> [u32; Self::WORDS] {
        let (seed, draws) = (self.seed, self.draws);
        let mut words = [0; Self::WORDS];
        words[..9].copy_from_slice(&[
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            seed as u32,
            (seed >> 32) as u32,
            draws as u32,
            (draws >> 32) as u32,
            self.forbidden.n as u32,
        ]);
        words[9..].copy_from_slice(&self.forbidden.tokens);
        words
    }

    /// Decodes words of a plan; `None` if invalid for `vocab` tokens.
    pub(crate) fn from_words(words: &[u32], vocab: usize) -> Option<Self> {
        let float = |at: usize| Some(f32::from_bits(*words.get(at)?)).filter(|x| *x >= 0.0);
        let long =
            |at: usize| Some(u64::from(*words.get(at)?) | u64::from(*words.get(at + 1)?) << 32);
        let n = *words.get(8)? as usize;
        let forbidden = ForbiddenTokens::new(words.get(9..)?.get(..n)?)?;
        let is_token = |token: &u32| (*token as usize) < vocab;
        forbidden.tokens().iter().all(is_token).then_some(Self {
            temperature: float(0)?,
            top_k: *words.get(1)?,
            top_p: float(2)?,
            min_p: float(3)?,
            seed: long(4)?,
            draws: long(6)?,
            forbidden,
        })
    }
}
