#!/usr/bin/env python3
"""The tiny models of mtp_tiny.py as GGUF files: mtp_gguf.py [OUT]

OUT defaults to tests-data/golden/hf. For each folder NAME-mtp there, it writes OUT/NAME-mtp.gguf
with the layer of multi-token prediction as llama.cpp's converters write it: the last block, and
`nextn` tensors.

Names are those of the package gguf; changes of values follow conversion/*.py of llama.cpp.
Needs gguf, numpy, torch, safetensors.
"""

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[2] / "tests-data/golden/hf"
ARCHITECTURES = {"deepseek-v3-bf16": "deepseek2", "glm4moe-bf16": "glm4moe",
                 "qwen3next-bf16": "qwen3next"}
QWEN = {"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm", "mtp.norm": "shared_head.norm"}


def usual(c, blocks):
    head = c.get("head_dim", 0)
    return {
        "block_count": blocks, "nextn_predict_layers": 1, "vocab_size": c["vocab_size"],
        "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": head, "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "expert_count": c.get("n_routed_experts") or c.get("num_experts"),
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "rope.freq_base": c["rope_theta"]}


def sigmoid_router(c):
    return {"leading_dense_block_count": c["first_k_dense_replace"],
            "expert_shared_count": c["n_shared_experts"],
            "expert_weights_scale": c["routed_scaling_factor"],
            "expert_weights_norm": c["norm_topk_prob"], "expert_gating_func": 2}


def deepseek2(c):
    latent, turned = c["kv_lora_rank"], c["qk_rope_head_dim"]
    scaling = c["rope_scaling"]
    return sigmoid_router(c) | {
        "attention.q_lora_rank": c["q_lora_rank"], "attention.kv_lora_rank": latent,
        "attention.head_count_kv": 1, "attention.key_length": latent + turned,
        "attention.value_length": latent, "attention.value_length_mla": c["v_head_dim"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + turned,
        "rope.dimension_count": turned, "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        "expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]}


def glm4moe(c):
    return sigmoid_router(c) | {
        "rope.dimension_count": int(c["head_dim"] * c["partial_rotary_factor"])}


def qwen3next(c):
    values = c["linear_num_value_heads"]
    return {
        "rope.dimension_count": int(c["head_dim"] * c["partial_rotary_factor"]),
        "full_attention_interval": c["full_attention_interval"],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"], "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"], "ssm.time_step_rank": values,
        "ssm.inner_size": values * c["linear_value_head_dim"],
        "expert_shared_feed_forward_length": c["shared_expert_intermediate_size"]}


KEYS = {"deepseek2": deepseek2, "glm4moe": glm4moe, "qwen3next": qwen3next}


def renamed(tensors, last):
    """Qwen's names of the layer as the other families have them."""
    out = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in QWEN:
            name = f"model.layers.{last}.{QWEN[stem]}.{kind}"
        out[name.replace("mtp.layers.0.", f"model.layers.{last}.")] = value
    return out


def stacked(tensors):
    """The matrices of a layer's experts as one."""
    out, experts = {}, {}
    for name, value in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name)
        if found:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = value
        else:
            out[name] = value
    stack = {name: torch.stack([of[i] for i in range(len(of))]) for name, of in experts.items()}
    return out | stack


def changed(name, value, c):
    """A tensor as the converter of its family writes it, with its name: one or two."""
    if name.endswith("kv_b_proj.weight"):
        plain, heads = c["qk_nope_head_dim"], c["num_attention_heads"]
        k, v = value.view(heads, -1, c["kv_lora_rank"]).split([plain, c["v_head_dim"]], dim=1)
        return [(name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2)),
                (name.replace("kv_b_proj", "v_b_proj"), v)]
    if c["model_type"] == "qwen3_next":
        if name.endswith("A_log"):
            value = -torch.exp(value.float())
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif "conv1d" in name:
            value = value.squeeze(1)
        elif name.endswith("shared_expert_gate.weight"):
            value = value.squeeze(0)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value.float() + 1
    if name.endswith("e_score_correction_bias"):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return [(name, value)]


def names(architecture, blocks):
    """The package's names; of `nextn` also where its list of the architecture lacks them."""
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(by_name[architecture], blocks)
    parts = {"eh_proj": "NEXTN_EH_PROJ", "enorm": "NEXTN_ENORM", "hnorm": "NEXTN_HNORM",
             "shared_head.norm": "NEXTN_SHARED_HEAD_NORM"}

    def of(name):
        for part, key in parts.items():
            if name == f"model.layers.{blocks - 1}.{part}.weight":
                stem = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[key]]
                return stem.format(bid=blocks - 1) + ".weight"
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        return found or sys.exit(f"{architecture}: no name for {name}")
    return of


def write(name, out):
    source = GOLDEN / f"{name}-mtp"
    c, architecture = json.loads((source / "config.json").read_text()), ARCHITECTURES[name]
    last = c["num_hidden_layers"]
    writer = gguf.GGUFWriter(out / f"{name}-mtp.gguf", architecture)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            str: writer.add_string}
    for key, value in (usual(c, last + 1) | KEYS[architecture](c)).items():
        adds[type(value)](f"{architecture}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(c["vocab_size"])])
    of = names(architecture, last + 1)
    for key, value in stacked(renamed(load_file(source / "model.safetensors"), last)).items():
        for key, value in changed(key, value, c):
            value = value.contiguous()
            if value.dtype == torch.bfloat16 and value.dim() > 1:
                raw = value.view(torch.int16).numpy().view(np.uint8)
                writer.add_tensor(of(key), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(of(key), value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    out.mkdir(parents=True, exist_ok=True)
    for name in ARCHITECTURES:
        write(name, out)


if __name__ == "__main__":
    main()
