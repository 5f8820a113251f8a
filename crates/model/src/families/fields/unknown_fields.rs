//! Names fields of `config.json` that no reader knows.
//!
//! Tools add fields of their own to `config.json`, so an unknown one is no error, unlike an unknown
//! key of a GGUF file. But it may name a computation that paceline lacks. Callers tell the user.

use serde_json::Value;

use super::{ConfigFields, text_part};
use crate::ModelSource;

/// Fields that a reader of some family knows, computes or refuses. A family's own list is not
/// needed: no field has two meanings.
const READ: &str = "\
    activation_situ_beta activation_situ_linear_beta activation_sparsity_pattern altup_active_idx \
    altup_correct_scale altup_num_inputs attention_bias attention_k_eq_v attention_multiplier \
    attention_output_gate attn_config attn_logit_softcapping attn_output_gate attn_res_block_size \
    attn_type_list block_auto_adjust_ff_dim block_dim block_ff_dim block_ffn_dim_multiplier \
    block_multiple_of candidate_block_size candidate_source_layer_id candidate_topk_blocks \
    clip_qkv compress_rate_csa compress_rate_hca compress_rates compress_ratios \
    compress_rope_theta conv_L_cache conv_bias conv_kernel d_model decoder_sparse_step \
    dense_intermediate_size embedding_multiplier enable_moe_block engram_compressed_vocab_size \
    engram_head_dim engram_layer_ids engram_max_ngram_size engram_n_heads engram_num_embeddings \
    engram_pad_id engram_pad_token_id engram_vocab_size expand experts_per_token ffn_config \
    final_logit_softcapping first_k_dense_replace full_attention_interval full_attn_idxs gate_temp \
    global_head_dim hc_count hc_eps hc_lowrank hc_mult hc_sinkhorn_iters head_dim heads_per_ngram \
    hidden_act hidden_activation hidden_size hidden_size_per_layer_input hybrid_override_pattern \
    index_block_size index_head_dim index_kpool index_kpool_always_select_tail \
    index_kpool_compress index_local_blocks index_n_heads index_skip_topk_offset \
    index_source_layer_ids index_topk index_topk_blocks index_topk_freq index_topk_pattern \
    indexer_budget indexer_compress_ratio indexer_head_dim indexer_kv_heads indexer_n_heads \
    indexer_types intermediate_size is_causal kv_lora_rank kv_source_layer_ids latent_moe_use_norm \
    laurel_rank layer_norm_epsilon layer_types layers_block_type linear_attn_config \
    linear_conv_kernel_dim linear_head_dim linear_key_head_dim linear_lower_bound linear_num_heads \
    linear_num_key_heads linear_num_value_heads linear_value_head_dim llama_4_scaling_beta \
    logit_scale logits_scaling make_ngram_vocab_size_divisible_by mamba_head_dim mamba_hidden_act \
    mamba_num_heads mamba_proj_bias max_position_embeddings max_seq_len max_window_layers mhc \
    mla_use_nope mla_use_output_gate mlp_bias mlp_hidden_act mlp_layer_types mlp_only_layers \
    model_max_length model_type moe_intermediate_size moe_latent_size moe_layer_freq \
    moe_renormalize moe_router_activation_func moe_shared_expert_intermediate_size n_group \
    n_groups n_heads n_layers n_routed_experts n_shared_experts ngram_size ngram_vocab_size_base \
    no_rope_layer_interval no_rope_layers norm_eps norm_topk_prob num_attention_heads \
    num_dense_layers num_expert_group num_experts num_experts_per_tok num_experts_per_token \
    num_global_key_value_heads num_hash_layers num_hidden_layers num_key_value_heads \
    num_kv_shared_layers num_local_experts num_nextn_predict_layers num_shared_experts o_groups \
    o_lora_rank original_max_position_embeddings output_gate_type partial_rotary_factor \
    per_layer_config ple_conv_kernel_size ple_embed_dim ple_layer_ids q_lora_rank qk_head_dim \
    qk_nope_head_dim qk_norm_type qk_rope_head_dim qkv_bias query_pre_attn_scalar \
    residual_multiplier rms_norm_eps rope_interleave rope_local_base_freq rope_parameters \
    rope_scaling rope_theta rotary_dim routed_expert_hidden_size routed_scaling_factor \
    router_logit_softcapping scale_attn_by_inverse_layer_idx scoring_func seed \
    shared_expert_intermediate_size shared_intermediate_size sliding_window sliding_window_pattern \
    sparse_attention_config split_ngram_parts ssm_state_size swiglu_alpha swiglu_limit \
    tie_embedding tie_word_embeddings time_step_limit top_k_experts topk_group topk_method \
    use_bias use_bidirectional_attention use_conv_bias use_double_wide_mlp use_expert_bias \
    use_gemma_norm use_grouped_topk use_qk_norm use_routing_bias use_sliding_window v_head_dim \
    vocab_size vocab_size_per_layer_input";

