//! Shapes of configurations, compared with the catalogue's.

use serde_json::json;

use super::*;

#[test]
fn a_configuration_with_experts_and_low_ranks_reads() {
    let config = json!({
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129_280,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "tie_word_embeddings": false
    });
    let shape = from_config("deepseek", &config).unwrap();
    let catalogue = paceline_plan::Catalogue::builtin().unwrap();
    let known = catalogue.model("DeepSeek-V3.1-671B").unwrap();
    let known = known.shape(16.0).unwrap();
    assert_eq!((shape.attention, shape.moe), (known.attention, known.moe));
    let params = shape.params();
    assert!((params / 671e9 - 1.0).abs() < 0.01, "{params}");
}

#[test]
fn a_configuration_with_names_of_its_own_reads() {
    let config = json!({
        "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "vocab_size": 100_352, "attn_config": { "kv_n_heads": 8 },
        "ffn_config": { "ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4 }
    });
    let shape = from_config("dbrx", &config).unwrap();
    let catalogue = paceline_plan::Catalogue::builtin().unwrap();
    let known = catalogue.model("DBRX-132B").unwrap().shape(16.0).unwrap();
    assert_eq!((shape.attention, shape.moe), (known.attention, known.moe));
    assert_eq!((shape.layers, shape.width), (known.layers, known.width));
}

#[test]
fn layers_with_a_window_are_counted() {
    let with = |more: Value| {
        let mut config = json!({
            "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
            "vocab_size": 262_144, "sliding_window": 512
        });
        let fields = config.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        let sliding = from_config("x", &config).unwrap().sliding;
        sliding.map(|sliding| (sliding.layers, sliding.window))
    };
    let kinds = ["sliding_attention", "full_attention", "sliding_attention"];
    for (more, expected) in [
        (json!({ "model_type": "gemma3_text" }), Some((15, 512))),
        (json!({ "sliding_window_pattern": 3 }), Some((12, 512))),
        (json!({ "layer_types": kinds }), Some((2, 512))),
        (json!({ "layer_types": ["full_attention"] }), None),
        (json!({ "model_type": "qwen2" }), None),
        (
            json!({ "model_type": "gemma3", "sliding_window": null }),
            None,
        ),
    ] {
        assert_eq!(with(more.clone()), expected, "{more}");
    }
}

#[test]
fn layers_without_a_cache_of_their_own_are_counted() {
    let kind = |i| ["sliding_attention", "full_attention"][usize::from(i % 5 == 0)];
    let kinds: Vec<&str> = (1..=35).map(kind).collect();
    let config = json!({ "text_config": {
        "model_type": "gemma4_text", "hidden_size": 1536, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "intermediate_size": 6144, "vocab_size": 262_144, "sliding_window": 512,
        "num_kv_shared_layers": 20, "layer_types": kinds
    }});
    let shape = from_config("e2b", &config).unwrap();
    let expected = Caches {
        borrowed: 20,
        together: 22, // from layer 13, the last windowed one with a cache
        ..Caches::default()
    };
    assert_eq!(shape.caches, expected);
    assert_eq!(shape.row_layers(0..35), 15.0);
    assert!(shape.can_cut(13) && !shape.can_cut(14));
}

/// Of 40 layers ten have keys and values. A page of the others has 2 MiB of state, 2.5 MiB of
/// inputs and keys, and 1 MiB of differences.
#[test]
fn states_are_counted() {
    let config = json!({
        "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120,
        "vocab_size": 248_320, "full_attention_interval": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4
    });
    let shape = from_config("delta", &config).unwrap();
    assert_eq!((shape.caches.states, shape.row_layers(0..40)), (30, 10.0));
    let bytes = shape.state_bytes(0..40);
    assert!((345e6..349e6).contains(&bytes), "{bytes}");
}

/// Mamba 2 and short convolutions, whose layers the files list in their own ways.
#[test]
fn other_states_are_counted() {
    let usual = json!({
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 5632, "vocab_size": 65_536
    });
    for (more, expected) in [
        (
            json!({
                "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M*-M-",
                "num_hidden_layers": 9, "ssm_state_size": 128, "n_groups": 8,
                "mamba_num_heads": 64, "mamba_head_dim": 64
            }),
            (5, 4),
        ),
        (
            json!({
                "model_type": "lfm2", "num_hidden_layers": 3, "conv_L_cache": 3,
                "layer_types": ["conv", "conv", "full_attention"]
            }),
            (3, 2),
        ),
    ] {
        let mut config = usual.clone();
        let fields = config.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        let shape = from_config("x", &config).unwrap();
        assert_eq!((shape.layers, shape.caches.states), expected, "{more}");
        assert!(shape.caches.state_bytes > 0.0 && shape.caches.state_params > 0.0);
    }
}

/// Qwen1.5-MoE with every second layer dense; its shared expert is four times as wide as
/// another.
#[test]
fn interleaved_mixtures_and_wide_shared_experts_read() {
    let config = json!({
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 5632, "vocab_size": 151_936,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 2
    });
    let shape = from_config("x", &config).unwrap();
    let moe = shape.moe.unwrap();
    assert_eq!((moe.shared, moe.every), (4, 2));
    assert_eq!(shape.mixtures(&(0..24)), 12);
    shape.check().unwrap();
}

#[test]
fn a_missing_field_is_named() {
    let error = from_config("x", &json!({ "vocab_size": 5 })).unwrap_err();
    assert!(error.to_string().contains("num_attention_heads"), "{error}");
}

#[test]
fn tables_of_ngrams_take_no_memory() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/golden/hf");
    let of = |name| {
        from_files(&Path::new(root).join(name), None)
            .unwrap()
            .weight_bytes()
    };
    let more = of("qwen4-ngrams-bf16") - of("qwen4-bf16");
    let matrices = 2.0 * 2.0 * 96.0 * (192.0 + 64.0); // of two layers; tables would be a half more
    assert!((1.0..1.2).contains(&(more / matrices)), "{more}");
}
