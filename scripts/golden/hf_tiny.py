#!/usr/bin/env python3
"""Tiny random Hugging Face models and what `transformers` computes with them: hf_tiny.py [OUT [NAME...]]

OUT defaults to tests-data/golden/hf of this repository. For each model NAME (all of them) it writes
    NAME/                    config.json, model.safetensors (or shards and an index),
                             tokenizer.json, tokenizer_config.json: a folder as on the hub
    NAME.golden.safetensors  "logits" (positions, vocabulary), "hidden.I" (positions, width): I = 0
                             the embedding, I = n the residual stream after n layers, and "final",
                             the last of them after the output norm; all float32
    NAME.golden.json         prompt, greedy continuation, deviations that set the tolerance, versions

The model is read back from its folder, weights widened to float32, and run with eager attention in
float32. The weights are drawn by numpy from a fixed seed: the same numpy gives the same folders on
any machine; the goldens vary by rounding with the torch build.
Needs torch (a CPU build will do), transformers, tokenizers, safetensors, numpy: requirements.txt.
"""

import json
import sys
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM
from transformers.utils import logging

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY, PROMPT, GREEDY = 300, 40, 16
PAGES_PROMPT = 150  # of models whose states change at multiples of 64
PAD, EOS, BOS = 0, 1, 2  # Gemma's numbering

# The gap that we ask for between first and second logit of every greedy step, so that rounding
# of keys and values to half precision cannot turn the continuation.
GREEDY_GAP = 0.05

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 3,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "intermediate_size": 128,
    "head_dim": 32, "rms_norm_eps": 1e-6, "attention_bias": False, "sliding_window": 8,
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
}
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "use_sliding_window": False, "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "norm_topk_prob": False,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "attention_bias": False, "use_sliding_window": False, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
    "hidden_size": 96, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "attention_bias": True, "sliding_window": 8, "num_local_experts": 6,
    "num_experts_per_tok": 3, "tie_word_embeddings": False,
}
GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-6,
    "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 16, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
    "shared_intermediate_size": 0, "attn_type_list": [1, 1], "tie_word_embeddings": False,
}
DBRX = {
    "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 64, "n_heads": 4,
    "n_layers": 2, "max_seq_len": 256, "tie_word_embeddings": False,
    "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 500000.0},
    "ffn_config": {"ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 32, "moe_num_experts": 6,
                   "moe_top_k": 3, "moe_normalize_expert_weights": 1.0},
}
LATENT = {
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "attention_bias": False, "tie_word_embeddings": False,
}
DEEPSEEK_V3 = LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 32,
    "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
}
DEEPSEEK_V2 = LATENT | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
    "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 4.0,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "moe_layer_freq": 1,
}
GLM4_MOE_LITE = LATENT | {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
    "q_lora_rank": 64, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.8, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "qk_nope_head_dim": 64, "v_head_dim": 48, "rms_norm_eps": 1e-5,
}
MISTRAL4 = LATENT | {
    "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "q_lora_rank": 32,
    "kv_lora_rank": 64, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "num_hidden_layers": 2,
}
# Gated delta nets: three layers with a state and one of attention.
DELTA_NET = {
    "hidden_act": "silu", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "attention_bias": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}
QWEN3_NEXT = DELTA_NET | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4,
}
# Key heads larger than value heads, three value heads to each.
QWEN3_5 = DELTA_NET | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "intermediate_size": 128, "linear_key_head_dim": 32, "linear_num_value_heads": 6,
}
QWEN3_5_MOE = DELTA_NET | {
    "model_type": "qwen3_5_moe_text", "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "intermediate_size": 96,
    "head_dim": 16, "global_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "attention_bias": False, "sliding_window": 8,
    "final_logit_softcapping": 6.0, "vocab_size_per_layer_input": VOCABULARY,
    "use_bidirectional_attention": None, "tie_word_embeddings": True,
}
# With 32 elements of a head: three pairs are kept, those from the seventh on stretched.
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 1024}

