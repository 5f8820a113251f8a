//! Fields of gated delta nets.

use paceline_tensor::StateRule;
use paceline_weights::gguf::{self, Array};
use serde_json::Value;

use super::{ConfigFields, wrong_type, wrong_value};
use crate::config::{DeltaNet, HeadOrder, MAX_HEADS, MAX_TAPS, MAX_WIDTH};
use crate::families::ModelFamily;
use crate::{Config, Error, LayerCache, LayerShape};

/// Every fourth layer is attention if the file does not say.
const INTERVAL: usize = 4;

impl ConfigFields<'_> {
    /// Enables attention gates, and makes the other layers gated delta nets.
    pub(crate) fn set_delta_nets(&self, config: &mut Config) -> Result<(), Error> {
        let net = self.delta_net(config.family, &config.usual_layer())?;
        let recurrent = self.recurrent_layers(config.layers.len())?;
        for (layer, recurrent) in config.layers.iter_mut().zip(recurrent) {
            if recurrent {
                *layer = net;
            } else {
                layer.gated = true;
            }
        }
        Ok(())
    }

    /// Shape of a gated delta net layer.
    fn delta_net(&self, family: ModelFamily, usual: &LayerShape) -> Result<LayerShape, Error> {
        let heads = |gguf, hf| self.size(gguf, hf, 1, MAX_HEADS);
        let kv_heads = heads("ssm.group_count", "linear_num_key_heads")?;
        let heads = heads("ssm.time_step_rank", "linear_num_value_heads")?;
        let head_dim = self.size("ssm.state_size", "linear_key_head_dim", 1, MAX_WIDTH)?;
        let value_dim = match self {
            Self::Hf(_) => self.size("", "linear_value_head_dim", 1, MAX_WIDTH)?,
            Self::Gguf { .. } => {
                let inner = self.size("ssm.inner_size", "", 1, MAX_WIDTH)?;
                if inner != heads * head_dim {
                    let expected = format!("{} (heads by state size)", heads * head_dim);
                    return Err(wrong_value("ssm.inner_size", inner, expected));
                }
                head_dim
            }
        };
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of the {heads} value heads");
            return Err(wrong_value("number of key heads", kv_heads, expected));
        }
        for dim in [head_dim, value_dim] {
            if !dim.is_multiple_of(16) {
                return Err(wrong_value(
                    "size of a linear head",
                    dim,
                    "a multiple of 16",
                ));
            }
        }
        let taps = self.size(
            "ssm.conv_kernel",
            "linear_conv_kernel_dim",
            1,
            MAX_TAPS as u64,
        )?;
        let order = match (self, family) {
            (Self::Hf(_), _) | (_, ModelFamily::Qwen3Next) => HeadOrder::Grouped,
            _ => HeadOrder::Interleaved,
        };
        Ok(LayerShape {
            cache: LayerCache::Delta(DeltaNet {
                taps,
                order,
                rule: StateRule::Difference,
                least_decay: None,
                low_rank_gates: false,
                sigmoid_gates: self.output_gate_is_sigmoid()?,
            }),
            heads,
            kv_heads,
            head_dim,
            value_dim,
            ..*usual
        })
    }

    /// Makes layers of Kimi delta attention.
    pub(crate) fn set_kimi_nets(&self, config: &mut Config) -> Result<(), Error> {
        let heads = self.size("", "linear_num_heads", 1, MAX_HEADS)?;
        let dim = self.size("", "linear_head_dim", 1, MAX_WIDTH)?;
        if !dim.is_multiple_of(16) {
            let expected = "a multiple of 16";
            return Err(wrong_value("size of a linear head", dim, expected));
        }
        let net = DeltaNet {
            taps: self.size("", "linear_conv_kernel_dim", 1, MAX_TAPS as u64)?,
            order: HeadOrder::Grouped,
            rule: StateRule::Channels,
            least_decay: self.least_decay()?,
            low_rank_gates: self.hf("use_full_rank_gate", "true or false", Value::as_bool)?
                != Some(true),
            sigmoid_gates: true,
        };
        let recurrent = self.kimi_layers(config.layers.len())?;
        let layers = config.layers.iter_mut().zip(recurrent);
        for (layer, _) in layers.filter(|(_, recurrent)| *recurrent) {
            *layer = LayerShape {
                cache: LayerCache::Delta(net),
                heads,
                kv_heads: heads,
                head_dim: dim,
                value_dim: dim,
                latent: None,
                ..*layer
            };
        }
        Ok(())
    }

    /// Smallest logarithm of a decay, where decays have a bound.
    fn least_decay(&self) -> Result<Option<f32>, Error> {
        const FIELD: &str = "linear_lower_bound";
        let bound = self.opt_float("", FIELD)?;
        match bound.filter(|bound| !(bound.is_finite() && *bound < 0.0)) {
            None => Ok(bound),
            Some(bad) => Err(wrong_value(FIELD, bad, "below 0")),
        }
    }

    /// Whether each layer of Kimi Linear is recurrent: by the list of transformers, or by the
    /// published one, which counts from 1.
    fn kimi_layers(&self, layers: usize) -> Result<Vec<bool>, Error> {
        const FIELD: &str = "linear_attn_config";
        if let Some(said) = self.said_layers(layers)? {
            return Ok(said);
        }
        let list = |object: &Value| object.get("kda_layers")?.as_array().cloned();
        let expected = "an object with kda_layers";
        let list = self.hf(FIELD, expected, list)?;
        let list = list.ok_or_else(|| self.missing("", FIELD))?;
        let has = |layer: usize| list.iter().any(|n| n.as_u64() == Some(layer as u64 + 1));
        Ok((0..layers).map(has).collect())
    }

    /// Whether each layer is a gated delta net.
    fn recurrent_layers(&self, layers: usize) -> Result<Vec<bool>, Error> {
        if let Some(said) = self.said_layers(layers)? {
            return Ok(said);
        }
        let every = self.opt_size(
            "full_attention_interval",
            "full_attention_interval",
            1,
            1 << 10,
        )?;
        let every = every.unwrap_or(INTERVAL);
        Ok((1..=layers).map(|n| !n.is_multiple_of(every)).collect())
    }

    /// The file's list of layers. In GGUF files it may include multi-token prediction blocks at the
    /// end.
    fn said_layers(&self, layers: usize) -> Result<Option<Vec<bool>>, Error> {
        const KEY: &str = "attention.recurrent_layers";
        match self {
            Self::Gguf { metadata, .. } => {
                let key = self.key(KEY);
                let list = match metadata.get(&key) {
                    None => return Ok(None),
                    Some(gguf::MetadataValue::Array(Array::Bool(list))) => Some(list.clone()),
                    Some(gguf::MetadataValue::Array(list)) => list
                        .to_u64s()
                        .map(|list| list.iter().map(|n| *n != 0).collect()),
                    Some(_) => None,
                };
                let list = list.filter(|list| list.len() >= layers);
                let wrong = || {
                    let expected = format!("a list with an entry for each of {layers} layers");
                    wrong_value(KEY, "another value", expected)
                };
                let mut list = list.ok_or_else(wrong)?;
                list.truncate(layers);
                Ok(Some(list))
            }
            Self::Hf(_) => {
                const FIELD: &str = "layer_types";
                let Some(types) = self.hf(FIELD, "an array", Some)? else {
                    return Ok(None);
                };
                let expected = "an array of full_attention or linear_attention, one per layer";
                let wrong = || wrong_type(FIELD, expected, types);
                let list = types.as_array().filter(|list| list.len() == layers);
                let kinds = list.ok_or_else(wrong)?.iter();
                let kinds = kinds.map(|kind| match kind.as_str() {
                    Some("linear_attention") => Ok(true),
                    Some("full_attention" | "indexed_attention" | "deepseek_sparse_attention") => {
                        Ok(false)
                    }
                    _ => Err(wrong()),
                });
                kinds.collect::<Result<_, _>>().map(Some)
            }
        }
    }

    /// Whether the weights of the chosen experts are divided by their sum: `usual` if `config.json`
    /// does not say; always in GGUF files.
    pub(crate) fn normalises_experts_or(&self, usual: bool) -> Result<bool, Error> {
        match self {
            Self::Gguf { .. } => Ok(true),
            Self::Hf(_) => {
                let said = self.hf("norm_topk_prob", "true or false", Value::as_bool)?;
                Ok(said.unwrap_or(usual))
            }
        }
    }
}
