//! Names of a role's tensors in GGUF files and in the Hugging Face layout.

use paceline_weights::hf::HfFolder;
use serde_json::Value;

use crate::families::{FileNames, ModelFamily, type_of};
use crate::role::{LayerRole, Nth, Role, StreamPart};

/// Configuration of a folder's text part.
pub(super) fn text_part(folder: &HfFolder) -> &Value {
    let config = folder.config();
    config.get("text_config").unwrap_or(config)
}

/// `model_type` of a folder's text part.
pub(super) fn model_type(folder: &HfFolder) -> Option<&str> {
    type_of(text_part(folder))
}

/// `name` as stored in `folder`. A decoder saved without its head, such as an embedding model, has
/// no `model.` prefix.
pub(super) fn bare<'a>(folder: &HfFolder, name: &'a str) -> &'a str {
    let bare = name.strip_prefix("model.").filter(|bare| folder.has(bare));
    bare.filter(|_| !folder.has(name)).unwrap_or(name)
}

/// Tensor names in GGUF files: `gguf-py/gguf/constants.py` of llama.cpp.
pub(super) fn gguf_stem(family: ModelFamily, role: Role) -> String {
    if let Some(name) = (family.file_names().gguf_own)(role) {
        return match role {
            Role::Layer(layer, _) => format!("blk.{layer}.{name}"),
            _ => name.to_owned(),
        };
    }
    let (layer, part) = match role {
        Role::TokenEmbedding => return "token_embd".to_owned(),
        Role::OutputNorm => return "output_norm".to_owned(),
        Role::Output => return "output".to_owned(),
        Role::RopeFactors => return "rope_freqs".to_owned(),
        Role::ShortRopeFactors => return "rope_factors_short".to_owned(),
        Role::LongRopeFactors => return "rope_factors_long".to_owned(),
        Role::PerLayerEmbedding => return "per_layer_token_embd".to_owned(),
        Role::PerLayerProjection => return "per_layer_model_proj".to_owned(),
        Role::PerLayerNorm => return "per_layer_proj_norm".to_owned(),
        Role::Streams(part) => return format!("output_{part:?}"), // no files of the family
        Role::Layer(layer, part) => (layer, part),
    };
    format!("blk.{layer}.{}", gguf_part(family, part))
}

/// Name of a layer's weight in GGUF files.
fn gguf_part(family: ModelFamily, part: LayerRole) -> &'static str {
    match part {
        LayerRole::AttentionNorm => "attn_norm",
        LayerRole::Query | LayerRole::Key | LayerRole::Value if family.joins_qkv() => "attn_qkv",
        LayerRole::Gate if family.joins_gate_up() => "ffn_up",
        LayerRole::Query => "attn_q",
        LayerRole::Key => "attn_k",
        LayerRole::Value => "attn_v",
        LayerRole::AttentionOutput => "attn_output",
        LayerRole::AttentionGate => "attn_gate",
        LayerRole::QueryNorm => "attn_q_norm",
        LayerRole::KeyNorm => "attn_k_norm",
        LayerRole::Sinks => "attn_sinks",
        LayerRole::PostAttentionNorm => "post_attention_norm",
        LayerRole::FfnNorm => family.file_names().gguf_ffn_norm,
        LayerRole::Gate => "ffn_gate",
        LayerRole::Up => "ffn_up",
        LayerRole::Down => "ffn_down",
        LayerRole::PostFfnNorm => "post_ffw_norm",
        LayerRole::Router | LayerRole::RouterScale => "ffn_gate_inp",
        LayerRole::RouterChoice => "exp_probs_b",
        LayerRole::ExpertGate(_) => "ffn_gate_exps",
        LayerRole::ExpertUp(_) => "ffn_up_exps",
        LayerRole::ExpertDown(_) | LayerRole::ExpertScales => "ffn_down_exps",
        LayerRole::SharedRouter => "ffn_gate_inp_shexp",
        LayerRole::SharedGate => "ffn_gate_shexp",
        LayerRole::SharedUp => "ffn_up_shexp",
        LayerRole::SharedDown => "ffn_down_shexp",
        LayerRole::QueryDown => "attn_q_a",
        LayerRole::QueryDownNorm => "attn_q_a_norm",
        LayerRole::QueryUp => "attn_q_b",
        LayerRole::LatentDown => "attn_kv_a_mqa",
        LayerRole::LatentNorm => "attn_kv_a_norm",
        LayerRole::LatentUp => "attn_kv_b",
        LayerRole::KeyUp(_) => "attn_k_b",
        LayerRole::ValueUp(_) => "attn_v_b",
        LayerRole::IndexerQuery => "indexer.attn_q_b",
        LayerRole::IndexerKey => "indexer.attn_k",
        LayerRole::IndexerNorm => "indexer.k_norm",
        LayerRole::IndexerQueryNorm => "indexer.q_norm",
        LayerRole::IndexerWeights => "indexer.proj",
        LayerRole::DenseNorm => "post_ffw_norm_1",
        LayerRole::BesideNorm => "pre_ffw_norm_2",
        LayerRole::PostBesideNorm => "post_ffw_norm_2",
        LayerRole::PerLayerGate => "inp_gate",
        LayerRole::PerLayerOutput => "proj",
        LayerRole::PostPerLayerNorm => "post_norm",
        LayerRole::OutputScale => "layer_output_scale",
        other => gguf_mixer_part(other),
    }
}