# Name: (config, storage type, shards). "Old style" configs say `torch_dtype`, `rope_theta`,
# `rope_scaling`, as files on the hub up to 2025 do; "new style" ones say `dtype` and
# `rope_parameters`, as transformers 5 writes them. Both occur in the wild.
MODELS = {
    # Old style, tied head, no head_dim in the file.
    "llama-tied": (LLAMA | {
        "tie_word_embeddings": True, "rope_theta": 10000.0, "rope_scaling": None,
        "torch_dtype": "float32"}, torch.float32, 1),
    # New style, separate head, one KV head for all, bfloat16.
    "llama-untied-bf16": (LLAMA | {
        "tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "dtype": "bfloat16"}, torch.bfloat16, 1),
    # Old style, Llama 3.1 frequency scaling. With base 10000, 16 values a head and 64 original
    # positions the wavelengths 6.3, 20, 63, 199... fall into all three branches of its rule.
    "llama-rope3-sharded": (LLAMA | {
        "tie_word_embeddings": False, "rope_theta": 10000.0, "torch_dtype": "float32",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        torch.float32, 3),
    # Old style, tied, q/k/v biases, float16, three query heads to a KV head; the window is named
    # but not in use.
    "qwen2-f16": (QWEN2 | {
        "tie_word_embeddings": True, "rope_theta": 1000000.0, "torch_dtype": "float16"},
        torch.float16, 1),
    # New style, heads * head_dim (128) is not the width (64).
    "qwen3-bf16": (QWEN3 | {
        "tie_word_embeddings": False, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, torch.bfloat16, 1),
    # Old style: layer kinds by period, every third layer full, and no word about tying (the
    # family's default is tied). Scale of the scores is not head_dim ** -0.5.
    "gemma3-bf16": (GEMMA3 | {
        "num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24, "sliding_window_pattern": 3, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16"},
        torch.bfloat16, 1),
    # New style: layer kinds by list, no period; linear scaling of the full layers' positions.
    "gemma3-linear-bf16": (GEMMA3 | {
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
        "query_pre_attn_scalar": 32, "layer_types": [FULL, SLIDING, SLIDING, FULL],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}},
        "tie_word_embeddings": True, "dtype": "bfloat16"}, torch.bfloat16, 1),
    # Experts: weights that are made to sum to 1.
    "mixtral": (MIXTRAL | {
        "tie_word_embeddings": False, "rope_theta": 10000.0, "torch_dtype": "float32"},
        torch.float32, 1),
    # A dense layer between two with experts; a shared expert; weights as the softmax has them.
    "qwen2moe-bf16": (QWEN2_MOE | {
        "tie_word_embeddings": False, "rope_theta": 1000000.0, "mlp_only_layers": [1],
        "decoder_sparse_step": 1, "torch_dtype": "bfloat16"}, torch.bfloat16, 1),
    # Every second layer has experts.
    "qwen3moe-bf16": (QWEN3_MOE | {
        "tie_word_embeddings": False, "norm_topk_prob": True, "decoder_sparse_step": 2,
        "mlp_only_layers": [], "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, torch.bfloat16, 1),
    # As on the hub: experts in MXFP4, old style.
    "gpt-oss-mxfp4": (GPT_OSS | {
        "rope_theta": 150000.0, "rope_scaling": YARN, "torch_dtype": "bfloat16",
        "layer_types": [SLIDING, FULL, SLIDING], "experts_per_token": 3, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head"]}}, torch.bfloat16, 1),
    # New style: experts as floats, inputs by outputs; a limit that cuts; a ramp of whole pairs.
    "gpt-oss-bf16": (GPT_OSS | {
        "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "swiglu_limit": 0.75, "dtype": "bfloat16",
        "rope_parameters": YARN | {"rope_theta": 10000.0, "truncate": True}}, torch.bfloat16, 1),
    # As GLM 4.5's 355B: norms on heads; biases; weights that are scaled.
    "glm4moe-bf16": (GLM4_MOE | {
        "rope_theta": 1000000.0, "rope_scaling": None, "attention_bias": True,
        "use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "torch_dtype": "bfloat16"}, torch.bfloat16, 1),
    # As GLM 4.5 Air: no norms on heads; two dense layers, weights as the sigmoid has them.
    "glm4moe-air-bf16": (GLM4_MOE | {
        "attention_bias": True, "use_qk_norm": False, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "first_k_dense_replace": 2, "n_shared_experts": 2,
        "dtype": "bfloat16", "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        torch.bfloat16, 1),
    "minimax-m2-bf16": (MINIMAX_M2 | {
        "rope_theta": 5000000.0, "torch_dtype": "bfloat16"}, torch.bfloat16, 1),
    # As V3: groups of experts of which the two largest count; YaRN whose factors cancel but for
    # the scores.
    "deepseek-v3-bf16": (DEEPSEEK_V3 | {
        "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 1024}}, torch.bfloat16, 1),
    # As V2: queries at once; groups whose largest counts; factors of YaRN that differ.
    "deepseek-v2": (DEEPSEEK_V2 | {
        "num_hidden_layers": 2, "rope_theta": 10000.0, "torch_dtype": "float32",
        "rope_scaling": {"type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 1.0, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 1024}}, torch.float32, 1),
    # As GLM 4.7 Flash: new style, layers by list, larger queries than values.
    "glm4-moe-lite-bf16": (GLM4_MOE_LITE | {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, torch.bfloat16, 1),
    # As Mistral 4: queries that grow, here every 16 positions; halves that turn together.
    "mistral4-bf16": (MISTRAL4 | {
        "dtype": "bfloat16", "rope_interleave": False, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}},
        torch.bfloat16, 1),
    # As V3.2, whose indexer takes all of so few positions.
    "deepseek-v32-bf16": ({k: v for k, v in DEEPSEEK_V3.items() if k != "moe_layer_freq"} | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "index_topk": 64, "index_n_heads": 2, "index_head_dim": 32, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, torch.bfloat16, 1),
}

MODELS |= {
    # As Gemma 4 E2B: the last layers have no cache of their own and a wider feed-forward; every
    # layer has embeddings of its own; a quarter of the pairs of full layers turn.
    "gemma4-e-bf16": (GEMMA4 | {
        "num_hidden_layers": 6, "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32, "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 1000000.0,
                   "partial_rotary_factor": 0.25}},
        "dtype": "bfloat16"}, torch.bfloat16, 1),
    # As Gemma 4 26B-A4B: experts beside each feed-forward; full layers have one KV head, and their
    # keys are their values; a folder of a model that also sees, of which this is the text part.
    "gemma4-moe-bf16": (GEMMA4 | {
        "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL],
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
        "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "proportional", "rope_theta": 10000.0,
                   "partial_rotary_factor": 0.5}},
        "dtype": "bfloat16"}, torch.bfloat16, 1),
    # As Qwen3-Next: experts, matrices of a layer's inputs interleaved by key head.
    "qwen3next-bf16": (QWEN3_NEXT | {
        "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16"}, torch.bfloat16, 1),
    # As the text part of a dense Qwen3.5.
    "qwen35-bf16": (QWEN3_5 | {
        "tie_word_embeddings": True, "dtype": "bfloat16", "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
        "layer_types": ["linear_attention", FULL, "linear_attention", "linear_attention"]},
        torch.bfloat16, 1),
    # As a Qwen3.5 with experts and pictures on the hub: the text part inside of another.
    "qwen35moe-bf16": ({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_5_moe_vision"},
        "text_config": QWEN3_5_MOE | {
            "dtype": "bfloat16", "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
                "mrope_interleaved": True, "mrope_section": [2, 1, 1]}}}, torch.bfloat16, 1),
}
MODELS |= {
    # Norms without the mean; a limit that cuts; queries, keys and values in one matrix, and the
    # experts of a layer in three. The base is where transformers looks for it, too.
    "dbrx-bf16": (DBRX | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "dtype": "bfloat16"}, torch.bfloat16, 1),
}
# Families that differ from Llama in few places.
SMALL = LLAMA | {"tie_word_embeddings": False, "dtype": "bfloat16"}
THETA = {"rope_type": "default", "rope_theta": 10000.0}
# As V3.2 and GLM 5 where the context is six times what the indexer selects. With few index queries
# many scores are 0, and transformers chooses among equal scores in no fixed order.
SPARSE = {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 32, "dtype": "bfloat16",
          "rope_parameters": THETA}
MODELS |= {
    # A window in every layer.
    "mistral-bf16": (SMALL | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12,
        "rope_parameters": THETA}, torch.bfloat16, 1),
    # Queries that grow every 16 positions; YaRN whose factors cancel.
    "ministral3-bf16": (SMALL | {
        "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3",
        "head_dim": 32, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}},
        torch.bfloat16, 1),
    # Every fourth layer turns nothing; a tied head.
    "smollm3-bf16": (SMALL | {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 4,
        "tie_word_embeddings": True, "rope_parameters": THETA}, torch.bfloat16, 1),
    # Factors of embeddings, scores, halves of a layer and logits.
    "granite-bf16": (SMALL | {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite",
        "embedding_multiplier": 6.0, "attention_multiplier": 0.15, "residual_multiplier": 0.22,
        "logits_scaling": 0.5, "rope_parameters": THETA}, torch.bfloat16, 1),
    # Norms behind the halves of a layer only, and over all heads.
    "olmo2-bf16": (SMALL | {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rope_parameters": THETA},
        torch.bfloat16, 1),
    # The same with windows; only full layers are stretched.
    "olmo3-bf16": (SMALL | {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 4,
        "sliding_window": 12, "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "rope_parameters": {SLIDING: THETA, FULL: {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.2, "original_max_position_embeddings": 16}}},
        torch.bfloat16, 1),
    # Joined matrices, a window, three quarters of each head turn.
    "phi3-bf16": (SMALL | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_attention_heads": 2,
        "num_key_value_heads": 1, "sliding_window": 12, "original_max_position_embeddings": 256,
        "rope_parameters": THETA | {"partial_rotary_factor": 0.75}}, torch.bfloat16, 1),
    # Soft caps of scores and logits; every second layer has a window.
    "gemma2-bf16": (GEMMA3 | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 2,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0, "dtype": "bfloat16",
        "rope_parameters": THETA}, torch.bfloat16, 1),
    # As Gemma 4 12B: without embeddings of the layers.
    "gemma4-unified-bf16": ({k: v for k, v in GEMMA4.items() if "per_layer" not in k} | {
        "architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text",
        "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL],
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision", "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "proportional", "rope_theta": 10000.0,
                   "partial_rotary_factor": 0.5}},
        "dtype": "bfloat16"}, torch.bfloat16, 1),
    "deepseek-v32-sparse-bf16": ({k: v for k, v in DEEPSEEK_V3.items() if k != "moe_layer_freq"} | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "num_hidden_layers": 2} | SPARSE, torch.bfloat16, 1),
    # Layers that use the selection of the layer before; the indexer turns neighbours.
    "glm-dsa-sparse-bf16": (LATENT | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "q_lora_rank": 32,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"]} | SPARSE, torch.bfloat16, 1),
}
# Short convolutions over four positions, which reach into the page before, and attention.
LFM2 = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "norm_eps": 1e-5, "conv_L_cache": 4, "conv_bias": False,
    "layer_types": ["conv", FULL, "conv", "conv"], "rope_parameters": THETA, "dtype": "bfloat16",
}
MODELS |= {
    # The width of the feed-forward before its adjustment: 128 are computed.
    "lfm2-bf16": (LFM2 | {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "intermediate_size": 180,
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0, "tie_word_embeddings": True}, torch.bfloat16, 1),
    "lfm2moe-bf16": (LFM2 | {
        "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe",
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 6,
        "num_experts_per_tok": 3, "num_dense_layers": 1, "norm_topk_prob": True,
        "use_expert_bias": True, "routed_scaling_factor": 1.0, "tie_word_embeddings": True},
        torch.bfloat16, 1),
    # Mamba 2 and attention, with a feed-forward, with experts, and alone.
    "nemotron-h-bf16": ({
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hidden_size": 64, "intermediate_size": 128, "hybrid_override_pattern": "M-M*EME",
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "attention_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2",
        "ssm_state_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "conv_kernel": 4, "chunk_size": 64, "use_conv_bias": True, "use_bias": False,
        "mamba_hidden_act": "silu", "mamba_proj_bias": False, "time_step_min": 1e-9,
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16"},
        torch.bfloat16, 1),
    # The text part of a model with pictures; experts are stacked, inputs by outputs.
    "qwen3vlmoe-bf16": ({
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_vl_moe"},
        "text_config": {k: v for k, v in QWEN3_MOE.items() if "sliding" not in k} | {
            "model_type": "qwen3_vl_moe_text", "tie_word_embeddings": False,
            "num_hidden_layers": 2, "mlp_only_layers": [],
            "decoder_sparse_step": 1, "dtype": "bfloat16", "rope_parameters": {
                "rope_type": "default", "rope_theta": 5000000.0, "mrope_interleaved": True,
                "mrope_section": [6, 5, 5]}}}, torch.bfloat16, 1),
}
MODELS |= {
    # Three residual streams; rows of the last layer attend to eight pools of four positions.
    "qwen4-bf16": (DELTA_NET | {
        "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text",
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "hc_count": 3, "hc_lowrank": 16,
        "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 32,
        "indexer_budget": 32, "indexer_compress_ratio": 4, "tie_word_embeddings": False,
        "dtype": "bfloat16", "rope_parameters": THETA | {"partial_rotary_factor": 0.25}},
        torch.bfloat16, 1),
}
# Kimi delta attention over three pages, latent attention without rotation, experts.
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 6,
    "num_experts_per_token": 3, "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.4, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "model_max_length": 256, "dtype": "bfloat16",
    "linear_attn_config": {
        "head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4, "full_attn_layers": [3],
        "kda_layers": [1, 2, 4]},
}
# As MiniMax M3 in contexts of which its indexer chooses all.
MINIMAX_M3 = {
    "model_type": "minimax_m3_vl_text", "hidden_size": 64, "intermediate_size": 32,
    "dense_intermediate_size": 96, "shared_intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16,
    "num_local_experts": 6, "num_experts_per_tok": 3, "routed_scaling_factor": 2.0,
    "rms_norm_eps": 1e-6, "swiglu_limit": 1.5, "tie_word_embeddings": False,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2, "index_head_dim": 32,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_block_size": 16, "index_topk_blocks": 16, "index_local_blocks": 1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
    "dtype": "bfloat16",
}
MODELS |= {
    "kimi-linear-bf16": (KIMI_LINEAR, torch.bfloat16, 1),
    "minimax-m3-bf16": ({
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl", "tie_word_embeddings": False, "vision_config": {},
        "text_config": MINIMAX_M3}, torch.bfloat16, 1),
}
MODELS |= {
    # As Gemma 3n: three streams, cut gates in two layers, the last two without a cache, fewer
    # embeddings of the layers than tokens.
    "gemma3n-bf16": ({k: v for k, v in GEMMA4.items() if "global" not in k} | {
        "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text",
        "num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING],
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "altup_num_inputs": 3,
        "intermediate_size": [160, 160, 160, 320, 320], "laurel_rank": 16, "head_dim": 32,
        "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCABULARY - 40, "final_logit_softcapping": 20.0,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "default", "rope_theta": 1000000.0}},
        "dtype": "bfloat16"}, torch.bfloat16, 1),
    # As MiniMax M3 where the context is five times what its indexer chooses: blocks of four.
    "minimax-m3-blocks-bf16": ({
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl", "tie_word_embeddings": False, "vision_config": {},
        "text_config": MINIMAX_M3 | {"index_block_size": 4, "index_topk_blocks": 2}},
        torch.bfloat16, 1),
}
# As DeepSeek V4: a window, keys of four positions that an indexer chooses, keys of 32 of which rows see all.
DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 64,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "q_lora_rank": 32, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 32,
    "moe_intermediate_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "num_hash_layers": 2, "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5, "swiglu_limit": 1.5, "sliding_window": 24,
    "compress_ratios": [0, 4, 128, 4, 128], "compress_rate_hca": 32, "index_n_heads": 8,
    "index_head_dim": 32, "index_topk": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1},
    "dtype": "bfloat16",
}
MODELS |= {"deepseek-v4-bf16": (DEEPSEEK_V4, torch.bfloat16, 1)}
# As GLM 5.3 Flash: three streams, delta nets with a bound of decays, clamped gates; rows attend to
# eight pools of four positions, those of the last layer to the pools of the one before.
GLM5_NEXT = {k: v for k, v in LATENT.items() if k != "num_hidden_layers"} | {
    "model_type": "glm5_next_text", "num_hidden_layers": 5, "q_lora_rank": 32,
    "qk_rope_head_dim": 0, "n_routed_experts": 6, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.8, "swiglu_limit": 1.5,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    "layer_types": ["linear_attention", "indexed_attention"] * 2 + ["indexed_attention"],
    "indexer_types": ["full", "full", "full", "full", "shared"], "index_topk": 32,
    "index_kpool": 4, "index_n_heads": 16, "index_head_dim": 32, "linear_head_dim": 32,
    "linear_num_heads": 2, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
    "hc_mult": 3, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "dtype": "bfloat16",
}
MODELS |= {
    "glm5-next-bf16": ({
        "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next",
        "tie_word_embeddings": False, "vision_config": {}, "text_config": GLM5_NEXT},
        torch.bfloat16, 1),
}
MODELS |= {
    # Two layers read embeddings of n-grams of two and three tokens, in tables of three parts.
    "qwen4-ngrams-bf16": (MODELS["qwen4-bf16"][0] | {
        "ple_layer_ids": [1, 3], "ple_embed_dim": 96, "ple_conv_kernel_size": 4, "ngram_size": 3,
        "heads_per_ngram": 3, "ngram_vocab_size_base": 97, "split_ngram_parts": 3,
        "make_ngram_vocab_size_divisible_by": 16}, torch.bfloat16, 1),
}
# Folders whose configuration and weights have the text part in a place of its own.
WITH_PICTURES = ["gemma4-moe-bf16"]

# Training text of the tokenizer; ours, and only its letter pairs matter.
CORPUS = [
    "A paceline is a line of riders who take turns at the front.",
    "They go faster together than any of them could alone, and the one in front rests later.",
    "The answer never depends on how many machines computed it.",
    "Each rider watches the wheel ahead; the wind is the thing that they share.",
]
TEXTS = [
    "", " ", "The riders rest.", "at the front\n\tof the line  ", "naïve café — 日本語 🚴",
    "<bos>The<eos>", "12345 + 67 = 12412",
]


def tokenizer():
    """A byte-level BPE of VOCABULARY entries: three special ones, 256 bytes, the rest merges."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>", "<bos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tok


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
    "pad_token": "<pad>", "clean_up_tokenization_spaces": False, "model_max_length": 256,
    "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
                     "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
                     "{% endif %}",
}
CHAT = [
    {"role": "user", "content": "Who rides in front?"},
    {"role": "assistant", "content": "The one before you."},
    {"role": "user", "content": "And then?"},
]


def draw(model, rng):
    """Random weights in place: sizes that keep scores and logits well away from flat."""
    gemma = model.config.model_type.startswith("gemma")
    gemma4 = model.config.model_type.startswith(("gemma4", "gemma3n"))  # which stores its norms' weights as they are
    # Weights of norms are stored less one.
    delta = model.config.model_type in (*DELTA_NETS, "minimax_m3_vl_text")
    for name, weight in sorted(model.state_dict().items()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".ple_embedding." in name and not weight.is_floating_point():
            continue  # hashes
        values = rng.standard_normal(tuple(weight.shape), dtype=np.float32)
        if name.endswith("tid2eid"):  # as many experts of each token as it uses, all different
            values = np.argsort(rng.random((len(weight), model.config.n_routed_experts)))[:, :weight.shape[1]]
        elif "hc" in name and name.endswith("scale"):
            values = 0.3 * values + 1.0
        elif name.endswith("dt_bias"):
            values = 0.5 * values - 4.0  # states that outlast a chunk
        elif name.endswith("_hc.scale"):
            values = 0.3 * values + 1.0
        elif "conv1d" in name or name.endswith(("A_log", "conv.conv.weight")):
            values *= 0.5
        elif "norm" in name.replace("norm_attn_norm", ""):
            # Gemma 3 and delta nets store the weight less one.
            is_last = name == "model.norm.weight"
            less_one = gemma and (not gemma4 or is_last) or delta and "linear_attn" not in name
            values = 0.3 * values + (0.0 if less_one else 1.0)
            # Gemma's rows are small (below), which its output norm makes up for, as in trained
            # models; of both signs, or the tied head would say the last token again.
            values *= 12.0 if gemma and is_last else 1.0
        elif name.endswith("bias"):
            values *= 0.5 if "expert_bias" not in name else 0.2
        elif name.endswith("sinks"):
            pass  # among the scores
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            values = 0.2 * values + (0.9 if name.endswith("layer_scalar") else 1.5)
        elif "embed" in name or "lm_head" in name or "wte" in name:
            # Gemma multiplies by sqrt(width) and adds normed outputs: larger rows would drown
            # the layers.
            values *= 0.12 if gemma else 0.35
        else:
            values *= 0.2
        weight.copy_(torch.from_numpy(values))


def write_folder(folder, config, dtype, shards, seed):
    """One model folder as the hub would hold it."""
    folder.mkdir(parents=True, exist_ok=True)
    usual = {
        "vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": PAD,
        "eos_token_id": EOS, "bos_token_id": BOS}
    if "text_config" in config:
        config = config | {"text_config": config["text_config"] | usual}
    else:
        config = config | usual
    outer = config
    if folder.name in WITH_PICTURES:
        outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
        outer |= {"text_config": config, "vision_config": {"model_type": "gemma4_vision"}}
    (folder / "config.json").write_text(json.dumps(outer, indent=2) + "\n")
    model = from_config(plain_config(folder))
    draw(model, np.random.default_rng(seed))
    state = {n: w.detach().to(dtype if w.is_floating_point() else w.dtype).contiguous()
             for n, w in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    if "quantization_config" in config:
        state = dict(part for n, w in state.items() for part in in_mxfp4(n, w, seed))
    elif config["model_type"] in ON_THE_HUB:
        named = ON_THE_HUB[config["model_type"]]
        state = dict(part for n, w in state.items() for part in named(n, w))
    elif "text_config" in config:
        turn = config["model_type"] == "qwen3_vl_moe"
        state = {n.replace("model.", TEXT_PART, 1): w.mT.contiguous()
                 if turn and ".experts." in n else w for n, w in state.items()}
    elif config["model_type"] not in ("gpt_oss", "mistral4", "gemma4_text", "dbrx"):
        # Experts of the others are joined on the hub too.
        parts = (as_on_the_hub(name, weight, config["model_type"]) for name, weight in state.items())
        state = dict(part for named in parts for part in named)
    if folder.name in WITH_PICTURES:
        state = {n.replace("model.", "model.language_model.", 1): w for n, w in state.items()}
    write_weights(folder, state, shards)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")


# Where the weights of the text part are in models with pictures.
TEXT_PART = "model.language_model."


def plain_config(folder):
    """The configuration of a folder's text part, without a word on how its weights are stored."""
    if folder.name in WITH_PICTURES:
        config = json.loads((folder / "config.json").read_text())["text_config"]
        return AutoConfig.for_model(**config)
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "text_config", config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


class TextPart(torch.nn.Module):
    """A causal model of a text part that transformers has no class for."""

    def __init__(self, config, **named):
        super().__init__()
        self.config = config
        self.model = AutoModel.from_config(config, **named)
        self.lm_head = torch.nn.Linear(
            config.hidden_size, config.vocab_size, bias=False, dtype=self.model.dtype)

    def forward(self, ids, use_cache):
        out = self.model(ids, use_cache=use_cache)
        return types.SimpleNamespace(logits=self.lm_head(out.last_hidden_state))


def from_config(config, **named):
    if config.model_type in ("qwen3_vl_moe_text", "glm5_next_text"):
        return TextPart(config, **named)
    return AutoModelForCausalLM.from_config(config, **named)


def in_mxfp4(name, weight, seed):
    """A stack of experts of gpt-oss, (experts, inputs, outputs), drawn anew in blocks of MXFP4."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        yield name, weight
        return
    experts, inputs, outputs = weight.shape
    rng = np.random.default_rng([seed, 2, *name.encode()])
    shape = (experts, outputs, inputs // 32)
    blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
    yield f"{name}_blocks", torch.from_numpy(blocks)
    yield f"{name}_scales", torch.from_numpy(rng.integers(122, 125, shape, dtype=np.uint8))


def from_mxfp4(folder, dtype):
    """A model of a folder in MXFP4, which transformers itself reads on GPUs only."""
    state = load_file(folder / "model.safetensors")
    for name in [n for n in state if n.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        state[stem] = convert_moe_packed_tensors(
            state.pop(name), state.pop(f"{stem}_scales"), dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(
        plain_config(folder), dtype=dtype, attn_implementation="eager",
        experts_implementation="eager")
    model.load_state_dict(state)
    return model


def as_on_the_hub(name, weight, kind):
    """The experts of a layer, which transformers 5 joins, one by one under the names of the hub."""
    mixtral = kind in ("mixtral", "minimax_m2")
    if kind in ("kimi_linear", "glm5_next") and "conv1d" in name:
        for part, rows in zip("qkv", weight.chunk(3)):
            yield name.replace("conv1d", f"{part}_conv1d"), rows.clone()
        return
    if kind == "kimi_linear":
        name = name.replace("forget_gate.", "")
        is_dense = "mlp." in name and name.split("mlp.")[1].startswith(("gate_p", "up", "down"))
        mixtral = not is_dense
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        weight = weight.float()
    if kind == "deepseek_v4":
        for part, rows in deepseek_v4_on_the_hub(name, weight):
            yield part, rows
        return
    if kind == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
        split = ".experts." in name
        stem, part = name.rsplit(".", 1)
        for expert, matrix in enumerate(weight if split else [weight]):
            yield (f"{stem}.{expert}.{part}.weight" if split else name), matrix.clone()
        return
    if name.endswith("ngram_embedding.weight"):
        for part, rows in enumerate(weight.chunk(3)):
            yield name.replace(".weight", f".shard_{part}.weight"), rows.clone()
        return
    if ".experts." not in name:
        yield (name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name), weight
        return
    stem = name.rsplit(".", 1)[0].replace(".mlp.", ".block_sparse_moe." if mixtral else ".mlp.")
    short = mixtral or kind == "lfm2_moe"
    names = ("w1", "w3", "w2") if short else ("gate_proj", "up_proj", "down_proj")
    for expert, matrix in enumerate(weight):
        joined = name.endswith("gate_up_proj")
        parts = zip(names[:2], matrix.chunk(2)) if joined else [(names[2], matrix)]
        for part, rows in parts:
            yield f"{stem}.{expert}.{part}.weight", rows.clone()


def deepseek_v4_on_the_hub(name, weight):
    """The parts of a weight of DeepSeek V4 under the names of the hub."""
    name = name.removeprefix("model.")
    names = [
        ("embed_tokens", "embed"), ("lm_head", "head"), ("hc_head.hc", "hc_head"), ("attn_hc.", "hc_attn_"),
        ("ffn_hc.", "hc_ffn_"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.compressor.indexer", "attn.indexer"), ("self_attn", "attn"), ("mlp.", "ffn."), ("scorer.", ""),
        ("sinks", "attn_sink"), ("position_bias", "ape"), ("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"),
        ("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"), ("q_a_norm", "q_norm"), ("gate.e_score_correction_bias", "gate.bias")]
    for own, other in names:
        name = name.replace(own, other)
    if ".experts." in name:
        stem = name.rsplit(".", 1)[0]
        for expert, matrix in enumerate(weight):
            parts = zip(("w1", "w3"), matrix.chunk(2)) if name.endswith("gate_up_proj") else [("w2", matrix)]
            for part, rows in parts:
                yield f"{stem}.{expert}.{part}.weight", rows.clone()
        return
    for own, other in zip(("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3")):
        name = name.replace(f"shared_experts.{own}", f"shared_experts.{other}")
    if "attn." in name:
        name = name.replace("gate_proj", "wgate").replace("kv_proj", "wkv")
        if "indexer" in name and "wq_b" not in name and "weights_proj" not in name:
            name = name.replace("indexer.", "indexer.compressor.")
        if "compressor" in name:
            name = name.replace("kv_norm", "norm")
    yield name, weight


def minimax_m3_on_the_hub(name, weight):
    """The parts of a weight of MiniMax M3 under the names of the hub, in the order of its rows."""
    name = name.replace(".mlp.gate.e_score", ".block_sparse_moe.e_score")
    for part in ["experts", "gate", "shared_experts"]:
        name = name.replace(f".mlp.{part}.", f".block_sparse_moe.{part}.")
    name = "language_model." + name.replace("indexer.", "index_")
    if ".experts." in name:
        stem = name.rsplit(".", 1)[0]
        for expert, matrix in enumerate(weight):
            both = name.endswith("gate_up_proj")
            parts = zip(("w1", "w3"), matrix.chunk(2)) if both else [("w2", matrix)]
            for part, rows in parts:
                yield f"{stem}.{expert}.{part}.weight", rows.clone()
    elif name.endswith("gate_up_proj.weight"):
        for part, rows in zip(("gate_proj", "up_proj"), weight.chunk(2)):
            yield name.replace("gate_up_proj", part), rows.clone()
    else:
        yield name, weight.float() if name.endswith("e_score_correction_bias") else weight


def glm5_next_on_the_hub(name, weight):
    """The parts of a weight of GLM 5.3 under the names of the hub, in the order of its rows."""
    name = name.replace("model.", TEXT_PART, 1).replace("forget_gate.", "")
    for half in ("attn", "ffn"):
        name = name.replace(f".{half}_hc.", f".hc_{half}_")
    yield from as_on_the_hub(name, weight, "glm5_next")


ON_THE_HUB = {"minimax_m3_vl": minimax_m3_on_the_hub, "glm5_next": glm5_next_on_the_hub}


def write_weights(folder, state, shards):
    """model.safetensors, or that many shards (dealt out in turn) and their index."""
    if shards == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return
    names, where = sorted(state), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {n: state[n] for n in names[shard::shards]}
        where |= dict.fromkeys(part, file)
        save_file(part, folder / file, {"format": "pt"})
    size = sum(w.numel() * w.element_size() for w in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def half_kv(module, query, key, value, attention_mask, scaling, softcap=None, block_indices=None, **_):
    """Eager attention with keys and values rounded to half precision, as our KV cache holds them."""
    if block_indices is not None:
        positions = torch.arange(query.shape[2]).unsqueeze(0)
        attention_mask = module.indexer.build_block_mask(
            block_indices, attention_mask, key.shape[2], query.dtype, query.device, positions)
    key, value = (x.half().to(query.dtype) for x in (key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask[..., : key.shape[2]]
    if hasattr(module, "sinks"):
        sinks = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (scores @ value).transpose(1, 2).contiguous(), None
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def half_latent(attention):
    """Rounds latent numbers and rotated keys to half precision: they are what our cache holds."""
    expand = attention.expand_kv
    attention.expand_kv = lambda *parts: expand(*(x.half().to(x.dtype) for x in parts))
    indexer = getattr(attention, "indexer", None)
    if indexer is not None and not hasattr(indexer, "index_kpool"):  # whose keys stay in f32
        half_index(indexer)


def half_index(indexer):
    """Rounds index keys to half precision: those that turn after the rotation."""
    module = sys.modules[type(indexer).__module__]
    glm = "Glm" in type(indexer).__name__
    name = "apply_rotary_pos_emb_interleave" if glm else "apply_rotary_pos_emb"
    forward, norm, turned = indexer.forward, indexer.k_norm.forward, indexer.qk_rope_head_dim

    def half(x):
        return x.half().to(x.dtype)

    def normed(x):
        x = norm(x)
        return torch.cat([x[..., :turned], half(x[..., turned:])], -1)

    def run(*arguments, **named):
        rotate = getattr(module, name)

        def rounded(q, k, *rest, **others):
            q, k = rotate(q, k, *rest, **others)
            return q, half(k)

        setattr(module, name, rounded)
        try:
            return forward(*arguments, **named)
        finally:
            setattr(module, name, rotate)

    indexer.k_norm.forward, indexer.forward = normed, run


# Which has no entry of its own: its files on the hub are of a model for images too.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
AttentionInterface.register("half_kv", half_kv)
AttentionMaskInterface.register("half_kv", eager_mask)


def load(folder, attention="eager", dtype=torch.float32):
    stated = json.loads((folder / "config.json").read_text())
    if "text_config" in stated:
        model = from_config(
            plain_config(folder), dtype=dtype, experts_implementation="eager",
            attn_implementation="eager" if "kv_lora_rank" in stated["text_config"] else attention)
        state = load_file(folder / "model.safetensors")
        if stated["model_type"] in ON_THE_HUB:
            on_the_hub = ON_THE_HUB[stated["model_type"]]
            named = {part: n for n, w in model.state_dict().items()
                     for part, _ in on_the_hub(n, w)}
            parts = {}
            for part, name in named.items():
                parts.setdefault(name, []).append(state[part])
            whole = model.state_dict()
            model.load_state_dict({n: torch.cat([w.reshape(-1) for w in ws]).reshape(whole[n].shape)
                                   for n, ws in parts.items()})
            if attention == "half_kv":
                for layer in model.model.layers:
                    if hasattr(layer.self_attn, "expand_kv"):
                        half_latent(layer.self_attn)
            return model.eval()
        turn = stated["model_type"] == "qwen3_vl_moe"
        model.load_state_dict({n.replace(TEXT_PART, "model."): w.mT
                               if turn and ".experts." in n else w for n, w in state.items()})
        return model.eval()
    if "quantization_config" in stated:
        model = from_mxfp4(folder, dtype)
        model.set_attn_implementation(attention)
        return model.eval()
    latent = "kv_lora_rank" in json.loads((folder / "config.json").read_text())
    if latent and attention == "half_kv":
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "expand_kv"):
                half_latent(layer.self_attn)
        return model.eval()
    if folder.name in WITH_PICTURES:
        state = load_file(folder / "model.safetensors")
        state = {n.replace("language_model.", "", 1): w for n, w in state.items()}
        model = AutoModelForCausalLM.from_config(
            plain_config(folder), dtype=dtype, attn_implementation=attention,
            experts_implementation="eager")
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
        model.tie_weights()
        return model.eval()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation="eager")
    return model.eval()


def recurrent_rule(query, key, value, g, beta, **_):
    """The gated delta rule one position after the other, in the type of its arguments, or in
    float64 where that is float64: transformers computes it in float32 whatever it is given."""
    def norm(x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    repeats = value.shape[2] // key.shape[2]
    query = (norm(query) / query.shape[-1] ** 0.5).repeat_interleave(repeats, 2)
    key = norm(key).repeat_interleave(repeats, 2)
    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    out = torch.zeros_like(value)
    for t in range(value.shape[1]):
        k, b = key[:, t].unsqueeze(-1), beta[:, t].unsqueeze(-1)
        state = state * g[:, t].to(value.dtype).exp()[..., None, None]
        delta = (value[:, t] - (state * k).sum(-2)) * b
        state = state + k * delta.unsqueeze(-2)
        out[:, t] = (state * query[:, t].unsqueeze(-1)).sum(-2)
    return out, None


def with_rule(rule, run):
    """What `run` gives when all delta nets of transformers compute with `rule`."""
    modules = [modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen4_exp]
    before = [m.torch_chunk_gated_delta_rule for m in modules]
    for module in modules:
        module.torch_chunk_gated_delta_rule = rule
    result = run()
    for module, chunked in zip(modules, before):
        module.torch_chunk_gated_delta_rule = chunked
    return result


def greedy(model, prompt):
    """GREEDY next ids, each from a whole pass, and the gap of first to second logit at each."""
    ids, gaps = list(prompt), []
    for _ in range(GREEDY):
        top = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        ids.append(int(top.indices[0]))
        gaps.append(round(float(top.values[0] - top.values[1]), 5))
    return ids[len(prompt):], gaps


def choose_prompt(model, folder, seed):
    """The first drawn prompt whose greedy continuation is decided by at least GREEDY_GAP, and at
    which rounded keys and values turn no router to another expert."""
    rng = np.random.default_rng([seed, 1])
    has_pages = model.config.model_type in DELTA_NETS or folder.name.endswith("sparse-bf16")
    has_pages = has_pages or model.config.model_type.startswith(("lfm2", "nemotron", "kimi", "deepseek_v4", "glm5"))
    length = PAGES_PROMPT if has_pages else PROMPT
    for _ in range(200):
        prompt = [BOS, *rng.integers(3, VOCABULARY, length - 1).tolist()]
        if getattr(model.config, "ple_layer_ids", None):
            prompt[70] = EOS  # which n-grams do not pass
        ids, gaps = greedy(model, prompt)
        if min(gaps) < GREEDY_GAP or len(set(ids)) <= GREEDY // 2:
            continue
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
        if deviation(logits, folder, prompt, attention="half_kv") < 0.1 * float(logits.std()):
            return prompt, ids, gaps
    sys.exit("no prompt with a decided continuation")


def trace(model, prompt):
    """Logits and hidden states of every position: see the head of this file for the names."""
    stream = []
    is_dbrx = model.config.model_type == "dbrx"
    layers = model.transformer.blocks if is_dbrx else model.model.layers
    inner = model.transformer if is_dbrx else model.model
    norm = next(getattr(inner, name)
                for name in ("norm", "norm_f", "embedding_norm", "hyper_connection_mixer")
                if hasattr(inner, name))
    hooks = [layer.register_forward_hook(
        lambda _, args, out: stream.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers]
    hooks.append(layers[0].register_forward_pre_hook(
        lambda _, args: stream.append(args[0])))
    hooks.append(norm.register_forward_hook(
        lambda _, args, out: stream.append(out)))
    logits = model(torch.tensor([prompt]), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    if model.config.model_type == "nemotron_h":
        # A feed-forward is a block of its own there, and the second half of a layer here.
        halves = [kind in ("mlp", "moe") for kind in model.config.layers_block_type]
        stream = [h for h, half in zip(stream, [*halves, False, False]) if not half]
    if model.config.model_type == "gemma3n_text":  # streams come first there
        stream = [*(h.permute(1, 2, 0, 3) for h in stream[:-1]), stream[-1]]
    # Of several streams the first positions, beyond two pages, so that a file stays below 1 MiB.
    tensors = {f"hidden.{i}": h[0] if h.dim() == 3 else h[0, :130] for i, h in enumerate(stream[:-1])}
    return {"logits": logits[0], "final": stream[-1][0]} | tensors


def deviation(logits, folder, prompt, **load_arguments):
    """Largest difference of any logit when the model is run another way."""
    other = load(folder, **load_arguments)(torch.tensor([prompt]), use_cache=False).logits[0]
    return float((other.double() - logits.double()).abs().max())


def tokenizer_golden(folder):
    tok = PreTrainedTokenizerFast.from_pretrained(folder)
    chat = tok.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return {
        "made_by": "scripts/golden/hf_tiny.py",
        "versions": {p: version(p) for p in ("tokenizers", "transformers")},
        "texts": [{"text": t, "ids": tok.encode(t),
                   "ids_plain": tok.encode(t, add_special_tokens=False),
                   "decoded": tok.decode(tok.encode(t, add_special_tokens=False))}
                  for t in TEXTS],
        "chat": {"messages": CHAT, "text": chat,
                 "ids": tok.encode(chat, add_special_tokens=False)},
    }


def recurrent(model, prompt, tensors, out, name):
    """Adds "logits.recurrent", those of the recurrent form, to the golden file; how far they are
    from those of the chunked one."""
    def logits():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].float().contiguous()

    tensors["logits.recurrent"] = with_rule(transformers_recurrent, logits)
    save_file(tensors, out / f"{name}.golden.safetensors")
    return float((tensors["logits.recurrent"] - tensors["logits"]).abs().max())


def transformers_recurrent(*arguments, **named):
    return modeling_qwen3_next.torch_recurrent_gated_delta_rule(*arguments, **named)


def make(out, name, seed):
    config, dtype, shards = MODELS[name]
    folder = out / name
    write_folder(folder, config, dtype, shards, seed)
    model = load(folder)
    prompt, ids, gaps = choose_prompt(model, folder, seed)
    if name.startswith("glm5"):  # rounding turns scores of pools: only what is decided by far
        decided = next((i for i, gap in enumerate(gaps) if gap < 4 * GREEDY_GAP), GREEDY)
        ids, gaps = ids[:decided], gaps[:decided]
    tensors = {n: t.float().contiguous() for n, t in trace(model, prompt).items()}
    save_file(tensors, out / f"{name}.golden.safetensors")
    logits = tensors["logits"]
    golden = {
        "made_by": "scripts/golden/hf_tiny.py",
        "versions": {p: version(p) for p in ("torch", "transformers", "numpy", "safetensors")},
        "prompt": prompt, "greedy": ids, "greedy_gaps": gaps,
        "logit_std": float(logits.std()),
        "max_abs_diff": {
            "f64_matmul": with_rule(recurrent_rule, lambda: deviation(
                logits, folder, prompt, dtype=torch.float64)),
            "kv_f16": deviation(logits, folder, prompt, attention="half_kv"),
        },
    }
    if model.config.model_type in DELTA_NETS:
        golden["max_abs_diff"]["recurrent"] = recurrent(model, prompt, tensors, out, name)
    (out / f"{name}.golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{name}: std {golden['logit_std']:.2f}, {golden['max_abs_diff']}, gap {min(gaps)}")


@torch.no_grad()
def main():
    if sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/hf"
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    wanted = sys.argv[2:] or list(MODELS)
    for number, name in enumerate(MODELS):
        if name in wanted:
            make(out, name, 20261121 + number)
    golden = json.dumps(tokenizer_golden(out / "llama-tied"), indent=1, ensure_ascii=False)
    (out / "tokenizer.golden.json").write_text(golden + "\n")


if __name__ == "__main__":
    main()
