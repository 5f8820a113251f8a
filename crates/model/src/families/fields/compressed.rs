//! Fields of DeepSeek V4: streams, layers with compressed keys, their rotation and experts.

use paceline_tensor::{Choice, PAGE, RopePairs};
use serde_json::Value;

use super::{ConfigFields, check_layers, field, wrong_value};
use crate::config::{
    Compressed, Constraint, Gating, KeyRuns, MAX_HEADS, MAX_STREAMS, MAX_WIDTH, PoolIndexer,
    StreamRule, Streams,
};
use crate::rope::Rope;
use crate::{Config, Error, Experts};

/// Kinds of layers, and the positions of a run in `compress_ratios`.
const WINDOW: (&str, u64) = ("sliding_attention", 0);
const SPARSE: (&str, u64) = ("compressed_sparse_attention", 4);
const HEAVY: (&str, u64) = ("heavily_compressed_attention", 128);

/// `model_type` of DeepSeek V4.1.
pub(crate) const V41: &str = "deepseek_v41";

/// Layers whose token chooses the experts, by default of the class.
const HASHED: usize = 3;

impl ConfigFields<'_> {
    /// Constrained residual streams; `weighs_head` if the output head has weights of them.
    /// Weights of sums are those of the half before if they are late.
    pub(crate) fn constrained_streams(
        &self,
        weighs_head: bool,
        is_late: bool,
    ) -> Result<Streams, Error> {
        let size = |name, low, high| self.opt_size("", name, low, high);
        let eps = self.opt_float("", "hc_eps")?.unwrap_or(1e-6); // defaults of the class
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(wrong_value("hc_eps", eps, "0 or more"));
        }
        Ok(Streams {
            count: size("hc_mult", 2, MAX_STREAMS as u64)?.unwrap_or(4),
            rank: 0,
            rule: StreamRule::Constrained(Constraint {
                rounds: size("hc_sinkhorn_iters", 1, 1 << 10)?.unwrap_or(20),
                eps,
                weighs_head,
                is_late,
            }),
        })
    }

    /// Rotation of layers with a window only, and of those with compressed keys.
    pub(crate) fn compressed_ropes(&self, config: &Config) -> Result<Vec<Rope>, Error> {
        let Self::Hf(json) = self else {
            return Ok(Vec::new()); // no files of the family
        };
        let turned = self.compressed_turned(config)?;
        let nested = |name| {
            let parameters = field(json, "rope_parameters", "an object", Some)?;
            parameters.map_or(Ok(None), |all| field(all, name, "an object", Some))
        };
        let scaled = match nested("compress")? {
            None => self.hf_rope_parameters()?,
            own => own,
        };
        let of = |parameters, base, theta| {
            let pairs = (RopePairs::Adjacent, base);
            self.hf_turned(turned, pairs, parameters, theta)
        };
        let mut compressed = of(scaled, 160_000.0, "compress_rope_theta")?;
        let said = scaled.and_then(|all| all.get("attention_factor"));
        if said.is_none_or(Value::is_null) {
            compressed.magnitude = 1.0; // the class asks for it
        }
        Ok(vec![
            of(nested("main")?, 10_000.0, "rope_theta")?,
            compressed,
        ])
    }

    /// Rotated elements of a head.
    fn compressed_turned(&self, config: &Config) -> Result<usize, Error> {
        const FIELD: &str = "qk_rope_head_dim";
        const PART: &str = "partial_rotary_factor";
        let said = self.opt_size("", FIELD, 1, config.head_dim as u64)?;
        let part = self.hf(PART, "a number", Value::as_f64)?.unwrap_or(0.125);
        let turned = said.unwrap_or((config.head_dim as f64 * part) as usize);
        match turned.is_multiple_of(16) && (16..=config.head_dim).contains(&turned) {
            true => Ok(turned),
            false => Err(wrong_value(
                FIELD,
                turned,
                "a multiple of 16, within a head",
            )),
        }
    }

    /// Sizes of each layer's cache.
    pub(crate) fn compressed_layers(&self, config: &Config) -> Result<Vec<Compressed>, Error> {
        let size = |name, low, high| self.size("", name, low, high);
        let (heads, n) = (config.heads, config.layers.len());
        if config.kv_heads != 1 {
            return Err(wrong_value("num_key_value_heads", config.kv_heads, "1"));
        }
        let (groups, group_rank) = (
            size("o_groups", 1, MAX_HEADS)?,
            size("o_lora_rank", 1, MAX_WIDTH)?,
        );
        if !heads.is_multiple_of(groups) {
            let expected = format!("a divisor of {heads} heads");
            return Err(wrong_value("o_groups", groups, expected));
        }
        let each = heads / groups;
        if !group_rank.is_multiple_of(32) || !group_rank.is_multiple_of(each) {
            let expected = format!("a multiple of 32 and of {each}, the heads of a group");
            return Err(wrong_value("o_lora_rank", group_rank, expected));
        }
        let of = Compressed {
            query_rank: size("q_lora_rank", 1, MAX_WIDTH)?,
            turned: self.compressed_turned(config)?,
            groups,
            group_rank,
            window: self.window()?,
            is_rounded: self.is_type(V41),
            runs: None,
        };
        if of.is_rounded {
            return self.shared_runs(of, n);
        }
        let kinds = self.compressed_kinds(n)?;
        let runs = |kind: &str| {
            let (usual, is_sparse) = match kind {
                kind if kind == SPARSE.0 => (SPARSE, true),
                kind if kind == HEAVY.0 => (HEAVY, false),
                _ => return Ok(None),
            };
            let indexer = is_sparse
                .then(|| self.entry_indexer(of.turned))
                .transpose()?;
            Ok::<_, Error>(Some(KeyRuns {
                len: self.run_len(usual)?,
                overlaps: is_sparse,
                of: None,
                index_dim: indexer.map_or(0, |indexer: PoolIndexer| indexer.dim),
                indexer,
            }))
        };
        let layer = |kind: &&str| {
            Ok(Compressed {
                runs: runs(kind)?,
                ..of
            })
        };
        kinds.iter().map(layer).collect()
    }

    /// Layers of DeepSeek V4.1: some compress keys, which later ones use too, with an index key;
    /// some of all choose among the latest.
    fn shared_runs(&self, of: Compressed, layers: usize) -> Result<Vec<Compressed>, Error> {
        const RATIOS: &str = "compress_ratios";
        let numbers = |name: &'static str| {
            let list = self.hf(name, "a list", Value::as_array)?;
            let number = |n: &Value| {
                let n = n.as_u64().filter(|n| *n <= 1 << 12).map(|n| n as usize);
                n.ok_or_else(|| wrong_value(name, list.map_or(0, Vec::len), "a list of numbers"))
            };
            list.into_iter()
                .flatten()
                .map(number)
                .collect::<Result<Vec<_>, _>>()
        };
        let ratios = numbers(RATIOS)?;
        let (compress, choose) = (
            numbers("kv_source_layer_ids")?,
            numbers("index_source_layer_ids")?,
        );
        let indexer = self.entry_indexer(of.turned)?;
        let (mut source, mut chosen, mut all) = (None, None, Vec::new());
        for layer in 0..layers {
            let len = ratios.get(layer).copied().unwrap_or(0);
            if len == 0 {
                all.push(of);
                continue;
            }
            let (compresses, chooses) = (compress.contains(&layer), choose.contains(&layer));
            if compresses {
                source = Some((layer, checked_len(RATIOS, len)?));
            }
            if chooses {
                chosen = Some((source, len));
            }
            let fits = source.is_some_and(|(_, own)| own == len) && chosen == Some((source, len));
            if !fits {
                let expected = "compressed and chosen keys of as long runs at or before each layer";
                return Err(wrong_value("index_source_layer_ids", layer, expected));
            }
            let earlier = source.map(|(of, _)| of).filter(|of| *of < layer);
            let runs = KeyRuns {
                len,
                overlaps: false,
                of: earlier,
                index_dim: indexer.dim,
                indexer: chooses.then_some(indexer),
            };
            all.push(Compressed {
                runs: Some(runs),
                ..of
            });
        }
        Ok(all)
    }

    /// Positions up to which the candidates of DeepSeek V4.1's indexers are all keys.
    pub(crate) fn candidate_context(&self, context: usize) -> Result<usize, Error> {
        let source = self.hf("candidate_source_layer_id", "a number", Value::as_i64)?;
        let Some(layer) = source.and_then(|layer| usize::try_from(layer).ok()) else {
            return Ok(context);
        };
        let size =
            |name, usual| Ok::<_, Error>(self.opt_size("", name, 0, 1 << 20)?.unwrap_or(usual));
        let keys = size("candidate_topk_blocks", 2048)? * size("candidate_block_size", 8)?;
        let ratios = self.hf("compress_ratios", "a list", Value::as_array)?;
        let len = ratios
            .and_then(|list| list.get(layer)?.as_u64())
            .unwrap_or(1) as usize;
        Ok(if keys == 0 {
            context
        } else {
            context.min(keys * len)
        })
    }

    /// The kind of each layer: listed by name or by `compress_ratios`, or that of the class.
    fn compressed_kinds(&self, layers: usize) -> Result<Vec<&'static str>, Error> {
        let all = [WINDOW, SPARSE, HEAVY];
        let named = self.hf("layer_types", "a list", Value::as_array)?;
        let ratios = self.hf("compress_ratios", "a list", Value::as_array)?;
        let (name, list) = match (named, ratios) {
            (Some(list), _) => ("layer_types", list),
            (None, Some(list)) => ("compress_ratios", list),
            (None, None) => {
                let kind = |i| {
                    if i < 2 || i % 2 == 0 {
                        HEAVY.0
                    } else {
                        SPARSE.0
                    }
                };
                return Ok((0..layers).map(kind).collect());
            }
        };
        check_layers(name, list.len().min(layers), layers)?; // others are of prediction
        let kind = |said: &Value| {
            let is = |(name, ratio): &&(&str, u64)| {
                said.as_str() == Some(name) || said.as_u64() == Some(*ratio)
            };
            let found = all.iter().find(is).map(|(name, _)| *name);
            found.ok_or_else(|| {
                wrong_value(name, said, "a kind of layer of DeepSeek V4, or 0, 4 or 128")
            })
        };
        list[..layers].iter().map(kind).collect()
    }

    /// Positions of a run in layers of a kind.
    fn run_len(&self, (kind, usual): (&'static str, u64)) -> Result<usize, Error> {
        const FIELD: &str = "compress_rates";
        let rates = self.hf(FIELD, "an object", Some)?;
        let said = rates
            .and_then(|rates| rates.get(kind))
            .map(|n| n.as_u64().unwrap_or(0));
        let old = match kind == SPARSE.0 {
            true => self.opt_size("", "compress_rate_csa", 1, 1 << 20)?,
            false => self.opt_size("", "compress_rate_hca", 1, 1 << 20)?,
        };
        checked_len(
            FIELD,
            old.map_or(said.unwrap_or(usual), |n| n as u64) as usize,
        )
    }

    /// The indexer of compressed keys.
    fn entry_indexer(&self, turned: usize) -> Result<PoolIndexer, Error> {
        let dim = self.size("", "index_head_dim", 1, MAX_WIDTH)?;
        if !dim.is_multiple_of(16) || dim < turned {
            let expected = format!("a multiple of 16, {turned} or more");
            return Err(wrong_value("index_head_dim", dim, expected));
        }
        Ok(PoolIndexer {
            choice: Choice {
                top_k: self.size("", "index_topk", 1, 1 << 20)?,
                pool: 1,
                local: 0,
            },
            heads: self.size("", "index_n_heads", 1, MAX_HEADS)?,
            dim,
        })
    }

    /// Clamp of gates.
    pub(crate) fn silu_clamp(&self) -> Result<f32, Error> {
        let limit = self.opt_float("", "swiglu_limit")?.unwrap_or(10.0); // default of the classes
        match limit.is_finite() && limit > 0.0 {
            true => Ok(limit),
            false => Err(wrong_value("swiglu_limit", limit, "above 0")),
        }
    }

    /// Experts of each layer.
    pub(crate) fn token_experts(&self, config: &Config) -> Result<Vec<Experts>, Error> {
        let normalised = self.says_normalised(true)?;
        let mut experts = self.experts("n_routed_experts", config.ffn, normalised)?;
        let temperature = self.opt_float("", "gate_temp")?.unwrap_or(1.0);
        if temperature != 1.0 {
            return Err(wrong_value("gate_temp", temperature, "1"));
        }
        let scored = self.hf("scoring_func", "a string", Value::as_str)?;
        if let Some(other) = scored.filter(|name| *name != "sqrtsoftplus") {
            return Err(wrong_value("scoring_func", other, "sqrtsoftplus"));
        }
        experts.scale = self.expert_scale()?;
        experts.clamp = Some(self.silu_clamp()?);
        let experts = self.with_ungated_shared(experts)?;
        let hashed = self.hashed_layers(config.layers.len())?;
        let of = |hashed: bool| Experts {
            gating: if hashed {
                Gating::OfToken
            } else {
                Gating::SqrtSoftplus
            },
            corrected: !hashed,
            ..experts
        };
        Ok(hashed.into_iter().map(of).collect())
    }

    /// Whether the token chooses the experts of each layer.
    fn hashed_layers(&self, layers: usize) -> Result<Vec<bool>, Error> {
        const FIELD: &str = "mlp_layer_types";
        let Some(kinds) = self.hf(FIELD, "a list", Value::as_array)? else {
            let first = self
                .opt_size("", "num_hash_layers", 0, 1 << 10)?
                .unwrap_or(if self.is_type(V41) { 0 } else { HASHED });
            return Ok((0..layers).map(|layer| layer < first).collect());
        };
        check_layers(FIELD, kinds.len(), layers)?;
        let kind = |kind: &Value| match kind.as_str() {
            Some("hash_moe") => Ok(true),
            Some("moe") => Ok(false),
            _ => Err(wrong_value(FIELD, kind, "hash_moe or moe")),
        };
        kinds.iter().map(kind).collect()
    }
}

/// Positions of a run.
fn checked_len(field: &'static str, len: usize) -> Result<usize, Error> {
    let fits = len > 0 && (PAGE.is_multiple_of(len) || len.is_multiple_of(PAGE));
    match fits && len <= 1 << 12 {
        true => Ok(len),
        false => Err(wrong_value(
            field,
            len,
            "a divisor or a multiple of 64, up to 4096",
        )),
    }
}