/// [`gguf_part`] of mixers other than attention, and of streams.
const fn gguf_mixer_part(part: LayerRole) -> &'static str {
    match part {
        LayerRole::DeltaQkv => "attn_qkv",
        LayerRole::DeltaGate => "attn_gate",
        LayerRole::DeltaQkvGate | LayerRole::MambaInput => "ssm_in",
        LayerRole::DeltaStep => "ssm_beta",
        LayerRole::DeltaDecay => "ssm_alpha",
        LayerRole::DeltaStepDecay => "ssm_ba",
        LayerRole::DeltaConv
        | LayerRole::DeltaQueryConv
        | LayerRole::DeltaKeyConv
        | LayerRole::DeltaValueConv => "ssm_conv1d",
        LayerRole::DeltaBias => "ssm_dt",
        LayerRole::DeltaScale => "ssm_a",
        LayerRole::DeltaNorm => "ssm_norm",
        LayerRole::DeltaOutput => "ssm_out",
        LayerRole::MambaSkip => "ssm_d",
        LayerRole::LaurelDown => "laurel_l",
        LayerRole::LaurelUp => "laurel_r",
        LayerRole::LaurelNorm => "laurel_post_norm",
        LayerRole::ConvQuery | LayerRole::ConvKey | LayerRole::ConvValue => "shortconv.in_proj",
        LayerRole::ConvTaps => "shortconv.conv",
        LayerRole::ConvOutput => "shortconv.out_proj",
        _ => "no_files", // of families that have no GGUF files
    }
}

/// Name of a weight of Qwen's multi-token prediction layer. Here its number follows the model's
/// last layer; files have other names for it.
pub(super) fn prediction_stem(folder: &HfFolder, role: Role, stem: &str) -> Option<String> {
    let Role::Layer(layer, _) = role else {
        return None;
    };
    let (model, part) = stem.split_once(&format!(".layers.{layer}."))?;
    let norm = |model: &str, layer| format!("{model}.layers.{layer}.input_layernorm.weight");
    let is_prediction = !folder.has(&norm(model, layer)) && folder.has(&norm("mtp", 0));
    is_prediction.then(|| format!("mtp.layers.0.{part}"))
}

/// Name of a weight of DeepSeek V4: on the hub without a prefix, otherwise as transformers saves
/// it.
pub(super) fn deepseek4_stem(folder: &HfFolder, stem: &str) -> Option<String> {
    let own = stem.strip_prefix("model.");
    let own = own.filter(|_| matches!(model_type(folder), Some("deepseek_v4" | "deepseek_v41")))?;
    if folder.has("embed.weight") {
        return Some(own.to_owned());
    }
    Some(match own {
        "embed" => "model.embed_tokens".to_owned(),
        "head" => "head".to_owned(),
        _ => stem
            .replace(".hc_head_", ".hc_head.hc_")
            .replace(".attn.kv_norm", ".attn.norm")
            .replace(".compressor.kv_norm", ".compressor.norm"),
    })
}

