//! Encoders: a text in, one vector out (BERT and its kin).
//!
//! ```text
//! ids --tables, norm--> x (T, C) --layers--> x (T, C) --pooled, length 1--> (C,)
//!
//! a layer:  x = norm(x + attention(x))      every row sees every row of its own text
//!           x = norm(x + down(bend(up(x))))
//! ```
//!
//! An encoder is small, so one node computes it, in floats, without a cache. Texts share a step of
//! up to [`ROWS`] rows; a row of a product does not depend on the other rows, and attention stays
//! within a text. So a vector depends on its own tokens only: not on the texts beside it, not on
//! threads, not on the instruction set.
//!
//! Sources: Devlin et al. 2018 (BERT), Reimers and Gurevych 2019 (Sentence-BERT),
//! `modeling_bert.py` of transformers.

mod config;
mod forward;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use paceline_base::Bytes;
use paceline_tensor::Kernels;

pub use config::{EncoderConfig, EncoderFamily, Pooling};

use crate::{Error, Source};
use forward::Step;
use weights::Weights;

/// Rows of a step. A text with more has a step of its own.
pub const ROWS: usize = 512;

/// An encoder that was loaded.
#[derive(Debug)]
pub struct Encoder {
    config: EncoderConfig,
    weights: Weights,
    kernels: Arc<Kernels>,
}

impl Encoder {
    /// Loads the encoder of a Hugging Face folder. Cost: one copy of its weights.
    ///
    /// # Errors
    /// A weight or field that is missing or cannot be computed with, by name.
    pub fn load(source: &Source, kernels: Arc<Kernels>) -> Result<Self, Error> {
        let Source::Hf(folder) = source else {
            let architecture = "a GGUF file".to_owned();
            let supported = "a Hugging Face folder of bert or roberta".to_owned();
            return Err(Error::Architecture {
                architecture,
                supported,
            });
        };
        let config = EncoderConfig::read(folder)?;
        let weights = Weights::load(folder, &config, kernels.pool())?;
        Ok(Self {
            config,
            weights,
            kernels,
        })
    }

    /// Its shape.
    pub const fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// Memory of its weights.
    pub fn bytes(&self) -> Bytes {
        self.weights.bytes()
    }

    /// Cuts texts of these lengths into steps: ranges of consecutive texts, in order, each of at
    /// most [`ROWS`] rows or one text.
    pub fn steps(lengths: &[usize]) -> Vec<Range<usize>> {
        let mut steps: Vec<Range<usize>> = Vec::new();
        let mut rows = 0;
        for (i, length) in lengths.iter().enumerate() {
            match steps.last_mut() {
                Some(step) if rows + length <= ROWS => {
                    step.end = i + 1;
                    rows += length;
                }
                _ => {
                    steps.push(i..i + 1);
                    rows = *length;
                }
            }
        }
        steps
    }

    /// The vectors of one step's texts, each `(width,)` of length 1.
    ///
    /// # Panics
    /// On a text that is empty or longer than [`EncoderConfig::context`], or a token that is not
    /// below [`EncoderConfig::vocab`].
    pub fn embed(&self, texts: &[&[u32]]) -> Vec<Vec<f32>> {
        let (context, vocab) = (self.config.context, self.config.vocab);
        for text in texts {
            let len = text.len();
            assert!((1..=context).contains(&len), "{len} tokens of {context}");
            let is_known = |id: &u32| (*id as usize) < vocab;
            assert!(text.iter().all(is_known), "tokens of {vocab}");
        }
        if texts.is_empty() {
            return Vec::new();
        }
        Step::new(&self.config, &self.weights, &self.kernels, texts).run()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_hold_whole_texts_in_order() {
        for (lengths, expected) in [
            (vec![], vec![]),
            (vec![1, ROWS], vec![0..1, 1..2]),
            (vec![ROWS, 1], vec![0..1, 1..2]),
            (vec![ROWS - 1, 1, 1], vec![0..2, 2..3]),
            (vec![ROWS + 1, 3, 4], vec![0..1, 1..3]),
        ] {
            assert_eq!(Encoder::steps(&lengths), expected, "{lengths:?}");
        }
    }
}
