//! Fields of lightning indexers (DeepSeek V3.2, GLM 5).

use paceline_tensor::{PAGE, RopePairs};
use serde_json::Value;

use super::{ConfigFields, field, wrong_value};
use crate::Error;
use crate::config::{Indexer, Latent, MAX_HEADS, MAX_WIDTH};

/// Architectures and model types with an indexer, and their queries of a row by default.
const INDEXED: [(&str, usize); 6] = [
    ("glm5_next", 32),
    ("glm5_next_text", 32),
    ("deepseek32", 64),
    ("deepseek_v32", 64),
    ("glm-dsa", 32),
    ("glm_moe_dsa", 32),
];

impl ConfigFields<'_> {
    /// The indexer, if the model has one.
    pub(crate) fn indexer(&self, latent: &Latent) -> Result<Option<Indexer>, Error> {
        const TOP_K: usize = 2048; // of DeepSeek V3.2 and GLM 5, as the next
        const DIM: usize = 128;
        let name = match self {
            Self::Gguf { architecture, .. } => architecture,
            Self::Hf(_) => self.model_type()?,
        };
        let usual = INDEXED.iter().find(|(known, _)| *known == name);
        let top_k = self.opt_size("attention.indexer.top_k", "index_topk", 1, 1 << 27)?;
        let Some(top_k) = top_k.or(usual.map(|_| TOP_K)) else {
            return Ok(None);
        };
        let sizes = ("attention.indexer.head_count", "index_n_heads");
        let heads = self.opt_size(sizes.0, sizes.1, 1, MAX_HEADS)?;
        let sizes = ("attention.indexer.key_length", "index_head_dim");
        let dim = self
            .opt_size(sizes.0, sizes.1, 1, MAX_WIDTH)?
            .unwrap_or(DIM);
        if !dim.is_multiple_of(16) || dim < latent.turned {
            let expected = format!("a multiple of 16, {} or more", latent.turned);
            return Err(wrong_value("size of an index key", dim, expected));
        }
        if latent.query_rank.is_none() {
            return Err(wrong_value("q_lora_rank", 0, "1 or more, for the indexer"));
        }
        Ok(Some(Indexer {
            top_k,
            heads: heads.unwrap_or(usual.map_or(64, |(_, heads)| *heads)),
            dim,
            pool: self.index_pool(top_k)?,
            pairs: match name.starts_with("glm") {
                true => RopePairs::Adjacent,
                false => RopePairs::Halves,
            },
        }))
    }

    /// Positions of a pool that an indexer chooses together, of `top_k` in all.
    fn index_pool(&self, top_k: usize) -> Result<usize, Error> {
        const FIELD: &str = "index_kpool";
        let Some(pool) = self.opt_size("", FIELD, 1, PAGE as u64)? else {
            return Ok(1);
        };
        if !PAGE.is_multiple_of(pool) || !top_k.is_multiple_of(pool) {
            let expected = format!("a divisor of index_topk, {top_k}, and of {PAGE}");
            return Err(wrong_value(FIELD, pool, expected));
        }
        const TAIL: &str = "index_kpool_always_select_tail";
        match self.hf(TAIL, "true or false", Value::as_bool)? {
            Some(false) if pool > 1 => Err(wrong_value(TAIL, false, "true")),
            _ => Ok(pool),
        }
    }

    /// Whether each of `layers` layers has an indexer of its own; others use the selection of the
    /// layer before.
    pub(crate) fn own_indexers(&self, layers: usize) -> Result<Vec<bool>, Error> {
        const LIST: &str = "indexer_types";
        let own = match self {
            Self::Gguf { .. } => {
                let names = ("attention.indexer.types", "");
                let own = self.opt_sizes(names, layers, (0, 1))?;
                own.map_or(vec![true; layers], |own| {
                    own.iter().map(|n| *n == 1).collect()
                })
            }
            Self::Hf(json) => match field(json, LIST, "a list", Value::as_array)? {
                Some(list) => own_of(list.iter().map(Value::as_str))?,
                None => self.own_by_period(layers)?,
            },
        };
        if own.len() < layers || own.first() == Some(&false) {
            let expected = format!("one for each of {layers} layers, the first of its own");
            return Err(wrong_value(
                LIST,
                format!("a list of {}", own.len()),
                expected,
            ));
        }
        Ok(own)
    }

    /// `index_topk_pattern`, or every n-th layer from an offset on.
    fn own_by_period(&self, layers: usize) -> Result<Vec<bool>, Error> {
        let pattern = self.hf("index_topk_pattern", "a string", Value::as_str)?;
        if let Some(pattern) = pattern {
            let kinds = pattern.chars().map(|c| match c {
                'F' => Some("full"),
                'S' => Some("shared"),
                _ => None,
            });
            return own_of(kinds);
        }
        let size = |name| self.opt_size("", name, 0, 1 << 16);
        let every = size("index_topk_freq")?.unwrap_or(1).max(1);
        let offset = size("index_skip_topk_offset")?.unwrap_or(2);
        let own = |i: usize| (i + 1).saturating_sub(offset).is_multiple_of(every);
        Ok((0..layers).map(own).collect())
    }
}

fn own_of<'a>(kinds: impl Iterator<Item = Option<&'a str>>) -> Result<Vec<bool>, Error> {
    let own = kinds.map(|kind| match kind {
        Some("full") => Ok(true),
        Some("shared") => Ok(false),
        other => Err(wrong_value(
            "indexer_types",
            other.unwrap_or("not a string"),
            "full or shared",
        )),
    });
    own.collect()
}