/// Name of a weight in folders saved by transformers 5 or by mlx-lm, where these rename what is
/// published.
pub(super) fn renamed_stem(folder: &HfFolder, stem: &str) -> Option<String> {
    let pairs: &[(&str, &str)] = match model_type(folder)? {
        "kimi_linear" => &[
            (".mlp.", ".block_sparse_moe."), // dense, by transformers
            (".block_sparse_moe.gate.e_score", ".mlp.e_score"),
            (".block_sparse_moe.", ".mlp."),
            ("_conv1d", "_conv.conv"),
        ],
        "lfm2_moe" => &[
            ("feed_forward.w1", "feed_forward.gate_proj"),
            ("feed_forward.w3", "feed_forward.up_proj"),
            ("feed_forward.w2", "feed_forward.down_proj"),
        ],
        _ => return None,
    };
    let has = |stem: &str| folder.has(stem) || folder.has_weight(&format!("{stem}.weight"));
    if has(stem) {
        return None;
    }
    let mut renamed = pairs.iter().map(|(own, other)| stem.replace(own, other));
    renamed.find(|name| has(name))
}

/// Prefix of a folder's tensor names. Multimodal models have a prefix for the text part, in
/// transformers' or in MLX's order.
pub(super) fn prefix(folder: &HfFolder) -> &'static str {
    let begins = ["model.language_model", "language_model.model", "backbone"];
    let there = |begin: &&str| {
        let has = |name: &str| folder.has(&format!("{begin}.{name}.weight"));
        has("embed_tokens") || has("embeddings")
    };
    begins.into_iter().find(there).unwrap_or("model")
}

/// Tensor names in the Hugging Face layout: `modeling_llama.py`, `modeling_gemma4.py` of
/// transformers.
pub(super) fn hf_stem(names: &FileNames, model: &str, role: Role) -> String {
    if let Some(name) = (names.hf_own)(role) {
        return match role {
            Role::Layer(layer, _) => format!("{model}.layers.{layer}.{name}"),
            _ => format!("{model}.{name}"),
        };
    }
    let (layer, part) = match role {
        Role::TokenEmbedding => return format!("{model}.embed_tokens"),
        Role::OutputNorm => return format!("{model}.norm"),
        Role::Output if model == "language_model.model" => {
            return "language_model.lm_head".to_owned(); // MLX's order
        }
        Role::Output => return "lm_head".to_owned(),
        Role::RopeFactors => return "rope_freqs".to_owned(),
        Role::ShortRopeFactors => return "rope_factors_short".to_owned(),
        Role::LongRopeFactors => return "rope_factors_long".to_owned(),
        Role::PerLayerEmbedding => return format!("{model}.embed_tokens_per_layer"),
        Role::PerLayerProjection => return format!("{model}.per_layer_model_projection"),
        Role::PerLayerNorm => return format!("{model}.per_layer_projection_norm"),
        Role::Streams(StreamPart::Expand(i)) => return format!("{model}.altup_projections.{i}"),
        Role::Streams(StreamPart::Collapse(i)) => {
            return format!("{model}.altup_unembed_projections.{i}");
        }
        Role::Streams(part) if part.is_of_constrained() => {
            return format!("{model}.hc_head_{}", stream_part(part));
        }
        Role::Streams(part) => {
            return format!("{model}.hyper_connection_mixer.{}", stream_part(part));
        }
        Role::Layer(layer, part) => (layer, part),
    };
    if let LayerRole::NgramTablePart(i) = part {
        let table = hf_stem(names, model, Role::Layer(layer, LayerRole::NgramTable));
        return format!("{table}.shard_{i}");
    }
    if let LayerRole::AttentionStreams(stream) | LayerRole::FfnStreams(stream) = part {
        let (is_ffn, name) = (part.is_of_ffn(), stream_part(stream));
        let name = match (stream.is_of_constrained(), is_ffn) {
            (true, true) => format!("hc_ffn_{name}"),
            (true, false) => format!("hc_attn_{name}"),
            (false, true) => format!("mlp_hyper_connection.{name}"),
            (false, false) => format!("attn_hyper_connection.{name}"),
        };
        return format!("{model}.layers.{layer}.{name}");
    }
    if let Some(name) = hf_expert(names, part) {
        return format!("{model}.layers.{layer}.{name}");
    }
    format!("{model}.layers.{layer}.{}", hf_part(names, part))
}

