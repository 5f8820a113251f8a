//! Fields of MiniMax M3.

use paceline_tensor::Choice;
use serde_json::Value;

use super::latent::dense_of_list;
use super::{ConfigFields, check_layers, wrong_value};
use crate::config::{MAX_WIDTH, PoolIndexer};
use crate::{Config, Error, Experts};

/// Object of the indexer's fields in published folders.
const SPARSE: &str = "sparse_attention_config";

impl ConfigFields<'_> {
    /// The indexer of blocks of each layer that has one, with a query for each KV head.
    pub(crate) fn block_indexers(
        &self,
        config: &Config,
    ) -> Result<Vec<Option<PoolIndexer>>, Error> {
        let (layers, pairs) = (config.layers.len(), config.ropes[0].frequencies.len());
        let is_sparse = self.sparse_layers(layers)?;
        if !is_sparse.contains(&true) {
            return Ok(vec![None; layers]);
        }
        let size = |new, old: &'static str| self.sparse_size(new, old);
        let heads = size("index_n_heads", "sparse_num_index_heads")?;
        if heads != config.kv_heads {
            let expected = format!("the number of KV heads, {}", config.kv_heads);
            return Err(wrong_value("index_n_heads", heads, expected));
        }
        let dim = size("index_head_dim", "sparse_index_dim")?;
        if !dim.is_multiple_of(16) || dim < 2 * pairs {
            let expected = format!("a multiple of 16, {} or more", 2 * pairs);
            return Err(wrong_value("index_head_dim", dim, expected));
        }
        let pool = size("index_block_size", "sparse_block_size")?;
        let blocks = size("index_topk_blocks", "sparse_topk_blocks")?;
        let local = size("index_local_blocks", "sparse_local_block")?;
        if local > blocks {
            let expected = format!("at most index_topk_blocks, {blocks}");
            return Err(wrong_value("index_local_blocks", local, expected));
        }
        let choice = Choice {
            top_k: blocks * pool,
            pool,
            local,
        };
        let own = PoolIndexer { choice, heads, dim };
        Ok(is_sparse
            .into_iter()
            .map(|sparse| sparse.then_some(own))
            .collect())
    }

    /// A size of the indexer, under its name in transformers or in published folders.
    fn sparse_size(&self, new: &'static str, old: &str) -> Result<usize, Error> {
        let said = self.opt_size("", new, 1, 1 << 20)?;
        let old = |of: &Value| Some(of.get(old).and_then(Value::as_u64));
        let old = self.hf(SPARSE, "an object", old)?.flatten();
        let number = said.or(old.map(|n| n as usize).filter(|n| (1..1 << 20).contains(n)));
        number.ok_or_else(|| self.missing("", new))
    }

    /// Whether each layer has an indexer.
    fn sparse_layers(&self, layers: usize) -> Result<Vec<bool>, Error> {
        let new = self.hf("layer_types", "a list", Value::as_array)?;
        let new = new.map(|kinds| {
            let is_sparse = |kind: &Value| kind.as_str() == Some("minimax_m3_sparse");
            kinds.iter().map(is_sparse).collect()
        });
        let old = |of: &Value| Some(of.get("sparse_attention_freq")?.as_array()?.clone());
        let old = self.hf(SPARSE, "an object with sparse_attention_freq", old)?;
        let old = old.map(|list| list.iter().map(|n| n.as_u64() != Some(0)).collect());
        let mut found: Vec<bool> = new.or(old).unwrap_or_else(|| vec![false; layers]);
        found.truncate(layers);
        check_layers("layer_types", found.len(), layers)?;
        Ok(found)
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
