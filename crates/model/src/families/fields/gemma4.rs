//! Fields of Gemma 4 in addition to those of Gemma 3.

use serde_json::Value;

use super::experts::MAX_EXPERTS;
use super::{ConfigFields, field, wrong_value};
use crate::config::{Experts, Gating, MAX_WIDTH};
use crate::{Config, Error};

/// Head sizes of a kind of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadSizes {
    /// Size of a query, a key and a value.
    pub(crate) size: usize,
    /// KV heads, if the file states them for this kind.
    pub(crate) kv_heads: Option<usize>,
}

/// Head sizes of both kinds of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    /// Layers with full attention.
    pub(crate) full: HeadSizes,
    /// Layers with a sliding window.
    pub(crate) windowed: HeadSizes,
}

/// Layers that use other layers' caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedCaches {
    /// Number of such layers, the last ones.
    pub(crate) count: usize,
    /// Whether their feed-forwards have twice the file's width.
    pub(crate) doubles_width: bool,
}

impl SharedCaches {
    /// Error for a layer without an earlier layer whose cache it could use.
    pub(crate) fn without_keeper(self, layer: usize) -> Error {
        let expected = format!("fewer: no layer of the kind of layer {layer} keeps a cache");
        wrong_value("number of layers that share caches", self.count, expected)
    }
}