/// Name of a part of a mix of residual streams: `modeling_qwen4_exp.py` of transformers; of
/// constrained ones as on the hub.
const fn stream_part(part: StreamPart) -> &'static str {
    match part {
        StreamPart::Norm => "hc_norm",
        StreamPart::Down => "input_mix_weight_down",
        StreamPart::Up => "input_mix_weight_up",
        StreamPart::Inject => "block_inject_weight",
        StreamPart::Weigh => "fn",
        StreamPart::WeighBias => "base",
        StreamPart::WeighScale => "scale",
        _ => "", // named by their family
    }
}

/// Name of a part of a layer in the Hugging Face layout; not of experts.
fn hf_part(names: &FileNames, part: LayerRole) -> &'static str {
    let joined = match part {
        LayerRole::Query | LayerRole::Key | LayerRole::Value => names.qkv,
        LayerRole::Gate | LayerRole::Up => names.gate_up,
        _ => None,
    };
    if let Some(joined) = joined {
        return joined;
    }
    match part {
        LayerRole::AttentionNorm => "input_layernorm",
        LayerRole::Query => "self_attn.q_proj",
        LayerRole::Key => "self_attn.k_proj",
        LayerRole::Value => "self_attn.v_proj",
        LayerRole::AttentionOutput => "self_attn.o_proj",
        LayerRole::AttentionGate => "self_attn.g_proj",
        LayerRole::QueryNorm => "self_attn.q_norm",
        LayerRole::KeyNorm => "self_attn.k_norm",
        LayerRole::Sinks => "self_attn.sinks",
        LayerRole::FfnNorm => names.hf_ffn_norm,
        LayerRole::PostAttentionNorm => "post_attention_layernorm",
        LayerRole::Gate => "mlp.gate_proj",
        LayerRole::Up => "mlp.up_proj",
        LayerRole::Down => "mlp.down_proj",
        LayerRole::PostFfnNorm => "post_feedforward_layernorm",
        LayerRole::ExpertsDown => "block_sparse_moe.routed_expert_down_proj",
        LayerRole::ExpertsNorm => "block_sparse_moe.routed_expert_norm",
        LayerRole::ExpertsUp => "block_sparse_moe.routed_expert_up_proj",
        LayerRole::QueryDown => "self_attn.q_a_proj",
        LayerRole::QueryDownNorm => "self_attn.q_a_layernorm",
        LayerRole::QueryUp => "self_attn.q_b_proj",
        LayerRole::LatentDown => "self_attn.kv_a_proj_with_mqa",
        LayerRole::LatentNorm => "self_attn.kv_a_layernorm",
        LayerRole::LatentUp => "self_attn.kv_b_proj",
        LayerRole::KeyUp(_) => "self_attn.embed_q",
        LayerRole::ValueUp(_) => "self_attn.unembed_out",
        LayerRole::IndexerQuery => "self_attn.indexer.wq_b",
        LayerRole::IndexerKey => "self_attn.indexer.wk",
        LayerRole::IndexerNorm => "self_attn.indexer.k_norm",
        LayerRole::IndexerQueryNorm => "self_attn.indexer.q_norm",
        LayerRole::IndexerWeights => "self_attn.indexer.weights_proj",
        LayerRole::IndexerGate => "self_attn.indexer.index_kpool_compress_gate",
        LayerRole::IndexerGateBias => "self_attn.indexer.index_kpool_compress_ape",
        LayerRole::RouterScale => "router.scale",
        LayerRole::ExpertScales => "router.per_expert_scale",
        LayerRole::DenseNorm => "post_feedforward_layernorm_1",
        LayerRole::BesideNorm => "pre_feedforward_layernorm_2",
        LayerRole::PostBesideNorm => "post_feedforward_layernorm_2",
        LayerRole::PerLayerGate => "per_layer_input_gate",
        LayerRole::PerLayerOutput => "per_layer_projection",
        LayerRole::PostPerLayerNorm => "post_per_layer_input_norm",
        LayerRole::OutputScale => "layer_scalar",
        other => hf_mixer_part(other),
    }
}

