//! Names GGUF keys of the architecture that no reader knows.
//!
//! llama.cpp adds a key where models differ, so an unknown key means an unknown computation. Keys
//! that are known but not computed are in `unsupported_keys`.

use super::ConfigFields;
use crate::Error;
use crate::families::ModelFamily;

/// Keys of every family. A name that ends with a point or an underscore is a prefix.
const ALL: &str = "\
    attention.causal attention.clamp_kqv attention.head_count attention.head_count_kv \
    attention.key_length attention.layer_norm_epsilon attention.layer_norm_rms_epsilon \
    attention.max_alibi_bias attention.output_scale attention.scale attention.sliding_window \
    attention.temperature_scale attention.value_length attention.value_scale \
    attn_logit_softcapping block_count context_length embedding_length embedding_scale expert_ \
    feed_forward_length final_logit_softcapping leading_dense_block_count logit_scale \
    nextn_predict_layers pooling_type residual_scale router_logit_softcapping swin_norm \
    tensor_data_layout use_parallel_residual vocab_size";

/// Parts of rotary embeddings that every family reads, or that change nothing for text.
const ROPE: &str = "\
    rope.dimension_count rope.dimension_sections rope.freq_base rope.scale_linear \
    rope.scaling.alpha rope.scaling.attn_factor rope.scaling.factor rope.scaling.finetuned \
    rope.scaling.original_context_length rope.scaling.type rope.scaling.yarn_attn_factor \
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor";

/// Other parts of a multimodal file, which serves its text part.
const OTHER_PARTS: &str = "vision. audio. mm.";

/// Keys of families with windows.
const WINDOWS: &str = "attention.sliding_window_pattern rope.freq_base_swa";

impl ConfigFields<'_> {
    /// Refuses keys of the architecture that are not known for `family`.
    ///
    /// # Errors
    /// [`Error::UnknownKey`] for the first.
    pub(super) fn check_known_keys(&self, family: ModelFamily) -> Result<(), Error> {
        let Self::Gguf {
            metadata,
            architecture,
            ..
        } = self
        else {
            return Ok(());
        };
        let own = |key: &str| {
            let name = key.strip_prefix(architecture)?.strip_prefix('.')?;
            (!is_known(family, name)).then(|| key.to_owned())
        };
        match metadata.iter().find_map(|(key, _)| own(key)) {
            None => Ok(()),
            Some(key) => Err(Error::UnknownKey {
                key,
                family: family.name(),
            }),
        }
    }
}

fn is_known(family: ModelFamily, name: &str) -> bool {
    let lists = [ALL, ROPE, OTHER_PARTS, WINDOWS, of_family(family)];
    let is_listed = |known: &str| match known.ends_with(['.', '_']) {
        true => name.starts_with(known),
        false => name == known,
    };
    lists
        .iter()
        .any(|list| list.split_whitespace().any(is_listed))
}

/// Keys that the readers of one family know.
const fn of_family(family: ModelFamily) -> &'static str {
    match family {
        ModelFamily::Gemma3 => {
            "attention.query_scalar dense_2_feat_in dense_2_feat_out dense_3_feat_in \
             dense_3_feat_out"
        }
        ModelFamily::Gemma3n => {
            "activation_sparsity_scale altup. attention.shared_kv_layers \
             embedding_length_per_layer_input"
        }
        ModelFamily::Gemma4 => {
            "attention.key_length_swa attention.shared_kv_layers attention.value_length_swa \
             embedding_length_per_layer_input rope.dimension_count_swa"
        }
        // Of Qwen3-VL: layers that pictures are added to.
        ModelFamily::Qwen3 | ModelFamily::Qwen3Moe => "n_deepstack_layers",
        ModelFamily::Lfm2 | ModelFamily::Lfm2Moe => "shortconv.l_cache",
        ModelFamily::Mistral => "attention.temperature_length rope.scaling.yarn_log_multiplier",
        ModelFamily::DeepSeek => {
            "attention.indexer. attention.key_length_mla attention.kv_lora_rank \
             attention.q_lora_rank attention.temperature_length attention.value_length_mla \
             rope.scaling.yarn_log_multiplier"
        }
        ModelFamily::NemotronH => "ssm.",
        ModelFamily::Qwen3Next | ModelFamily::Qwen35 | ModelFamily::Qwen35Moe => {
            "attention.recurrent_layers full_attention_interval ssm."
        }
        _ => "",
    }
}
