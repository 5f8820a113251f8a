//! Encoders: text to one embedding vector (BERT and similar models; decoders such as Qwen3
//! Embedding).
//!
//! ```text
//! ids --tables, norm--> x (T, C) --layers--> x (T, C) --pooled, length 1--> (C,)
//!
//! a layer:  x = norm(x + attention(x))      every row sees every row of its own text
//!           x = norm(x + down(bend(up(x))))
//! ```
//!
//! A decoder runs its own layers ([`Model`](crate::Model)); the vector is the normed row of the
//! last token. In EmbeddingGemma, rows see later ones too; the vector is a mean, then two products.
//!
//! One node computes an encoder, in floats, since encoders are small. Texts share a step of up to
//! [`ROWS`] rows. A row of a product does not depend on the other rows, and attention stays within
//! a text. So a vector depends only on its own tokens, not on other texts, threads or instruction
//! set.
//!
//! Sources: Devlin et al. 2018 (BERT), Reimers and Gurevych 2019 (Sentence-BERT),
//! `modeling_bert.py` of transformers.

mod config;
mod decoder;
mod dense;
mod forward;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use paceline_base::Bytes;
use paceline_tensor::Kernels;

pub use config::{EncoderConfig, EncoderFamily, Pooling};

use crate::{Error, ModelSource};
use config::Bert;
use decoder::Decoder;
use dense::EncoderDense;
use forward::EncoderPass;
use weights::EncoderWeights;

/// Maximum rows of a step. A longer text has a step of its own; decoders process it in chunks of
/// this size.
pub const ROWS: usize = 512;

/// A loaded encoder.
#[derive(Debug)]
pub struct Encoder {
    config: EncoderConfig,
    layers: Layers,
    /// Products behind the pooling.
    dense: Vec<EncoderDense>,
}

/// The network: layers of BERT, or a decoder trained for embeddings.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one value per loaded model")]
enum Layers {
    Bert {
        shape: Bert,
        weights: EncoderWeights,
        kernels: Arc<Kernels>,
    },
    Decoder(Decoder),
}

impl Encoder {
    /// Loads an encoder. Cost: one copy of its weights.
    ///
    /// # Errors
    /// Names a weight or field that is missing or not supported.
    pub fn load(source: &ModelSource, kernels: Arc<Kernels>) -> Result<Self, Error> {
        let (config, dense) = EncoderConfig::with_dense(source)?;
        let layers = if decoder::is_embedder(source) {
            Layers::Decoder(Decoder::load(source, kernels)?)
        } else {
            let shape = Bert::read(source)?.1;
            Layers::Bert {
                weights: EncoderWeights::load(source, &shape, kernels.pool())?,
                shape,
                kernels,
            }
        };
        Ok(Self {
            config,
            layers,
            dense,
        })
    }

    pub const fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// Memory of its weights.
    pub fn bytes(&self) -> Bytes {
        match &self.layers {
            Layers::Bert { weights, .. } => weights.bytes(),
            Layers::Decoder(decoder) => decoder.bytes(),
        }
    }

    /// Groups texts of these lengths into steps: ranges of consecutive texts, each with at most
    /// [`ROWS`] rows or one text.
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

    /// Vectors of one step's texts, `(width,)` of length 1 each. `None` if `is_over` returned true
    /// between two chunks of a long text.
    ///
    /// # Errors
    /// [`Error::Cache`] if a decoder cannot allocate the keys of its texts.
    ///
    /// # Panics
    /// For a text that is empty or longer than [`EncoderConfig::context`], or a token outside
    /// [`EncoderConfig::vocab`].
    pub fn embed(
        &self,
        texts: &[&[u32]],
        is_over: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<f32>>>, Error> {
        let (context, vocab) = (self.config.context, self.config.vocab);
        for text in texts {
            let len = text.len();
            assert!((1..=context).contains(&len), "{len} tokens of {context}");
            let is_known = |id: &u32| (*id as usize) < vocab;
            assert!(text.iter().all(is_known), "tokens of {vocab}");
        }
        if texts.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let pooled = match &self.layers {
            Layers::Bert {
                shape,
                weights,
                kernels,
            } => Some(EncoderPass::new(shape, weights, kernels, texts).run()),
            Layers::Decoder(decoder) => decoder.embed(texts, is_over)?,
        };
        let dense = |x: Vec<f64>, dense: &EncoderDense| dense.apply(&x);
        let vector = |pooled: Vec<f64>| unit(&self.dense.iter().fold(pooled, dense));
        Ok(pooled.map(|texts| texts.into_iter().map(vector).collect()))
    }
}

/// The unit vector in the direction of `row`; zeros for zeros.
fn unit(row: &[f64]) -> Vec<f32> {
    let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
    row.iter().map(|x| (x * scale) as f32).collect()
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
