//! Fields of MiniMax M3.

use serde_json::Value;

use super::latent::dense_of_list;
use super::{ConfigFields, wrong_value};
use crate::config::MAX_WIDTH;
use crate::{Config, Error, Experts};

/// Object of the indexer's fields in published folders.
const SPARSE: &str = "sparse_attention_config";

impl ConfigFields<'_> {
    /// Positions up to which the indexer chooses all; `None` if no layer has one.
    pub(crate) fn minimax_indexed(&self, layers: usize) -> Result<Option<usize>, Error> {
        let size = |new, old| {
            let said = self.opt_size("", new, 1, 1 << 20)?;
            let old = |of: &Value| Some(of.get(old).and_then(Value::as_u64));
            let old = self.hf(SPARSE, "an object", old)?.flatten();
            let number = said.or(old.map(|n| n as usize).filter(|n| (1..1 << 20).contains(n)));
            number.ok_or_else(|| self.missing("", new))
        };
        let listed = |name: &'static str| self.hf(name, "a list", Value::as_array);
        let is_sparse = |kind: &Value| kind.as_str() == Some("minimax_m3_sparse");
        let new = listed("layer_types")?.map(|kinds| kinds.iter().any(is_sparse));
        let old = |of: &Value| Some(of.get("sparse_attention_freq")?.as_array()?.clone());
        let old = self.hf(SPARSE, "an object with sparse_attention_freq", old)?;
        let old = old.map(|list| list.iter().take(layers).any(|n| n.as_u64() != Some(0)));
        if !new.or(old).unwrap_or(false) {
            return Ok(None);
        }
        let blocks = size("index_topk_blocks", "sparse_topk_blocks")?;
        Ok(Some(
            blocks * size("index_block_size", "sparse_block_size")?,
        ))
    }

    /// Routed experts and the shared one.
    pub(crate) fn minimax_experts(&self, config: &Config) -> Result<Experts, Error> {
        let mut experts = self.sigmoid_experts("num_local_experts", config.ffn)?;
        (experts.normalised, experts.clamp) = (true, config.dense_clamp);
        experts.shared = self.size("", "shared_intermediate_size", 1, MAX_WIDTH)?;
        experts.shared_gate = false;
        Ok(experts)
    }

    /// Whether each layer is dense.
    pub(crate) fn minimax_dense(&self, layers: usize) -> Result<Vec<bool>, Error> {
        const FIELD: &str = "moe_layer_freq";
        let kinds = self.hf("mlp_layer_types", "a list", Value::as_array)?;
        if let Some(kinds) = kinds {
            return dense_of_list(kinds, layers);
        }
        let Some(list) = self.hf(FIELD, "a list", Value::as_array)? else {
            return Ok(vec![false; layers]);
        };
        if list.len() != layers {
            let expected = format!("one for each of {layers} layers");
            return Err(wrong_value(
                "number of moe_layer_freq",
                list.len(),
                expected,
            ));
        }
        Ok(list.iter().map(|n| n.as_u64() == Some(0)).collect())
    }

    /// Width of dense feed-forwards.
    pub(crate) fn minimax_dense_width(&self) -> Result<usize, Error> {
        self.size("", "dense_intermediate_size", 1, MAX_WIDTH)
    }
}