/// Fields that change nothing in a forward pass of text. They are of training, storage, tokens,
/// other software and other parts of a model. Source: the configuration classes of transformers
/// 5.24, and folders on the hub.
const NEUTRAL: &str = "\
    altup_coef_clip architectures attention_dropout attn_implementation attn_pdrop audio_config \
    audio_token_id auto_map bad_words_ids boa_token_id boi_token_id boi_token_index bos_token_id \
    chunk_size chunk_size_feed_forward classifier_dropout conversion diversity_penalty dtype \
    emb_pdrop embd_pdrop encoder_no_repeat_ngram_size eoa_token_index eoi_token_id eoi_token_index \
    eos_token_id ep_size expert_dtype finetuning_task hidden_dropout hidden_dropout_prob id2label \
    ignore_index image_token_id image_token_index index_share_for_mtp_iteration \
    indexer_rope_interleave initial_context_length initializer_cutoff_factor initializer_factor \
    initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id \
    language_model_only length_penalty mamba_ssm_cache_dtype max_length max_model_len min_length \
    mm_tokens_per_image moe_implementation moe_router_dtype moe_shared_expert_overlap \
    no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep num_return_sequences \
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp \
    problem_type projector_hidden_act pruned_heads quantization quantization_config \
    repetition_penalty resid_pdrop residual_in_fp32 return_dict rope_theta_scaling \
    router_aux_loss_coef router_jitter_noise sep_token_id seq_aux task_specific_params temperature \
    text_config time_step_floor time_step_max time_step_min tokenizer_class top_k top_p \
    torch_dtype transformers_version typical_p use_cache use_mamba_kernels video_token_id \
    vision_config vision_end_token_id vision_start_token_id";

/// Starts of names of fields that change nothing: private ones, of training, of other tools.
const NEUTRAL_STARTS: [&str; 10] = [
    "_",
    "aux_loss",
    "dspark_",
    "mlx_",
    "mtp_",
    "num_mtp_",
    "rescale_prenorm",
    "unsloth",
    "use_mtp",
    "z_loss",
];

/// Fields of the text part of `config.json` that no reader knows and that are not known to change
/// nothing, in alphabetical order. Fields that are unset (null, false) are not named. GGUF files
/// with unknown keys are refused instead.
pub(super) fn unknown_fields(fields: &ConfigFields<'_>) -> Vec<String> {
    let ConfigFields::Hf(Value::Object(object)) = fields else {
        return Vec::new();
    };
    let is_known = |name: &str| {
        let mut listed = READ.split(' ').chain(NEUTRAL.split(' '));
        listed.any(|known| known == name)
            || NEUTRAL_STARTS.iter().any(|start| name.starts_with(start))
    };
    let set = object
        .iter()
        .filter(|(_, value)| !matches!(value, Value::Null | Value::Bool(false)));
    let unknown = set.filter(|(name, _)| !is_known(name));
    let mut names: Vec<String> = unknown.map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

/// Fields of `config.json` that paceline does not know and that may change the computation, for a
/// warning. Empty for GGUF files.
pub(crate) fn of_source(source: &ModelSource) -> Vec<String> {
    match source {
        ModelSource::Gguf(_) => Vec::new(),
        ModelSource::Hf(folder) => unknown_fields(&ConfigFields::Hf(text_part(folder.config()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fields_that_may_change_the_computation_are_named() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 64, "torch_dtype": "float16", "_name": "x",
            "unsloth_version": "2026.1", "use_new_norm": true, "use_old_norm": false,
            "score_power": 2.0, "new_bias": null
        });
        let got = unknown_fields(&ConfigFields::Hf(&config));
        assert_eq!(got, ["score_power", "use_new_norm"]);
    }

    #[test]
    fn no_field_of_the_golden_folders_is_unknown() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/golden/hf");
        for entry in std::fs::read_dir(root)
            .expect("the folders are there")
            .flatten()
        {
            if let Ok(text) = std::fs::read_to_string(entry.path().join("config.json")) {
                let config: Value = serde_json::from_str(&text).expect("JSON");
                let unknown = unknown_fields(&ConfigFields::Hf(text_part(&config)));
                assert!(
                    unknown.is_empty(),
                    "{}: {unknown:?}",
                    entry.path().display()
                );
            }
        }
    }
}