/// [`hf_part`] of mixers other than attention.
fn hf_mixer_part(part: LayerRole) -> &'static str {
    match part {
        LayerRole::DeltaQkv => "linear_attn.in_proj_qkv",
        LayerRole::DeltaGate => "linear_attn.in_proj_z",
        LayerRole::DeltaQkvGate => "linear_attn.in_proj_qkvz",
        LayerRole::DeltaStep => "linear_attn.in_proj_b",
        LayerRole::DeltaDecay => "linear_attn.in_proj_a",
        LayerRole::DeltaStepDecay => "linear_attn.in_proj_ba",
        LayerRole::DeltaConv => "linear_attn.conv1d",
        LayerRole::DeltaBias => "linear_attn.dt_bias",
        LayerRole::DeltaScale => "linear_attn.A_log",
        LayerRole::DeltaNorm => "linear_attn.norm",
        LayerRole::DeltaOutput => "linear_attn.out_proj",
        LayerRole::DeltaGateDown => "self_attn.g_a_proj",
        LayerRole::DeltaDecayDown => "self_attn.f_a_proj",
        LayerRole::DeltaQueryConv => "self_attn.q_conv1d",
        LayerRole::DeltaKeyConv => "self_attn.k_conv1d",
        LayerRole::DeltaValueConv => "self_attn.v_conv1d",
        LayerRole::ConvQuery | LayerRole::ConvKey | LayerRole::ConvValue => "conv.in_proj",
        LayerRole::ConvTaps => "conv.conv",
        LayerRole::MambaInput | LayerRole::MambaSkip => "", // named by their family
        LayerRole::LaurelDown => "laurel.linear_left",
        LayerRole::LaurelUp => "laurel.linear_right",
        LayerRole::LaurelNorm => "laurel.post_laurel_norm",
        LayerRole::ConvOutput => "conv.out_proj",
        other => unreachable!("{other:?} is a part of experts"),
    }
}

/// Names of unstacked experts in the Hugging Face layout.
fn hf_expert(names: &FileNames, part: LayerRole) -> Option<String> {
    let FileNames { block, shared, .. } = names;
    let expert = |e: usize, name: usize| format!("{block}.experts.{e}.{}", names.expert[name]);
    Some(match part {
        LayerRole::Router => names.router.to_owned(),
        LayerRole::RouterChoice => names.choice.to_owned(),
        LayerRole::ExpertGate(e) => expert(e.index, 0),
        LayerRole::ExpertUp(e) => expert(e.index, 1),
        LayerRole::ExpertDown(e) => expert(e.index, 2),
        LayerRole::SharedRouter => format!("{block}.shared_expert_gate"),
        LayerRole::SharedGate => format!("{shared}.gate_proj"),
        LayerRole::SharedUp => format!("{shared}.up_proj"),
        LayerRole::SharedDown => format!("{shared}.down_proj"),
        _ => return None,
    })
}

impl LayerRole {
    /// Index of the expert or head whose matrices a GGUF file stacks.
    pub(super) const fn expert(self) -> Option<Nth> {
        match self {
            Self::ExpertGate(e) | Self::ExpertUp(e) | Self::ExpertDown(e) => Some(e),
            Self::KeyUp(head) | Self::ValueUp(head) => Some(head),
            _ => None,
        }
    }

    /// Whether it is of a layer's second half.
    pub(super) const fn is_of_ffn(self) -> bool {
        matches!(
            self,
            Self::FfnNorm
                | Self::Gate
                | Self::Up
                | Self::Down
                | Self::Router
                | Self::RouterChoice
                | Self::ExpertTable
                | Self::ExpertGate(_)
                | Self::ExpertUp(_)
                | Self::ExpertDown(_)
                | Self::SharedGate
                | Self::SharedUp
                | Self::SharedDown
                | Self::FfnStreams(_)
        )
    }

    /// Whether its name in the Hugging Face layout has no suffix.
    pub(super) const fn is_bare_in_hf(self) -> bool {
        if let Self::AttentionStreams(part) | Self::FfnStreams(part) = self {
            return part.is_of_constrained() || matches!(part, StreamPart::OutputScale);
        }
        matches!(
            self,
            Self::Sinks
                | Self::RouterChoice
                | Self::RunBias(_)
                | Self::ExpertTable
                | Self::RouterScale
                | Self::ExpertScales
                | Self::OutputScale
                | Self::DeltaBias
                | Self::DeltaScale
                | Self::IndexerGate
                | Self::IndexerGateBias
                | Self::MambaSkip
        )
    }
}

impl StreamPart {
    /// Whether it is of constrained streams, whose names have no suffix.
    pub(super) const fn is_of_constrained(self) -> bool {
        matches!(self, Self::Weigh | Self::WeighBias | Self::WeighScale)
    }
}