impl ConfigFields<'_> {
    /// Refuses other modes than text, by name, and attention to later positions.
    pub(crate) fn check_gemma4(&self) -> Result<(), Error> {
        self.flag("attention_k_eq_v")?;
        const FIELD: &str = "use_bidirectional_attention";
        // "vision" is for images: text has causal attention.
        match self.hf(FIELD, "a string", Value::as_str)? {
            None | Some("vision") => Ok(()),
            Some(other) => Err(wrong_value(FIELD, other, "null or vision")),
        }
    }

    /// Soft cap of the logits; `None` without.
    pub(crate) fn final_softcap(&self) -> Result<Option<f32>, Error> {
        const FIELD: &str = "final_logit_softcapping";
        match self.opt_float(FIELD, FIELD)? {
            None | Some(0.0) => Ok(None),
            Some(cap) if cap.is_finite() && cap > 0.0 => Ok(Some(cap)),
            Some(cap) => Err(wrong_value(FIELD, cap, "above 0")),
        }
    }

    /// Width of the per-layer embeddings; 0 without.
    pub(crate) fn per_layer_width(&self) -> Result<usize, Error> {
        let (gguf, hf) = (
            "embedding_length_per_layer_input",
            "hidden_size_per_layer_input",
        );
        let said = self.opt_size(gguf, hf, 0, MAX_WIDTH)?;
        Ok(said.unwrap_or(match self {
            Self::Gguf { .. } => 0,
            Self::Hf(_) if self.is_type("gemma4_unified_text") => 0,
            Self::Hf(_) => 256, // default of transformers' class
        }))
    }

    /// Rows of the per-layer embeddings, of a model with `vocab` tokens.
    pub(crate) fn per_layer_vocab(&self, vocab: usize) -> Result<usize, Error> {
        let said = self.opt_size("", "vocab_size_per_layer_input", 1, vocab as u64)?;
        Ok(said.unwrap_or(vocab))
    }

    /// Head sizes of both kinds of layers. The default names have those of full layers in GGUF
    /// files, those of window layers in `config.json`.
    pub(crate) fn gemma4_heads(&self, config: &Config) -> Result<Heads, Error> {
        let of = |size, kv_heads| HeadSizes { size, kv_heads };
        let usual = config.head_dim;
        Ok(match self {
            Self::Gguf { .. } => {
                let size = |key| self.opt_size(key, "", 1, MAX_WIDTH);
                let windowed = size("attention.key_length_swa")?.unwrap_or(usual);
                let value = size("attention.value_length_swa")?.unwrap_or(windowed);
                if value != windowed {
                    let expected = "the size of a key head";
                    return Err(wrong_value(
                        "size of a windowed value head",
                        value,
                        expected,
                    ));
                }
                Heads {
                    full: of(usual, None),
                    windowed: of(windowed, None),
                }
            }
            Self::Hf(json) => {
                let own = per_layer(json, config.layers.len())?;
                let full = match own {
                    Some(own) => own,
                    None => self.global_heads()?,
                };
                Heads {
                    full,
                    windowed: of(usual, None),
                }
            }
        })
    }

    /// Head sizes of full layers by the fields of published files.
    fn global_heads(&self) -> Result<HeadSizes, Error> {
        let kv_heads = self.opt_size("", "num_global_key_value_heads", 1, MAX_WIDTH)?;
        let size = self.opt_size("", "global_head_dim", 1, MAX_WIDTH)?;
        Ok(HeadSizes {
            size: size.unwrap_or(512), // default of transformers' class
            kv_heads: kv_heads.filter(|_| self.flag("attention_k_eq_v").is_ok_and(|is| is)),
        })
    }

    /// Whether the keys of a layer, before their norm, are also its values.
    pub(crate) fn has_keys_as_values(&self, layer: usize, windowed: bool) -> bool {
        match self {
            Self::Gguf { file, .. } => !file.has(&format!("blk.{layer}.attn_v.weight")),
            Self::Hf(_) => !windowed && self.flag("attention_k_eq_v").is_ok_and(|is| is),
        }
    }

    pub(crate) fn shared_caches(&self, layers: usize) -> Result<SharedCaches, Error> {
        let (gguf, hf) = ("attention.shared_kv_layers", "num_kv_shared_layers");
        let count = self.opt_size(gguf, hf, 0, layers as u64)?;
        Ok(SharedCaches {
            count: count.unwrap_or(0),
            // GGUF files have a list of widths.
            doubles_width: self.flag("use_double_wide_mlp")?,
        })
    }

    /// The experts in parallel to each feed-forward.
    pub(crate) fn gemma4_experts(&self) -> Result<Option<Experts>, Error> {
        let count = self.opt_size("expert_count", "num_experts", 0, MAX_EXPERTS)?;
        let there = match self {
            Self::Gguf { .. } => true,
            Self::Hf(_) => self.flag("enable_moe_block")?,
        };
        let Some(count) = count.filter(|n| there && *n > 0) else {
            return Ok(None);
        };
        let width = self.size(
            "expert_feed_forward_length",
            "moe_intermediate_size",
            1,
            MAX_WIDTH,
        )?;
        Ok(Some(Experts {
            count,
            used: self.size("expert_used_count", "top_k_experts", 1, count as u64)?,
            width,
            gating: Gating::Softmax,
            normalised: true,
            scale: 1.0,
            corrected: false,
            shared: 0,
            shared_gate: false,
            clamp: None,
            scaled: true,
            compressed: None,
            groups: None,
        }))
    }

    /// A boolean of `config.json`; false if absent, and in GGUF files.
    fn flag(&self, name: &str) -> Result<bool, Error> {
        let said = self.hf(name, "true or false", Value::as_bool)?;
        Ok(said.unwrap_or(false))
    }
}

/// Head sizes of full layers in the format of transformers 5.23 and later: differences by layer.
fn per_layer(config: &Value, layers: usize) -> Result<Option<HeadSizes>, Error> {
    const FIELD: &str = "per_layer_config";
    let Some(by_layer) = field(config, FIELD, "an object", Value::as_object)? else {
        return Ok(None);
    };
    let own = |i: usize| by_layer.get(&i.to_string());
    let Some(first) = (0..layers).find_map(own) else {
        return Ok(None);
    };
    let number = |name| field(first, name, "a positive integer", positive);
    let size = number("head_dim")?.ok_or(Error::MissingField { field: FIELD })?;
    Ok(Some(HeadSizes {
        size,
        kv_heads: number("num_key_value_heads")?,
    }))
}

fn positive(value: &Value) -> Option<usize> {
    let n = value.as_u64().filter(|n| (1..=MAX_WIDTH).contains(n))?;
    Some(n as usize)
}
