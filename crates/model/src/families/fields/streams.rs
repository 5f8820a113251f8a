//! Fields of residual streams, and of Qwen4-Exp's indexer and output gates.

use paceline_tensor::Choice;
use paceline_weights::gguf::{Array, MetadataValue};
use serde_json::Value;

use super::{ConfigFields, check_layers, wrong_value};
use crate::Error;
use crate::config::{
    MAX_BLOCKS, MAX_HEADS, MAX_LAYERS, MAX_STREAMS, MAX_WIDTH, PoolIndexer, StreamRule, Streams,
};

impl ConfigFields<'_> {
    /// Residual streams and the rank of their mix.
    pub(crate) fn streams(&self) -> Result<Streams, Error> {
        let size = |name, low, high| self.opt_size("", name, low, high);
        Ok(Streams {
            count: size("hc_count", 2, MAX_STREAMS as u64)?.unwrap_or(4), // defaults of the class
            rank: size("hc_lowrank", 1, MAX_WIDTH)?.unwrap_or(320),
            rule: StreamRule::Gated,
        })
    }

    /// Attended streams of Kimi K3, with `layers` layers; `None` without.
    pub(crate) fn attended_streams(&self, layers: usize) -> Result<Option<Streams>, Error> {
        const FIELD: &str = "attn_res_block_size";
        let Some(block) = self.opt_size("", FIELD, 1, MAX_LAYERS)? else {
            return Ok(None);
        };
        let count = 1 + layers.div_ceil(block);
        if count > MAX_BLOCKS {
            let expected = format!("{} or more", layers.div_ceil(MAX_BLOCKS - 1));
            return Err(wrong_value(FIELD, block, expected));
        }
        Ok(Some(Streams {
            count,
            rank: 0,
            rule: StreamRule::Attended { block },
        }))
    }

    /// Alternating streams of Gemma 3n, with the rank of the path parallel to attention.
    pub(crate) fn alternating_streams(&self) -> Result<Streams, Error> {
        const ACTIVE: &str = "altup_active_idx";
        match self.opt_size("altup.active_idx", ACTIVE, 0, MAX_WIDTH)? {
            None | Some(0) => {}
            Some(other) => return Err(wrong_value(ACTIVE, other, "0")),
        }
        Ok(Streams {
            count: self
                .opt_size(
                    "altup.num_inputs",
                    "altup_num_inputs",
                    2,
                    MAX_STREAMS as u64,
                )?
                .unwrap_or(4), // as the class
            rank: self.laurel_rank()?,
            rule: StreamRule::Alternating,
        })
    }

    /// Rank of Gemma 3n's path parallel to attention. GGUF files have it in the weights alone.
    fn laurel_rank(&self) -> Result<usize, Error> {
        let Self::Gguf { file, .. } = self else {
            let said = self.opt_size("", "laurel_rank", 1, MAX_WIDTH)?;
            return Ok(said.unwrap_or(64)); // as the class
        };
        let down = file.tensor("blk.0.laurel_l.weight")?;
        match down.shape.first() {
            Some(rank) if (1..=MAX_WIDTH as usize).contains(rank) => Ok(*rank),
            _ => Err(wrong_value("rows of laurel_l", down.rows(), "1 or more")),
        }
    }

    /// Soft cap of Gemma 3n's logits; 30 in GGUF files without one, as in llama.cpp.
    pub(crate) fn gemma3n_softcap(&self) -> Result<Option<f32>, Error> {
        let said = self.final_softcap()?;
        Ok(match self {
            Self::Gguf { .. } => said.or(Some(30.0)),
            Self::Hf(_) => said,
        })
    }

    /// Deviations above the mean at which each layer cuts its gates, from the fraction that
    /// becomes 0; GGUF files have the deviations.
    pub(crate) fn gate_cutoffs(&self, layers: usize) -> Result<Vec<Option<f32>>, Error> {
        const FIELD: &str = "activation_sparsity_pattern";
        if let Self::Gguf { metadata, .. } = self {
            const KEY: &str = "activation_sparsity_scale";
            let list = match metadata.get(&self.key(KEY)) {
                Some(MetadataValue::Array(Array::F32(list))) => list.clone(),
                _ => return Err(self.missing(KEY, FIELD)),
            };
            check_layers(KEY, list.len(), layers)?;
            // Of the fraction 0 it is infinite.
            return Ok(list
                .into_iter()
                .map(|x| x.is_finite().then_some(x))
                .collect());
        }
        let fractions = match self.hf(FIELD, "a number or a list", |value| Some(value.clone()))? {
            Some(Value::Array(list)) => {
                check_layers(FIELD, list.len(), layers)?;
                list.iter().map(Value::as_f64).collect()
            }
            Some(one) => Some(vec![one.as_f64().unwrap_or(f64::NAN); layers]),
            None => {
                let sparse = if layers > 10 { 10 } else { 0 }; // as the class
                Some(
                    (0..layers)
                        .map(|i| if i < sparse { 0.95 } else { 0.0 })
                        .collect(),
                )
            }
        };
        let fractions = fractions.filter(|all| all.iter().all(|x| (0.0..1.0).contains(x)));
        let fractions =
            fractions.ok_or_else(|| wrong_value(FIELD, "another", "numbers from 0 to below 1"))?;
        let cutoff = |x: f64| (x > 0.0).then(|| normal_quantile(f64::from(x as f32)) as f32);
        Ok(fractions.into_iter().map(cutoff).collect())
    }

    /// The indexer of pools of positions, whose keys rotate `pairs` pairs.
    pub(crate) fn pool_indexer(&self, pairs: usize) -> Result<PoolIndexer, Error> {
        let size = |name, high| self.size("", name, 1, high);
        let dim = size("indexer_head_dim", MAX_WIDTH)?;
        if !dim.is_multiple_of(16) || dim < 2 * pairs {
            let expected = format!("a multiple of 16, {} or more", 2 * pairs);
            return Err(wrong_value("indexer_head_dim", dim, expected));
        }
        let (top_k, pool) = (
            size("indexer_budget", 1 << 27)?,
            size("indexer_compress_ratio", 1 << 16)?,
        );
        if !top_k.is_multiple_of(pool) {
            let expected = format!("a multiple of indexer_compress_ratio, {pool}");
            return Err(wrong_value("indexer_budget", top_k, expected));
        }
        let key_heads = self.opt_size("", "indexer_kv_heads", 0, MAX_HEADS)?;
        if let Some(got) = key_heads.filter(|heads| *heads != 1) {
            return Err(wrong_value("indexer_kv_heads", got, "1"));
        }
        Ok(PoolIndexer {
            choice: Choice {
                top_k,
                pool,
                local: 0,
            },
            heads: size("indexer_n_heads", MAX_HEADS)?,
            dim,
        })
    }

    /// Whether results of gated delta nets are multiplied by the sigmoid of their gates, not by
    /// silu.
    pub(crate) fn output_gate_is_sigmoid(&self) -> Result<bool, Error> {
        const FIELD: &str = "output_gate_type";
        match self.hf(FIELD, "a string", Value::as_str)? {
            None | Some("silu" | "swish") => Ok(false),
            Some("sigmoid") => Ok(true),
            Some(other) => Err(wrong_value(FIELD, other, "silu or sigmoid")),
        }
    }
}

/// The value that a standard normal variable is below with probability `p`, by bisection.
fn normal_quantile(p: f64) -> f64 {
    let below = |x: f64| 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2);
    let halve = |(low, high): (f64, f64), _| {
        let middle = 0.5 * (low + high);
        if below(middle) < p {
            (middle, high)
        } else {
            (low, middle)
        }
    };
    (0..64).fold((-9.0, 9.0), halve).0
}

#[cfg(test)]
mod tests {
    #[test]
    fn quantiles_are_those_of_tables() {
        for (p, expected) in [
            (0.5, 0.0),
            (0.95, 1.644_854),
            (0.99, 2.326_348),
            (0.1, -1.281_552),
        ] {
            let got = super::normal_quantile(p);
            assert!((got - expected).abs() < 1e-6, "{p}: {got}");
        }
    }
}
