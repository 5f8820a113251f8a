//! Fields of short convolutions (LFM2).

use serde_json::Value;

use super::{ConfigFields, field, wrong_type, wrong_value};
use crate::config::{MAX_HEADS, MAX_TAPS, MAX_WIDTH};
use crate::{Config, Error, LayerCache, LayerShape};

impl ConfigFields<'_> {
    /// Makes the layers without attention short convolutions, in heads of the model's size.
    pub(crate) fn set_short_convs(&self, config: &mut Config) -> Result<(), Error> {
        let (width, dim) = (config.width, config.head_dim);
        if !width.is_multiple_of(dim) {
            let expected = format!("a divisor of the width {width}");
            return Err(wrong_value("head size", dim, expected));
        }
        let taps = self.size("shortconv.l_cache", "conv_L_cache", 1, MAX_TAPS as u64)?;
        let conv = LayerShape {
            cache: LayerCache::Conv(taps),
            heads: width / dim,
            kv_heads: width / dim,
            query_scale: 1.0,
            ..config.usual_layer()
        };
        let attends = self.attention_layers(config.layers.len())?;
        for (layer, attends) in config.layers.iter_mut().zip(attends) {
            if !attends {
                *layer = LayerShape {
                    ffn: layer.ffn,
                    ..conv
                };
            }
        }
        Ok(())
    }

    /// Whether each of `layers` layers is attention. GGUF files have 0 KV heads for the others.
    fn attention_layers(&self, layers: usize) -> Result<Vec<bool>, Error> {
        const LIST: &str = "layer_types";
        const OLD: &str = "full_attn_idxs";
        let Self::Hf(json) = self else {
            let names = ("attention.head_count_kv", "");
            let heads = self.opt_sizes(names, layers, (0, MAX_HEADS))?;
            let heads = heads.ok_or_else(|| self.missing(names.0, names.1))?;
            return Ok(heads.iter().map(|heads| *heads > 0).collect());
        };
        let Some(types) = field(json, LIST, "a list", Value::as_array)? else {
            let listed = field(json, OLD, "a list", Value::as_array)?;
            let has = |list: &[Value], i: usize| list.iter().any(|n| n.as_u64() == Some(i as u64));
            let attends = |i| listed.is_none_or(|list| has(list, i));
            return Ok((0..layers).map(attends).collect());
        };
        let wrong = || {
            let expected = "an array of full_attention or conv, one per layer";
            wrong_type(LIST, expected, &json[LIST])
        };
        if types.len() != layers {
            return Err(wrong());
        }
        let attends = types.iter().map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(true),
            Some("conv") => Ok(false),
            _ => Err(wrong()),
        });
        attends.collect()
    }

    /// Width of the feed-forward of LFM2 folders, which may state it before an adjustment:
    /// two thirds, times a factor, rounded up to a multiple.
    pub(super) fn lfm2_ffn(&self) -> Result<usize, Error> {
        let size = |name| self.opt_size("", name, 1, MAX_WIDTH);
        let stated = match size("block_ff_dim")? {
            Some(stated) => stated,
            None => self.size("", "intermediate_size", 1, MAX_WIDTH)?,
        };
        let adjusts = self.hf("block_auto_adjust_ff_dim", "true or false", Value::as_bool)?;
        if adjusts == Some(false) {
            return Ok(stated);
        }
        let factor = self
            .opt_float("", "block_ffn_dim_multiplier")?
            .unwrap_or(1.0);
        let multiple = size("block_multiple_of")?.unwrap_or(256);
        let part = (f64::from(factor) * (2 * stated / 3) as f64).trunc();
        if !(1.0..=MAX_WIDTH as f64).contains(&part) {
            return Err(wrong_value("block_ffn_dim_multiplier", factor, "about 1"));
        }
        Ok((part as usize).next_multiple_of(multiple))
    }

    /// Leading dense layers of LFM2 with experts.
    pub(crate) fn lfm2_dense_layers(&self) -> Result<usize, Error> {
        let said = self.opt_size("leading_dense_block_count", "num_dense_layers", 0, 1 << 10)?;
        Ok(said.unwrap_or(2)) // default of transformers' class
    }

    /// Whether its router has a choice bias.
    pub(crate) fn corrects_lfm2_choices(&self) -> Result<bool, Error> {
        let said = self.hf("use_expert_bias", "true or false", Value::as_bool)?;
        Ok(said.unwrap_or(true))
    }
}
