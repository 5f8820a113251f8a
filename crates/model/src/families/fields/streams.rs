//! Fields of Qwen4-Exp: residual streams, its indexer, and what is not computed.

use paceline_tensor::Choice;
use serde_json::Value;

use super::{ConfigFields, wrong_value};
use crate::Error;
use crate::config::{MAX_HEADS, MAX_STREAMS, MAX_WIDTH, PoolIndexer, Streams};

impl ConfigFields<'_> {
    /// Residual streams and the rank of their mix.
    pub(crate) fn streams(&self) -> Result<Streams, Error> {
        let size = |name, low, high| self.opt_size("", name, low, high);
        Ok(Streams {
            count: size("hc_count", 2, MAX_STREAMS)?.unwrap_or(4), // defaults of the class
            rank: size("hc_lowrank", 1, MAX_WIDTH)?.unwrap_or(320),
        })
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
            choice: Choice { top_k, pool },
            heads: size("indexer_n_heads", MAX_HEADS)?,
            dim,
        })
    }

    /// Refuses output gates of gated delta nets other than silu.
    pub(crate) fn check_output_gate(&self) -> Result<(), Error> {
        const FIELD: &str = "output_gate_type";
        match self.hf(FIELD, "a string", Value::as_str)? {
            None | Some("silu" | "swish") => Ok(()),
            Some(other) => Err(wrong_value(FIELD, other, "silu")),
        }
    }

    /// Refuses embeddings of n-grams.
    pub(crate) fn refuse_ngrams(&self) -> Result<(), Error> {
        const FIELD: &str = "ple_layer_ids";
        match self.hf(FIELD, "a list", Value::as_array)? {
            Some(list) if !list.is_empty() => {
                let got = Value::Array(list.clone());
                Err(wrong_value(
                    FIELD,
                    got,
                    "no layers (n-grams have no embeddings here)",
                ))
            }
            _ => Ok(()),
        }
    }
}
